"""How fast a placement computes: what is measured holds, and is told where driver or torch have changed since."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from gangline.catalog.gpu_specs import find_gpu
from gangline.decide.hosts import SpeedTable
from gangline.inventory.facts import Inventory
from gangline.inventory.measured import save_profile
from gangline.planner.calibration import Profile, ProfileKey, architecture_digest, method_words
from gangline.planner.decision import decide
from gangline.planner.estimate import uncalibrated
from gangline.planner.machines import Placement
from gangline.planner.report import Length, report
from gangline.planner.speed import ComputeModel
from gangline.planner.training import Number, Training
from tests.unit.checks.machines import card, inventory, pc
from tests.unit.planner.worlds import model, query, with_memory, world

TRAINING = Training(method="lora", micro_batch=1, sequence_length=512)
SHAPE = model("Qwen/Qwen2.5-0.5B")
CARD = "NVIDIA GeForce RTX 4090"
PLACEMENT = Placement(host="pc1", gpu=CARD, spec=find_gpu(CARD))


def measured(home: Path, *, host: str = "pc1", driver: str = "575.57.08", torch: str = "2.13.0+cu128") -> None:
    key = ProfileKey(
        gpu=CARD,
        driver=driver,
        torch=torch,
        kernels="sdpa",
        method=method_words(TRAINING),
        dtype=TRAINING.compute,
        architecture=architecture_digest(SHAPE),
    )
    compute = ComputeModel(per_token_s=1e-3, source="calibrated")
    save_profile(home, Profile(key=key, measured="2026-01-02T00:00:00+00:00", host=host, compute=compute))


def now(*, driver: str = "575.57.08", torch: str | None = "2.13.0") -> Inventory:
    answer = pc("pc1", [card(CARD, 24, "8.9")], driver=driver)
    answer["packages"]["packages"] |= {"torch": torch}
    return inventory({"pc1": answer})


def dated(home: Path, seen: Inventory, training: Training = TRAINING) -> list[str]:
    return SpeedTable(architecture=SHAPE, home=home).dated([PLACEMENT, PLACEMENT], training, seen)


def test_a_measurement_under_what_the_host_has_now_is_nothing_to_talk_about(tmp_path: Path) -> None:
    measured(tmp_path)
    assert dated(tmp_path, now()) == []
    assert dated(tmp_path, now(torch="2.13.0+cu128")) == []


def test_another_driver_or_torch_is_told_once_and_the_measurement_is_used(tmp_path: Path) -> None:
    measured(tmp_path, driver="550.54.15", torch="2.9.1+cu126")
    (line,) = dated(tmp_path, now())
    assert line.startswith(
        "pc1: speed measured 2026-01-02 with driver 550.54.15, 575.57.08 and torch 2.9.1+cu126, 2.13"
    )
    assert "gangline bench compute" in line
    compute = SpeedTable(architecture=SHAPE, home=tmp_path).of(PLACEMENT, TRAINING)
    assert compute is not None
    assert compute.per_token_s == 1e-3


@pytest.mark.parametrize(
    ("then", "torch", "count"),
    [
        ("2.13.0+cu128", "2.13.0+cpu", 1),
        ("2.13.0+cu128", "2.13.1", 1),
        ("2.13.0", "2.13.0+cu128", 0),
        ("2.13.0", None, 0),
        ("", "2.13.0", 0),
    ],
)
def test_versions_are_compared_as_far_as_both_are_known(
    then: str, torch: str | None, count: int, tmp_path: Path
) -> None:
    measured(tmp_path, torch=then)
    assert len(dated(tmp_path, now(torch=torch))) == count


def test_what_follows_from_a_measurement_is_dated_too(tmp_path: Path) -> None:
    measured(tmp_path, driver="550.54.15")
    assert dated(tmp_path, now(), dataclasses.replace(TRAINING, checkpointing=True))
    assert dated(tmp_path, now(), dataclasses.replace(TRAINING, method="full")) == []  # that is an estimate


def test_copies_are_added_to_a_measurement_that_had_none(tmp_path: Path) -> None:
    measured(tmp_path)
    speeds = SpeedTable(architecture=SHAPE, home=tmp_path)
    plain, moved = (speeds.of(PLACEMENT, dataclasses.replace(TRAINING, offloading=each)) for each in (False, True))
    assert plain is not None
    assert moved is not None
    copied = 2 * 24 * 896 * 2 / 15e9
    assert moved.per_token_s - plain.per_token_s == pytest.approx(copied)
    eight = dataclasses.replace(TRAINING, method="qlora", bits=8)
    assert method_words(eight) != method_words(dataclasses.replace(eight, bits=4))
    assert dated(tmp_path, now(driver="590.1"), dataclasses.replace(TRAINING, offloading=True))


def test_a_measurement_of_another_host_says_whose_it_is(tmp_path: Path) -> None:
    measured(tmp_path, host="pc7", driver="550.54.15")
    (line,) = dated(tmp_path, now())
    assert "measured 2026-01-02 on pc7 with driver" in line


def test_of_a_host_that_nobody_asked_nothing_is_said(tmp_path: Path) -> None:
    measured(tmp_path, driver="550.54.15")
    assert dated(tmp_path, inventory({})) == []


# --- cards without tensor cores


def token_s(name: str, compute: Number, home: Path) -> float:
    training = dataclasses.replace(TRAINING, compute=compute)
    found = SpeedTable(architecture=SHAPE, home=home).of(Placement(host="h", gpu=name, spec=find_gpu(name)), training)
    assert found is not None
    return found.per_token_s


@pytest.mark.parametrize("name", ["gtx1660super", "gtx1650", "gtx1080ti"])
def test_without_tensor_cores_fp32_runs_at_the_cards_one_rate(name: str, tmp_path: Path) -> None:
    spec = find_gpu(name)
    assert spec is not None
    quick = dataclasses.replace(spec, fp16_share=1.0)
    fp16_s = uncalibrated(quick, SHAPE, dataclasses.replace(TRAINING, compute="fp16")).per_token_s
    # products take as long; numbers of four bytes pass memory in twice the time
    assert fp16_s < token_s(name, "fp32", tmp_path) < 1.3 * fp16_s


def test_gtx_16_is_slower_in_fp16_than_in_fp32_and_others_are_not(tmp_path: Path) -> None:
    """At the most by 1 / 0.11, which is what products alone lose (pytorch#121957)."""
    for name in ("gtx1660super", "gtx1650"):
        assert 2 < token_s(name, "fp16", tmp_path) / token_s(name, "fp32", tmp_path) < 9.1
    assert 1 < token_s("gtx1080ti", "fp32", tmp_path) / token_s("gtx1080ti", "fp16", tmp_path) < 1.3
    assert token_s("t4", "fp16", tmp_path) < token_s("t4", "fp32", tmp_path)
    assert token_s("rtx4090", "bf16", tmp_path) < token_s("rtx4090", "fp32", tmp_path)


def notes(machines: str, compute: Number) -> str:
    asked = query("Qwen/Qwen2.5-0.5B", method="lora", sequence_length=512, compute=compute)
    gib = [20.0] * len(machines.split(","))
    return "\n".join(report(decide(asked, with_memory(world(machines), *gib)), Length(None), width=400))


def test_the_screen_says_which_numbers_a_card_without_bf16_ends_with_and_why() -> None:
    text = notes("rtx2080ti,gtx1660super", "fp16")
    assert "fp16, with a loss scale: RTX 2080 Ti, GTX 1660 SUPER cannot compute in bf16" in text
    assert "GTX 1660 SUPER has no tensor cores, and multiplies fp16 at about 11 % of the rate of fp32" in text
    assert "has no tensor cores" not in notes("rtx2080ti,gtx1080ti", "fp16")
    assert "loss scale" not in notes("rtx4090,rtx3090", "bf16")
    assert "tensor cores" not in notes("gtx1660super", "fp32")
