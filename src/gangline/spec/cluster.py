"""From the words of `cluster.yaml` to the resolved cluster: this computer's names, folders, and the rules."""

from __future__ import annotations

import re
import shutil
import socket
import sys
from pathlib import Path

from gangline.runs.cluster import Cluster, Host
from gangline.spec.cluster_words import ClusterWords, HostWords
from gangline.spec.fields import SECRET
from gangline.spec.mistakes import KeyPath, listed, quote
from gangline.spec.paths import absolute
from gangline.spec.validate import Checked

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
OURS = frozenset(
    [
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "ROLE_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "ROLE_WORLD_SIZE",
        "GROUP_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
    ]
)
"""Variables that the start of the ranks sets by itself."""


def resolve_cluster(checked: Checked[ClusterWords], *, folder: Path, home: Path, default_name: str) -> Cluster:
    """The cluster that the words mean. Raises SpecError with all mistakes of the file.

    folder: where relative paths of the file begin; home: the controller's own folder.
    """
    words = checked.words
    hosts = tuple(_host(checked, index, host, folder=folder, home=home) for index, host in enumerate(words.hosts))
    _check_here(checked)
    _check_names(checked)
    _check_workdirs(checked, hosts)
    _check_shares(checked)
    checked.document.mistakes.raise_if_any()
    return Cluster(name=words.name or default_name, hosts=hosts)


def is_this_computer(name: str) -> bool:
    """Whether a name or address means the computer that gangline runs on; asks no name server."""
    own = socket.gethostname().lower()
    return name.lower() in {"localhost", "127.0.0.1", own, own.partition(".")[0]}


def _host(checked: Checked[ClusterWords], index: int, words: HostWords, *, folder: Path, home: Path) -> Host:
    return Host(
        name=words.name,
        workdir=str(absolute(words.workdir, folder)) if words.workdir else str(home / "hosts" / words.name),
        python=_python(checked, index, words, folder=folder),
        transport="local",
        address=words.address,
        interface=words.interface,
        slots=words.slots,
        share=None if words.share is None else float(words.share),
        slowdown=float(words.slowdown),
        env=_env(checked, index, words),
    )


def _python(checked: Checked[ClusterWords], index: int, words: HostWords, *, folder: Path) -> str:
    if words.python is None:
        return sys.executable
    path = absolute(words.python, folder) if "/" in words.python or words.python[0] == "~" else words.python
    found = shutil.which(path)
    if found is None:
        checked.report(
            ("hosts", index, "python"),
            seen=f"{quote(words.python)}, which is no program on this computer",
            expected="a Python with gangline[train] installed",
            fix="write the whole path of a Python, or delete the line for the one that runs gangline here",
        )
    return str(found or words.python)


def _env(checked: Checked[ClusterWords], index: int, words: HostWords) -> dict[str, str]:
    env: dict[str, str] = {}
    for name, value in words.env.items():
        path: KeyPath = ("hosts", index, "env", name)
        env[name] = value if isinstance(value, str) else checked.document.texts.get(path, str(value))
        if not _VARIABLE.fullmatch(name):
            checked.report(
                path,
                seen=f"the name {quote(name)}",
                expected="a variable: letters, digits and `_`, not beginning with a digit",
                fix="write it as a shell would take it, such as OMP_NUM_THREADS",
            )
        elif SECRET.search(name):
            checked.report(
                path,
                seen=f"{name}, which sounds like a secret",
                expected="no secrets in this file: it is copied into every run",
                fix=f"delete it and set it in your shell: export {name}=...",
            )
        elif name in OURS:
            checked.report(
                path,
                seen=f"{name}, which gangline sets for each rank",
                expected="other variables",
                fix="delete it; ranks are counted from slots",
            )
        elif "\0" in env[name]:
            checked.report(path, seen="a zero character", expected="text", fix="delete the character")
    return env


def _check_here(checked: Checked[ClusterWords]) -> None:
    """Folded into one mistake: a cluster of 16 servers is one thing to say, not sixteen."""
    away = [
        index
        for index, host in enumerate(checked.words.hosts)
        if host.transport is None
        and not is_this_computer(host.name)
        and not checked.is_faulty("hosts", index, "name")
        and not checked.is_faulty("hosts", index, "transport")
    ]
    if not away:
        return
    names = [checked.words.hosts[index].name for index in away]
    are = f"{listed(names)} {'is another computer' if len(away) == 1 else 'are other computers'}"
    checked.report(
        ("hosts", away[0], "name"),
        seen=are,
        expected="hosts on this computer: hosts over SSH are not built yet",
        fix="`transport: local` on a host in cluster.yaml trains on this computer, whatever the host is called",
    )


def _check_names(checked: Checked[ClusterWords]) -> None:
    seen: set[str] = set()
    for index, host in enumerate(checked.words.hosts):
        if checked.is_faulty("hosts", index, "name"):
            continue
        if host.name.lower() in seen:
            checked.report(
                ("hosts", index, "name"),
                seen=f"a second host called {quote(host.name)}",
                expected="a name of its own for each host",
                fix="rename one; for more ranks on one host write slots",
            )
        seen.add(host.name.lower())


def _check_workdirs(checked: Checked[ClusterWords], hosts: tuple[Host, ...]) -> None:
    owners: dict[str, str] = {}
    for index, host in enumerate(hosts):
        owner = owners.setdefault(host.workdir, host.name)
        if owner != host.name:
            checked.report(
                ("hosts", index, "workdir"),
                seen=f"the work folder of {owner}",
                expected="a folder of its own for each host",
                fix=f"write another folder, or delete the line for hosts/{host.name} in gangline's home",
            )


def _label(checked: Checked[ClusterWords], index: int) -> str:
    return f"hosts.{index}" if checked.is_faulty("hosts", index, "name") else checked.words.hosts[index].name


def _check_shares(checked: Checked[ClusterWords]) -> None:
    hosts = checked.words.hosts
    known = [index for index in range(len(hosts)) if not checked.is_faulty("hosts", index, "share")]
    given = [index for index in known if hosts[index].share is not None]
    without = [_label(checked, index) for index in known if hosts[index].share is None]
    if not given:
        return
    if without:
        checked.report(
            ("hosts", given[0], "share"),
            seen=f"a share here, but none for {listed(without)}",
            expected="a share for every host, or for none",
            fix=f"add `share: 1` to {listed(without)}, or delete all shares",
        )
    elif not any(hosts[index].share for index in known) and len(known) == len(hosts):
        checked.report(
            ("hosts", given[0], "share"),
            seen="0 for every host",
            expected="work for at least one host",
            fix="write a share above 0, or delete all shares",
        )
