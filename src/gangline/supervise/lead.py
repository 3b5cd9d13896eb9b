"""The leader of a run at work: it asks for votes, tells the other hosts that it lives, and gives them the records that
a successor needs.

Nothing listens on a port for it: votes are commands, heartbeats and records are files, over ssh.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from gangline.errors import GanglineError, RunFailed
from gangline.launch.backend import LaunchRequest
from gangline.launch.backends import backend
from gangline.provision.trees import Spot, add_kept_history, host_layout
from gangline.runs.cluster import Cluster, Host
from gangline.runs.decode import build, known_part
from gangline.runs.files import json_object, write_atomic
from gangline.runs.layout import RunLayout
from gangline.runs.record_versions import Record, encode_record, load_if_there, write_record
from gangline.runs.state import RunState, StopOrder, append_event, read_order
from gangline.supervise.attempt_records import Superseded
from gangline.supervise.leadership import EPOCHS, HEARTBEAT_S, HOLD_S, Campaign, Hold, Membership, with_voices
from gangline.transport.connect import connect_all
from gangline.transport.ssh_options import NONSENSE
from gangline.transport.transport import AGENT, Transport, read_if_there

log = logging.getLogger(__name__)
VOTE_S = 20.0
MORE_S = 1.0
"""How long answers are waited for once there are enough: one of them may hear the leader."""
LOST_S = 50.0
"""How long a leader without a majority waits, beyond the end of its hold, before it ends its ranks."""
COMMIT_S = 30.0
AGAIN_S = 3.0
END_S = 30.0
GOES_ON = ("running", "stopping", "restarting")
"""Phases of a run of which something may be left to lead."""
ELECT_S, PATIENT_S = 20.0, 3600.0
"""How long a supervisor asks for votes: one that a person has started, and one that a host agent has started again."""
MOST_EVENTS = 1 << 20
MOST_HISTORY = 1 << 18
"""Bytes of the history of rank 0 that are sent to a host at once."""


def suspended_clock() -> float:
    """Seconds of a clock that goes on while this machine sleeps: a leader that wakes up knows that its hold is over.

    A host that votes uses one that stands still then, so that it waits for longer.
    """
    boot_time = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot_time is None else time.clock_gettime(boot_time)


class Deposed(Superseded):
    """Another host leads the run now: this supervisor ends what it has on its own host, and gives up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deputies(Record):
    """deputies.json: hosts that may take over the run."""

    cluster: Cluster
    """All hosts and the witness, as any of them reaches the others."""
    candidates: tuple[str, ...]
    """Hosts that reach all others, and have what a supervisor needs; in the order in which they try."""
    attempt: int
    """The attempt that a person began."""

    @staticmethod
    def of(layout: RunLayout) -> Deputies | None:
        """The last that were written for a run; None: there never were any."""
        return load_if_there(layout.deputies, Deputies)

    def seen_from(self, own: str) -> Cluster:
        """The cluster as one of the hosts sees it."""
        return seen_from(self.cluster, own)


def seen_from(cluster: Cluster, own: str, ways: Cluster | None = None) -> Cluster:
    """A cluster as one of its hosts sees it: itself as this computer. ways: how the others are reached."""
    found = {host.name: host for host in (ways or cluster).hosts}

    def seen(host: Host) -> Host:
        if host.name == own:
            return dataclasses.replace(host, transport="local", ssh=None, ssh_port=None)
        way = found.get(host.name, host)
        return dataclasses.replace(host, transport=way.transport, ssh=way.ssh, ssh_port=way.ssh_port)

    return dataclasses.replace(cluster, hosts=tuple(map(seen, cluster.hosts)))


# The records that a successor needs, in one sealed document.


SEALED_FILES = ("request", "gang", "networks", "base", "again", "outcome", "cluster", "standby")


class SealedRecords:
    """The document, made anew when one of its files has changed. Safe for several threads."""

    def __init__(self, layout: RunLayout) -> None:
        self._layout = layout
        self._lock = threading.Lock()
        self._seen: Any = None
        self.number = 0
        self._files: dict[str, str] = {}

    def renew(self) -> int:
        """The number of the document as the files are now."""
        with self._lock:
            # Before any is read: what is written meanwhile is read again the next time.
            stats = [(str(path), _stat(path)) for path in self._paths()]
            seen = [(path, stat.st_mtime_ns, stat.st_size) for path, stat in stats if stat is not None]
            if seen != self._seen:
                state = _text(self._layout.state)  # before the others: all that it names is written before it
                paths = self._paths()
                self._files = {str(path.relative_to(self._layout.folder)): _text(path) for path in paths}
                self._files[self._layout.state.name] = state
                self._seen, self.number = seen, self.number + 1
            return self.number

    def sealed(self, term: int, path: PurePath) -> tuple[int, bytes]:
        """The number and the document, as a leader of a term writes it."""
        with self._lock:
            words = {"term": term, "number": self.number, "files": self._files, "seal": _seal(self._files)}
            return self.number, encode_record(words, path)

    def _paths(self) -> list[Path]:
        layout = self._layout
        attempts = sorted((layout.folder / "attempts").glob("*/*.json"))
        mine = [path for path in attempts if path.stem in SEALED_FILES and path.parent.name.isdecimal()]
        of_run = [layout.state, layout.cluster, layout.plan, layout.deputies, layout.events, layout.order, layout.leave]
        of_run += sorted(layout.folder.glob(layout.messages("*").name))
        return [path for path in (*of_run, *mine) if path.is_file()]


def files_of(data: bytes, layout: RunLayout) -> dict[str, str]:
    """The files in a sealed document, by path below the run's folder; raises RunFailed where it is not whole."""
    said = json_object(data) or {}
    files = said.get("files")
    if not isinstance(files, dict) or said.get("seal") != _seal(files):
        raise RunFailed(
            f"the records of {layout.run_id} are not whole",
            seen="their seal does not fit them",
            fix=f"go on by hand: gangline resume {layout.run_id} --without the host that is off",
        )
    return files


def unpack(data: bytes, layout: RunLayout, deputies: Deputies, *, own: str) -> None:
    """Write the records of a run, as this host sees its hosts. Raises RunFailed for a document that is not whole."""
    for name, text in files_of(data, layout).items():
        path = layout.folder / name
        if ".." in PurePath(name).parts or PurePath(name).is_absolute():
            continue
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.name == layout.cluster.name:
            cluster = build(Cluster, known_part(Cluster, json_object(text.encode()) or {}))
            write_record(path, seen_from(cluster, own, deputies.cluster).to_json())
        else:
            write_atomic(path, text.encode())


def _seal(files: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _stat(path: Path) -> Any:
    with contextlib.suppress(OSError):
        return path.stat()
    return None


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        data = path.read_bytes()
        if len(data) > MOST_EVENTS and path.suffix == ".jsonl":
            data = data[-MOST_EVENTS:].partition(b"\n")[2]
        return data.decode("utf-8", "replace")
    return ""


class Lead:
    """The voice of one host in the leadership of a run, and its lead once it has won.

    own: this host. transports: ways to all hosts, of its own.
    """

    def __init__(
        self,
        layout: RunLayout,
        deputies: Deputies,
        own: str,
        transports: Mapping[str, Transport],
        *,
        clock: Callable[[], float] = suspended_clock,
    ) -> None:
        self.layout = layout
        self.deputies = deputies
        self.own = own
        self.term = 0
        state = load_if_there(layout.state, RunState)
        self._led_before = state.epoch // EPOCHS if state is not None else 0
        self.transports = transports
        self._clock = clock
        self._records = SealedRecords(layout)
        self._hold = Hold()
        self._lock = threading.Lock()
        self._has: dict[str, dict[str, tuple[int, int]]] = {}
        """Host -> what it has confirmed: versions of the membership and the records."""
        self._contested = 0
        """A higher term that a host has promised to somebody."""
        self._contested_at = float("-inf")
        self._over = False
        """The run has ended."""
        self._has_records = True
        """This host has the records of the run: a deputy takes them only once it is elected."""
        self._closed = threading.Event()
        self._threads: dict[str, threading.Thread] = {}
        self._wake: dict[str, threading.Event] = {}
        self._number = 0
        self._historian: threading.Thread | None = None
        self._head: str | None = None
        """The host of rank 0; None: no attempt has begun here."""
        self._listeners = tuple(host.name for host in deputies.cluster.hosts)
        """The hosts of the attempt: each hears that the leader lives, also one without a voice."""
        path = newest(layout.lead / own, "membership")
        found = load_if_there(path, Membership) if path is not None else None
        self.is_afresh = found is None or found.attempt < deputies.attempt
        self._witness = deputies.cluster.witness.name if deputies.cluster.witness is not None else None
        names = with_voices([host.name for host in deputies.cluster.hosts], own, self._witness)
        fresh = Membership(term=0, number=0, attempt=deputies.attempt, members=names)
        self.membership = fresh if found is None or self.is_afresh else found

    @property
    def is_replaced_here(self) -> bool:
        """Whether a later supervisor of this very host leads, or has led."""
        return RunState.load(self.layout).epoch // EPOCHS > max(self.term, self._led_before)

    # Votes.

    def campaign(self, *, quiet: Collection[str] = ()) -> Campaign:
        """Try once to become the leader. quiet: hosts whose answer is not waited for."""
        tried = Campaign(self.membership, self.own, afresh=self.is_afresh)
        while (request := tried.request) is not None:
            tried.take(self._ask(tried.membership, request, quiet))
        if not self.is_afresh:
            self.membership = tried.membership
        if tried.term is not None and not self.is_behind(tried):
            with self._lock:
                self.term, self.membership = tried.term, tried.membership
                self._has, self._hold, self._contested, self.is_afresh = {}, Hold(), 0, False
            log.info("%s: %s leads in term %d", self.layout.run_id, self.own, tried.term)
        return tried

    def is_behind(self, tried: Campaign) -> bool:
        """Whether another host has led since this one did: what it wrote counts, and not the records of this one.

        Before an attempt begins a majority has its records; so one of those that have voted for this host has them. A
        deputy takes them from there.
        """
        takes_them = not self.term and not self._has_records
        return not takes_them and not self.is_afresh and tried.newest[0][0] > self.last_term

    @property
    def last_term(self) -> int:
        """The last term in which this host led, also by an earlier supervisor; 0: it never did."""
        return self.term or self._led_before

    def _ask(
        self, membership: Membership, request: Mapping[str, Any], quiet: Collection[str]
    ) -> dict[str, dict[str, Any]]:
        pool = ThreadPoolExecutor(max_workers=32, thread_name_prefix="gangline vote")
        asked: dict[Future[dict[str, Any] | None], str] = {
            pool.submit(self._ask_one, host, request): host for host in membership.everybody if host in self.transports
        }
        answers: dict[str, dict[str, Any]] = {}
        open_ = set(asked)
        end = self._clock() + VOTE_S
        while open_ and (left_s := end - self._clock()) > 0:
            done, open_ = wait(open_, min(left_s, MORE_S), return_when=FIRST_COMPLETED)
            for future in done:
                if (said := future.result()) is not None:
                    answers[asked[future]] = said
            granted = {host for host, said in answers.items() if said["granted"]}
            if membership.is_won_by(granted) or {asked[future] for future in open_} <= set(quiet):
                end = min(end, self._clock() + (MORE_S if request["trial"] else 0.0))
        pool.shutdown(wait=False)
        return answers

    def _ask_one(self, host: str, request: Mapping[str, Any]) -> dict[str, Any] | None:
        words = {**request, "folder": str(self._folder(host)), "host": host}
        try:
            result = self.transports[host].run((AGENT, "vote"), stdin=json.dumps(words).encode(), timeout_s=VOTE_S)
            said = json.loads(result.stdout.splitlines()[-1])
            return said if said.get("kind") == "result" else None
        except (GanglineError, OSError, ValueError, IndexError) as error:
            log.info("%s gives no vote: %s", host, str(error).splitlines()[:1])
            return None

    def ask_witness(self) -> None:
        """Have the witness look at what it has heard, as host agents do by themselves: it has none.

        Its silence counts from then on, and what newer files have replaced is removed there.
        """
        if self._witness is not None:
            trial = Campaign(self.membership, self.own).request
            assert trial is not None
            self._ask_one(self._witness, trial)

    def _folder(self, host: str) -> Path:
        return host_layout(self.deputies.cluster.host(host), self.layout.run_id).folder

    def records_of(self, host: str, version: tuple[int, int]) -> bytes:
        """The sealed records that a host has, of a term and a number; raises HostUnreachable, FileNotFoundError."""
        path = self._folder(host) / "lead" / host / "records-{}-{}.json".format(*version)
        data, offset = b"", 0
        while piece := self.transports[host].read(path, offset=offset):
            data, offset = data + piece, offset + len(piece)
        return data

    # The lead itself.

    def await_records(self) -> None:
        """Send no records until `unpack` has written them here: those of the newest voter."""
        self._has_records = False

    def unpack(self, data: bytes) -> None:
        """Write the sealed records of the run here, and send them from now on. Raises RunFailed."""
        unpack(data, self.layout, self.deputies, own=self.own)
        self._has_records = True

    def start(self) -> None:
        """Tell all hosts of the run from now on that the leader lives."""
        for host in self._told:
            if host in self.transports and host not in self._threads:
                thread = threading.Thread(target=self._tell, args=(host,), daemon=True, name=f"gangline lead {host}")
                self._threads[host], self._wake[host] = thread, threading.Event()
                thread.start()
        if self._historian is None:
            self._historian = threading.Thread(target=self._copy_history, daemon=True, name="gangline lead history")
            self._historian.start()

    @property
    def _told(self) -> set[str]:
        return {*self.membership.everybody, *self._listeners}

    def _tell(self, host: str) -> None:
        while not self._closed.is_set():
            if host in self._told:
                try:
                    self.tell(host)
                except (GanglineError, OSError, ValueError) as error:
                    log.debug("%s does not hear the leader: %s", host, error)
            self._wake[host].wait(HEARTBEAT_S)
            self._wake[host].clear()

    def _hurry(self) -> None:
        """Tell all hosts at once, not only at the next heartbeat."""
        for event in list(self._wake.values()):
            event.set()

    def tell(self, host: str) -> None:
        """Tell one host once that the leader lives, and give it what it lacks; the errors of its transport."""
        folder, remote = self._folder(host) / "lead" / host, self.transports[host]
        with self._lock:
            term, membership, over = self.term, self.membership, self._over
            has = dict(self._has.get(host, {}))
            self._number += 1
            number = self._number
        if has.get("membership") != membership.version:
            path = folder / f"membership-{term}-{membership.number}.json"
            remote.write(path, encode_record({**membership.to_json(), "term": term}, path))
        sent = self._clock()
        path = folder / f"heartbeat-{term}.json"
        remote.write(path, encode_record({"leader": self.own, "number": number, "over": over}, path))
        promise = json_object(read_if_there(remote, folder / "promise.json") or b"{}") or {}
        with self._lock:
            if term != self.term:
                return
            if int(promise.get("term", 0)) > term:
                self._contested = max(self._contested, int(promise["term"]))
                return
            self._hold.note(host, sent)
            self._has.setdefault(host, {})["membership"] = membership.version
            if over:
                self._has[host]["over"] = (1, 1)
        if not self._has_records:
            return
        wanted = self._records.renew()
        if has.get("records") != (term, wanted):
            number, data = self._records.sealed(term, folder / "records.json")
            path = folder / f"records-{term}-{number}.json"
            remote.write(path, data)
            promise = json_object(read_if_there(remote, folder / "promise.json") or b"{}") or {}
            with self._lock:
                if term == self.term and int(promise.get("term", 0)) <= term:
                    self._has.setdefault(host, {})["records"] = (term, number)
            if host == self._witness:
                self.ask_witness()

    def _copy_history(self) -> None:
        """Have every host keep the lines of metrics.jsonl; beside the heartbeats, which must not wait for it."""
        while not self._closed.wait(HEARTBEAT_S):
            for host in self.keepers_of_history:
                with contextlib.suppress(GanglineError, OSError, *NONSENSE):
                    self.send_history(host)

    @property
    def keepers_of_history(self) -> set[str]:
        """The hosts that keep what rank 0 has written: all that may train."""
        return (self._told & self.transports.keys()) - {self._witness}

    def follow_head(self, host: str) -> None:
        """Rank 0 runs there from now on."""
        self._head = host

    def send_history(self, host: str) -> None:
        """Send one host the lines of rank 0 that it lacks; the errors of its transport. Best effort: the rest follows.

        A host that has not heard this leader lately is left out: others would wait for it.
        """
        head, term = self._head, self.term
        if head is None or host == head or not all(map(self._hears, (head, host))):
            return
        folder, remote = self._folder(host) / "lead" / host, self.transports[host]
        has = json_object(read_if_there(remote, folder / "history.json") or b"{}") or {}
        start = int(has.get(head, 0))
        path = host_layout(self.deputies.cluster.host(head), self.layout.run_id).metrics
        try:
            data = self.transports[head].read(path, offset=start, limit=MOST_HISTORY)
        except FileNotFoundError:
            return
        if whole := data[: data.rfind(b"\n") + 1]:
            path = folder / f"history-{term}-{start}.json"
            remote.write(path, encode_record({"head": head, "lines": whole.decode("utf-8", "surrogateescape")}, path))

    def _hears(self, host: str) -> bool:
        with self._lock:
            return self._hold.heard_at(host) > self._clock() - HOLD_S

    def restore_history(self, head: str) -> bool:
        """Add what a new host of rank 0 has kept of the history of those before; False: it has kept none."""
        place = Spot(host=self.deputies.cluster.host(head), transport=self.transports[head], path=PurePath())
        return add_kept_history(place, self._folder(head) / "lead" / head / "history.jsonl", self.layout.run_id)

    def _confirmed(self, kind: str, version: tuple[int, int]) -> set[str]:
        with self._lock:
            return {host for host, has in self._has.items() if has.get(kind, (0, 0)) >= version}

    def await_heard(self, hosts: Collection[str], *, within_s: float) -> set[str]:
        """Wait until these hosts have heard the leader; those that have not after a time."""
        deadline = self._clock() + within_s
        while (silent := {host for host in hosts if not self._hears(host)}) and self._clock() < deadline:
            time.sleep(0.1)
        return silent

    @property
    def holds(self) -> bool:
        """Whether it may command: a majority has heard it within the last HOLD_S."""
        with self._lock:
            return self._clock() < self._hold.until(self.membership)

    def check(self) -> None:
        """Raise Deposed if another host leads. Where a host has voted for another one in vain, ask for votes again."""
        if self._contested <= self.term or self._clock() < self._contested_at + AGAIN_S:
            return
        self._contested_at = self._clock()
        tried = self.campaign()
        if tried.leader is not None or (tried.term is not None and self.is_behind(tried)):
            raise self._deposed(tried, seen=f"it was elected in term {self._contested}")
        if tried.term is not None:
            append_event(self.layout.events, "leads", source="supervisor", host=self.own, term=tried.term)
            if self._has_records:
                self.raise_epoch()

    def give_way(self, epoch: int) -> Superseded:
        """The error for a supervisor with a higher epoch, of which most of its hosts have told: Deposed, unless that is
        a person who ordered an end around this host.
        """
        tried = self.campaign_for_nothing()
        if tried.leader is None and epoch // EPOCHS <= self.term:
            return Superseded(
                f"another supervisor is in charge of {self.layout.run_id}",
                seen=f"its epoch is {epoch}; no other host has been elected",
                fix="nothing to do: this supervisor exits and has changed nothing since",
            )
        return self._deposed(tried, seen=f"its orders have epoch {epoch}")

    def campaign_for_nothing(self) -> Campaign:
        """A trial, which says who leads."""
        tried = Campaign(self.membership, self.own)
        assert tried.request is not None
        tried.take(self._ask(tried.membership, tried.request, ()))
        return tried

    def _deposed(self, tried: Campaign, *, seen: str) -> Deposed:
        return Deposed(
            f"{tried.leader or 'another host'} leads {self.layout.run_id} now",
            seen=seen,
            fix=f"nothing to do here; follow the run: gangline attach {self.layout.run_id}",
        )

    def failure(self) -> GanglineError | None:
        """Why ranks are to end: this host has not reached most of the others for long."""
        with self._lock:
            until = self._hold.until(self.membership)
        if until == float("-inf") or self._clock() < until + LOST_S:
            return None
        return RunFailed(
            f"{self.own}, which leads the run, does not reach most of its hosts",
            seen=f"those with a voice: {', '.join(self.membership.members)}",
            fix="it waits until it reaches them again, or finds that they go on without it",
        )

    def await_hold(self, is_ordered: Callable[[], bool], *, limit_s: float = float("inf")) -> bool:
        """Wait until it holds a majority; False where the user has ordered an end first, or after a time.

        Raises Deposed.
        """
        return self._await(lambda: self.holds, is_ordered, limit_s)

    def _await(self, is_done: Callable[[], bool], is_ordered: Callable[[], bool], limit_s: float) -> bool:
        deadline = self._clock() + limit_s
        while not is_done():
            self.check()
            if is_ordered() or self._clock() > deadline:
                return False
            time.sleep(0.1)
        return True

    def follow(self, hosts: Sequence[str]) -> None:
        """These are the hosts of the attempt, that of rank 0 first: each hears from now on that the leader lives."""
        self._listeners = tuple(hosts)
        self.follow_head(hosts[0])
        self.start()

    def commit(self, members: Sequence[str], is_ordered: Callable[[], bool]) -> bool:
        """Give the voice to the hosts of an attempt, and wait until a majority of them, and of those before, has that
        and the records as they are now; False where that is not reached, and then it may not begin. Raises Deposed.
        """
        if not self._settle(is_ordered):
            return False
        voices = with_voices(members, self.own, self._witness)
        self.follow(members)
        if set(voices) != set(self.membership.members):
            with self._lock:
                self.membership = self.membership.toward(voices)
            if not self._settle(is_ordered):
                return False
        wanted = self._records.renew()
        self._hurry()

        def is_known() -> bool:
            return self.holds and self.membership.is_won_by(self._confirmed("records", (self.term, wanted)))

        return self._await(is_known, is_ordered, COMMIT_S)

    def _settle(self, is_ordered: Callable[[], bool]) -> bool:
        """Complete a change of the members that is under way."""
        if self.membership.before is None:
            return True

        def is_known() -> bool:
            return self.membership.is_won_by(self._confirmed("membership", self.membership.version))

        self._hurry()
        if not self._await(is_known, is_ordered, COMMIT_S):
            return False
        with self._lock:
            self.membership = self.membership.settled()
        return True

    def raise_epoch(self) -> None:
        """Write an epoch of this term into state.json: the next supervisor of an attempt takes a higher one."""
        state = RunState.load(self.layout)
        if state.epoch < self.least_epoch:
            dataclasses.replace(state, epoch=self.least_epoch).save(self.layout)

    @property
    def least_epoch(self) -> int:
        """The lowest epoch of this term: the supervisor of this process has a higher one."""
        return self.term * EPOCHS

    def end(self) -> None:
        """Tell the members that the run has ended, for a while at most. Once most know, nobody takes it over, so the
        addresses of its messages go from the hosts that would have sent them.
        """
        self._over, is_known = True, False
        self._hurry()
        with contextlib.suppress(Deposed):
            is_known = self._await(
                lambda: self.membership.is_won_by(self._confirmed("over", (1, 1))), lambda: False, COMMIT_S / 3
            )
        for host in {*self.deputies.candidates} - {self.own} if is_known else ():
            sinks = host_layout(self.deputies.cluster.host(host), self.layout.run_id).sinks
            with contextlib.suppress(GanglineError, OSError, *NONSENSE):
                self.transports[host].run(("rm", "-f", str(sinks)))
        self.close()

    def close(self) -> None:
        """Be silent from now on."""
        self._closed.set()
        self._hurry()


def lead_of(layout: RunLayout, attempt: int, connect: Callable[[Cluster], Mapping[str, Transport]]) -> Lead | None:
    """The lead that a supervisor on this host has to win before it commands; None: nobody else could take over."""
    deputies = Deputies.of(layout)
    begun = (load_if_there(layout.base(attempt), dict) or {"attempt": attempt})["attempt"]
    if deputies is None or not deputies.candidates or deputies.attempt != begun:
        return None
    here = [host.name for host in Cluster.of_attempt(layout, attempt).hosts if host.transport == "local"]
    if len(here) != 1:
        return None
    return Lead(layout, deputies, here[0], connect(deputies.seen_from(here[0])))


def win(lead: Lead, *, beat: Callable[[], None] = lambda: None, order: Callable[[], StopOrder | None]) -> None:
    """Have a supervisor on this host elected; raises Deposed where another host leads, or has led since, RunFailed
    without a majority.

    beat: touches the supervisor's lock. order: what the user orders the run to do; it is passed on without a majority.
    """
    begun = time.monotonic()
    while True:
        beat()
        tried = lead.campaign()
        if lead.term:
            lead.raise_epoch()
            lead.start()
            return
        _require_not_led(lead, tried)
        given = order()
        if time.monotonic() > begun + (PATIENT_S if given is None and not lead.is_afresh else ELECT_S):
            if given is not None:
                _end_ranks(lead, {host.name for host in lead.deputies.cluster.hosts}, now=given == "kill")
            raise RunFailed(
                f"{lead.own} is not elected to lead {lead.layout.run_id}",
                seen=str(tried.why),
                fix="bring these hosts back; or go on without those that are off: gangline resume --without HOST",
            )
        time.sleep(AGAIN_S)


def _require_not_led(lead: Lead, tried: Campaign) -> None:
    """Raise Deposed where another host leads, or has led since this one did."""
    run_id = lead.layout.run_id
    if tried.over and not lead.is_afresh:
        what, seen = f"another host has led {run_id} to its end", f"hosts say so; {lead.own} asked for their votes"
    elif tried.leader is not None:
        what, seen = f"{tried.leader} leads {run_id}", f"most hosts hear it; {lead.own} asked for their votes"
    elif tried.term is not None:
        what = f"another host has led {run_id} since {lead.own} did"
        seen = f"{tried.newest[1]} has its records, of term {tried.newest[0][0]}"
    else:
        return
    raise Deposed(what, seen=seen, fix=f"follow the run: gangline attach {run_id}")


def newest(folder: Path, kind: str) -> Path | None:
    """The file of a kind with the highest term and number in the folder `lead/<host>` of this host."""
    found = sorted(folder.glob(f"{kind}-*.json"), key=lambda path: [int(word) for word in path.stem.split("-")[1:]])
    return found[-1] if found else None


@contextlib.contextmanager
def leading(
    layout: RunLayout, attempt: int, lead: Lead | None, *, beat: Callable[[], None] = lambda: None
) -> Iterator[Lead | None]:
    """Lead the run while it is supervised here. lead: one that is won already. beat: touches the supervisor's lock.

    Where another host turns out to lead it, what runs on this host is ended, and Deposed raised.
    """
    lead = lead or lead_of(layout, attempt, connect_all)
    if lead is None:
        yield None
        return
    try:
        if not lead.term:
            win(lead, beat=beat, order=lambda: read_order(layout, attempt=RunState.load(layout).attempt))
        yield lead
        _say_over(lead)
    except Deposed as error:
        give_up(lead, error)
        raise
    except Superseded:
        raise
    except GanglineError:
        _say_over(lead)
        raise
    finally:
        lead.close()


def _say_over(lead: Lead) -> None:
    """Tell the others that the run has ended, if it has: where only this supervisor does, they may take it over."""
    if lead.term and RunState.load(lead.layout).phase not in GOES_ON:
        lead.end()


def give_up(lead: Lead, error: Deposed) -> None:
    """End what the attempt has left on this host, and write down that the run is led elsewhere; nothing where another
    supervisor of this host leads it, or it has ended.
    """
    layout = lead.layout
    lead.close()
    state = RunState.load(layout)
    if lead.is_replaced_here or state.phase not in ("preparing", *GOES_ON):
        return
    _end_ranks(lead, {lead.own}, now=True)
    mark = layout.lead / lead.own / f"deposed-{lead.last_term}.json"
    write_record(mark, {"what": error.what})
    append_event(layout.events, "deposed", source="supervisor", attempt=state.attempt, what=error.what)
    dataclasses.replace(state, phase="failed", supervisor=None, error=error.to_json()).save(layout)


def _end_ranks(lead: Lead, hosts: Collection[str], *, now: bool) -> None:
    """End what the attempt has left on some hosts, as far as they answer: without a majority that is never wrong."""
    state = RunState.load(lead.layout)
    request = load_if_there(lead.layout.request(state.attempt), LaunchRequest)
    part = request.on(hosts) if request is not None else None
    if part is None or not part.hosts:
        return
    gang = backend(part.backend)
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline:
        gang.stop(part, lead.transports, now=now, epoch=state.epoch)
        if not any(status.phase == "running" or status.rests for status in gang.poll(part, lead.transports)):
            break
        time.sleep(0.3)
