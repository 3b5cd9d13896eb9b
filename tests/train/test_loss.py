"""The loss: equal to torch's own, whatever the model's head, and blind across packed documents."""

import pytest

from tests.train import cases_loss
from tests.train.tolerances import FP32_GRADIENT, SAME_SUMS


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("large", [False, True])
def test_the_chunked_head_has_the_loss_and_the_gradients_of_torch(pool, bias, large):
    found = pool(1).run(cases_loss.against_torch, bias=bias, tied=large)[0]
    assert found["loss"] < SAME_SUMS
    assert max(found["gradients"]) < SAME_SUMS


@pytest.mark.parametrize(("kind", "fused"), [("llama", True), ("gpt2", True), ("gemma2", False)])
def test_the_chunked_head_is_used_only_where_it_gives_the_models_own_logits(pool, kind, fused):
    found = pool(1).run(cases_loss.fused_and_plain, kind=kind)[0]
    # Gemma 2 caps its logits, which a plain product with the head would miss
    assert found["fused"] is fused
    assert found["chosen"] == pytest.approx(found["plain"], rel=FP32_GRADIENT)


@pytest.mark.parametrize(("kind", "attention"), [("llama", "sdpa"), ("llama", "eager"), ("gpt2", "sdpa")])
def test_packed_documents_have_the_loss_of_documents_alone(pool, kind, attention):
    found = pool(1).run(cases_loss.packed_and_apart, kind=kind, attention=attention)[0]
    assert found["packed"] == pytest.approx(found["apart"], rel=FP32_GRADIENT)
    assert not found["leaks"]


def test_a_model_that_carries_state_over_the_border_is_noticed(pool):
    found = pool(1).run(cases_loss.packed_and_apart, kind="mamba")[0]
    assert abs(found["packed"] / found["apart"] - 1) > 1e-4
    assert found["leaks"]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_documents_that_are_attended_to_by_themselves_have_the_loss_of_masked_ones_and_need_no_mask(pool, kind):
    found = pool(1).run(cases_loss.inside_documents, kind=kind)[0]
    assert found["taken"]
    assert found["loss"] < SAME_SUMS
    assert found["gradients"] < SAME_SUMS
    assert (found["masks"], found["calls"]) == (0, 2 * 6)  # 2 layers, 5 documents and 1
    assert not found["leaks"]


def test_a_model_that_computes_attention_by_itself_keeps_its_masks(pool):
    found = pool(1).run(cases_loss.inside_documents, kind="gemma2")[0]
    assert not found["taken"]
    assert found["loss"] == 0


def test_a_document_begins_where_positions_do_not_go_on(pool):
    rows = [[0, 1, 2, 0, 1, 0, 1], [0, 1, 2, 3, 4, 5, 6], [4, 5, 0, 1, 2, 0, 0]]
    found = pool(1).run(cases_loss.document_lengths, rows=rows)[0]
    assert [list(each) for each in found] == [[3, 2, 2], [7], [2, 3, 1, 1]]
