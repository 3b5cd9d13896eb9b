"""The processor time of `gangline top` over many hosts, by /proc, while it draws on a terminal of its own.

    python -m benchmarks.top_hosts --hosts 50 --seconds 60

Each host is played: a file of samples that grows every 2 s, with 8 simulated cards, read through the same reader as
that of a real host; one rank each and a step per look. textual draws on its terminal for tests, 160 columns wide.
Writing the files is part of the figure, connections to hosts are not. One JSON line: per cent of one core over the time
after the first screen.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from pathlib import Path

from gangline.report.dashboard import WatchedHost, WatchedRun, WatchedState
from gangline.report.dashboard_app import DashboardApp
from gangline.report.host_samples import SampleTail
from gangline.runs.cluster import Host
from gangline.runs.registry import RunRecord
from gangline.runs.state import ProcessId, RunState, iso
from gangline.transport.local import LocalTransport

CARDS = 8
FIRST_ROWS = 360
COLUMNS = [
    *("cpu_percent", "memory_bytes", "memory_percent", "net/eth0/rx_bytes_per_s", "net/eth0/tx_bytes_per_s"),
    *(
        f"gpu/{card}/{name}"
        for card in range(CARDS)
        for name in ("utilization_percent", "memory_bytes", "memory_percent", "power_w", "temperature_c", "clock_mhz")
    ),
]


class PlayedRun:
    """Hosts whose files grow with every look, and the steps of their run."""

    def __init__(self, folder: Path, num_hosts: int) -> None:
        self.here = LocalTransport(Host(name="here", workdir=str(folder), python="python"))
        self.names = [f"h{number:02}" for number in range(num_hosts)]
        self.paths = {name: folder / f"samples-{name}.jsonl" for name in self.names}
        cards = [{"index": card, "name": "played", "simulated": True} for card in range(CARDS)]
        for name, path in self.paths.items():
            head = [{"samples": name, "interval_s": 2.0, "cards": cards}, {"columns": COLUMNS}]
            rows = [self.row(time.time() - 2.0 * age) for age in range(FIRST_ROWS, 0, -1)]
            path.write_text("".join(json.dumps(line) + "\n" for line in [*head, *rows]), encoding="utf-8")
        self.tails = {name: SampleTail(name, self.here, path) for name, path in self.paths.items()}
        self.hosts = [WatchedHost(name=name) for name in self.names]
        state = RunState(name="played", phase="running", supervisor=ProcessId.current())
        self.run = WatchedRun(record=RunRecord(id="calm-otter-7", state=state))
        self.step = 0

    @staticmethod
    def row(now: float) -> list[object]:
        """One sample."""
        return [now, 1, [random.uniform(0, 100) for _ in COLUMNS]]

    def look(self) -> WatchedState:
        """Let every host write a sample and the run a step, and read them."""
        now = time.time()
        for host in self.hosts:
            with self.paths[host.name].open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(self.row(now)) + "\n")
            host.take(self.tails[host.name].look(), now)
        self.step += 1
        ranks = [
            {"rank": rank, "host": name, "micro_batches": 1, "compute_s": 1.0} for rank, name in enumerate(self.names)
        ]
        figures = {"loss": 5.0 / self.step, "tokens_per_s": 1e5, "step_s": 2.0, "ranks": ranks}
        self.run.history.add({"kind": "step", "step": self.step, "steps": 1000, "time": iso(now), **figures})
        return WatchedState(now=now, hosts=self.hosts, run=self.run)


async def measure(played: PlayedRun, seconds: float) -> float:
    """Per cent of one core."""
    app = DashboardApp(played.look(), played.look, actions=None, interval_s=2.0, plain=False)
    async with app.run_test(size=(160, 50)) as pilot:
        await pilot.pause(5.0)
        begun, used = time.monotonic(), used_s()
        await asyncio.sleep(seconds)
        return 100.0 * (used_s() - used) / (time.monotonic() - begun)


def used_s() -> float:
    """Processor time of this process, by /proc."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100.0


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60.0)
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        played = PlayedRun(Path(folder), wanted.hosts)
        percent = asyncio.run(measure(played, wanted.seconds))
    looks = played.step
    print(
        json.dumps(
            {"hosts": wanted.hosts, "cards": CARDS * wanted.hosts, "looks": looks, "core_percent": round(percent, 2)}
        )
    )


if __name__ == "__main__":
    main()
