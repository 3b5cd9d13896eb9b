"""Promise: a run that loses a host for good reads every sample once, in the order in which it would have.

That its losses are those of a run that nothing happened to: tests/train/test_broken.py. Both over real hosts, with the
supervisor that starts the second attempt: benchmarks/lost_host.py.
"""

import json
import signal

from gangline.worker.batch import SampleOrder
from tests.train import cases_lost_host
from tests.train.attempts import START_S, Run, free_port

HOSTS = ("pc1", "pc2", "pc3")
STEPS = 12
ORDER = SampleOrder(num_samples=48, batch=10, micro_batch=1, seed=7)
"""Of cases_broken.write_run: five steps are an epoch, of which the last has 8 samples."""


class Noted(Run):
    """A run whose ranks note what they read."""

    def start(self, attempt, hosts, shares, *, slowdown=1.0, **words):
        self.write_gang(attempt, hosts, shares, **words)
        port = free_port()
        return [
            self.zygote.fork(
                cases_lost_host.train,
                folder=str(self._layouts[host].root),
                notes=str(self.notes(attempt, rank)),
                attempt=attempt,
                rank=rank,
                world_size=len(hosts),
                port=port,
                slowdown=slowdown,
            )
            for rank, host in enumerate(hosts)
        ]

    def notes(self, attempt, rank):
        return self.folder.with_name(f"notes-{attempt}-{rank}")

    def samples(self, attempt, num_ranks):
        """Step -> what all ranks of an attempt read for it, in the order of ranks."""
        found = {}
        for rank in range(num_ranks):
            for record in map(json.loads, self.notes(attempt, rank).read_text().splitlines()):
                found.setdefault(record["step"], []).extend(record["samples"])
        return found


def test_every_sample_is_read_once_though_a_host_is_lost(zygote, tmp_path):
    run = Noted(zygote, tmp_path / "run", steps=STEPS)
    ranks = run.start(1, HOSTS, [4, 3, 3], slowdown=4.0)
    run.wait_for_step(3)
    ranks[2].kill()
    assert [rank.wait(timeout_s=20) for rank in ranks] == [5, 5, -signal.SIGKILL]
    step = run.adopt()
    ranks = run.start(2, HOSTS[:2], [6, 4], resume_step=step)
    assert [rank.wait(timeout_s=START_S) for rank in ranks] == [0, 0], run.log(2, 0)

    first, second = run.samples(1, 3), run.samples(2, 2)
    assert min(second) == step + 1
    read = {number: (first if number <= step else second)[number] for number in range(1, STEPS + 1)}
    for number, samples in read.items():
        assert samples == list(ORDER.samples(number - 1)), f"step {number}"
    for epoch in (0, 1):
        whole = [sample for number in range(1, 6) for sample in read[5 * epoch + number]]
        assert sorted(whole) == list(range(48))
