"""An unreachable hub is noticed soon, and the library's own setting comes back."""

from __future__ import annotations

import socket
import time

import pytest
from huggingface_hub import constants

from rayfed.backbones import hub, load_backbone
from rayfed.errors import BackboneError


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def test_answering_hub_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        with hub.impatient_hub():
            assert not constants.HF_HUB_OFFLINE


def test_silent_hub_is_given_up_and_the_setting_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_reachable", lambda endpoint, patience_s: False)
    with pytest.raises(KeyError), hub.impatient_hub():
        assert constants.HF_HUB_OFFLINE
        raise KeyError
    assert not constants.HF_HUB_OFFLINE


def test_weights_that_cannot_be_fetched_end_soon(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    start = time.monotonic()
    with pytest.raises(BackboneError, match=r"cannot be loaded.*backbone\.checkpoint"):
        load_backbone("vit_tiny_patch16_224", pretrained="default")
    assert time.monotonic() - start < 10
