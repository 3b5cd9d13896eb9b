"""A run of fake ranks on the hosts of a lab, started from the user's computer, and a look at what is left of it."""

import json
import time
from pathlib import Path

from tests.lab.cases_launch import look

RANKS = {"h0": 1, "h1": 2, "h2": 1}
"""Hosts with different numbers of ranks."""


class Gang:
    """A run on the hosts of a lab, started from the user's computer."""

    def __init__(self, lab, *, run_id="calm-otter-7", keep="desk", workdir="gangline"):
        self.lab, self.run_id, self.keep = lab, run_id, keep
        self.folder = f"{lab.hosts[0].home}/{workdir}"
        self._workdir = workdir

    def hosts(self, **changes):
        return [
            {
                "name": host.name,
                "address": host.address,
                "host_key": host.host_key,
                "ssh_port": host.ssh_port,
                "slots": RANKS[host.name],
                "num_ranks": RANKS[host.name],
                **changes,
            }
            for host in self.lab.hosts
        ]

    def begin(self, **options):
        said = self.call("begin", hosts=self.hosts(), workdir=self._workdir, **options)
        assert said["error"] is None, said["error"]
        return said

    def call(self, name, **options):
        options = {"run_id": self.run_id, "keep": self.keep, **options}
        return self.lab.user.call(f"tests.lab.cases_launch:{name}", **options)

    def look(self):
        if self.keep != "desk" or self.lab.mode.rootless:
            return self.call("look")
        # where they lie: a process at the desk for every look would have the gang wait for a core
        desk = self.lab.user
        return look(self.run_id, home=Path(f"/proc/{desk.pid}/root{desk.home}/home"))

    def order(self, verb):
        return self.call("order", verb=verb)["answer"]

    def until(self, condition, what, *, timeout_s=45.0):
        deadline = time.monotonic() + timeout_s
        while True:
            now = self.look()
            if condition(now):
                return now
            assert time.monotonic() < deadline, f"{what}: {json.dumps(now, indent=1)}"
            time.sleep(0.2)

    def joined(self):
        return self.until(lambda now: "joined" in events(now), "all ranks join")

    def outcome(self, **options):
        return self.until(lambda now: now["outcome"] is not None, "the run ends", **options)["outcome"]

    def attempt(self, host):
        return f"{self.folder}/runs/{self.run_id}/attempts/1"

    def record(self, host, name):
        return json.loads(host.read(f"{self.attempt(host)}/{name}"))

    def steps(self, host, rank):
        return host.read(f"{self.attempt(host)}/rank-{rank}.log").count(b"\n")

    def goes_on(self, *, within_s=10.0):
        """Whether every rank takes ten steps."""
        goals = {rank: self.steps(host, rank) + 10 for host, rank in self.first_ranks()}
        deadline = time.monotonic() + within_s
        while not all(self.steps(host, rank) >= goals[rank] for host, rank in self.first_ranks()):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def first_ranks(self):
        numbers = {"h0": 0, "h1": 1, "h2": 3}
        return [(host, numbers[host.name]) for host in self.lab.hosts if host.is_alive]


def events(now):
    return [event["event"] for event in now["events"]]


def left_on(host, *, folder, within_s=15):
    """Processes, ports and leases that are left on a host after a while, in words; [] if there are none."""
    deadline = time.monotonic() + within_s
    while True:
        left = [f"process {line}" for line in host.processes()]
        doors = host.check(["ss", "-Hltn"]).splitlines()
        left += [f"port {line}" for line in doors if not line.split()[3].endswith(f":{host.ssh_port}")]
        leases = host.run(["find", f"{folder}/leases", "-name", "cpu-*", "-size", "+0"]).stdout
        left += [f"lease {line}" for line in leases.splitlines()]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def assert_nothing_left(lab, *, folder, skip=(), within_s=15):
    """No process, no port, no lease."""
    left = {host.name: left_on(host, folder=folder, within_s=within_s) for host in lab.hosts if host.name not in skip}
    assert {name: words for name, words in left.items() if words} == {}
