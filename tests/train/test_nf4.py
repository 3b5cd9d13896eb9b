"""Frozen weights of 4 and 8 bits: bitsandbytes' numbers, the products of a plain linear, and what is left as it is."""

import pytest

from tests.train import cases_exact, cases_nf4
from tests.train.tolerances import FP32, FP64, HALF_ON_A_GPU, SAME_SUMS

pytestmark = pytest.mark.rotating

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def test_a_layer_computes_with_what_bitsandbytes_makes_of_the_weight(pool):
    for layer in pool(1).run(cases_nf4.layers, dtypes=["float32", "bfloat16", "float16", "float64"])[0]:
        assert layer["as bitsandbytes"]
        assert layer["forward"]
        assert layer["backward"]
        assert 0.05 < layer["off"] < 0.11  # normal float of 4 bits over weights that are spread evenly
        assert layer["bytes"] == 40 * 128 // 2 + 40 * 128 // 64
        assert layer["stands for"] == 40 * 128 + 40


def check_rows(layers):
    for layer, rounding in zip(layers, (2**-11, 2**-8, 2**-22, 1e-15), strict=True):
        # by way of fp16 bitsandbytes rounds a few numbers to the other side
        assert layer["off by"] <= 1
        assert layer["other numbers"] < 40
        assert layer["scales"]
        assert layer["unpacked"] <= rounding  # once, to the format of products
        assert layer["backward"]
        assert layer["off"] <= 1 / 254 + rounding
        assert layer["bytes"] == 40 * 96 + 4 * 40
        assert layer["stands for"] == 40 * 96 + 40


def test_weights_of_8_bits_are_off_by_half_a_127th_of_the_largest_of_their_row(pool):
    check_rows(pool(1).run(cases_nf4.rows_of_eight_bits)[0])


@pytest.mark.gpu
def test_weights_of_8_bits_on_a_gpu_are_off_by_as_little(zygote):
    check_rows(zygote.fork(cases_nf4.rows_of_eight_bits, device="cuda").result())


@pytest.mark.gpu
def test_a_layer_on_a_gpu_computes_with_what_bitsandbytes_makes_of_the_weight(zygote):
    for layer in zygote.fork(cases_nf4.layers, dtypes=["float32", "bfloat16", "float16"], device="cuda").result():
        assert layer["as bitsandbytes"]
        assert layer["forward"]
        assert layer["backward"]


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", FP32), ("bf16", HALF_ON_A_GPU), ("fp16", HALF_ON_A_GPU)])
@pytest.mark.parametrize("method", ["full", "lora", "qlora", "qlora-8"])
def test_a_gpu_has_the_losses_of_a_processor(zygote, method, precision, tolerance):
    words = {"method": method, "precision": precision}
    ours = zygote.fork(cases_nf4.losses_on, device="cuda", **words).result()
    expected = zygote.fork(cases_nf4.losses_on, device="cpu", **words).result()
    assert ours == pytest.approx(expected, rel=tolerance)


def test_linears_inside_layers_are_packed_and_nothing_else(pool):
    quantised, plain = (pool(1).run(cases_nf4.what_is_packed, method=method)[0] for method in ("qlora", "lora"))
    assert len(quantised["packed"]) == 2 * len(PROJECTIONS)
    assert {name.split(".")[-2] for name in quantised["packed"]} == set(PROJECTIONS)
    assert sorted(quantised["linears"] + quantised["packed"]) == plain["linears"]
    assert quantised["head"]
    assert quantised["trained"] == plain["trained"]
    assert all(".lora_" in name for name in quantised["trained"])
    assert quantised["flops"] == plain["flops"]


def test_what_computes_as_a_linear_is_packed_and_its_products_are_those_of_the_same_model(pool):
    """Falcon's linears are a kind of their own."""
    found = pool(1).run(cases_nf4.of_another_kind)[0]
    assert found["packed"] == 4 * 2
    assert found["off"] < SAME_SUMS
    assert found["as it was"] > 1e-3  # of the model before its weights were rounded
    assert found["gradient off"] < SAME_SUMS
    assert found["draws"]
    assert found["others"] == [True, False, False, False]


def test_experts_are_refused_with_their_part_of_the_weights(zygote):
    said = zygote.fork(cases_nf4.experts).result()
    assert "method: qlora cannot quantise the experts of this model" in said
    assert "% of the weights of all layers" in said
    assert "method: lora" in said


def test_a_python_without_bitsandbytes_is_told_what_to_install(zygote):
    said = zygote.fork(cases_nf4.without_the_library).result()
    assert "needs bitsandbytes" in said
    assert "pip install bitsandbytes" in said


@pytest.mark.parametrize(
    ("strategy", "shares", "method"),
    [("ddp", [5, 3, 2], "qlora"), ("hsdp", [1, 2, 3, 4], "qlora"), ("fsdp", [7, 3], "qlora-8")],
)
def test_many_steps_have_the_losses_of_one_process(pool, strategy, shares, method):
    ask = {"shares": shares, "strategy": strategy, "method": method, "steps": 16, "checkpointing": strategy == "hsdp"}
    result = pool(len(shares)).run(cases_exact.losses, **ask, packed=strategy != "ddp")[0]
    assert len(result["split"]) == 16
    for (_, split, norm), (_, alone, norm_alone) in zip(result["split"], result["alone"], strict=True):
        assert split == pytest.approx(alone, rel=FP64)
        assert norm == pytest.approx(norm_alone, rel=FP64)
