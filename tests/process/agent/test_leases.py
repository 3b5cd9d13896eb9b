"""Two runs never share a slot by accident, and what is left of a run keeps its slots."""

import fcntl
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gangline.agent import machine_leases
from gangline.agent.supervise import leases
from gangline.agent.supervise.leases import Leases, Taken, held

GPUS = {"0000:01:00.0": "GPU-aaaa", "0000:41:00.0": "GPU-bbbb"}

CLAIM = """
import json, sys, time
from gangline.agent.supervise.leases import Leases, Taken
request = json.loads(sys.argv[1])
sys.stdin.readline()
claimed = Leases()
try:
    claimed.claim(request)
except Taken as taken:
    print(json.dumps(taken.record), flush=True)
else:
    print("mine", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def ask(tmp_path, monkeypatch):
    """Make the request of a run; the state folder of the user is the test's."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(leases, "DRIVER", tmp_path / "driver")
    monkeypatch.setattr(machine_leases, "PLACES", (str(tmp_path / "lock"),))
    (tmp_path / "lock").mkdir()
    (tmp_path / "lock").chmod(0o1777)

    def make(run="calm-otter-7", *, host="pc1", attempt=1, num_ranks=1, slots=1, devices=(), env=None, workdir="work"):
        return {
            "run_id": run,
            "attempt": attempt,
            "host": host,
            "folder": str(tmp_path / run / str(attempt) / host),
            "leases": str(tmp_path / workdir / "leases" / host),
            "ranks": list(range(num_ranks)),
            "slots": slots,
            "devices": list(devices),
            "env": env or {},
        }

    return make


@pytest.fixture
def gpus(tmp_path):
    for bus, uuid in GPUS.items():
        folder = tmp_path / "driver" / bus
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t NVIDIA H200\nGPU UUID: \t {uuid}\nBus Location: {bus}\n")


@pytest.fixture
def claim():
    mine = []

    def take(request):
        mine.append(Leases())
        mine[-1].claim(request)
        return mine[-1]

    yield take
    for each in mine:
        each.let_go()


def test_a_slot_has_one_run_and_the_other_is_told_who_and_since_when(ask, claim):
    first = claim(ask("calm-otter-7"))
    assert first.slots == ["cpu-0"]
    with pytest.raises(Taken) as taken:
        claim(ask("brave-fox-2"))
    words = taken.value.record
    assert words["what"] == "cpu-0 is in use by calm-otter-7"
    assert time.strftime("%Y-%m-%d") in words["seen"]
    assert words["fix"].endswith("gangline stop calm-otter-7")
    first.end()
    assert claim(ask("brave-fox-2")).slots == ["cpu-0"]


def test_another_attempt_of_the_same_run_is_not_to_be_stopped(ask, claim):
    """A supervisor that was cut off comes back after somebody continued the run: its advice must not end that."""
    claim(ask("calm-otter-7"))
    with pytest.raises(Taken) as taken:
        claim({**ask("calm-otter-7"), "attempt": 2})
    words = taken.value.record
    assert words["what"] == "cpu-0 is in use by calm-otter-7"
    assert words["fix"].startswith("another computer continued the run")
    assert "gangline stop" not in words["fix"]


def test_reserved_slots_go_to_the_host_agent_of_that_start_alone_and_are_its_own_then(ask, claim, tmp_path):
    request = {**ask(), "released": str(tmp_path / "released")}
    reservation = leases.reserve(request)
    assert next(reservation) == {"kind": "held"}
    with pytest.raises(Taken, match="in use by calm-otter-7"):
        claim(ask("brave-fox-2"))
    assert claim(ask()).slots == ["cpu-0"]
    Path(request["released"]).touch()
    assert list(reservation)[-1] == {"kind": "result"}
    assert not Path(request["released"]).exists()
    assert held(ask()) == ["cpu-0"]
    with pytest.raises(Taken):
        claim(ask("brave-fox-2"))


def test_reserved_slots_that_nobody_took_are_free_once_they_are_released(ask, claim, tmp_path):
    request = {**ask(), "released": str(tmp_path / "released")}
    reservation = leases.reserve(request)
    next(reservation)
    Path(request["released"]).touch()
    assert list(reservation)[-1] == {"kind": "result"}
    assert claim(ask("brave-fox-2")).slots == ["cpu-0"]


def test_a_host_has_as_many_cpu_slots_as_the_cluster_file_says(ask, claim):
    assert claim(ask("a-a-1", slots=3)).slots == ["cpu-0"]
    assert claim(ask("b-b-2", slots=3, num_ranks=2)).slots == ["cpu-1", "cpu-2"]
    with pytest.raises(Taken):
        claim(ask("c-c-3", slots=3))


def test_all_or_nothing(ask, claim):
    claim(ask("a-a-1", slots=2))
    with pytest.raises(Taken):
        claim(ask("b-b-2", slots=2, num_ranks=2))
    assert claim(ask("c-c-3", slots=2)).slots == ["cpu-1"]


def test_host_agents_of_one_run_may_share_and_another_attempt_may_not(ask, claim, gpus):
    claim(ask(host="pc1", devices=[0]))
    claim(ask(host="pc2", devices=[0]))
    with pytest.raises(Taken, match="gpu-GPU-aaaa"):
        claim(ask(attempt=2, devices=[0]))


def test_a_gpu_of_host_agents_that_rest_may_be_shared_with_the_next_attempt_of_their_run(ask, claim, gpus):
    rests = {"warm_pool": {"rest_s": 600.0}}
    claim({**ask(host="pc1", devices=[0]), **rests})
    with pytest.raises(Taken):
        claim(ask(attempt=2, host="pc2", devices=[0]))  # it is not one of those
    with pytest.raises(Taken):
        claim({**ask("brave-fox-2", attempt=2, host="pc2", devices=[0]), **rests})
    assert claim({**ask(attempt=2, host="pc2", devices=[0]), **rests}).slots == ["gpu-GPU-aaaa"]


def test_a_cpu_slot_of_one_that_rests_is_not_shared(ask, claim):
    rests = {"warm_pool": {"rest_s": 600.0}}
    claim({**ask(), **rests})
    with pytest.raises(Taken):
        claim({**ask(attempt=2), **rests})


def test_what_is_passed_on_is_held_for_the_other_part(ask, claim):
    first, second = ask(), ask(attempt=2)
    mine = claim(first)
    mine.pass_on(second, tag=first["folder"])
    assert (held(first), held(second)) == ([], ["cpu-0"])
    with pytest.raises(Taken) as taken:
        claim(ask("brave-fox-2"))
    assert "its attempt 2 holds it" in taken.value.record["seen"]


def test_an_orphan_of_what_was_passed_on_keeps_the_slot(ask, claim):
    first = ask()
    mine = claim(first)
    env = {**os.environ, "GANGLINE_PART": first["folder"]}
    orphan = subprocess.Popen([sys.executable, "-c", "print(); input()"], stdin=-1, stdout=-1, env=env)
    orphan.stdout.readline()
    mine.pass_on(ask(attempt=2), tag=first["folder"])
    mine.let_go()
    with pytest.raises(Taken, match="cpu-0"):
        claim(ask("brave-fox-2"))
    orphan.communicate(b"\n")


def test_a_shared_slot_is_free_when_the_last_has_gone(ask, claim, gpus):
    first, second = claim(ask(host="pc1", devices=[0])), claim(ask(host="pc2", devices=[0]))
    first.end()
    with pytest.raises(Taken):
        claim(ask("brave-fox-2", devices=[0]))
    second.end()
    claim(ask("brave-fox-2", devices=[0]))


def test_gpus_are_claimed_by_uuid_whatever_the_work_folder(ask, claim, gpus):
    assert claim(ask(num_ranks=2, devices=[0, 1])).slots == ["gpu-GPU-aaaa", "gpu-GPU-bbbb"]
    with pytest.raises(Taken):
        claim(ask("brave-fox-2", workdir="elsewhere", devices=[1]))


@pytest.mark.parametrize(
    ("visible", "slots"),
    [
        ("1", ["gpu-GPU-bbbb"]),
        ("1,0", ["gpu-GPU-bbbb"]),
        ("GPU-bb", ["gpu-GPU-bbbb"]),
        ("MIG-1234/../5", ["gpu-MIG-1234____5"]),
        ("", ["cpu-0"]),
        ("7,0", ["cpu-0"]),
    ],
)
def test_the_first_gpu_of_a_run_is_the_first_that_it_may_see(ask, claim, gpus, visible, slots):
    assert claim(ask(devices=[0], env={"CUDA_VISIBLE_DEVICES": visible})).slots == slots


LIST = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-aaaa)
  MIG 3g.20gb     Device  0: (UUID: MIG-1111)
  MIG 3g.20gb     Device  1: (UUID: MIG-1222)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-bbbb)
"""


@pytest.mark.parametrize(
    ("visible", "slots"),
    [
        (None, ["gpu-MIG-1111"]),
        ("0", ["gpu-MIG-1111"]),
        ("GPU-a", ["gpu-MIG-1111"]),
        ("MIG-12", ["gpu-MIG-1222"]),
        ("MIG-1", ["cpu-0"]),
        ("1", ["gpu-GPU-bbbb"]),
    ],
)
def test_of_a_card_that_is_cut_an_instance_is_claimed(ask, claim, gpus, tmp_path, monkeypatch, visible, slots):
    """The text is written after the public format of nvidia-smi -L."""
    (tmp_path / "capabilities" / "gpu0" / "mig" / "gi1").mkdir(parents=True)
    monkeypatch.setattr(leases, "CAPABILITIES", tmp_path / "capabilities")
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\ncat <<'.'\n{LIST}.\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert claim(ask(devices=[0], env=env)).slots == slots


def test_two_work_folders_do_not_share_cpu_slots(ask, claim):
    claim(ask("a-a-1"))
    claim(ask("b-b-2", workdir="elsewhere"))


def test_a_process_that_outlives_its_host_agent_keeps_the_slot(ask, claim):
    request = ask()
    mine = claim(request)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=mine.descriptors)
    mine.let_go()  # as the kernel does when the host agent is killed
    assert held(request) == ["cpu-0"]
    with pytest.raises(Taken, match="cpu-0"):
        claim(ask("brave-fox-2"))
    child.communicate(b"\n")
    assert held(request) == []
    claim(ask("brave-fox-2"))


def test_an_orphan_that_did_not_inherit_the_lock_keeps_the_slot_too(ask, claim):
    request = ask()
    mine = claim(request)
    env = {**os.environ, "GANGLINE_PART": request["folder"]}
    orphan = subprocess.Popen([sys.executable, "-c", "print(); input()"], stdin=-1, stdout=-1, env=env)
    orphan.stdout.readline()
    mine.let_go()
    with pytest.raises(Taken, match="cpu-0"):
        claim(ask("brave-fox-2"))
    orphan.communicate(b"\n")
    claim(ask("brave-fox-2"))


def test_without_a_folder_nothing_is_claimed(ask, claim):
    assert claim({**ask(), "leases": None}).slots == []


def test_a_lease_file_that_is_damaged_is_no_obstacle(ask, claim):
    request = ask()
    claim(request).let_go()
    Path(request["leases"], "cpu-0").write_text("{")
    claim(ask("brave-fox-2"))


def test_of_many_who_want_the_same_slots_exactly_one_gets_them(ask):
    def start(number):
        request = json.dumps(ask(f"run-{number}", num_ranks=3, slots=3))
        return subprocess.Popen([sys.executable, "-c", CLAIM, request], stdin=-1, stdout=-1, text=True)

    with ThreadPoolExecutor(4) as pool:
        claims = list(pool.map(start, range(12)))
    for each in claims:
        each.stdin.write("go\n")
        each.stdin.flush()
    said = [each.stdout.readline().strip() for each in claims]
    assert said.count("mine") == 1
    winner = f"run-{said.index('mine')}"
    assert {json.loads(words)["what"] for words in said if words != "mine"} == {f"cpu-0 is in use by {winner}"}
    for each in claims:
        each.communicate("\n")


def test_who_holds_up_the_claims_of_others_is_not_waited_for_without_end(ask, monkeypatch):
    monkeypatch.setattr(leases, "CLAIM_S", 0.05)
    request = ask()
    Path(request["leases"]).mkdir(parents=True)
    with Path(request["leases"], "claim.lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        with pytest.raises(OSError, match="was held by others"):
            Leases().claim(request)
