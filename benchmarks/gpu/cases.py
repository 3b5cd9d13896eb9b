"""The table: what is run on a machine with a GPU, in the order of worth. Whatever adds device code adds its row."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One command. {python} stands for this Python, {out} for the folder of results."""

    name: str
    argv: tuple[str, ...]
    expected_s: float
    """About how long it takes on one H100: it is not begun with less time left."""
    limit_s: float
    """It is killed then, with all processes that it has started."""
    shows: str
    num_gpus: int = 1
    at_once: bool = False
    """Its processes exchange over one card: they compute at the same time, by CUDA's MPS, where that can be started.
    Else the driver gives them the card in turns, and an exchange of a few bytes takes some ten milliseconds.
    """


TOGETHER = 6
"""Processes of pytest that share the card, where nothing is timed. Each of them imports everything once."""


FEW = 2
"""The same where each of them has gangs of up to four ranks: MPS takes 48 processes."""


def _tests(name: str, *words: str, expected_s: float, shows: str, at_once: bool = False) -> Case:
    # where it is installed, pytest-benchmark warns of `-n`, and warnings are errors
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:benchmark", "-n", str(FEW if at_once else TOGETHER))
    argv = ("{python}", "-m", "pytest", *options, *words)
    limit_s = max(180.0, 5 * expected_s)
    return Case(name=name, argv=argv, expected_s=expected_s, limit_s=limit_s, shows=shows, at_once=at_once)


def _files(*names: str) -> tuple[str, ...]:
    """Files of tests/train: several in a case, for every case imports everything anew, once for each process."""
    return tuple(f"tests/train/test_{name}.py" for name in names)


def _speed(name: str, *rows: str, seconds: float, words: tuple[str, ...] = ()) -> Case:
    """Rows of the speed table; all of them have one file, and what is in it is not measured again."""
    argv = ("{python}", "-m", "benchmarks.speed_table", "--out", "{out}/speed_table.jsonl", "--again", "--rows", *rows)
    return Case(
        name=name,
        argv=(*argv, "--seconds", f"{seconds:g}", *words),
        expected_s=seconds,
        limit_s=2 * seconds,
        shows=f"speed, memory and losses of our loop beside TRL with Liger and HF Trainer: {', '.join(rows)}",
    )


CASES = (
    _tests(
        "private-names",
        *_files("compat"),
        expected_s=20,
        shows="the installed torch, transformers and DeepSpeed have every private name that gangline takes",
    ),
    _tests(
        "card",
        *("-m", "gpu", *_files("gpu", "kernels", "prefork", "checkpoint")),
        expected_s=60,
        shows="a step waits for the card once; kernels, facts, samples, forked ranks, saves, a lack of memory",
    ),
    Case(
        name="kernels",
        argv=("{python}", "-m", "benchmarks.kernels", "--seconds", "30", "--out", "{out}/kernels.jsonl"),
        expected_s=45,
        limit_s=180,
        shows="milliseconds and memory of every kernel beside torch's operators, and Liger's",
    ),
    _speed(
        "speed-1b",
        "1b-lora-2048",
        seconds=75,
        words=("--sides", "ours", "trl-liger", "hf", "ours-torch", "--profile", "{out}"),
    ),
    _tests(
        "numbers",
        *("-m", "gpu", *_files("nf4", "compiled", "offload", "adam8", "benchmark")),
        expected_s=90,
        shows="full, LoRA, QLoRA, 8-bit moments and offloading have the losses of a processor, and of HF Trainer",
    ),
    _tests(
        "ranks-on-one-card",
        *("-m", "gpu", *_files("contract", "resume", "broken")),
        expected_s=150,
        at_once=True,
        shows="strategies train over NCCL and gloo as one process does, resume to the bit, and outlive their peers",
    ),
    _speed("speed-8b", "8b-lora-2048", "8b-qlora-2048", seconds=150),
    _speed("speed-1b-more", "1b-full-2048", "1b-lora-2048-one-document", "1b-lora-8192", seconds=90),
    Case(
        name="plan-first",
        argv=(
            *("{python}", "-m", "benchmarks.gpu_plan", "--out", "{out}/plan.jsonl", "--seconds", "40"),
            *(
                "--only",
                "1b-lora-packed",
                "8b-lora",
                "8b-qlora-recomputed",
                "1b-full",
                "moe-lora",
                "8b-lora-8192-packed",
            ),
        ),
        expected_s=60,
        limit_s=180,
        shows="the plan's memory of the six most telling settings beside the allocator's, then times of some of them",
    ),
    Case(
        name="plan",
        argv=("{python}", "-m", "benchmarks.gpu_plan", "--out", "{out}/plan.jsonl", "--seconds", "180"),
        expected_s=190,
        limit_s=400,
        shows="the plan's memory of 30 settings beside the allocator's, and its times after `bench compute`",
    ),
    _speed("speed-compiled", "1b-lora-2048", seconds=110, words=("--sides", "ours", "ours-compiled")),
    _speed("speed-8b-more", "8b-lora-8192", "8b-full-2048", "8b-lora-8192-recompute", seconds=170),
    _speed("speed-families", "qwen3-8b-lora-2048", "moe-lora-2048", seconds=130),
    _tests(
        "contract",
        *("-m", "not gpu", *_files("contract")),
        expected_s=400,
        shows="every strategy trains alike with the library versions of this machine (on its processors)",
    ),
)
"""The most instructive minute first: what proves that the device code is right, then how fast it is."""
