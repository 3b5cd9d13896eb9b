"""The figures on docs/planning.md and in the examples' READMEs are what our own formulas give."""

import itertools
import re
import shlex
from pathlib import Path

import pytest

from gangline.catalog.models import known_config
from gangline.config.load import load_job
from gangline.planner.architecture import lora_parameters
from gangline.planner.config import read_architecture
from gangline.planner.machines import imagine, link
from gangline.planner.traffic import NF4_BYTES, traffic, wire_bytes
from gangline.planner.training import PlannedStrategy, Training

ROOT = Path(__file__).parents[2]
EXAMPLES = [ROOT / "examples" / name for name in ("home_lan", "two_by_eight", "slurm_llama70b", "zero3_four_by_eight")]
QV = ("q_proj", "v_proj")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
COLUMNS = {
    "ddp, LoRA on q and v": ("qlora", QV, "ddp"),
    "ddp, LoRA on all": ("qlora", ("all-linear",), "ddp"),
    "pipeline, per micro-batch": ("qlora", QV, "pipeline"),
    "FSDP-QLoRA, per micro-batch": ("qlora", QV, "fsdp"),
    "ddp, full, bf16": ("full", ("all-linear",), "ddp"),
    "FSDP, full, per micro-batch": ("full", ("all-linear",), "fsdp"),
}
LINKS = {
    "1 Gbit/s": "1gbit",
    "2.5 Gbit/s": "2.5gbit",
    "10 Gbit/s": "10gbit",
    "100 Gbit/s Ethernet, TCP": "100gbit",
    "HDR InfiniBand, 200 Gbit/s": "hdr",
}


def text(path):
    """Of a document, on one line."""
    return " ".join(path.read_text(encoding="utf-8").split())


def shape(name):
    return read_architecture(known_config(name))


def out_bytes(name, training, strategy, slots):
    """Bytes that one host sends in a step of one micro-batch."""
    done = traffic(shape(name), training, strategy, micro_batches=1)
    return max(wire_bytes(done, slots).out)


def run(method, targets=QV, parameters="bf16", compute="bf16"):
    return Training(
        method=method, micro_batch=1, sequence_length=2048, targets=targets, parameters=parameters, compute=compute
    )


def rows_under(heading):
    """The cells of the table whose first line begins with `heading`."""
    lines = (ROOT / "docs/planning.md").read_text(encoding="utf-8").splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(heading))
    cells = []
    for line in lines[first:]:
        if not line.startswith("|"):
            break
        cells.append([cell.strip() for cell in line.strip("|").split("|")])
    return cells[0], cells[2:]


def test_the_table_of_seconds_on_the_wire():
    head, rows = rows_under("| link | payload |")
    assert head[2:] == list(COLUMNS)
    assert [row[0] for row in rows] == list(LINKS)
    for name, _, *cells in rows:
        rate = link(LINKS[name]).bytes_per_s
        for cell, (method, targets, kind) in zip(cells, COLUMNS.values(), strict=True):
            strategy = PlannedStrategy(kind=kind, world_size=3, shard_size=3, stages=(11, 11, 10))
            parameters = "bf16" if method == "full" else "fp32"
            seconds = out_bytes("Llama-2-7b-hf", run(method, targets, parameters), strategy, (1, 1, 1)) / rate
            half = 0.5 * 10 ** -len(cell.partition(".")[2])
            assert float(cell) == pytest.approx(seconds, abs=half * 1.001), (name, kind, method)


def nf4_gb(name):
    """Gigabytes of weights when linear layers are in 4 bits and the rest in 16."""
    model = shape(name)
    return (model.linear_weights * NF4_BYTES + (model.num_parameters - model.linear_weights) * 2) / 1e9


def hosts_gb(name, kind, *, method="lora", targets=ATTENTION, parameters="fp32", nodes=2, compute="bf16"):
    world = 8 * nodes
    shard = 8 if kind == "hsdp" else world
    training = run(method, targets, parameters, compute)
    return out_bytes(name, training, PlannedStrategy(kind=kind, world_size=world, shard_size=shard), (8,) * nodes) / 1e9


LLAMA, SEVENTY, AIR = "Llama-2-7b-hf", "Llama-2-70b-hf", "GLM-4.5-Air"
ADVICE = {
    "4-bit weights of a 7B model: 2.8 GB | 3.9 GB": lambda: nf4_gb(LLAMA),
    '13B in 4 bits: "needs model parallelism inside each machine" | 7.2 GB': lambda: nf4_gb("Llama-2-13b-hf"),
    '`device_map="balanced"` | 36.4 GB of weights': lambda: nf4_gb(SEVENTY),
    "8 bits instead of 4 | 3.1 GB more": lambda: shape(LLAMA).linear_weights * (1 - NF4_BYTES) / 1e9,
    "100 ms would take a link of 171 Gbit/s": lambda: 2 * 2 / 3 * 1.6 / 0.1 * 8,
    "over 1 Gbit/s takes 100 ms | 18 s": lambda: 2 * 2 / 3 * 1.6e9 / link("1gbit").bytes_per_s,
    "over 2 x 8 cards: 401 GB": lambda: hosts_gb(AIR, "fsdp"),
    "Hybrid: 0.13 GB": lambda: hosts_gb(AIR, "hsdp"),
    "the 106.9 billion weights of GLM-4.5-Air, 99.7 stay": lambda: (
        sum(layer.count * layer.fused_weights for layer in shape(AIR).layers) / 1e9
    ),
    "with `all-linear` and rank 16 these are 1.8 billion": lambda: (
        lora_parameters(shape(AIR), 16, ("all-linear",)) / 1e9
    ),
    "everything is 2.0 GB": lambda: shape("gpt2").num_parameters * 16 / 1e9,
    "minimum for ZeRO-3 | 36 s": lambda: (
        hosts_gb(LLAMA, "zero-3", method="full", parameters="bf16", nodes=4) * 1e9 / link("10gbit").bytes_per_s
    ),
}


@pytest.mark.parametrize("phrase", ADVICE)
def test_a_figure_on_the_page(phrase):
    assert phrase in text(ROOT / "docs/planning.md")
    said = re.findall(r"\d+(?:\.\d+)?", phrase)[-1]
    half = 0.5 * 10 ** -len(said.partition(".")[2])
    assert float(said) == pytest.approx(ADVICE[phrase](), abs=half * 1.001)


READMES = {
    ("home_lan", "7.2 GB of weights"): lambda: nf4_gb("Llama-2-13b-hf"),
    ("home_lan", "36 GB of weights"): lambda: nf4_gb(SEVENTY),
    ("two_by_eight", "The weights are 214 GB"): lambda: shape(AIR).num_parameters * 2 / 1e9,
    ("two_by_eight", "a copy in the other, 27 GB"): lambda: shape(AIR).num_parameters * 2 / 8e9,
    ("two_by_eight", "leave it: 0.13 GB"): lambda: hosts_gb(AIR, "hsdp"),
    ("two_by_eight", "trained numbers, 7.3 GB"): lambda: hosts_gb(AIR, "hsdp", targets=("all-linear",)),
    ("slurm_llama70b", "over all 32 cards, 34.5 GB"): lambda: shape(SEVENTY).num_parameters * 16 / 32e9,
    ("slurm_llama70b", "then brings 401 to 535 GB"): lambda: hosts_gb(SEVENTY, "fsdp", method="full", nodes=4),
    ("slurm_llama70b", "per card, and 1.2 GB"): lambda: hosts_gb(SEVENTY, "hsdp", targets=("all-linear",), nodes=4),
    ("zero3_four_by_eight", "ddp sends 0.96 GB"): lambda: hosts_gb("gpt2", "ddp", method="full", nodes=4),
    ("zero3_four_by_eight", "ZeRO-3 would send 3.9 GB"): lambda: (
        4 * hosts_gb("gpt2", "zero-3", method="full", nodes=4, compute="fp16")
    ),
}


@pytest.mark.parametrize(("folder", "phrase"), READMES)
def test_a_figure_in_an_example(folder, phrase):
    assert phrase in text(ROOT / "examples" / folder / "README.md")
    said = re.findall(r"\d+(?:\.\d+)?", phrase)[-1]
    half = 0.5 * 10 ** -len(said.partition(".")[2])
    assert float(said) == pytest.approx(READMES[folder, phrase](), abs=half * 1.001)


def plan_commands(folder):
    """The arguments of every `gangline plan` of named machines in a README."""
    prose = (folder / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    return [shlex.split(line)[2:] for line in prose.splitlines() if re.match("gangline plan .*--hosts", line)]


@pytest.mark.parametrize("folder", EXAMPLES, ids=lambda folder: folder.name)
def test_an_example_can_be_planned_as_it_says(folder, monkeypatch):
    monkeypatch.chdir(folder)  # where words of the command line begin
    commands = plan_commands(folder)
    assert commands
    for arguments in commands:
        options = dict(itertools.pairwise(arguments))
        overrides = [word for word in arguments[1:] if re.match(r"[a-z_.]+=", word) and word != options["--hosts"]]
        job = load_job(folder / arguments[0], overrides)
        assert known_config(options.get("--model", job.model.path)), folder
        assert imagine(options["--hosts"])
        assert link(options["--link"])
        for file in job.data.train.files:
            assert Path(file).stat().st_size > 0
