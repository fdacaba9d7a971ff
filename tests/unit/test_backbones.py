"""Loading, saving and feeding frozen backbones."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import open_clip
import pytest
import timm
import torch
from open_clip.model import CLIP, CustomTextCLIP
from safetensors.torch import load_file, save_file
from torch import nn

from rayfed.backbones import clip as clip_module
from rayfed.backbones import load_backbone, names
from rayfed.backbones.attention import SplitAttention
from rayfed.backbones.base import Backbone
from rayfed.backbones.clip import build_from_config, from_checkpoint, load_clip, save_backbone
from rayfed.backbones.text import class_texts, tokenize_texts
from rayfed.errors import BackboneError, DataError, OptionError

MEAN, STD = (0.5, 0.4, 0.3), (0.25, 0.2, 0.3)
CONFIG: dict[str, Any] = {
    "embed_dim": 24,
    "quick_gelu": False,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 8, "patch_size": 8},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 2},
}
QUICK = {**CONFIG, "quick_gelu": True}
VIT = "test_vit"


@pytest.fixture(autouse=True)
def small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two small models under names of their own, in place of open_clip's big ones."""
    configs = {"small": CONFIG, "small-quickgelu": QUICK}
    real = clip_module.get_model_config
    monkeypatch.setattr(
        clip_module, "get_model_config", lambda name: copy.deepcopy(configs[name]) if name in configs else real(name)
    )
    monkeypatch.setattr(clip_module, "_tokenizer_of", lambda name: tokenizer())


def tokenizer(length: int = 16) -> open_clip.SimpleTokenizer:
    return open_clip.SimpleTokenizer(context_length=length)


def build(config: dict[str, Any] = CONFIG, name: str = "small") -> Backbone:
    return build_from_config(name, config, None, tokenizer(), MEAN, STD)


def pictures(size: int = 32) -> torch.Tensor:
    return torch.randint(0, 256, (3, 3, size, size), generator=torch.Generator().manual_seed(8), dtype=torch.uint8)


def logits(backbone: Backbone) -> torch.Tensor:
    images = backbone.encode_image(backbone.normalise(pictures()))
    texts = backbone.encode_text(backbone.tokenize(["a photo of a cat.", "a photo of a dog."]))
    return backbone.logit_scale * nn.functional.normalize(images) @ nn.functional.normalize(texts).T


@pytest.mark.parametrize("custom_text", [False, True])
def test_encoders_equal_open_clip_for_both_of_its_classes(custom_text: bool) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        original = (CustomTextCLIP if custom_text else CLIP)(**copy.deepcopy(CONFIG)).eval()
    config = {**CONFIG, "custom_text": custom_text}
    backbone = build_from_config("small", config, original.state_dict(), tokenizer(), MEAN, STD)
    tokens = backbone.tokenize(["a cat", "two dogs on a sofa", "a very long text about nothing at all"])
    images = backbone.normalise(pictures())
    with torch.no_grad():
        torch.testing.assert_close(backbone.encode_text(tokens), original.encode_text(tokens), rtol=0, atol=1e-6)
        torch.testing.assert_close(backbone.encode_image(images), original.encode_image(images), rtol=0, atol=1e-6)
    assert backbone.logit_scale == pytest.approx(float(original.logit_scale.detach().exp()))
    assert sum(isinstance(module, SplitAttention) for module in backbone.modules()) == 4


def test_everything_is_frozen_and_stays_in_evaluation_mode() -> None:
    backbone = build()
    backbone.train()
    assert not any(module.training for module in backbone.modules())
    assert not any(parameter.requires_grad for parameter in backbone.parameters())


def test_gradients_flow_through_the_frozen_towers() -> None:
    backbone = build()
    images = backbone.normalise(pictures()).requires_grad_()
    backbone.encode_image(images).sum().backward()
    assert images.grad is not None
    assert images.grad.abs().sum() > 0


def test_normalise_uses_the_statistics_of_the_backbone() -> None:
    found = build().normalise(pictures())
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    torch.testing.assert_close(found, (pictures().float() / 255 - mean) / std)


def test_random_weights_are_the_same_each_time_and_leave_the_global_stream_alone() -> None:
    before = torch.random.get_rng_state()
    first, second = build(), build()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(value, second.state_dict()[key]) for key, value in first.state_dict().items())


def test_copies_and_pickles_give_the_same_features() -> None:
    backbone = build()
    for other in (copy.deepcopy(backbone), pickle.loads(pickle.dumps(backbone))):
        assert torch.equal(logits(other), logits(backbone))
        other.image_tower.load_state_dict(backbone.image_tower.state_dict())


def test_settings_are_plain_json() -> None:
    settings = build(QUICK).settings
    assert json.loads(json.dumps(settings)) == settings
    assert settings["config"]["quick_gelu"] is True


@pytest.mark.parametrize("custom_text", [False, True])
def test_saved_backbone_loads_with_equal_logits_and_original_keys(tmp_path: Path, custom_text: bool) -> None:
    config = {**CONFIG, "custom_text": custom_text}
    backbone = build(config)
    save_backbone(backbone, tmp_path / "model.safetensors")
    again = from_checkpoint("small", config, str(tmp_path / "model.safetensors"), tokenizer(), (0, 0, 0), (1, 1, 1))
    assert torch.equal(logits(again), logits(backbone))
    assert (again.mean, again.std) == (MEAN, STD)
    original = (CustomTextCLIP if custom_text else CLIP)(**copy.deepcopy(CONFIG))
    assert set(load_file(tmp_path / "model.safetensors")) == set(original.state_dict())
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_quick_gelu_weights_under_the_plain_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "quick.safetensors"
    backbone = load_clip("small-quickgelu", pretrained="none", checkpoint=None)
    save_backbone(backbone, path)
    with pytest.raises(BackboneError, match="quick_gelu is True in the file and False") as caught:
        load_clip("small", pretrained=None, checkpoint=str(path))
    assert "use backbone 'small-quickgelu'" in str(caught.value)
    again = load_clip("small-quickgelu", pretrained=None, checkpoint=str(path))
    assert torch.equal(logits(again), logits(backbone))


def test_quick_gelu_changes_the_model() -> None:
    plain = build()
    quick = build_from_config("small", QUICK, None, tokenizer(), MEAN, STD)
    assert not torch.equal(logits(plain), logits(quick))


def test_settings_beside_a_plain_state_dict_are_heeded(tmp_path: Path) -> None:
    original = CLIP(**copy.deepcopy(QUICK))
    torch.save(original.state_dict(), tmp_path / "model.pt")
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": QUICK, "preprocess_cfg": {"mean": MEAN}}))
    with pytest.raises(BackboneError, match="quick_gelu"):
        load_clip("small", pretrained=None, checkpoint=str(tmp_path / "model.pt"))
    loaded = load_clip("small-quickgelu", pretrained=None, checkpoint=str(tmp_path / "model.pt"))
    assert loaded.mean == MEAN


@pytest.mark.parametrize("wrap", [lambda state: state, lambda state: {"epoch": 3, "state_dict": state}])
def test_a_checkpoint_without_settings_loads_with_a_warning(
    tmp_path: Path, wrap: Any, caplog: pytest.LogCaptureFixture
) -> None:
    original = CLIP(**copy.deepcopy(CONFIG)).eval()
    state = {f"module.{key}": value for key, value in original.state_dict().items()}
    torch.save(wrap(state), tmp_path / "model.pt")
    backbone = load_clip("small", pretrained=None, checkpoint=str(tmp_path / "model.pt"))
    assert "no model settings" in caplog.text
    images = backbone.normalise(pictures())
    torch.testing.assert_close(backbone.encode_image(images), original.encode_image(images), rtol=0, atol=1e-6)


def test_torchscript_archive_is_refused_by_its_kind(tmp_path: Path) -> None:
    archive = tmp_path / "clip.pt"
    torch.jit.save(torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2)), str(archive))
    with pytest.raises(BackboneError, match="TorchScript archive"):
        load_clip("small", pretrained=None, checkpoint=str(archive))


def test_pickled_objects_are_refused(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2), tmp_path / "model.pt")
    with pytest.raises(BackboneError, match="holds more than tensors"):
        load_clip("small", pretrained=None, checkpoint=str(tmp_path / "model.pt"))


def test_damaged_missing_and_foreign_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "cut.safetensors").write_bytes(b"\x10\x00\x00")
    (tmp_path / "model.onnx").write_bytes(b"x")
    for name, words in (("cut.safetensors", "damaged"), ("gone.pt", "is not there"), ("model.onnx", "ending")):
        with pytest.raises(BackboneError, match=words):
            load_clip("small", pretrained=None, checkpoint=str(tmp_path / name))


def test_missing_spare_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    state = {key: value.clone() for key, value in CLIP(**copy.deepcopy(CONFIG)).state_dict().items()}
    del state["ln_final.bias"]
    state["extra"] = torch.zeros(1)
    state["visual.proj"] = torch.zeros(2, 2)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(BackboneError) as caught:
        load_clip("small", pretrained=None, checkpoint=str(tmp_path / "model.safetensors"))
    for words in ("1 missing (text.ln_final.bias)", "1 spare (extra)", "visual.proj (2, 2) for (32, 24)"):
        assert words in str(caught.value)


def test_unknown_name_is_refused_with_near_ones() -> None:
    with pytest.raises(BackboneError, match="did you mean 'ViT-B-32'"):
        load_backbone("ViT-B/32")
    with pytest.raises(BackboneError, match="vit_tiny_patch16_224"):
        load_backbone("vit_tiny_patch_224")


def test_unknown_tag_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BackboneError, match="openai") as caught:
        load_clip("ViT-B-32", pretrained="openay", checkpoint=None)
    assert "did you mean 'openai'?" in str(caught.value)
    assert "laion2b_s34b_b79k" in str(caught.value)


def test_no_source_and_two_sources_of_weights_are_refused() -> None:
    with pytest.raises(BackboneError, match="needs one source of weights"):
        load_clip("ViT-B-32", pretrained=None, checkpoint=None)
    with pytest.raises(BackboneError, match="needs one source of weights"):
        load_clip("ViT-B-32", pretrained="openai", checkpoint="x.pt")


def test_openai_weights_get_quick_gelu(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    built: list[dict[str, Any]] = []

    def stand_in(name: str, config: dict[str, Any]) -> CustomTextCLIP:
        built.append({"name": name, **config})
        return CustomTextCLIP(**copy.deepcopy(QUICK))

    monkeypatch.setattr(clip_module, "_build", stand_in)
    monkeypatch.setattr(clip_module, "_load_tag", lambda model, name, tag: None)
    backbone = load_clip("ViT-B-32", pretrained="openai", checkpoint=None)
    assert built[0]["quick_gelu"] is True
    assert backbone.name == backbone.settings["name"] == "ViT-B-32-quickgelu"
    assert "quick-GELU" in caplog.text


def test_failed_download_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(config: dict[str, Any]) -> str:
        raise OSError("no route to host")

    monkeypatch.setattr(clip_module, "_build", lambda name, config: CustomTextCLIP(**copy.deepcopy(CONFIG)))
    monkeypatch.setattr(clip_module, "download_pretrained", offline)
    with pytest.raises(BackboneError, match=r"no route to host.*backbone\.checkpoint"):
        load_clip("ViT-B-32", pretrained="laion2b_s34b_b79k", checkpoint=None)


def test_names_are_told_without_heavy_imports() -> None:
    code = (
        "import sys\n"
        "from rayfed.backbones import names\n"
        "from rayfed.backbones.text import class_texts\n"
        "assert names.kind('tiny') == 'tiny' and names.kind('ViT-B-32') == 'clip'\n"
        "assert names.kind('vit_base_patch16_224') == 'vit' and names.kind('nonsense') is None\n"
        "assert names.width('ViT-B-32') == 768 and names.width('vit_tiny_patch16_224') == 192\n"
        "assert names.unknown_backbone('ViT-B-23')\n"
        "heavy = {'torch', 'timm', 'open_clip', 'ray', 'mlflow', 'torchvision'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_known_names_cover_what_the_libraries_list() -> None:
    known = names.known_names()
    captioners = {name for name in open_clip.list_models() if name.startswith("coca_")}
    assert set(open_clip.list_models()) - captioners <= set(known["clip"]) | set(known["vit"])
    assert set(known["vit"]) <= set(timm.list_models())
    assert {"deit_tiny_patch16_224", "eva02_tiny_patch14_224", VIT} <= set(known["vit"])


@pytest.mark.parametrize("name", [VIT, "deit_tiny_patch16_224", "vit_base_patch16_224", "eva02_tiny_patch14_224"])
def test_width_of_a_vit_is_what_timm_builds(name: str) -> None:
    with torch.device("meta"):
        assert names.width(name) == timm.create_model(name, num_classes=0).embed_dim


def test_vit_features_equal_timm(tmp_path: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        original = timm.create_model(VIT, num_classes=10).eval()
    torch.save(original.state_dict(), tmp_path / "vit.pth")
    backbone = load_backbone(VIT, checkpoint=str(tmp_path / "vit.pth"))
    images = backbone.normalise(pictures(backbone.image_size))
    with torch.no_grad():
        expected = original.forward_head(original.forward_features(images), pre_logits=True)
        found = backbone.encode_image(images)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert found.shape == (3, backbone.embed_dim)
    assert backbone.mean == tuple(original.default_cfg["mean"])
    assert (backbone.has_text, backbone.logit_scale) == (False, 1.0)


def test_vit_saves_and_loads_and_refuses_foreign_weights(tmp_path: Path) -> None:
    path = tmp_path / "vit.safetensors"
    backbone = load_backbone(VIT, pretrained="none")
    save_backbone(backbone, path)
    again = load_backbone(VIT, checkpoint=str(path))
    images = backbone.normalise(pictures(backbone.image_size))
    assert torch.equal(again.encode_image(images), backbone.encode_image(images))
    with pytest.raises(BackboneError, match=f"use '{VIT}'"):
        load_backbone("test_vit2", checkpoint=str(path))
    with pytest.raises(BackboneError, match=f"use '{VIT}'"):
        load_clip("small", pretrained=None, checkpoint=str(path))


def test_vit_refuses_unknown_tags_and_texts() -> None:
    with pytest.raises(BackboneError, match="r160_in1k"):
        load_backbone(VIT, pretrained="r160_in1")
    with pytest.raises(BackboneError, match="needs one source"):
        load_backbone(VIT)
    backbone = load_backbone(VIT, pretrained="none")
    with pytest.raises(BackboneError, match="no text tower"):
        backbone.tokenize(["a cat"])
    with pytest.raises(BackboneError, match="no text tower"):
        backbone.encode_text(torch.zeros(1, 4, dtype=torch.long))


def test_class_texts_fill_the_template() -> None:
    texts, alike = class_texts(["cat", "new_york"], "a photo of a {}, a type of pet.")
    assert texts == ["a photo of a cat, a type of pet.", "a photo of a new york, a type of pet."]
    assert alike == []


def test_names_that_read_alike_are_grouped_and_kept() -> None:
    listed = ["missile", "missile", "Dog", "dog", "new_york", "new york", "\u00e9", "e\u0301", "sunglasses"]
    texts, alike = class_texts(listed, "{}")
    assert len(texts) == len(listed)
    assert alike == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert texts[6] == texts[7]


@pytest.mark.parametrize("template", ["a photo", "{} and {}"])
def test_template_needs_one_place(template: str) -> None:
    with pytest.raises(OptionError, match="exactly one"):
        class_texts(["cat"], template)


def test_empty_class_name_is_refused() -> None:
    with pytest.raises(DataError, match="Class 1 has an empty name"):
        class_texts(["cat", " _ "], "a {}")


def test_empty_text_is_refused() -> None:
    with pytest.raises(BackboneError, match="Text 1 is empty"):
        build().tokenize(["a cat", "  "])


def test_two_long_names_cut_to_the_same_row_are_refused_with_both() -> None:
    long_name = " ".join(["word"] * 100)
    with pytest.raises(BackboneError, match="are equal once cut") as caught:
        build().tokenize([f"{long_name} apple", f"{long_name} pear"])
    assert "apple" in str(caught.value)
    assert "pear" in str(caught.value)


def test_long_template_is_dropped_and_the_name_kept(caplog: pytest.LogCaptureFixture) -> None:
    listed = ["cat", "sea_lion"]
    texts, _ = class_texts(listed, " ".join(["word"] * 80) + " {}")
    rows = build().tokenize(texts, listed)
    assert torch.equal(rows, tokenizer()(["cat", "sea lion"]))
    assert "'cat'" in caplog.text
    assert "'sea lion'" in caplog.text


def test_a_single_cut_text_is_named_in_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        build().tokenize(["a cat", "yes " * 40])
    assert "were cut" in caplog.text
    caplog.clear()
    build().tokenize(["a cat", "a dog"])
    assert caplog.text == ""


def test_equal_texts_that_fit_are_allowed() -> None:
    rows = build().tokenize(["a dog", "a dog"])
    assert torch.equal(rows[0], rows[1])


def test_tokenizer_with_another_row_length_is_refused() -> None:
    class Stubborn:
        def __call__(self, texts: list[str], context_length: int | None = None) -> torch.Tensor:
            return tokenizer(77)(texts)

    with pytest.raises(BackboneError, match="rows of 77 tokens but the text tower takes 64"):
        tokenize_texts(Stubborn(), 64, ["a cat"])


def test_tiny_backbone_loads_saves_and_equals_its_own_loader(tmp_path: Path) -> None:
    from rayfed.backbones import tiny

    backbone, original = load_backbone("tiny"), tiny.load_tiny()
    tokens = backbone.tokenize(["a red circle", "a blue star"])
    with torch.no_grad():
        torch.testing.assert_close(backbone.encode_text(tokens), original.encode_text(tokens), rtol=0, atol=1e-5)
    save_backbone(backbone, tmp_path / "tiny.safetensors")
    again = load_backbone("tiny", checkpoint=str(tmp_path / "tiny.safetensors"))
    assert torch.equal(again.encode_text(tokens), backbone.encode_text(tokens))
    assert names.width("tiny") == tiny.CONFIG["vision_cfg"]["width"]
    with pytest.raises(BackboneError, match="embedded weights"):
        load_backbone("tiny", pretrained="openai")
    with pytest.raises(BackboneError, match="has 40 words"):
        backbone.tokenize(["a cat", "yes " * 40])
