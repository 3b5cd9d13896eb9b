"""All-reduce over all ranks of a cluster, as a training step does it: torchrun on every host, static rendezvous."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from gangline.errors import GanglineError
from gangline.inventory.facts import Inventory
from gangline.inventory.network import Collective
from gangline.launch.backend import Networks
from gangline.launch.env import is_one_machine, rank_env
from gangline.remote.transport import Result, Transport
from gangline.runs.cluster import Cluster, Host

START_S = 90
"""How long hosts may take to import torch and to meet."""
MARGIN_S = 20
SIZES = (4 << 10, 1 << 20, 4 << 20, 25 << 20, 100 << 20)
"""Bytes. The last is tried only where time and free memory allow."""
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """What was measured, or why nothing was."""

    figures: tuple[Collective, ...] = ()
    why_not: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What every rank is told."""

    backend: str
    port: int
    seconds: float

    def words(self) -> str:
        """For the worker's command line."""
        limits = {"seconds": self.seconds, "start_s": START_S, "deadline_s": START_S + self.seconds + MARGIN_S / 2}
        return json.dumps({"backend": self.backend, "sizes": SIZES, **limits})


def measure_collectives(
    cluster: Cluster,
    transports: Mapping[str, Transport],
    order: Order,
    *,
    networks: Networks,
    num_cpus: int | None = None,
) -> Collectives:
    """Measure within the order's seconds, after the start. Nothing runs on when it returns: ranks end at a deadline of
    their own, and each transport ends what it started.
    """

    def run(host: Host) -> Result | str:
        env = rank_env(cluster, host, network=networks.get(host.name), num_cpus=num_cpus or os.cpu_count())
        try:
            return transports[host.name].run(
                argv(cluster, host, order), env=env, timeout_s=START_S + order.seconds + MARGIN_S
            )
        except GanglineError as error:
            return error.what
        except OSError as error:  # TimeoutError is one
            return str(error)

    with ThreadPoolExecutor(max_workers=len(cluster.hosts)) as pool:
        results = list(pool.map(run, cluster.hosts))
    figures = tuple(_figures(results[0].stdout, order.backend)) if isinstance(results[0], Result) else ()
    return Collectives(figures=figures, why_not=None if figures else _why(cluster, results))


def argv(cluster: Cluster, host: Host, order: Order) -> tuple[str, ...]:
    """The command of one host."""
    one_machine = is_one_machine(cluster)
    options = {
        "--nnodes": len(cluster.hosts),
        "--nproc-per-node": host.slots,
        "--node-rank": cluster.hosts.index(host),
        "--rdzv-backend": "static",
        "--rdzv-id": f"bench-{order.port}",
        "--rdzv-conf": f"timeout={START_S}",
        "--master-addr": LOOPBACK if one_machine else cluster.head.address,
        "--master-port": order.port,
        "--local-addr": LOOPBACK if one_machine else host.address,
        "--max-restarts": 0,
        "--monitor-interval": 0.1,
        # Else torchrun leaves a folder in /tmp.
        "--log-dir": os.devnull,
    }
    words = tuple(str(word) for option in options.items() for word in option)
    return host.argv("-m", "torch.distributed.run", *words, "-m", "gangline.worker", "bench-collective", order.words())


def backend_for(cluster: Cluster, inventory: Inventory) -> str:
    """NCCL where every rank has a GPU of its own, else gloo."""
    known = [(host, inventory.of(host.name)) for host in cluster.hosts]
    return "nccl" if all(facts is not None and len(facts.gpus) >= host.slots for host, facts in known) else "gloo"


def _figures(stdout: str, backend: str) -> list[Collective]:
    found = []
    for line in stdout.splitlines():
        if not line.startswith('{"kind": "collective"'):
            continue
        record = json.loads(line)
        found.append(
            Collective(
                operation=record["operation"],
                num_bytes=record["num_bytes"],
                seconds=record["seconds"],
                iterations=record["iterations"],
                world_size=record["world_size"],
                backend=backend,
            )
        )
    return found


def _why(cluster: Cluster, results: Sequence[Result | str]) -> str:
    """The words of the first host that has any; the others only wait for it."""
    said = {host.name: _words(result) for host, result in zip(cluster.hosts, results, strict=True)}
    telling = {name: words for name, words in said.items() if words and not _is_echo(words)}
    name, words = next(iter((telling or said).items()))
    return f"{name}: {words or 'it ended without a figure'}"


def _words(result: Result | str) -> str:
    if isinstance(result, str):
        return result
    lines = [line.strip() for line in result.stderr.splitlines() if "Error" in line or "error" in line]
    return (lines or result.stderr.strip().splitlines() or [""])[-1][:400]


def _is_echo(words: str) -> bool:
    return any(
        text in words for text in ("ChildFailedError", "Connection reset", "Connection closed by peer", "did not end")
    )
