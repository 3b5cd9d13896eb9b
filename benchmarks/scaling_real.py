"""Unlike machines that really compute: reported beside scaling.py, without a bar, for ranks share two processors.

    python -m benchmarks.scaling_real --out real.jsonl                # as root, for the lab; about 8 minutes

Three lab hosts at 1 Gbit; control groups give them 0.8, 0.44 and 0.36 of a processor (1 : 0.55 : 0.45). A small Llama
trains with LoRA in gangline's own loop. What is measured, in samples per second:

    alone         each host trains by itself while the others rest
    at once       all three at the same time, each by itself: what sharing processors and memory costs
    gangline      all together
    even          all together, the same number of micro-batches each, gangline's loop

One JSON line per run in --out; what is there is not measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.plan_time import PYTHON, ROOT, read
from benchmarks.scaling import commit, quiet
from tests.lab.hosts import Lab, lab_folders

CPUS = (0.8, 0.44, 0.36)
BATCH, STEPS, RUNS, LIMIT_S = 40, 4, 5, 300
LENGTH, TOGETHER = 128, ("gangline", "even")
SIDES = ("alone 0", "alone 1", "alone 2", "at once", *TOGETHER)
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 4000,
    "max_position_embeddings": 512,
}
Line = dict[str, Any]


def main() -> int:
    """Measure what is missing, then report; with --rank, be a rank."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", help="a side: this process is a rank of it")
    arguments = parser.parse_args()
    if arguments.rank:
        return rank(arguments.rank)
    for run in range(RUNS):
        for side in SIDES:
            if any((line["side"], line["run"]) == (side, run) for line in read(arguments.out)):
                continue
            line = {"side": side, "run": run, "load": quiet(), "commit": commit(), "found": hosts(side)}
            with arguments.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
    return report(read(arguments.out))


def hosts(side: str) -> list[Line]:
    """What the ranks of a side said."""
    wanted = [int(side[-1])] if side.startswith("alone") else range(len(CPUS))
    with Lab(len(CPUS), binds=lab_folders(), rate="1gbit", ttl_s=LIMIT_S + 60) as lab:
        common = {"WORLD_SIZE": str(len(CPUS)), "MASTER_ADDR": lab.hosts[0].address, "MASTER_PORT": "29500"}
        common |= {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
        argv = [PYTHON, "-W", "ignore", "-m", "benchmarks.scaling_real", "--rank", side]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started = []
        for number in wanted:
            lab.hosts[number].limit(cpus=CPUS[number])
            started.append(lab.hosts[number].popen(argv, env={**common, "RANK": str(number)}, cwd=ROOT, **pipes))
        texts = [process.communicate(timeout=LIMIT_S) for process in started]
    if any(process.returncode for process in started):
        raise SystemExit("\n".join(errors[-1500:] for _, errors in texts))
    return [json.loads(line) for out, _ in texts for line in out.splitlines() if line.startswith('{"rank"')]


def rank(side: str) -> int:
    """Train some steps; one JSON line on stdout."""
    import torch
    import torch.distributed as dist

    from benchmarks.emulated import Rows, Setup, job, world
    from benchmarks.scaling_ranks import Notes
    from gangline.runs.job import ModelJob
    from gangline.worker.loop import Loop
    from gangline.worker.progress import TrainingProgress
    from gangline.worker.rank_files import StopFlag
    from gangline.worker.run_io import RunIO
    from gangline.worker.session import build_session

    torch.set_num_threads(1)
    together, number = side in TOGETHER, int(os.environ["RANK"])
    if together:
        dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT_S))
    setup = Setup(shares=[1] * len(CPUS) if together else [BATCH], moving=side == "gangline", batch=BATCH, steps=STEPS)
    place = world(setup, number if together else 0)
    rows = Rows(BATCH * STEPS, tokens=LENGTH, vocabulary=CONFIG["vocab_size"])
    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
        real = replace(job(setup), model=ModelJob(path=folder, start="random"))
        session = build_session(real, place, train_set=rows, evaluation_set=None)
    notes = Notes()
    outlets = RunIO(recorder=notes if place.is_head else None, saver=None, stop=StopFlag())
    began_s = time.perf_counter()
    Loop(session, outlets, TrainingProgress()).run()
    found = {"rank": number, "ends_s": [end_s - began_s for end_s in notes.ends_s], "waits": notes.waits}
    sys.stdout.write(json.dumps({**found, "shares": notes.shares[-1:]}) + "\n")
    sys.stdout.flush()
    os._exit(0)  # a gloo group that is torn down may hang: see gangline.worker.process_group.leave


def speed(ends_s: Sequence[float]) -> float:
    """Samples per second over all steps but the first."""
    return (len(ends_s) - 1) * BATCH / (ends_s[-1] - ends_s[0])


def report(lines: Sequence[Line]) -> int:
    """A table: medians and worst of runs."""
    found: dict[str, list[float]] = {}
    for line in lines:
        for each in line["found"]:
            if each["ends_s"]:
                name = f"at once {each['rank']}" if line["side"] == "at once" else line["side"]
                found.setdefault(name, []).append(speed(each["ends_s"]))
    medians = {name: statistics.median(values) for name, values in found.items()}
    alone = [medians[f"alone {number}"] for number in range(len(CPUS))]
    at_once = [medians[f"at once {number}"] for number in range(len(CPUS))]
    print("real computation on two processors, bounded by control groups; network real, 1 Gbit; median (worst)\n")
    print(f"each alone: {', '.join(f'{each:.2f}' for each in alone)} samples/s, sum {sum(alone):.2f}")
    print(f"all at once, without exchange: {', '.join(f'{each:.2f}' for each in at_once)}, sum {sum(at_once):.2f}\n")
    print("| side | samples/s | of the sum of each alone | of all at once |\n|---|---|---|---|")
    for side in TOGETHER:
        cells = [f"{medians[side]:.2f} ({min(found[side]):.2f})"]
        cells += [f"{medians[side] / each:.1%} ({min(found[side]) / each:.1%})" for each in (sum(alone), sum(at_once))]
        print(f"| {side} | " + " | ".join(cells) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
