"""Every adapter option, optimizer and schedule: one process against its reference, and any split against one process.

    python -m benchmarks.adapter_options --out adapter-options.jsonl

One JSON line per case (its figure, its bar, the commit); cases that the file has already are passed over, so that a
run can be continued. 20 steps each; the figure is the largest relative difference of a loss, over ranks of gloo. What
the capability table refuses counts as a case, too: the ranks have to refuse it by the same key. The last lines printed
are a table for RESULTS.md.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.exactness import commit, read_lines
from gangline.optimizers import EIGHT_BITS
from gangline.runs.job import MethodJob
from gangline.strategies.base import Asked, Violation, extras_of, violations
from gangline.strategies.table import plan_half
from tests.train import cases_adapters, cases_optimizers
from tests.train.pool import Ranks, Zygote
from tests.train.tolerances import FP32, FP64, SAME_SUMS

Words = Mapping[str, Any]
"""What `cases_adapters.option_job` is asked for, besides the folder."""
Measured = tuple[float, str]
"""A figure, and the key by which it was refused instead."""
Case = tuple[str, float | Callable[[], float], Callable[[], Measured]]
"""Name, bar, and what gives the figure."""

GANGS: dict[str, dict[str, Any]] = {
    "ddp": {"shares": [5, 3, 2]},
    "fsdp": {"shares": [5, 3, 2]},
    "hsdp": {"shares": [1, 2, 3, 4]},
    "tp": {"shares": [6, 4]},
    "pipeline": {"shares": [2, 1, 1]},
    "zero-1": {"shares": [5, 3, 2]},
    "zero-2": {"shares": [5, 3, 2]},
    "zero-3": {"shares": [5, 3, 2]},
    "local-sgd": {"shares": [5, 3, 2]},
}
"""Of tp the shares are those of two hosts with two ranks each, of pipelines the layers of each rank."""
TABLES = ["embed_tokens", "lm_head"]
EXPERTS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], "targets": ["q_proj"]}
NAMED = {"targets": ["q_proj", "down_proj"]}
SOME = ["q_proj", "down_proj"]
BY_MEAN = list(range(258, 310))
ADD = [f"<{number}>" for number in range(52)]
OPTIONS: dict[str, tuple[Words, Words | None]] = {
    "plain": ({"options": {}}, {}),
    "rslora": ({"options": {"rslora": True}}, {"use_rslora": True}),
    "gaussian": ({"options": {"init": "gaussian"}}, {"init_lora_weights": "gaussian"}),
    "orthogonal": ({"options": {"init": "orthogonal"}}, {"init_lora_weights": "orthogonal"}),
    "dora": ({"options": {"dora": True}}, {"use_dora": True}),
    "pissa": ({"options": {"init": "pissa"}}, {"init_lora_weights": "pissa"}),
    "pissa by iterations": ({"options": {"init": "pissa_niter_4"}}, None),  # each draws, peft once for all layers
    "olora": ({"options": {"init": "olora"}}, {"init_lora_weights": "olora"}),
    "rank pattern": (
        {"options": {"rank_pattern": {"q_proj": 2, "layers.1.*": 6}}},
        {"rank_pattern": {"q_proj": 2, "layers.1.*": 6}},
    ),
    "alpha pattern": ({"options": {"alpha_pattern": {"down_proj": 3.0}}}, {"alpha_pattern": {"down_proj": 3.0}}),
    "targets by name": ({"options": NAMED}, {"target_modules": SOME}),
    "targets by expression": (
        {"options": {"targets": [r"regex:model\.layers\.\d\.mlp\.(gate|down)_proj"]}},
        {"target_modules": r"model\.layers\.\d\.mlp\.(gate|down)_proj"},
    ),
    "target of the table": (
        {"options": {"targets": ["embed_tokens", "q_proj"]}},
        {"target_modules": ["embed_tokens", "q_proj"]},
    ),
    "exclude": ({"options": {"exclude": ["v_proj"]}}, {"exclude_modules": ["v_proj"]}),
    "exclude by expression": ({"options": {"exclude": ["regex:.*up_proj"]}}, {"exclude_modules": ".*up_proj"}),
    "layers": ({"options": {"layers": [1, 2, 3]}}, {"target_modules": r"model\.layers\.[123]\..*_proj"}),
    "layers of names": (
        {"options": {"layers": [0, 2, 3], **NAMED}},
        {"target_modules": SOME, "layers_to_transform": [0, 2, 3]},
    ),
    "modules to save": ({"options": {"modules_to_save": TABLES}}, {"modules_to_save": TABLES}),
    "modules to save, tied": (
        {"options": {"modules_to_save": ["embed_tokens"]}, "tied": True},
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "rows of tokens": ({"options": {"train_tokens": [5, 7]}}, {"trainable_token_indices": [5, 7]}),
    "rows of tokens, tied": ({"options": {"train_tokens": [5, 7]}, "tied": True}, {"trainable_token_indices": [5, 7]}),
    "tokens added": (
        {"options": {"train_tokens": ["added"]}, "add": ADD},
        {"trainable_token_indices": dict.fromkeys(TABLES, BY_MEAN)},
    ),
    "tokens added, tied": (
        {"options": {"train_tokens": ["added"]}, "add": ADD, "tied": True},
        {"trainable_token_indices": BY_MEAN},
    ),
    "tokens added, whole tables": ({"options": {"modules_to_save": TABLES}, "add": ADD}, {"modules_to_save": TABLES}),
    "tensors of experts": ({"options": EXPERTS, "precision": "fp32"}, {
        "target_parameters": EXPERTS["target_parameters"], "target_modules": EXPERTS["targets"],
    }),
    "adapter": ({"options": {}, "begun": "plain"}, None),
    "adapter with dora": ({"options": {"dora": True, "rank_pattern": {"q_proj": 2}}, "begun": "dora"}, None),
    "dropout": ({"options": {"dropout": 0.1}}, None),
    "many at once": (
        {"options": {"dora": True, "rslora": True, "rank_pattern": {"q_proj": 2}, "modules_to_save": ["lm_head"]}},
        {"use_dora": True, "use_rslora": True, "rank_pattern": {"q_proj": 2}, "modules_to_save": ["lm_head"]},
    ),
    "qlora": ({"options": {"kind": "qlora", "rslora": True, "rank_pattern": {"q_proj": 2}}}, None),
    "qlora, whole tables": ({"options": {"kind": "qlora", "bits": 8, "modules_to_save": TABLES}}, None),
    "qlora, rows of tokens": ({"options": {"kind": "qlora", "train_tokens": [5, 7]}}, None),
    "qlora with dora": ({"options": {"kind": "qlora", "dora": True}}, None),
    "qlora with pissa": ({"options": {"kind": "qlora", "init": "pissa"}}, None),
    "dora with olora": ({"options": {"dora": True, "init": "olora"}}, None),
}  # fmt: skip
"""Name -> what is asked for, and what means the same for peft; None: one process is not compared with it here."""
OPTIMIZERS: dict[str, Words] = {
    "adamw": {"kind": "adamw", "learning_rate": 3e-3},
    "sgd": {"kind": "sgd", "learning_rate": 0.05, "momentum": 0.9, "nesterov": True},
    "lion": {"kind": "lion", "learning_rate": 1e-3},
    "adafactor": {"kind": "adafactor", "learning_rate": 3e-3},
    "muon": {"kind": "muon", "learning_rate": 3e-3},
    "adamw-8bit": {"kind": "adamw-8bit", "learning_rate": 3e-3},
    "paged-adamw-8bit": {"kind": "paged-adamw-8bit", "learning_rate": 3e-3},
}
SCHEDULES: dict[str, tuple[Words, str, Words]] = {
    "constant": ({"kind": "constant"}, "constant_with_warmup", {}),
    "linear": ({"kind": "linear"}, "linear", {}),
    "cosine": ({"kind": "cosine", "final_ratio": 0.1}, "cosine_with_min_lr", {"min_lr_rate": 0.1}),
    "cosine-restarts": ({"kind": "cosine-restarts", "cycles": 2}, "cosine_with_restarts", {"num_cycles": 2}),
    "polynomial": (
        {"kind": "polynomial", "power": 2.0, "final_ratio": 0.1}, "polynomial", {"power": 2.0, "lr_end": 3e-4},
    ),
    "inverse-sqrt": ({"kind": "inverse-sqrt", "timescale": 4}, "inverse_sqrt", {"timescale": 4}),
    **{
        f"wsd, {decay}": (
            {"kind": "wsd", "decay_steps": 8, "decay": decay},
            "warmup_stable_decay", {"num_decay_steps": 8, "decay_type": decay},
        )
        for decay in ("cosine", "linear", "1-sqrt")
    },
}  # fmt: skip
"""Name -> the job's words, and what transformers calls it, with its words."""
WARMUP = {"warmup_steps": 4, "warmup_from_zero": True}


def main() -> None:
    """Do every case that the file does not have, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="cases with this in their name, such as pissa")
    parser.add_argument("--stride", type=int, default=1, help="first every Nth case, so that a part covers all kinds")
    arguments = parser.parse_args()
    done = read_lines(arguments.out)
    zygote = Zygote()
    try:
        with tempfile.TemporaryDirectory(prefix="options-") as folder:
            asked = enumerate(cases(zygote.pool, folder))
            for _, (name, bar, measure) in sorted(asked, key=lambda numbered: numbered[0] % arguments.stride):
                if name in done or arguments.only not in name:
                    continue
                line = {"case": name, "bar": bar, "commit": commit()}
                try:
                    line["figure"], line["refused"] = measure()
                    if callable(bar):
                        line["bar"] = FP32 if line["refused"] else bar()
                except AssertionError as error:  # RankFailure, too
                    line |= {"bar": 0.0, "figure": math.inf, "refused": "", "error": str(error)[-2000:]}
                with arguments.out.open("a", encoding="utf-8") as stream:
                    stream.write(json.dumps(line) + "\n")
                print(
                    f"{line['refused'] or format(line['figure'], '.2e'):>28}  bar {line['bar']:.2g}  {name}", flush=True
                )
    finally:
        zygote.close()
    _print_table(read_lines(arguments.out))


def cases(pool: Callable[[int], Ranks], folder: str) -> Iterator[Case]:
    """All: references; options, schedules and optimizers under each strategy; options by each optimizer."""
    sides = Sides(pool, folder)
    yield from _reference_cases(sides)
    for strategy in GANGS:
        for kind, name, words in _asked():
            if (strategy, name) == ("pipeline", "dropout"):  # stages draw other masks
                continue
            if strategy == "local-sgd" and words["options"].get("kind") == "full":
                continue  # its rounds are no steps of one process: see tests/train/test_local_sgd.py
            yield _split_case(sides, f"{kind} under {strategy}: {name}", words, strategy)
    for number, (name, (words, _)) in enumerate(OPTIONS.items()):
        for place, optimizer in enumerate(("sgd", "lion", "adafactor", "muon")):
            strategy = ("ddp", "fsdp", "hsdp" if name == "dropout" else "pipeline", "hsdp")[(number + place) % 4]
            more = {**words, "optimizer": OPTIMIZERS[optimizer]}
            yield _split_case(sides, f"option by {optimizer}: {name}, under {strategy}", more, strategy)


def _reference_cases(sides: Sides) -> Iterator[Case]:
    for name, (words, config) in OPTIONS.items():
        if config is not None:
            bar = FP32 if "precision" in words or words["options"].get("init") in ("pissa", "olora") else FP64
            yield f"option by peft: {name}", bar, functools.partial(sides.by_peft, words, config)
    for name, (schedule, theirs, more) in SCHEDULES.items():
        measure = functools.partial(sides.by_peft, _scheduled(schedule), {}, scheduler=[theirs, more])
        yield f"schedule by transformers: {name}", FP64, measure
    for name in ("sgd", "lion", "adafactor", "muon"):
        for method in ("full", "lora"):
            measure = functools.partial(sides.by_reference, name, method)
            yield f"optimizer by its reference: {name} {method}", 0.0 if name == "muon" else SAME_SUMS, measure


def _asked() -> Iterator[tuple[str, str, Words]]:
    """What is asked of every strategy: its kind, its name, and the words."""
    for name, (words, _) in OPTIONS.items():
        yield "option", name, words
    for name, (schedule, _, _) in SCHEDULES.items():
        yield "schedule", name, _scheduled(schedule)
    for name, optimizer in OPTIMIZERS.items():
        for method in ("full", "lora", "qlora"):
            yield "optimizer", f"{name} {method}", {"options": {"kind": method}, "optimizer": optimizer}


def _scheduled(schedule: Words) -> Words:
    return {"options": {}, "schedule": {**schedule, **WARMUP}}


def _split_case(sides: Sides, name: str, words: Words, strategy: str) -> Case:
    """DeepSpeed has no fp64, nor do moments of 8 bits, which small matrices do not have."""
    words = {"layers": 4, **words}
    kind = words.get("optimizer", {}).get("kind")
    if kind in EIGHT_BITS:
        words |= {"width": 64, "options": {"rank": 64, **words["options"]}}
    if strategy.startswith("zero") or kind in EIGHT_BITS:
        words |= {"precision": "fp32"}
    bar = FP32 if words.get("precision") == "fp32" else FP64
    split = functools.partial(sides.split, words, strategy)
    return name, functools.partial(sides.bar_of_8_bits, words) if kind in EIGHT_BITS else bar, split


class Sides:
    """What is compared: the losses of ranks, of one process (computed once for all strategies), and of references."""

    def __init__(self, pool: Callable[[int], Ranks], folder: str) -> None:
        self._pool = pool
        self._folder = folder
        self._alone: dict[str, list[float]] = {}

    def split(self, words: Words, strategy: str) -> Measured:
        """Ranks against one process."""
        gang = {**GANGS[strategy], "strategy": strategy}
        ranks = self._pool(len(gang["shares"]) * (2 if strategy == "tp" else 1))
        found = ranks.run(cases_adapters.losses_of, timeout_s=300, gang=gang, folder=self._folder, **words)
        if refusal := refusal_of(words, strategy):
            said = {each.get("refused", {}).get("what") for each in found}
            assert said == {f"cannot train this job: {refusal.what}"}, f"the table says {refusal.what}, ranks {said}"
            return 0.0, refusal.key
        assert "losses" in found[0], found[0]
        return worst(found[0]["losses"], self._losses_alone(words)), ""

    def bar_of_8_bits(self, words: Words) -> float:
        """Twice what one process is from itself where it adds up in another order: a sum that is off by its last bit
        changes a moment by one of 256 levels.
        """
        return max(FP32, 2 * worst(self._losses_alone({**words, "micro_batch": 2}), self._losses_alone(words)))

    def by_peft(self, words: Words, config: Words, scheduler: Any = None) -> Measured:
        """One process against peft in a plain loop of torch."""
        run = self._pool(1).run
        more = {"folder": self._folder, "config": config, "scheduler": scheduler, "layers": 4, **words}
        found = run(cases_adapters.by_peft_too, timeout_s=300, **more)[0]
        return worst(found["alone"], found["peft"]), ""

    def by_reference(self, name: str, method: str) -> Measured:
        """How far weights are from those of the reference, over how far they moved."""
        numbers = {key: value for key, value in OPTIMIZERS[name].items() if key not in ("kind", "learning_rate")}
        words = {"kind": name, "rate": OPTIMIZERS[name]["learning_rate"], "words": numbers, "method": method}
        precision = "fp32" if name == "muon" else "fp64"  # its products are in bf16, by the same operations
        run = self._pool(1).run
        found = run(cases_optimizers.beside_reference, timeout_s=300, precision=precision, **words)[0]
        return float(found["far"]), ""

    def _losses_alone(self, words: Words) -> list[float]:
        key = json.dumps(words, sort_keys=True)
        if key not in self._alone:
            more = {"folder": self._folder, **words}
            found = self._pool(1).run(cases_adapters.losses_of, timeout_s=300, gang=None, **more)[0]
            self._alone[key] = found["losses"]
        return self._alone[key]


def refusal_of(words: Words, strategy: str) -> Violation | None:
    """What the capability table, which `plan` reads, refuses first."""
    method = replace(MethodJob(kind="lora"), **words["options"])
    asked = Asked(
        method=method.kind,
        precision=words.get("precision", "fp64"),
        parameters="fp32" if words.get("precision") == "fp32" else "compute",
        optimizer=words.get("optimizer", {}).get("kind", "adamw"),
        extras=extras_of(method, compiles=False),
    )
    return next(iter(violations(plan_half(strategy), asked)), None)


def worst(ours: list[float], expected: list[float]) -> float:
    """The largest relative difference."""
    return max(abs(one / other - 1) for one, other in zip(ours, expected, strict=True))


def _print_table(done: Mapping[str, Mapping[str, Any]]) -> None:
    """A row for each kind of case: the part of its name before the colon."""
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for name, line in done.items():
        kinds.setdefault(name.partition(":")[0], []).append(line)
    print("\n| what | cases | refused | worst in fp64 | worst in fp32 |\n|---|---|---|---|---|")
    for kind, lines in kinds.items():
        trained = [line for line in lines if not line["refused"]]
        halves = [[line["figure"] for line in trained if (line["bar"] >= FP32) is narrow] for narrow in (False, True)]
        figures = " | ".join(f"{max(half):.1e} ({len(half)})" if half else "-" for half in halves)
        print(f"| {kind} | {len(lines)} | {len(lines) - len(trained)} | {figures} |")
    failed = [name for name, line in done.items() if line["figure"] > line["bar"]]
    print(f"\n{len(done)} cases, {len(failed)} over their bar{': ' + '; '.join(failed) if failed else ''}")


if __name__ == "__main__":
    main()
