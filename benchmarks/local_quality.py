"""What local SGD costs in quality: a full fine-tune on three hosts, in rounds and in plain steps, at equal tokens.

    python -m benchmarks.local_quality --out local_quality.jsonl

A Llama of 10.7 M weights is trained on a made-up language first (once, in plain steps, kept beside the file); both
sides then go on from it on a language in which half the topics are others. Real ranks over gloo on this machine (its
GPU, where it has one). One JSON line per seed and side; pairs that the file has already are passed over, so that a run
can be continued. Both sides read the same samples in the same order, with the same schedule. The last lines printed
are a table for RESULTS.md. Speed is not measured here: nothing slows the links down.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np

Payload = Literal["int8", "bf16", "fp32"]
NUM_HOSTS = 3
BATCH = 6
MICRO_BATCH = 2
LENGTH = 32
NUM_EVALUATED = 400
VOCABULARY, NUM_TOPICS, NUM_FOLLOWERS = 256, 8, 4
NUM_CHANGED = 4
"""Topics that are others in the language of the fine-tune."""
BASE_RATE = 1e-3
SIDES = ("synchronous", "local-sgd")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One seed on one side."""

    seed: int
    side: str
    steps: int
    inner_steps: int
    payload: Payload
    learning_rate: float
    outer_rate: float
    outer_momentum: float
    base_steps: int

    @property
    def key(self) -> tuple[object, ...]:
        """What tells cases apart; synchronous steps know no rounds."""
        outer = (self.outer_rate, self.outer_momentum)
        rounds = () if self.side == "synchronous" else (self.inner_steps, self.payload, *outer)
        return self.seed, self.side, self.steps, self.learning_rate, self.base_steps, *rounds


class Language:
    """Rows of a language: a topic is drawn, which decides what may follow each word; now and then a word comes again.

    The best loss possible is that of someone who knows the tables: about the entropy of the choice among followers.
    """

    def __init__(self, num_samples: int, *, seed: int, changed: bool) -> None:
        shape = (NUM_TOPICS, VOCABULARY, NUM_FOLLOWERS)
        followers = np.random.default_rng(0).integers(NUM_TOPICS, VOCABULARY, shape)
        if changed:
            followers[:NUM_CHANGED] = np.random.default_rng(1).integers(NUM_TOPICS, VOCABULARY, shape)[:NUM_CHANGED]
        odds = np.array([0.6, 0.25, 0.1, 0.05])
        draw = np.random.default_rng([1, seed])
        rows = np.zeros((num_samples, LENGTH + 1), dtype=np.int64)
        rows[:, 0] = draw.integers(NUM_TOPICS, size=num_samples)
        for place in range(1, LENGTH + 1):
            choice = draw.choice(NUM_FOLLOWERS, size=num_samples, p=odds)
            rows[:, place] = followers[rows[:, 0], rows[:, place - 1], choice]
            if place > 8:
                again = draw.random(num_samples) < 0.1
                rows[again, place] = rows[again, place - 8]
        self._rows = rows
        self.label_counts = np.full(num_samples, LENGTH)
        self.lengths = np.full(num_samples, LENGTH)

    def __len__(self) -> int:
        return len(self._rows)

    def sample(self, index: int) -> Any:
        """One row: every word predicts the next."""
        row = self._rows[index]
        return SimpleNamespace(input_ids=row[:-1], targets=row[1:], position_ids=np.arange(LENGTH))


def main() -> int:
    """Do every case that the file does not have, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0, help="others than those that settings were tried with")
    parser.add_argument("--steps", type=int, default=1050)
    parser.add_argument("--inner-steps", type=int, default=50)
    parser.add_argument("--payload", choices=("int8", "bf16", "fp32"), default="int8")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--base-steps", type=int, default=1500)
    parser.add_argument("--outer-rate", type=float, default=1.0)
    parser.add_argument("--outer-momentum", type=float, default=0.6)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.rank:
        return _rank(json.loads(words.rank))
    cases = [
        Case(
            seed=seed,
            side=side,
            steps=words.steps,
            inner_steps=words.inner_steps,
            payload=words.payload,
            learning_rate=words.learning_rate,
            outer_rate=words.outer_rate,
            outer_momentum=words.outer_momentum,
            base_steps=words.base_steps,
        )
        for seed in range(words.first_seed, words.first_seed + words.seeds)
        for side in SIDES
    ]
    base = words.out.with_name(f"{words.out.stem}-base-{words.base_steps}")
    _make_base(base, cases[0])
    for case in cases:
        if case.key not in _read(words.out):
            line = _measure(case, base)
            with words.out.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")
            print(f"seed {case.seed}  {case.side:<12} {line['loss']:.4f}  {line['train_s']:.0f} s", flush=True)
    _print_table(cases, _read(words.out))
    return 0


def _make_base(base: Path, case: Case) -> None:
    """Train the model that both sides begin with, unless that was done."""
    if base.exists():
        return
    with tempfile.TemporaryDirectory(prefix="gangline-quality-", dir=base.parent) as folder:
        _write_model(folder)
        first = replace(case, seed=0, side="base", steps=case.base_steps, learning_rate=BASE_RATE)
        line = _measure(first, Path(folder))
        Path(folder, "trained").rename(base)
    print(f"base    {line['loss']:.4f}  {line['train_s']:.0f} s", flush=True)


def _measure(case: Case, model: Path) -> dict[str, Any]:
    """Run the ranks of one case."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    order = json.dumps({"folder": str(model), **{name: getattr(case, name) for name in Case.__slots__}})
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(NUM_HOSTS),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    argv = [sys.executable, "-m", "benchmarks.local_quality", "--out", "-", "--rank", order]
    ranks = [
        subprocess.Popen(argv, env={**environment, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(NUM_HOSTS)
    ]
    said = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"{case} failed: exit codes {[rank.returncode for rank in ranks]}")
    measured: dict[str, Any] = json.loads(said[0].splitlines()[-1])
    return {**{name: getattr(case, name) for name in Case.__slots__}, **measured, "commit": _commit()}


def _write_model(folder: str) -> None:
    from transformers import LlamaConfig

    LlamaConfig(
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=6,
        vocab_size=VOCABULARY,
        max_position_embeddings=2 * LENGTH,
        tie_word_embeddings=True,
    ).save_pretrained(folder)


def _rank(order: dict[str, Any]) -> int:
    """One host of one rank: train, and say what came of it."""
    from gangline.runs.gang import Gang, GangRank
    from gangline.worker.loop import Loop
    from gangline.worker.model import trainable
    from gangline.worker.process_group import join, leave
    from gangline.worker.progress import TrainingProgress
    from gangline.worker.rank_files import StopFlag
    from gangline.worker.run_io import RunIO
    from gangline.worker.session import build_session
    from gangline.worker.trained import hush_libraries

    hush_libraries()
    folder, case = order.pop("folder"), Case(**order)
    share = BATCH // MICRO_BATCH // NUM_HOSTS
    gang = Gang(
        run_id="local-quality",
        attempt=1,
        ranks=tuple(GangRank(host=f"pc{rank}", share=share) for rank in range(NUM_HOSTS)),
        strategy="local-sgd" if case.side == "local-sgd" else "ddp",
        shares_gpus=True,
    )
    world = join(gang)
    job = _job(case, folder)
    changed = case.side != "base"
    train_set = Language(case.steps * BATCH, seed=1 + case.seed, changed=changed)
    evaluation_set = Language(NUM_EVALUATED, seed=0, changed=changed)
    session = build_session(job, world, train_set=train_set, evaluation_set=evaluation_set)
    heard = Heard()
    started = time.perf_counter()
    Loop(session, RunIO(recorder=heard, saver=None, stop=StopFlag()), TrainingProgress()).run()  # type: ignore[arg-type]
    train_s = time.perf_counter() - started
    if world.is_head:
        if case.side == "base":
            session.model.save_pretrained(Path(folder, "trained"))
        weights = sum(parameter.numel() for parameter in trainable(session.model).values())
        line = {"loss": heard.evaluations[-1][1], "evaluations": heard.evaluations, "num_weights": weights}
        print(json.dumps({**line, "train_s": round(train_s, 1), "exchanges": heard.num_lines}), flush=True)
    leave(0)


def _job(case: Case, folder: str) -> Any:
    from gangline.runs.job import (
        CheckpointJob,
        DataJob,
        EvaluationJob,
        Job,
        ModelJob,
        OptimizerJob,
        OuterJob,
        ScheduleJob,
        SourceJob,
        StrategyJob,
    )

    outer = OuterJob(learning_rate=case.outer_rate, momentum=case.outer_momentum)
    rounds = StrategyJob(kind="local-sgd", inner_steps=case.inner_steps, payload=case.payload, outer=outer)
    return Job(
        name="local-quality",
        model=ModelJob(path=folder, start="random" if case.side == "base" else "pretrained"),
        data=DataJob(train=SourceJob(), packing=False, sequence_length=LENGTH),
        batch=BATCH,
        micro_batch=MICRO_BATCH,
        epochs=None,
        steps=case.steps,
        seed=case.seed,
        precision="fp32",
        optimizer=OptimizerJob(learning_rate=case.learning_rate, beta2=0.95, weight_decay=0.01),
        schedule=ScheduleJob(kind="cosine", warmup_steps=case.steps // 20),
        evaluation=EvaluationJob(every_steps=max(1, case.steps // 3), at_start=False),
        checkpoint=CheckpointJob(every_minutes=None),
        strategy=rounds if case.side == "local-sgd" else StrategyJob(),
    )


class Heard:
    """A recorder that keeps evaluations."""

    def __init__(self) -> None:
        self.evaluations: list[tuple[int, float]] = []
        self.num_lines = 0

    def step(self, *_: object, **__: object) -> None:
        """A step, or a round."""
        self.num_lines += 1

    def evaluation(self, evaluation: Any, *, step: int) -> None:
        """An evaluation."""
        self.evaluations.append((step, evaluation.loss))

    def event(self, *_: object, **__: object) -> None:
        """Nothing of what happens is of interest."""


def _read(path: Path) -> dict[tuple[object, ...], dict[str, Any]]:
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {Case(**{name: line[name] for name in Case.__slots__}).key: line for line in lines}


def _print_table(cases: Sequence[Case], lines: dict[tuple[object, ...], dict[str, Any]]) -> None:
    sides = {side: {case.seed: lines[case.key] for case in cases if case.side == side} for side in SIDES}
    print("\n| seed | synchronous | local SGD | difference |\n|---|---|---|---|")
    differences = []
    for seed, plain in sides["synchronous"].items():
        apart = sides["local-sgd"][seed]
        differences.append(apart["loss"] / plain["loss"] - 1)
        print(f"| {seed} | {plain['loss']:.4f} | {apart['loss']:.4f} | {differences[-1]:+.2%} |")
    first = sides["local-sgd"][cases[0].seed]
    print(
        f"\n{first['num_weights'] / 1e6:.1f} M weights from {first['base_steps']} steps, "
        f"{first['steps']} steps of {BATCH * LENGTH} tokens, "
        f"{first['exchanges']} rounds of {first['inner_steps']} steps, {first['payload']}; "
        f"mean {statistics.mean(differences):+.2%}, worst {max(differences):+.2%}"
    )


def _commit() -> str:
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
