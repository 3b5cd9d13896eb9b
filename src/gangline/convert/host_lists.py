"""Lists of hosts that other tools keep: ssh_config, inventories of Ansible, clusters of Ray, pools of SkyPilot.

Each gives hosts with what ssh needs to reach them; the rest of the file says how that tool sets them up, and is told
key by key. A cluster.yaml needs an address for each host: where a list has names alone, `gangline init` asks the hosts.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gangline.config.document import is_destination, name_of
from gangline.config.foreign import kind_of, kind_of_text
from gangline.config.load import read_cluster_text, read_text, read_values
from gangline.config.mistakes import quote
from gangline.convert.outcomes import Verdict, as_number, flatten
from gangline.errors import SpecError, UsageError
from gangline.runs.files import write_atomic
from gangline.units import is_address

SETS_UP = "how that tool sets hosts up; gangline installs what it needs by itself"
MAX_RANGE = 10_000
"""Hosts of one range at the most."""
IN_SSH = "put it into ~/.ssh/config: gangline reaches hosts with your own ssh"


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedHost:
    """A host as another tool lists it."""

    name: str
    host: str = ""
    """Name or address by which it is reached; "": its name."""
    user: str = ""
    port: int | None = None
    is_here: bool = False
    """This computer."""

    @property
    def reached_at(self) -> str:
        """The name or address."""
        return self.host or self.name

    @property
    def destination(self) -> str:
        """What ssh is told: `alice@192.168.1.11`."""
        return f"{self.user}@{self.reached_at}" if self.user else self.reached_at

    def words(self) -> dict[str, Any]:
        """The host as cluster.yaml has it."""
        name = name_of(self.name)
        if self.is_here:
            return {"name": name, "transport": "local"}
        found: dict[str, Any] = {"name": name}
        if self.destination != name:
            found["ssh"] = self.destination
        if self.port not in (None, 22):
            found["port"] = self.port
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedKey:
    """What became of one key of the list."""

    verdict: Verdict
    key: str
    value: Any
    reason: str


@dataclass(slots=True, kw_only=True)
class HostList:
    """The hosts of a file, and what became of its keys."""

    tool: str
    hosts: list[ListedHost] = field(default_factory=list)
    rows: list[ListedKey] = field(default_factory=list)

    def row(self, verdict: Verdict, key: str, value: Any, reason: str) -> None:
        """Say what became of a key."""
        self.rows.append(ListedKey(verdict=verdict, key=key, value=value, reason=reason))


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedHosts:
    """A converted list of hosts."""

    source: Path
    output: Path
    listed: HostList
    text: str

    @property
    def init_words(self) -> str:
        """The command that finds out what the list does not say: addresses, slots, host keys."""
        names = " ".join("localhost" if host.is_here else host.destination for host in self.listed.hosts)
        return f"gangline init {names}"

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        keys = [
            {"verdict": row.verdict, "key": row.key, "value": row.value, "reason": row.reason}
            for row in self.listed.rows
        ]
        return {"tool": self.listed.tool, "keys": keys, "cluster": self.text, "init": self.init_words}


def move_hosts(path: Path, output: Path) -> MovedHosts:
    """The hosts of a file. Raises SpecError for one without any."""
    text = read_text(path, kind="host")
    kind = kind_of_text(text)
    if kind is not None:
        listed = _ssh_config(text, own=_is_own(path)) if kind.tool == "ssh_config" else _ansible_ini(text)
    else:
        listed = _of_values(read_values(path, kind="host"))
    for host in listed.hosts:
        if not host.is_here and not is_destination(host.destination):
            raise SpecError(
                str(path), seen=f"{quote(host.destination)}, which ssh cannot be told", fix="mend that host"
            )
    if not listed.hosts and not any(row.verdict == "refused" for row in listed.rows):
        raise SpecError(str(path), seen="no host at all", fix="gangline init HOST... writes a cluster.yaml from names")
    return MovedHosts(source=path, output=output, listed=listed, text=_cluster_text(listed, path))


def listed_elsewhere(path: Path) -> MovedHosts | None:
    """The hosts of a file that is another tool's list; None for a hostfile, and for what is none at all.

    Raises SpecError, and UsageError for a list that gives no hosts.
    """
    text = read_text(path, kind="host")
    kind = kind_of_text(text)
    if kind is None and path.suffix.lower() in {".yaml", ".yml", ".json"}:
        kind = kind_of(read_values(path, kind="host"))
    if kind is None or kind.holds != "hosts":
        return None
    moved = move_hosts(path, path)
    if refused := [row for row in moved.listed.rows if row.verdict == "refused"]:
        raise UsageError(f"{path} names no hosts", seen=f"{refused[0].key}: {refused[0].reason}", fix="name them")
    return moved


def write_hosts(moved: MovedHosts, *, home: Path, force: bool) -> None:
    """Write cluster.yaml. Raises UsageError for refused keys, for hosts without an address, for a file there."""
    refused = [row for row in moved.listed.rows if row.verdict == "refused"]
    if refused:
        raise UsageError(
            f"{moved.source} was not converted", seen=f"{refused[0].key}: {refused[0].reason}", fix=moved.init_words
        )
    unknown = [host.name for host in moved.listed.hosts if not host.is_here and not is_address(host.reached_at)]
    if unknown and len(moved.listed.hosts) > 1:
        raise UsageError(
            f"{moved.source} has no address of {', '.join(unknown)}",
            seen="names that ssh knows; the ranks of the others need an IP address",
            fix=f"{moved.init_words}   # asks the hosts, and writes {moved.output}",
        )
    if moved.output.exists() and not force:
        raise UsageError(
            f"{moved.output} is there already",
            seen="nothing was written",
            fix="choose another --output, or add --force",
        )
    read_cluster_text(moved.text, moved.output, home=home)
    write_atomic(moved.output, moved.text.encode())


def _cluster_text(listed: HostList, path: Path) -> str:
    lines = [f"# Converted by `gangline convert` from {path.name} of {listed.tool}.", "hosts:"]
    for host in listed.hosts:
        words = host.words() | (
            {"address": host.reached_at} if is_address(host.reached_at) and "ssh" not in host.words() else {}
        )
        lines.append("  - {" + ", ".join(f"{key}: {value}" for key, value in words.items()) + "}")
    return "\n".join(lines) + "\n"


def _is_own(path: Path) -> bool:
    return path.expanduser().resolve() == Path("~/.ssh/config").expanduser().resolve()


# ssh_config


def _ssh_config(text: str, *, own: bool) -> HostList:
    listed = HostList(tool="ssh_config")
    for names, words in _blocks(text):
        plain = [name for name in names if not set(name) & set("*?!")]
        if not plain:
            listed.row("dropped", f"Host {' '.join(names)}", "", "a pattern names no host")
            continue
        for name in plain:
            port = as_number(words.get("port"))
            host = (
                ListedHost(name=name)
                if own
                else ListedHost(
                    name=name,
                    host=words.get("hostname", ""),
                    user=words.get("user", ""),
                    port=int(port) if port else None,
                )
            )
            listed.hosts.append(host)
            listed.row("same", f"Host {name}", "", f"hosts.{name_of(name)}")
            for key, value in words.items():
                if own or key in {"hostname", "user", "port"}:
                    listed.row("same", f"{name}.{key}", value, "your ssh_config applies" if own else "ssh, port")
                else:
                    listed.row("equivalent", f"{name}.{key}", value, IN_SSH)
    return listed


def _blocks(text: str) -> Iterator[tuple[list[str], dict[str, str]]]:
    names: list[str] = []
    words: dict[str, str] = {}
    for line in text.splitlines():
        match = re.match(r"\s*([A-Za-z]+)(?:\s+|\s*=\s*)(.+?)\s*$", line)
        if not match or line.lstrip().startswith("#"):
            continue
        key, value = match[1].lower(), match[2].strip('"')
        if key in {"host", "match"}:
            if names:
                yield names, words
            names, words = (value.split() if key == "host" else ["*"]), {}
        else:
            words.setdefault(key, value)
    if names:
        yield names, words


# Ansible


def _ansible_ini(text: str) -> HostList:
    listed = HostList(tool="Ansible")
    hosts: dict[str, dict[str, str]] = {}
    members: dict[str, list[str]] = {}
    children: dict[str, list[str]] = {}
    shared: dict[str, dict[str, str]] = {}
    section, kind = "ungrouped", ""
    for line in text.splitlines():
        bare = re.sub(r"(^|\s)[#;].*", "", line).strip()
        if header := re.fullmatch(r"\[([\w.-]+)(?::(\w+))?\]", bare):
            section, kind = header[1], header[2] or ""
        elif bare and kind == "vars":
            key, _, value = bare.partition("=")
            shared.setdefault(section, {})[key.strip()] = value.strip().strip("\"'")
        elif bare and kind == "children":
            children.setdefault(section, []).append(bare)
        elif bare:
            first, *rest = _words(bare)
            names, port = _named(first)
            pairs = [word.partition("=") for word in rest]
            own = {key: value.strip("\"'") for key, _, value in pairs}
            for name in names:
                hosts.setdefault(name, {}).update({**port, **own})
                members.setdefault(section, []).append(name)
    _add_ansible(listed, hosts, {name: _of_groups(name, members, children, shared) for name in hosts})
    return listed


def _words(line: str) -> list[str]:
    """The words of a line; a value in quotes may have blanks."""
    try:
        return shlex.split(line)
    except ValueError:
        return line.split()


def _of_groups(
    name: str,
    members: Mapping[str, Sequence[str]],
    children: Mapping[str, Sequence[str]],
    shared: Mapping[str, dict[str, str]],
) -> dict[str, str]:
    """The variables that a host has from its groups; of two that have one, the group below counts."""
    found = {group for group, names in members.items() if name in names}
    order = sorted(found)
    for group in order:  # grows while it is walked: the groups above come behind
        above = [each for each, names in children.items() if group in names and each not in found]
        found.update(above)
        order.extend(above)
    variables = dict(shared.get("all", {}))
    for group in reversed(order):
        variables |= shared.get(group, {})
    return variables


def _named(word: str) -> tuple[list[str], dict[str, str]]:
    """The hosts of one word of an inventory, and the port that it names: `pc[1:3]:2222`."""
    own: dict[str, str] = {}
    if re.fullmatch(r"[^:]+:[0-9]+", re.sub(r"\[[^\]]*\]", "", word)):
        word, _, own["ansible_port"] = word.rpartition(":")
    return _ranged(word), own


def _ranged(name: str) -> list[str]:
    """pc[1:3], pc[01:09:2] and pc[a:c] are several hosts."""
    match = re.search(r"\[(?:([0-9]+):([0-9]+)|([a-z]):([a-z])|([A-Z]):([A-Z]))(?::([1-9][0-9]*))?\]", name)
    if not match:
        return [name]
    first, last = (word for word in match.groups()[:6] if word is not None)
    step = int(match[7] or 1)
    if first.isdigit():
        width = len(first) if first.startswith("0") else 0
        numbers = range(int(first), int(last) + 1, step)
        if len(numbers) > MAX_RANGE:
            raise SpecError(name, seen=f"a range of {len(numbers)} hosts", fix=f"write one of {MAX_RANGE} at the most")
        marks = [f"{number:0{width}}" for number in numbers]
    else:
        marks = [chr(code) for code in range(ord(first), ord(last) + 1, step)]
    return [each for mark in marks for each in _ranged(name[: match.start()] + mark + name[match.end() :])]


def _add_ansible(
    listed: HostList, hosts: Mapping[str, Mapping[str, Any]], shared: Mapping[str, Mapping[str, Any]]
) -> None:
    for name, own in hosts.items():
        words = {**shared.get(name, {}), **own}
        port = as_number(words.get("ansible_port"))
        listed.hosts.append(
            ListedHost(
                name=name,
                host=str(words.get("ansible_host", "")),
                user=str(words.get("ansible_user", words.get("ansible_ssh_user", ""))),
                port=int(port) if port else None,
                is_here=words.get("ansible_connection") == "local",
            )
        )
        listed.row("same", name, "", f"hosts.{name_of(name)}")
        for key, value in words.items():
            if key in {"ansible_host", "ansible_user", "ansible_ssh_user", "ansible_port", "ansible_connection"}:
                listed.row("same", f"{name}.{key}", value, "ssh, port, transport")
            elif re.match(r"ansible_(ssh_)?(private_key_file|common_args|extra_args|pass|password|proxy)", key):
                listed.row("equivalent", f"{name}.{key}", "" if "pass" in key else value, IN_SSH)
            else:
                listed.row("dropped", f"{name}.{key}", value, SETS_UP)


def _ansible_yaml(values: Mapping[str, Any]) -> HostList:
    listed = HostList(tool="Ansible")
    hosts: dict[str, dict[str, Any]] = {}
    shared: dict[str, dict[str, Any]] = {}

    def walk(group: Any, above: dict[str, Any]) -> None:
        if not isinstance(group, dict):
            return
        words = {**above, **(group.get("vars") or {})}
        for name, own in (group.get("hosts") or {}).items():
            names, port = _named(str(name))
            for each in names:
                hosts.setdefault(each, {}).update({**port, **(own or {})})
                shared.setdefault(each, {}).update(words)
        for child in (group.get("children") or {}).values():
            walk(child, words)

    for group in values.values():
        walk(group, {})
    _add_ansible(listed, hosts, shared)
    return listed


# Ray and SkyPilot


def _of_values(values: Mapping[str, Any]) -> HostList:
    if "provider" in values:
        return _ray(values)
    if "resources" in values:
        return _task(values)
    if all(isinstance(value, dict) and isinstance(value.get("hosts"), list) for value in values.values()):
        return _pools(values)
    return _ansible_yaml(values)


def _ray(values: Mapping[str, Any]) -> HostList:
    listed = HostList(tool="Ray")
    provider = values.get("provider") or {}
    auth = values.get("auth") or {}
    user = str(auth.get("ssh_user", "") or "")
    kind = provider.get("type")
    if kind != "local":
        listed.row(
            "refused",
            "provider.type",
            kind,
            "machines of a cloud that are ordered by the start; gangline trains on those that are there",
        )
        return listed
    addresses = [str(provider.get("head_ip") or ""), *map(str, provider.get("worker_ips") or [])]
    for number, address in enumerate(filter(None, addresses)):
        name = "head" if number == 0 else f"worker{number}"
        listed.hosts.append(ListedHost(name=name, host=address, user=user))
        listed.row("same", f"provider.{'head_ip' if number == 0 else 'worker_ips'}", address, f"hosts.{name}")
    for key, value in flatten(values):
        if key.startswith("provider.") and key.rpartition(".")[2] in {"type", "head_ip", "worker_ips"}:
            continue
        if key == "auth.ssh_user":
            listed.row("same", key, value, "ssh")
        elif key.startswith("auth."):
            listed.row("equivalent", key, value, IN_SSH)
        else:
            listed.row("dropped", key, value, SETS_UP)
    return listed


def _pools(values: Mapping[str, Any]) -> HostList:
    listed = HostList(tool="SkyPilot")
    for pool, words in values.items():
        for number, item in enumerate(words.get("hosts") or []):
            own = item if isinstance(item, dict) else {"ip": item}
            address, user = str(own.get("ip", "")), str(own.get("user") or words.get("user") or "")
            name = f"{pool}{number + 1}" if is_address(address) else address
            listed.hosts.append(ListedHost(name=name, host=address, user=user))
            listed.row("same", f"{pool}.hosts.{number}", address, f"hosts.{name_of(name)}")
            listed.rows += [
                ListedKey(
                    verdict="same" if key in {"ip", "user"} else "equivalent",
                    key=f"{pool}.hosts.{number}.{key}",
                    value="" if "pass" in key else value,
                    reason="ssh" if key in {"ip", "user"} else IN_SSH,
                )
                for key, value in own.items()
                if key != "ip"
            ]
        for key, value in words.items():
            if key != "hosts":
                own_key = key == "user"
                listed.row(
                    "same" if own_key else "equivalent",
                    f"{pool}.{key}",
                    "" if "pass" in key else value,
                    "ssh" if own_key else IN_SSH,
                )
    return listed


def _task(values: Mapping[str, Any]) -> HostList:
    listed = HostList(tool="SkyPilot")
    listed.row(
        "refused",
        "resources",
        values.get("resources"),
        "machines that are ordered by the start, not named; gangline trains on those that are there",
    )
    for key, value in flatten(values):
        if not key.startswith("resources"):
            listed.row("dropped", key, value, SETS_UP)
    return listed
