"""Names of metrics."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attnbench.report.names import higher_is_better, misspelt, number, thousands


@pytest.mark.parametrize(("metric", "meant"), [
    ("test/blue", "test/bleu"), ("valid/los", "valid/loss"), ("attended/crss", "attended/cross"), ("test/own", None),
])  # fmt: skip
def test_a_name_that_comes_close_to_a_usual_one_is_misspelt(metric: str, meant: str | None):
    assert misspelt(metric) == meant


def test_less_is_better_of_what_is_wrong_or_lasts():
    directions = {name: higher_is_better(f"test/{name}") for name in ("bleu", "rep", "drop", "loss", "unfinished")}
    assert directions == {"bleu": True, "rep": False, "drop": False, "loss": False, "unfinished": False}
    assert higher_is_better("test/seconds") is higher_is_better("test/wrong_counts") is False
    assert higher_is_better("attended/cross") is None


def test_what_a_perfect_copy_would_get_is_better_in_no_row():
    assert higher_is_better("test/bleu_bound") is higher_is_better("test/exact_bound") is None


def test_thousands_have_the_digits_that_count():
    shown = ["0.99", "9.90", "10.0", "98.8", "100", "123", "1,235"]
    assert [thousands(value) for value in (987.6, 9900, 10_000, 98_765, 100_000, 123_456, 1_234_567)] == shown


def test_no_metric_of_a_finished_table_passes_for_misspelt():
    tables = sorted((Path(__file__).parents[2] / "experiments").glob("*/results/*/results.json"))
    measured = {name for path in tables for name in json.loads(path.read_text())["metrics"]}
    assert len(measured) > 40
    assert {name: near for name in measured if (near := misspelt(name))} == {}


def test_large_numbers_are_no_powers_of_ten_and_all_speeds_are_in_thousands():
    assert number("best/step", 20833.3) == "20,833"
    assert number("params", 5500000.5) == "5,500,000"
    assert number("train/seconds", 12.345) == "12.35"
    assert number("valid/decode_tokens_per_s", 12345.6) == number("decode/tokens_per_s", 12345.6) == "12.3"
