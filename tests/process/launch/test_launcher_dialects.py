"""Which make of MPI launcher is on a computer, and the end of one that would wait for ever. Intel's version is recorded,
its program simulated."""

import contextlib
import json
import os
import signal
import subprocess
import sys

import pytest

from gangline.agent.supervise import processes
from tests.waiting import wait_until

INTEL = "Intel(R) MPI Library for Linux* OS, Version 2021.14 Build 20241121"
MPICH = "HYDRA build details:\n    Version:                                 4.0.2"
OPENMPI = "mpirun (Open MPI) 4.1.4"
FAKE = """#!/bin/sh
if [ "$1" = --version ]; then cat {said}; exit 0; fi
echo "$LANGUAGE_OF" "$@" > {seen}
exec {then}
"""


@pytest.fixture
def launch(tmp_path):
    """`launch(version, then)`: has a program with that version started; the answer of the agent."""
    begun = []

    def start(version, then="true"):
        program, said = tmp_path / "mpirun", tmp_path / "said"
        said.write_text(version)
        program.write_text(FAKE.format(said=said, seen=tmp_path / "seen", then=then))
        program.chmod(0o700)
        shell = str(tmp_path / "remote-shell")
        asked = {
            "folder": str(tmp_path),
            "argv": [str(program), "open"],
            "dialects": [
                {"mark": "Open MPI", "argv": [str(program), "open"], "env": {}, "remote_shell": None},
                {"mark": "Intel(R) MPI", "argv": [str(program), "intel"], "env": {}, "remote_shell": shell},
                {"mark": "HYDRA", "argv": [str(program), "mpich", shell], "env": {"LANGUAGE_OF": "x"},
                 "remote_shell": shell},
            ],
        }  # fmt: skip
        words = [sys.executable, "-m", "gangline.agent", "foreground", "launch"]
        done = subprocess.run(words, input=json.dumps(asked).encode(), capture_output=True, check=False)
        if (tmp_path / "launcher.json").exists():
            begun.append(json.loads((tmp_path / "launcher.json").read_text())["pid"])
        return json.loads(done.stdout.splitlines()[-1])

    yield start
    for pid in begun:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def ended(folder):
    path = folder / "ended.json"
    return wait_until(lambda: json.loads(path.read_text()) if path.exists() else None, "it has ended")


@pytest.mark.parametrize(
    ("version", "words"), [(OPENMPI, "open"), (INTEL, "intel"), (f"{INTEL} HYDRA", "intel"), (MPICH, "x mpich")]
)
def test_the_version_says_how_a_launcher_is_called(launch, tmp_path, version, words):
    assert launch(version)["kind"] == "result"
    assert ended(tmp_path)["returncode"] == 0
    assert (tmp_path / "seen").read_text().strip().startswith(words)


def test_a_launcher_of_another_make_is_not_started(launch, tmp_path):
    said = launch("MVAPICH mpirun_rsh 2.3")
    assert "is of no make that gangline can start here" in said["what"]
    assert "found: MVAPICH mpirun_rsh 2.3" in said["seen"]
    assert not (tmp_path / "seen").exists()


def test_a_launcher_is_ended_once_one_of_its_ssh_has_failed(launch, tmp_path):
    code = tmp_path / "hangs.py"
    code.write_text("import subprocess, sys, time\nsubprocess.run([sys.argv[1], '-o', 'No', 'h9'])\ntime.sleep(600)\n")
    launch(MPICH, then=f"{sys.executable} {code} {tmp_path / 'remote-shell'}")
    assert ended(tmp_path)["returncode"] == 255
    assert "h9 ended with exit code 255" in (tmp_path / "launcher.log").read_text()


def test_nothing_that_a_launcher_has_started_in_its_session_outlives_it(launch, tmp_path):
    child = tmp_path / "child"
    launch(OPENMPI, then=f"sh -c 'sleep 600 & echo $! > {child}'")
    ended(tmp_path)
    assert child.read_text().strip()
    left = processes.find(int(child.read_text()))
    assert left is None or not processes.is_alive(left.pid, left.start_ticks)
