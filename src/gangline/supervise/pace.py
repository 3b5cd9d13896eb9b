"""How often the supervisor looks, and how long it waits."""

from __future__ import annotations

from dataclasses import dataclass, field

from gangline.launch.look import PATIENCE_S
from gangline.supervise.board import Limits
from gangline.supervise.claims import DOUBT_S
from gangline.supervise.clean import VERIFY_S
from gangline.supervise.presence import NOTICE_S, STALL_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How often the supervisor looks, and how long it waits."""

    poll_s: float = 0.3
    patience_s: float = PATIENCE_S
    """How long a commit or an order may keep us from looking: a host may die meanwhile."""
    failure_grace_s: float = 15.0
    """What is left of a gang that failed may take this long to leave by itself."""
    break_grace_s: float = 40.0
    """The same where guards rest afterwards: they end ranks that do not get on themselves, and sooner."""
    silence_s: float = 30.0
    """Once the gang is broken or has ended elsewhere: how long a host that does not answer is waited for."""
    ordered_silence_s: float = 30.0
    """The same, at the most, once the user has ordered the end: a job may wait for a lost host for a day."""
    abandon_s: float = 120.0
    """How long silence may last after an order, where no host has ended yet; and for a guard that does not get on."""
    notice_s: float = NOTICE_S
    stall_s: float = STALL_S
    doubt_s: float = DOUBT_S
    """After so long it is told that one host alone speaks of another supervisor."""
    trouble_s: float = 60.0
    """How long looks may fail before the supervisor gives up."""
    verify_s: float = VERIFY_S
    """How long what is left after the end may take to go."""
    disk_s: float = 60.0
    """How long a file that cannot be written is tried again."""
    lock_s: float = 2.0
    """A look at the lock by somebody else is no reason to refuse."""
    start: Limits = field(default_factory=Limits)
