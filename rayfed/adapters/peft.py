"""The shared LoRA in PEFT's own file format, for use without rayfed's method classes."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from rayfed.adapters.lora import AdaptedLinear, LoRABranch
from rayfed.adapters.scope import Scope

PREFIX = "base_model.model."


def to_peft(backbone: nn.Module, name: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Return tensors and ``adapter_config.json`` of the shared branches in ``backbone``; None where there are none.

    They fit ``rayfed.backbones.load_backbone(name)``, whose attention is split into linear layers:
    ``PeftModel.from_pretrained(load_backbone(name), folder)``.
    """
    found = [(path, branch) for path, branch in _shared_branches(backbone)]
    if not found:
        return None
    tensors = {}
    for path, branch in found:
        tensors[f"{PREFIX}{path}.lora_A.weight"] = branch.a.detach().cpu().contiguous().clone()
        tensors[f"{PREFIX}{path}.lora_B.weight"] = branch.b.detach().cpu().contiguous().clone()
    rank = found[0][1].a.shape[0]
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": name,
        "r": rank,
        "lora_alpha": found[0][1].scale * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": [path for path, _ in found],
    }
    return tensors, config


def _shared_branches(backbone: nn.Module) -> list[tuple[str, LoRABranch]]:
    found = []
    for path, module in backbone.named_modules():
        if isinstance(module, AdaptedLinear):
            branches = [b for b in module.branches.values() if isinstance(b, LoRABranch) and b.scope is Scope.SHARED]
            found += [(path, branch) for branch in branches]
    return found
