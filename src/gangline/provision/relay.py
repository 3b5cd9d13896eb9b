"""One folder to many hosts: from host to host where they can log in to each other, else from this computer.

Who has it sends it on, so that n hosts have it after log2(n) times one copy, and the user's own link carries it once.
Everything is brought beside its target, hashed there, and renamed only if it is what it should be.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from gangline.errors import GanglineError, RunFailed
from gangline.provision.ask import ask_agent, run_there
from gangline.provision.console import SILENT, Console, Meter, shown
from gangline.provision.trees import (
    REMEMBERED,
    Spot,
    Tree,
    here,
    is_shared,
    look,
    look_everywhere,
    place,
    same_place,
)
from gangline.runs.cluster import Host
from gangline.transport.fanout import in_parallel
from gangline.transport.hostkeys import resolve
from gangline.transport.transport import ByteProgress
from gangline.units import format_bytes

LOOPBACK = frozenset({"", "localhost", "127.0.0.1", "::1"})


def peer_of(host: Host) -> dict[str, Any] | None:
    """User, address, port and pinned key by which another host reaches this one; None without a key or an address.

    Names of this computer's ssh_config mean nothing on another one, so they are resolved here.
    """
    if host.transport == "local" or host.host_key is None or host.address in LOOPBACK:
        return None
    found = resolve(host.ssh or host.name, host.ssh_port)
    return {
        "name": host.name,
        "user": found.user,
        "address": host.address,
        "port": found.port,
        "host_key": host.host_key,
    }


SMALL_BYTES = 16 << 20
"""Less than this is brought from this computer to all at once: finding a way between hosts costs more."""
NUM_AT_ONCE = 4
"""Copies that leave this computer at the same time."""
SEND_TIMEOUT_S = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cargo:
    """What is brought: a folder or file that lies at `source`."""

    what: str
    """What it is for the user: "model tiny", "training data"."""
    source: Spot
    tree: Tree
    files: Mapping[str, Path] | None = None
    """Where each file of the tree lies on this computer, if `source` is not just the folder to copy: some of it stays
    behind, or is a link."""
    kind: type[GanglineError] = RunFailed
    """The error if it cannot be brought whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """How it went."""

    hops: tuple[tuple[str, str], ...] = ()
    """(from, to), by names of hosts."""
    obstacles: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """Why one host could not send to another."""

    @property
    def served(self) -> tuple[str, ...]:
        """The hosts that got something."""
        return tuple(target for _, target in self.hops)

    def lines(self, what: str) -> list[str]:
        """The delivery for people."""
        if not self.hops:
            return []
        targets: dict[str, list[str]] = {}
        for source, target in self.hops:
            targets.setdefault(source, []).append(target)
        return [
            *(f"copied {what} from {source} to {', '.join(names)}" for source, names in targets.items()),
            *(f"  {one} cannot send to {other}: {shown(why)}" for (one, other), why in self.obstacles.items()),
        ]


def bring(
    cargo: Cargo,
    targets: Sequence[Spot],
    *,
    shared: Sequence[str] = (),
    scratch: Path | None = None,
    console: Console = SILENT,
) -> Delivery:
    """See to it that every target holds the cargo; those that do are left alone. Raises `cargo.kind`, HostUnreachable.

    shared: folders that are the same on all hosts: one host gets it there, the others are only looked at.
    scratch: a folder of this computer for what has to pass through it.
    """
    targets = [target for target in targets if not same_place(target, cargo.source)]
    trees = look_everywhere(targets, dataclasses.replace(REMEMBERED, what=cargo.what), console=console)
    lacking = [target for target, tree in zip(targets, trees, strict=True) if tree.hash != cargo.tree.hash]
    for target, tree in zip(targets, trees, strict=True):
        if target in lacking and tree.free_bytes is not None and tree.free_bytes < cargo.tree.num_bytes:
            _require_room(cargo, target, tree.free_bytes)
    once, others = _once_if_shared(lacking, shared)
    having = [target for target in targets if target not in lacking]
    delivery = _FanOut(cargo, having, scratch=scratch, console=console).serve(once)
    for target in others:
        if look(target).hash != cargo.tree.hash:
            raise cargo.kind(
                f"{target.host.name}: {target.path} is not the folder that the others have",
                seen=f"the cluster file says that {', '.join(shared)} is shared by all hosts",
                fix="mount it there, or take it off `shared` in the cluster file",
            )
    for line in delivery.lines(cargo.what):
        console.report(line)
    return delivery


def _require_room(cargo: Cargo, target: Spot, free_bytes: int) -> None:
    """Raise if it does not fit, counting what an earlier try has left there."""
    partial = partial_of(target, cargo.tree).name
    names = [name for name in target.transport.names(target.path.parent) if partial in name]
    begun = [dataclasses.replace(target, path=target.path.with_name(name)) for name in names]
    missing_bytes = cargo.tree.num_bytes - sum(look(spot).num_bytes for spot in begun)
    if missing_bytes > free_bytes:
        room, need = format_bytes(free_bytes), format_bytes(missing_bytes)
        raise cargo.kind(
            f"{target.host.name}: no room for {cargo.what}",
            seen=f"{need} are to be written to {target.path.parent}, {room} are free",
            fix="make room there, or give the host another `workdir` on a larger disk",
        )


def _once_if_shared(lacking: Sequence[Spot], shared: Sequence[str]) -> tuple[list[Spot], list[Spot]]:
    """Those that something has to be brought to, and those that then have it, too."""
    once: list[Spot] = []
    others: list[Spot] = []
    seen: set[PurePath] = set()
    for target in lacking:
        (others if target.path in seen and is_shared(target.path, shared) else once).append(target)
        seen.add(target.path)
    return once, others


class _FanOut:
    """One delivery under way."""

    def __init__(self, cargo: Cargo, having: Iterable[Spot], *, scratch: Path | None, console: Console) -> None:
        self._cargo = cargo
        self._holders = [spot for spot in [cargo.source, *having] if not spot.is_here]
        self._scratch = scratch
        self._peers: dict[str, dict[str, Any] | None] = {}
        self._meter = Meter(console, cargo.what)
        self._hops: list[tuple[str, str]] = []
        self._obstacles: dict[tuple[str, str], str] = {}
        self._lock = threading.Lock()

    def serve(self, lacking: Sequence[Spot]) -> Delivery:
        """Bring it to all of them."""
        waiting = list(lacking)
        for target in waiting:
            self._meter.expect(target.host.name, self._cargo.tree.num_bytes)
        if self._between_hosts(waiting):
            waiting = self._spread(waiting)
        if waiting:
            with self._at_hand() as source:
                self._parallel([(source, target) for target in waiting], self._push)
        order = [target.host.name for target in lacking]
        return Delivery(hops=tuple(sorted(self._hops, key=lambda hop: order.index(hop[1]))), obstacles=self._obstacles)

    def _between_hosts(self, waiting: Sequence[Spot]) -> bool:
        """Whether hosts should send to each other."""
        large = self._cargo.tree.kind == "folder" and self._cargo.tree.num_bytes > SMALL_BYTES
        return large and len([*self._holders, *waiting]) > 1

    def _spread(self, waiting: list[Spot]) -> list[Spot]:
        """Round by round, every host that has it sends it to one that lacks it; the rest that nobody reaches."""
        self._peers = {target.host.name: peer_of(target.host) for target in waiting}
        if not self._holders:
            first = next((target for target in waiting if self._peers[target.host.name]), waiting[0])
            with self._at_hand() as source:
                self._push(source, first)
            waiting.remove(first)
            self._holders = [first]
        while waiting and (pairs := self._pairs(waiting)):
            arrived = self._parallel(pairs, self._send)
            waiting = [target for target in waiting if target not in arrived]
            self._holders += arrived
        return waiting

    def _pairs(self, waiting: Sequence[Spot]) -> list[tuple[Spot, Spot]]:
        """Who sends to whom next; a pair that did not work is not tried again, nor a sender without any way."""
        pairs: list[tuple[Spot, Spot]] = []
        for holder in self._holders:
            taken = [target for _, target in pairs]
            failed = [other for one, other in self._obstacles if one == holder.host.name]
            sent = [other for one, other in self._hops if one == holder.host.name]
            free = [target for target in waiting if target not in taken and target.host.name not in failed]
            able = [target for target in free if self._peers[target.host.name]]
            if able and (sent or not failed):
                pairs.append((holder, able[0]))
        return pairs

    def _parallel(self, pairs: Sequence[tuple[Spot, Spot]], act: Callable[[Spot, Spot], bool]) -> list[Spot]:
        """Do it for all pairs; the targets for which it worked. Who presses Ctrl-C does not wait for the copies."""
        done = in_parallel(lambda pair: act(*pair), pairs, at_once=NUM_AT_ONCE)
        return [target for (_, target), worked in zip(pairs, done, strict=True) if worked]

    def _send(self, source: Spot, target: Spot) -> bool:
        """From host to host; False where the one does not reach the other."""
        partial = partial_of(target, self._cargo.tree)
        run_there(target.transport, ("mkdir", "-p", "-m", "700", "--", str(partial)))
        request = {
            "folder": str(source.path),
            "names": sorted(self._cargo.tree.files),
            "target": str(partial),
            "timeout_s": SEND_TIMEOUT_S,
            "peer": self._peers[target.host.name],
        }
        on_progress = lambda record: self._meter.at(target.host.name, int(record.get("done_bytes", 0)))  # noqa: E731
        answer = ask_agent(source.transport, "send", request, on_progress=on_progress)
        if not answer["sent"]:
            with self._lock:
                self._obstacles[source.host.name, target.host.name] = str(answer.get("why"))
            return False
        self._settle(source, target)
        return True

    def _push(self, source: Spot, target: Spot) -> bool:
        """From this computer."""
        partial = partial_of(target, self._cargo.tree)
        if source is self._cargo.source and self._cargo.files is not None:
            self._push_files(self._cargo.files, target, partial)
        else:
            report = self._reporter(target)
            target.transport.push(Path(source.path), partial, on_progress=report)
        self._settle(source, target)
        return True

    def _push_files(self, files: Mapping[str, Path], target: Spot, partial: PurePath) -> None:
        """One by one; those that an earlier try brought are left alone."""
        there = look(Spot(host=target.host, transport=target.transport, path=partial)).files
        done = 0
        for name, path in sorted(files.items()):
            size, mark = self._cargo.tree.files[name]
            if name not in there or there[name][1] != mark:
                target.transport.push(path, partial / name, on_progress=self._reporter(target, base=done))
            done += size
            self._meter.at(target.host.name, done)

    def _reporter(self, target: Spot, *, base: int = 0) -> ByteProgress:
        return lambda done, _total: self._meter.at(target.host.name, base + done)

    def _settle(self, source: Spot, target: Spot) -> None:
        """What arrived takes its place, if it is what it should be."""
        settle(target, partial_of(target, self._cargo.tree), self._cargo.tree, kind=self._cargo.kind)
        self._meter.whole(target.host.name)
        with self._lock:
            self._hops.append((source.host.name, target.host.name))

    @contextlib.contextmanager
    def _at_hand(self) -> Iterator[Spot]:
        """The cargo on this computer; if it lies elsewhere, it is fetched."""
        source = self._cargo.source
        if source.is_here:
            yield source
            return
        if self._scratch is not None:
            self._scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="gangline-pass-", dir=self._scratch) as folder:
            copy = Path(folder) / "cargo"
            source.transport.pull(source.path, copy)
            yield here(copy)


def settle(target: Spot, partial: PurePath, tree: Tree, *, kind: type[GanglineError]) -> None:
    """Have what lies at `partial` take the target's place, if it is the tree; raises `kind` naming what differs."""
    wrong = place(target, tree, folder=str(partial))
    if wrong is None or look(target).hash == tree.hash:  # the latter: somebody else brought it at the same time
        return
    names = ", ".join(shown(str(target.path / name)) for name in wrong[:5])
    raise kind(
        f"{target.host.name}: {names or target.path} is damaged",
        seen="what arrived is not what was sent, by its hash",
        fix="look at the disk of that host; or the files changed while they were copied: start again",
    )


def partial_of(target: Spot, tree: Tree) -> PurePath:
    """Where it is gathered, so that a second try goes on from there, and another content does not."""
    return target.path.with_name(f".{target.path.name}.{str(tree.hash)[:12]}.partial")
