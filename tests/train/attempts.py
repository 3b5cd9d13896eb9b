"""A run on the disk of one computer, and its attempts, rank by rank: no launcher, no host agent."""

import json
import shutil
import socket

from gangline.runs import checkpoints as disk
from gangline.runs.gang import Gang, GangRank
from gangline.runs.layout import RunLayout
from tests.saved import place_commit
from tests.train import cases_broken
from tests.waiting import wait_until

START_S = 60.0


class Run:
    """What all attempts leave. Every host has checkpoints of its own, and what else there is lies in one folder."""

    def __init__(self, zygote, folder, *, steps, every_steps=None, device="cpu"):
        """device: cpu, or cuda for all ranks on the first GPU."""
        self.zygote, self.folder, self.device = zygote, folder, device
        self._layouts = {}
        self.layout = RunLayout(folder, "calm-otter-7")
        zygote.fork(cases_broken.write_run, folder=str(folder), steps=steps, every_steps=every_steps).result()

    def write_gang(self, attempt, hosts, shares, **words):
        """gang.json of an attempt. words: of Gang."""
        ranks = [GangRank(host=host, share=share) for host, share in zip(hosts, shares, strict=True)]
        self.layout.attempt(attempt).mkdir(parents=True)
        for host in hosts:
            if host not in self._layouts:
                self._layouts[host] = self._make_host(host) if self._layouts else self.layout
        gang = Gang(run_id="calm-otter-7", attempt=attempt, ranks=tuple(ranks), **words)
        gang.save(self.layout.gang(attempt))

    def start(self, attempt, hosts, shares, *, only=None, train=None, slowdown=1.0, **words):
        """Ranks of one attempt; `only` some of them. words: for `write_gang`. train: by rank, more words for
        `train`."""
        self.write_gang(attempt, hosts, shares, **words)
        port = free_port()
        return [
            self.zygote.fork(
                cases_broken.train,
                folder=str(self._layouts[hosts[rank]].root),
                attempt=attempt,
                rank=rank,
                world_size=len(hosts),
                port=port,
                slowdown=slowdown,
                device=self.device,
                **(train or {}).get(rank, {}),
            )
            for rank in (range(len(hosts)) if only is None else only)
        ]

    def steps(self, attempt=None):
        """Step -> loss, as metrics.jsonl says; what an attempt did again counts."""
        path = self.layout.metrics
        lines = path.read_text().splitlines() if path.exists() else []
        records = [json.loads(line) for line in lines]
        chosen = [each for each in records if each["kind"] == "step" and attempt in {None, each["attempt"]}]
        return {each["step"]: each["loss"] for each in chosen}

    def wait_for_step(self, step):
        wait_until(lambda: max(self.steps(), default=0) >= step, f"step {step} is done", timeout_s=START_S)

    def error(self, attempt, rank):
        return json.loads((self.layout.attempt(attempt) / f"rank-{rank}.error.json").read_text())

    def log(self, attempt, rank):
        return (self.layout.attempt(attempt) / f"rank-{rank}.log").read_text()

    def saved_steps(self):
        """All steps of which there is anything on any host."""
        return sorted({step for layout in self._layouts.values() for step in disk.saved_steps(layout.checkpoints)})

    def adopt(self):
        """The newest step that is whole anywhere; every host gets it, and its record."""
        surveys = {host: disk.survey(layout.checkpoints) for host, layout in self._layouts.items()}
        adoptable = disk.choose(surveys).adoptable
        step = max(adoptable)
        source = disk.choose(disk.with_record(surveys, step, adoptable[step])).sources[0]
        part = disk.part_folder(self._layouts[source.host].checkpoints, step, source.part)
        for layout in self._layouts.values():
            copy = disk.part_folder(layout.checkpoints, step, source.part)
            if not copy.exists():
                shutil.copytree(part, copy)
            place_commit(layout.checkpoints, adoptable[step])
        return step

    def _make_host(self, host):
        """The folder of another host: links to everything but checkpoints."""
        layout = RunLayout(self.folder.with_name(f"{self.folder.name}-{host}"), "calm-otter-7")
        layout.folder.mkdir(parents=True)
        for own, shared in ((layout.root, self.folder), (layout.folder, self.layout.folder)):
            for entry in shared.iterdir():
                if entry.name not in {layout.folder.parent.name, layout.checkpoints.name}:
                    (own / entry.name).symlink_to(entry)
        return layout


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
