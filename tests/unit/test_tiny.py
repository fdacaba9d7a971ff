"""The embedded tiny CLIP: its tokenizer, its weights, what it can do, and what it was trained on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from rayfed.backbones import pretrain, tiny
from rayfed.data.idx import FASHION_CLASSES
from rayfed.data.images import content_hashes
from rayfed.data.shapes import DOMAINS, class_names, render
from rayfed.errors import BackboneError, DataError, OptionError
from rayfed.rng import derive_seed

FOLDER = Path(tiny.__file__).parent
REPORT = json.loads((FOLDER / "report.json").read_text(encoding="utf-8"))
LABELS = np.arange(480) % 96


# Tokenizer -----------------------------------------------------------------------------------------------------------


def test_configuration_is_read_without_torch() -> None:
    code = "import sys, rayfed.backbones.tiny as t; assert t.CONFIG['embed_dim']; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_row_is_start_two_ids_a_word_end_padding() -> None:
    tokenizer = tiny.HashTokenizer()
    row = tokenizer("red star")[0].tolist()
    assert len(row) == tokenizer.context_length == 24
    assert row[0] == tokenizer.start_id and row[5] == tokenizer.end_id and row[6:] == [tokenizer.pad_id] * 18
    assert all(tokenizer.start_id < token < tokenizer.end_id for token in row[1:5])
    assert tokenizer("red")[0, 1:3].tolist() == row[1:3]


def test_ids_are_the_same_in_every_process() -> None:
    assert tiny.HashTokenizer()("red star.")[0, :9].tolist() == [1, 13, 1415, 727, 1497, 1609, 434, 4095, 0]


def test_features_are_pooled_at_the_end_token() -> None:
    tokens = tiny.HashTokenizer()(["star", "a photo of a red star."])
    assert tokens.argmax(dim=1).tolist() == [3, 15]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("AT&T", ["at", "&", "t"]),
        ("a,b", ["a", ",", "b"]),
        ("a b", ["a", "b"]),
        ("snake_case", ["snake", "_", "case"]),
        ("Stra\u00dfe 7", ["strasse", "7"]),
        ("cafe\u0301", ["caf\u00e9"]),
        ("\u0915\u093f\u0924\u093e\u092c", ["\u0915\u093f\u0924\u093e\u092c"]),
        ("\u7ea2\u8272 \u2605\u2605", ["\u7ea2\u8272", "\u2605", "\u2605"]),
        ("\t\n\u00a0", []),
    ],
)
def test_words_of_any_script(text: str, words: list[str]) -> None:
    assert tiny.split_words(text) == words


def test_text_that_does_not_fit_is_refused_by_name() -> None:
    tokenizer = tiny.HashTokenizer()
    fits = " ".join(["word"] * 11)
    assert tokenizer([fits]).shape == (1, 24)
    with pytest.raises(BackboneError, match=f"'{fits} more' has 12 words and signs but the tiny backbone reads 11"):
        tokenizer(["star", fits + " more"])
    assert tokenizer([fits + " more"], context_length=26).shape == (1, 26)


@pytest.mark.parametrize("text", ["", "  \n"])
def test_text_without_words_is_refused(text: str) -> None:
    with pytest.raises(BackboneError, match="holds no word"):
        tiny.HashTokenizer()(["star", text])


def test_every_name_and_template_fits_and_differs() -> None:
    names = class_names() + FASHION_CLASSES
    templates = {*pretrain.COMMON_TEMPLATES, *(text for group in pretrain.OWN_TEMPLATES.values() for text in group)}
    texts = [template.format(name) for template in sorted(templates) for name in names]
    rows = tiny.HashTokenizer()(texts)
    assert len({tuple(row) for row in rows.tolist()}) == len(set(texts))


# Weights -------------------------------------------------------------------------------------------------------------


def test_weights_are_small_float32_and_complete() -> None:
    assert tiny.weights_path().stat().st_size <= 8_000_000
    model = tiny.load_tiny()
    assert not model.training and {value.dtype for value in model.parameters()} == {torch.float32}
    without_table = sum(p.numel() for p in model.parameters()) - model.token_embedding.weight.numel()
    assert 900_000 < without_table < 1_200_000


def test_loading_leaves_the_global_stream_alone() -> None:
    before = torch.get_rng_state()
    tiny.load_tiny()
    assert torch.equal(torch.get_rng_state(), before)


def test_damaged_or_absent_weights_are_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "weights.safetensors"
    monkeypatch.setattr(tiny, "weights_path", lambda: path)
    with pytest.raises(BackboneError, match="cannot be loaded"):
        tiny.load_tiny()
    path.write_bytes((FOLDER / "weights.safetensors").read_bytes()[:-100])
    with pytest.raises(BackboneError, match="cannot be loaded"):
        tiny.load_tiny()


@pytest.mark.parametrize("domain", DOMAINS)
def test_zero_shot_accuracy_is_the_documented_one(domain: str) -> None:
    """480 fresh images; four standard errors around the accuracy of the model card."""
    images = render(LABELS, np.arange(480), seed=derive_seed(0, "shapes", "test"), domain=domain)
    accuracy = float((pretrain.zero_shot(tiny.load_tiny(), images, class_names()) == LABELS).mean())
    documented = REPORT["accuracy"][domain]
    assert abs(accuracy - documented) < 4 * (documented * (1 - documented) / 480) ** 0.5


def test_model_leaves_room_to_adapt() -> None:
    assert 0.6 <= REPORT["accuracy"]["photo"] <= 0.85
    assert 0.5 <= REPORT["accuracy"]["fashion"] <= 0.75
    assert 1 / 96 < REPORT["accuracy"]["noisy"] < REPORT["accuracy"]["photo"]


def test_card_states_the_reported_accuracies() -> None:
    card = (FOLDER / "MODEL_CARD.md").read_text(encoding="utf-8")
    for name in (*DOMAINS, "fashion"):
        assert f"{100 * REPORT['accuracy'][name]:.1f} %" in card


# What it was trained on ----------------------------------------------------------------------------------------------


def test_hashes_are_sorted_and_small() -> None:
    hashes = tiny.pretraining_hashes()
    assert hashes.dtype == np.uint64 and (np.diff(hashes.astype(object)) > 0).all()
    assert (FOLDER / "hashes.npy").stat().st_size <= 1_500_000


def test_hashes_hold_the_pool_and_no_image_of_a_task() -> None:
    hashes, options = tiny.pretraining_hashes(), REPORT["options"]
    cells = 96 * options["per_class"]
    assert len(hashes) > 3 * cells + 24_000
    pool_seed = derive_seed(options["seed"], "pretrain", "pool")
    for number, domain in enumerate(pretrain.SEEN_DOMAINS):
        labels = np.arange(96)
        indices = labels * options["per_class"] + number * cells
        assert np.isin(content_hashes(render(labels, indices, seed=pool_seed, domain=domain)), hashes).all()
    for split in ("train", "test"):
        for domain in DOMAINS:
            images = render(LABELS, np.arange(480), seed=derive_seed(0, "shapes", split), domain=domain)
            assert not np.isin(content_hashes(images), hashes).any()


def test_missing_hashes_are_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "_FOLDER", tmp_path)
    with pytest.raises(BackboneError, match="cannot be read"):
        tiny.pretraining_hashes()


# Pretraining ---------------------------------------------------------------------------------------------------------


def fake_sources(options: pretrain.Options) -> pretrain.Sources:
    grey = np.random.default_rng(0).integers(0, 256, (50, 32, 32)).astype(np.uint8)
    shapes = np.zeros((288, options.per_class, 3, 32, 32), np.uint8)
    return pretrain.Sources(shapes, grey, np.arange(50) % 10, np.zeros(0, np.uint64))


def test_equal_captions_are_never_negatives() -> None:
    """Against a slow reference: each image's caption, and each caption's images with equal weight."""
    generator = torch.Generator().manual_seed(0)
    images, texts = (torch.randn(count, 8, generator=generator).double() for count in (5, 3))
    caption_of, scale = torch.tensor([0, 1, 1, 2, 1]), torch.tensor(3.0).double()
    logits = scale * images @ texts.T
    to_text = -sum(logits[i].log_softmax(0)[c] for i, c in enumerate(caption_of)) / 5
    to_image = 0.0
    for caption in range(3):
        own = [i for i in range(5) if caption_of[i] == caption]
        to_image -= sum(logits[:, caption].log_softmax(0)[i] for i in own) / len(own) / 3
    torch.testing.assert_close(pretrain.caption_loss(images, texts, scale, caption_of), (to_text + to_image) / 2)


def test_batch_depends_on_its_step_only_and_has_distinct_captions() -> None:
    options = pretrain.Options(out=Path("unused"), per_class=2)
    sources = fake_sources(options)
    for step in range(1, 9):
        batch, again = (pretrain.make_batch(sources, options, step) for _ in range(2))
        np.testing.assert_array_equal(batch.images, again.images)
        assert batch.captions == again.captions and len(set(batch.captions)) == len(batch.captions)
        assert batch.images.shape == (192, 3, 32, 32)
        assert set(batch.caption_of) == set(range(len(batch.captions)))
    assert (batch.images != pretrain.make_batch(sources, options, 9).images).any()


def test_disguise_turns_light_on_dark_into_dark_on_light() -> None:
    grey = np.zeros((64, 32, 32), np.uint8)
    grey[:, 10:22, 10:22] = 255
    for kept in (0.0, 1.0):
        images = pretrain.disguise(grey, kept, np.random.default_rng(0)).astype(float)
        contrast = images[:, :, 14:18, 14:18].mean((1, 2, 3)) - images[:, :, :4, :4].mean((1, 2, 3))
        assert ((contrast > 0) == bool(kept)).all()


def test_training_step_lowers_the_loss_on_a_repeated_batch() -> None:
    options = pretrain.Options(out=Path("unused"), per_class=1, steps=40, shape_images=4, fashion_images=4)
    trainer = pretrain.Trainer(options, fake_sources(options))
    losses = [trainer.step(1) for _ in range(12)]
    assert losses[-1] < losses[0] and float(trainer.model.logit_scale.detach().exp()) <= 100.001


def test_unknown_and_impossible_options_are_named() -> None:
    with pytest.raises(OptionError, match=r"'step=3'.*did you mean steps=\.\.\.\?"):
        pretrain.parse_options(["out=x", "step=3"])
    with pytest.raises(OptionError, match=r"steps: .*got '-1'"):
        pretrain.parse_options(["out=x", "steps=-1"])
    with pytest.raises(OptionError, match="out: Field required"):
        pretrain.parse_options([])


def test_command_without_fashion_mnist_says_how_to_get_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = pretrain.main([f"out={tmp_path / 'out'}", f"fashion_root={tmp_path}", "per_class=1"])
    assert code == DataError.exit_code
    assert "apt-get install dataset-fashion-mnist" in capsys.readouterr().err
