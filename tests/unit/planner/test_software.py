"""The software stacks: what the command foresees with them, against peaks that others measured; and what they say."""

import dataclasses
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.plan_gpu_memory import Line, lines, planned_bytes, rows, summary
from gangline.planner.activations import layer_bytes
from gangline.planner.config import read_architecture
from gangline.planner.machines import imagine
from gangline.planner.memory import CUDA, rank_memory
from gangline.planner.memory_fit import MemoryFit
from gangline.planner.reference import page
from gangline.planner.software import STACKS, with_kernels, without_kernels
from gangline.planner.training import GANGLINE, PlannedStrategy, Training
from tests.unit.planner.shapes import LLAMA_2_7B, LLAMA_3_8B, dense

ROOT = Path(__file__).parents[3]
SINGLE = PlannedStrategy(kind="single", world_size=1)
FSDP = PlannedStrategy(kind="fsdp", world_size=2, shard_size=2)
ODD = "prime-rl/4xa6000-Qwen--Qwen3-0.6B-rl-full-4gpu-Recompute-flash_attention_2-65536-cp1-ep1"
"""Its source has 6.3 GiB where the same run on one card has 19.6 and the states take 2.2: fewer tokens than it says."""


@pytest.fixture(scope="module")
def asked() -> list[Line]:
    return lines(rows())


def need(model=LLAMA_2_7B, strategy=SINGLE, **settings):
    asked = {"method": "lora", "micro_batch": 1, "sequence_length": 2048, "checkpointing": True, **settings}
    return rank_memory(model, Training(**asked), strategy, device=CUDA)


@pytest.mark.parametrize(
    ("family", "activation", "taken"),
    [
        ("llama", "silu", True),
        ("llama", "gelu_pytorch_tanh", True),
        ("llama", "gelu_new", True),
        ("llama", "gelu", False),
        ("llama", "quick_gelu", False),
        ("gemma", "gelu", True),  # transformers takes it for the one by tanh
    ],
)
def test_the_kernel_of_gated_layers_is_planned_for_activations_that_it_has(family, activation, taken):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape = read_architecture({"model_type": family, "hidden_act": activation, "vocab_size": 300, **sizes})
    by_kernel, by_torch = (
        layer_bytes(
            shape.layers[0], shape.hidden, Training(method="lora", micro_batch=1, sequence_length=64, stack=each)
        )
        for each in (with_kernels(GANGLINE, ("gated-mlp",), compute="bf16"), without_kernels(GANGLINE))
    )
    assert (by_kernel.kept < by_torch.kept) == taken


def test_the_command_meets_120_measured_peaks_within_6_percent_in_the_mean(asked):
    found = summary(asked)
    assert found["rows"] == 120
    assert found["mean"] <= 0.04


def test_no_row_of_a_measured_stack_is_under_by_more_than_12_percent(asked):
    assert {STACKS[each.stack].known for each in asked if each.error < -0.12} <= {"reasoned"}


def test_two_rows_of_a_measured_stack_in_a_hundred_are_over_by_more_than_12_percent(asked):
    over = [each.row for each in asked if each.error > 0.12 and STACKS[each.stack].known == "measured"]
    assert over == [ODD, "litgpt-hub/falcon-7b/qlora"]


def test_every_measured_software_has_rows_of_its_own(asked):
    counts = Counter(each.source for each in asked)
    assert min(counts[name] for name in ("AnswerDotAI/fsdp_qlora", "Lightning-AI/litgpt")) >= 10
    assert counts["PrimeIntellect-ai/prime-rl"] >= 20


def test_each_stack_says_whether_it_is_measured_and_where_its_facts_are_from():
    for stack in STACKS.values():
        assert stack.about
        assert stack.sources


def test_the_page_of_stacks_is_written_from_the_table():
    told = "run: python -m gangline.planner.reference docs/software.md"
    assert (ROOT / "docs" / "software.md").read_text(encoding="utf-8") == page(), told


@pytest.mark.parametrize("name", ["hf-lora", "hf-qlora", "trl", "axolotl", "unsloth", "torchtune", "litgpt"])
@pytest.mark.parametrize("packed", [False, True])
def test_attention_of_the_stacks_that_people_have_takes_no_square_of_the_length(name, packed):
    method = "qlora" if name == "hf-qlora" else "lora"
    stack = dataclasses.replace(STACKS[name], masks="never")
    assert name == "litgpt" or STACKS[name].masks == "never"
    short, middle, long = (
        need(LLAMA_3_8B, method=method, stack=stack, packed=packed, sequence_length=length).allocated_bytes
        for length in (8192, 16384, 24576)
    )
    assert long - middle == pytest.approx(middle - short, rel=1e-6)


def test_a_kbit_loop_without_autocast_takes_it_where_heads_are_grouped_only():
    def growth(model):
        sizes = [
            need(model, method="qlora", stack=STACKS["hf-kbit"], sequence_length=length).allocated_bytes
            for length in (4096, 8192, 12288)
        ]
        return (sizes[2] - sizes[1]) / (sizes[1] - sizes[0])

    assert growth(dense(4096, 11008, 32, 32000)) == pytest.approx(1.0, abs=0.05)
    assert growth(dense(4096, 11008, 32, 32000, kv=1024)) > 1.5


def test_other_software_than_ours_gives_up_gathered_weights():
    assert [name for name, stack in STACKS.items() if stack.chooses_reshard] == ["gangline", "gangline-cpu"]


def test_kbit_preparation_is_left_out_where_fsdp_has_weights_in_parts():
    one, two = (need(strategy=each, method="qlora", stack=STACKS["hf-qlora"]) for each in (SINGLE, FSDP))
    tables = 2 * 4096 * 32000
    weights = [next(term.num_bytes for term in each.persistent if term.name == "weights") for each in (one, two)]
    assert weights[0] - 2 * weights[1] > 2 * tables - 4096 * 100 - weights[0] * 0.05


def test_adapters_that_lie_in_parts_go_to_the_machines_memory_with_the_weights():
    offload = dataclasses.replace(FSDP, offload=("parameters",))
    names = {name: {term.name for term in need(strategy=offload, stack=STACKS[name]).persistent} for name in STACKS}
    assert names["gangline"] >= {"adapters", "optimizer"}
    assert not names["fsdp-qlora"] & {"weights", "adapters", "optimizer"}


def test_what_the_allocator_holds_is_between_what_tensors_take_and_the_card():
    memory = need(LLAMA_3_8B, micro_batch=4, stack=STACKS["fsdp-qlora"])
    assert memory.reserved_bytes() > memory.factor * memory.allocated_bytes
    assert memory.reserved_bytes(memory.allocated_bytes + 5) == memory.allocated_bytes + 5
    assert memory.reserved_bytes(1) == memory.allocated_bytes
    ours = need(LLAMA_3_8B, stack=GANGLINE)
    assert ours.reserved_bytes() == int(ours.allocated_bytes * ours.factor)
    assert ours.process_bytes() == ours.process.likely


def test_a_figure_is_compared_with_one_of_its_kind():
    fit = MemoryFit(
        architecture=LLAMA_2_7B,
        training=Training(method="lora", micro_batch=1, sequence_length=2048, checkpointing=True),
        placements=imagine("rtx4090"),
    )
    (rank,) = fit.needs(SINGLE)
    sizes = [planned_bytes(rank, kind) for kind in ("allocated", "reserved", "nvsmi-rounded")]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == 3


def test_packed_samples_of_our_trainer_take_no_square_of_the_length_either():
    sizes = [need(LLAMA_3_8B, packed=True, sequence_length=length).allocated_bytes for length in (8192, 16384, 24576)]
    assert sizes[2] - sizes[1] == pytest.approx(sizes[1] - sizes[0], rel=1e-3)
    assert need(LLAMA_3_8B, packed=True, sequence_length=131072).allocated_bytes < 1.02 * (
        need(LLAMA_3_8B, sequence_length=131072).allocated_bytes
    )


@pytest.mark.parametrize("changes", [{"window": 4096}, {"model_type": "opt"}])
def test_where_a_layer_sees_less_than_a_document_packed_samples_need_a_mask(changes):
    layers = tuple(dataclasses.replace(each, window=changes.get("window")) for each in LLAMA_3_8B.layers)
    model = dataclasses.replace(LLAMA_3_8B, layers=layers, model_type=changes.get("model_type", "llama"))
    mask = 2 * 8192 * 8192
    more = need(model, packed=True, sequence_length=8192).allocated_bytes
    assert more > need(model, sequence_length=8192).allocated_bytes + 0.9 * mask


def test_a_window_as_long_as_the_sample_needs_none():
    layers = tuple(dataclasses.replace(each, window=8192) for each in LLAMA_3_8B.layers)
    model = dataclasses.replace(LLAMA_3_8B, layers=layers)
    asked = {"packed": True, "sequence_length": 8192}
    assert need(model, **asked).allocated_bytes == need(LLAMA_3_8B, **asked).allocated_bytes


def test_a_loss_in_chunks_leaves_no_logits_in_the_pool():
    for name in ("unsloth", "fms-liger", "fms-foak"):
        memory = need(LLAMA_3_8B, stack=STACKS[name])
        assert memory.reserved_bytes() == int(memory.allocated_bytes * memory.factor)
