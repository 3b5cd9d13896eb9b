"""The files of `gangline export-config`, each used by the program that it is for: it starts the ranks of the request."""

import os
import shutil
import socket
import subprocess
import sys

import pytest

from gangline.control.user_command import command_gang
from gangline.launch.config_files import FORMATS, RunForOthers
from gangline.launch.direct import DirectBackend
from gangline.launch.program import Program
from gangline.runs.cluster import Cluster, Host

SCRIPT = """
import os, sys
rank, size, local = (os.environ[name] for name in sys.argv[2:])
open(f"{sys.argv[1]}/{rank}-{size}-{local}", "x").close()
"""
TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")


@pytest.fixture
def export(tmp_path):
    """The files for hosts with so many slots each, which all are this computer."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "seen").mkdir()

    def write(kind, *slots):
        hosts = tuple(
            Host(name=f"pc{number}", workdir=str(tmp_path), python=sys.executable, slots=count)
            for number, count in enumerate(slots)
        )
        cluster = Cluster(name="c", hosts=hosts)
        program = Program(kind="command", argv=("train.py", str(tmp_path / "seen"), *TORCH))
        gang = command_gang(cluster, "calm-otter-7", 1)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        request = DirectBackend(num_cpus=1).render(cluster, gang, port=port, program=program)
        files = FORMATS[kind](RunForOthers(cluster=cluster, request=request, program=program))
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        return [name for name in files if name.endswith(".sh")]

    return write


def seen(folder):
    return sorted(path.name for path in (folder / "seen").iterdir())


def start(folder, *commands):
    env = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    processes = [subprocess.Popen(command, cwd=folder, env=env) for command in commands]
    assert [process.wait(timeout=120) for process in processes] == [0] * len(commands)


def test_the_files_for_torchrun_start_the_ranks_of_every_host(export, tmp_path):
    start(tmp_path, *(["sh", name] for name in export("torchrun", 1, 2)))
    assert seen(tmp_path) == ["0-3-0", "1-3-0", "2-3-1"]


def test_the_files_for_accelerate_start_the_ranks_of_every_host(export, tmp_path):
    start(tmp_path, *(["sh", name] for name in export("accelerate", 2, 2)))
    assert seen(tmp_path) == ["0-4-0", "1-4-1", "2-4-0", "3-4-1"]


def test_mpirun_starts_the_ranks_of_a_hostfile(export, tmp_path):
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun on this computer")
    export("hostfile", 3)
    start(tmp_path, ["mpirun", "--hostfile", "hostfile", sys.executable, "train.py", str(tmp_path / "seen"), *MPI])
    assert seen(tmp_path) == ["0-3-0", "1-3-1", "2-3-2"]
