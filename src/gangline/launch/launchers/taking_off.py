"""Options of another launcher, row by row: what becomes of each, and what all of them ask of a run. Pure.

A launcher has a table of rows (`OptionTable`). A row is honoured (`kept`), named as dropped because gangline decides it
(`dropped`), or refused by its name (`refused`). Options are written `--name` (no value), `--name=` (one), `--name==`
(two), `--name?` (one, only as `--name=VALUE`), and aliases with `|` between them.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gangline.errors import UsageError
from gangline.runs.cluster import Cluster, Host
from gangline.transport.transport import SECRETS

IN_CLUSTER_FILE = "hosts stand in the cluster file"
MEETING = "gangline chooses the address and the port"
OUTPUT = "every rank has a log: gangline logs"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlaces:
    """On which hosts and slots of a cluster the ranks of a command run."""

    ranks_per_host: int | None = None
    """None: as many as the host has slots."""
    num_hosts: int | None = None
    """The first ones; None: all."""
    included: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Host -> its GPUs or slots; (): all of them. {}: every host."""
    excluded: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Host -> GPUs or slots that are left out; (): the whole host."""

    def on(self, cluster: Cluster) -> Cluster:
        """The part of a cluster that it means; raises UsageError for hosts and slots that are not there."""
        chosen = [self._slots(host) for host in self._hosts(cluster)]
        hosts = tuple(host for host in chosen if host is not None)
        if not hosts:
            raise UsageError("no slot is left to run on", seen="everything is excluded", fix="exclude less")
        return replace(cluster, hosts=hosts)

    def _hosts(self, cluster: Cluster) -> tuple[Host, ...]:
        for name in (*self.included, *self.excluded):
            if not any(_is_called(host, name) for host in cluster.hosts):
                raise UsageError(
                    f"{name} is no host of this cluster",
                    seen=f"its hosts: {', '.join(host.name for host in cluster.hosts)}",
                    fix="write a name of the cluster file",
                )
        if self.num_hosts is not None and self.num_hosts > len(cluster.hosts):
            raise UsageError(
                f"the command wants {self.num_hosts} hosts, and the cluster has {len(cluster.hosts)}",
                seen=f"its hosts: {', '.join(host.name for host in cluster.hosts)}",
                fix="add hosts to the cluster file, or leave the number out",
            )
        hosts = cluster.hosts[: self.num_hosts]
        return tuple(host for host in hosts if not self.included or _named(self.included, host) is not None)

    def _slots(self, host: Host) -> Host | None:
        """The host with the ranks that run on it; None: none does."""
        if self.ranks_per_host is not None:
            host = replace(host, slots=self.ranks_per_host)
        inside, outside = _named(self.included, host), _named(self.excluded, host)
        if not inside and outside is None:
            return host
        for number in (*(inside or ()), *(outside or ())):
            if number >= host.slots:
                raise UsageError(
                    f"{host.name} has no slot {number}",
                    seen=f"slots: {host.slots}, counted from 0",
                    fix=f"choose others, or write `slots: {number + 1}` for it into the cluster file",
                )
        left = [each for each in (inside or range(host.slots)) if outside is None or (outside and each not in outside)]
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, left))}
        return replace(host, slots=len(left), env={**host.env, **visible}) if left else None


def _is_called(host: Host, name: str) -> bool:
    return name in {host.name, host.address, host.ssh, (host.ssh or "").rpartition("@")[2]}


def _named(rows: Mapping[str, tuple[int, ...]], host: Host) -> tuple[int, ...] | None:
    return next((slots for name, slots in rows.items() if _is_called(host, name)), None)


@dataclass(slots=True)
class Wishes:
    """What the launchers of a command ask for; rows of their tables write into it."""

    folder: Path
    """The user's folder, which is copied to every host."""
    variables: Mapping[str, str]
    """The user's environment."""
    launcher: str = ""
    env: dict[str, str] = field(default_factory=dict)
    placement: RankPlaces = RankPlaces()
    restarts: int = 0
    given: dict[str, str] = field(default_factory=dict)
    """Options of the launcher at hand: `nproc_per_node` -> its last value; "True" for one without a value."""
    repeated: list[tuple[str, str]] = field(default_factory=list)
    """The same, every one."""
    notes: list[str] = field(default_factory=list)
    """What becomes of which option, for the user."""

    def refuse(self, option: str, why: str, fix: str) -> UsageError:
        """The error for an option that cannot be honoured."""
        return UsageError(f"{self.launcher}: {option} cannot be honoured", seen=why, fix=fix)

    def export(self, name: str, value: str | None) -> None:
        """Set a variable of the ranks. value: None: that of the user's environment, if there is one."""
        # imported here: pydantic costs 0.2 s, which verbs that start nothing need not pay
        from gangline.config.fields import SECRET
        from gangline.config.host_file import OURS

        value = self.variables.get(name) if value is None else value
        if name in SECRETS:
            self.notes.append(f"{name}: the ranks have it anyhow")
        elif name in OURS:
            self.notes.append(f"{name}: dropped; gangline sets it for each rank")
        elif SECRET.search(name):
            raise self.refuse(
                name, "it sounds like a secret, and a run records its variables", "have your script read it from a file"
            )
        elif value is not None:
            self.env[name] = value

    def place(self, **changes: object) -> None:
        """Change where ranks run."""
        self.placement = replace(self.placement, **changes)  # type: ignore[arg-type]

    def count(self, option: str, value: str) -> int:
        """A positive number; raises UsageError."""
        if not value.isdecimal() or int(value) < 1:
            raise self.refuse(f"{option} {value}", "expected a number from 1 on", f"write a number after {option}")
        return int(value)


Apply = Callable[[Wishes, str, str], None]
"""Called with the wishes, the option as it was written, and its value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One option of a launcher."""

    names: tuple[str, ...]
    num_values: int
    is_optional: bool = False
    """Its value comes after `=`, or is left out."""
    apply: Apply

    @property
    def key(self) -> str:
        """Its name in `Wishes.given`."""
        return max(self.names, key=len).lstrip("-").replace("-", "_")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionTable:
    """All options of a launcher."""

    rows: tuple[Row, ...]
    runs_python: bool = False
    """What follows its options is a script for Python; otherwise a program."""
    is_shell: bool = False
    """What follows its options is read by a shell."""
    finish: Callable[[Wishes], None] = lambda _: None
    """Called after all options."""

    def row(self, name: str) -> Row | None:
        """The row of an option as it is written, or of its only row that begins so."""
        plain = _plain(name)
        for row in self.rows:
            if plain in {_plain(each) for each in row.names}:
                return row
        begun = [row for row in self.rows if any(_plain(each).startswith(plain) for each in row.names)]
        return begun[0] if len(begun) == 1 and plain.startswith("--") and len(plain) > 4 else None


def _plain(name: str) -> str:
    """One spelling: `-np`, `--np` and `--n_p` are the same; options of one letter stay as they are."""
    bare = name.lstrip("-")
    return name if len(bare) == 1 else f"--{bare.replace('_', '-')}"


def rows(words: str, apply: Apply) -> tuple[Row, ...]:
    """The rows of several options, which are treated alike. words: see the module."""
    found = []
    for word in words.split():
        names = word.rstrip("=?")
        num_values = word.count("=")
        optional = word.endswith("?")
        found.append(
            Row(names=tuple(names.split("|")), num_values=num_values, is_optional=optional, apply=apply),
        )
    return tuple(found)


def dropped(why: str, words: str) -> tuple[Row, ...]:
    """Options that gangline decides by itself, which is said."""

    def apply(wishes: Wishes, option: str, value: str) -> None:
        wishes.notes.append(f"{shown(option, value)}: dropped; {why}")

    return rows(words, apply)


def refused(why: str, fix: str, words: str) -> tuple[Row, ...]:
    """Options that cannot be honoured."""

    def apply(wishes: Wishes, option: str, value: str) -> None:
        raise wishes.refuse(shown(option, value), why, fix)

    return rows(words, apply)


def kept(words: str) -> tuple[Row, ...]:
    """Options that `finish` reads in `Wishes.given`."""
    return rows(words, lambda *_: None)


def per_host(words: str) -> tuple[Row, ...]:
    """Options with the number of ranks on every host."""

    def apply(wishes: Wishes, option: str, value: str) -> None:
        number = wishes.count(option, value)
        wishes.place(ranks_per_host=number)
        wishes.notes.append(f"{shown(option, value)}: {number} rank{'s' if number > 1 else ''} on every host")

    return rows(words, apply)


def shown(option: str, value: str) -> str:
    """As the user may have typed it."""
    return option if value == "True" or not value else f"{option} {value}"


def read_options(table: OptionTable, words: Sequence[str], wishes: Wishes) -> tuple[str, ...]:
    """Take the options of a launcher off; what follows them. Raises UsageError for those that cannot be honoured."""
    wishes.given, wishes.repeated = {}, []
    position = 0
    while position < len(words) and words[position].startswith("-") and words[position] != "-":
        word = words[position]
        position += 1
        if word == "--":
            break
        name, values = _split(table, word, wishes)
        row = table.row(name)
        if row is None:
            raise wishes.refuse(
                name,
                f"gangline knows no such option of {wishes.launcher}",
                "delete it, or write it behind the script if it belongs to that",
            )
        missing = 0 if row.is_optional else row.num_values - len(values)
        values += words[position : position + missing]
        position += missing
        if missing and len(values) < row.num_values:
            raise wishes.refuse(name, "nothing follows it; expected a value", "write its value, then the script")
        value = " ".join(values) if values else "True"
        wishes.given[row.key] = value
        wishes.repeated.append((row.key, value))
        row.apply(wishes, name, value)
    table.finish(wishes)
    return tuple(words[position:])


def _split(table: OptionTable, word: str, wishes: Wishes) -> tuple[str, list[str]]:
    """An option and the values that are part of the same word: `--nodes=2`, `-N2`."""
    name, has_value, value = word.partition("=")
    if has_value and table.row(name) is not None:
        return name, [value]
    short = table.row(word[:2]) if not word.startswith("--") and table.row(word) is None else None
    if short is None or len(word) == 2:
        return word, []
    if short.num_values:
        return word[:2], [word[2:].removeprefix("=")]
    raise wishes.refuse(word, "several options in one word", f"write them one by one: {word[:2]} -{word[2:]}")


def require_rows(table: OptionTable) -> OptionTable:
    """The table, in which no name is twice."""
    names = [_plain(name) for row in table.rows for name in row.names]
    twice = sorted({name for name in names if names.count(name) > 1})
    assert not twice, twice
    return table


def node_filter(wishes: Wishes, option: str, value: str) -> dict[str, tuple[int, ...]]:
    """`pc1@pc2:0,2`: hosts and their GPUs, as DeepSpeed writes them."""
    found: dict[str, tuple[int, ...]] = {}
    for node in value.split("@"):
        name, _, slots = node.partition(":")
        numbers = slots.split(",") if slots else []
        if not name or not all(number.isdecimal() for number in numbers):
            raise wishes.refuse(
                shown(option, value), "expected HOST or HOST:GPU,GPU, with @ between hosts", "for example pc1:0,1@pc2"
            )
        found[name] = tuple(sorted({*found.get(name, ()), *map(int, numbers)}))
    return found


def shell_words(wishes: Wishes, words: Sequence[str]) -> tuple[str, ...]:
    """The words of a command for a shell that need none; raises UsageError for others."""
    text = " ".join(words) if len(words) > 1 else "".join(words)
    if any(letter in text for letter in ";&|<>$`\n*"):
        raise UsageError(
            f"{wishes.launcher} hands a line to the shell of each host, and gangline starts no shell",
            seen=text,
            fix="gangline run --dir FOLDER -- train.py --option value; or put the line into a script: ./train.sh",
        )
    return tuple(words) if len(words) > 1 else tuple(shlex.split(text))


def lines(wishes: Wishes, names: Iterable[str]) -> list[str]:
    """What the user is told: which launchers were taken off, and what became of their options."""
    return [f"{' and '.join(names)}: taken off, gangline starts the ranks itself", *wishes.notes]
