"""The text of a cluster.yaml: what was found, with the reasons as comments. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gangline.runs.cluster import Cluster, Host
from gangline.spec.host import WORKDIR
from gangline.spec.mistakes import printable

_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9._@/-]*|[0-9]+(\.[0-9]+){3}|[a-z0-9@.-]+ [A-Za-z0-9+/]+=*")
"""Texts that YAML reads as they are; the last is a host key."""
_WORDS = {"null", "true", "false", "none", "yes", "no", "on", "off", "y", "n"}

_HEAD = """\
# The machines that train together, found by `gangline init`. The file is yours; docs/cluster.md has every key.
"""
_TAIL = """
# More keys, for those who need them:
# environment: {conda: /opt/conda/envs/train}  # on all hosts; left out: a virtual environment that gangline builds
# shared: [/mnt/nas]    # folders that are one and the same on all hosts
# ports: 29500-29599    # where ranks may meet, for a firewall; left out: any free port
# interface: eno1       # at a host: the network card for the ranks; left out: the one that has the address
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notes:
    """What a reader wants to know beside the values of one host."""

    address: str = ""
    slots: str = ""
    workdir: str = ""


def cluster_text(cluster: Cluster, notes: Mapping[str, Notes], *, name: str | None, network: str = "") -> str:
    """The file; reading it gives the same cluster again.

    notes: by host. name: None leaves it to the file's name. network: which one the addresses are in, and why.
    """
    rows = [_HEAD.rstrip("\n")]
    rows += [f"# addresses: {printable(network, limit=300)}"] if network else []
    rows += [f"name: {scalar(name)}"] if name else []
    rows += ["hosts:"]
    for number, host in enumerate(cluster.hosts):
        first, *others = _host(host, notes.get(host.name, Notes()))
        rows += ["  # the head, which has rank 0" if number == 0 and len(cluster.hosts) > 1 else ""]
        rows += [f"  - {first}", *(f"    {row}" for row in others)]
    text = "\n".join(rows).replace("hosts:\n\n", "hosts:\n")
    return f"{text}\n{_TAIL}"


def _host(host: Host, notes: Notes) -> Iterator[str]:
    yield f"name: {scalar(host.name)}"
    if host.transport == "local":
        yield "transport: local  # this computer"
    if host.ssh is not None:
        yield f"ssh: {scalar(host.ssh)}"
    if host.ssh_port is not None:
        yield f"port: {host.ssh_port}"
    if host.host_key is not None:
        yield f"host_key: {scalar(host.host_key)}"
    yield _noted(f"address: {scalar(host.address)}", notes.address)
    if host.transport == "ssh" and host.workdir != WORKDIR:
        yield _noted(f"workdir: {scalar(host.workdir)}", notes.workdir)
    if host.interface is not None:
        yield f"interface: {scalar(host.interface)}"
    yield _noted(f"slots: {host.slots}", notes.slots)
    if host.env:
        yield "env:"
        yield from (f"  {name}: {json.dumps(value, ensure_ascii=False)}" for name, value in host.env.items())


def _noted(row: str, note: str) -> str:
    """A row with a comment. A note may come from a host: what is no plain text would end the comment."""
    return f"{row}  # {printable(note, limit=100)}" if note else row


def scalar(text: str) -> str:
    """A text as one YAML value, in quotes where YAML would read something else."""
    plain = _PLAIN.fullmatch(text) and text.lower() not in _WORDS
    return text if plain else json.dumps(text, ensure_ascii=False)
