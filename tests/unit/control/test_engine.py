"""What does a plan's strategy has to be on every host before a run is made."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from gangline.control.equip import require_engine
from gangline.errors import UsageError
from gangline.planner.plan import Plan, make_plan
from gangline.runs.cluster import Environment
from tests.unit.checks.machines import cluster, host, inventory, pc
from tests.unit.decide.test_forecast import JOB

PAIR = cluster(host("pc1"), host("pc2"))


def plan(kind: str) -> Plan:
    return dataclasses.replace(make_plan(JOB, PAIR), strategy=kind)  # type: ignore[arg-type]


def seen(*with_it: str):
    answers = {name: pc(name) for name in ("pc1", "pc2")}
    for name in with_it:
        answers[name]["packages"]["packages"] |= {"deepspeed": "0.19.8"}
    return inventory(answers)


def test_where_every_host_has_it_nothing_is_said() -> None:
    require_engine(plan("zero-2"), PAIR, seen("pc1", "pc2"))


def test_whoever_lacks_it_is_named_with_the_extra_to_install() -> None:
    with pytest.raises(UsageError, match=r"zero-2 needs deepspeed, which pc2 would not have") as caught:
        require_engine(plan("zero-2"), PAIR, seen("pc1"))
    assert "gangline[deepspeed]" in str(caught.value)


def test_other_strategies_need_none() -> None:
    require_engine(plan("fsdp"), PAIR, seen())


def test_an_environment_from_a_lock_has_what_the_lock_names(tmp_path: Path) -> None:
    lock = tmp_path / "requirements.lock"
    lock.write_text("torch==2.13.0\ndeepspeed==0.19.8\n")
    own, given = Environment(kind="locked"), Environment(kind="locked", path=str(lock))
    with pytest.raises(UsageError, match="pc1 would not have") as caught:
        require_engine(plan("zero-3"), cluster(host("pc1", environment=own), host("pc2", environment=given)), seen())
    assert "a lock without deepspeed" in str(caught.value)
    assert "pip wheel" in str(caught.value)
