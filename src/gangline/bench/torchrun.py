"""The ranks of a measurement: `python -m gangline.worker VERB` under torchrun on every host, with static rendezvous."""

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
from gangline.launch.backend import Networks
from gangline.launch.poll import free_port
from gangline.launch.render import rank_env
from gangline.runs.cluster import Cluster, Host
from gangline.transport.ssh_options import understood
from gangline.transport.transport import AGENT, Transport

START_S = 90
"""How long hosts may take to import torch and to meet."""
MARGIN_S = 20
END_S = 5.0
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchHosts:
    """Hosts on which ranks can be started."""

    cluster: Cluster
    inventory: Inventory
    transports: Mapping[str, Transport]
    networks: Networks

    def run_ranks(self, verb: str, order: Mapping[str, Any], *, work_s: float) -> CommandGang:
        """Run a verb of the worker with this order on every rank, to the end of all.

        work_s: the time after the start. Nothing runs on when it returns: ranks end at a deadline of their own,
        torchrun ends with the connection, and each transport ends its own commands.
        """
        cluster = self.cluster
        port = free_port(cluster, self.transports[cluster.head.name])
        deadline_s = START_S + work_s + MARGIN_S / 2
        order_text = json.dumps({**order, "start_s": START_S, "deadline_s": deadline_s})
        head = self.inventory.of(cluster.head.name)
        num_cpus = None if head is None else head.num_cpus
        gang = CommandGang(transports=self.transports, timeout_s=deadline_s + MARGIN_S / 4)
        gang.run(
            {
                host.name: (
                    rank_argv(cluster, host, verb, order_text, port=port),
                    rank_env(cluster, host, network=self.networks.get(host.name), num_cpus=num_cpus),
                )
                for host in cluster.hosts
            }
        )
        return gang


class _Over(Exception):
    """Ends a command: a transport ends it, and what it started, when its `on_line` raises."""


@dataclass(slots=True, kw_only=True)
class CommandGang:
    """Commands on all hosts that end together: one that fails or is interrupted keeps nobody waiting.

    Of the lines that they print, records are kept.
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

    def records(self) -> list[dict[str, Any]]:
        """The records of all ranks, in the order of the ranks. Raises GanglineError for one that is not JSON."""
        found = []
        for host, lines in self.lines.items():
            with understood(host, "the records of its ranks"):
                found += [json.loads(line) for line in lines]
        return sorted(found, key=lambda record: int(record.get("rank", -1)))

    @property
    def first_failure(self) -> tuple[str, str] | None:
        """The host that failed first, and why."""
        return next(iter(self.failures.items()), None)

    def _one(self, host: str, argv: tuple[str, ...], env: dict[str, str]) -> None:
        lines = self.lines.setdefault(host, [])

        def keep_record(line: str) -> None:
            if self.over.is_set():
                raise _Over
            if line.startswith('{"kind": '):
                lines.append(line)

        request = json.dumps({"argv": argv, "seconds": self.timeout_s}).encode()
        timeout_s = self.timeout_s + MARGIN_S / 2
        try:
            result = self.transports[host].run(
                (AGENT, "attached"), stdin=request, env=env, timeout_s=timeout_s, on_line=keep_record
            )
            if result.returncode:
                self._fail(host, _last_error(result.stderr) or f"ended with code {result.returncode}")
        except _Over:
            pass
        except (GanglineError, OSError) as error:  # TimeoutError is an OSError
            self._fail(host, error.what if isinstance(error, GanglineError) else str(error))
        finally:
            self.ended.release()

    def _fail(self, host: str, why: str) -> None:
        self.failures[host] = why
        self.over.set()


def rank_argv(cluster: Cluster, host: Host, *words: str, port: int) -> tuple[str, ...]:
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


def _last_error(stderr: str) -> str:
    """The line that says most: the last one with an error that is not torchrun's own about its child."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    telling = [line for line in lines if "rror" in line and not _is_about_child(line)]
    return (telling or lines or [""])[-1][:400]


def _is_about_child(line: str) -> bool:
    return any(word in line for word in ("ChildFailedError", "error_file", "Traceback", "traceback", "[E"))
