"""The plan beside what a GPU says: the lines, the instants of a step, and settings in processes of their own."""

import math

import pytest

from benchmarks import gpu_plan
from benchmarks.gpu_plan import SETTINGS, Setting, Task
from tests.train import cases_gpu_plan

pytestmark = pytest.mark.rotating

GIB = 1 << 30


@pytest.mark.parametrize("name", ["lora", "qlora", "full"])
def test_two_steps_of_the_workers_own_loop_are_measured_beside_the_plan(zygote, name):
    line = zygote.fork(cases_gpu_plan.line, name=name, kind="memory", device="cpu").result()
    assert all(math.isclose(loss, math.log(512), rel_tol=0.1) for loss in line["measured"]["losses"])
    plan = line["planned"]
    assert plan["held"] < plan["allocated"] == max(plan["instants"].values()) <= plan["reserved"] < plan["process"]


def test_a_trace_stands_in_for_the_card(zygote):
    line = zygote.fork(cases_gpu_plan.line, name="full", kind="memory", device="trace").result()
    assert set(line["measured"]["instants"]) >= {"loss", "backward-last", "backward-first", "optimizer"}
    assert 0 < line["measured"]["held"] < line["measured"]["allocated"]


def test_a_copy_is_timed_as_bench_compute_does_and_gives_the_plan_its_seconds(zygote):
    line = zygote.fork(cases_gpu_plan.line, name="lora", kind="time", device="cpu").result()
    assert {record["kind"] for record in line["records"]} == {"device", "point", "optimizer"}
    assert line["planned_s"] > 0
    assert line["step_s"] in line["steps_s"]
    assert len(line["steps_s"]) == gpu_plan.TIMED_STEPS


def test_a_meter_is_told_every_instant_of_every_micro_batch(zygote):
    seen, losses = zygote.fork(cases_gpu_plan.instants).result()
    backward = ["loss", "backward-last", "backward-last", "backward-first", "backward-rest"]
    assert len(losses) == gpu_plan.STEPS
    once = ["forward", *backward, "forward", *backward, "clip", "optimizer"]
    assert seen == once * gpu_plan.STEPS


def test_each_setting_has_a_process_and_what_is_done_is_not_done_again(zygote, tmp_path):
    code, lines = zygote.fork(cases_gpu_plan.whole, folder=str(tmp_path)).result()
    assert code == 0
    assert sorted((line["kind"], line["case"]) for line in lines) == [
        *(("memory", name) for name in ("full", "lora", "qlora")),
        ("time", "lora"),
    ]
    assert zygote.fork(cases_gpu_plan.whole, folder=str(tmp_path)).result() == [0, lines]


def test_a_process_that_dies_is_a_line_and_exit_code_1(zygote, tmp_path):
    code, lines = zygote.fork(cases_gpu_plan.dying, folder=str(tmp_path)).result()
    assert (code, [line["error"] for line in lines]) == (1, ["exit code -9"])


def task(name, *, kind="memory", gib=10.0):
    return Task(name=name, kind=kind, setting=SETTINGS["1b-lora"], room=int(gib * GIB))


def test_settings_share_the_card_as_long_as_it_has_room_and_times_are_measured_alone():
    def may_begin(wanted, *others, at_once=4):
        return gpu_plan._may_begin(wanted, {index: (each, None, 0.0) for index, each in enumerate(others)}, at_once)

    assert may_begin(task("a", gib=500))  # then it fails by itself, and says so
    assert may_begin(task("a"), task("b"), task("c"))
    assert not may_begin(task("a"), task("b"), task("c"), at_once=2)
    assert not may_begin(task("a", gib=70), task("b", gib=70))
    assert not may_begin(task("a", kind="time"), task("b"))
    assert not may_begin(task("a"), task("b", kind="time"))
    assert may_begin(task("a", kind="time"))


def test_making_a_model_of_4_bits_takes_the_whole_of_it_for_a_moment():
    setting = SETTINGS["8b-qlora-recomputed"]
    way = gpu_plan.candidate_of(setting)
    assert way.needs[0].memory.allocated_bytes < 9 * GIB
    assert 16 * GIB < gpu_plan.room_bytes(setting, way) < 20 * GIB


def test_tables_say_how_far_the_plan_is_off():
    def memory(case, planned, measured):
        plan = {"held": 50, "allocated": planned, "reserved": planned, "instants": {"loss": planned}}
        seen = {"held": 50, "allocated": measured, "reserved": 2 * measured, "instants": {"optimizer": measured}}
        return {"kind": "memory", "case": case, "planned": plan, "measured": seen}

    time = {"kind": "time", "case": "a", "step_s": 2.0, "planned_s": 2.2, "uncalibrated_s": 1.0}
    failed = {"kind": "time", "case": "b", "error": "Traceback\nOutOfMemoryError: too small\n"}
    text = "\n".join(gpu_plan.show([memory("a", 103, 100), memory("b", 99, 100), time, failed]))
    assert "| a | +0.0% | 0.00 | 0.00 | +3.0% | loss, optimizer | -48.5% |" in text
    assert "allocated: 2 rows, 2.0% off in the mean, -1.0% to +3.0%" in text
    assert "| a | 2.000 | 2.200 | +10.0% | 1.000 | -50.0% |" in text
    assert "failed: b (time): OutOfMemoryError: too small" in text


def test_the_settings_are_30_of_all_kinds():
    found = SETTINGS.values()
    assert len(SETTINGS) == 30
    assert {each.method for each in found} == {"full", "lora", "qlora"}
    assert {each.length for each in found} >= {512, 1024, 2048, 8192}
    assert {each.optimizer for each in found} >= {"adamw", "adamw-8bit", "adafactor", "muon", "paged-adamw-8bit"}
    assert 8 <= sum(each.timed for each in found) <= 10
    assert all(isinstance(each, Setting) for each in found)
