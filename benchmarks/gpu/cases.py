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


TOGETHER = 6
"""Processes of pytest that share the card, where nothing is timed. Each of them imports everything once."""


def _tests(name: str, *words: str, expected_s: float, shows: str) -> Case:
    # where it is installed, pytest-benchmark warns of `-n`, and warnings are errors
    argv = (
        "{python}",
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:benchmark",
        "-n",
        str(TOGETHER),
        *words,
    )
    return Case(name=name, argv=argv, expected_s=expected_s, limit_s=max(180.0, 5 * expected_s), shows=shows)


CASES = (
    _tests(
        "private-names",
        "tests/train/test_compat.py",
        expected_s=20,
        shows="the installed torch, transformers and DeepSpeed have every private name that gangline takes",
    ),
    _tests(
        "nccl",
        *("-m", "gpu", "tests/train/test_contract.py"),
        expected_s=120,
        shows="every strategy trains as one process does; its ranks share a card, and NCCL takes each for a host",
    ),
    _tests(
        "waiting",
        *("-m", "gpu", "tests/train/test_gpu.py"),
        expected_s=60,
        shows="a step waits for the card once, and what else only a card can answer",
    ),
    _tests(
        "resume",
        *("-m", "gpu", "tests/train/test_resume.py"),
        expected_s=60,
        shows="three ranks on one card are stopped and go on to the bit",
    ),
    _tests(
        "kernels",
        *("-m", "gpu", "tests/train/test_kernels.py"),
        expected_s=60,
        shows="the kernels of a card have the numbers of plain torch",
    ),
    _tests(
        "lost-peers",
        *("-m", "gpu", "tests/train/test_broken.py"),
        expected_s=60,
        shows="a rank on the card dies, hangs or fails: the others, which wait in NCCL, save their last step",
    ),
    _tests(
        "fork",
        *("-m", "gpu", "tests/train/test_prefork.py"),
        expected_s=30,
        shows="a rank that is forked from a process with all imports computes on the card",
    ),
    _tests(
        "packed-weights",
        *("-m", "gpu", "tests/train/test_nf4.py"),
        expected_s=120,
        shows="full, LoRA and QLoRA have the losses of a processor, in fp32, bf16 and fp16",
    ),
    _tests(
        "checkpoints",
        *("-m", "gpu", "tests/train/test_checkpoint.py"),
        expected_s=30,
        shows="a state on a GPU is saved through pinned memory while it changes",
    ),
    _tests(
        "offloading",
        *("-m", "gpu", "tests/train/test_offload.py"),
        expected_s=60,
        shows="activations in the machine's memory change no gradient, and leave room on the GPU",
    ),
    _tests(
        "eight-bit-moments",
        *("-m", "gpu", "tests/train/test_adam8.py"),
        expected_s=60,
        shows="8-bit AdamW, paged or not, goes on after a resume as without a break",
    ),
    _tests(
        "same-training",
        *("-m", "gpu", "tests/train/test_benchmark.py"),
        expected_s=60,
        shows="our loop and HF Trainer have the same losses on a GPU",
    ),
    Case(
        name="speed-table",
        argv=("{python}", "-m", "benchmarks.speed_table", "--seconds", "170", "--out", "{out}/speed_table.jsonl"),
        expected_s=175,
        limit_s=360,
        shows="tokens per second, MFU, peak memory and losses of our loop beside TRL with Liger and HF Trainer",
    ),
    Case(
        name="plan",
        argv=("{python}", "-m", "benchmarks.gpu_plan", "--out", "{out}/plan.jsonl", "--seconds", "180"),
        expected_s=190,
        limit_s=400,
        shows="the plan's memory of 30 settings beside the allocator's, and its times after `bench compute`",
    ),
    _tests(
        "contract",
        "tests/train/test_contract.py",
        expected_s=400,
        shows="every strategy trains alike with the library versions of this machine (on its processors)",
    ),
)
"""The most instructive minute first: what proves that the device code is right, then how fast it is."""
