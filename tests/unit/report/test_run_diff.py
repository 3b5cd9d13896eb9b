"""`gangline diff RUN1 RUN2`: only what differs, and the step at which losses part."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from gangline.report.run_diff import RunComparison, compare_runs, diff_json, diff_lines, losses_apart
from gangline.report.run_figures import RunFigures
from gangline.report.run_summary import RunRecords, read_records
from tests.unit.planner.outcomes import plan
from tests.unit.report.stories import Past


@pytest.fixture
def run(tmp_path: Path) -> RunRecords:
    past = Past(tmp_path)
    past.event("started", hosts=["pc1", "pc2"])
    past.steps(1, 5)
    past.state("finished")
    plan().save(past.layout.plan)
    past.layout.inputs.write_text(json.dumps({"train": "aaaa", "model": "cafe", "evaluation": None}), encoding="utf-8")
    return read_records(past.view, records=past.layout, remote=None, own=("train.py",), can_resume=True)


def keys(compared: RunComparison, part: str) -> dict[str, tuple[str, str]]:
    return {row.key: row.values for row in compared.parts[part]}


def with_losses(run: RunRecords, **losses: float) -> RunRecords:
    figures = RunFigures()
    figures.curves["loss"] = {int(step[1:]): loss for step, loss in losses.items()}
    return dataclasses.replace(run, figures=figures)


def test_a_run_does_not_differ_from_itself(run: RunRecords) -> None:
    lines = diff_lines(compare_runs(run, run))
    assert lines[0] == "no difference recorded: job, data, versions, machines, division"
    assert lines[-1] == "losses   equal in all 5 common steps, the last one 5"


def test_other_words_rows_and_shares_are_named_and_the_same_is_not(run: RunRecords) -> None:
    ranks = tuple(dataclasses.replace(rank, share=4) for rank in plan().ranks)
    other = dataclasses.replace(
        run,
        own=("train.py", "--lr", "1"),
        inputs={"train": "bbbb", "model": "cafe"},
        plan=dataclasses.replace(plan(), ranks=ranks),
    )
    compared = compare_runs(run, other)
    assert keys(compared, "job") == {"command": ("train.py", "train.py --lr 1")}
    assert keys(compared, "data") == {"train": ("aaaa", "bbbb")}
    assert keys(compared, "division") == {"micro-batches by rank": ("pc1: 6, pc2: 2", "pc1: 4, pc2: 4")}
    assert diff_json(compared)["differences"]["data"] == [{"key": "train", "values": ["aaaa", "bbbb"]}]


def test_a_value_that_only_one_has_is_a_difference(run: RunRecords) -> None:
    compared = compare_runs(run, dataclasses.replace(run, inputs=None))
    assert keys(compared, "data") == {"model": ("cafe", "-"), "train": ("aaaa", "-")}


def test_the_first_step_with_another_loss_is_named_and_the_first_that_is_clear(run: RunRecords) -> None:
    one = with_losses(run, s1=2.0, s2=1.9, s3=1.8, s4=1.0)
    other = with_losses(run, s1=2.0, s2=1.901, s3=1.5, s9=1.0)
    losses = compare_runs(one, other).losses
    assert losses.num_common == 3
    assert (losses.first, losses.clear, losses.last) == ((2, 1.9, 1.901), (3, 1.8, 1.5), (3, 1.8, 1.5))
    assert "losses   part         step 2: 1.9 and 1.901 (0.053 %)" in diff_lines(compare_runs(one, other))


def test_runs_without_a_common_step_say_so(run: RunRecords) -> None:
    assert losses_apart({1: 2.0}, {2: 2.0}).last is None
    assert diff_lines(compare_runs(run, with_losses(run)))[-1] == "losses   no step with a loss in both"


def test_what_could_not_be_read_is_told_with_its_run(run: RunRecords) -> None:
    lines = diff_lines(compare_runs(run, dataclasses.replace(run, gaps=("pc1 does not answer",))))
    assert lines[-1] == "missing: calm-otter-7: pc1 does not answer"
