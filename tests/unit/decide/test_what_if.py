"""`gangline plan` from its files to its lines: machines that nobody has need no data, what is there is compared."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from gangline.context import Context, StartOptions, load, reached
from gangline.decide import forecast, hosts
from gangline.decide.decide import decide
from gangline.decide.forecast import training_of
from gangline.decide.what_if import Prediction, WhatIf, plan_json, plan_lines, predict, trace
from gangline.errors import ModelError, SpecError, UsageError
from gangline.inventory.measured import save_profile
from gangline.planner.calibration import Profile, ProfileKey, architecture_digest, method_words
from gangline.planner.config import read_architecture
from gangline.planner.speed import ComputeModel
from gangline.provision.hub import HubConfig
from tests.process.app.conftest import CONFIG
from tests.process.app.world import World

PACKED = "data: {train: ./a.txt, format: text, packing: true, sequence_length: 64}"


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    (tmp_path / "a.txt").write_text("a text\n" * 10_000, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return World(root=tmp_path)


def start(world: World, data: str = PACKED) -> StartOptions:
    """A job of one epoch."""
    text = f"model: {{path: ./model, start: random}}\n{data}\nbatch: 12\nmicro_batch: 2\nepochs: 1\n"
    return dataclasses.replace(world.start(), job=world.file("job.yaml", text))


def imagined(world: World, data: str = PACKED) -> Prediction:
    return predict(start(world, data), WhatIf(hosts="rtx4090"), console=world, deps=world.deps)


def line(prediction: Prediction, world: World, title: str) -> str:
    lines = plan_lines(prediction, (), home=world.home, why=False, width=400)
    return next(each for each in lines if each.startswith(title))


def test_machines_that_nobody_has_are_planned_without_the_data(world: World) -> None:
    there = imagined(world)
    assert "guessed from the size of the files" in line(there, world, "run")
    (world.root / "a.txt").unlink()
    gone = imagined(world)
    assert line(gone, world, "step") == line(there, world, "step")
    assert "total time is unknown: a.txt of data.train is not on this computer" in line(gone, world, "run")
    assert plan_json(gone, ())["verdict"] == plan_json(there, ())["verdict"]


def test_a_pipeline_is_planned_from_the_words_of_the_job_and_not_traced(world: World) -> None:
    data = f"{PACKED}\nstrategy: pipeline\nmethod: lora"
    prediction = predict(start(world, data), WhatIf(hosts="rtx4090,rtx4090"), console=world, deps=world.deps)
    assert "pipeline 1/1" in line(prediction, world, "strategy")
    assert "on every host" in line(prediction, world, "saves")
    context = Context(transports={}, home=world.home, console=world, deps=world.deps)
    with pytest.raises(ModelError, match="cannot be traced"):
        trace(prediction, context)
    with pytest.raises(UsageError, match="needs a layer for every rank"):
        predict(start(world, data), WhatIf(hosts="rtx4090,rtx4090,rtx4090"), console=world, deps=world.deps)


def test_a_slice_of_layers_is_planned_and_not_traced(world: World) -> None:
    data = f"{PACKED}\nstrategy: tp\nmethod: lora"
    prediction = predict(start(world, data), WhatIf(hosts="2xrtx4090"), console=world, deps=world.deps)
    assert "tp 2 x 1" in line(prediction, world, "strategy")
    context = Context(transports={}, home=world.home, console=world, deps=world.deps)
    with pytest.raises(ModelError, match="a rank of tp cannot be traced"):
        trace(prediction, context)


def test_it_is_said_where_the_shape_came_from(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    own = imagined(world)
    assert line(own, world, "shape").split(None, 1)[1] == "config.json of its folder"
    assert plan_json(own, ())["shape"] == {"from": "folder", "source": "config.json of its folder"}

    def of(name: str) -> Prediction:
        asked = dataclasses.replace(start(world), overrides=(f"model={name}", "model.start=pretrained"))
        return predict(asked, WhatIf(hosts="rtx4090"), console=world, deps=world.deps)

    known = of("gpt2")
    assert "gangline's catalogue" in line(known, world, "shape")
    assert plan_json(known, ())["shape"]["from"] == "catalogue"
    answer: HubConfig | str = HubConfig(
        config=CONFIG, revision="0123456789abcdef", num_bytes=1900, endpoint="https://hub", fetched=True
    )
    monkeypatch.setattr(forecast, "kept_or_fetched", lambda *_: answer)
    fetched = of("somebody/new")
    words = "config.json at https://hub, revision 0123456789ab, fetched 1.86 KiB just now"
    assert line(fetched, world, "shape").endswith(words)
    assert plan_json(fetched, ())["shape"] == {"from": "hub", "source": words}
    answer = "the hub (hub): somebody/new is gated"
    with pytest.raises(ModelError, match="no forecast is possible") as caught:
        of("somebody/new")
    assert answer in caught.value.seen


def test_a_start_needs_its_data_and_so_does_its_plan(world: World) -> None:
    (world.root / "a.txt").unlink()
    with pytest.raises(SpecError, match="there is no file"):
        predict(start(world), WhatIf(), console=world, deps=world.deps)
    with pytest.raises(SpecError, match="there is no file"):
        predict(start(world), WhatIf(add=("rtx4090",)), console=world, deps=world.deps)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ("data: {train: hub:o/rows, sequence_length: 64, packing: true}", "on the hub"),
        ("data: {train: ./a.txt, format: text, packing: false, sequence_length: 64}", "not packed"),
    ],
)
def test_the_screen_says_why_the_length_of_a_run_is_not_known(data: str, why: str, world: World) -> None:
    assert why in line(imagined(world, data), world, "run")


def test_programs_read_what_checkpoints_cost(world: World) -> None:
    saves = plan_json(imagined(world), ())["saves"]
    assert saves["num_bytes"] > 0
    assert len(saves["write_s"]) == len(saves["hold_s"]) == 3
    assert 0 < saves["share"] < 1
    assert saves["every_s"] == pytest.approx(60 * saves["minutes"])
    assert saves["minutes"] == 1.0  # by what saving so little costs


def test_how_the_job_saves_and_where_the_work_folders_are_decide_about_the_cost(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def saves(*words: str) -> dict[str, Any]:
        asked = dataclasses.replace(start(world), overrides=words)
        answer: dict[str, Any] = plan_json(predict(asked, WhatIf(), console=world, deps=world.deps), ())["saves"]
        return answer

    usual = saves()
    assert saves("checkpoint.asynchronous=false")["hold_s"] == usual["write_s"] != usual["hold_s"]
    assert saves("checkpoint.every_minutes=2")["every_s"] == 120
    assert saves("checkpoint.each_host=part")["host_bytes"] == usual["host_bytes"]  # ddp: that is all of it
    assert "assumed" in usual["source"]
    monkeypatch.setattr(hosts, "NETWORK_FILESYSTEMS", ("ext4",))
    assert "file server (ext4)" in saves()["source"]


def measured(world: World, *, torch: str) -> None:
    """A speed of host a, as it computes on its processor."""
    job, cluster = load(start(world))
    with reached(cluster, home=world.home, console=world, deps=world.deps) as (members, context):
        training = training_of(job, decide(job, members, context).world)
    key = ProfileKey(
        gpu="cpu",
        driver="",
        torch=torch,
        kernels="sdpa",
        method=method_words(training),
        dtype=training.compute,
        architecture=architecture_digest(read_architecture(CONFIG)),
    )
    compute = ComputeModel(per_token_s=1e-5, source="calibrated")
    save_profile(world.home, Profile(key=key, measured="2026-01-02T00:00:00+00:00", host="a", compute=compute))


CHANGES = (WhatIf(), WhatIf(without=("b",)))


def told(world: World, change: WhatIf) -> list[str]:
    prediction = predict(start(world), change, console=world, deps=world.deps)
    return plan_lines(prediction, (), home=world.home, why=False, width=400)


@pytest.mark.parametrize("change", CHANGES)
def test_a_speed_measured_with_another_torch_is_used_and_told(change: WhatIf, world: World) -> None:
    measured(world, torch="2.9.0+cpu")
    notes = [line for line in told(world, change) if line.startswith("note") and "speed measured" in line]
    assert len(notes) == 1
    assert "a: speed measured 2026-01-02 with torch 2.9.0+cpu, 2.13.0 now" in notes[0]


@pytest.mark.parametrize("change", CHANGES)
def test_a_speed_measured_with_the_same_torch_needs_no_word(change: WhatIf, world: World) -> None:
    measured(world, torch="2.13.0+cpu")
    assert "speed measured" not in "\n".join(told(world, change))


def test_a_start_says_it_too(world: World) -> None:
    measured(world, torch="2.9.0+cpu")
    world.said.clear()
    measured(world, torch="2.9.0+cpu")  # decides, as a start does
    assert any("speed measured 2026-01-02 with torch" in line for line in world.said)
