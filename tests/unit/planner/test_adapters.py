"""Which matrices carry adapters, of which rank, and what is trained beside them: by peft's rules, before a start."""

import pytest

from gangline.errors import ModelError
from gangline.planner.architecture import lora_parameters, place_adapters
from gangline.planner.config import read_architecture
from gangline.planner.states import whole_share
from gangline.planner.training import Training
from gangline.runs.job import MethodJob
from tests.unit.planner.published import config

H, W, V, KV = 64, 96, 120, 32
LLAMA = config("llama", H, 4, 4, 2, W, V, tie_word_embeddings=False)
TIED = {**LLAMA, "tie_word_embeddings": True}
ATTENTION = {"q_proj": 2 * H, "k_proj": H + KV, "v_proj": H + KV, "o_proj": 2 * H}
MLP = {"gate_proj": H + W, "up_proj": H + W, "down_proj": H + W}
ALL = sum(ATTENTION.values()) + sum(MLP.values())
RANK = 4


def trained(data=LLAMA, num_added=0, **method):
    job = MethodJob(kind="lora", rank=RANK, **method)
    architecture = place_adapters(read_architecture(data), job, num_added=num_added)
    found = lora_parameters(architecture, job.rank, job.targets, dora=job.dora)
    training = Training(method="lora", micro_batch=1, sequence_length=8, rank=RANK, targets=job.targets, dora=job.dora)
    assert whole_share(architecture).num_trained(training) == found
    return found


@pytest.mark.parametrize(
    ("method", "numbers"),
    [
        ({}, RANK * 4 * ALL),
        ({"layers": (0, 3)}, RANK * 2 * ALL),
        ({"exclude": ("q_proj",)}, RANK * 4 * (ALL - 2 * H)),
        ({"exclude": (r"regex:.*\.mlp\..*",)}, RANK * 4 * sum(ATTENTION.values())),
        ({"targets": (r"regex:model\.layers\.[01]\.self_attn\.[qk]_proj",)}, RANK * 2 * (3 * H + KV)),
        ({"targets": ("q_proj",), "rank_pattern": {"layers.0.self_attn.q_proj": 16}}, (16 + 3 * RANK) * 2 * H),
        ({"targets": ("q_proj",), "rank_pattern": {r"layers\.[12]\..*": 2}}, (2 * 2 + 2 * RANK) * 2 * H),
        ({"targets": ("q_proj",), "dora": True}, 4 * (RANK * 2 * H + H)),
        ({"targets": ("q_proj",), "modules_to_save": ("lm_head",)}, RANK * 4 * 2 * H + H * V),
        ({"targets": ("q_proj",), "modules_to_save": ("k_proj",)}, 4 * (RANK * 2 * H + H * KV)),
        ({"targets": ("all-linear",), "modules_to_save": ("k_proj",)}, 4 * (RANK * (ALL - H - KV) + H * KV)),
    ],
)  # fmt: skip
def test_the_plan_counts_what_peft_trains(method, numbers):
    assert trained(**method) == numbers


@pytest.mark.parametrize("data", [LLAMA, TIED])
@pytest.mark.parametrize(
    ("method", "numbers"),
    [
        ({"targets": ("embed_tokens",)}, 736),
        ({"targets": ("q_proj", "embed_tokens")}, 2784),
        ({"targets": ("q_proj", "lm_head")}, 2784),
        ({"targets": (r"regex:model\.embed_tokens",)}, 736),
        ({"targets": ("embed_tokens",), "dora": True}, 800),
        ({"targets": ("lm_head",), "dora": True}, 856),
        ({"targets": ("embed_tokens", "lm_head"), "rank_pattern": {"embed_tokens": 2}}, 1104),
        ({"targets": ("q_proj", "lm_head"), "exclude": ("lm_head",)}, 2048),
        ({"targets": ("q_proj", "lm_head"), "layers": (0, 1)}, 1024),
    ],
)  # fmt: skip
def test_adapters_over_tables_have_as_many_numbers_as_peft_gives_them(data, method, numbers):
    """Counted on a model with peft 0.21.2."""
    assert trained(data, **method) == numbers


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
def test_a_table_that_is_embedding_and_head_has_one_copy(name):
    assert trained(TIED, modules_to_save=(name,)) == RANK * 4 * ALL + H * V


def test_a_table_that_is_looked_up_cannot_be_split():
    with pytest.raises(ModelError, match=r"method.init: pissa splits a matrix that is multiplied"):
        trained(targets=("q_proj", "embed_tokens"), init="pissa")
    assert trained(targets=("q_proj", "lm_head"), init="pissa") == 2784


def test_layers_that_the_model_lacks_are_refused():
    with pytest.raises(ModelError, match=r"method.layers: the model has no layer 4\n.*0 to 3"):
        trained(layers=(1, 4))


def test_rows_of_tables_and_tokens_beside_those_of_the_model_are_counted():
    assert trained(train_tokens=(3, 7)) == RANK * 4 * ALL + 2 * H
    assert trained(train_tokens=("added",), num_added=5) == RANK * 4 * ALL + 2 * 5 * H
    assert trained(TIED, train_tokens=("added",), num_added=5) == RANK * 4 * ALL + 5 * H
    assert trained(modules_to_save=("lm_head",), num_added=5) == RANK * 4 * ALL + H * (V + 5)


def test_tensors_of_experts_that_are_named_carry_adapters_and_nothing_else_does():
    moe = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    data = {**config("qwen3_moe", H, 4, 4, 2, W, V, tie_word_embeddings=False), **moe}
    both = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    assert trained(data, targets=(), target_parameters=both[1:]) == 4 * 6 * RANK * (24 + H)
    assert trained(data, targets=(), target_parameters=both) == 4 * 6 * RANK * (24 + H + H + 48)
