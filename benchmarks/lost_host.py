"""A host of three is lost for good in the middle of a run: the losses are those of a run that nothing happened to.

    python -m benchmarks.lost_host --out lost_host.jsonl                      # 8 losses; as root, for the lab
    python -m benchmarks.lost_host --out lost_host.jsonl --minutes 10         # go on another time

Three lab hosts with real sshd, real torchrun and gloo, gangline's own trainer in float64 with a small GPT-2 (its norms
are in float64, too; it has dropout, so randomness is compared as well), seven epochs and a bit, batch 12.
At a random step a random host is gone at once, with a reset to its peers or without a word, and stays away; the run
goes on by itself with the other two, to its end.

Beside what gangline writes, every rank notes which samples it reads for which step, and the loss of every step: a hook
that Python imports at its start (`sitecustomize`) wraps `Synchronous.accumulate`, `advance` and `pick`, and writes into
a folder that the lab hosts share with this computer, so that what a lost host read is known, too. A step counts in the
attempt from which the run went on behind it. Compared with the undisturbed run, which is the first line of the file:
the loss of every step, of every attempt (relative difference at most 1e-9), what metrics.jsonl on the new head says,
and the samples of every step; and in each epoch every sample is there once. One JSON line per case; a file that has
lines already is continued. Exit code 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.faults_world import NotBack
from benchmarks.lab_runs import OwnWorld
from benchmarks.plan_time import read
from benchmarks.scaling import commit
from tests.lab.hosts import ROOT
from tests.lab.namespaces import LabFailed

BAR = 1e-9
NUM_LINES, BATCH, STEPS = 700, 12, 206
JOB = f"""\
name: plug
model: ./model
data: {{train: fox.txt, sequence_length: 128, packing: false}}
method: full
precision: fp64
batch: {BATCH}
micro_batch: 2
steps: {STEPS}
seed: 1
optimizer: {{learning_rate: 1e-3}}
schedule: cosine
evaluation: {{at_start: false}}
checkpoint: {{every_steps: 20, every_minutes: none, keep_last: 2}}
failures: {{restarts: 6, wait: 3s}}
report: {{tensorboard: false}}
"""
TEXT = "".join(
    f"fox {number} jumps {number % 7} times over {'the lazy dog and ' * (number % 4)}the snow\n\n"
    for number in range(NUM_LINES)
)
MAKE_MODEL = """
import sys
from pathlib import Path
from tests.train.tiny import write_model, write_tokenizer
write_model(Path(sys.argv[1]), "gpt2"), write_tokenizer(Path(sys.argv[1]))
"""
NOTES = "/notes"
"""A folder that all hosts and this computer share."""
HOOK = f"""\
import importlib.util, json, os, sys

class Hook:
    def find_spec(self, name, path=None, target=None):
        if name != "gangline.worker.loop":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        plain = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (plain(module), listen(module))[0]
        return spec

def listen(module):
    kind, now = module.Synchronous, {{}}
    plain_pick, plain_accumulate, plain_advance = module.pick, kind.accumulate, kind.advance

    def note(**words):
        name = "{NOTES}/{{host}}-{{attempt}}-{{rank}}.jsonl".format(**now)
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(descriptor, (json.dumps({{**now, **words}}) + "\\n").encode())
        os.close(descriptor)

    def accumulate(self, step):
        world = self._session.world
        now.update(host=world.host, attempt=world.gang.attempt, rank=world.rank, step=step + 1)
        return plain_accumulate(self, step)

    def pick(samples, source):
        note(samples=[int(each) for each in samples])
        return plain_pick(samples, source)

    def advance(self):
        report = plain_advance(self)
        note(loss=report.loss_sum)
        return report

    module.pick, kind.accumulate, kind.advance = pick, accumulate, advance

sys.meta_path.insert(0, Hook())
"""
START_S, END_S = 600.0, 900.0
Line = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Notes:
    """What the ranks of a run noted."""

    losses: Mapping[tuple[int, int], float]
    """(attempt, step) -> summed loss, as all ranks agreed on it."""
    samples: Mapping[tuple[int, int], Sequence[int]]
    """(attempt, step) -> what all ranks read for it, sorted."""

    def attempt_of(self, step: int, from_steps: Mapping[int, int]) -> int:
        """The attempt whose step it is in the weights that the run ended with. from_steps: attempt -> its beginning."""
        return max(attempt for attempt, begun in from_steps.items() if begun < step)


class Plug(OwnWorld):
    """A run whose ranks note what they read."""

    def __init__(self, model: Path, *, seed: str) -> None:
        super().__init__(model, keep="desk", seed=seed, job=JOB, shared={NOTES: "notes"})

    def _begin(self) -> None:
        self.lab.hosts[0].write(f"{NOTES}/hook/sitecustomize.py", HOOK)
        self.bring(words=f"env: {{PYTHONPATH: '{NOTES}/hook:{ROOT / 'src'}'}}")
        self.user.desk.write("fox.txt", TEXT)
        self.run_id = self.user.types("train", "job.yaml", "--detach").stdout.strip()
        self.until(lambda seen: seen.step > 1, "it trains", timeout_s=START_S)

    def ends(self) -> Line:
        """state.json once the run has ended; raises NotBack."""
        deadline = time.monotonic() + END_S
        while (state := self.state())["phase"] not in {"finished", "stopped", "failed"}:
            if time.monotonic() > deadline:
                raise NotBack(f"it does not end within {END_S:g} s: {state}")
            time.sleep(0.3)
        if state["phase"] != "finished":
            raise NotBack(f"it has {state['phase']}: {state['error']}")
        return state

    def notes(self) -> Notes:
        """What all ranks noted, those of a lost host, too."""
        folder = self.lab._site.folder
        assert folder is not None
        losses: dict[tuple[int, int], float] = {}
        samples: dict[tuple[int, int], list[int]] = {}
        for record in _records(folder / "notes"):
            key = (int(record["attempt"]), int(record["step"]))
            samples.setdefault(key, []).extend(record.get("samples", ()))
            if "loss" in record:
                assert losses.setdefault(key, record["loss"]) == record["loss"], f"ranks differ about {key}"
        return Notes(losses=losses, samples={key: sorted(found) for key, found in samples.items()})

    def from_steps(self) -> dict[int, int]:
        """Attempt -> the step that it went on from."""
        numbers = range(1, self.state()["attempt"] + 1)
        return {
            number: int(self.record(self.keeper, f"attempts/{number}/gang.json")["resume_step"] or 0)
            for number in numbers
        }

    def written(self) -> dict[tuple[int, int], float]:
        """(attempt, step) -> loss, as metrics.jsonl says on hosts that live."""
        found = {}
        for host in self.living:
            for line in host.run(["cat", f"{self.folder(host)}/metrics.jsonl"]).stdout.splitlines():
                with suppress(ValueError, KeyError):
                    record = json.loads(line)
                    if record["kind"] == "step":
                        found[int(record["attempt"]), int(record["step"])] = float(record["loss"])
        return found


def _records(folder: Path) -> Iterator[Line]:
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            with suppress(ValueError):  # a rank was killed while it wrote
                yield json.loads(line)


def undisturbed(model: Path, seed: int) -> Line:
    """The run that nothing happens to."""
    with Plug(model, seed=f"{seed} undisturbed") as world:
        world.ends()
        notes, written = world.notes(), world.written()
        samples = [notes.samples[1, step] for step in range(1, STEPS + 1)]
        return {
            "number": -1,
            "losses": [notes.losses[1, step] for step in range(1, STEPS + 1)],
            "samples": samples,
            "written": [written[1, step] for step in range(1, STEPS + 1)],
            "wrong": audit(samples, num_samples=num_samples(samples)),
        }


def num_samples(samples: Sequence[Sequence[int]]) -> int:
    """How many there are, by what was read in several epochs."""
    return max(map(max, samples)) + 1


def audit(samples: Sequence[Sequence[int]], *, num_samples: int) -> list[str]:
    """What is wrong with the samples of all steps: in each epoch every one has to be there once."""
    per_epoch = math.ceil(num_samples / BATCH)
    wrong = []
    for epoch in range(math.ceil(STEPS / per_epoch)):
        steps = samples[epoch * per_epoch : (epoch + 1) * per_epoch]
        count = Counter(sample for found in steps for sample in found)
        if twice := sorted(sample for sample, times in count.items() if times > 1):
            wrong.append(f"epoch {epoch}: samples {twice[:10]} were read more than once")
        if len(steps) == per_epoch and (missing := sorted(set(range(num_samples)) - set(count))):
            wrong.append(f"epoch {epoch}: samples {missing[:10]} were not read")
        full = BATCH * (per_epoch - 1)
        sizes = [BATCH] * (per_epoch - 1) + [num_samples - full]
        wrong += [
            f"step {epoch * per_epoch + place + 1} has {len(found)} samples"
            for place, found in enumerate(steps)
            if len(found) != sizes[place]
        ]
    return wrong


def lose(world: Plug, number: int, *, expected: Line) -> Line:
    """Lose a host, and compare the whole run with the undisturbed one."""
    victim, how = world.lab.hosts[number % 3], ("kill", "power_off")[number // 3 % 2]
    at = world.chance.randint(10, STEPS - 60)
    line: Line = {"victim": victim.name, "how": how, "at": at}
    try:
        world.until(lambda seen: seen.step >= at, f"step {at} is done")
        getattr(victim, how)()
        world.ends()
        return line | compare(world, victim.name, expected)
    except (NotBack, AssertionError, LabFailed, OSError, ValueError, LookupError, subprocess.SubprocessError) as error:
        return line | {"wrong": [f"{type(error).__name__}: {error}"]}


def compare(world: Plug, victim: str, expected: Line) -> Line:
    """What is other than in the undisturbed run."""
    notes, begun, written = world.notes(), world.from_steps(), world.written()
    attempts = {step: notes.attempt_of(step, begun) for step in range(1, STEPS + 1)}
    counted = [notes.samples.get((attempt, step), ()) for step, attempt in attempts.items()]
    wrong = audit(counted, num_samples=num_samples(expected["samples"]))
    wrong += [
        f"step {step} was made of {list(found)} instead of {ours}"
        for step, (found, ours) in enumerate(zip(counted, expected["samples"], strict=True), 1)
        if list(found) != ours
    ]
    wrong += [f"step {step} was not noted" for step, attempt in attempts.items() if (attempt, step) not in notes.losses]
    off, off_written = _off(notes.losses, expected["losses"]), _off(written, expected["written"])
    wrong += [
        f"step {step} of attempt {number} is off by {each:.1e}" for (number, step), each in off.items() if each > BAR
    ]
    wrong += [f"metrics.jsonl: {key} is off by {each:.1e}" for key, each in off_written.items() if each > BAR]
    wrong += _not_without(world, victim, begun, written)
    return {
        "from": begun,
        "steps_again": len(notes.losses) - STEPS,
        "steps": len(off),
        "worst": max([*off.values(), *off_written.values()]),
        "wrong": wrong,
    }


def _off(losses: Mapping[tuple[int, int], float], expected: Sequence[float]) -> dict[tuple[int, int], float]:
    """(attempt, step) -> relative difference."""
    return {key: abs(loss / expected[key[1] - 1] - 1) for key, loss in losses.items()}


def _not_without(
    world: Plug, victim: str, begun: Mapping[int, int], written: Mapping[tuple[int, int], float]
) -> list[str]:
    """Whether the last attempt was without the lost host, and wrote down every step."""
    last = max(begun)
    request = world.record(world.keeper, f"attempts/{last}/request.json")
    wrong = []
    if missing := [step for step in range(begun[last] + 1, STEPS + 1) if (last, step) not in written]:
        wrong.append(f"steps {missing[:10]} of attempt {last} are not in metrics.jsonl")
    if len(begun) < 2 or victim in {part["host"] for part in request["hosts"]}:
        wrong.append(f"it did not go on without {victim}: attempts went on from {begun}")
    return wrong


def report(lines: Sequence[Line]) -> int:
    """A table; 1 if anything is wrong."""
    print(
        "\n| lost | at step | went on from | steps compared | worst relative difference of a loss | samples |\n"
        + "|---" * 6
        + "|"
    )
    cases = [line for line in lines if line["number"] >= 0]
    for line in cases:
        begun = list(line.get("from", {}).values())[1:]
        worst = f"{line['worst']:.1e}" if "worst" in line else "-"
        samples = "each once" if not line["wrong"] else "see below"
        print(
            f"| {line['victim']}, {line['how']} | {line['at']} | {begun} | {line.get('steps')} | {worst} | {samples} |"
        )
    bad = [line for line in lines if line["wrong"]]
    for line in bad:
        print(json.dumps({**line, "losses": None, "samples": None, "written": None}))
    print(f"\n{len(cases)} hosts lost, {len(bad)} with something wrong; bar {BAR:g}")
    return 1 if bad else 0


def make_model(folder: Path) -> Path:
    """The model; in a process of its own, for torch is not wanted in this one."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", MAKE_MODEL, str(folder)], check=True, env=env)
    return folder


def main() -> int:
    """Do what the file does not have yet, and sum up."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, continued if it exists")
    arguments = parser.parse_args()
    done = {(line["number"], line["seed"]): line for line in read(arguments.out)}
    deadline = time.monotonic() + arguments.minutes * 60
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model")
        for number in range(-1, arguments.cases):
            if (number, arguments.seed) in done or time.monotonic() > deadline:
                continue
            evidence = arguments.out.with_suffix("") / str(number)
            if number < 0:
                line = undisturbed(model, arguments.seed)
            else:
                with Plug(model, seed=f"{arguments.seed} {number}") as world:
                    line = {"number": number, **lose(world, number, expected=done[-1, arguments.seed])}
                    if line["wrong"]:
                        world.save_evidence(evidence)
            line |= {"seed": arguments.seed, "commit": commit()}
            done[number, arguments.seed] = line
            with arguments.out.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")
            print(number, line.get("victim"), line.get("from"), line.get("worst"), line["wrong"][:5], flush=True)
    return report(read(arguments.out))


if __name__ == "__main__":
    sys.exit(main())
