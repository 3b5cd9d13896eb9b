"""What a rank needs: terms that can be checked by hand, and properties that hold for every plan."""

from dataclasses import replace
from itertools import pairwise

import pytest

from gangline.errors import ModelError
from gangline.planner.config import read_architecture
from gangline.planner.memory import CPU, CUDA, Spread, rank_memory
from gangline.planner.software import HF_PURE, STACKS
from gangline.planner.training import GANGLINE, PlannedStrategy, Training
from gangline.strategies.local_sgd.plan import EXCHANGED_NUMBERS
from tests.unit.planner.published import PUBLISHED

GIB = 2**30
SINGLE = PlannedStrategy(kind="single", world_size=1)
LLAMA = read_architecture(PUBLISHED["Llama-2-7B"][0])
MODELS = ["Llama-2-7B", "Qwen2.5-1.5B", "Gemma-2-2B", "Mixtral-8x7B", "DeepSeek-V2-Lite", "Pythia-1.4B", "gpt-oss-20b"]
SHARDING = ["zero-1", "zero-2", "zero-3", "fsdp", "hsdp"]


def need(model=LLAMA, strategy=SINGLE, *, rank=0, **settings):
    return rank_memory(model, training(**settings), strategy, rank=rank, device=CUDA)


def training(**settings):
    return Training(**{"method": "lora", "micro_batch": 1, "sequence_length": 2048, **settings})


def term(memory, name):
    return next((each.num_bytes for each in memory.persistent if each.name == name), 0)


def ways():
    for method in ("full", "lora", "qlora"):
        for checkpointing in (False, True):
            yield {"method": method, "checkpointing": checkpointing}


def test_states_of_adapters_are_what_pencil_and_paper_say():
    memory = need(targets=("q_proj", "v_proj"))
    assert term(memory, "weights") == 2 * 6_738_415_616
    assert term(memory, "adapters") == 4 * 8_388_608
    assert term(memory, "optimizer") == 8 * 8_388_608


def test_four_bit_weights_take_the_published_bits():
    plain, double = (need(method="qlora", double_quant=double) for double in (False, True))
    linear = LLAMA.linear_weights
    rest = 2 * (LLAMA.num_parameters - linear)
    assert term(plain, "weights") == pytest.approx(0.5625 * linear + rest, rel=1e-6)
    assert term(double, "weights") == pytest.approx(0.51587 * linear + rest, rel=1e-5)


def test_eight_bit_weights_take_a_byte_and_a_scale_for_each_row():
    memory = need(method="qlora", bits=8)
    rows = 32 * (4 * 4096 + 2 * 11008 + 4096)
    linear = LLAMA.linear_weights
    assert term(memory, "weights") == linear + 4 * rows + 2 * (LLAMA.num_parameters - linear)


def test_layers_inputs_in_the_machines_memory_leave_two_on_the_card():
    plain, moved = (need(checkpointing=True, offloading=offloading) for offloading in (False, True))
    entry = 2048 * 4096 * 2
    assert moved.offloaded_bytes == 32 * entry
    losses = [each.instants[0].num_bytes for each in (plain, moved)]
    assert losses[0] - losses[1] == 30 * entry
    on_processor = rank_memory(LLAMA, training(checkpointing=True, offloading=True), SINGLE, device=CPU)
    assert on_processor.offloaded_bytes == 0
    assert on_processor.instants == rank_memory(LLAMA, training(checkpointing=True), SINGLE, device=CPU).instants


def test_the_foreach_path_of_adamw_is_a_fifth_copy_of_half_precision_weights():
    memory = need(method="full", parameters="bf16", checkpointing=True, stack=HF_PURE)
    assert memory.peak.name == "optimizer"
    assert memory.allocated_bytes == pytest.approx(10 * LLAMA.num_parameters, rel=0.001)


def test_the_peak_is_the_largest_instant_and_not_their_sum():
    memory = need(method="full")
    assert memory.allocated_bytes == memory.persistent_bytes + max(each.num_bytes for each in memory.instants)


def test_paged_states_count_nothing_and_eight_bit_ones_a_quarter():
    full, eight, paged = (
        term(need(method="full", optimizer=kind), "optimizer") for kind in ("adamw", "adamw-8bit", "paged-adamw-8bit")
    )
    assert paged == 0
    assert eight == pytest.approx(full * 2.03 / 8, rel=0.01)


def test_every_optimizer_counts_the_states_that_it_keeps():
    """Of Llama-2-7B, in fp32: 6,738 million numbers, of which 262 million in tables and 0.3 million in vectors."""

    def states(**words):
        return term(need(method="full", **words), "optimizer") / (4 * LLAMA.num_parameters)

    assert states(optimizer="adamw") == 2
    assert states(optimizer="lion") == states(optimizer="sgd", momentum=True) == 1
    assert states(optimizer="sgd") == 0
    assert states(optimizer="muon") == pytest.approx(1 + 2 * 32_000 * 4_096 / LLAMA.num_parameters, rel=1e-3)
    rows_and_columns = 32 * (8 * 4_096 + 3 * (4_096 + 11_008))  # four square matrices and three others in each layer
    tables = 2 * (32_000 + 4_096)
    expected = (rows_and_columns + tables + 266_240) / LLAMA.num_parameters
    assert states(optimizer="adafactor") == pytest.approx(expected, rel=0.01)
    adapters = term(need(optimizer="muon"), "optimizer")
    assert adapters == term(need(optimizer="lion"), "optimizer") == term(need(), "optimizer") // 2
    assert 0 < term(need(optimizer="adafactor"), "optimizer") < adapters / 10


def test_only_states_of_large_tensors_are_paged():
    """Adapters of q and v of Llama-2-7B: matrices of 65,536 numbers at rank 16, and of 131,072 at rank 32."""

    def states(kind, rank, device=CUDA):
        asked = training(optimizer=kind, rank=rank, targets=("q_proj", "v_proj"))
        return term(rank_memory(LLAMA, asked, SINGLE, device=device), "optimizer")

    assert states("paged-adamw-8bit", 16) == states("adamw-8bit", 16) > 0
    assert states("paged-adamw-8bit", 32) == 0
    assert states("paged-adamw-8bit", 32, CPU) == states("adamw-8bit", 32, CPU) > 0


def test_a_processor_unpacks_moments_of_the_largest_tensor():
    asked = training(method="full", optimizer="adamw-8bit")
    update = next(each for each in rank_memory(LLAMA, asked, SINGLE, device=CPU).instants if each.name == "optimizer")
    unpacked = {each.name: each.num_bytes for each in update.terms}["moments of 8 bits"]
    assert unpacked == 20 * 32_000 * 4_096


def test_targets_that_match_nothing_are_an_error():
    with pytest.raises(ModelError, match="matches nothing"):
        need(targets=("c_attn",))


@pytest.mark.parametrize("name", MODELS)
def test_more_work_never_needs_less(name):
    model = read_architecture(PUBLISHED[name][0])
    for way in ways():
        for key, values in {
            "micro_batch": (1, 2, 3, 8),
            "sequence_length": (64, 100, 512, 4096),
            "rank": (1, 8, 64),
        }.items():
            sizes = [need(model, **way, **{key: value}).allocated_bytes for value in values]
            assert all(less <= more for less, more in pairwise(sizes)), (way, key, sizes)


def test_a_larger_vocabulary_never_needs_less():
    for stack in STACKS.values():
        models = [replace(LLAMA, vocabulary=number) for number in (1000, 32_000, 50_257, 128_256, 256_000)]
        sizes = [need(model, stack=stack, micro_batch=4).allocated_bytes for model in models]
        assert sizes == sorted(sizes), stack.name


@pytest.mark.parametrize("name", MODELS)
def test_checkpointing_never_keeps_more(name):
    model = read_architecture(PUBLISHED[name][0])
    for method in ("full", "lora", "qlora"):
        kept = [
            sum(
                each.num_bytes
                for each in need(model, method=method, checkpointing=checkpointing, micro_batch=4).instants[1].terms
                if each.name in ("activations", "checkpoints", "layer")
            )
            for checkpointing in (False, True)
        ]
        assert kept[1] <= kept[0], method


@pytest.mark.parametrize("kind", SHARDING)
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_sharding_never_lies_heavier_than_a_whole_copy_per_rank(kind, method):
    ddp = need(strategy=PlannedStrategy(kind="ddp", world_size=4), method=method, accumulation=2).persistent_bytes
    last = ddp
    for ranks in (2, 4, 8):
        strategy = PlannedStrategy(kind=kind, world_size=8, shard_size=ranks)
        strategy = strategy if kind == "hsdp" else replace(strategy, world_size=ranks)
        size = need(strategy=strategy, method=method, accumulation=2).persistent_bytes
        assert size <= last
        last = size


def test_full_sharding_divides_sixteen_bytes_by_the_ranks():
    for ranks in (2, 3, 8):
        memory = need(strategy=PlannedStrategy(kind="fsdp", world_size=ranks), method="full", accumulation=2)
        states = memory.persistent_bytes - term(memory, "workspace")
        assert states == pytest.approx(16 * LLAMA.num_parameters / ranks, rel=0.001)


def test_weights_that_are_not_given_up_after_forward_lie_there_whole():
    gathered, kept = (
        need(strategy=PlannedStrategy(kind="fsdp", world_size=4, reshard=reshard), checkpointing=True).instants[1]
        for reshard in (True, False)
    )
    whole = 2 * LLAMA.num_parameters
    assert kept.num_bytes - gathered.num_bytes == pytest.approx(whole * 29 / 32, rel=0.05)


def test_full_sharding_over_three_ranks_is_near_the_trace_of_fsdp2():
    # planning.md section 5: gradients of the step before lay there
    memory = need(
        strategy=PlannedStrategy(kind="fsdp", world_size=3), method="full", checkpointing=True, accumulation=2
    )
    assert memory.allocated_bytes / GIB == pytest.approx(37.5, rel=0.03)


@pytest.mark.parametrize("stages", [(32,), (16, 16), (20, 7, 5), (1, 30, 1)])
def test_the_stages_of_a_pipeline_sum_to_the_model(stages):
    strategy = PlannedStrategy(kind="pipeline", world_size=len(stages), stages=stages)
    weights = [
        term(need(strategy=strategy, rank=rank, method="full", parameters="bf16"), "weights")
        for rank in range(len(stages))
    ]
    assert sum(weights) == 2 * LLAMA.num_parameters


def test_a_tied_head_on_the_last_stage_is_one_more_copy_of_the_table():
    model = read_architecture(PUBLISHED["Qwen2.5-1.5B"][0])
    strategy = PlannedStrategy(kind="pipeline", world_size=2, stages=(14, 14))
    weights = sum(term(need(model, strategy, rank=rank, method="lora"), "weights") for rank in range(2))
    assert weights == 2 * (model.num_parameters + model.embedding_weights)


def test_early_stages_hold_more_micro_batches_and_only_the_last_one_has_the_loss():
    strategy = PlannedStrategy(kind="pipeline", world_size=4, stages=(8, 8, 8, 8))
    first, last = (need(strategy=strategy, rank=rank) for rank in (0, 3))
    loss = [[each.name for each in memory.instants[0].terms] for memory in (first, last)]
    assert "loss" not in loss[0]
    assert "loss" in loss[1]
    kept = [next(each for each in memory.instants[0].terms if each.name == "activations") for memory in (first, last)]
    assert kept[0].num_bytes > 3.9 * kept[1].num_bytes


def rounds(device, *, shard_size=1, parameters="fp32"):
    strategy = PlannedStrategy(kind="local-sgd", world_size=4, shard_size=shard_size)
    return rank_memory(LLAMA, training(method="full", parameters=parameters), strategy, device=device)


def test_local_sgd_holds_the_last_exchange_and_a_momentum_in_the_machines_memory():
    numbers = LLAMA.num_parameters
    assert term(rounds(CPU), "outer optimizer") == 8 * numbers
    assert term(rounds(CPU, parameters="bf16"), "outer optimizer") == 6 * numbers
    assert term(rounds(CUDA), "outer optimizer") == 0


def test_a_host_of_one_card_trains_as_one_machine_and_ranks_of_a_host_as_ddp():
    alone = rank_memory(LLAMA, training(method="full"), SINGLE, device=CUDA)
    together = rank_memory(LLAMA, training(method="full"), PlannedStrategy(kind="ddp", world_size=4), device=CUDA)
    assert rounds(CUDA).persistent_bytes == alone.persistent_bytes
    assert rounds(CUDA, shard_size=2).persistent_bytes == together.persistent_bytes


def test_an_exchange_of_changes_goes_piece_by_piece():
    exchange = next(each for each in rounds(CUDA).instants if each.name == "exchange")
    assert exchange.num_bytes == 6 * 4 * EXCHANGED_NUMBERS < 0.1 * GIB


def test_long_samples_cost_their_square_where_no_kernel_helps():
    short, long = (
        need(stack=replace(GANGLINE, attention="math"), checkpointing=True, sequence_length=length).peak.num_bytes
        for length in (4096, 8192)
    )
    assert long > 3 * short


def test_more_free_memory_never_lowers_the_chance():
    process = need(method="qlora").process
    chances = [process.probability_below(int(process.likely * part / 50)) for part in range(30, 90)]
    assert chances == sorted(chances)
    assert chances[0] < 0.01
    assert chances[-1] > 0.99


def test_the_chance_is_a_twentieth_at_the_ends_of_the_spread():
    even = Spread(low=90, likely=100, high=110)
    assert even.probability_below(100) == pytest.approx(0.5)
    assert even.probability_below(90) == pytest.approx(0.05, abs=0.001)
    assert even.probability_below(110) == pytest.approx(0.95, abs=0.001)
    skewed = Spread(low=98, likely=100, high=120)
    assert skewed.probability_below(100) < 0.15
    assert skewed.probability_below(99) < skewed.probability_below(100) < skewed.probability_below(101)


def test_a_number_that_is_known_exactly_has_a_sharp_chance():
    sharp = Spread(low=1000, likely=1000, high=1000)
    assert sharp.probability_below(990) < 1e-6
    assert sharp.probability_below(1010) > 1 - 1e-6


def test_one_rank_needs_no_buffers_and_a_processor_no_context():
    alone = need().process
    together = need(strategy=PlannedStrategy(kind="ddp", world_size=2))
    gap = CUDA.process(together.allocated_bytes, num_ranks=1).likely
    assert together.process.likely == gap + CUDA.buffers[1]
    assert CPU.process(0, num_ranks=1).likely > 0
    assert alone.low < alone.likely < alone.high


def test_every_term_says_where_it_comes_from():
    for strategy in (SINGLE, PlannedStrategy(kind="fsdp", world_size=4), PlannedStrategy(kind="zero-2", world_size=4)):
        for way in ways():
            memory = need(strategy=strategy, **way)
            terms = [*memory.persistent, *(each for instant in memory.instants for each in instant.terms)]
            assert all(each.source and each.num_bytes > 0 for each in terms)
