"""Messages: what comes back is what was sent, and the measured size is the real one."""

from __future__ import annotations

import pytest
import torch

from rayfed.comms.codec import decode, encode, encoded_size
from rayfed.messages import Payload

PAYLOADS = {
    "empty": Payload(),
    "params": Payload(torch.randn(1003)),
    "extras": Payload(None, {"b": torch.randn(3, 4).half(), "a": torch.arange(5)}),
    "all": Payload(
        torch.randn(17), {"zeta": torch.randn(2, 3, 4), "alpha": torch.ones(7).half(), "n": torch.arange(3)}
    ),
    "strided": Payload(torch.randn(10, 2)[:, 0], {"t": torch.randn(4, 6).t()}),
}


@pytest.mark.parametrize("name", PAYLOADS)
def test_round_trip_and_size(name):
    payload = PAYLOADS[name]
    message = encode(payload)
    assert len(message) == encoded_size(payload)
    back = decode(message)
    assert back.extras.keys() == payload.extras.keys()
    if payload.params is not None:
        assert torch.equal(back.params, payload.params)
    else:
        assert back.params is None
    assert all(torch.equal(back.extras[k], payload.extras[k]) for k in payload.extras)


def test_nothing_to_say_costs_nothing():
    assert encode(Payload()) == b"" and encoded_size(Payload()) == 0
