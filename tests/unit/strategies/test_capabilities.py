"""What a strategy can do is data: every refusal and the page are made of it."""

import dataclasses
from pathlib import Path

import pytest

from gangline.optimizers import OPTIMIZERS
from gangline.strategies.base import AUTO, METHODS, Asked, Machines, violations
from gangline.strategies.reference import page
from gangline.strategies.table import STRATEGIES, plan_half

ROOT = Path(__file__).parents[3]
LORA = Asked(method="lora", precision="bf16")
FULL = Asked(method="full", precision="bf16")


def whats(kind, asked, machines=None):
    return [each.what for each in violations(plan_half(kind), asked, machines)]


def test_the_page_is_up_to_date():
    told = "run: python -m gangline.strategies.reference docs/strategies.md"
    assert (ROOT / "docs/strategies.md").read_text(encoding="utf-8") == page(), told


@pytest.mark.parametrize("kind", STRATEGIES.built_in)
def test_every_strategy_trains_something_in_bf16(kind):
    assert any(not whats(kind, dataclasses.replace(FULL, method=method)) for method in METHODS)


@pytest.mark.parametrize("kind", STRATEGIES.built_in)
def test_every_strategy_says_what_it_is(kind):
    half = plan_half(kind)
    assert half.kind == kind
    assert half.meaning
    assert half.train.startswith("gangline.strategies.")
    assert set(half.capabilities.yields_to) <= set(STRATEGIES.built_in)


def test_all_violations_are_told_at_once():
    asked = dataclasses.replace(FULL, precision="fp16", optimizer="adamw-8bit", offload=("optimizer",))
    assert whats("fsdp", asked) == [
        "fsdp with precision: fp16 and method: full",
        "fsdp with optimizer: adamw-8bit and method: full",
        "fsdp with strategy.offload: optimizer",
    ]
    assert whats("fsdp", dataclasses.replace(asked, method="lora", offload=("parameters",))) == []


def test_a_violation_says_what_is_trained_instead():
    (found,) = violations(plan_half("zero-1"), dataclasses.replace(LORA, method="qlora"))
    assert (found.key, found.reads) == ("method.kind", ("strategy.kind",))
    assert found.expected.startswith("full or lora: ")
    assert "strategy: fsdp" in found.fix


def test_whole_matrices_are_wanted_where_they_are_cut_and_refused():
    muon = dataclasses.replace(FULL, optimizer="muon")
    for kind in ("single", "ddp", "pipeline"):
        assert whats(kind, muon) == []
    for kind in ("fsdp", "hsdp"):
        assert whats(kind, muon) == [f"{kind} with optimizer: muon and method: full"]
        assert whats(kind, dataclasses.replace(muon, method="lora")) == []
    (found,) = violations(plan_half("tp"), dataclasses.replace(LORA, optimizer="adafactor"))
    assert found.expected.startswith("adamw, sgd or lion: it computes with whole matrices")
    for kind in ("zero-1", "zero-2", "zero-3", "local-sgd"):
        for optimizer in set(OPTIMIZERS) - {"adamw"}:
            assert whats(kind, dataclasses.replace(FULL, optimizer=optimizer)) == [
                f"{kind} with optimizer: {optimizer}"
            ]


def test_number_by_number_everything_but_deepspeed_and_rounds_is_exact():
    for kind in ("single", "ddp", "fsdp", "hsdp", "tp", "pipeline"):
        for optimizer in ("sgd", "lion"):
            assert whats(kind, dataclasses.replace(FULL, optimizer=optimizer)) == []


def test_without_a_strategy_only_the_limits_of_all_count():
    asked = Asked(method="full", precision="fp64", optimizer="adamw-8bit", activation_offloading=True)
    assert [each.what for each in violations(None, asked)] == ["optimizer: adamw-8bit and precision: fp64"]
    assert AUTO not in STRATEGIES


@pytest.mark.parametrize(
    ("kind", "machines", "what"),
    [
        ("tp", Machines(ranks={"a": 2, "b": 1}), "needs equally many ranks on every host"),
        ("fsdp", Machines(ranks={"a": 2}, sharing=("a",)), "needs a GPU for every rank"),
        ("pipeline", Machines(ranks={"a": 3}), "3 ranks do not make 2 pipelines"),
    ],
)
def test_what_machines_cannot_do_is_refused(kind, machines, what):
    asked = dataclasses.replace(LORA, replicas=2)
    assert what in " ".join(whats(kind, asked, machines))
    assert whats("ddp", asked, machines) == []


def test_one_rank_on_each_host_has_all_of_every_layer_and_may_share_a_gpu():
    assert whats("tp", LORA, Machines(ranks={"a": 1, "b": 1}, sharing=("a",))) == []
