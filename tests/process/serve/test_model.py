"""Which checkpoint is exported or talked to, and the command that does it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gangline import app
from gangline.control.supervision import open_run
from gangline.errors import CheckpointError, UsageError
from gangline.runs.checkpoints import part_folder
from gangline.runs.files import read_json, write_json
from gangline.runs.manifest import verify_part
from gangline.serve.run_model import SavedPart, complete, export_argv, find_saved, is_model_folder, name_base
from tests.process.app.world import World


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "a.txt").write_text("a text\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return World(root=tmp_path)


@pytest.fixture
def run_id(world: World) -> str:
    return app.train(world.start(), console=world, deps=world.deps).run_id


def find(world: World, run_id: str, step: int | None = None) -> SavedPart:
    with open_run(run_id, home=world.home, deps=world.deps) as run:
        return find_saved(run_id, run.cluster, run.transports, step=step)


def damage(world: World, run_id: str, step: int, host: str) -> None:
    part = part_folder(world.host(host, run_id).checkpoints, step, host)
    (part / "weights").write_text("WEIGHTS of step 40", encoding="utf-8")


def test_the_newest_whole_checkpoint_of_the_head_is_taken(world: World, run_id: str) -> None:
    world.save(run_id, 20)
    world.save(run_id, 40)
    saved = find(world, run_id)
    assert (saved.step, saved.place.host.name) == (40, "a")
    assert saved.part == part_folder(world.host("a", run_id).checkpoints, 40, "a")


def test_where_the_heads_copy_is_damaged_another_hosts_is_taken(world: World, run_id: str) -> None:
    world.save(run_id, 40)
    damage(world, run_id, 40, "a")
    saved = find(world, run_id)
    assert (saved.step, saved.place.host.name) == (40, "b")
    assert saved.run_folder == world.host("b", run_id).folder


def test_a_step_can_be_named(world: World, run_id: str) -> None:
    world.save(run_id, 20)
    world.save(run_id, 40)
    assert find(world, run_id, 20).step == 20


def test_a_step_that_is_not_there_names_those_that_are(world: World, run_id: str) -> None:
    world.save(run_id, 20)
    with pytest.raises(UsageError, match="no checkpoint of step 33") as caught:
        find(world, run_id, 33)
    assert "20" in caught.value.seen


def test_a_damaged_step_is_not_replaced_by_another_when_it_was_asked_for(world: World, run_id: str) -> None:
    world.save(run_id, 20)
    world.save(run_id, 40)
    for host in ("a", "b"):
        damage(world, run_id, 40, host)
    with pytest.raises(CheckpointError) as caught:
        find(world, run_id, 40)
    assert "weights" in caught.value.seen


def test_an_uncommitted_checkpoint_is_not_used(world: World, run_id: str) -> None:
    world.save(run_id, 40, commit=False)
    with pytest.raises(UsageError, match="has no checkpoint"):
        find(world, run_id)


def test_of_a_checkpoint_in_parts_the_host_that_exports_gets_the_others_parts(world: World, run_id: str) -> None:
    world.save(run_id, 40, in_parts=True)
    saved = find(world, run_id)
    assert (saved.step, saved.place.host.name) == (40, "a")
    other = part_folder(world.host("a", run_id).checkpoints, 40, "b")
    assert not other.exists()
    said: list[str] = []
    complete(saved, run_id, console=Said(said))
    assert verify_part(other) == []
    assert any("copied step 40, the part of b from b to a" in line for line in said)
    assert not part_folder(world.host("b", run_id).checkpoints, 40, "a").exists()


class Said:
    """Keeps what it is told."""

    def __init__(self, lines: list[str]) -> None:
        self.report = self.progress = lines.append


def test_one_that_lacks_a_part_is_not_exported_and_says_where_it_belongs(world: World, run_id: str) -> None:
    world.save(run_id, 40, in_parts=True)
    damage(world, run_id, 40, "b")
    with pytest.raises(CheckpointError, match="can be used without b: they lie in parts") as caught:
        find(world, run_id)
    assert "it held the rows of rank 1 of 2" in caught.value.seen


def test_exports_lie_in_the_run_directory_unless_told_otherwise(world: World, run_id: str) -> None:
    world.save(run_id, 40)
    saved = find(world, run_id)
    folder = world.host("a", run_id).folder
    words = export_argv(saved, to=None, merged=True)
    assert words[:4] == ("export", str(folder), "--checkpoint", str(saved.part))
    assert words[4:] == ("--to", str(folder / "export" / "step-40-merged"), "--merged")
    assert export_argv(saved, to=Path("here"), merged=False)[-1] == str(world.root / "here")


def test_a_fetched_adapter_names_its_base_model_as_this_computer_knows_it(tmp_path: Path) -> None:
    write_json(tmp_path / "adapter_config.json", {"base_model_name_or_path": "/far/models/llama-1", "r": 4})
    write_json(tmp_path / "gangline.json", {"base_model": "/far/models/llama-1", "step": 40})
    name_base(tmp_path, "/home/me/llama")
    assert read_json(tmp_path / "adapter_config.json") == {"base_model_name_or_path": "/home/me/llama", "r": 4}
    assert read_json(tmp_path / "gangline.json") == {"base_model": "/home/me/llama", "step": 40}


def test_a_model_or_an_adapter_makes_a_model_folder(tmp_path: Path) -> None:
    assert not is_model_folder(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}", encoding="utf-8")
    assert is_model_folder(tmp_path)
