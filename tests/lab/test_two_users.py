"""Two users of one machine with one GPU (simulated): whose it is, is told, and nobody ends what is another's.

torchrun is played (played_torch.py), and so are the ranks: they wait. As in real life, torchrun's ranks do not inherit
the lock of the lease.
"""

import json
import re
import time

import pytest

from tests.lab import gpus, played_torch
from tests.lab.hosts import Lab
from tests.lab.ordinary import User

pytestmark = [pytest.mark.lab("root", "gcc"), pytest.mark.timeout(300)]

MINE = """
import json, os
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        words = open(f"/proc/{pid}/cmdline").read().split(chr(0))
        is_mine = os.stat(f"/proc/{pid}").st_uid == os.getuid() and int(pid) != os.getpid()
    except OSError:
        continue
    if is_mine and any(words):
        print(json.dumps([int(pid), " ".join(words)]))
"""
LEASES = "ls -l /run/lock /dev/shm /tmp | grep gangline-lease || true"


class Owner(User):
    """A user with a cluster of one machine: the desk."""

    def __init__(self, lab, login, number):
        super().__init__(lab, login=login, number=number)
        python = played_torch.install(self, [lab.user])
        self.check(["gangline", "init", "localhost"])
        self.write("cluster.yaml", self.read("cluster.yaml").replace("slots: 1", f"python: {python}\n    slots: 1"))
        self.write("project/train.py", "import time\nprint('here', flush=True)\ntime.sleep(600)\n")

    def starts(self, code=0):
        done = self.run(["gangline", "run", "--dir", "project", "--detach", "--", "train.py"], timeout_s=120)
        assert done.returncode == code, (done.stdout, done.stderr)
        return done.stdout.strip() if code == 0 else done.stderr

    def processes(self):
        return [json.loads(line) for line in self.check(["/usr/bin/python3", "-c", MINE]).splitlines()]

    def kills(self, *words):
        """Its processes with one of these words, at once, by SIGKILL."""
        pids = [str(pid) for pid, command in self.processes() if any(word in command for word in words)]
        assert pids, self.processes()
        self.run(["kill", "-9", *pids])

    def rank(self):
        return next(([pid] for pid, command in self.processes() if command.split()[-1:] == ["train.py"]), [])


@pytest.fixture
def both():
    with Lab(1) as lab:
        gpus.install(lab.user, [gpus.RTX_3090])
        yield Owner(lab, "anna", 42051), Owner(lab, "ben", 42052)


@pytest.mark.parametrize("run_lock", ["0755", pytest.param("1777", marks=pytest.mark.slow)])
def test_a_gpu_has_one_user_who_is_named_and_whose_ranks_stay(both, run_lock):
    """Where /run/lock is root's alone, as on Fedora, and where everybody may make files in it, as on Debian."""
    anna, ben = both
    anna.lab.user.check(["chmod", run_lock, "/run/lock"], as_root=True)
    run = anna.starts()
    (lease,) = [row for row in anna.check(["sh", "-c", LEASES]).splitlines() if ".gpu-" in row]
    assert lease.startswith("-rw-r--r--")
    assert " anna " in lease

    said = ben.starts(code=5)
    assert f"GPU 0 ({gpus.uuid(0)}) is in use by anna: {run}" in " ".join(said.split())
    assert "only that user and root can end it" in " ".join(said.split())
    check = ben.run(["gangline", "check"])
    seen = " ".join((check.stdout + check.stderr).split())
    assert re.search(rf"GPU 0 \(NVIDIA GeForce RTX 3090[^)]*\)+ by anna: {run} since ", seen)
    assert f"{gpus.uuid(0)} is in use by anna: {run} since " in ben.run(["gangline", "ps"]).stderr
    stop = ben.run(["gangline", "stop", run])
    assert (stop.returncode, f"{run} is a run of anna, not yours" in stop.stderr) == (2, True)
    rank = anna.rank()
    assert ben.run(["kill", "-9", *map(str, rank)]).returncode == 1
    assert anna.rank() == rank

    anna.kills("gangline.supervise", "host-agent", "torch.distributed.run")
    assert f"in use by anna: {run}" in " ".join(ben.starts(code=5).split())
    anna.kills("train.py")
    theirs = ben.starts()
    assert json.loads(ben.check(["gangline", "ps", "--json"]))["runs"][0]["id"] == theirs
    assert f"in use by ben: {theirs}" in " ".join(anna.starts(code=5).split())
    ben.check(["gangline", "stop", theirs, "--now"], timeout_s=60)
    last = anna.starts()
    anna.check(["gangline", "stop", last, "--now"], timeout_s=60)
    assert anna.check(["sh", "-c", LEASES]) == ""


def test_both_start_at_the_same_moment_and_one_has_it(both):
    words = ["gangline", "run", "--dir", "project", "--detach", "--", "train.py"]
    started = [user.popen(words) for user in both]
    codes = [each.wait(timeout=120) for each in started]
    assert sorted(codes) == [0, 5]
    winner = both[codes.index(0)]
    deadline = time.monotonic() + 30
    while not winner.rank():
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert both[codes.index(5)].rank() == []
