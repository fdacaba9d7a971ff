"""FedSDG against what the authors' code gave for the same inputs (tests/golden/fedsdg, its README's tolerances)."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F

from rayfed.adapters.gated import Mixing, gated_dual_lora
from rayfed.adapters.lora import mix_branches
from rayfed.adapters.scope import Scope, flatten_scopes
from rayfed.aggregation.alignment import alignment_cosines, alignment_weights
from rayfed.aggregation.exact import weighted_mean
from rayfed.backbones.base import Backbone, Preprocessing
from rayfed.conf.method import fedlora, fedsdg, local
from rayfed.conf.options import TrainOptions
from rayfed.engine.fit import Fit
from rayfed.methods import make_method
from rayfed.methods.base import Batch, Group, TaskView
from rayfed.methods.fedsdg import gate_penalty
from rayfed.metrics.accuracy import spread
from tests.golden import FOLDER, arrays, exact_mean, manifest

LAYER = manifest("fedsdg", "a_lora_layer")["cases"]
LAYER_ARRAYS = arrays("fedsdg", "a_lora_layer")
COUPLED = ("floor_2d", "geomean_2d")
"""Aligned 2-D inputs: the authors couple the samples of a batch."""
EXPLODING = (
    # gradients only: the authors' grow a thousandfold
    "floor_3d_zero_B_private",
    "floor_3d_zero_AB_private",
    "base_3d_zero_AB_private",
    "geomean_3d_zero_B_private",
)


def close(got, want, case):
    tolerance = {"rtol": 1e-4, "atol": 5e-5} if case["dtype"] == "float32" else {"rtol": 1e-11, "atol": 1e-12}
    torch.testing.assert_close(got.to(want.dtype), want, **tolerance)  # recorded gates are float64 throughout


def layer(case, leaf):
    """y of the recorded layer from its leaves, by our functions."""
    scale = case["lora_alpha"] / case["r"]
    base = F.linear(leaf["x"], leaf["W"], leaf.get("b"))
    shared = scale * leaf["x"] @ leaf["A"] @ leaf["B"]
    if case["single_branch"]:
        return base + shared
    mask = leaf.get("rank_mask", torch.ones(case["r_private"], dtype=shared.dtype))
    a, b = leaf["A_private"] * mask, leaf["B_private"] * mask.unsqueeze(1)
    private = case["lora_alpha"] / case["r_private"] * leaf["x"] @ a @ b
    gate = torch.sigmoid(leaf["gate_logit"])
    if case["use_da_scale"]:
        gate = gate * leaf["da_scale_logit"].to(gate.dtype).clamp(-2, 3).exp()
    align = None if case["mode"] == "off" else case["mode"]
    detach = case["detach_private_rms"]
    # The authors measure [B, H, T, d] inputs per head: to us, B H samples.
    parts = [part.flatten(0, -3) if part.dim() == 4 else part for part in (base, shared, private)]
    y = mix_branches(*parts, gate, align=align, floor=case["gamma"], eps=case["eps"], detach=detach)
    return y.view(base.shape)


@pytest.mark.parametrize("case", LAYER, ids=lambda c: c["name"])
def test_layer(case):
    if case["name"] in COUPLED:
        return
    recorded = LAYER_ARRAYS[case["name"]]
    leaf = {
        k: v.clone().requires_grad_(True) for k, v in recorded.items() if k not in ("y", "cotangent") and k[0] != "d"
    }
    leaf |= {k: recorded[k].clone().requires_grad_(True) for k in ("da_scale_logit",) if k in recorded}
    y = layer(case, leaf)
    close(y, recorded["y"], case)
    (y * recorded["cotangent"]).sum().backward()
    targets = [k for k in recorded if k[0] == "d" and k != "da_scale_logit"]
    assert len(targets) >= 3
    if case["name"] in EXPLODING:
        assert all(float(leaf[k[1:]].grad.abs().max()) < 1e3 for k in targets)
        targets = ["dA", "dB", "dgate_logit"]
    for key in targets:
        close(leaf[key[1:]].grad, recorded[key], case)


def test_every_layer_case_was_met():
    names = {case["name"] for case in LAYER}
    assert len(names) == 50 and names == LAYER_ARRAYS.keys()
    assert names >= {*COUPLED, *EXPLODING}
    zero = [c["name"] for c in LAYER if c["mode"] != "off" and any("private" in z for z in c["zeroed"])]
    flat = [c["name"] for c in LAYER if c["mode"] != "off" and len(c["x_shape"]) == 2]
    assert sorted(zero) == sorted(EXPLODING) and sorted(flat) == sorted(COUPLED)


@pytest.mark.parametrize("case", manifest("fedsdg", "a2_feddpa_layer")["cases"], ids=lambda c: c["name"])
def test_blended_layer(case):
    recorded = arrays("fedsdg", "a2_feddpa_layer")[case["name"]]
    leaf = {k: recorded[k].clone().requires_grad_(True) for k in ("x", "A", "B", "A_private", "B_private")}
    scale = case["lora_alpha"] / case["r"]
    base = F.linear(leaf["x"], recorded["W"], recorded["b"])
    shared, private = (scale * leaf["x"] @ leaf[f"A{p}"] @ leaf[f"B{p}"] for p in ("", "_private"))
    mixing = Mixing(None if case["mode"] == "off" else case["mode"], case["gamma"], blend=True)
    y = gated_dual_lora(base, shared, private, case["mix"], mixing)
    torch.testing.assert_close(y, recorded["y"], rtol=1e-11, atol=1e-12)
    other = gated_dual_lora(base, shared, private, 0.1, mixing)
    torch.testing.assert_close(other, recorded["y_dynamic_mix_0p1"], rtol=1e-11, atol=1e-12)
    (y * recorded["cotangent"]).sum().backward()
    for name, value in leaf.items():
        torch.testing.assert_close(value.grad, recorded[f"d{name}"], rtol=1e-11, atol=1e-12)


def test_penalties():
    cases = manifest("fedsdg", "b_penalties")["cases"]
    assert len(cases) == 10
    for case in cases:
        gates = torch.sigmoid(torch.tensor(case["gate_logits"]))
        active = not case["fix_gate"] and case["global_round"] >= case["gate_warmup_rounds"]
        gate = case["lambda1"] * float(gate_penalty(gates, case["penalty_type"])) if active else 0.0
        private = case["lambda2"] * case["sum_sq_private"]
        assert math.isclose(gate + private, case["reg_loss"], rel_tol=3e-6, abs_tol=1e-9), case
        assert math.isclose(case["task_loss"] + gate + private, case["loss_total"], rel_tol=3e-6)


# Local steps on the tiny ViT

STEPS = {case["name"]: case for case in manifest("fedsdg", "b2_local_step")["cases"]}
WHOLE_BACKBONE = ("fedavg_adam", "fedavg_sgd", "fedprox_avg")
OPTIONS = {
    "fedsdg_off": fedsdg.Options(rank=4, alpha=8, gate_init=-2.0, align="none"),
    "fedsdg_da_base": fedsdg.Options(rank=4, alpha=8, gate_init=-3.0, align="base"),
    "fedsdg_da_floor": fedsdg.Options(rank=4, alpha=8, gate_init=-2.0, align="floor"),
    "fedsdg_head_private": fedsdg.Options(rank=4, alpha=8, gate_init=-2.0, align="none", head="private", head_lr=5e-3),
    "feddpa": fedsdg.Options(rank=4, alpha=8, gate="fixed", align="none", mixing="blend", private_weight=0.0),
    "fedlora_adam": fedlora.Options(rank=4, alpha=8, targets=("out", "fc2")),
    "fedlora_sgd": fedlora.Options(rank=4, alpha=8, targets=("out", "fc2")),
    "local_only": local.Options(rank=4, alpha=8, targets=("out", "fc2")),
    "fedrep": fedlora.Options(rank=4, alpha=8, targets=("out", "fc2")),
}
BRANCHES = {"global": "", "lora": "", "private": "_private"}


def vit() -> Backbone:
    tower = timm.models.vision_transformer.VisionTransformer(
        img_size=16, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=0
    )
    return Backbone("vit", tower, embed_dim=24, preprocessing=Preprocessing(16, (0.5,) * 3, (0.5,) * 3), settings={})


def recorded_name(name: str) -> tuple[str, bool]:
    """The authors' name of one of our tensors, and whether theirs is transposed."""
    name = name.removeprefix("backbone.image_tower.").replace("head.linear.", "head.")
    path, found, leaf = name.partition(".branches.")
    if found:
        branch, _, factor = leaf.rpartition(".")
        return f"{path}.lora_{factor.upper()}{BRANCHES[branch]}", True
    return name.replace(".base.", ".original_layer."), False


def put(model, values) -> None:
    """Write the recorded tensors into ``model``; every one of its tensors must be among them."""
    for name, tensor in model.state_dict().items():
        if name.startswith(("_", "backbone._")) or name == "gates._fixed":
            continue
        if name == "gates.logits":
            gates = [key for key in values if key.endswith("lambda_k_logit")]
            tensor.copy_(torch.cat([values[key] for key in gates]))
            continue
        key, transposed = recorded_name(name)
        tensor.copy_(values[key].t() if transposed else values[key])


class Rows:
    """The client's recorded images as items; one batch in recorded order makes shuffling harmless."""

    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.labels)

    def batch(self, index):
        return Batch(self.images[index], self.labels[index], index, lambda: self.images)

    def in_order(self):
        yield self.batch(torch.arange(len(self)))


def play(name):
    """One recorded client round through our method and training loop."""
    case, recorded = STEPS[name], arrays("fedsdg", "b2_local_step")[name]
    task = TaskView(tuple(f"c{i}" for i in range(10)), "{}", 0)
    method = make_method(OPTIONS[name])
    model = method.build_model(vit(), task).eval()
    with torch.no_grad():
        put(model, {k.removeprefix("before/"): v for k, v in recorded.items() if k.startswith("before/")})
    flat = flatten_scopes(model)
    data, index = arrays_of("b2_dataset"), recorded["train_idx"]
    args = case["args"]
    options = TrainOptions(
        lr=args["lr"],
        epochs=args["local_ep"],
        batch=args["local_bs"],
        optimizer=args["optimizer"],
        momentum=args["momentum"],
        weight_decay=1e-4 if args["optimizer"] == "adam" else 0.0,
        clip_norm=args["grad_clip"] if case["alg"] in ("fedsdg", "feddpa") else 0.0,
    )
    rows = Rows(data["x"][index], data["y"][index])

    def fit(objective, groups, **changes):
        changed = options.model_copy(update=changes)
        return Fit(model, flat, changed).run(rows, objective, groups, generator=torch.Generator().manual_seed(0))

    job = SimpleNamespace(fit=fit, round_index=0, rounds=1, class_features=None, task=task, train=rows, options=options)
    return case, recorded, method, model, job


def arrays_of(name):
    with np.load(FOLDER / "fedsdg" / f"{name}.npz") as file:
        return {key: torch.from_numpy(file[key]) for key in file.files}


@pytest.mark.parametrize("name", [n for n in STEPS if n not in WHOLE_BACKBONE])
def test_local_step(name):
    case, recorded, method, model, job = play(name)
    if name == "fedrep":
        head, lora = Group(Scope.SHARED, "head"), Group(Scope.SHARED, "lora")

        def objective(net, batch):
            return {"ce": F.cross_entropy(net(batch, None), batch.labels)}

        job.fit(objective, [head], epochs=case["args"]["fedrep_head_epochs"])
        job.fit(objective, [lora], epochs=case["args"]["fedrep_rep_epochs"])
    else:
        result = method.client_step(model, job)
        total = sum(result.report.terms.values())
        assert math.isclose(total, case["avg_loss"], rel_tol=1e-5)
    after = {k.removeprefix("after/"): v for k, v in recorded.items() if k.startswith("after/")}
    assert len(after) == len(case["changed"])
    met = 0
    for key, tensor in model.state_dict().items():
        if key == "gates.logits":
            want = torch.cat([v for k, v in after.items() if k.endswith("lambda_k_logit")])
            met += len(want)
        else:
            name_, transposed = recorded_name(key)
            if name_ not in after:
                continue
            met += 1
            want = after[name_].t() if transposed else after[name_]
        torch.testing.assert_close(tensor, want, rtol=1e-4, atol=2e-6, msg=lambda m, key=key: f"{key}: {m}")
    assert met == len(after)


def test_every_local_step_is_met_or_named():
    assert len(STEPS) == 12 and STEPS.keys() == {*OPTIONS, *WHOLE_BACKBONE}


@pytest.mark.parametrize("case", manifest("fedsdg", "f_state_split")["cases"], ids=lambda c: c["head_mode"])
def test_who_owns_what(case):
    options = fedsdg.Options(rank=4, alpha=8, head=case["head_mode"])
    model = make_method(options).build_model(vit(), TaskView(tuple(f"c{i}" for i in range(10)), "{}", 0))
    flat = flatten_scopes(model)
    for scope, want in ((Scope.SHARED, case["public"]), (Scope.PRIVATE, case["private"])):
        got = {}
        for entry in flat[scope].entries:
            name, transposed = recorded_name(entry.name)
            got[name] = list(entry.shape[::-1] if transposed else entry.shape)
        gates = got.pop("gates.logits", [0])[0]
        assert gates == sum(name.endswith("lambda_k_logit") for name in want)
        assert got == {name: shape for name, shape in want.items() if not name.endswith("lambda_k_logit")}


# Server

ALIGNMENT = manifest("fedsdg", "c_alignment")["cases"]


def test_alignment_weights():
    recorded = arrays("fedsdg", "c_alignment")
    sound = [case for case in ALIGNMENT if not case["ill_conditioned"]]
    assert len(ALIGNMENT) == 144 and len(sound) == 136
    for case in sound:
        values = recorded[case["deltas"]]
        keys = case["aligned_keys"]
        start = torch.cat([values[f"global/{k}"].flatten() for k in keys])
        clients = [torch.cat([values[f"client{i}/{k}"].flatten() for k in keys]) for i in range(case["M"])]
        deltas = torch.stack([client - start for client in clients])
        reference = {"loo_mean": "leave_one_out", "standard_mean": "mean"}[case["strategy"]]
        transform = {"relu_normalize": "relu", "softmax": "softmax"}[case["transform"]]
        weights = alignment_weights(
            deltas,
            reference=reference,
            transform=transform,
            temperature=case["temperature"],
            smoothing=case["lambda_smooth"],
        )
        torch.testing.assert_close(weights, torch.tensor(case["weights"]), rtol=0, atol=2e-6, msg=case["key"])
        if case["M"] > 1:
            cosines = alignment_cosines(deltas, reference=reference).float()
            torch.testing.assert_close(cosines, torch.tensor(case["cos_raw"]), rtol=0, atol=3e-6, msg=case["key"])
        new = start + (weights.double() @ deltas.double()).float()
        want = torch.cat([values_of(recorded, case, k).flatten() for k in keys])
        scale = float(deltas.abs().max())
        torch.testing.assert_close(new, want, rtol=1e-5, atol=1e-5 * max(1.0, scale), msg=case["key"])


def values_of(recorded, case, key):
    folder, _, rest = case["key"].partition("/")
    return recorded[folder][f"{rest}/new/{key}"]


SHARING = {
    "fedsdg/global": fedsdg.Options(rank=4, head="global"),
    "fedsdg/private": fedsdg.Options(rank=4, head="private"),
    "feddpa/global": fedsdg.Options(rank=4, head="global", mixing="blend", gate="fixed", align="none"),
    "feddpa/private": fedsdg.Options(rank=4, head="private", mixing="blend", gate="fixed", align="none"),
    "fedlora/global": fedlora.Options(rank=4, targets=("out", "fc2")),
    "local_only/global": local.Options(rank=4, targets=("out", "fc2")),
}
"""The recorded algorithms that are methods here; what else is shared there (masks, scales) does not exist here."""


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", SHARING)
def test_plain_mean_of_what_is_shared(name, dtype):
    """The same tensors are averaged, and to the same values: in float32, the type that is sent, to the README's 1e-6.

    Its 1e-15 for float64 is that of another type; the fixed point that runs use ends at 2**-40, so 1e-12.
    """
    cases = {case["key"]: case for case in manifest("fedsdg", "d_fedavg")["cases"]}
    case, values = cases[f"{dtype}/{name}"], arrays("fedsdg", "d_fedavg")[dtype]
    kinds = {"lora_A", "lora_B", "lora_A_private", "lora_B_private", "head.weight", "head.bias"}
    model = make_method(SHARING[name]).build_model(vit(), TaskView(tuple("abcde"), "{}", 0))
    shared = {recorded_name(entry.name)[0] for entry in flatten_scopes(model)[Scope.SHARED].entries}
    block = {key for key in case["aggregated_keys"] if key.endswith(tuple(kinds))} - {"mlp_head.weight"}
    assert {k for k in shared if k.startswith(("blocks.0.attn.proj", "head"))} == block
    for key in block:
        start = values[f"global/{key}"].float()
        deltas = [(values[f"client{i}/{key}"].float() - start).flatten() for i in range(4)]
        got = start + weighted_mean(deltas, [1] * 4).view(start.shape)
        want = sum(values[f"client{i}/{key}"].double() for i in range(4)) / 4
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)
        if dtype == "float64":
            mean = exact_mean([values[f"client{i}/{key}"].flatten() for i in range(4)], [1] * 4)
            torch.testing.assert_close(mean.view(want.shape), want, rtol=0, atol=1e-12)


def test_spread_over_clients():
    cases = manifest("fedsdg", "e_metrics")["local"]
    assert len(cases) == 7
    for case in cases:
        if case["acc"]:
            assert_spread(spread(np.array(case["acc"])), case["out"], "local/test_acc", 1e-12)


def test_gates_over_clients():
    """A client's figure is the mean of its gates; the record of a round holds how these lie over the clients."""
    cases = manifest("fedsdg", "e_metrics")["gate"]
    assert len(cases) == 4
    for case in cases:
        means = np.array([np.mean(gates) for gates in case["lambda_values"]])
        assert_spread(spread(means), case["out"], "gate/lambda", 1e-12)


def test_drift_over_clients():
    """The norm of an update, and how the norms lie over the clients."""
    cases = manifest("fedsdg", "e_metrics")["drift"]
    assert len(cases) == 4
    for case in cases:
        start = torch.cat([torch.tensor(case["glob"][n]).flatten() for n in ("a", "b")])
        deltas = [torch.cat([torch.tensor(c[n]).flatten() for n in ("a", "b")]) - start for c in case["clients"]]
        norms = np.array([float(torch.linalg.vector_norm(delta)) for delta in deltas])
        assert_spread(spread(norms), case["out"], "diagnostics/drift_norm", 1e-6)
        assert math.isclose(norms[0], case["update"]["diagnostics/update_norm_global"], rel_tol=1e-6)


def assert_spread(got, recorded, prefix, tolerance):
    """Every recorded figure; they leave out spread where there are few clients."""
    met = 0
    for theirs, ours in (
        ("avg", "mean"),
        ("mean", "mean"),
        *((n, n) for n in ("std", "min", "max", "p10", "p50", "p90")),
    ):
        if f"{prefix}_{theirs}" in recorded:
            met += 1
            assert math.isclose(got[ours], recorded[f"{prefix}_{theirs}"], rel_tol=tolerance, abs_tol=1e-15), theirs
    assert met >= 1
