"""Random steps, undos, kills of gangline and of its agent, and changes by others on real hosts with real sshd.

After each act a new login works and nobody's line is lost; at the end all is as before, but for the lines of others.
The same with 200 sequences on folders that stand for a host: tests/process/agent/prepare/test_random_sequences.py.
"""

import random
import re
import subprocess
import time

import pytest

from tests.lab.namespaces import end
from tests.lab.test_prepare import COMMAND, differences, snapshot, two, types
from tests.lab.test_prepare_lock_outs import MAIN, RELOAD
from tests.waiting import wait_until

__all__ = ["two"]
STEPS = ("names", "limits", "sshd", "between")
FILES = ("/etc/hosts", "/etc/ssh/sshd_config.d/50-installer.conf", "/etc/motd.d/lab")
NUM_ACTS = 8
AGENTS = r"""
import os, signal
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        if open(f"/proc/{pid}/comm").read().strip() == "gangline-agent":
            os.kill(int(pid), signal.SIGKILL)
    except OSError:
        pass
"""


class Story:
    """Two hosts, and what has to be true of them."""

    def __init__(self, lab, dice):
        self.lab, self.dice, self.number = lab, dice, 0
        self.theirs = []
        self.said = []

    def act(self):
        """One random act; its words."""
        kind = self.dice.choice(("do", "do", "undo", "undo all", "killed", "agent killed", "other"))
        step = self.dice.choice(STEPS)
        words = {"undo": ("--undo", step), "undo all": ("--undo", "all")}.get(kind, (step,))
        self.said.append(f"{kind} {' '.join(words)}")
        if kind == "other":
            self._other()
        elif kind in {"killed", "agent killed"}:
            self._killed(words, agent=kind == "agent killed")
        else:
            self.lab.user.run([*COMMAND, "prepare", *words, "--yes"], timeout_s=240)

    def _other(self):
        """Somebody else adds a line behind what is there."""
        self.number += 1
        host, path = self.dice.choice(self.lab.hosts), self.dice.choice(FILES)
        line = f"# theirs {self.number}"
        host.check(["sh", "-c", f"mkdir -p $(dirname {path}) && echo '{line}' >> {path}"], as_root=True)
        self.theirs.append((host, path, line))

    def _killed(self, words, *, agent):
        """At any moment of it: what it has begun is on the hosts."""
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = self.lab.user.popen([*COMMAND, "prepare", *words, "--yes"], **pipes)
        time.sleep(self.dice.uniform(0.5, 12.0))
        if agent:
            self.dice.choice(self.lab.hosts).run(["/usr/bin/python3", "-c", AGENTS], as_root=True)
            wait_until(lambda: process.poll() is not None, "gangline ends after its agent", timeout_s=240)
        end(process)

    def check(self):
        """A new login works, and what others wrote is there."""
        for host in self.lab.hosts:
            done = self.lab.user.run(["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20", host.name, "true"])
            assert done.returncode == 0, f"{self.said}: {host.name} does not let in: {done.stderr}"
        for host, path, line in self.theirs:
            assert line in host.read(path).decode().splitlines(), f"{self.said}: {host.name} {path} lost {line}"


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("seed", range(6))
def test_nobody_is_ever_locked_out_and_all_is_taken_back(two, seed):
    for host in two.hosts:
        before = host.read(MAIN).decode()
        text = "Include /etc/ssh/sshd_config.d/*.conf\n" + before.replace("PasswordAuthentication no", "")
        host.write(MAIN, text)
        host.write("/etc/ssh/sshd_config.d/50-installer.conf", "PasswordAuthentication yes\n")
        host.check(RELOAD, as_root=True)
    before = {host.name: snapshot(host) for host in two.hosts}
    story = Story(two, random.Random(seed))
    for _ in range(NUM_ACTS):
        story.act()
        story.check()
    time.sleep(5.0)
    types(two, "prepare", "--undo", "all", "--yes")
    story.check()
    assert types(two, "prepare", "--status").stdout == "no change stands\n", story.said
    touched = {(host.name, path) for host, path, _ in story.theirs}
    left = [
        row[:2]
        for row in differences(two.hosts, before)
        if row[:2] not in touched
        and not re.fullmatch(r".*/\.local(/.*)?|/etc/motd\.d", row[1])
        and not row[1].startswith(f"{two.hosts[0].home}/gangline")  # code, with which the head tries to supervise
    ]
    assert left[:5] == [], story.said
