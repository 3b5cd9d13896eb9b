"""A model that fits no host of three trains on all of them over 1 Gbit/s: layer by layer, against FSDP2.

    python -m benchmarks.pipeline_lan --out pipeline_lan.jsonl       # as root, for the lab; continued if it exists

Three lab hosts with real sshd, real torchrun and gloo, links of 1 Gbit/s (shaped), and a limit of memory each that the
kernel enforces, of which torch's programs take a good half. Full fine-tuning in fp32 of a Llama of 65 M weights with 16
bytes each, and of a mixture of experts of as many, of which a token passes through a quarter. First one host alone is
tried, which runs out of memory; then the same job runs under pipeline and under fsdp in turn, with micro-batches of so
many tokens. Told per run: seconds of a step (median of those after the second), tokens per second, and what leaves the
host that sends most, per step, by the counter of its interface between two steps, beside what the plan said. A lab
host's disk is memory, too, so the model is brought before there is a limit, and checkpoints are taken away. The three
hosts share the two cores of one machine: computation is real, and slower than on three machines, to the pipeline's
disadvantage. One JSON line per run; exit code 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from operator import sub
from pathlib import Path
from typing import Any

from benchmarks.faults_planted import plant_limit
from benchmarks.lab_runs import OwnWorld
from benchmarks.plan_time import read
from benchmarks.scaling import commit
from tests.lab import limits
from tests.lab.namespaces import LabFailed

MEMORY_MB = {"auto": 1300, "pipeline": 1300, "fsdp": 2600}
"""Of a host, by strategy: FSDP2 needs more, for gloo copies what it gathers, and is to be compared all the same."""
RATE = "1gbit"
MODELS = ("llama", "mixture")
TOKENS = (8, 32, 128)
STEPS, WARM = {"pipeline": 10, "fsdp": 4, "auto": 4, "ddp": 1}, 2
MICRO_BATCHES = 12
RUN_S = 600
TIMES, BAR = 2, 10.0
"""Runs of each, in turn; how often the pipeline does what FSDP2 does, where micro-batches are smallest."""
MAKE = """
import sys, torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig
from tests.train.tiny import write_tokenizer
more = dict(num_hidden_layers=12, vocab_size=4096, max_position_embeddings=256, bos_token_id=0, eos_token_id=1,
    tie_word_embeddings=False)
config = {
    "llama": lambda: LlamaConfig(hidden_size=640, intermediate_size=1720, num_attention_heads=10,
        num_key_value_heads=10, **more),
    "mixture": lambda: Qwen3MoeConfig(hidden_size=384, moe_intermediate_size=256, num_experts=16,
        num_experts_per_tok=2, num_attention_heads=6, num_key_value_heads=6, head_dim=64, **more),
}[sys.argv[2]]()
torch.manual_seed(0)
AutoModelForCausalLM.from_config(config).save_pretrained(sys.argv[1])
from pathlib import Path
write_tokenizer(Path(sys.argv[1]))
"""
JOB = f"""\
name: lan
model: ./model
data: {{train: fox.txt, sequence_length: TOKENS}}
method: full
precision: fp32
batch: {MICRO_BATCHES}
micro_batch: 1
steps: STEPS
seed: 1
strategy: STRATEGY
evaluation: {{at_start: false}}
checkpoint: {{every_minutes: none, keep_last: 1, asynchronous: false, each_host: part}}
failures: {{restarts: 0}}
"""
Line = dict[str, Any]


def cases() -> Iterator[Line]:
    """In the order in which they are done."""
    for model in MODELS:
        yield {"model": model, "strategy": "auto", "tokens": 128, "time": 0}
        for again in range(TIMES):
            for tokens in TOKENS:
                for strategy in ("pipeline", "fsdp"):
                    yield {"model": model, "strategy": strategy, "tokens": tokens, "time": again}


class Lan(OwnWorld):
    """Three hosts with little memory, and a user who has brought model, data and cluster file."""

    def _begin(self) -> None:
        """The model is brought by a first run: what a host's disk held before is not counted as its memory."""
        self.bring()
        self._write_job("ddp", TOKENS[0])
        self.user.types("train", "job.yaml", timeout_s=600)
        for host in self.lab.hosts:
            plant_limit(host, memory_mb=max(MEMORY_MB.values()))

    def _write_job(self, strategy: str, tokens: int) -> None:
        filled = {"TOKENS": str(tokens), "STRATEGY": strategy, "STEPS": str(STEPS[strategy])}
        self.user.desk.write("job.yaml", re.sub("|".join(filled), lambda found: filled[found[0]], JOB))

    def _tidy(self) -> None:
        """Checkpoints take memory here."""
        for host in self.lab.hosts:
            host.check(["sh", "-c", "rm -rf gangline/runs/*/checkpoints"])

    def run(self, case: Line) -> Line:
        """One run from start to end."""
        alone = case["strategy"] == "auto"
        self._tidy()
        for host in self.lab.hosts:
            host.limit(memory_mb=MEMORY_MB[case["strategy"]])
        self._write_job(case["strategy"], case["tokens"])
        words = ["train", "job.yaml", "--detach"]
        if alone:
            text = self.user.desk.read("cluster.yaml").decode()
            head, hosts = text.split("hosts:", 1)
            first = hosts.split("\n  - ", 2)[1]
            self.user.desk.write("alone.yaml", f"{head}hosts:\n  - {first}\n")
            words += ["--cluster", "alone.yaml"]
        done = self.user.types(*words, code=None, timeout_s=400)
        if done.returncode:
            return {"ended": "refused", "why": done.stderr[-600:]}
        self.run_id = done.stdout.strip()
        sent = self._follow()
        state = self.state()
        if state["phase"] != "finished":
            return {"ended": state["phase"], "why": state["error"]}
        return {"ended": "finished", **self._figures(case, sent)}

    def _follow(self) -> dict[int, list[int]]:
        """To the end; step -> bytes that had left each host when it was seen first."""
        sent: dict[int, list[int]] = {}
        deadline = time.monotonic() + RUN_S
        while time.monotonic() < deadline and self.state()["phase"] not in {"finished", "failed", "stopped"}:
            for _ in range(20):
                with suppress(LabFailed, IndexError):
                    sent.setdefault(self.steps(num_bytes=1 << 14)[-1]["step"], self._sent())
                time.sleep(0.05)
        return sent

    def _figures(self, case: Line, sent: dict[int, list[int]]) -> Line:
        steps = self.steps()
        seconds = [step["step_s"] for step in steps[WARM:]]
        plan = self.record(self.keeper, "plan.json")
        first, last = WARM, max(step for step in sent if step < STEPS[case["strategy"]])
        return {
            "stages": plan.get("stages"),
            "step_s": round(statistics.median(seconds), 4),
            "worst_s": round(max(seconds), 4),
            "tokens_per_s": round(case["tokens"] * MICRO_BATCHES / statistics.median(seconds), 1),
            "sent_per_step": round(max(map(sub, sent[last], sent[first])) / (last - first)),
            "foreseen_per_step": plan["forecast"]["sent_bytes"],
            "rank_bytes": [max(step["ranks"][rank]["memory_bytes"] for step in steps) for rank in range(3)],
            "loss": steps[-1]["loss"],
        }

    def _sent(self) -> list[int]:
        """Bytes that have left each host."""
        return [int(host.check(["cat", "/sys/class/net/eth0/statistics/tx_bytes"])) for host in self.lab.hosts]


def report(lines: Sequence[Line]) -> int:
    """A table per model; 1 where a bar is missed."""
    ratios = [each for model in MODELS for each in report_model(model, [x for x in lines if x["model"] == model])]
    bad = [line for line in lines if (line["ended"] == "finished") is (line["strategy"] == "auto")]
    for line in bad:
        print(json.dumps(line))
    return 1 if bad or not ratios or min(ratios) < BAR else 0


def report_model(model: str, lines: Sequence[Line]) -> list[float]:
    """How often the pipeline does what FSDP2 does, by tokens."""
    for line in lines:
        if line["strategy"] == "auto":
            print(f"\n{model}, one host alone: {line['ended']}: {line.get('why', '')}")
    sides = "pipeline, s (worst) | fsdp, s (worst) | times as fast (least)"
    print(f"\n| {model}, tokens | {sides} | MB per step (foreseen), pipeline | fsdp |\n|" + "---|" * 6)
    ratios = []
    for tokens in TOKENS:
        mine = {
            kind: [line for line in lines if (line["strategy"], line["tokens"]) == (kind, tokens) and "step_s" in line]
            for kind in ("pipeline", "fsdp")
        }
        if not all(mine.values()):
            continue
        seconds = {kind: statistics.median(line["step_s"] for line in several) for kind, several in mine.items()}
        worst = {kind: max(line["worst_s"] for line in several) for kind, several in mine.items()}
        sent = {kind: statistics.median(line["sent_per_step"] for line in several) for kind, several in mine.items()}
        ratios.append(seconds["fsdp"] / seconds["pipeline"])
        least = min(line["step_s"] for line in mine["fsdp"]) / max(line["step_s"] for line in mine["pipeline"])
        row = [str(tokens), *(f"{seconds[kind]:.2f} ({worst[kind]:.2f})" for kind in mine)]
        row += [f"{ratios[-1]:.1f} ({least:.1f})"]
        row += [f"{sent[kind] / 1e6:.2f} ({mine[kind][0]['foreseen_per_step'] / 1e6:.2f})" for kind in mine]
        print(f"| {' | '.join(row)} |")
    return ratios


def main() -> int:
    """Do what the file does not have yet, and sum up."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, continued if it exists")
    arguments = parser.parse_args()
    done = [{name: line[name] for name in ("model", "strategy", "tokens", "time")} for line in read(arguments.out)]
    if limits.version() is None:
        raise LabFailed("no control groups here: a host's memory cannot be limited")
    for model in MODELS:
        if wanted := [case for case in cases() if case["model"] == model and case not in done]:
            measure(wanted, model, arguments.out)
    return report(read(arguments.out))


def measure(wanted: Sequence[Line], model: str, out: Path) -> None:
    """These cases of one model, on hosts that have it."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-c", MAKE, f"{folder}/model", model], check=True)
        with Lan(Path(folder) / "model", keep="head", seed="lan", job=JOB, rate=RATE) as world:
            for case in wanted:
                line = {**case, "commit": commit(), **world.run(case)}
                with out.open("a", encoding="utf-8") as stream:
                    stream.write(json.dumps(line) + "\n")
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    sys.exit(main())
