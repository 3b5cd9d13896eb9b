"""What travels in a step, against the formulas and the published tables: planning.md 3.5, mismatched-and-failures.md 2.1."""

import dataclasses

import pytest

from gangline.errors import ModelError
from gangline.planner.config import read_architecture
from gangline.planner.memory import CPU, rank_memory
from gangline.planner.software import HF_KBIT
from gangline.planner.traffic import (
    NF4_BYTES,
    Exchange,
    Traffic,
    collective_bytes,
    edges,
    traffic,
    trained_weights,
    wire_bytes,
)
from gangline.planner.training import BYTES, PlannedStrategy, Training
from tests.unit.planner.published import PUBLISHED
from tests.unit.planner.shapes import LLAMA_2_7B, LLAMA_3_8B, LLAMA_32_1B, SMALL

FULL = Training(method="full", micro_batch=1, sequence_length=2048, parameters="bf16")
FULL_32 = dataclasses.replace(FULL, parameters="fp32")
LORA = Training(method="lora", micro_batch=1, sequence_length=2048)
QV = dataclasses.replace(LORA, targets=("q_proj", "v_proj"))
QLORA = dataclasses.replace(QV, method="qlora")
KINDS = ("ddp", "zero-1", "zero-2", "zero-3", "fsdp", "hsdp", "pipeline", "local-sgd")


def strategy(kind, size=3, **more):
    layers = {"stages": (11, 11, 10)} if kind == "pipeline" else {}
    return PlannedStrategy(kind=kind, world_size=size, **{**layers, **more})


def sent(architecture, training, kind, *, size=3, k=1, **more):
    return traffic(architecture, training, strategy(kind, size, **more), micro_batches=k).sent_bytes


@pytest.mark.parametrize(
    ("training", "kind", "seconds"),
    [
        (FULL, "ddp", (153, 62, 16, 3.3, 1.6)),
        (FULL, "fsdp", (229, 93, 25, 4.9, 2.3)),
        (QLORA, "fsdp", (44, 18, 4.7, 0.9, 0.4)),
        (LORA, "ddp", (1.8, 0.74, 0.19, 0.04, 0.02)),
        (QV, "ddp", (0.38, 0.15, 0.04, 0.01, None)),
        (FULL, "pipeline", (0.29, 0.12, 0.03, 0.006, None)),
    ],
)
def test_the_table_of_wire_seconds_of_llama_2_7b_on_three_machines(training, kind, seconds):
    rates = (117.6e6, 290e6, 1.1e9, 5.5e9, 11.6e9)  # what 1, 2.5, 10, 100 GbE (TCP) and 100 Gb InfiniBand carry
    for rate, said in zip(rates, seconds, strict=True):
        if said is not None:
            # the table rounds to as little as one digit
            assert sent(LLAMA_2_7B, training, kind) / rate == pytest.approx(
                said, rel=0.02, abs=0.51 * 10 ** digits(said)
            )


def digits(number):
    """The place of the last digit that is written: -2 for 0.38, 0 for 153."""
    words = str(number)
    return -len(words.split(".")[1]) if "." in words else 0


@pytest.mark.parametrize(
    ("weights", "each", "seconds"),
    [
        # numbers, bytes of one: N=2 and N=3 at 1 GbE, N=3 at 2.5 and 10
        (trained_weights(LLAMA_2_7B, QV), 4, (0.29, 0.38, 0.15, 0.04)),
        (trained_weights(LLAMA_2_7B, QV), 2, (0.14, 0.19, 0.08, 0.02)),
        (trained_weights(LLAMA_3_8B, QV), 4, (0.23, 0.31, 0.12, 0.03)),
        (trained_weights(LLAMA_3_8B, QV), 2, (0.12, 0.15, 0.06, 0.02)),
        (trained_weights(LLAMA_3_8B, LORA), 4, (1.43, 1.90, 0.76, 0.19)),
        (trained_weights(LLAMA_3_8B, LORA), 2, (0.71, 0.95, 0.38, 0.10)),
        (trained_weights(LLAMA_3_8B, dataclasses.replace(LORA, rank=64)), 4, (5.7, 7.6, 3.0, 0.76)),
        (trained_weights(LLAMA_3_8B, dataclasses.replace(LORA, rank=64)), 2, (2.9, 3.8, 1.5, 0.38)),
        (trained_weights(LLAMA_32_1B, FULL), 4, (42, 56, 22, 5.6)),
        (trained_weights(LLAMA_32_1B, FULL), 2, (21, 28, 11, 2.8)),
        (trained_weights(LLAMA_2_7B, FULL), 4, (229, 306, 122, 31)),
        (trained_weights(LLAMA_2_7B, FULL), 2, (115, 153, 61, 15)),
    ],
)
def test_the_table_of_what_is_exchanged(weights, each, seconds):
    for size, rate, said in zip((2, 3, 3, 3), (117.6e6, 117.6e6, 294e6, 1.17e9), seconds, strict=True):
        took = collective_bytes("all_reduce", weights * each, size) / rate
        assert took == pytest.approx(said, abs=0.51 * 10 ** digits(said))


def test_the_numbers_that_are_trained():
    assert trained_weights(LLAMA_2_7B, QV) == 8_388_608
    assert trained_weights(LLAMA_2_7B, LORA) == pytest.approx(39.98e6, rel=1e-3)
    assert trained_weights(LLAMA_3_8B, QV) == pytest.approx(6.82e6, rel=1e-3)
    assert trained_weights(LLAMA_2_7B, FULL) == LLAMA_2_7B.num_parameters == 6_738_415_616
    with pytest.raises(ModelError, match="w_pack"):
        traffic(LLAMA_2_7B, dataclasses.replace(LORA, targets=("w_pack",)), strategy("ddp"), micro_batches=1)


# --- formulas


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("k", [1, 4])
def test_bytes_are_those_of_the_formulas(size, k):
    c, p = (size - 1) / size, SMALL.num_parameters
    expected = {
        "ddp": 2 * c * p * 4,
        "zero-1": 2 * c * p * 4 + c * p * 2,
        "zero-2": k * 2 * c * p * 4 + c * p * 2,
        "zero-3": k * c * (2 * p * 2 + p * 4),
        "fsdp": k * c * (2 * p * 2 + p * 4),
    }
    for kind, num_bytes in expected.items():
        assert sent(SMALL, FULL_32, kind, size=size, k=k) == pytest.approx(num_bytes, rel=1e-6), kind
    kept = sent(SMALL, FULL_32, "fsdp", size=size, k=k, reshard=False)
    assert kept == pytest.approx(k * c * (p * 2 + p * 4), rel=1e-6)
    rare = sent(SMALL, FULL_32, "local-sgd", size=size, k=k, inner_steps=50)
    assert rare == pytest.approx(2 * c * p * 4 / 50, rel=1e-6)
    rounded = sent(SMALL, FULL_32, "local-sgd", size=size, k=k, inner_steps=50, payload="int8")
    assert rounded == pytest.approx(2 * c * p * (1 + 4 / 256) / 50, rel=1e-6)


def test_local_sgd_leaves_a_host_once_however_many_ranks_it_has():
    plan = PlannedStrategy(kind="local-sgd", world_size=8, shard_size=4, inner_steps=10, payload="bf16")
    flow = traffic(SMALL, FULL_32, plan, micro_batches=1)
    wire = wire_bytes(flow, (4, 4))
    assert wire.out == pytest.approx([SMALL.num_parameters * 2 / 10] * 2, rel=1e-3)
    # inside, gradients in every step
    assert wire.inside == pytest.approx([2 * 3 / 4 * SMALL.num_parameters * 4] * 8, rel=1e-3)


def test_accumulation_changes_what_sharded_weights_send_and_not_what_ddp_sends():
    for kind in ("ddp", "zero-1", "local-sgd"):
        assert sent(LLAMA_2_7B, LORA, kind, k=1) == sent(LLAMA_2_7B, LORA, kind, k=16)
    for kind in ("zero-3", "pipeline"):
        assert sent(LLAMA_2_7B, LORA, kind, k=16) == pytest.approx(16 * sent(LLAMA_2_7B, LORA, kind, k=1))
    assert sent(LLAMA_2_7B, FULL, "fsdp", k=16) == pytest.approx(16 * sent(LLAMA_2_7B, FULL, "fsdp", k=1))


def test_where_every_rank_has_all_adapters_their_gradients_travel_once_a_step():
    once = sent(LLAMA_2_7B, LORA, "ddp")
    several, one = (sent(LLAMA_2_7B, LORA, "fsdp", k=k) - once for k in (16, 1))
    assert several == pytest.approx(16 * one)
    cut = dataclasses.replace(LORA, stack=dataclasses.replace(LORA.stack, whole_adapters=False))
    assert sent(LLAMA_2_7B, cut, "fsdp", k=16) == pytest.approx(16 * sent(LLAMA_2_7B, cut, "fsdp", k=1))


def test_frozen_weights_travel_where_they_are_sharded():
    lora = sent(LLAMA_2_7B, LORA, "fsdp")
    assert lora > 80 * sent(LLAMA_2_7B, LORA, "ddp")
    frozen = 2 / 3 * 2 * LLAMA_2_7B.num_parameters * 2
    assert frozen < lora < 1.02 * frozen
    quantised = sent(LLAMA_2_7B, QLORA, "fsdp")
    expected = 2 / 3 * 2 * (LLAMA_2_7B.linear_weights * NF4_BYTES + 2 * 262.4e6)
    assert quantised == pytest.approx(expected, rel=0.01)
    upcast = dataclasses.replace(QLORA, stack=HF_KBIT)
    assert sent(LLAMA_2_7B, upcast, "fsdp") - quantised == pytest.approx(2 / 3 * 2 * 2 * 262.4e6, rel=0.01)


def test_experts_that_ranks_divide_along_no_dimension_travel_with_zeros():
    mixtral = read_architecture(PUBLISHED["Mixtral-8x7B"][0])
    experts = 32 * 8 * 3 * 14336 * 4096

    def gathered(size, **more):
        told = traffic(mixtral, FULL, strategy("fsdp", size, **more), micro_batches=1).exchanges
        return sum(each.num_bytes * each.times for each in told if each.what == "weights for forward")

    def held(kind, size, name="weights"):
        memory = rank_memory(mixtral, FULL, strategy(kind, size), device=CPU)
        terms = [*memory.persistent, *(term for instant in memory.instants for term in instant.terms)]
        return max((term.num_bytes for term in terms if term.name == name), default=0)

    assert gathered(16) == gathered(4) == 2 * mixtral.num_parameters
    assert gathered(12) - gathered(16) == 2 * (experts // 2)  # 8 of them as if they were 12
    assert held("fsdp", 12) == pytest.approx(2 * (mixtral.num_parameters + experts // 2) / 12, abs=1)
    orders = "experts put in order"
    assert [held("fsdp", size, orders) for size in (4, 16, 12)] == [0, 2 * experts // 32, 0]
    assert held("zero-3", 16, orders) == 0
    assert held("zero-3", 12) == pytest.approx(2 * mixtral.num_parameters / 12, abs=1)


def test_a_hybrid_sends_shards_inside_and_gradients_across():
    plan = strategy("hsdp", 16, shard_size=8)
    both = traffic(SMALL, FULL_32, plan, micro_batches=4)
    wire = wire_bytes(both, (8, 8))
    p = SMALL.num_parameters
    assert wire.inside[0] == pytest.approx(4 * 7 / 8 * (2 * p * 2 + p * 4), rel=1e-6)
    # 2 (M-1)/M of an eighth of the gradients, from every card: a whole copy leaves each host
    assert wire.between[0] == pytest.approx(2 * 1 / 2 * p / 8 * 4, rel=1e-3)
    assert wire.out == pytest.approx((p * 4, p * 4), rel=1e-3)


def test_a_ring_leaves_every_host_once_whatever_the_number_of_its_ranks():
    whole = traffic(SMALL, FULL_32, strategy("ddp", 6), micro_batches=1)
    wire = wire_bytes(whole, (2, 3, 1))
    each = 2 * 5 / 6 * SMALL.num_parameters * 4
    assert wire.out == pytest.approx((each,) * 3, rel=1e-6)
    assert [inside > 0 for inside in wire.inside] == [True, False, True, True, False, False]
    assert wire_bytes(whole, (6,)).out == (0.0,)


def test_a_pipeline_sends_activations_over_each_boundary_and_back():
    size = 2048 * 4096 * 2
    wire = wire_bytes(traffic(LLAMA_2_7B, QLORA, strategy("pipeline"), micro_batches=8), (1, 1, 1))
    assert wire.between == (8 * size, 16 * size, 8 * size)
    tied = traffic(LLAMA_32_1B, FULL, strategy("pipeline", stages=(6, 6, 4)), micro_batches=1)
    assert [each.what for each in tied.exchanges if each.among == "ends"] == ["gradients of the tied table"]
    assert not [
        each
        for each in traffic(LLAMA_32_1B, LORA, strategy("pipeline"), micro_batches=1).exchanges
        if each.among == "ends"
    ]


def test_pipelines_send_activations_inside_and_gradients_between_them():
    ways = strategy("pipeline", 4, stages=(20, 12, 16, 16), replicas=2)
    flow = traffic(LLAMA_2_7B, FULL, ways, micro_batches=3)
    (gradients,) = (each for each in flow.exchanges if each.among == "replicas")
    assert (gradients.ranks, gradients.number) == (2, FULL.parameters)
    assert gradients.num_bytes == pytest.approx(LLAMA_2_7B.num_parameters / 2 * BYTES[FULL.parameters])
    size = 3 * FULL.tokens * 4096 * BYTES[FULL.compute]
    by_host = wire_bytes(flow, (2, 2))
    assert by_host.inside == (size,) * 4
    assert by_host.out == pytest.approx((2 * gradients.num_bytes,) * 2)  # half of the model twice, over two
    tied = strategy("pipeline", 4, stages=(9, 7, 8, 8), replicas=2)
    table, rest = (
        next(each for each in traffic(LLAMA_32_1B, FULL, tied, micro_batches=1).exchanges if each.among == among)
        for among in ("ends", "replicas")
    )
    assert (table.ranks, rest.ranks) == (4, 2)
    assert table.num_bytes + 2 * rest.num_bytes == LLAMA_32_1B.num_parameters * BYTES[FULL.parameters]
    narrow = dataclasses.replace(FULL, exchange="bf16")
    sent = [each for each in traffic(LLAMA_2_7B, narrow, ways, micro_batches=3).exchanges if each.number == "bf16"]
    assert "gradients between pipelines" in {each.what for each in sent}


# --- gradients of ddp


def test_adapters_travel_behind_backward():
    (only,) = traffic(LLAMA_2_7B, LORA, strategy("ddp"), micro_batches=1).exchanges
    assert (only.hides, only.times, only.number) == ("last-backward", 1, "fp32")
    assert only.num_bytes == 4 * trained_weights(LLAMA_2_7B, LORA)


def test_the_embedding_table_of_a_full_fine_tune_hides_behind_nothing():
    rest, table = traffic(LLAMA_2_7B, FULL, strategy("ddp"), micro_batches=1).exchanges
    assert (rest.hides, table.hides) == ("last-backward", "nothing")
    assert table.num_bytes == 32000 * 4096 * 2
    assert rest.num_bytes + table.num_bytes == 2 * LLAMA_2_7B.num_parameters


@pytest.mark.parametrize("training", [LORA, dataclasses.replace(FULL, parameters="fp32")])
def test_gradients_in_bf16_are_half_the_bytes(training):
    narrow = dataclasses.replace(training, exchange="bf16")
    whole, half = (traffic(LLAMA_2_7B, each, strategy("ddp"), micro_batches=1) for each in (training, narrow))
    assert half.sent_bytes * 2 == whole.sent_bytes
    assert {each.number for each in half.exchanges} == {"bf16"}


# --- what holds for all


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("training", [FULL, LORA, QLORA])
def test_one_rank_sends_nothing_and_more_ranks_never_less(kind, training):
    shard = {"shard_size": 2} if kind == "hsdp" else {}
    assert traffic(SMALL, training, strategy(kind, 1, stages=(4,)), micro_batches=2).exchanges == ()
    sizes = [sent(SMALL, training, kind, size=size, k=2, **shard) for size in (2, 4, 8, 64)]
    assert sizes == sorted(sizes)
    assert sizes[0] > 0


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "send"])
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(operation):
    assert collective_bytes(operation, 1000, 1) == 0
    assert collective_bytes("all_reduce", 1000, 4) == 1500
    assert collective_bytes("all_gather", 1000, 4) + collective_bytes("reduce_scatter", 1000, 4) == 1500
    assert collective_bytes(operation, 2000, 4) == 2 * collective_bytes(operation, 1000, 4)


def test_gloo_reduces_all_to_scatter_and_broadcasts_from_one():
    assert collective_bytes("reduce_scatter", 1000, 4, backend="gloo") == 1500
    assert [collective_bytes("broadcast", 1000, size, backend="gloo") for size in (2, 3, 4, 5)] == [
        1000,
        2000,
        2000,
        3000,
    ]
    gloo = traffic(SMALL, FULL, strategy("fsdp"), micro_batches=1, backend="gloo")
    assert gloo.sent_bytes > sent(SMALL, FULL, "fsdp")


def test_rings_and_pairs():
    assert edges("world", 3, 3) == [(0, 1), (1, 2), (2, 0)]
    assert edges("shard", 4, 2) == [(0, 1), (1, 0), (2, 3), (3, 2)]
    assert edges("replicas", 4, 2) == [(0, 2), (2, 0), (1, 3), (3, 1)]
    assert edges("next", 3, 3) == [(0, 1), (1, 2)]
    assert edges("previous", 3, 3) == [(1, 0), (2, 1)]
    assert edges("ends", 3, 3) == [(0, 2), (2, 0)]
    assert edges("ends", 6, 3) == [(0, 2), (2, 3), (3, 5), (5, 0)]
    assert edges("next", 4, 2) == [(0, 1), (2, 3)]
    assert edges("previous", 4, 2) == [(1, 0), (3, 2)]
    assert edges("world", 1, 1) == []


def test_the_rank_that_sends_most_counts():
    one = Exchange(what="x", operation="send", num_bytes=10, times=3, ranks=2, number="bf16", among="next")
    assert Traffic(world_size=3, shard_size=3, micro_batches=1, exchanges=(one,)).sent_bytes == 30
