"""What lies in the machine's memory computes what it computes on the card, and it is there that it lies."""

import pytest

from tests.train import cases_offload
from tests.train.tolerances import FP32, FP32_GRADIENT, FP64

pytestmark = pytest.mark.rotating


@pytest.mark.parametrize(("strategy", "method", "shares"), [("fsdp", "full", [7, 3]), ("hsdp", "qlora", [4, 6])])
def test_parts_in_ram_have_the_losses_of_one_process(pool, strategy, method, shares):
    words = {"shares": shares, "method": method, "strategy": strategy}
    result = pool(len(shares)).run(cases_offload.parts, **words)[0]
    assert len(result["split"]) == 4
    for (_, split, norm), (_, alone, norm_alone) in zip(result["split"], result["alone"], strict=True):
        assert split == pytest.approx(alone, rel=FP64)
        assert norm == pytest.approx(norm_alone, rel=FP64)
    assert len(result["offloaded"]) > 20
    assert all(result["offloaded"])


@pytest.mark.parametrize(
    ("strategy", "method", "shares"), [("ddp", "full", [10]), ("ddp", "lora", [6, 4]), ("fsdp", "full", [7, 3])]
)
def test_each_layers_input_is_moved_and_nothing_else(pool, strategy, method, shares):
    words = {"shares": shares, "method": method, "strategy": strategy}
    found = pool(len(shares)).run(cases_offload.inputs, **words)
    for result in found:
        assert result["found"] == result["plain"]
        assert {(shape[0], shape[2]) for shape in result["moved"]} == {(1, 32)}
        assert sorted(result["back"]) == sorted(result["moved"])
    # steps, layers, micro-batches; not those of one token, which stand for none
    moved = sum(shape[1] > 1 for result in found for shape in result["moved"])
    assert moved == 4 * 2 * 10 + (8 if (strategy, len(shares)) == ("ddp", 2) else 0)  # its ranks time one sample first


def test_on_a_processor_nothing_is_copied_and_a_model_without_recomputation_is_refused(pool):
    result = pool(1).run(cases_offload.not_there)[0]
    assert result["same"]
    assert "are not computed again in the way of transformers" in result["said"]


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["full", "lora"])
def test_parts_of_a_card_lie_pinned_and_are_updated_there(zygote, method):
    result = zygote.fork(cases_offload.parts_of_a_card, method=method).result()
    assert result["norm"] == pytest.approx(result["expected"], rel=FP32)
    assert all(result["offloaded"])
    assert result["pinned"]
    assert result["states"] == (["cpu"] if method == "full" else [])
    assert result["finite"]


@pytest.mark.gpu
def test_a_card_holds_inputs_of_few_layers(zygote):
    plain, moved = (zygote.fork(cases_offload.memory_of_a_card, offloading=each).result() for each in (False, True))
    assert moved["losses"] == pytest.approx(plain["losses"], rel=FP32_GRADIENT)
    assert plain["peak"] - moved["peak"] > 0.8 * plain["inputs"]
