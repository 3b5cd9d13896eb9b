"""Kernels compute what torch's own operators compute, and are taken where they work alone."""

import pytest

from tests.train import cases_kernels
from tests.train.pool import Zygote
from tests.train.tolerances import BF16, FP32_GRADIENT, FP32_SUM, FP64, HALF_ON_A_GPU, SAME_SUMS


@pytest.mark.parametrize("words", ["2.10", "2.11", "2.13"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_all_documents_in_one_call_have_the_gradients_of_one_call_each(pool, kind, words):
    found = pool(1).run(cases_kernels.at_once_and_one_after_the_other, kind=kind, words=words)[0]
    assert found["loss"] < SAME_SUMS
    assert found["gradients"] < SAME_SUMS
    assert found["calls"] == [7, 7]  # 2 layers; 4, 1 and 2 documents


def test_heads_may_share_keys_and_layers_may_be_computed_again(pool):
    words = {"words": "2.13", "num_key_value_heads": 2, "checkpointing": True}
    found = pool(1).run(cases_kernels.at_once_and_one_after_the_other, kind="llama", **words)[0]
    assert found["loss"] < SAME_SUMS
    assert found["gradients"] < SAME_SUMS
    assert found["calls"] == [7] * 4


@pytest.mark.parametrize(
    ("changes", "calls"),
    [
        ({}, 1),
        ({"scaling": 0.3}, 1),
        ({"dtype": "float32"}, 0),
        ({"value_size": 8}, 0),
        ({"dropout": 0.5}, 0),
        ({"is_causal": False}, 0),
    ],
)
def test_a_layer_that_flash_attention_does_not_fit_attends_document_by_document(pool, changes, calls):
    found = pool(1).run(cases_kernels.does_without, **changes)[0]
    assert found["calls"] == calls
    assert found["same"] or "dropout" in changes


def test_rows_of_one_document_keep_the_plain_attention(pool):
    assert pool(1).run(cases_kernels.dense_attention_of, kind="llama")[0] == {"calls": 0, "plain": True}


def test_attention_of_fp32_weights_is_in_the_format_of_autocast(pool):
    assert pool(1).run(cases_kernels.under_autocast)[0] == ["torch.bfloat16"]


def test_a_device_need_not_be_asked_where_documents_begin(pool):
    found = pool(1).run(cases_kernels.borders_on_another_device)[0]
    assert found["lengths"] == [list(row) for row in cases_kernels.LENGTHS]
    assert found["starts"] == [0, 5, 6, 15, 18, 36, 43, 54]
    assert found["longest"] == 18


def test_auto_takes_what_works_and_says_why_it_leaves_others(pool):
    auto, plain = (pool(1).run(cases_kernels.of_a_session, kernels=[word])[0] for word in ("auto", "torch"))
    assert list(auto["left"]) == auto["names"]
    assert auto["left"]["packed-attention"] == "an NVIDIA card; ranks compute on cpu"
    assert plain["left"] == {}
    assert auto["losses"] == plain["losses"]


def test_a_kernel_that_is_named_and_cannot_be_had_ends_the_start(pool):
    what, seen, fix = pool(1).run(cases_kernels.chosen, kernels=["packed-attention"], packing=False)[0]["said"]
    assert what == "kernels: packed-attention cannot be had"
    assert seen == "it needs packed rows (data.packing)"
    assert fix == "write kernels: auto, which takes what works"


DTYPES = {"float32": FP32_GRADIENT, "bfloat16": HALF_ON_A_GPU, "float16": HALF_ON_A_GPU}
PLACES = ["interpreter", pytest.param("card", marks=pytest.mark.gpu)]
"""Where kernels of Triton run: by its interpreter on a processor, and on a GPU."""


@pytest.fixture(scope="module")
def _interpreter():
    """Ranks in which Triton interprets its programs; it looks at the variable when it is imported."""
    pytest.importorskip("triton", reason="Triton is not installed: make kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        own = Zygote()
    yield own
    own.close()


@pytest.fixture
def run_case(request, pool, place):
    """Runs a case of cases_kernels.py whose kernels are Triton's."""
    ranks = request.getfixturevalue("_interpreter").pool(1) if place == "interpreter" else pool(1)
    device = "cpu" if place == "interpreter" else "cuda"
    return lambda name, **words: ranks.run(getattr(cases_kernels, name), device=device, **words)[0]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["llama", "gemma", "olmo2"])
def test_norms_are_those_of_transformers(run_case, kind, dtype):
    found = run_case("norms", kind=kind, dtype=dtype, rows=5, n=48)
    assert found["number"] == 1
    assert found["apart"] < DTYPES[dtype]
    assert found["dtypes"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "words",
    [
        *({"kind": kind, "wide_weight": True} for kind in ("llama", "gemma", "olmo2")),
        *({"trains": False}, {"rows": 40, "n": 2304}),
    ],
)
def test_norms_have_weights_of_other_formats_or_frozen_ones_and_rows_of_any_length(run_case, words):
    found = run_case("norms", **{"kind": "llama", "dtype": "bfloat16", "rows": 5, "n": 40, **words})
    assert (found["number"], found["dtypes"]) == (1, True)
    assert found["apart"] < HALF_ON_A_GPU


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("act", ["silu", "gelu_pytorch_tanh", "gelu", "quick_gelu", "relu"])
def test_gated_layers_are_those_of_transformers(run_case, act, dtype):
    found = run_case("gated", act=act, dtype=dtype)
    assert found["number"] == (act in {"silu", "gelu_pytorch_tanh"})
    assert found["apart"] < DTYPES[dtype]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2])
def test_turns_are_those_of_transformers(run_case, rows, dtype):
    assert run_case("rotated", rows=rows, dtype=dtype)["apart"] < DTYPES[dtype]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [500, 20_000])
def test_losses_are_those_of_the_operators_of_torch(run_case, vocabulary, dtype):
    found = run_case("losses_of_rows", vocabulary=vocabulary, dtype=dtype)
    assert found["apart"] < DTYPES[dtype]
    assert found["alone"] < FP32_SUM


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("kind", "in_chunks"), [("llama", True), ("gemma2", False), ("phi", True)])
def test_the_loss_has_its_kernel_where_it_is_computed_in_chunks_by_a_head_without_bias(run_case, kind, in_chunks):
    takes = kind == "llama"
    found = run_case("of_a_model", kind=kind, kernels=["auto"])
    assert found == {"in_chunks": in_chunks, "by_kernel": takes, "taken": takes}
    named = run_case("of_a_model", kind=kind, kernels=["cross-entropy"])
    seen = "it needs logits that are the product with a head without bias, and nothing more"
    assert named == (found if takes else {"what": "kernels: cross-entropy cannot be had", "seen": seen})


def test_a_triton_that_cannot_be_imported_leaves_out_its_kernels(pool, tmp_path):
    left = pool(1).run(cases_kernels.without_triton, folder=str(tmp_path))[0]
    reason = "the package triton, which cannot be imported: OSError: libcuda.so.1: cannot open shared object file"
    assert [name for name, why in left.items() if why == reason] == ["rms-norm", "rotary", "gated-mlp", "cross-entropy"]


def test_a_layer_without_the_active_adapter_stays_with_peft(pool):
    found = pool(1).run(cases_kernels.adapters_elsewhere)[0]
    assert found["number"] == 2
    assert found["apart"] < FP32_SUM


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize(
    ("precision", "autocast", "tolerance"),
    [("fp64", False, SAME_SUMS), ("fp32", False, FP32_GRADIENT), ("bf16", False, 0.02), ("bf16", True, 0.02)],
)
def test_adapters_are_those_of_peft(pool, device, precision, autocast, tolerance, quantised):
    words = {"device": device, "precision": precision, "autocast": autocast, "quantised": quantised}
    found = pool(1).run(cases_kernels.adapters, **words)[0]
    assert found["number"] == 2
    assert found["off"]
    assert found["apart"] < tolerance


def test_benchmarks_give_each_step_inputs_that_no_other_has_written_over(pool):
    first, second = (found := pool(1).run(cases_kernels.timed_steps)[0])[:2], found[2:]
    assert len(found) == 4
    assert first == second


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2"])
def test_whole_models_have_the_gradients_of_torch(run_case, kind):
    found = run_case("in_models", kind=kind, precision="fp32")
    norms_and_layers = {"llama": (5, 2), "gemma2": (9, 2), "gpt2": (0, 0)}[kind]
    assert (found["taken"].get("rms-norm", 0), found["taken"].get("gated-mlp", 0)) == norms_and_layers
    assert found["taken"].get("rotary", 0) == norms_and_layers[1]
    assert found["loss"] < FP32_SUM
    assert found["gradients"] < FP32_GRADIENT


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("autocast", [False, True])
def test_whole_models_in_bf16_have_about_the_gradients_of_torch(run_case, autocast):
    found = run_case("in_models", kind="llama", precision="bf16", autocast=autocast)
    assert found["loss"] < BF16
    assert found["gradients"] < 5 * HALF_ON_A_GPU


@pytest.mark.parametrize("place", PLACES[:1])
@pytest.mark.parametrize("error", ["no machine code", ""])
def test_a_kernel_that_fails_on_this_device_or_has_other_numbers_is_left_out(run_case, error):
    found = run_case("that_fail", error=error)
    expected = "to work here, but trying it failed: LookupError: no machine code" if error else "a model that it fits"
    assert found["left"]["gated-mlp"].startswith(expected)
    assert found["taken"] == ["rms-norm", "rotary", "cross-entropy"]
    assert found["losses"][1] == pytest.approx(found["losses"][0], rel=FP32_SUM)


@pytest.mark.parametrize("architecture", [80, 90])
def test_programs_compile_for_cards_that_are_not_there(pool, architecture):
    pytest.importorskip("triton", reason="Triton is not installed: make kernels")
    found = pool(1).run(cases_kernels.compiled_for, architecture=architecture)[0]
    assert len(found) == 6
    assert min(found.values()) > 1000


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 4, 64), (8, 2, 128), (4, 1, 256), (6, 3, 24)])
def test_a_card_attends_to_all_documents_in_one_call(pool, heads, kv_heads, size, dtype):
    shape = {"heads": heads, "kv_heads": kv_heads, "size": size, "dtype": dtype}
    found = pool(1).run(cases_kernels.attention_of_a_card, **shape)[0]
    assert found["calls"] == 1
    assert max(found["apart"]) < HALF_ON_A_GPU


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_card_has_the_losses_of_torch_with_all_kernels(pool, method):
    plain = pool(1).run(cases_kernels.steps_of_a_card, kernels=["torch"], method=method)[0]
    found = pool(1).run(cases_kernels.steps_of_a_card, kernels=["auto"], method=method)[0]
    assert "packed-attention" in found["taken"], found["left"]
    assert found["losses"] == pytest.approx(plain["losses"], rel=BF16)


@pytest.mark.gpu
def test_a_card_is_not_waited_for_in_attention(pool):
    assert pool(1).run(cases_kernels.attention_without_waiting)[0]


@pytest.mark.parametrize(
    "words",
    [
        {"dropout": 0.0},
        {"dropout": 0.1},
        {"dropout": 0.0, "activation_checkpointing": True},
        {"method": "qlora", "dropout": 0.0},
        {"method": "qlora-8"},
        {"of_method": {"init": "pissa", "dropout": 0.0}},
    ],
    ids=["plain", "dropout", "recomputed", "4 bits", "8 bits, dropout", "two adapters"],
)
def test_runs_with_adapters_in_place_have_the_losses_of_peft(pool, words):
    found = pool(1).run(cases_kernels.adapters_of_a_run, precision="fp64", **words)[0]
    assert found["apart"] < FP64
    assert found["places"] == {"lora": 14}


def test_lengths_of_rows_stay_with_peft(pool):
    found = pool(1).run(cases_kernels.adapters_of_a_run, of_method={"dora": True})[0]
    assert found == {"apart": 0.0, "places": {}}
