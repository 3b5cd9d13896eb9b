"""All-reduce over all ranks of a cluster, as a training step does it: torchrun on every host, static rendezvous."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gangline.errors import GanglineError
from gangline.inventory.facts import Inventory
from gangline.inventory.measured import Collective
from gangline.inventory.pairs import Skipped
from gangline.launch.backend import Networks
from gangline.launch.render import rank_env
from gangline.runs.cluster import Cluster, Host
from gangline.transport.transport import AGENT, Transport
from gangline.units import format_bytes

START_S = 90
"""How long hosts may take to import torch and to meet."""
MARGIN_S = 20
END_S = 5.0
SIZES = (4 << 10, 1 << 20, 4 << 20, 25 << 20, 100 << 20)
"""Bytes. The last is tried only where time and free memory allow."""
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """What was measured, and what was not."""

    figures: tuple[Collective, ...] = ()
    skipped: tuple[Skipped, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOrder:
    """What every rank is told."""

    backend: str
    port: int
    seconds: float

    @property
    def deadline_s(self) -> float:
        """When a rank ends itself, wherever it hangs."""
        return START_S + self.seconds + MARGIN_S / 2

    def words(self) -> str:
        """For the worker's command line."""
        limits = {"seconds": self.seconds, "start_s": START_S, "deadline_s": self.deadline_s}
        return json.dumps({"backend": self.backend, "sizes": SIZES, **limits})


class _Over(Exception):
    """Ends a command: a transport ends it, and what it started, when its `on_line` raises."""


@dataclass(slots=True, kw_only=True)
class CommandGang:
    """Commands on all hosts that end together: one that fails or is interrupted keeps nobody waiting.

    Of what they print, lines that are records are kept.
    """

    transports: Mapping[str, Transport]
    timeout_s: float
    over: threading.Event = field(default_factory=threading.Event)
    ended: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    lines: dict[str, list[str]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    """Why hosts failed, the first one first."""

    def run(self, commands: Mapping[str, tuple[tuple[str, ...], dict[str, str]]]) -> None:
        """Run (argv, variables) of each host to the end of all."""
        left = len(commands)
        for host, command in commands.items():
            threading.Thread(target=self._one, args=(host, *command), daemon=True).start()
        try:
            while left:
                # not Thread.join: interrupted once, it takes the thread for ended (Python < 3.13)
                self.ended.acquire()
                left -= 1
        finally:
            self.over.set()
            ends = time.monotonic() + END_S
            for _ in range(left):
                self.ended.acquire(timeout=max(0.0, ends - time.monotonic()))

    def _one(self, host: str, argv: tuple[str, ...], env: dict[str, str]) -> None:
        lines = self.lines.setdefault(host, [])

        def hear(line: str) -> None:
            if self.over.is_set():
                raise _Over
            if line.startswith('{"kind": '):
                lines.append(line)

        request = json.dumps({"argv": argv, "seconds": self.timeout_s}).encode()
        try:
            result = self.transports[host].run(
                (AGENT, "attached"), stdin=request, env=env, timeout_s=self.timeout_s + MARGIN_S / 2, on_line=hear
            )
            if result.returncode:
                self.failures[host] = _last_error(result.stderr) or f"ended with code {result.returncode}"
                self.over.set()
        except _Over:
            pass
        except GanglineError as error:
            self.failures[host] = error.what
            self.over.set()
        except OSError as error:  # TimeoutError is one
            self.failures[host] = str(error)
            self.over.set()
        finally:
            self.ended.release()


def measure_collectives(
    cluster: Cluster,
    transports: Mapping[str, Transport],
    order: BenchOrder,
    *,
    networks: Networks,
    num_cpus: int | None = None,
) -> Collectives:
    """Measure within the order's seconds, after the start.

    Nothing runs on when it returns: ranks end at a deadline of their own, torchrun with the connection, and each
    transport ends what it started.
    """
    gang = CommandGang(transports=transports, timeout_s=order.deadline_s + MARGIN_S / 4)
    gang.run(
        {
            host.name: (
                argv(cluster, host, order),
                rank_env(cluster, host, network=networks.get(host.name), num_cpus=num_cpus),
            )
            for host in cluster.hosts
        }
    )
    records = [json.loads(line) for line in gang.lines.get(cluster.head.name, [])]
    figures = tuple(_figure(record, order.backend) for record in records if record["kind"] == "collective")
    skipped = [
        Skipped(what=f"all_reduce of {format_bytes(record['num_bytes'])}", why=record["why"])
        for record in records
        if record["kind"] == "skipped"
    ]
    why = "; ".join(f"{host}: {words}" for host, words in list(gang.failures.items())[:1])
    if why or not figures:
        skipped.append(Skipped(what="collectives", why=why or "no rank said anything"))
    return Collectives(figures=figures, skipped=tuple(skipped))


def argv(cluster: Cluster, host: Host, order: BenchOrder) -> tuple[str, ...]:
    """The command of one host."""
    return worker_argv(cluster, host, "bench-collective", order.words(), port=order.port)


def worker_argv(cluster: Cluster, host: Host, *words: str, port: int) -> tuple[str, ...]:
    """The command of one host that starts `python -m gangline.worker WORDS` on every rank."""
    one_machine = cluster.is_one_machine
    options = {
        "--nnodes": len(cluster.hosts),
        "--nproc-per-node": host.slots,
        "--node-rank": cluster.hosts.index(host),
        "--rdzv-backend": "static",
        "--rdzv-id": f"bench-{port}",
        "--rdzv-conf": f"timeout={START_S}",
        "--master-addr": LOOPBACK if one_machine else cluster.head.address,
        "--master-port": port,
        "--local-addr": LOOPBACK if one_machine else host.address,
        "--max-restarts": 0,
        "--monitor-interval": 0.1,
        # Else torchrun leaves a folder in /tmp.
        "--log-dir": os.devnull,
    }
    flags = tuple(str(word) for option in options.items() for word in option)
    return host.argv("-m", "torch.distributed.run", *flags, "-m", "gangline.worker", *words)


def backend_for(cluster: Cluster, inventory: Inventory) -> str:
    """NCCL where every rank has a GPU of its own, else gloo."""
    known = [(host, inventory.of(host.name)) for host in cluster.hosts]
    return "nccl" if all(facts is not None and len(facts.gpus) >= host.slots for host, facts in known) else "gloo"


def _figure(record: Mapping[str, Any], backend: str) -> Collective:
    return Collective(
        operation=str(record["operation"]),
        num_bytes=int(record["num_bytes"]),
        seconds=float(record["seconds"]),
        iterations=int(record["iterations"]),
        world_size=int(record["world_size"]),
        backend=backend,
    )


def _last_error(stderr: str) -> str:
    """The line that says most: the last one with an error that is not torchrun's own about its child."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    telling = [line for line in lines if "rror" in line and not _is_about_child(line)]
    return (telling or lines or [""])[-1][:400]


def _is_about_child(line: str) -> bool:
    return any(word in line for word in ("ChildFailedError", "error_file", "Traceback", "traceback", "[E"))
