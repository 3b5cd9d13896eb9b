"""Open ports on every host for a bounded time, so that the others can try them."""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from gangline.errors import GanglineError
from gangline.inventory.pairs import CLAIMS_FOLDER, HOLD_S, RENDEZVOUS_PORTS, Clock, Ear
from gangline.remote.transport import AGENT, Transport
from gangline.runs.cluster import Cluster, Host

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
class Opened:
    """What a host said that it opened."""

    ear: Ear
    target: dict[str, Any]
    """The host as `reach` is told of it."""

    @staticmethod
    def of(host: Host, said: dict[str, Any]) -> Opened:
        """The listener's first line; raises KeyError, TypeError or ValueError for anything else."""
        doors = [_Door.of(door) for door in said["ports"]]
        data = str(said["data"] or host.address)
        meeting = [door for door in doors if door.is_range and door.address == host.address and door.port]
        others = [door for door in doors if not door.is_range and door.address == data and door.port]
        low, high = said["ephemeral"]
        ear = Ear(
            host=host.name,
            address=host.address,
            has_address=bool(said["own"]),
            data_address=data if data != host.address else None,
            rendezvous_port=meeting[0].port if meeting else None,
            problems=tuple(f"{door.address}: {door.problem}" for door in doors if door.problem),
            macs=tuple(str(mac) for mac in said["macs"]),
            ephemeral=(int(low), int(high)),
        )
        tried = [("rendezvous", door) for door in meeting] + [("ephemeral", door) for door in others]
        places = [{"kind": kind, "address": door.address, "port": door.port} for kind, door in tried]
        udp = dict(said["udp"]).get(data)
        return Opened(ear=ear, target={"host": host.name, "instance": said["instance"], "doors": places, "udp": udp})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Door:
    address: str
    is_range: bool
    port: int | None
    problem: str | None

    @staticmethod
    def of(said: dict[str, Any]) -> _Door:
        port = said.get("port")
        problem = None if port else f"{said['error']} ({said['code']})"
        return _Door(
            address=str(said["address"]),
            is_range=isinstance(said["asked"], list),
            port=int(port) if port else None,
            problem=problem,
        )


class Listener:
    """The listener of one host, in a thread of its own."""

    def __init__(self, host: Host, transport: Transport, request: dict[str, Any]) -> None:
        self.host = host
        self.problem: str | None = None
        self.opened: Opened | None = None
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
        try:
            said = json.loads(line)
        except ValueError:  # noise of a login
            return
        if not isinstance(said, dict):
            return
        if "instance" in said:
            try:
                self.opened = Opened.of(self.host, said)
            except (KeyError, TypeError, ValueError):
                raise GanglineError("its listener says what cannot be understood") from None
            self.settled.set()
        if isinstance(said.get("beat"), (int, float)):
            self.behind_us_s = min(self.behind_us_s, now - said["beat"])


class Ears:
    """The listeners of a cluster."""

    def __init__(self, token: str, listeners: Sequence[Listener]) -> None:
        self.token = token
        self._listeners = {listener.host.name: listener for listener in listeners}

    @property
    def up(self) -> dict[str, Opened]:
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
) -> Iterator[Ears]:
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
    ears = Ears(request["token"], [Listener(host, transports[host.name], _asked(host, request)) for host in hosts])
    try:
        ears.await_all()
        yield ears
    finally:
        ends = time.monotonic() + END_S
        for listener in ears._listeners.values():
            listener.end()
        for listener in ears._listeners.values():
            listener.join(ends)


def _asked(host: Host, request: dict[str, Any]) -> dict[str, Any]:
    claims = str(PurePath(host.workdir, CLAIMS_FOLDER))
    return {**request, "addresses": [host.address], "interface": host.interface, "claims": claims}
