"""Kernels compute what torch's own operators compute, and are taken where they work alone."""

import pytest

from tests.train import cases_kernels
from tests.train.tolerances import BF16, HALF_ON_A_GPU, SAME_SUMS


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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 4, 64), (8, 2, 128), (4, 1, 256), (6, 3, 24)])
def test_a_card_attends_to_all_documents_in_one_call(zygote, heads, kv_heads, size, dtype):
    shape = {"heads": heads, "kv_heads": kv_heads, "size": size, "dtype": dtype}
    found = zygote.fork(cases_kernels.attention_of_a_card, **shape).result()
    assert found["calls"] == 1
    assert max(found["apart"]) < HALF_ON_A_GPU


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_card_has_the_losses_of_torch_with_all_kernels(zygote, method):
    plain = zygote.fork(cases_kernels.steps_of_a_card, kernels=["torch"], method=method).result()
    found = zygote.fork(cases_kernels.steps_of_a_card, kernels=["auto"], method=method).result()
    assert "packed-attention" in found["taken"], found["left"]
    assert found["losses"] == pytest.approx(plain["losses"], rel=BF16)


@pytest.mark.gpu
def test_a_card_is_not_waited_for_in_attention(zygote):
    assert zygote.fork(cases_kernels.attention_without_waiting).result()
