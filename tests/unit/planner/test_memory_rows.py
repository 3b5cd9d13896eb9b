"""The memory model against measured peaks: every figure has its source in tests/fixtures/planning.

Bars are for allocated memory, predicted over measured. Anchors are what the design was made from; of the public rows
one half was used to understand the software they were measured on, the other half only to score: it was looked at
once, when all constants stood.
"""

from statistics import fmean

import pytest

from gangline.planner.activations import layer_bytes
from gangline.planner.architecture import lora_parameters
from tests.unit.planner.foreign import architecture, error, predicted, training
from tests.unit.planner.rows import (
    ALLOCATED,
    GIB,
    Row,
    anchor_rows,
    fitting_rows,
    held_out_rows,
    public_rows,
    verdicts,
)

KINDS = ("single", "ddp", "fsdp1", "fsdp2", "zero2", "zero3")


def allocated(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.measured == ALLOCATED and row.seq_len and row.strategy in KINDS]


ANCHORS = allocated(anchor_rows())
FITTING = allocated(fitting_rows())
HELD = allocated(held_out_rows())


def scores(rows):
    errors = {row.run: error(row) for row in rows}
    return fmean(abs(each) for each in errors.values()), max(errors.items(), key=lambda item: abs(item[1]))


@pytest.mark.parametrize("row", ANCHORS, ids=lambda row: row.run)
def test_every_anchor_is_met_within_3_percent(row):
    assert error(row) == pytest.approx(0.0, abs=0.03)


def test_anchors_are_met_within_half_a_percent_on_average():
    assert len(ANCHORS) >= 50
    assert scores(ANCHORS)[0] <= 0.005


def test_the_rows_of_the_fitting_half_that_transformers_made_are_met_within_4_percent():
    rows = [row for row in FITTING if row.source != "litgpt"]
    mean, worst = scores(rows)
    assert len(rows) >= 90
    assert mean <= 0.01
    assert abs(worst[1]) <= 0.04, worst


@pytest.mark.parametrize("half", [FITTING, HELD], ids=["fitting", "held out"])
def test_litgpt_is_met_within_2_percent_where_the_model_is_not_llama(half):
    rows = [row for row in half if row.source == "litgpt" and not row.model.startswith("llama")]
    assert len(rows) >= 3
    assert abs(scores(rows)[1][1]) <= 0.02


@pytest.mark.parametrize("half", [FITTING, HELD], ids=["fitting", "held out"])
def test_what_is_not_understood_of_litgpt_is_3_to_7_percent_of_llama(half):
    """Its source at the commit of the table gives no reason: see `foreign._litgpt`."""
    errors = [error(row) for row in half if row.source == "litgpt" and row.model.startswith("llama")]
    assert len(errors) >= 3
    assert -0.075 < min(errors) <= max(errors) < -0.025


@pytest.mark.parametrize(
    ("model", "method", "numbers"),
    [
        # x, dropped x and its mask, adapter's output, joint qkv, q, k, attention's output, activation
        ("phi-1.5", "lora", 2 + 2 + 1 + 4 + 6 + 2 + 2 + 2 + 8),
        ("stablelm-base-alpha-3b", "lora", 2 + 2 + 1 + 4 + 6 + 2 + 2 + 2 + 8),
        # a second norm's x, and three activations of 11008 / 4096
        ("llama-2-7b", "lora", 2 + 2 + 2 + 1 + 4 + 6 + 2 + 2 + 2 + 3 * 2 * 11008 / 4096),
        # and inputs of 4-bit products: both normed x, what goes into the last matrix
        ("llama-2-7b", "qlora", 2 + 2 + 2 + 1 + 4 + 6 + 2 + 2 + 2 + 3 * 2 * 11008 / 4096 + 2 + 2 + 2 * 11008 / 4096),
    ],
)
def test_a_layer_of_litgpt_keeps_what_its_code_saves(model, method, numbers):
    """Bytes per token and hidden number, as torch's saved-tensor hooks list them for lit_gpt/lora.py at 8641822."""
    row = next(row for row in public_rows() if row.run.startswith(f"litgpt/{model}/{method}/"))
    asked, shape = training(row), architecture(row)
    kept = layer_bytes(shape.layers[0], shape.hidden, asked).kept
    assert kept / asked.tokens / shape.hidden == pytest.approx(numbers, abs=0.1)


def test_a_row_of_litgpt_has_the_published_number_of_trained_parameters():
    row = next(row for row in public_rows() if row.run.startswith("litgpt/llama-2-7b/"))
    assert lora_parameters(architecture(row), 8, training(row).targets) == 4_194_304


@pytest.mark.parametrize(
    ("run", "instant"),
    [
        ("canifinetune/qwen2.5-7b/qlora/s1024/b1/r16/ckpt", "loss"),
        ("fms-liger/mistral-7b/full/foak-fast-kernels-amp/s4096/b4/n1", "optimizer"),
        ("fms-liger/mistral-7b/lora/foak-fast-kernels-liger-amp/s4096/b16/n1", "backward-last"),
    ],
)
def test_the_peak_lies_where_the_source_shows_it(run, instant):
    row = next(row for row in ANCHORS if row.run == run)
    assert predicted(row).peak.name == instant


def test_the_slope_of_a_checkpointed_lora_is_two_bytes_per_layer_and_one_layer():
    rows = {row.micro_batch: row for row in ANCHORS if "mistral-7b/lora/foak-fast-kernels-liger-amp" in row.run}
    small, large = (predicted(rows[number]).allocated_bytes for number in (4, 16))
    measured = rows[16].value_bytes - rows[4].value_bytes
    assert large - small == pytest.approx(measured, rel=0.02)
    assert small > 20 * GIB


def test_verdicts_are_right_but_within_7_percent_of_the_limit_and_for_one_setting():
    """Llama-2-70B on two cards with micro-batches of 4 died at what should have been 92 to 93 % of a card."""
    checked = [each for each in verdicts() if each.complete and each.seq_len and each.strategy in KINDS]
    wrong = []
    for choice in checked:
        part = predicted(choice).process.likely / choice.card_bytes
        if (part <= 1) != choice.fits and abs(part - 1) > 0.07:
            wrong.append(choice.run)
    assert len(checked) >= 90
    assert wrong == ["fms-base/llama-2-70b/qlora/accelerated-peft-bnb-foak/s4096/b4/n2"]


def test_the_held_out_half_is_met_as_well():
    mean, worst = scores(HELD)
    assert mean <= 0.01
    assert abs(worst[1]) <= 0.12, worst
    mean, worst = scores([row for row in HELD if row.source != "litgpt"])
    assert mean <= 0.01
    assert abs(worst[1]) <= 0.04, worst
