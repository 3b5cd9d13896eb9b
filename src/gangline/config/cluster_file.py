"""From the words of `cluster.yaml` to the resolved cluster: every host, and the rules that hold between hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gangline.config.cluster_model import ClusterWords
from gangline.config.host_file import (
    Surroundings,
    address_of,
    refuse_parents,
    resolve_environment,
    resolve_host,
    resolve_slurm,
    resolve_witness,
)
from gangline.config.mistakes import listed, nearest, printable, quote
from gangline.config.validate import Checked
from gangline.plugins import Table
from gangline.runs.cluster import LEAST_VOICES, Cluster, Host, voices
from gangline.units import counted


def resolve_cluster(
    checked: Checked[ClusterWords],
    *,
    folder: Path,
    home: Path,
    default_name: str,
    complete: bool = True,
    backends: Table[Any] | None = None,
) -> Cluster:
    """The cluster that the words mean. Raises SpecError with all mistakes of the file.

    folder: where relative paths of the file begin; home: the controller's own folder; complete: whether it has to say
    where its hosts reach each other; backends: the table of what `backend` may be; None: anything.
    """
    words = checked.words
    given = words.environment
    environment = resolve_environment(checked, ("environment",), given, folder=folder) if given else None
    around = Surroundings(folder=folder, home=home, environment=environment)
    hosts = tuple(resolve_host(checked, index, around=around) for index in range(len(words.hosts)))
    slurm = resolve_slurm(checked, around=around) if words.slurm else None
    _check_source(checked)
    if complete and checked.document.named_keys:
        _check_addresses(checked, hosts)
    elif complete:
        _refuse_bare_hostfile(checked, hosts)
    _check_names(checked)
    _check_destinations(checked, hosts)
    _check_workdirs(checked, hosts)
    _check_shares(checked)
    _check_backend(checked, backends)
    witness = resolve_witness(checked, words.witness) if words.witness else None
    _check_witness(checked, hosts, witness)
    _check_takeover(checked, hosts)
    ports = _ports(checked)
    for index, shared in enumerate(words.shared):
        refuse_parents(checked, ("shared", index), shared)
    checked.document.mistakes.raise_if_any()
    return Cluster(
        name=words.name or default_name,
        hosts=hosts,
        shared=tuple(words.shared),
        ports=ports,
        supervisor=words.supervisor,
        takeover=words.takeover,
        witness=witness,
        backend=_backend(words),
        slurm=slurm,
        acknowledged=tuple(words.acknowledged),
    )


def _ports(checked: Checked[ClusterWords]) -> tuple[int, int] | None:
    if checked.words.ports is None:
        return None
    low, high = (int(text) for text in checked.words.ports.split("-"))
    if not 1024 <= low <= high <= 65535:
        checked.report(
            ("ports",),
            seen=checked.words.ports,
            expected="a range from low to high between 1024 and 65535",
            fix="write, for example, `ports: 29500-29599`",
        )
    return low, high


def _backend(words: ClusterWords) -> str:
    return words.backend or ("slurm" if words.slurm else "direct")


def _check_source(checked: Checked[ClusterWords]) -> None:
    """Hosts come from the file or from Slurm."""
    words = checked.words
    if words.slurm and words.hosts:
        checked.report(
            ("slurm",),
            seen="hosts and slurm",
            expected="one of both: an allocation of Slurm gives the hosts",
            fix="delete one of the keys; two clusters are two files",
        )
    elif words.slurm and _backend(words) != "slurm":
        checked.report(
            ("backend",),
            seen=quote(_backend(words)),
            expected="slurm, because the key `slurm` asks for an allocation",
            fix="delete the line",
        )
    elif not words.slurm and not words.hosts and not (checked.is_faulty("hosts") or checked.is_faulty("slurm")):
        checked.report(
            ("hosts",),
            seen="an empty list" if "hosts" in checked.document.values else "this key is missing",
            expected="a list of hosts, or the key `slurm`",
            fix="write, for example, `hosts: [{name: my-pc, transport: local}]`",
        )


NO_BACKENDS: Mapping[str, str] = {
    "deepspeed": "write `pdsh`, which is what DeepSpeed's launcher starts its hosts by; a command for that launcher "
    "works as it is: `gangline run -- deepspeed ... train.py`"
}
"""Launchers that are no backends (docs/decisions/0054), and what to do instead."""


def _check_backend(checked: Checked[ClusterWords], backends: Table[Any] | None) -> None:
    name = _backend(checked.words)
    if backends is None or name in backends or checked.is_faulty("backend"):
        return
    close = nearest(name, backends)
    checked.report(
        ("backend",),
        seen=quote(name),
        expected=f"one of {listed(list(backends))}",
        fix=NO_BACKENDS.get(name)
        or (f"did you mean {quote(close)}?" if close else "write one of them, or install the package that has it"),
    )


def _check_takeover(checked: Checked[ClusterWords], hosts: Sequence[Host]) -> None:
    """What the file itself says against votes; whether the hosts log in to each other is seen at the start."""
    words = checked.words
    if words.takeover == "none" or checked.is_faulty("takeover") or checked.is_faulty("hosts"):
        return
    here = [host.name for host in hosts if host.transport == "local"]
    witness = None if words.witness is None else words.witness.name
    missing = {
        f"`backend: {_backend(words)}`": _backend(words) != "direct",
        "`supervisor: here`": words.supervisor == "here",
        f"{counted(len(hosts), 'host')}": len(voices([host.name for host in hosts], witness)) < LEAST_VOICES,
        f"{listed(here)}, which is this computer": bool(here),
    }
    if seen := [what for what, holds in missing.items() if holds]:
        checked.report(
            ("takeover",),
            seen=f"votes, and {seen[0]}",
            expected=f"`backend: direct`, a supervisor on the head, and {LEAST_VOICES} hosts or more that this "
            "computer reaches by ssh, or two and a `witness`",
            fix="change that, or delete the line `takeover`: then a run waits for you if its head is lost",
        )


def _check_witness(checked: Checked[ClusterWords], hosts: Sequence[Host], witness: Host | None) -> None:
    """A witness is a machine of its own, and votes only where votes are asked for."""
    if witness is None or checked.is_faulty("witness") or checked.is_faulty("hosts"):
        return
    names = {host.name.lower() for host in hosts}
    places = {(host.address, host.ssh_port or 22): host.name for host in hosts if host.transport != "local"}
    same = places.get((witness.address, witness.ssh_port or 22))
    if witness.name.lower() in names or same is not None:
        checked.report(
            ("witness",),
            seen=f"{quote(witness.name)}, which is the host {same or witness.name}",
            expected="a machine that trains nothing: it is to remain when a host is lost",
            fix="name another machine, or delete the key",
        )
    elif checked.words.takeover == "none" and not checked.is_faulty("takeover"):
        checked.report(
            ("witness",),
            seen="a witness, and nobody votes",
            expected="`takeover: votes` beside it",
            fix="write that line, or delete the key `witness`",
        )


def _known(checked: Checked[ClusterWords], *keys: str) -> list[int]:
    """Hosts of which none of the keys is a stand-in for a mistake."""
    hosts = range(len(checked.words.hosts))
    return [index for index in hosts if not any(checked.is_faulty("hosts", index, key) for key in keys)]


def _check_addresses(checked: Checked[ClusterWords], hosts: Sequence[Host]) -> None:
    """Folded into one mistake: a cluster of 16 servers is one thing to say, not sixteen."""
    known = _known(checked, "name", "transport", "ssh", "address")
    if len(hosts) == 1 or not any(hosts[index].transport == "ssh" for index in known):
        return
    missing = [index for index in known if address_of(checked.words.hosts[index]) is None]
    if not missing:
        return
    names = [hosts[index].name for index in missing]
    checked.report(
        ("hosts", missing[0], "address"),
        seen=f"no address of {listed(names)}",
        expected="where the other hosts reach each of them",
        fix=f"gangline init finds it out and writes it: {_init_command([hosts[index] for index in known])}",
    )


def _refuse_bare_hostfile(checked: Checked[ClusterWords], hosts: Sequence[Host]) -> None:
    away = [index for index in _known(checked, "name") if hosts[index].transport == "ssh"]
    if not away:
        return
    names = [hosts[index].name for index in away]
    are = "is another computer" if len(away) == 1 else "are other computers"
    checked.report(
        ("hosts", away[0], "name"),
        seen=f"{listed(names)} {are}, and a hostfile has neither addresses nor host keys",
        expected="a cluster.yaml that has them",
        fix=f"gangline init --hostfile {printable(checked.document.source, limit=4096)}",
    )


def _init_command(hosts: Sequence[Host]) -> str:
    words = list(dict.fromkeys(host.name if host.transport == "local" else host.ssh or host.name for host in hosts))
    return " ".join(["gangline init", *words[:16], *(["..."] if len(words) > 16 else [])])


def _check_names(checked: Checked[ClusterWords]) -> None:
    seen: set[str] = set()
    for index in _known(checked, "name"):
        name = checked.words.hosts[index].name
        if name.lower() in seen:
            checked.report(
                ("hosts", index, "name"),
                seen=f"a second host called {quote(name)}",
                expected="a name of its own for each host",
                fix="rename one; for more ranks on one host write slots",
            )
        seen.add(name.lower())


def _check_destinations(checked: Checked[ClusterWords], hosts: Sequence[Host]) -> None:
    owners: dict[tuple[str, int | None], str] = {}
    for index in _known(checked, "name", "transport", "ssh", "port"):
        host = hosts[index]
        if host.transport == "local":
            continue
        destination = (host.ssh or host.name).lower()
        owner = owners.setdefault((destination, host.ssh_port), host.name)
        if owner != host.name:
            checked.report(
                ("hosts", index, "ssh"),
                seen=f"{quote(destination)}, which is where {owner} is",
                expected="another computer, or another port, for each host",
                fix="delete one of the hosts; for more ranks on one host write slots",
            )


def _check_workdirs(checked: Checked[ClusterWords], hosts: Sequence[Host]) -> None:
    """Two hosts in one folder would take each other's files for their own."""
    owners: dict[tuple[str, str], Host] = {}
    for index, host in enumerate(hosts):
        owner = owners.setdefault((_disk(host, checked.words.shared), host.workdir), host)
        if owner.name != host.name:
            here = f"hosts/{host.name} in gangline's home"
            checked.report(
                ("hosts", index, "workdir"),
                seen=f"the work folder of {owner.name}",
                expected="a folder of its own for each host",
                fix=f"write another folder, or delete the line for {here}"
                if host.transport == "local"
                else f"write another folder, such as `workdir: {host.workdir.rstrip('/')}/{host.name}`",
            )


def _disk(host: Host, shared: Sequence[str]) -> str:
    """What two hosts have in common whose folders of one name are one folder."""
    if any(f"{host.workdir}/".startswith(f"{folder.rstrip('/')}/") for folder in shared):
        return "shared"
    if host.transport == "local":
        return "here"
    loopback = host.address in {"127.0.0.1", "::1"}
    return f"at {host.ssh or host.name}" if loopback else f"at {host.address}"


def _label(checked: Checked[ClusterWords], index: int) -> str:
    return f"hosts.{index}" if checked.is_faulty("hosts", index, "name") else checked.words.hosts[index].name


def _check_shares(checked: Checked[ClusterWords]) -> None:
    hosts = checked.words.hosts
    known = _known(checked, "share")
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
