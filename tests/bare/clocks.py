"""A time service that wants to step the clock of a bare machine, and may not."""

import re
import time

from tests.lab.bare import BareHost, BareKind
from tests.waiting import wait_until

CLOCKED = BareKind(clock=True, services=("chrony.service",))


def clock_against_monotonic() -> float:
    """Seconds between this machine's clock and one that nobody can set: a step shows here, however long a test takes."""
    return time.time() - time.clock_gettime(time.CLOCK_MONOTONIC_RAW)


def await_refused_step(host: BareHost) -> None:
    """Wait until chronyd there has found the clock wrong, as `BareLab.tell_time` says it is, and could not step it."""

    def said() -> str:
        return host.check(["journalctl", "--boot", "--no-pager", "--unit", "chrony.service"])

    wait_until(lambda: "Could not step system clock" in said(), "chronyd wants to step the clock", timeout_s=60)
    assert re.search(r"System clock wrong by (999|1000)\.", said())
