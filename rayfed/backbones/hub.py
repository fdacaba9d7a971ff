"""Finding out in seconds, not after minutes of retries, that the Hugging Face hub cannot be reached."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from huggingface_hub import constants

_PATIENCE_S = 4.0


@contextmanager
def impatient_hub() -> Iterator[None]:
    """Within it, files come from the local cache alone if the hub does not answer; what is missing fails at once."""
    before = constants.HF_HUB_OFFLINE
    # Behind a proxy only the proxy can be reached directly, so the library is left to its own devices there.
    constants.HF_HUB_OFFLINE = before or not (_has_proxy() or _reachable(constants.ENDPOINT, _PATIENCE_S))
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _has_proxy() -> bool:
    return any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"))


def _reachable(endpoint: str, patience_s: float) -> bool:
    address = urlsplit(endpoint)
    port = address.port or (80 if address.scheme == "http" else 443)
    answered = threading.Event()

    def knock() -> None:
        try:
            with socket.create_connection((address.hostname or "", port), timeout=patience_s):
                answered.set()
        except OSError:
            return

    # In a thread of its own: looking up a host name has no time limit.
    thread = threading.Thread(target=knock, daemon=True)
    thread.start()
    thread.join(patience_s)
    return answered.is_set()
