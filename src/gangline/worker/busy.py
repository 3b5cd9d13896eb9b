"""What a machine's processors have done, and how much of it was this rank's."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

STAT, BOOT = Path("/proc/stat"), Path("/proc/sys/kernel/random/boot_id")
USER, NICE, SYSTEM, IRQ, SOFTIRQ = 0, 1, 2, 5, 6
"""Columns of the first line of /proc/stat after its name (proc(5)), in ticks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """Seconds so far; of two moments the difference counts."""

    clock_s: float
    machine_s: float | None
    """Of all processors, whoever had them; None where the machine does not say."""
    own_s: float
    """Of this process, all its threads."""

    @staticmethod
    def now() -> Busy:
        """Until now."""
        return Busy(clock_s=time.monotonic(), machine_s=_machine_s(), own_s=time.process_time())

    def until_now(self) -> dict[str, float | None]:
        """Seconds that have passed since, and how many processors on average all programs, and this rank, had."""
        then = Busy.now()
        passed_s = max(1e-6, then.clock_s - self.clock_s)
        known = self.machine_s is not None and then.machine_s is not None
        machine_s = (then.machine_s or 0.0) - (self.machine_s or 0.0) if known else None
        return {
            "seconds": passed_s,
            "machine_cpus": None if machine_s is None else machine_s / passed_s,
            "own_cpus": (then.own_s - self.own_s) / passed_s,
            "num_cpus": os.cpu_count() or 1,
        }


def boot_id() -> str:
    """Names the running kernel: hosts that have the same are one machine. "" where nobody can say."""
    try:
        return BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _machine_s() -> float | None:
    try:
        columns = STAT.read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
        ticks = sum(int(columns[which]) for which in (USER, NICE, SYSTEM, IRQ, SOFTIRQ))
    except (OSError, ValueError, IndexError):
        return None
    return ticks / os.sysconf("SC_CLK_TCK")
