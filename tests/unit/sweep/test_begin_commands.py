"""A sweep over a command of the user's own: what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from gangline.control.user_command import draft
from gangline.errors import UsageError
from gangline.launch.launchers.taking_off import RankPlaces
from gangline.provision.console import SILENT
from gangline.sweep.begin import SweepOptions, plan_sweep
from gangline.sweep.records import MetricRecord


def planned(home: Path, *words: str, command: tuple[str, ...], **more: object) -> None:
    template = draft(command, folder=home)
    options = SweepOptions(
        home=home, job=Path("run"), words=words, template=template, metric=MetricRecord(name="loss"), **more
    )
    plan_sweep(options, console=SILENT)


def test_halving_needs_a_job(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--halving needs a job of gangline's own"):
        planned(tmp_path, "lr=1,2", command=("train.py", "{lr}"), halving=True)


def test_a_command_without_a_place_for_the_values_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"the command has no place for lr"):
        planned(tmp_path, "lr=1,2", command=("train.py", "--lr", "1"))


def test_a_launcher_that_cannot_be_taken_off_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"sbatch starts ranks itself"):
        planned(tmp_path, "lr=1,2", command=("sbatch", "train.sh", "{lr}"))


def test_a_launcher_in_the_command_is_taken_off_each_trial(tmp_path: Path) -> None:
    template = draft(("torchrun", "--nproc-per-node", "2", "train.py", "{lr}"), folder=tmp_path)
    assert template.words == ("train.py", "{lr}")
    assert template.placement == RankPlaces(ranks_per_host=2)


def test_an_array_in_the_options_of_the_cluster_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text("slurm: {nodes: 1, options: ['--array=1-3']}\n")
    (tmp_path / "train.py").write_text("")
    with pytest.raises(UsageError, match=r"a sweep has an array of its own"):
        planned(tmp_path, "lr=1,2", command=("train.py", "{lr}"), cluster=tmp_path / "cluster.yaml")
