"""Promises about a GPU: what a card answers, and beside it what a processor can answer for it."""

import pytest

from tests.train import cases_gpu

READ = ["read"]
"""The function of worker/loop.py that waits once a step."""


def names(waits):
    """Functions that wait, by step."""
    return [[each.rpartition(" ")[2] for each in step] for step in waits]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("method", "dropout"), [("full", 0.0), ("lora", 0.0), ("lora", 0.1)])
def test_a_step_asks_the_device_once(zygote, method, dropout, packed):
    waits = zygote.fork(cases_gpu.waits_without_a_gpu, method=method, dropout=dropout, packed=packed).result()
    assert names(waits) == [READ] * cases_gpu.STEPS, waits


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "words",
    [
        {"method": "full", "precision": "fp32", "dropout": 0.0},
        {"method": "full", "precision": "bf16", "dropout": 0.0},
        {"method": "lora", "precision": "bf16", "dropout": 0.1},
        {"method": "qlora", "precision": "bf16", "dropout": 0.0},
    ],
)
def test_a_step_waits_for_the_card_once(zygote, words, packed):
    waits = zygote.fork(cases_gpu.waits_on_a_gpu, words=words, packed=packed).result()
    assert names(waits) == [READ] * cases_gpu.STEPS, waits
