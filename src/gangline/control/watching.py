"""What `gangline top` looks at, again and again: a run with its hosts, or the hosts of a cluster. Changes nothing.

Every look asks all hosts at the same time. A host that does not answer keeps what it said last; one that takes too
long is asked again only once that question has ended.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from gangline.control.supervision import RunHandle, request_here
from gangline.errors import GanglineError, HostKeyRefused, HostUnreachable
from gangline.inventory.facts import HostFacts, Inventory
from gangline.inventory.gather import gather
from gangline.launch.backend import HostRequest, LaunchRequest
from gangline.launch.poll import HostPoller
from gangline.provision.trees import host_layout
from gangline.report.dashboard import WatchedHost, WatchedRun, WatchedState
from gangline.report.follow import Update, follow
from gangline.report.host_samples import HostSamples, SampleTail
from gangline.report.tail import Tail, log_files
from gangline.runs.cluster import Cluster
from gangline.runs.record_versions import load_if_there
from gangline.supervise.hang import read_stacks
from gangline.transport.ssh_options import NONSENSE, printable
from gangline.transport.transport import AGENT, Transport

AT_ONCE = 32
PATIENCE_S = 4.0
"""How long one look waits for hosts."""
ASK_S = 10.0
MOST_EVENTS = 200
MOST_ROWS = 360
LOG_LINES = 500
CPU_BYTES = 4096
CPUINFO = PurePath("/proc/cpuinfo")
MODELS = ("model name", "Model", "cpu model")
"""The line of /proc/cpuinfo that names the processor, by architecture."""


class HostLooks:
    """Asks hosts at the same time; a question that hangs goes on in the background, and its host counts as silent."""

    def __init__(self, hosts: Mapping[str, WatchedHost]) -> None:
        self.hosts = hosts
        self._pool = ThreadPoolExecutor(max_workers=AT_ONCE, thread_name_prefix="gangline top")
        self._begun: dict[str, tuple[float, Future[None]]] = {}

    def ask(self, question: Callable[[WatchedHost], None]) -> None:
        """Have every host asked that answers no earlier question. question: keeps its answer in the host."""
        for name, host in self.hosts.items():
            if name not in self._begun:
                self._begun[name] = time.monotonic(), self._pool.submit(question, host)
        wait([future for _, future in self._begun.values()], PATIENCE_S)
        for name, (begun, future) in list(self._begun.items()):
            if not future.done():
                self.hosts[name].silent = f"no answer for {time.monotonic() - begun:.0f} s"
                continue
            del self._begun[name]
            self.hosts[name].silent = _trouble(future)

    def close(self) -> None:
        """Wait for nobody."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _trouble(future: Future[None]) -> str:
    try:
        future.result()
    except HostKeyRefused:
        raise
    except (GanglineError, OSError, *NONSENSE) as error:
        return printable(str(error).splitlines()[0] if str(error) else type(error).__name__)
    return ""


class RunWatch:
    """Looks at one run."""

    def __init__(self, run: RunHandle) -> None:
        self.run = run
        self._view = run.view()
        self._updates: Iterator[Update] | None = None
        self._poller = HostPoller(patience_s=PATIENCE_S)
        self._request: tuple[int, LaunchRequest] | None = None
        facts, gap = facts_of(run)
        names = [host.name for host in run.cluster.hosts]
        self._looks = HostLooks({name: WatchedHost(name=name, facts=facts.get(name)) for name in names})
        self._tails = {
            host.name: SampleTail(
                host.name, run.transports[host.name], host_layout(host, run.layout.run_id).samples(host.name)
            )
            for host in run.cluster.hosts
        }
        self._gaps = (gap,) if gap else ()
        self._seen = WatchedRun(record=run.record(), findings=_findings(run), gaps=self._gaps)

    def look(self) -> WatchedState:
        """Everything as it is now. Raises HostKeyRefused."""
        self._follow()
        self._looks.ask(self._sample)
        self._seen.statuses = self._statuses()
        return WatchedState(now=time.time(), hosts=tuple(self._looks.hosts.values()), run=self._seen)

    def close(self) -> None:
        """Wait for nobody."""
        self._looks.close()

    def _follow(self) -> None:
        """Take in new figures, events and the state. A run that had ended may have been resumed meanwhile."""
        seen = self._seen
        if self._updates is None:
            if seen.history.steps and (record := self.run.record()).ended:
                seen.record = record
                return
            seen.history, seen.events = type(seen.history)(), []
            self._updates = follow(self._view, wait=lambda _seconds: None)
        for update in self._updates:
            seen.record, seen.board = update.run, update.board
            for line in update.records:
                seen.history.add(line)
            seen.events += [line for line in update.records if line.get("kind") == "event"]
            del seen.events[:-MOST_EVENTS]
            if update.last:
                self._updates = None
            if not update.more:
                return

    def _sample(self, host: WatchedHost) -> None:
        host.take(self._tails[host.name].look(), time.time())

    def _statuses(self) -> Any:
        """What the host agents say; nothing of a run that has ended."""
        state = self._seen.record.state
        if state is None or self._seen.record.phase not in {"running", "stopping", "lost"}:
            return ()
        try:
            request = self._request_of(state.attempt)
        except (OSError, GanglineError, *NONSENSE):
            self._seen.gaps = (*self._gaps, f"request.json of attempt {state.attempt} cannot be read")
            return ()
        return self._poller.at(request, self.run.transports)

    def _request_of(self, attempt: int) -> LaunchRequest:
        if self._request is None or self._request[0] != attempt:
            request = request_here(self.run.layout, attempt)
            present = tuple(part for part in request.hosts if part.host in self.run.transports)
            self._request = attempt, replace(request, hosts=present)
        return self._request[1]

    # What is asked for one rank.

    def log(self, rank: int) -> list[str]:
        """The last lines of a rank's log."""
        record = self._seen.record
        attempt = record.state.attempt if record.state else 1
        files, silent = log_files(
            self.run.layout.run_id, self.run.cluster, self.run.transports, attempt=attempt, console=False
        )
        for file in files:
            if file.rank == rank:
                return Tail(file.transport, file.path).lines()[-LOG_LINES:]
        away = [f"{host}: {error.what}" for host, error in silent.items()]
        return [f"rank {rank} has no log of attempt {attempt}", *away]

    def stack(self, rank: int) -> list[str]:
        """Where a rank stands, asked of its process itself; the run goes on."""
        state = self._seen.record.state
        if state is None or self._seen.record.phase != "running":
            return ["the run does not run, so nobody can be asked"]
        part = self._part_of(self._request_of(state.attempt), rank)
        if part is None:
            return [f"attempt {state.attempt} has no rank {rank}"]
        asked = {"request": {"rank_files": part.rank_files, "ranks": part.ranks, "program": part.program}}
        transport = self.run.transports[part.host]
        try:
            said = json.loads(
                transport.run((AGENT, "stacks"), stdin=json.dumps(asked).encode(), timeout_s=ASK_S).stdout
            )
        except (HostUnreachable, OSError, ValueError) as error:
            return [f"{part.host} did not say: {error}"]
        stack = read_stacks({part.host: said}).get(part.host, {}).get(rank)
        if stack is None:
            return [f"rank {rank} on {part.host} did not answer"]
        head = f"rank {rank} on {part.host}, pid {stack.pid}, state {stack.state}, innermost call first"
        return [head, *(f"  {frame}" for frame in stack.frames)]

    def _part_of(self, request: LaunchRequest, rank: int) -> HostRequest | None:
        return next((part for part in request.hosts if rank in part.ranks), None)


def facts_of(run: RunHandle) -> tuple[dict[str, HostFacts], str]:
    """What is known of its hosts, and why that cannot be read."""
    try:
        inventory = load_if_there(run.layout.inventory, Inventory)
    except (GanglineError, OSError) as error:
        return {}, str(error).splitlines()[0]
    return {each.host: each for each in inventory.hosts} if inventory is not None else {}, ""


def _findings(run: RunHandle) -> tuple[Mapping[str, Any], ...]:
    with suppress(OSError, *NONSENSE):
        rows = json.loads(run.layout.findings.read_text(encoding="utf-8"))["findings"]
        return tuple(row for row in rows if isinstance(row, dict))
    return ()


class ClusterWatch:
    """Looks at the hosts of a cluster, without a run."""

    def __init__(self, cluster: Cluster, transports: Mapping[str, Transport]) -> None:
        self._transports = transports
        self._counters: dict[str, Any] = {}
        inventory = gather(cluster, transports)
        failures = {failure.host: failure.why for failure in inventory.failures}
        self._looks = HostLooks(
            {
                host.name: WatchedHost(
                    name=host.name, facts=inventory.of(host.name), silent=failures.get(host.name, "")
                )
                for host in cluster.hosts
            }
        )
        self._looks.ask(self._name_cpu)

    def look(self) -> WatchedState:
        """Everything as it is now; rates need two looks. Raises HostKeyRefused."""
        self._looks.ask(self._sample)
        return WatchedState(now=time.time(), hosts=tuple(self._looks.hosts.values()))

    def close(self) -> None:
        """Wait for nobody."""
        self._looks.close()

    def _name_cpu(self, host: WatchedHost) -> None:
        text = self._transports[host.name].read(CPUINFO, limit=CPU_BYTES).decode("utf-8", "replace")
        rows = dict(line.partition(":")[::2] for line in text.splitlines() if ":" in line)
        named = {name.strip(): value.strip() for name, value in rows.items()}
        host.cpu = next((printable(named[name])[:60] for name in MODELS if named.get(name)), "")

    def _sample(self, host: WatchedHost) -> None:
        asked = json.dumps({"before": self._counters.get(host.name)}).encode()
        said = json.loads(self._transports[host.name].run((AGENT, "sample"), stdin=asked, timeout_s=ASK_S).stdout)
        figures = {printable(str(name))[:80]: float(value) for name, value in said["figures"].items()}
        self._counters[host.name] = said["counters"]
        samples = host.samples or HostSamples(host=host.name)
        samples.cards = [{**card} for card in said["cards"]]
        # by this computer's clock, as the host has answered just now
        samples.rows = [*samples.rows[-MOST_ROWS:], (time.time(), 1, figures, figures)]
        host.take(samples, time.time())
