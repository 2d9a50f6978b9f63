from __future__ import annotations

import io
import logging
from typing import Any

import pytest
from rich.console import Console

from attnbench.experiment import progress
from attnbench.experiment.progress import Bars, describe, plain_listener

TRAINED = {"step": 100, "epoch": 1, "train/loss": 2.5, "train/tokens_per_s": 1234.4, "train/lr": 1e-3}
VALIDATED = {"step": 200, "valid/loss": 1.25, "valid/ppl": 3.49}


def test_one_line_for_each_kind_of_record():
    assert describe(TRAINED) == "step 100, epoch 1: loss 2.500, 1234 tokens/s, lr 1.00e-03"
    assert describe(VALIDATED) == "step 200: valid loss 1.250, ppl 3.49"
    assert describe({**VALIDATED, "valid/bleu": 31.234}) == "step 200: valid loss 1.250, ppl 3.49, BLEU 31.23"
    passed = {"step": 200, "epoch": 3, "epoch/seconds": 12.34, "epoch/train_loss": 1.5, "epoch/valid_loss": 2.0}
    assert describe(passed) == "epoch 3: 12.3 s, train loss 1.500"
    assert describe({"event": "diverged"}) == "diverged"
    assert describe({"other": 1}) == ""


def test_plain_lines_are_seldom_but_for_what_matters(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    now = 1000.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    logger = logging.getLogger("attnbench")
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level(logging.INFO, "attnbench")
    listen = plain_listener("budget-8", 3)
    told: list[Any] = []
    for now in (1000.0, 1010.0, 1031.0):  # noqa: B007  (read by the clock above)
        listen(TRAINED)
        told.append(len(caplog.records))
    assert told == [1, 1, 2]
    listen(VALIDATED)
    listen({"event": "finished"})
    listen({})
    assert caplog.messages[2:] == [
        "[budget-8, seed 3] step 200: valid loss 1.250, ppl 3.49",
        "[budget-8, seed 3] finished",
    ]


def test_bars_show_how_far_a_cell_is_and_keep_events():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, color_system=None)
    with Bars(console) as bars:
        bars.listener("entmax [/fixed]", 1, 400)
        bars._columns.refresh()
        assert "entmax [/fixed], seed 1" in out.getvalue()
        listen = bars.listener("budget-8", 1, 400)
        listen(TRAINED)
        listen({"event": "finished [at] step 100"})
        bars._columns.refresh()
        assert "100/400" in out.getvalue()
        other = bars.listener("budget-inf", 1, 400)
        other(VALIDATED)
        bars._columns.refresh()
        assert "200/400" in out.getvalue()
        short = bars.listener("budget-2", 1, 400, epochs=3)
        short({**TRAINED, "epoch": 0})
        bars._columns.refresh()
        assert "/300" not in out.getvalue()
        short({**TRAINED, "epoch": 1})
        short({**TRAINED, "step": 150})  # in the middle of the next
        bars._columns.refresh()
        assert "150/300" in out.getvalue()
    text = out.getvalue()
    assert "loss 2.500, 1234 tokens/s" in text
    assert "[budget-8, seed 1] finished [at] step 100" in text
    assert "[budget-inf, seed 1] step 200: valid loss 1.250" in text
