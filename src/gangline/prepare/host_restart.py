"""A host is restarted, and waited for: its own means end what runs, and a new login shows that it is another start."""

from __future__ import annotations

import time
from collections.abc import Callable

from gangline.errors import GanglineError, HostKeyRefused
from gangline.prepare.host_side import HostSide
from gangline.prepare.prepare_step import Asks
from gangline.transport.transport import Transport

BOOT_ID = "/proc/sys/kernel/random/boot_id"
FIRST_PROCESS = "/proc/1/stat"
"""Of proc(5); its 22nd word is when process 1 was started. A container that is restarted has the kernel of before."""
START_TIME = 22
LIMIT_S = 900.0
"""A driver is built for another kernel at the start, and firmware of servers takes minutes."""
PAUSE_S = 5.0


def start_of(side: HostSide) -> tuple[str, str]:
    """What no other start of this host has; raises GanglineError."""
    files = side.read(Asks(files=(BOOT_ID, FIRST_PROCESS))).files
    words = files[FIRST_PROCESS].text.rpartition(")")[2].split()
    number = START_TIME - 3  # the name of the process, in brackets, may have blanks: words are counted behind it
    return files[BOOT_ID].text.strip(), words[number] if len(words) > number else ""


def restart(
    side: HostSide,
    fresh: Callable[[], Transport],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[Transport, float]:
    """Restart the host and wait for a login on another start of it: that login, and the seconds it took.

    fresh: a new connection. Raises GanglineError where it refuses, or is not back within 15 minutes, and
    HostKeyRefused where another host answers.
    """
    before = start_of(side)
    began = clock()
    side.restart()
    seen = "it answers, and has not restarted"
    while clock() < began + LIMIT_S:
        sleep(PAUSE_S)
        try:
            transport = fresh()
            if start_of(side.by(transport)) != before:
                return transport, clock() - began
            seen = "it answers, and has not restarted"
        except HostKeyRefused:
            raise
        except GanglineError as error:  # it does not answer, or ends what it has just begun to say
            seen = error.what
    raise GanglineError(
        f"{side.name} is not back after {LIMIT_S / 60:.0f} min",
        seen=seen,
        fix="look at its screen: with Secure Boot the firmware asks there for the password of the driver's key (MOK)",
    )
