"""gangline's own source: on every host that lacks it, the same bytes everywhere."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gangline.provision.code import place_code, preview_code, source_files, source_tree, trainer_here
from gangline.provision.trees import How, here, look
from gangline.runs.cluster import Cluster, Host
from gangline.runs.training_environment import FILE, TrainingEnvironment
from tests.unit.provision.hosts import kennel


def test_every_host_over_ssh_gets_the_source_and_runs_it(tmp_path: Path) -> None:
    cluster, transports = kennel(tmp_path, "pc1", "pc2", python=sys.executable)
    placed = place_code(cluster, transports)
    for host in placed.hosts:
        assert host.code == f"{host.workdir}/code/{source_tree().hash[:16]}"
        code = "import gangline.worker.data.model_folder as it; print(it.__file__)"
        done = subprocess.run(host.argv("-c", code), env=host.code_env, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == f"{host.code}/gangline/worker/data/model_folder.py"
        assert list(Path(host.workdir, "incoming").iterdir()) == []


def test_a_host_that_has_it_is_left_alone_also_after_python_cached_it(tmp_path: Path) -> None:
    cluster, transports = kennel(tmp_path, "pc1")
    placed = place_code(cluster, transports)
    (Path(placed.head.code) / "gangline" / "__pycache__").mkdir()
    (Path(placed.head.code) / "gangline" / "__pycache__" / "units.pyc").write_bytes(b"cached")
    transports["pc1"].pushed.clear()
    assert place_code(cluster, transports) == placed
    assert transports["pc1"].pushed == []


@pytest.mark.parametrize("damage", ["flip", "add", "remove"])
def test_a_changed_byte_or_a_foreign_file_is_noticed_and_put_right(tmp_path: Path, damage: str) -> None:
    cluster, transports = kennel(tmp_path, "pc1")
    folder = Path(place_code(cluster, transports).head.code) / "gangline"
    if damage == "flip":
        (folder / "units.py").write_bytes((folder / "units.py").read_bytes()[:-1] + b" ")
    elif damage == "add":
        (folder / "torch.py").write_text("raise SystemExit('not ours')")
    else:
        (folder / "units.py").unlink()
    place_code(cluster, transports)
    assert not (folder / "torch.py").exists()
    assert (folder / "units.py").read_bytes() == source_files()["gangline/units.py"].data


def test_this_computer_has_it_installed(tmp_path: Path) -> None:
    cluster = Cluster(name="home", hosts=(Host(name="here", workdir=str(tmp_path), python=sys.executable),))
    assert place_code(cluster, {}) == cluster
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("real_agent")
def test_another_python_of_this_computer_is_brought_it(tmp_path: Path) -> None:
    setup_there = TrainingEnvironment(python=str(tmp_path / "python"), lock="0" * 16)
    (tmp_path / "python").symlink_to(sys.executable)
    setup_there.save(tmp_path / FILE)
    trainer = trainer_here(tmp_path)
    assert trainer.python == setup_there.python
    assert (Path(trainer.code) / "gangline" / "app.py").is_file()


def test_a_dry_run_knows_where_it_will_be_and_writes_nothing(tmp_path: Path) -> None:
    cluster, transports = kennel(tmp_path, "pc1")
    assert preview_code(cluster).head.code
    assert list(tmp_path.iterdir()) == []
    assert preview_code(cluster) == place_code(cluster, transports)


def test_only_source_and_tables_are_copied() -> None:
    tables = {name for name in source_files() if name.startswith("gangline/catalog/") and name.endswith(".json")}
    assert tables
    assert {Path(name).suffix for name in source_files().keys() - tables} <= {".py", ".typed"}
    assert "gangline/app.py" in source_files()
    assert not any("__pycache__" in name for name in source_files())


def test_the_hash_is_the_one_that_a_host_finds(tmp_path: Path) -> None:
    cluster, transports = kennel(tmp_path, "pc1")
    code = place_code(cluster, transports).head.code
    assert look(here(Path(code)), How(exact=True)).hash == source_tree().hash


@pytest.mark.usefixtures("real_agent")
def test_many_who_bring_it_at_once_do_not_hinder_each_other(tmp_path: Path) -> None:
    cluster, _ = kennel(tmp_path, "pc1")
    with ThreadPoolExecutor(max_workers=4) as pool:
        placed = list(pool.map(lambda _: place_code(cluster, kennel(tmp_path, "pc1")[1]), range(4)))
    assert all(one == preview_code(cluster) for one in placed)
    assert look(here(Path(placed[0].head.code)), How(exact=True)).hash == source_tree().hash
    assert [path.name for path in Path(placed[0].head.code).parent.iterdir()] == [Path(placed[0].head.code).name]
