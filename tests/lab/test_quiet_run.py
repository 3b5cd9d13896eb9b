"""A script of the user's own that stands still without a word: it is told of, or ended, and nothing of it is left.

torchrun is played (played_torch.py), and so is a script that joins with torch and then hangs.
"""

import json
import time

import pytest

from tests.lab import played_torch
from tests.lab.ordinary import User
from tests.lab.user import processes_of_runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SCRIPT = """
import mmap, os, socket, sys, time
with open("libtorch_played.so", "wb+") as library:  # by which a host agent knows that torch is there
    library.write(bytes(4096))
    library.flush()
    torch = mmap.mmap(library.fileno(), 4096, prot=mmap.PROT_READ)
meet = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
is_first = os.environ["RANK"] == "0"
if is_first:
    store = socket.create_server(meet)
    met = [store.accept()[0] for _ in range(int(os.environ["WORLD_SIZE"]) - 1)]
else:
    deadline = time.monotonic() + 60
    while True:
        try:
            met = socket.create_connection(meet)
            break
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
for step in range(24 if is_first else 14):  # the other one hangs first
    print("step", step, flush=True)
    time.sleep(0.5)
def wait_for_others():
    while not os.path.exists("go"):
        time.sleep(0.1)
def load_rows():
    wait_for_others()
wait_for_others() if is_first else load_rows()
print("it goes on", flush=True)
time.sleep(600)
"""


@pytest.fixture
def user(lab):
    made = lab(2, meshed=True)
    user = User(made)
    python = played_torch.install(user, made.hosts)
    user.check(["gangline", "init", "h0", "h1"])
    user.write("cluster.yaml", user.read("cluster.yaml").replace("slots: 1", f"python: {python}\n    slots: 1"))
    user.write("project/train.py", SCRIPT)
    return user


def starts(user, *options, code=0):
    words = ["gangline", "run", "--dir", "project", "--stall-after", "10s", *options, "--", "train.py"]
    done = user.run(words, timeout_s=120)
    assert done.returncode == code, (done.stdout, done.stderr)
    return done


def awaits(user, condition, what):
    """Look at `ps` until something is true of the only run that goes on."""
    deadline = time.monotonic() + 60
    while not condition(row := json.loads(user.check(["gangline", "ps", "--json"]))["runs"][0]):
        assert time.monotonic() < deadline, (what, row)
        time.sleep(0.5)


def left(user):
    return [line for host in (*user.lab.hosts, user.lab.user) for line in processes_of_runs(host)]


def test_a_script_that_stands_still_is_told_of_or_ended(user):
    run = starts(user, "--detach").stdout.strip()
    awaits(user, lambda row: row["quiet_since"], "it is quiet")
    assert "running (quiet for " in user.check(["gangline", "ps"])
    (event,) = told(user, run, "quiet")
    assert "rank 1 on h1 fell silent first" in event["what"]
    assert (event["first"], event["last"]) == ([{"host": "h1", "rank": 1}], [{"host": "h0", "rank": 0}])
    assert event["line"] == "step 13"
    awaits(user, lambda _: told(user, run, "standing"), "its stacks are there")
    (event,) = told(user, run, "standing")
    lines = SCRIPT.splitlines()
    here = f"wait_for_others (train.py:{lines.index('        time.sleep(0.1)') + 1})"
    assert event["what"] == f"the ranks stand: rank 0 on h0 and rank 1 on h1 at {here}"
    user.check(["touch", f"gangline/runs/{run}/project/go"], on=user.lab.hosts[0])
    awaits(user, lambda row: row["quiet_since"] is None, "it prints again")
    assert len(told(user, run, "printing")) == 1
    user.check(["gangline", "stop", run, "--now"], timeout_s=60)
    assert left(user) == []

    said = starts(user, "--on-stall", "stop", "--resume-flag=--again", code=5).stderr
    assert "quiet  no rank has printed anything for 1" in said
    assert "error: no rank has printed anything for 10.0 s" in said
    assert "rank 1 on h1 fell silent first" in said
    assert "the last line of rank 1 on h1: step 13" in said
    assert "stack of rank 1 on h1, innermost first:" in said
    assert "load_rows (train.py:" in said
    assert "gangline resume" in said
    assert left(user) == []


def told(user, run, name):
    """The events of a name, as the head wrote them."""
    lines = user.read(f"gangline/runs/{run}/events.jsonl", on=user.lab.hosts[0]).splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == name]
