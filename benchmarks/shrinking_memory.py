"""A rank whose memory shrinks in the middle of a run goes on smaller; a resume takes what is free again.

    python -m benchmarks.shrinking_memory --out shrinking.jsonl [--cases 20] [--seed 0]      # as root, for the lab

Three lab hosts with real sshd and real torchrun; gangline's own trainer with a small Llama in fp32 on the processor,
micro-batches of 8. Each host has a control group with a memory limit (real ones of the kernel, version 1 or 2). A
foreign process in one of these groups takes memory, 4 MiB at a time, until the kernel kills for want of it, and keeps
what it has. A case is right if the next attempt does its steps, and the size of that rank alone is smaller in it. Six
cases in one run, on each host two, in random order; then the foreign processes end, and after `gangline stop` and
`gangline resume` all ranks have to have the size of the job again. All losses of the run are compared with those of one
that nobody disturbs. One JSON line per case; a file with lines is continued.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.faults_world import JOB, Seen
from benchmarks.lab_runs import OwnWorld
from benchmarks.plan_time import read
from benchmarks.scaling import commit
from tests.lab import limits
from tests.lab.hosts import LabHost, end, lab_folders
from tests.lab.user import make_model

SHAPE = {"hidden_size": 16, "intermediate_size": 4096}
"""Little to compute, much to keep: 17 MB for each of four tensors of a layer, in passes of 8 samples."""
SAMPLES, STEPS, PER_HOST, BAR = 8, 4, 2, 1e-4
PATIENCE_S = 600.0
SHRINKING_JOB = (
    JOB.replace("sequence_length: 64", "sequence_length: 128")
    .replace("batch: 12", "batch: 24")
    .replace("micro_batch: 2", f"micro_batch: {SAMPLES}")
)
SPARE_MB, PIECE_MB = 100, 4
FOREIGN = f"""
import sys
held = []
for _ in sys.stdin:
    held.append(b"x" * ({PIECE_MB} << 20))
    print(len(held), flush=True)
"""
Line = dict[str, Any]


def main() -> int:
    """Do the cases that are missing, then report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    while (begun := len(read(asked.out))) < asked.cases:
        for line in several(f"shrinking {asked.seed} {begun}", asked.cases - begun):
            with asked.out.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps({**line, "commit": commit()}) + "\n")
    return report(read(asked.out))


class BoundedWorld(OwnWorld):
    """Hosts are in control groups from the start: version 1 counts pages where they were first used."""

    def _begin(self) -> None:
        for host in self.lab.hosts:
            host.limit(memory_mb=1 << 20)
        super()._begin()


def several(seed: str, most: int) -> list[Line]:
    """The cases of one run, the resume after them, and the same steps undisturbed."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model", **SHAPE)
        binds = (*lab_folders(), *limits.shown())
        with BoundedWorld(model, keep="desk", seed=seed, job=SHRINKING_JOB, binds=binds) as world, ExitStack() as stack:
            bounds = {host.name: with_limit(world, host) for host in world.living}
            programs = {host.name: stack.enter_context(foreign(host)) for host in world.living}
            turns = PER_HOST * list(bounds)
            world.chance.shuffle(turns)
            lines = [{"limit_mb": bounds[name], **case(world, name, programs[name])} for name in turns[:most]]
            last = world.seen()
            stack.close()
            world.user.types("stop", world.run_id)
            world.user.types("resume", world.run_id, "--detach", timeout_s=PATIENCE_S)
            sizes = sizes_of(world, trained(world, last).trained)
            world.user.types("stop", world.run_id)
            whole = {"sizes_of_resume": sizes, **compared(world)}
            return [{**line, **whole} for line in lines]


def case(world: OwnWorld, name: str, program: subprocess.Popen[str]) -> Line:
    """Memory shrinks on one host, and the run goes on."""
    host = world.lab[name]
    before, killed = world.seen(), host.num_killed
    sizes = sizes_of(world, before.trained)
    taken = taken_mb(program, host, killed)
    after = trained(world, before)
    events = world.events()
    return {
        "host": name,
        "foreign_mb": taken,
        "attempts": after.trained - before.trained,
        "rank": [host.name for host in world.living].index(name),
        "sizes_before": sizes,
        "sizes": sizes_of(world, after.trained),
        "what": [each["what"] for each in events if each["event"] == "restarting"][-1],
        "seconds": [each["seconds"] for each in events if each["event"] == "returned"][-1],
        "killed": host.num_killed - killed,
    }


def trained(world: OwnWorld, before: Seen) -> Seen:
    """Once an attempt after `before` has done some steps."""
    first = world.until(lambda seen: seen.trained > before.trained, "an attempt trains", timeout_s=PATIENCE_S)
    return world.until(lambda seen: seen.step >= first.step + STEPS, f"{STEPS} more steps", timeout_s=PATIENCE_S)


def with_limit(world: OwnWorld, host: LabHost) -> int:
    """Bound the host's memory to what its processes hold in a few steps, and some more; MiB."""
    begun, most = world.seen().step, 0
    while world.seen().step < begun + 2:
        most = max(most, host.held_mb)
    limit_mb = most + SPARE_MB
    host.limit(memory_mb=limit_mb)
    return limit_mb


@contextmanager
def foreign(host: LabHost) -> Iterator[subprocess.Popen[str]]:
    """A process of somebody else on the host, which takes a piece of memory for every line that it is sent."""
    process = host.popen([sys.executable, "-c", FOREIGN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        end(process)


def taken_mb(process: subprocess.Popen[str], host: LabHost, killed: int) -> int:
    """Let it take memory until the kernel has killed somebody; how much it has then."""
    assert process.stdin is not None
    assert process.stdout is not None
    taken = 0
    while host.num_killed == killed:
        process.stdin.write("more\n")
        process.stdin.flush()
        taken = PIECE_MB * int(process.stdout.readline())
        time.sleep(0.2)
    return taken


def sizes_of(world: OwnWorld, attempt: int) -> list[int]:
    """Samples of a pass, by rank of an attempt."""
    gang = world.record(world.keeper, f"attempts/{attempt}/gang.json")
    unit = gang.get("micro_batch") or SAMPLES
    return [rank.get("micro_batch_size") or unit for rank in gang["ranks"]]


def compared(world: OwnWorld) -> Line:
    """The worst relative difference of a loss to that of the same step of a run that nobody disturbs."""
    ours = world.steps(num_bytes=1 << 24)
    last = max(each["step"] for each in ours)
    world.user.desk.write("plain.yaml", SHRINKING_JOB.replace("steps: 1000000", f"steps: {last}"))
    world.run_id = world.user.types("train", "plain.yaml", "--detach", timeout_s=300).stdout.strip()
    while world.state()["phase"] != "finished":
        assert world.state()["phase"] not in {"failed", "stopped"}, world.state()
        time.sleep(1.0)
    losses = {each["step"]: each["loss"] for each in world.steps(num_bytes=1 << 24)}
    worst = max(abs(each["loss"] / losses[each["step"]] - 1) for each in ours)
    return {"steps": len(ours), "worst": worst}


def is_right(line: Line) -> bool:
    """Whether that rank alone went on smaller, within one attempt, with the same losses; and had its size again."""
    before, after, rank = line["sizes_before"], line["sizes"], line["rank"]
    others = [size for number, size in enumerate(after) if number != rank]
    alone = others == [size for number, size in enumerate(before) if number != rank] and after[rank] < before[rank]
    return alone and line["attempts"] == 1 and set(line["sizes_of_resume"]) == {SAMPLES} and line["worst"] <= BAR


def report(lines: list[Line]) -> int:
    """What was seen; 1 if a case is wrong."""
    wrong = [number for number, line in enumerate(lines) if not is_right(line)]
    steps = sorted({(line["sizes_before"][line["rank"]], line["sizes"][line["rank"]]) for line in lines})
    seconds = sorted(line["seconds"] for line in lines)
    print(f"{len(lines)} cases, {len(wrong)} wrong {wrong or ''}; sizes {', '.join(f'{a} to {b}' for a, b in steps)}")
    print(f"training again after {seconds[len(seconds) // 2]:.0f} s in the median, {seconds[-1]:.0f} s at most")
    print(f"worst relative difference of a loss {max(line['worst'] for line in lines):.1e}, bar {BAR:g}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
