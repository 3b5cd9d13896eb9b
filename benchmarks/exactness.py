"""Promises 1 and 3 in figures: any split of the batch, and any interruption, against one process without either.

    python -m benchmarks.exactness --out exactness.jsonl

One JSON line per case (its figure, its bar, the commit); cases that the file has already are passed over, so that a
run can be continued. The last lines printed are a table for RESULTS.md. Real ranks over gloo, a Llama of 28 k weights.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gangline.runs.job import ScheduleJob
from tests.train import (
    cases_exact,
    cases_loop,
    cases_moving,
    cases_offload,
    cases_pipeline,
    cases_rank_settings,
    cases_resume,
    cases_tensor_parallel,
    cases_zero,
)
from tests.train.pool import Zygote
from tests.train.test_resume import sample_order

ZERO = ("zero-1", "zero-2", "zero-3")
METHODS = ("full", "lora", "qlora", "qlora-8")
SPLITS = ([5, 3, 2], [4, 3, 3], [10, 0, 0])
Case = tuple[str, float, Callable[[], float]]
"""Name, bar, and what gives the figure."""
Gang = tuple[Any, ...]
"""Strategy, shares (of pipelines layers), and of pipelines the share of each."""


def main() -> None:
    """Do every case that the file does not have, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--interruptions", type=int, default=10, help="random stops per kind")
    parser.add_argument("--only", default="", help="cases with this in their name, such as fsdp")
    parser.add_argument("--stride", type=int, default=1, help="first every Nth case, so that a part covers all kinds")
    arguments = parser.parse_args()
    done = read_lines(arguments.out)
    zygote, begun = Zygote(), _Begun()
    try:
        cases = [*_split_cases(zygote), *_resume_cases(zygote, arguments.interruptions)]
        cases += [*_strategy_cases(zygote), *_offload_cases(zygote), *_strategy_resume_cases(zygote, begun)]
        cases += [*_own_cases(zygote), *_moving_cases(zygote)]
        cases += [*_rows_cases(zygote), *_rows_resume_cases(zygote, begun)]
        cases += [*_zero_cases(zygote), *_zero_resume_cases(zygote, begun)]
        cases = [case for case in cases if arguments.only in case[0]]
        for _, (name, bar, measure) in sorted(enumerate(cases), key=lambda numbered: numbered[0] % arguments.stride):
            if name in done:
                continue
            line = {"case": name, "figure": measure(), "bar": bar, "commit": commit()}
            with arguments.out.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")
            print(f"{line['figure']:10.2e}  bar {bar:g}  {name}", flush=True)
    finally:
        zygote.close()
        begun.close()
    _print_table(read_lines(arguments.out))


def _split_cases(zygote: Zygote) -> Iterator[Case]:
    for precision, bar in (("fp64", 1e-9), ("fp32", 1e-5)):
        for method in ("full", "lora"):
            for shares in SPLITS:
                words = {"shares": shares, "method": method, "precision": precision}
                yield f"gradient {precision} {method} {_text(shares)}", bar, lambda w=words: _gradient(zygote, w)
    for precision, warmup, bar in (("fp64", 5, 1e-9), ("fp32", 50, 1e-4)):
        for method in ("full", "lora"):
            for shares in SPLITS:
                words = {"shares": shares, "method": method, "precision": precision, "warmup": warmup}
                yield (
                    f"losses of 200 steps {precision} {method} {_text(shares)}",
                    bar,
                    lambda w=words: _losses(zygote, w),
                )
    for precision, warmup, pieces, bar in (("fp64", 5, True, 1e-9), ("fp32", 50, False, 1e-4)):
        for method in ("full", "lora"):
            words = {"method": method, "precision": precision, "warmup": warmup, "pieces": pieces}
            yield f"losses of 200 steps {precision} {method} shares move", bar, lambda w=words: _moving(zygote, w)
    for shares in SPLITS:
        words = {"shares": shares, "precision": "fp32"}
        yield f"evaluation loss fp32 {_text(shares)}", 1e-6, lambda w=words: _evaluation(zygote, w)


def _resume_cases(zygote: Zygote, interruptions: int) -> Iterator[Case]:
    for method, precision in (("full", "fp32"), ("lora", "fp32"), ("lora", "bf16")):
        for seed in range(interruptions):
            step = random.Random(f"{method}{precision}{seed}").randrange(1, 24)
            job = {"method": method, "precision": precision}
            name = f"same ranks {precision} {method} stopped at step {step} (seed {seed})"
            yield name, 0.0, lambda j=job, s=step: _same_ranks(zygote, j, s)
    for method, precision, warmup, bar in (
        ("full", "fp64", 5, 1e-9),
        ("lora", "fp64", 5, 1e-9),
        ("full", "fp32", 50, 1e-4),
        ("lora", "fp32", 50, 1e-4),
    ):
        for seed in range(max(1, interruptions // 3)):
            draw = random.Random(f"{method}{precision}{seed}-324")
            stops = sorted(draw.sample(range(1, 24), 2))
            job = {"method": method, "precision": precision, "warmup": warmup}
            name = f"3 to 2 to 4 ranks {precision} {method} at steps {stops[0]}, {stops[1]} (seed {seed})"
            yield name, bar, lambda j=job, s=stops: _other_ranks(zygote, j, s)


def _strategy_cases(zygote: Zygote) -> Iterator[Case]:
    """Every strategy that computes what one machine would, against one process; packed rows, recomputation."""
    gangs = (("ddp", [5, 3, 2]), ("fsdp", [5, 3, 2]), ("fsdp", [7, 3]), ("hsdp", [1, 2, 3, 4]))
    gangs = (*gangs, ("tp", [10]), ("tp", [6, 4]))
    for strategy, shares in (*gangs, ("pipeline", [1, 1]), ("pipeline", [3, 1, 2])):
        for method in _methods(strategy):
            words = {"shares": shares, "strategy": strategy, "method": method}
            kinds = {"fp64": (False, 1e-9), "fp32": (True, 1e-5)}
            for precision, (mixture, bar) in kinds.items():
                if mixture and (
                    method.startswith("qlora") or strategy == "tp" or (strategy, len(shares)) == ("pipeline", 3)
                ):
                    continue  # experts are not quantised nor cut, and the mixture of the tests has two layers
                name = f"gradient under {strategy} {precision}{' mixture of experts' if mixture else ''} {method}"
                more = {**words, "mixture": mixture}
                yield f"{name} {_text(shares)}", bar, lambda w=more: _contract(zygote, w)
            for precision, warmup, bar in (("fp64", 5, 1e-9), ("fp32", 50, 1e-4)):
                more = {**words, "precision": precision, "warmup": warmup, "steps": 100}
                more |= {"packed": True, "checkpointing": True}
                more |= {"dropout": 0.0} if strategy == "pipeline" else {}
                name = f"losses of 100 packed steps under {strategy} {precision} {method} {_text(shares)}"
                yield name, bar, lambda w=more: _losses(zygote, w)


def _own_cases(zygote: Zygote) -> Iterator[Case]:
    """Ranks whose passes have sizes of their own, and recompute or not; where layers are cut, the latter alone."""
    sizes = [[1, True], [3, False], [8, None], [2, True]]
    gangs = (("ddp", [3, 7, 14]), ("fsdp", [3, 7, 14]), ("fsdp", [9, 0, 15]), ("hsdp", [3, 7, 5, 9]))
    for strategy, shares in gangs:
        for method in METHODS:
            words = {"shares": shares, "settings": sizes[: len(shares)], "strategy": strategy, "method": method}
            for precision, warmup, bars in (("fp64", 5, (1e-9, 1e-9)), ("fp32", 50, (1e-5, 1e-4))):
                name = f"with own settings under {strategy} {precision} {method} {_text(shares)}"
                more = {**words, "precision": precision, "packed": True}
                yield f"packed gradient {name}", bars[0], lambda w=more: _own_gradient(zygote, w)
                more = {**words, "precision": precision, "steps": 100}
                more["schedule"] = ScheduleJob(kind="cosine", warmup_steps=warmup)
                yield f"losses of 100 steps {name}", bars[1], lambda w=more: _own_losses(zygote, w)
    for dropout in (0.0, 0.2):
        words = {"shares": [3, 7, 14], "settings": sizes[:3], "attention_dropout": dropout}
        name = f"rounds with own settings, dropout {dropout:g}, under local-sgd fp64 full [3, 7, 14]"
        yield name, 1e-9, lambda w=words: _own_rounds(zygote, w)
    parts = (
        ("pipeline", [3, 1, 2], [10], [True, False, True]),
        ("pipeline", [2, 1, 1, 2], [6, 4], [True, False, False, True]),
        ("tp", [6, 4], [10], [False, False, True, True]),
    )
    for strategy, shares, rows, recomputes in parts:
        for method in _methods(strategy):
            for precision, warmup, bar in (("fp64", 5, 1e-9), ("fp32", 50, 1e-4)):
                words = {"shares": shares, "rows": rows, "strategy": strategy, "method": method, "dropout": 0.0}
                words |= {"precision": precision, "warmup": warmup, "steps": 100, "packed": True}
                words["settings"] = [[1, each] for each in recomputes]
                name = f"losses of 100 packed steps, some recompute, under {strategy} {precision} {method}"
                yield f"{name} {_text(shares)} ({_text(rows)})", bar, lambda w=words: _losses(zygote, w)


def _moving_cases(zygote: Zygote) -> Iterator[Case]:
    """The same, and some move inputs of layers to the machine's memory: on a processor by the same hooks."""
    moving = [[1, True, True], [3, False, False], [8, True, None], [2, True, True]]
    kinds = (("fp64", "", 1e-9), ("fp32", "", 1e-5), ("fp32", " of a mixture of experts", 1e-5))
    for strategy, shares in (("ddp", [3, 7, 14]), ("fsdp", [3, 7, 14]), ("hsdp", [3, 7, 5, 9])):
        for method in METHODS[:2]:
            words = {"shares": shares, "settings": moving[: len(shares)], "strategy": strategy, "method": method}
            for precision, kind, bar in kinds:
                name = f"gradient{kind}, some move inputs of layers, under {strategy} {precision} {method}"
                more = {**words, "precision": precision, "packed": not kind, "mixture": bool(kind)}
                yield f"{'' if kind else 'packed '}{name} {_text(shares)}", bar, lambda w=more: _own_gradient(zygote, w)


def _offload_cases(zygote: Zygote) -> Iterator[Case]:
    """What is in parts, by FSDP2's policy for parts in the machine's memory."""
    for strategy, shares in (("fsdp", [5, 3, 2]), ("hsdp", [1, 2, 3, 4])):
        for method in METHODS:
            words = {"shares": shares, "strategy": strategy, "method": method}
            name = f"losses of 4 steps offloaded under {strategy} fp64 {method} {_text(shares)}"
            yield name, 1e-9, lambda w=words: _offloaded(zygote, w)


def _strategy_resume_cases(zygote: Zygote, begun: _Begun) -> Iterator[Case]:
    """Saved under one strategy by 3 ranks (hsdp and tp: 4), resumed under each by 2 and by 4."""
    before = {"ddp": [5, 3, 2], "fsdp": [5, 3, 2], "hsdp": [1, 2, 3, 4], "tp": [7, 3], "pipeline": [2, 1, 1]}
    after = (("ddp", [7, 3]), ("ddp", [1, 2, 3, 4]), ("fsdp", [7, 3]), ("fsdp", [1, 2, 3, 4]), ("hsdp", [4, 3, 2, 1]))
    after = (*after, ("tp", [10]), ("tp", [3, 7]), ("pipeline", [1, 3]), ("pipeline", [1, 1, 1, 1]))
    for method in METHODS:
        for precision, warmup, bar in (("fp64", 5, 1e-9), ("fp32", 50, 1e-4)):
            for one, shares in before.items():
                for other, others in after:
                    if method not in _methods(one) or method not in _methods(other):
                        continue
                    job = {"method": method, "precision": precision, "warmup": warmup, "layers": 4, "dropout": 0.0}
                    sizes = f"{_size(one, shares)} to {_size(other, others)} ranks"
                    name = f"saved under {one}, resumed under {other} {precision} {method} {sizes}"
                    yield (
                        name,
                        bar,
                        lambda j=job, s=(one, shares), o=(other, others): _other_strategy(zygote, begun, j, s, o),
                    )


def _rows_cases(zygote: Zygote) -> Iterator[Case]:
    """Pipelines side by side: cut otherwise, one of a single rank, of three ranks each, and one without work."""
    gangs = (([2, 1, 1, 2], [6, 4]), ([3, 1, 2], [2, 8]), ([1, 1, 1, 1, 1, 1], [7, 3]), ([1, 2, 2, 1], [10, 0]))
    for stages, rows in gangs:
        for method in METHODS:
            words = {"shares": stages, "rows": rows, "strategy": "pipeline", "method": method}
            name = f"gradient under pipelines fp64 {method} {_text(stages)} ({_text(rows)})"
            yield name, 1e-9, lambda w=words: _contract(zygote, {**w, "mixture": False})
            for precision, warmup, bar in (("fp64", 5, 1e-9), ("fp32", 50, 1e-4)):
                more = {**words, "precision": precision, "warmup": warmup, "steps": 100}
                more |= {"packed": True, "checkpointing": True, "dropout": 0.0}
                name = (
                    f"losses of 100 packed steps under pipelines {precision} {method} {_text(stages)} ({_text(rows)})"
                )
                yield name, bar, lambda w=more: _losses(zygote, w)


def _rows_resume_cases(zygote: Zygote, begun: _Begun) -> Iterator[Case]:
    """From two pipelines to the strategies that are most unlike them, to others that are cut anew, and back."""
    pipelines = ("pipeline", [1, 3, 2, 2], [7, 3])
    others = (("ddp", [7, 3]), ("fsdp", [5, 3, 2]), ("pipeline", [2, 1, 1]), ("pipeline", [4, 3, 1], [3, 7]))
    for method in METHODS:
        for precision, warmup, bar in (("fp64", 5, 1e-9), ("fp32", 50, 1e-4)):
            job = {"method": method, "precision": precision, "warmup": warmup, "layers": 4, "dropout": 0.0}
            for other in others:
                for before, after in ((pipelines, other), (other, pipelines)):
                    words = " to ".join(f"{kind} of {_text(shares)}" for kind, shares, *_ in (before, after))
                    name = f"saved beside or under pipelines {precision} {method} {words}"
                    yield name, bar, lambda j=job, s=before, o=after: _other_strategy(zygote, begun, j, s, o)


def _zero_cases(zygote: Zygote) -> Iterator[Case]:
    """DeepSpeed has no fp64."""
    for strategy in ZERO:
        for method in METHODS[:2]:
            for shares in ([5, 3, 2], [3, 0, 7], [7, 3], [1, 2, 3, 4]):
                for mixture in (False, True):
                    words = {"shares": shares, "strategy": strategy, "method": method, "mixture": mixture}
                    name = f"gradient under {strategy} fp32{' mixture of experts' if mixture else ''} {method}"
                    yield f"{name} {_text(shares)}", 1e-5, lambda w=words: _contract(zygote, w)
            for shares in ([5, 3, 2], [3, 0, 7], [7, 3]):
                words = {"shares": shares, "strategy": strategy, "method": method, "precision": "fp32", "warmup": 50}
                words |= {"steps": 100, "packed": True, "checkpointing": True}
                name = f"losses of 100 packed steps under {strategy} fp32 {method} {_text(shares)}"
                yield name, 1e-4, lambda w=words: _losses(zygote, w)


def _zero_resume_cases(zygote: Zygote, begun: _Begun) -> Iterator[Case]:
    """Each from and to the strategies that are most unlike it, and from one of DeepSpeed's to the next."""
    sizes = {2: [7, 3], 3: [5, 3, 2], 4: [1, 2, 3, 4]}
    stages = {2: [1, 3], 3: [2, 1, 1], 4: [1, 1, 1, 1]}
    for method in METHODS[:2]:
        job = {"method": method, "precision": "fp32", "warmup": 50, "layers": 4, "dropout": 0.0}
        for number, zero in enumerate(ZERO):
            pairs = [pair for other in ("ddp", "fsdp", "pipeline") for pair in ((zero, other), (other, zero))]
            for place, (one, other) in enumerate([*pairs, (zero, ZERO[(number + 1) % 3])]):
                size = (2, 4)[(number + place // 2 + place) % 2]
                before = (one, (stages if one == "pipeline" else sizes)[3])
                after = (other, (stages if other == "pipeline" else sizes)[size])
                name = f"saved under {one}, resumed under {other} fp32 {method} 3 to {size} ranks"
                yield name, 1e-4, lambda j=job, s=before, o=after: _other_strategy(zygote, begun, j, s, o)


def _methods(strategy: str) -> tuple[str, ...]:
    return METHODS[:2] if strategy == "tp" else METHODS


def _size(strategy: str, shares: list[int]) -> int:
    """Ranks; the shares of tp are those of hosts with two of them."""
    return (2 if strategy == "tp" else 1) * len(shares)


def _contract(zygote: Zygote, words: dict[str, Any]) -> float:
    ranks = zygote.pool(_size(words["strategy"], words["shares"]))
    if words["strategy"] == "tp":
        halves = {(10,): [5], (6, 4): [3, 2]}  # of five micro-batches of two samples
        shares = halves[tuple(words["shares"])]
        results = ranks.run(cases_tensor_parallel.contract, shares=shares, method=words["method"])
        return max(step[part] for result in results for step in result["steps"] for part in ("error", "norm_error"))
    if words["strategy"] == "pipeline":
        more = {"method": words["method"], "mixture": words["mixture"], "rows": words.get("rows", [10])}
        results = ranks.run(cases_pipeline.contract, stages=words["shares"], **more)
        return max(step[part] for result in results for step in result["steps"] for part in ("error", "norm_error"))
    results = ranks.run(cases_zero.gradient if words["strategy"] in ZERO else cases_loop.contract, **words)
    return max(max(result["error"], result["norm_error"]) for result in results)


class _Begun:
    """Runs that several cases go on from, or are compared with: done once, as long as nobody asks for another."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="begun-"))
        self._runs: dict[str, tuple[str, list[dict[str, Any]]]] = {}

    def run(self, name: str, zygote: Zygote, *words: Any, **changes: Any) -> tuple[Path, list[dict[str, Any]]]:
        """Its folder, and what its ranks said. name: those of one name replace each other; words: see `_piece`."""
        key = json.dumps([words, changes], sort_keys=True)
        if self._runs.get(name, ("", []))[0] != key:
            shutil.rmtree(self._folder / name, ignore_errors=True)
            self._runs[name] = key, _piece(zygote, str(self._folder / name), *words, **changes)
        return self._folder / name, self._runs[name][1]

    def close(self) -> None:
        """Take the folders away."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _other_strategy(zygote: Zygote, begun: _Begun, job: dict[str, Any], before: Gang, after: Gang) -> float:
    """Relative difference of losses; the samples of every step must be the same, in the same order."""
    one, other = ({"strategy": kind, "rows": rows[0] if rows else [10]} for kind, _, *rows in (before, after))
    _, whole = begun.run("whole", zygote, [10], job)
    cut, first = begun.run("cut", zygote, before[1], job, stop_after=9, **one)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(cut, f"{folder}/cut")
        second = _piece(zygote, f"{folder}/cut", after[1], job, resume_step=9, **other)
    assert sample_order(first, second) == sample_order(whole), "other samples"
    return _worst(first[0]["losses"] + second[0]["losses"], whole[0]["losses"])


def _gradient(zygote: Zygote, words: dict[str, Any]) -> float:
    results = zygote.pool(3).run(cases_exact.gradient, **words)
    assert all(result["equal"] for result in results), "ranks hold different gradients"
    return max(result["error"] for result in results)


def _own_gradient(zygote: Zygote, words: dict[str, Any]) -> float:
    results = zygote.pool(len(words["shares"])).run(cases_rank_settings.gradient, **words)
    return max(result["error"] for result in results)


def _own_losses(zygote: Zygote, words: dict[str, Any]) -> float:
    result = zygote.pool(len(words["shares"])).run(cases_rank_settings.losses, timeout_s=600, **words)[0]
    assert result["equal"], "ranks hold different weights"
    return _worst(result["split"], result["alone"])


def _own_rounds(zygote: Zygote, words: dict[str, Any]) -> float:
    results = zygote.pool(len(words["shares"])).run(cases_rank_settings.rounds, timeout_s=300, **words)
    return max(max(_worst(each["split"], each["alone"]), each["moved"]) for each in results)


def _losses(zygote: Zygote, words: dict[str, Any]) -> float:
    ranks = zygote.pool(_size(words.get("strategy", "ddp"), words["shares"]))
    result = ranks.run(cases_exact.losses, timeout_s=300, **words)[0]
    return _worst(result["split"], result["alone"])


def _offloaded(zygote: Zygote, words: dict[str, Any]) -> float:
    result = zygote.pool(len(words["shares"])).run(cases_offload.parts, **words)[0]
    return _worst(result["split"], result["alone"])


def _moving(zygote: Zygote, words: dict[str, Any]) -> float:
    """The same samples in the same order are asserted in tests/train/test_moving.py."""
    result = zygote.pool(3).run(cases_moving.losses, timeout_s=300, steps=200, **words)[0]
    assert len({tuple(shares) for shares in result["shares"] if sum(shares) == 6}) >= 3, "shares did not move"
    return _worst(result["split"], result["alone"])


def _evaluation(zygote: Zygote, words: dict[str, Any]) -> float:
    results = zygote.pool(3).run(cases_exact.evaluation, **words)
    return max(abs(split["loss"] / alone["loss"] - 1) for split, alone in results)


def _same_ranks(zygote: Zygote, job: dict[str, Any], step: int) -> float:
    """Relative difference of losses; weights and sample order must be equal to the bit."""
    with tempfile.TemporaryDirectory() as folder:
        whole = _piece(zygote, f"{folder}/whole", [5, 3, 2], job)
        first = _piece(zygote, f"{folder}/cut", [5, 3, 2], job, stop_after=step)
        second = _piece(zygote, f"{folder}/cut", [5, 3, 2], job, resume_step=step)
    for rank in range(3):
        assert first[rank]["samples"] + second[rank]["samples"] == whole[rank]["samples"], "other samples"
        assert second[rank]["digest"] == whole[rank]["digest"], "other weights"
    return _worst(first[0]["losses"] + second[0]["losses"], whole[0]["losses"])


def _other_ranks(zygote: Zygote, job: dict[str, Any], stops: list[int]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        whole = _piece(zygote, f"{folder}/whole", [4, 3, 3], job)
        pieces = [
            _piece(zygote, f"{folder}/cut", [5, 3, 2], job, stop_after=stops[0]),
            _piece(zygote, f"{folder}/cut", [7, 3], job, resume_step=stops[0], stop_after=stops[1]),
            _piece(zygote, f"{folder}/cut", [1, 2, 3, 4], job, resume_step=stops[1]),
        ]
    return _worst([loss for piece in pieces for loss in piece[0]["losses"]], whole[0]["losses"])


def _piece(zygote: Zygote, folder: str, shares: list[int], job: dict[str, Any], **changes: Any) -> list[dict[str, Any]]:
    words = {"folder": folder, "shares": shares, "steps": 24, "resume_step": None, "stop_after": None, "job": job}
    ranks = zygote.pool(_size(changes.get("strategy", "ddp"), shares))
    return ranks.run(cases_resume.piece, **{**words, **changes})


def _worst(ours: list[Any], expected: list[Any]) -> float:
    assert [entry[0] for entry in ours] == [entry[0] for entry in expected], "other steps"
    return max(abs(one[1] / other[1] - 1) for one, other in zip(ours, expected, strict=True))


def _text(shares: list[int]) -> str:
    return "/".join(str(share) for share in shares)


def commit() -> str:
    """The code that is measured."""
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()


def read_lines(path: Path) -> dict[str, dict[str, Any]]:
    """Case -> its line, of a file that may not be there."""
    if not path.exists():
        return {}
    lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return {line["case"]: line for line in lines}


def _print_table(done: dict[str, dict[str, Any]]) -> None:
    """Worst figure of each kind: names that differ in shares, steps and seeds only are one row."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for name, line in done.items():
        words = name.split()
        kind = " ".join(words[: next(i for i, w in enumerate(words) if w in METHODS or "/" in w) + 1])
        kinds.setdefault(kind.rsplit(" ", 1)[0] if "/" in kind.rsplit(" ", 1)[-1] else kind, []).append(line)
    print("\n| what | cases | worst figure | bar |\n|---|---|---|---|")
    for kind, lines in kinds.items():
        print(f"| {kind} | {len(lines)} | {max(line['figure'] for line in lines):.1e} | {lines[0]['bar']:g} |")
    failed = [line["case"] for line in done.values() if line["figure"] > line["bar"]]
    print(f"\n{len(done)} cases, {len(failed)} over their bar{': ' + '; '.join(failed) if failed else ''}")


if __name__ == "__main__":
    main()
