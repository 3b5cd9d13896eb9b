"""Traces: the bytes of a step that never ran, against those that torch's profiler saw while it did."""

import json
import subprocess
import sys

import pytest

from tests.train import cases_trace
from tests.train.pool import ROOT
from tests.train.tolerances import MEASURED, TRACED

pytestmark = pytest.mark.rotating

SMALL = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
    "max_position_embeddings": 1024,
}
LLAMA_2_7B = {
    **SMALL,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
EXPERTS = {
    **SMALL,
    "model_type": "qwen3_moe",
    "head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
}
SHALLOW = {**SMALL, "num_hidden_layers": 2}
LORA = {"kind": "lora", "rank": 8, "targets": ["q_proj", "down_proj"]}


def order(**changes) -> dict:
    """A step of 2 x 256 tokens in fp32 on this machine's own kernels, counted in exact bytes."""
    return {
        "config": SMALL,
        "precision": "fp32",
        "micro_batch": 2,
        "sequence_length": 256,
        "attention_kernel": "cpu",
        "rounding_bytes": 1,
        **changes,
    }


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="full"),
        pytest.param({"activation_checkpointing": True}, id="full, checkpointed"),
        pytest.param({"method": {**LORA, "dropout": 0.1}}, id="LoRA with dropout"),
        pytest.param(
            {"method": LORA, "activation_checkpointing": True, "packing": True}, id="LoRA, checkpointed, packed"
        ),
        # one sample, so one chunk of logits: to add a bf16 product to an fp32 sum, a CPU (no GPU) makes an fp32 copy
        pytest.param(
            {"config": SHALLOW, "precision": "bf16", "micro_batches": 2, "micro_batch": 1},
            id="mixed precision, two micro-batches",
        ),
        pytest.param(
            {"config": SHALLOW, "precision": "bf16", "parameters": "compute", "attention_kernel": "math"},
            id="bf16, plain kernel",
        ),
        pytest.param({"config": EXPERTS}, id="fused experts"),
    ],
)
def test_a_trace_has_the_bytes_of_a_real_step(pool, changes):
    real = pool(1).run(cases_trace.profiled_peak, order=order(**changes))[0]
    traced = pool(1).run(cases_trace.traced_peak, order=order(**changes))[0]
    # promised are 2 %; what is left is known: the tokens, and what kernels take for themselves (0.7 % in bf16 products)
    assert traced == pytest.approx(real, rel=MEASURED)
    assert real > 20e6


def test_ddp_holds_gradients_once_however_many_micro_batches_a_rank_has(pool):
    changes = {"config": SHALLOW, "micro_batches": 2}
    real = pool(2).run(cases_trace.profiled_peak, order=order(**changes))
    alone, traced = (pool(1).run(cases_trace.traced_peak, order=order(**changes, ranks=ranks))[0] for ranks in (1, 2))
    assert traced == pytest.approx(max(real), rel=TRACED)
    assert traced == pytest.approx(alone, rel=TRACED)


@pytest.mark.parametrize("changes", [{}, {"method": LORA, "activation_checkpointing": True, "precision": "bf16"}])
def test_two_shallow_depths_tell_the_bytes_of_a_deep_model(pool, changes):
    config = {**SMALL, "num_hidden_layers": 8}
    pairs = pool(1).run(cases_trace.extrapolated, order=order(config=config, **changes), layers=8)[0]
    for by_line, whole in pairs:
        assert by_line == pytest.approx(whole, rel=TRACED)


def test_seven_billion_weights_take_no_memory(zygote):
    case = {
        "config": LLAMA_2_7B,
        "method": {"kind": "lora", "rank": 16},
        "sequence_length": 2048,
        "activation_checkpointing": True,
    }
    seen = zygote.fork(cases_trace.large, order=case).result()
    assert seen["grown_bytes"] < 1 << 30
    assert seen["num_parameters"] == 6_738_415_616 + 39_976_960
    assert seen["num_trainable"] == 39_976_960
    # bf16 weights; adapters, their gradients and two states in fp32; then what the step adds
    held = 2 * 6_738_415_616 + 16 * 39_976_960
    assert held < seen["peak_bytes"] < 1.1 * held
    assert seen["weights_bytes"] + seen["gradients_bytes"] + seen["optimizer_bytes"] == pytest.approx(held, rel=0.001)
    assert [depth["layers"] for depth in seen["depths"]] == [2, 4]
    assert seen["notes"] == []


def test_a_gpu_takes_kernels_that_keep_no_scores(pool):
    def forward(kernel: str) -> int:
        changes = {"attention_kernel": kernel, "precision": "bf16", "method": LORA}
        return pool(1).run(cases_trace.at_one_depth, order=order(**changes), layers=2)[0]["forward"]

    plain, own, flash = forward("math"), forward("cpu"), forward("flash")
    # its inputs are copied to a GPU; this machine's flash kernel keeps the same otherwise
    assert flash == pytest.approx(own, rel=MEASURED)
    scores_bytes = 2 * 4 * 256 * 256 * 4
    assert plain > flash + 2 * scores_bytes


@pytest.mark.parametrize(
    ("family", "expected"),
    [({}, True), ({"model_type": "gpt2"}, True), ({"model_type": "granite", "logits_scaling": 4.0}, False)],
)
def test_a_trace_knows_which_loss_the_trainer_takes(pool, family, expected):
    config = {**SMALL, "hidden_size": 64, "vocab_size": 300, "num_hidden_layers": 2, **family}
    config |= {"bos_token_id": 0, "eos_token_id": 1}
    assert pool(1).run(cases_trace.fused, config=config, order=order())[0] == [expected, expected]


def test_depths_show_every_kind_of_layer(pool):
    plain, dense_first, mixed = (
        pool(1).run(cases_trace.depths, config=config)[0]
        for config in (
            LLAMA_2_7B,
            {**SMALL, "model_type": "glm4_moe", "num_hidden_layers": 46, "first_k_dense_replace": 1},
            {**SMALL, "model_type": "gemma3_text", "num_hidden_layers": 26},
        )
    )
    assert plain[:2] == [[2, 4], True]
    assert dense_first[:2] == [[3, 5], True]
    # five layers with a window and one without, but the last two of 26 have one: no straight line meets them
    assert mixed[:2] == [[6, 12], False]
    assert mixed[2] == (["sliding_attention"] * 5 + ["full_attention"]) * 2


def test_the_tracker_counts_storages(pool):
    exact, in_blocks = pool(1).run(cases_trace.counted_storages)[0].values()
    assert exact == [0, 2800, 2800, 0, 2800, 2840, 0, 2840]
    assert in_blocks == [0, 3072, 3072, 0, 3072, 3584, 0, 3584]


def test_parameters_are_counted_by_group(pool):
    seen = pool(1).run(cases_trace.counted, order={"config": {**EXPERTS, "tie_word_embeddings": True}, "method": LORA})[
        0
    ]
    groups = [seen[name] for name in ("embeddings", "head", "linears", "experts", "others")]
    assert sum(groups) == seen["total"]
    attention, experts = 2 * 256 * (256 + 128), 8 * 3 * 256 * 128
    assert groups[:4] == [4096 * 256, 0, 2 * attention, 2 * experts]
    assert seen["tied"]
    assert {"name": "k_proj", "rows": 128, "columns": 256, "bias": False, "count": 2} in seen["shapes"]
    assert seen["trainable"] == seen["lora"] > 0


def test_the_program_writes_one_document_whatever_a_library_prints(zygote):
    orders = [order(config={**SMALL, "hidden_size": 64}), {"config": {"model_type": "unheard-of"}}]
    documents, code = zygote.fork(cases_trace.answered, text=json.dumps(orders), argv=[]).result()
    assert [document["kind"] for document in documents] == ["trace", "error"]
    assert documents[0]["peak_bytes"] == max(documents[0]["instants"].values())
    assert set(documents[0]["versions"]) == {"torch", "transformers", "peft"}
    assert (documents[1]["error_kind"], code) == ("ModelError", 2)


def test_the_program_counts_parameters(zygote):
    document, code = zygote.fork(cases_trace.answered, text=json.dumps({"config": SMALL}), argv=["count"]).result()
    assert (document["kind"], code) == ("count", 0)
    assert document["total"] == document["trainable"] > document["linears"] > 0


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("{", "Expecting property name"),
        ("3", "expected the keys of TraceOrder, found 3"),
        ('{"model": "a", "config": {}}', "give one of config and model"),
        ('{"model": "a", "deepth": 3}', "unknown keys deepth"),
        ('{"model": "a", "method": {"kind": "dora"}}', "expected one of 'full', 'lora', 'qlora'"),
        ('{"model": "a", "layers": [4, 4]}', "two depths"),
    ],
)
def test_an_order_that_is_off_is_refused_before_torch_is_imported(text, seen):
    command = [sys.executable, "-X", "importtime", "-m", "gangline.worker.trace"]
    done = subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True)
    assert done.returncode == 2
    error = json.loads(done.stdout)
    assert error["kind"] == "error"
    assert seen in error["seen"]
    assert "torch" not in done.stderr


def test_targets_that_match_nothing_are_answered_with_names_that_do(pool):
    error = pool(1).run(cases_trace.trace_error, order=order(method={"kind": "lora", "targets": ["qproj"]}))[0]
    assert error["kind"] == "ModelError"
    assert "q_proj" in error["seen"]
