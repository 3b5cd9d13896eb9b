"""What runs of other users of this computer have is named, and theirs are not ours to stop."""

import json
import os

import pytest

from gangline.agent import machine_leases
from gangline.agent.machine_leases import publish, withdraw
from gangline.cli.main import main

ANNA = 23001


@pytest.fixture
def lease(tmp_path, monkeypatch):
    """A lease of another user: a locked file that belongs to that user."""
    if os.getuid() != 0:
        pytest.skip("takes root, to give a file away")
    (tmp_path / "lock").mkdir()
    (tmp_path / "lock").chmod(0o1777)
    monkeypatch.setattr(machine_leases, "PLACES", (str(tmp_path / "lock"),))
    monkeypatch.setenv("GANGLINE_HOME", str(tmp_path / "home"))
    mine = publish("gpu-GPU-aaaa", {"run": "calm-otter-7", "attempt": 1, "host": "pc1", "since": 1e9, "processes": []})
    os.fchown(mine.descriptor, ANNA, ANNA)
    yield mine
    withdraw(mine)


def typed(capsys, *words):
    code = main(words)
    said = capsys.readouterr()
    return code, said.out, said.err


def test_ps_names_the_run_of_another_user(lease, capsys):
    code, _, said = typed(capsys, "ps")
    assert code == 0
    assert f"this computer: GPU-aaaa is in use by user {ANNA}: calm-otter-7 since 2001-09-0" in said
    code, data, _ = typed(capsys, "ps", "--json")
    (row,) = json.loads(data)["other_users"]
    assert (row["slot"], row["user"], row["run"]) == ("gpu-GPU-aaaa", f"user {ANNA}", "calm-otter-7")


def test_stop_says_whose_run_it_is(lease, capsys):
    code, _, said = typed(capsys, "stop", "calm-otter")
    assert code == 2
    assert f"calm-otter-7 is a run of user {ANNA}, not yours" in said
    assert f"ask user {ANNA}: only that user and root can end it" in said


def test_stop_of_a_run_that_nobody_has_says_so(lease, capsys):
    code, _, said = typed(capsys, "stop", "brave-fox-2")
    assert code == 2
    assert "no such run: 'brave-fox-2'" in said
