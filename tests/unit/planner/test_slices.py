"""Layers cut by columns and rows: what a rank has, what it needs, how long it takes, and what cannot be cut."""

from __future__ import annotations

import dataclasses

import pytest

from gangline.planner.candidate import EvaluationContext, lacking
from gangline.planner.config import read_architecture
from gangline.planner.decision import best_of_kinds, decide
from gangline.planner.memory import CUDA, rank_memory
from gangline.planner.speed import ComputeModel, RankWork, step_query, step_time
from gangline.planner.traffic import Exchange, Fabric, LinkModel, traffic, wire_bytes
from gangline.planner.training import PlannedStrategy, Training
from gangline.runs.job import StrategyJob
from gangline.strategies.tensor_parallel.plan import sliced, unsliceable
from tests.unit.planner.published import config
from tests.unit.planner.worlds import model, query, with_memory, world

LLAMA = model("meta-llama/Llama-3.1-8B")
TP = PlannedStrategy(kind="tp", world_size=16, shard_size=8)
LORA = Training(method="lora", micro_batch=1, sequence_length=1024)


def test_a_rank_has_its_part_of_every_linear_and_all_of_the_rest() -> None:
    own = sliced(LLAMA, 8)
    (layer,) = own.layers
    (whole,) = LLAMA.layers
    assert layer.linear_weights * 8 == whole.linear_weights
    assert (layer.heads, layer.kv_heads, layer.width) == (4, 1, 14336 // 8)
    assert (layer.vectors, own.embedding_weights, own.head_weights) == (
        whole.vectors,
        LLAMA.embedding_weights,
        LLAMA.head_weights,
    )
    shapes = {linear.name: (linear.inputs, linear.outputs) for linear in layer.linears}
    assert shapes["q_proj"] == (4096, 512)
    assert shapes["o_proj"] == (512, 4096)
    assert shapes["gate_proj"] == (4096, 1792)
    assert shapes["down_proj"] == (1792, 4096)


def test_where_columns_are_put_together_only_weights_are_cut() -> None:
    data = config("phi3", 1024, 3, 16, 16, 2816, 32064, tie_word_embeddings=False)
    (layer,), (whole,) = sliced(read_architecture(data), 4).layers, read_architecture(data).layers
    assert layer.linear_weights * 4 == whole.linear_weights
    assert (layer.heads, layer.width) == (whole.heads, whole.width)


@pytest.mark.parametrize(
    ("data", "parts", "why"),
    [
        (config("llama", 1024, 2, 16, 4, 2816, 32000), 4, ""),
        (config("llama", 1024, 2, 16, 4, 2816, 32000), 8, "4 key-value heads, which 8 ranks do not divide"),
        (config("llama", 1024, 2, 12, 4, 2817, 32000), 8, "12 attention heads, 4 key-value heads, 2,817 of the feed"),
        (config("phi3", 1024, 2, 10, 10, 2816, 32064), 4, ""),
        (config("falcon", 1024, 2, 16, 16, 4096, 32000), 4, "the family falcon"),
        (config("olmoe", 1024, 2, 16, 16, 512, 32000, num_experts=8, num_experts_per_tok=2), 4, "the family olmoe"),
    ],
    ids=["even", "heads", "all uneven", "gathered", "no plan", "experts"],
)  # fmt: skip
def test_what_cannot_be_cut_is_named(data: dict[str, object], parts: int, why: str) -> None:
    found = unsliceable(read_architecture(data), parts)
    assert why in found
    assert bool(why) == bool(found)


def test_what_train_cannot_do_under_tp_is_named() -> None:
    assert lacking(TP, LORA, LLAMA) is None
    for changes, what in (
        ({"method": "qlora"}, "tp with method: qlora"),
        ({"compute": "fp16"}, "tp with precision: fp16"),
    ):
        missing = lacking(TP, dataclasses.replace(LORA, **changes), LLAMA)
        assert missing is not None
        assert missing.what == what
    sixteen = dataclasses.replace(TP, shard_size=16)
    assert "8 key-value heads, which 16 ranks" in str(lacking(sixteen, LORA, LLAMA))


def test_a_rank_of_eight_needs_an_eighth_of_the_layers_and_the_tables() -> None:
    single = rank_memory(LLAMA, LORA, PlannedStrategy(kind="single", world_size=1), device=CUDA)
    own = rank_memory(LLAMA, LORA, TP, device=CUDA)
    weights = {term.name: term.num_bytes for term in own.persistent}["weights"]
    layers = sum(layer.count * layer.linear_weights for layer in LLAMA.layers)
    assert weights == 2 * (LLAMA.num_parameters - layers + layers // 8)
    assert own.allocated_bytes < 0.4 * single.allocated_bytes


def exchanges(**more: object) -> dict[str, Exchange]:
    training = dataclasses.replace(LORA, **more)  # type: ignore[arg-type]
    return {each.what: each for each in traffic(LLAMA, training, TP, micro_batches=4).exchanges}


def test_hidden_states_are_summed_twice_in_a_layer_and_back() -> None:
    found = exchanges()
    states = found["hidden states"]
    assert states.num_bytes == 1024 * 4096 * 2
    assert (states.ranks, states.among, states.times) == (8, "shard", 4 * 2 * 32)
    assert found["their gradients"].times == 4 * 2 * 32
    again = exchanges(checkpointing=True)
    assert again["hidden states"].times == 4 * 3 * 32
    assert exchanges(method="full")["their gradients"].times == 4 * (2 * 32 + 1)


def test_of_gradients_a_host_sends_what_is_cut_and_what_is_whole_once() -> None:
    flow = traffic(LLAMA, dataclasses.replace(LORA, method="full"), TP, micro_batches=1)
    out = wire_bytes(flow, (8, 8)).out
    assert out[0] == pytest.approx(4 * LLAMA.num_parameters, rel=0.001)  # 2(M-1)/M of fp32, and M is 2
    assert out[0] == out[1]


def test_a_step_waits_for_the_sums_of_every_micro_batch() -> None:
    link = LinkModel(latency_s=0.0, bytes_per_s=1e11, source="")
    fabric = Fabric(slots=(8, 8), wire=LinkModel(latency_s=0.0, bytes_per_s=1e15, source=""), inside=link)
    compute = ComputeModel(per_token_s=1e-4)
    ranks = [RankWork(compute=compute, micro_batches=4)] * 16
    flow = traffic(LLAMA, LORA, TP, micro_batches=4)
    time = step_time(step_query(TP, flow, ranks, fabric, tokens=1024, length=1024))
    sums_s = 4 * 4 * 32 * (2 * 7 / 8) * 1024 * 4096 * 2 / 1e11
    assert time.compute_s == pytest.approx([4 * 1024 * 1e-4 / 8] * 16)
    assert time.inside_s == pytest.approx(sums_s)
    assert time.total_s == pytest.approx(4 * 1024 * 1e-4 / 8 + sums_s, rel=0.02)


def test_hosts_share_a_batch_and_their_ranks_do_the_same() -> None:
    asked = dataclasses.replace(query("meta-llama/Llama-3.1-8B", method="lora"), strategy=StrategyJob(kind="tp"))
    hosts = world("2xrtx4090,2xrtx3060")
    candidate = best_of_kinds(asked, with_memory(hosts, 24, 24, 24, 24), EvaluationContext())[0]
    assert candidate.strategy == PlannedStrategy(kind="tp", world_size=4, shard_size=2)
    first, _, second, _ = candidate.shares
    assert candidate.shares == (first, first, second, second)
    assert first > second
    assert (first + second) * candidate.training.micro_batch == candidate.samples == 24
    assert candidate.work_split == (first, second)
    assert candidate.dividing.shares == (first, second)


def test_it_is_taken_by_itself_only_where_nothing_simpler_fits() -> None:
    """Every rank keeps the activations of a long sample of its own, or a part of those of one."""
    asked = query("meta-llama/Llama-3.1-8B", method="lora", sequence_length=8192, batch=4, leave_open=False)
    kinds = {}
    for gib in (60, 40):
        choice = decide(asked, with_memory(world("4xh100", inside="NVLink H100"), *[gib] * 4))
        assert choice.best is not None
        kinds[gib] = choice.best.strategy.kind
        fits = {candidate.strategy.kind for candidate in choice.by_kind if candidate.fits}
        assert "tp" in fits
    assert kinds == {60: "fsdp", 40: "tp"}


def test_one_rank_on_each_host_has_whole_layers() -> None:
    asked = dataclasses.replace(query(method="lora"), strategy=StrategyJob(kind="tp"))
    assert decide(asked, world()).by_kind[0].strategy.kind == "ddp"
