"""The plugs: everything that is pulled on a lab host (faults.py, faults_torchrun.py)."""

from __future__ import annotations

import random
import time
from typing import Any, Protocol

from benchmarks.faults_planted import PYTHON, is_pending, order, set_clock
from tests.lab.machine import LabHost

FULL_S = 20.0
"""So long a disk is full: some checkpoints are due in that time."""
FILL = """
import os, sys, time
until = None
file = os.open("/var/tmp/full", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
piece = bytes(1 << 20)
while until is None or time.monotonic() < until:
    try:
        os.write(file, piece)
    except OSError:
        until = until or time.monotonic() + float(sys.argv[1])
        time.sleep(0.002)
"""
"""Whatever is freed is taken at once: old checkpoints go before new ones are written."""
FLAP_S = 5.0
HOUR_S = 3600
TAKEN_S = 5.0
FATAL = {"crash", "power"}
"""The host does not come back."""
ORDERED = {"nan", "nan-stays", "flip", "exception", "memory"}
"""What a rank does when it is told to (faults_in_rank.py)."""


class Trained(Protocol):
    """Hosts on which something is trained, one rank each."""

    chance: random.Random

    @property
    def living(self) -> list[LabHost]:
        """Those that are on."""

    def rank_pid(self, host: LabHost) -> int:
        """Of the rank there."""

    def host_agent(self, host: LabHost) -> dict[str, Any]:
        """{"torchrun_pid": of torchrun there}; {"pid": of the host agent} where there is one."""


class Plug:
    """What can be done to one host. ahead_s: what its clock was put forward by."""

    def __init__(self, world: Trained, victim: LabHost) -> None:
        self.world = world
        self.victim = victim
        self.ahead_s = 0

    def pull(self, kind: str) -> None:
        """Do it; raises what the lab raises."""
        getattr(self, f"_{kind.replace('-', '_')}", lambda: self._ordered(kind))()

    def heal(self, kind: str) -> None:
        """As far as it can be undone."""
        if kind in FATAL:
            return
        self.victim.faults.heal()
        if kind.startswith("disk"):
            self.victim.run(["rm", "-f", "/var/tmp/full"], as_root=True)
        elif kind == "clock":
            set_clock(self.victim, 0)

    def _kill(self, pid: int, number: int = 9) -> None:
        self.victim.check(["kill", f"-{number}", str(pid)], as_root=True)

    def _rank(self) -> None:
        self._kill(self.world.rank_pid(self.victim))

    def _process(self) -> None:
        pid = self.world.rank_pid(self.victim)
        self._kill(int(self.victim.check(["ps", "-o", "ppid=", "-p", str(pid)])))

    def _host_agent(self) -> None:
        self._kill(self.world.host_agent(self.victim)["pid"])

    def _launcher(self) -> None:
        self._kill(self.world.host_agent(self.victim)["torchrun_pid"])

    def _stopped(self) -> None:
        self._kill(self.world.rank_pid(self.victim), 19)

    def _crash(self) -> None:
        self.victim.kill()

    def _power(self) -> None:
        self.victim.power_off()

    def _partition(self) -> None:
        self.victim.faults.unplug()

    def _one_way(self) -> None:
        for host in self.world.living:
            if host is not self.victim:
                self.victim.faults.deafen(host.address)

    def _flap(self) -> None:
        self.victim.faults.unplug()
        time.sleep(FLAP_S)
        self.victim.faults.heal()

    def _ssh(self) -> None:
        self.victim.run(["pkill", "-9", "-f", "sshd: .*[@]notty"], as_root=True)

    def _disk(self) -> None:
        self.victim.check([PYTHON, "-c", FILL, str(FULL_S)], as_root=True, timeout_s=FULL_S + 120)
        self.heal("disk")

    _disk_stop = _disk

    def _clock(self) -> None:
        self.ahead_s = self.world.chance.choice((HOUR_S, -HOUR_S))
        set_clock(self.victim, self.ahead_s)

    def _ordered(self, kind: str) -> None:
        assert kind in ORDERED, kind
        order(self.victim, kind)
        deadline = time.monotonic() + TAKEN_S
        while is_pending(self.victim):
            assert time.monotonic() < deadline, f"no rank on {self.victim.name} takes the order"
            time.sleep(0.05)
