"""Which hosts? Named on the command line or in a hostfile, or asked for."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from gangline.describe.ssh_config import config_hosts
from gangline.describe.talk import Talk
from gangline.errors import GanglineError, UsageError
from gangline.remote.hostkeys import resolve
from gangline.spec.hostfile import is_destination
from gangline.spec.mistakes import listed
from gangline.spec.named import NamedHost, hostfile_hosts, named_hosts

HERE = {"localhost", "127.0.0.1"}
NOT_FOR_TRAINING = {"git"}
"""Users under whom ssh reaches a forge and no machine."""


def collect(
    names: Sequence[str], hostfile: Path | None, *, home: Path, ask: Callable[[], Sequence[str]]
) -> list[NamedHost]:
    """The hosts that the user names; `ask` is for when there are none yet. Raises SpecError with all mistakes."""
    if names and hostfile is not None:
        raise UsageError(
            "hosts are named twice",
            seen=f"{listed(list(names))} and the hostfile {hostfile}",
            fix="give names, or a hostfile",
        )
    found = hostfile_hosts(hostfile, home=home) if hostfile else named_hosts(names or ask(), home=home)
    return [_with_own_name(named, {other.host.name for other in found}) for named in found]


def ask_for_names(path: Path, *, user_of: Callable[[str], str], talk: Talk) -> list[str]:
    """Offer what the user's ssh_config names; raises UsageError where nobody answers."""
    path = path.expanduser()
    offered = [name for name in config_hosts(path) if user_of(name) not in NOT_FOR_TRAINING]
    if offered:
        talk.say(f"hosts in {path}: {listed(offered, limit=50)}")
    enter = f" [{' '.join(offered[:3])}{' ...' if len(offered) > 3 else ''}]" if offered else ""
    answer = talk.ask(f"which hosts (names or user@address with blanks between, localhost is this computer)?{enter}")
    named = (answer or "").replace(",", " ").split() or (offered if answer is not None else [])
    if not named:
        raise UsageError(
            "no hosts are named",
            seen=f"your ssh_config has {listed(offered)}" if offered else "your ssh_config names none either",
            fix="gangline init pc1 alice@192.168.1.11, or gangline init --hostfile FILE",
        )
    return named


def user_of(name: str) -> str:
    """The user whom `ssh` would log in as; "" where it does not say."""
    try:
        return resolve(name).user
    except GanglineError:
        return ""


def _with_own_name(named: NamedHost, taken: set[str]) -> NamedHost:
    """`localhost` has a name that tells it from others."""
    host, own = named.host, socket.gethostname().partition(".")[0]
    if host.transport != "local" or host.name not in HERE or own in taken or not is_destination(own):
        return named
    workdir = str(Path(host.workdir).with_name(own))
    return dataclasses.replace(named, host=dataclasses.replace(host, name=own, workdir=workdir))
