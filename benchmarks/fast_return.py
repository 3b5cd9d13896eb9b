"""How soon a run does its next step after a rank was killed, and where the time goes (promise: seconds).

    python -m benchmarks.fast_return --out fast_return.jsonl           # as root, for the lab; about 5 minutes

Three lab hosts with real sshd, real torchrun and gloo; gangline's own trainer with a Llama of 4 layers x 256 (5.0 M
weights, fp32) on the processor, two cores for all. A rank on a random host is killed (SIGKILL) at a random moment, ten
times in one run. Seconds are counted from outside: from the kill until metrics.jsonl has a step of the next attempt;
the stages are the supervisor's own, from when it first saw a failure. A case counts only on a machine that is quiet,
unless `--loaded` says otherwise. One JSON line per kill; a file that has lines already is continued.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.faults_world import BACK_S, JOB, NotBack, World
from benchmarks.plan_time import read
from benchmarks.scaling import commit, quiet
from tests.lab.user import make_model

KILLS, BAR_S, STRETCH_S = 10, 5.0, 3.0
STAGES = ("ended", "prepared", "started", "joined", "step")
CONFIG = {
    "hidden_size": 256,
    "intermediate_size": 672,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
RANDOM_WEIGHTS = """
import json, sys
from pathlib import Path
import torch
from transformers import AutoConfig, AutoModelForCausalLM
folder, wanted = Path(sys.argv[1]), 5_000_000
config = AutoConfig.from_pretrained(folder)
for name, value in json.loads(sys.argv[2]).items():
    setattr(config, name, value)
torch.manual_seed(1)
count = lambda: sum(each.numel() for each in AutoModelForCausalLM.from_config(config).parameters())
if count() < wanted:  # the rest in rows of the vocabulary that no token has
    tables = 1 if config.tie_word_embeddings else 2
    config.vocab_size += (wanted - count()) // (tables * config.hidden_size)
model = AutoModelForCausalLM.from_config(config)
model.save_pretrained(folder)
print(sum(each.numel() for each in model.parameters()))
"""
Line = dict[str, Any]


def main() -> int:
    """Measure what is missing, then report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument(
        "--loaded", action="store_true", help="other work may use the machine; the load is written down"
    )
    arguments = parser.parse_args()
    missing = arguments.kills - len(read(arguments.out))
    if missing > 0:
        load = os.getloadavg()[0] if arguments.loaded else quiet()
        with tempfile.TemporaryDirectory() as folder:
            model = make_model(Path(folder) / "model")
            num_weights = _enlarge(model)
            with World(model, keep="desk", seed=f"return {arguments.seed} {missing}", job=JOB) as world:
                for _ in range(missing):
                    line = {**killed(world), "num_weights": num_weights, "load": load, "commit": commit()}
                    with arguments.out.open("a", encoding="utf-8") as stream:
                        stream.write(json.dumps(line) + "\n")
                    print(json.dumps(line), flush=True)
    return report(read(arguments.out))


def _enlarge(model: Path) -> int:
    command = [sys.executable, "-c", RANDOM_WEIGHTS, str(model), json.dumps(CONFIG)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def killed(world: World) -> Line:
    """Kill one rank, and wait for the next attempt's first step."""
    before = world.seen()
    world.until(lambda seen: seen.step > before.step + 5, "it trains")
    time.sleep(world.chance.uniform(0.0, 2.0))
    victim = world.chance.choice(world.living)
    pid, before, num_events = world.rank_pid(victim), world.seen(), len(world.events())
    begun = time.monotonic()
    victim.check(["kill", "-9", str(pid)], as_root=True)
    while not trains(world, before.attempt + 1):
        if time.monotonic() > begun + BACK_S:
            raise NotBack(f"no step of attempt {before.attempt + 1} after {BACK_S:g} s")
    seconds = time.monotonic() - begun
    while all(each["event"] != "returned" for each in world.events()[num_events:]):
        time.sleep(0.2)  # bounded by what the lab may live
    events = world.events()[num_events:]
    (restart,) = [each for each in events if each["event"] == "restarting"]
    (returned,) = [each for each in events if each["event"] == "returned"]
    return {
        "host": victim.name,
        "seconds": round(seconds, 2),
        "stages": returned["stages"],
        "lost_steps": restart["lost_steps"],
        "what": restart["what"],
    }


def trains(world: World, attempt: int) -> bool:
    """Whether a step of this attempt is written on the head."""
    head = world.living[0]
    said = head.run(["tail", "-n", "1", f"{world.folder(head)}/metrics.jsonl"]).stdout
    records = [json.loads(line) for line in said.splitlines() if line.endswith("}")]
    return any((each.get("kind"), each.get("attempt")) == ("step", attempt) for each in records)


def report(lines: list[Line]) -> int:
    """A table; 1 if the median is above the bar."""
    seconds = [line["seconds"] for line in lines]
    print("\n| | median | worst |\n|---|---|---|")
    print(f"| from the kill to the next step, s | {statistics.median(seconds):.1f} | {max(seconds):.1f} |")
    for stage in STAGES:
        found = [line["stages"].get(stage, 0.0) for line in lines]
        print(f"| {stage} | {statistics.median(found):.2f} | {max(found):.2f} |")
    print(
        f"\n{len(lines)} kills; steps done again: {max(line['lost_steps'] or 0 for line in lines)} at the most; ",
        end="",
    )
    print(f"bar {BAR_S:g} s, stretch {STRETCH_S:g} s")
    return 1 if statistics.median(seconds) > BAR_S else 0


if __name__ == "__main__":
    sys.exit(main())
