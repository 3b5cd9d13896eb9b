"""Try the network between every two hosts: `listen` on all of them, then `reach` from each."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import errno
import json
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from gangline.errors import GanglineError
from gangline.inventory.facts import Inventory
from gangline.inventory.pairs import (
    CLAIMS_FOLDER,
    HOLD_S,
    RENDEZVOUS_PORTS,
    Clock,
    ConnectOutcome,
    ListenerFacts,
    Outside,
    Pair,
    Pairs,
    PortTry,
    Skipped,
    Tier,
    both_ways,
    far,
    once,
    rounds,
    sample,
    with_quicker,
)
from gangline.runs.cluster import Cluster, Host
from gangline.runs.decode import build, known_part
from gangline.runs.files import json_object
from gangline.transport.fanout import in_parallel
from gangline.transport.transport import AGENT, Transport

# Let one host try the ports of others: `reach` of the agent, and its answer as data.


CONNECT_S = 2.5
"""A SYN that was lost is sent again after 1 s, so this is two tries already."""
TRIES = 2
BASE_S = 25.0
PER_TARGET_S = 2.0


class CannotAsk(Exception):
    """The host could not say what it reaches; the text says why."""


def ask(
    transport: Transport, token: str, targets: Sequence[dict[str, Any]], *, measure: Sequence[str], seconds: float = 1.0
) -> list[Pair]:
    """What the host of `transport` found out about each target; raises CannotAsk."""
    request = {
        "token": token,
        "targets": list(targets),
        "tries": TRIES,
        "timeout_s": CONNECT_S,
        "measure": list(measure),
        "seconds": seconds,
    }
    timeout_s = BASE_S + len(targets) * (PER_TARGET_S + seconds)
    try:
        result = transport.run((AGENT, "reach"), stdin=json.dumps(request).encode(), timeout_s=timeout_s)
    except GanglineError as error:
        raise CannotAsk(error.what) from error
    except OSError as error:  # TimeoutError is one
        raise CannotAsk(str(error)) from error
    if result.returncode != 0:
        words = result.stderr.strip().splitlines()
        raise CannotAsk(words[-1] if words else f"the probe ended with code {result.returncode}")
    try:
        found = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
        return [build(Pair, known_part(Pair, {**each, "source": transport.host})) for each in found]
    except ValueError as error:  # DecodeError is one
        raise CannotAsk(f"its answer cannot be read: {error}") from error


# Open ports on every host for a bounded time, so that the others can try them.


NUM_EPHEMERAL = 2
START_S = 20.0
"""How long a host may take to open its ports."""
STRAGGLER_S = 6.0
"""How long the others wait for one more, once the first has its ports open."""
MARGIN_S = 15.0
END_S = 2.0
SSH_DELAY_S = 0.25
"""What a line may take from a host to here: how much a clock seen through ssh may be off."""


class _Enough(Exception):
    """Ends a listener: a transport ends the command when its `on_line` raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedPorts:
    """What a host said that it opened."""

    listener: ListenerFacts
    target: dict[str, Any]
    """The host as `reach` is told of it."""

    @staticmethod
    def of(host: Host, said: dict[str, Any]) -> OpenedPorts:
        """The listener's first line; raises KeyError, TypeError or ValueError for anything else."""
        ports = said["ports"]
        data = str(said["data"] or host.address)
        open_ports = [port for port in ports if port.get("port")]
        meeting = [int(port["port"]) for port in open_ports if _is_range(port) and port["address"] == host.address]
        others = [int(port["port"]) for port in open_ports if not _is_range(port) and port["address"] == data]
        low, high = said["ephemeral"]
        listener = ListenerFacts(
            host=host.name,
            address=host.address,
            has_address=bool(said["own"]),
            data_address=data if data != host.address else None,
            rendezvous_port=meeting[0] if meeting else None,
            problems=tuple(
                f"{port['address']}: {port['error']} ({port['code']})" for port in ports if not port.get("port")
            ),
            macs=tuple(str(mac) for mac in said["macs"]),
            ephemeral=(int(low), int(high)),
        )
        places = [{"kind": "rendezvous", "address": host.address, "port": port} for port in meeting]
        places += [{"kind": "ephemeral", "address": data, "port": port} for port in others]
        udp = dict(said["udp"]).get(data)
        return OpenedPorts(
            listener=listener, target={"host": host.name, "instance": said["instance"], "ports": places, "udp": udp}
        )


def _is_range(port: dict[str, Any]) -> bool:
    """Whether the first free port of a range was asked for, as for the rendezvous."""
    return isinstance(port["asked"], list)


class Listener:
    """The listener of one host, in a thread of its own."""

    def __init__(self, host: Host, transport: Transport, request: dict[str, Any]) -> None:
        self.host = host
        self.problem: str | None = None
        self.opened: OpenedPorts | None = None
        """What it has opened; None until it has said so."""
        self.behind_us_s = float("inf")
        """How much later a moment was here than the host's clock said, at the least: clock and way together."""
        self.settled = threading.Event()
        self._over = False
        self._transport = transport
        self._request = request
        self._thread = threading.Thread(target=self._listen, name=f"ports of {host.name}", daemon=True)
        self._thread.start()

    @property
    def is_up(self) -> bool:
        """Whether its ports are open."""
        return self.opened is not None and self._thread.is_alive()

    def end(self) -> None:
        """Let it end; it notices with its next word."""
        self._over = True

    def join(self, deadline: float) -> None:
        """Wait until it has ended, or until `deadline` (monotonic): it ends by itself in any case."""
        self._thread.join(max(0.0, deadline - time.monotonic()))

    def _listen(self) -> None:
        data = json.dumps({**self._request, "host": self.host.name}).encode()
        try:
            result = self._transport.run(
                (AGENT, "listen"), stdin=data, timeout_s=self._request["seconds"] + MARGIN_S, on_line=self._hear
            )
            words = result.stderr.strip().splitlines()
            self.problem = words[-1] if words else f"the listener ended with code {result.returncode}"
        except _Enough:
            pass
        except (GanglineError, OSError) as error:  # TimeoutError is an OSError
            self.problem = error.what if isinstance(error, GanglineError) else str(error)
        finally:
            self.settled.set()

    def _hear(self, line: str) -> None:
        if self._over:
            raise _Enough
        now = time.time()
        said = json_object(line)
        if said is None:  # noise of a login
            return
        if "instance" in said:
            try:
                self.opened = OpenedPorts.of(self.host, said)
            except (KeyError, TypeError, ValueError):
                raise GanglineError("its listener says what cannot be understood") from None
            self.settled.set()
        if isinstance(said.get("beat"), (int, float)):
            self.behind_us_s = min(self.behind_us_s, now - said["beat"])


class Listeners:
    """The listeners of a cluster."""

    def __init__(self, token: str, listeners: Sequence[Listener]) -> None:
        self.token = token
        self._listeners = {listener.host.name: listener for listener in listeners}

    @property
    def up(self) -> dict[str, OpenedPorts]:
        """What is open now, by host."""
        return {name: one.opened for name, one in self._listeners.items() if one.opened is not None and one.is_up}

    @property
    def problems(self) -> dict[str, str]:
        """Host -> why its ports are not open."""
        return {
            name: listener.problem or f"did not open its ports within {START_S:.0f} s"
            for name, listener in self._listeners.items()
            if not listener.is_up
        }

    def await_all(self) -> None:
        """Wait until every host has its ports open or cannot; one that takes much longer than the first is left out."""
        deadline = time.monotonic() + START_S
        waiting = list(self._listeners.values())
        while waiting and time.monotonic() < deadline:
            waiting[0].settled.wait(0.05)
            waiting = [listener for listener in waiting if not listener.settled.is_set()]
            if any(listener.is_up for listener in self._listeners.values()):
                deadline = min(deadline, time.monotonic() + STRAGGLER_S)

    def clocks_by_ssh(self, head: str) -> dict[str, Clock]:
        """The clocks as seen through ssh: enough to find one that is not set."""
        seen = {name: one.behind_us_s for name, one in self._listeners.items() if one.behind_us_s != float("inf")}
        if head not in seen:
            return {}
        return {
            name: Clock(host=name, ahead_s=seen[head] - behind, uncertainty_s=SSH_DELAY_S, method="ssh")
            for name, behind in seen.items()
        }


@contextlib.contextmanager
def listening(
    cluster: Cluster,
    hosts: Sequence[Host],
    transports: Mapping[str, Transport],
    *,
    seconds: float,
    port: int | None = None,
) -> Iterator[Listeners]:
    """Ports open on `hosts` until the block ends, and never longer than `seconds`.

    port: the one where the ranks will meet; None: the first free one of the cluster's range.
    """
    low, high = (port, port) if port is not None else cluster.ports or RENDEZVOUS_PORTS
    request: dict[str, Any] = {
        "token": secrets.token_hex(16),
        "ports": [[low, high], *[0] * NUM_EPHEMERAL],
        "udp": True,
        "any": True,
        "seconds": seconds,
        "hold_s": 0 if port is not None else HOLD_S,
    }
    listeners = Listeners(
        request["token"], [Listener(host, transports[host.name], _asked(host, request)) for host in hosts]
    )
    try:
        listeners.await_all()
        yield listeners
    finally:
        ends = time.monotonic() + END_S
        for listener in listeners._listeners.values():
            listener.end()
        for listener in listeners._listeners.values():
            listener.join(ends)


def _asked(host: Host, request: dict[str, Any]) -> dict[str, Any]:
    claims = str(PurePath(host.workdir, CLAIMS_FOLDER))
    return {**request, "addresses": [host.address], "interface": host.interface, "claims": claims}


# Who outside the cluster reaches the ports of its hosts: tried from this computer, if it is no member. No ssh.


OUTSIDE_CONNECT_S = 2.0
ANSWER_BYTES = 4096
OUTCOMES: Mapping[int, ConnectOutcome] = {
    errno.ECONNREFUSED: "refused",
    errno.EHOSTUNREACH: "no route",
    errno.ENETUNREACH: "no route",
    errno.ETIMEDOUT: "timed out",
}


def is_member(cluster: Cluster) -> bool:
    """Whether this computer is a host of the cluster."""
    return any(host.transport == "local" or own_address(host.address) == host.address for host in cluster.hosts)


def own_address(towards: str) -> str | None:
    """The address with which this computer goes there; None where there is no way. Sends nothing."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def probe_outsider(
    token: str, targets: Sequence[Mapping[str, Any]], *, timeout_s: float = OUTSIDE_CONNECT_S
) -> list[Outside]:
    """Try every port of every target from this process; `targets` as `reach` is told of them."""
    jobs = [(target, port) for target in targets for port in target["ports"]]
    tries = in_parallel(lambda job: _try_port(token, *job, timeout_s), jobs)
    by_host: dict[str, list[PortTry]] = {str(target["host"]): [] for target in targets}
    for (target, _), attempt in zip(jobs, tries, strict=True):
        by_host[str(target["host"])].append(attempt)
    return [Outside(host=host, tries=tuple(attempts)) for host, attempts in by_host.items()]


def _try_port(token: str, target: Mapping[str, Any], port: Mapping[str, Any], timeout_s: float) -> PortTry:
    begun = time.monotonic()
    words: dict[str, Any] = {}
    outcome: ConnectOutcome = "stranger"
    detail = None
    try:
        words = _who(token, str(port["address"]), int(port["port"]), timeout_s)
    except TimeoutError:
        outcome = "timed out"
    except OSError as error:
        outcome, detail = OUTCOMES.get(error.errno or 0, "error"), error.strerror or str(error)
    if words:
        outcome = "ok" if words.get("instance") == target["instance"] else "other"
    return PortTry(
        kind=port["kind"],
        address=str(port["address"]),
        port=int(port["port"]),
        outcome=outcome,
        seconds=time.monotonic() - begun,
        answered_by=str(words["host"]) if "host" in words else None,
        detail=detail,
    )


def _who(token: str, address: str, port: int, timeout_s: float) -> dict[str, Any]:
    """What the listener there says of itself; {} where it is none of ours."""
    answer = b""
    # It takes the connection and breaks it: none of ours.
    with socket.create_connection((address, port), timeout=timeout_s) as listener, contextlib.suppress(ConnectionError):
        # As agent/netprobe/path.py has it: who does not begin so is not answered.
        listener.sendall(f"gangline {token}\n".encode() + json.dumps({"op": "time"}).encode() + b"\n")
        while not answer.endswith(b"\n") and len(answer) < ANSWER_BYTES:
            piece = listener.recv(ANSWER_BYTES)
            if not piece:
                break
            answer += piece
    return json_object(answer) or {}


OPEN_S: Mapping[Tier, float] = {"quick": 45.0, "full": 90.0, "burn": 170.0}
"""How long ports may stay open: much longer than it takes."""
RATE_S: Mapping[Tier, float] = {"full": 1.0, "burn": 4.0}
"""How long the throughput of one ordered pair is measured."""
RATE_BUDGET_S: Mapping[Tier, float] = {"full": 30.0, "burn": 120.0}
"""How long that may take for all of them; burn: how long it takes."""
THOROUGH = 8
"""With how many others a host tries loss and packet sizes."""
SUSPECTS = 3
LOOKS = 3
"""How often a pair that looks slow is measured: the fastest counts, for nothing makes a link look faster than it is."""
FAR_SUSPECTS = 16
"""How many pairs that seem far have their round trips tried again."""
SUSPECT_S = 0.5
SLOW = 1 / 3
FAST_MBPS = 1000.0
"""A pair whose first MiB is as fast as this is not suspected of a slow link."""
THREADS = 64

Ordered = tuple[str, str]
"""Source and target."""


def probe_pairs(
    cluster: Cluster,
    inventory: Inventory,
    transports: Mapping[str, Transport],
    *,
    tier: Tier = "quick",
    rendezvous_port: int | None = None,
) -> Pairs:
    """Try every ordered pair of hosts. What cannot be tried is listed with the reason, never raised.

    rendezvous_port: where the ranks will meet; None: the first free port of the cluster's range, on each host.
    """
    hosts, skipped = askable(cluster, inventory)
    found = Pairs(measured=now(), tier=tier, skipped=tuple(skipped))
    if len(hosts) < 2:
        return found
    with listening(cluster, hosts, transports, seconds=OPEN_S[tier], port=rendezvous_port) as listeners:
        with ThreadPoolExecutor(max_workers=1) as pool:
            outside = pool.submit(_outside, cluster, listeners)
            probe = Probe(listeners=listeners, transports=transports)
            pairs = probe.with_rates(probe.looked_again(probe.every_pair()), tier=tier)
        tried, seen_from, untried = outside.result()
        dead = [Skipped(what=name, why=why) for name, why in listeners.problems.items()]
        return dataclasses.replace(
            found,
            listeners=tuple(opened.listener for opened in listeners.up.values()),
            pairs=tuple(pairs),
            clocks=tuple(clocks(cluster, pairs, listeners.clocks_by_ssh(cluster.head.name))),
            outside=tuple(tried),
            outside_from=seen_from,
            skipped=(*skipped, *dead, *probe.skipped, *untried),
        )


def askable(cluster: Cluster, inventory: Inventory) -> tuple[list[Host], list[Skipped]]:
    """The hosts that can try the network, each machine once, and why the others cannot."""
    failed = {failure.host: failure.why for failure in inventory.failures}
    hosts: dict[str, Host] = {}
    skipped: list[Skipped] = []
    for host in cluster.hosts:
        if host.name in failed:
            skipped.append(Skipped(what=host.name, why=failed[host.name].partition("\n")[0]))
        elif host.address in hosts:
            why = f"the same address as {hosts[host.address].name}: {host.address}"
            skipped.append(Skipped(what=host.name, why=why))
        else:
            hosts[host.address] = host
    if len(hosts) < 2:
        skipped.append(Skipped(what="pairs of hosts", why="there is one machine, or only one that can be asked"))
    return list(hosts.values()), skipped


@dataclasses.dataclass(slots=True, kw_only=True)
class Probe:
    """Asks hosts about each other while their ports are open."""

    listeners: Listeners
    transports: Mapping[str, Transport]
    measure: tuple[str, ...] = ("time", "packets", "burst")
    """Of every pair; see `reach` of the agent."""
    skipped: list[Skipped] = dataclasses.field(default_factory=list)

    def every_pair(self) -> list[Pair]:
        """Every host asked about all others, all hosts at the same time."""
        names = list(self.listeners.up)
        jobs = [(name, [*names[index + 1 :], *names[:index]]) for index, name in enumerate(names)]
        if len(names) > THOROUGH + 1 and "packets" in self.measure:
            why = f"each host tries them with {THOROUGH} of the {len(names) - 1} others"
            self.skipped.append(Skipped(what="packet loss and sizes of every pair", why=why))
        pairs = [pair for pairs in in_parallel(self._all_of_one, jobs, at_once=THREADS) for pair in pairs]
        # a host whose ports were closed meanwhile is not to be blamed for it
        return [pair for pair in pairs if pair.target in self.listeners.up]

    def _all_of_one(self, job: tuple[str, list[str]]) -> list[Pair]:
        source, names = job
        up = self.listeners.up
        targets = [{**up[name].target, "brief": index >= THOROUGH} for index, name in enumerate(names) if name in up]
        return self._ask(source, targets, self.measure)

    def _ask(
        self, source: str, targets: Sequence[dict[str, Any]], measure: Sequence[str], seconds: float = 1.0
    ) -> list[Pair]:
        try:
            return ask(self.transports[source], self.listeners.token, targets, measure=measure, seconds=seconds)
        except CannotAsk as error:
            self.skipped.append(Skipped(what=f"what {source} reaches", why=str(error)))
            return []

    def looked_again(self, pairs: list[Pair]) -> list[Pair]:
        """The pairs, with the round trips of those that seem far tried again now that nothing else is measured."""
        found = {(pair.source, pair.target): pair for pair in pairs}
        for _ in range(LOOKS - 1):
            suspects = once(pair for pair in far(list(found.values())) if not pair.is_closed)[:FAR_SUSPECTS]
            if not suspects:
                break
            for again in in_parallel(lambda pair: self._measure(pair, ("time",)), suspects, at_once=THREADS):
                found[again.source, again.target] = with_quicker(found[again.source, again.target], again)
        return list(found.values())

    def with_rates(self, pairs: list[Pair], *, tier: Tier) -> list[Pair]:
        """The pairs, with the throughput of all of them, or in the quick tier of those that look slow."""
        open_pairs = {(pair.source, pair.target): pair for pair in pairs if not pair.is_closed}
        if tier == "quick":
            schedule = [[suspect] for suspect in suspects(list(open_pairs.values()))]
            rates = self.rates(open_pairs, schedule, seconds=SUSPECT_S)
            seconds = SUSPECT_S
        else:
            meetings = rounds(list(self.listeners.up))
            most = int(RATE_BUDGET_S[tier] / RATE_S[tier] / 2)
            if len(meetings) > most:
                why = f"{most} of {len(meetings)} rounds fit into {RATE_BUDGET_S[tier]:.0f} s"
                self.skipped.append(Skipped(what="throughput of every pair", why=why))
            schedule = [half for meeting in sample(meetings, most) for half in both_ways(meeting)]
            rates = self._looks(open_pairs, schedule, tier=tier)
            seconds = RATE_S[tier]
        rates = self._again(rates, seconds=seconds)
        return [rates.get((pair.source, pair.target), pair) for pair in pairs]

    def _looks(
        self, pairs: Mapping[Ordered, Pair], schedule: Sequence[Sequence[Ordered]], *, tier: Tier
    ) -> dict[Ordered, Pair]:
        """Measure all of the schedule once, in the burn tier over and over until its time is up."""
        begun = time.monotonic()
        looks: dict[Ordered, list[Pair]] = {}
        while True:
            round_begun = time.monotonic()
            for ordered, pair in self.rates(pairs, schedule, seconds=RATE_S[tier]).items():
                looks.setdefault(ordered, []).append(pair)
            ended = time.monotonic()
            if tier != "burn" or not looks or (ended - begun) + (ended - round_begun) > RATE_BUDGET_S[tier]:
                return {ordered: median_of(each) for ordered, each in looks.items()}

    def _again(self, rates: dict[Ordered, Pair], *, seconds: float) -> dict[Ordered, Pair]:
        """Measure again what was much slower than the fastest, the slowest first and a few only."""
        found = dict(rates)
        best = max((rate_of(pair) for pair in rates.values()), default=0.0)
        slow = sorted((pair for pair in rates.values() if _is_slow(pair, best)), key=rate_of)[:SUSPECTS]
        for pair in slow:
            ordered = (pair.source, pair.target)
            for _ in range(LOOKS - 1):
                again = self._rate(pair, seconds)
                found[ordered] = max(found[ordered], again, key=rate_of)
                if rate_of(found[ordered]) >= best * SLOW:
                    break
        return found

    def rates(
        self, pairs: Mapping[Ordered, Pair], schedule: Iterable[Sequence[Ordered]], *, seconds: float
    ) -> dict[Ordered, Pair]:
        """Measure throughput; the pairs of one entry of the schedule at the same time. What was measured, added."""
        found: dict[Ordered, Pair] = {}
        for entry in schedule:
            jobs = [pairs[ordered] for ordered in entry if ordered in pairs]
            for pair in in_parallel(lambda pair: self._rate(pair, seconds), jobs, at_once=THREADS):
                if pair.throughput_mbps is not None:
                    found[pair.source, pair.target] = pair
        return found

    def _rate(self, pair: Pair, seconds: float) -> Pair:
        return with_quicker(self._measure(pair, ("time", "throughput"), seconds), pair)

    def _measure(self, pair: Pair, measure: Sequence[str], seconds: float = 1.0) -> Pair:
        """Look at one pair again; itself where that comes to nothing."""
        opened = self.listeners.up.get(pair.target)
        last = [attempt for attempt in pair.tries if attempt.ok][-1]
        if opened is None:
            return pair
        port = {"kind": last.kind, "address": last.address, "port": last.port}
        answers = self._ask(pair.source, [{**opened.target, "ports": [port]}], measure, seconds)
        if not answers:
            return pair
        return dataclasses.replace(answers[0], **{name: getattr(pair, name) for name in _KEPT})


def median_of(looks: Sequence[Pair]) -> Pair:
    """The median of several looks at one pair, which knows of the worst; a link may get slow as it gets warm."""
    middle = sorted(looks, key=rate_of)[len(looks) // 2]
    if len(looks) == 1:
        return middle
    return dataclasses.replace(middle, worst_mbps=min(look.possible_mbps for look in looks))


def _is_slow(pair: Pair, best_mbps: float) -> bool:
    """Whether one look more may help; of several the median is what it is."""
    return pair.worst_mbps is None and rate_of(pair) < best_mbps * SLOW


def rate_of(pair: Pair) -> float:
    """The measured throughput in Mbit/s, 0 where there is none."""
    return pair.throughput_mbps or 0.0


_KEPT = (
    "tries",
    "neighbour",
    "full_segment",
    "own_mtu",
    "largest_packet",
    "told_mtu",
    "packets_sent",
    "packets_answered",
    "burst_mbps",
)
"""What a look at the throughput does not measure again."""


def suspects(pairs: Sequence[Pair]) -> list[Ordered]:
    """Pairs whose first MiB was much slower than the fastest one, slowest first; then the fastest, to compare with."""
    known = sorted((pair.burst_mbps, pair.source, pair.target) for pair in pairs if pair.burst_mbps is not None)
    if not known:
        return []
    limit = min(known[-1][0] * SLOW, FAST_MBPS)
    slow = [(source, target) for mbps, source, target in known if mbps < limit]
    return [*slow[:SUSPECTS], known[-1][1:]] if slow else []


def clocks(cluster: Cluster, pairs: Sequence[Pair], by_ssh: Mapping[str, Clock]) -> list[Clock]:
    """Every host's clock against the head's: from the quicker of the two ways, else as ssh saw it."""
    head = cluster.head.name
    found: dict[str, Clock] = {}
    for pair in pairs:
        if head not in {pair.source, pair.target} or pair.ahead_s is None or pair.latency_min_s is None:
            continue
        name, ahead_s = (pair.target, pair.ahead_s) if pair.source == head else (pair.source, -pair.ahead_s)
        clock = Clock(host=name, ahead_s=ahead_s, uncertainty_s=pair.latency_min_s / 2)
        if name not in found or clock.uncertainty_s < found[name].uncertainty_s:
            found[name] = clock
    known = {**by_ssh, **found}
    return [known[host.name] for host in cluster.hosts if host.name != head and host.name in known]


def now() -> str:
    """The time, in ISO format."""
    return dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds")


def _outside(cluster: Cluster, listeners: Listeners) -> tuple[list[Outside], str | None, list[Skipped]]:
    if is_member(cluster):
        why = "this computer is a host of the cluster; run the check from another one to try it"
        return [], None, [Skipped(what="who outside the cluster reaches the ports", why=why)]
    tried = probe_outsider(listeners.token, [opened.target for opened in listeners.up.values()])
    return tried, next(filter(None, (own_address(host.address) for host in cluster.hosts)), None), []
