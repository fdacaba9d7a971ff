"""Heatmaps of figures named picture/panel/row."""

from __future__ import annotations

import numpy as np

from rayfed.tracking.plots import cells, heatmaps, save

HISTORY = [
    {"round": 0, "clients": {"gate/narrow/00.attn": 0.1, "gate/narrow/01.attn": 0.2, "loss_ce": 1.0}, "server": {}},
    {"round": 2, "clients": {"gate/broad/01.attn": 0.4, "gate/narrow/00.attn": 0.3}, "server": {"kl": 0.0}},
]


def test_every_client_group_has_a_panel_with_a_row_a_layer_and_a_column_a_round(tmp_path):
    pictures = cells(HISTORY)
    assert pictures == {
        "gate": {
            "narrow": {"00.attn": {1: 0.1, 3: 0.3}, "01.attn": {1: 0.2}},
            "broad": {"01.attn": {3: 0.4}},
        }
    }
    figure = heatmaps(pictures["gate"], "gate")
    broad, narrow = figure.axes[:2]
    assert (broad.get_title(), narrow.get_title()) == ("broad", "narrow")
    assert [label.get_text() for label in narrow.get_yticklabels()] == ["00.attn", "01.attn"]
    shown = narrow.images[0].get_array()
    np.testing.assert_array_equal(shown.filled(-1), [[0.1, -1, 0.3], [0.2, -1, -1]])
    np.testing.assert_array_equal(broad.images[0].get_array().filled(-1), [[-1, -1, -1], [-1, -1, 0.4]])
    assert broad.images[0].get_clim() == narrow.images[0].get_clim() == (0.1, 0.4)
    assert save(tmp_path, "gate.png", lambda: figure).stat().st_size > 1000
