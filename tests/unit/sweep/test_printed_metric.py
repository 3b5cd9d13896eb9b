"""The figure of a user's own script is found in what rank 0 prints, and in nothing else."""

from __future__ import annotations

import pytest

from gangline.sweep.printed_metric import PrintedMetric


def read(*lines: str, name: str = "eval_loss") -> dict[int, float | None]:
    metric = PrintedMetric(name=name)
    for line in lines:
        metric.read(line)
    return metric.values


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 100, "eval_loss": 0.75}',
        '{"eval_loss": "0.75", "step": 100, "epoch": "1"}',
        "{'eval_loss': 0.75, 'step': 100, 'epoch': 1.0}",
        " 10%|█         | 100/1000\r{'eval_loss': 0.75, 'step': 100}",
        '2026-11-27 02:00:00 INFO {"step": 100, "eval_loss": 75e-2}',
    ],
)
def test_json_and_the_way_of_transformers_are_read_behind_whatever_stands_before_them(line: str) -> None:
    assert read(line) == {100: 0.75}


@pytest.mark.parametrize(
    "line",
    [
        "eval_loss 0.75",
        '{"loss": 0.75, "step": 100}',
        '{"eval_loss": null, "step": 100}',
        '{"eval_loss": true}',
        '{"eval_loss": "soon"}',
        '{"eval_loss": 0.75',
        "{'eval_loss': open('x')}",
        '["eval_loss", {"a": 1}]',
        "{" * 5000 + "eval_loss",
    ],
)
def test_other_lines_are_passed_over(line: str) -> None:
    assert read(line) == {}


def test_without_a_step_values_are_counted_and_the_last_line_of_a_step_counts() -> None:
    assert read('{"eval_loss": 2}', '{"eval_loss": 1}') == {1: 2.0, 2: 1.0}
    assert read('{"eval_loss": 2, "step": 5}', '{"eval_loss": 1, "step": 5}') == {5: 1.0}


def test_a_value_that_is_not_finite_is_one_without_a_figure() -> None:
    assert read('{"eval_loss": NaN, "step": 3}') == {3: None}


def test_another_metric_can_be_named() -> None:
    assert read('{"accuracy": 0.5, "eval_loss": 2, "step": 1}', name="accuracy") == {1: 0.5}
