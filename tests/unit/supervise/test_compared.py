"""At the end of an attempt its figures are held against the plan, wherever they lie and however many there are."""

from __future__ import annotations

import json
from pathlib import Path, PurePath
from typing import Any

import pytest

from gangline.planner.outcome import Comparison
from gangline.runs.files import write_json
from gangline.runs.layout import RunLayout
from gangline.supervise.attempt_records import BLOCK_BYTES, MOST_BYTES, last_records, read_figures
from tests.fakes.transport import FakeTransport
from tests.unit.planner.outcomes import line, plan
from tests.unit.supervise.runs import RUN_ID, cluster_of

RUN = [line(step) for step in range(1, 21)]
METRICS = PurePath("/figures")


class Counting(FakeTransport):
    """A host that counts what is read."""

    num_bytes = 0
    num_reads = 0

    def read(self, path: PurePath, *, offset: int = 0, limit: int = 1 << 22) -> bytes:
        data = super().read(path, offset=offset, limit=limit)
        self.num_bytes += len(data)
        self.num_reads += 1
        return data


def written(*records: Any) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    layout = RunLayout(tmp_path / "home", RUN_ID)
    layout.folder.mkdir(parents=True)
    write_json(layout.plan, plan().to_json())
    return layout


def look(layout: RunLayout, figures: bytes | None, *, attempt: int = 1) -> dict[str, Any] | None:
    head = FakeTransport("pc1")
    cluster = cluster_of(layout.root.parent, "pc1", "pc2")
    if figures is not None:
        head.files[RunLayout(layout.root.parent / "pc1", RUN_ID).metrics] = figures
    return read_figures(layout, attempt, cluster=cluster, head=head).comparison


def test_the_figures_on_the_head_are_held_against_the_plan(layout: RunLayout) -> None:
    comparison = Comparison.from_json(look(layout, written(*RUN)))
    assert (comparison.num_steps, comparison.step_s.planned, comparison.step_s.measured) == (18, 0.72, 0.8)


def test_another_attempt_of_the_run_is_another_matter(layout: RunLayout) -> None:
    assert look(layout, written(*RUN), attempt=2) is None


@pytest.mark.parametrize("figures", [None, b"", b"[" * 10**5, b"\xff\xfe\n\n", b"7\n[]\nnull\n", written(*RUN[:6])])
def test_too_few_steps_or_none_give_nothing(layout: RunLayout, figures: bytes | None) -> None:
    assert look(layout, figures) is None


def test_torn_lines_are_passed_over(layout: RunLayout) -> None:
    torn = written(*RUN[:10]) + b'{"kind": "step", "st' + b"\n" + written(*RUN[10:]) + b'{"kind'
    comparison = Comparison.from_json(look(layout, torn))
    assert comparison.num_steps == 18


def test_a_run_without_a_plan_or_a_forecast_has_nothing_to_be_held_against(layout: RunLayout) -> None:
    write_json(layout.plan, plan(forecast=None).to_json())
    assert look(layout, written(*RUN)) is None
    layout.plan.unlink()
    assert look(layout, written(*RUN)) is None


def test_where_time_went_is_known_without_a_plan_and_beside_a_damaged_one(layout: RunLayout) -> None:
    head, cluster = FakeTransport("pc1"), cluster_of(layout.root.parent, "pc1", "pc2")
    head.files[RunLayout(layout.root.parent / "pc1", RUN_ID).metrics] = written(*RUN)
    layout.plan.write_text("[]", encoding="utf-8")
    found = read_figures(layout, 1, cluster=cluster, head=head)
    assert found.comparison is None
    assert found.problem is not None
    assert found.times is not None
    assert [row["host"] for row in found.times["ranks"]] == ["pc1", "pc2"]
    layout.plan.unlink()
    found = read_figures(layout, 1, cluster=cluster, head=head)
    assert (found.comparison, found.problem) == (None, None)
    assert found.times is not None


@pytest.mark.parametrize("megabytes", [0.3, 7.5, 8, 8.5, 20, 33])
def test_of_many_figures_the_last_are_read(megabytes: float) -> None:
    head = Counting("pc1")
    row = {"text": "x" * 1000}
    num_rows = int(megabytes * BLOCK_BYTES / len(written(row)))
    head.files[METRICS] = written(*({**row, "number": number} for number in range(num_rows)))
    numbers = [record["number"] for record in last_records(head, METRICS)]
    assert numbers == list(range(numbers[0], num_rows))
    assert len(numbers) >= min(num_rows, 6500)
    assert head.num_bytes <= MOST_BYTES + 64
    assert head.num_reads < 30


def test_a_file_without_end_does_not_keep_a_run_from_ending() -> None:
    class Endless(Counting):
        def read(self, path: PurePath, *, offset: int = 0, limit: int = 1 << 22) -> bytes:
            del path, offset
            self.num_reads += 1
            return b"x" * limit

    head = Endless("pc1")
    assert last_records(head, METRICS) == []
    assert head.num_reads < 100
