"""Packages of a host's own package manager: which are installed, which it offers, and how one is installed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from gangline.prepare.prepare_step import Asks, CommandChange, HostReading

INSTALL_S = 1800.0
"""A driver is built for the running kernel while it is installed."""
APT = ("env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "--yes")
INSTALL: Mapping[str, tuple[str, ...]] = {
    "apt-get": (*APT, "install"),
    "dnf": ("dnf", "--assumeyes", "install"),
    "zypper": ("zypper", "--non-interactive", "install"),
}
"""By program; in the order in which they are looked for."""
REMOVE: Mapping[str, tuple[str, ...]] = {
    "apt-get": (*APT, "remove"),
    "dnf": ("dnf", "--assumeyes", "remove", "--noautoremove"),
    "zypper": ("zypper", "--non-interactive", "remove"),
}
NO_MANAGER = "neither apt, dnf nor zypper is here: install {} by this system's own means"
UNDONE = "an undo removes the packages that are named here; what came with them, and caches, stay"


def package_asks(step: str, *, offered: Sequence[str], patterns: Sequence[str]) -> Asks:
    """What has to be seen of the packages of a step.

    offered: names that a repository may offer. patterns: of those whose installation counts ("nvidia-driver-*").
    """
    return Asks(
        programs=tuple(INSTALL),
        commands={
            f"{step} dpkg": ("dpkg-query", "--show", "--showformat", "${db:Status-Status} ${Package}\\n", *patterns),
            f"{step} rpm": ("rpm", "--query", "--all", "--queryformat", "installed %{NAME}\\n", *patterns),
            f"{step} apt": ("apt-cache", "policy", *offered),
            f"{step} dnf": ("dnf", "--quiet", "repoquery", "--queryformat", "%{name}\\n", *offered),
            f"{step} zypper": ("zypper", "--non-interactive", "--quiet", "search", "--match-exact", *offered),
        },
    )


class HostPackages:
    """The packages of a step on one host."""

    def __init__(self, step: str, reading: HostReading, asks: Asks) -> None:
        self.manager = next((name for name in INSTALL if reading.has(name)), None)
        self._query = f"{step} {'dpkg' if self.manager == 'apt-get' else 'rpm'}"
        self._listed = reading.output(self._query)
        self._probe = asks.commands[self._query]
        kind = {"apt-get": "apt", "dnf": "dnf", "zypper": "zypper"}.get(self.manager or "", "")
        self.offered = _OFFERED[kind](reading.output(f"{step} {kind}")) if kind else frozenset()
        rows = (line.split() for line in self._listed.splitlines())
        self.installed = frozenset(row[1] for row in rows if len(row) == 2 and row[0] == "installed")

    def install(self, names: Iterable[str], *, argv: tuple[str, ...] = ()) -> tuple[CommandChange, ...]:
        """Install packages. argv: the distribution's own tool for them, in place of its package manager."""
        assert self.manager is not None
        names = tuple(names)
        change = CommandChange(
            argv=argv or (*INSTALL[self.manager], *names),
            undo=(*REMOVE[self.manager], *names),
            probe=self._probe,
            before=self._listed,
            limit_s=INSTALL_S,
        )
        refresh = CommandChange(argv=("apt-get", "update"), undo=(), limit_s=INSTALL_S)
        return (refresh, change) if self.manager == "apt-get" else (change,)


def _of_apt(text: str) -> frozenset[str]:
    found, name = set(), ""
    for line in text.splitlines():
        if line.endswith(":") and not line.startswith(" "):
            name = line[:-1]
        elif (candidate := re.match(r"\s+Candidate:\s+(\S+)", line)) and candidate[1] != "(none)":
            found.add(name)
    return frozenset(found)


def _of_dnf(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _of_zypper(text: str) -> frozenset[str]:
    rows = (line.split("|") for line in text.splitlines() if line.count("|") >= 2)
    return frozenset(row[1].strip() for row in rows) - {"Name"}


_OFFERED = {"apt": _of_apt, "dnf": _of_dnf, "zypper": _of_zypper}
