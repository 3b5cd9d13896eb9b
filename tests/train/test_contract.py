"""The contract of every strategy, through the protocol alone: what one process computes, on any split of the work.

Every kind is there, with ranks of unequal shares. What a kind promises besides stands in a file of its own.
"""

import pytest

from gangline.strategies.table import STRATEGIES
from tests.train import cases_contract
from tests.train.bodies import address
from tests.train.tolerances import FP32, FP32_GRADIENT, FP64, NORM

GANGS = {
    "single": {"shares": [5]},
    "ddp": {"shares": [2, 2, 1]},
    "fsdp": {"shares": [4, 1]},
    "hsdp": {"shares": [1, 1, 1, 2]},
    "tp": {"shares": [3, 2]},
    "pipeline": {"shares": [1, 1, 1, 1], "rows": [4, 1]},
    "zero-1": {"shares": [4, 1]},
    "zero-2": {"shares": [1, 4]},
    "zero-3": {"shares": [3, 2]},
    "local-sgd": {"shares": [3, 2], "hosts": ["pc0", "pc0"]},
}
"""Shares of ranks; they add up to the five rows of a step; of tp those of hosts with two ranks each, of pipelines layers (and shares of two of them)."""
DEEPSPEED = ("zero-1", "zero-2", "zero-3")
"""They have no fp64, so they are compared in fp32."""


ON_GPU = pytest.mark.gpu
SHARES_GPUS = ("single", "ddp", "local-sgd")
"""What gangline has ranks do that share a GPU."""


def rows(*chosen: tuple[str, ...]):
    """Rows of parameters on processors, and the same with all ranks on one GPU: over NCCL, which takes each for a host,
    and over gloo, as gangline has it."""
    shared = [row for row in chosen if row[0] in SHARES_GPUS]
    return [
        *(pytest.param(*row, "cpu", id="-".join(row)) for row in chosen),
        *(pytest.param(*row, "cuda", id="-".join((*row, "cuda")), marks=ON_GPU) for row in chosen),
        *(pytest.param(*row, "shared", id="-".join((*row, "shared")), marks=ON_GPU) for row in shared),
    ]


def run(pool, case, kind: str, *, device: str = "cpu", **words):
    """The results by rank."""
    gang = {**GANGS[kind], "strategy": kind, "device": "cpu" if device == "cpu" else "cuda"}
    size = (2 if kind == "tp" else 1) * len(gang["shares"])
    return pool(size, device).run(case, gang=gang, timeout_s=110.0, **words)


def precision_of(kind: str) -> tuple[str, float]:
    """What a kind computes in at most, and how far two ways to add up are apart in it after some steps."""
    return ("fp32", FP32) if kind in DEEPSPEED else ("fp64", FP64)


@pytest.fixture(scope="module")
def alone(_session_zygote):
    """What a case gives in one process, by its arguments: computed once, whatever is compared with it."""
    results = {}

    def of(case, **words):
        key = (address(case), *words.values())
        if key not in results:
            (results[key],) = _session_zygote.pool(1, words["device"]).run(case, **words)
        return results[key]

    return of


def test_every_strategy_is_here():
    assert GANGS.keys() == STRATEGIES.built_in.keys()


@pytest.mark.parametrize(("kind", "device"), rows(*((kind,) for kind in GANGS)))
def test_the_gradient_is_that_of_one_process(pool, kind, device):
    precision, _ = precision_of(kind)
    for result in run(pool, cases_contract.gradient, kind, precision=precision, device=device):
        assert ("error" in result) == (kind not in DEEPSPEED)
        assert max(result.values()) < (FP64 if precision == "fp64" else FP32_GRADIENT), result


@pytest.mark.parametrize(
    ("kind", "method", "device"),
    rows(*((kind, method) for kind in GANGS for method in ("full", "lora") if (kind, method) != ("local-sgd", "lora"))),
)
def test_twenty_packed_steps_and_evaluations_are_those_of_one_process(pool, alone, kind, method, device):
    precision, tolerance = precision_of(kind)
    words = {"method": method, "precision": precision}
    steps, evaluations = run(pool, cases_contract.steps, kind, device=device, **words)[0]
    on = "cpu" if device == "cpu" else "cuda"
    expected, expected_evaluations = alone(cases_contract.steps_alone, device=on, **words)
    assert [step for step, _, _ in steps] == list(range(1, 21))
    assert [step for step, _ in evaluations] == [0, 10, 20]
    for (_, loss, norm), (_, expected_loss, expected_norm) in zip(steps, expected, strict=True):
        assert loss == pytest.approx(expected_loss, rel=tolerance)
        assert norm == pytest.approx(expected_norm, rel=NORM * tolerance)
    for (_, loss), (_, expected_loss) in zip(evaluations, expected_evaluations, strict=True):
        assert loss == pytest.approx(expected_loss, rel=tolerance)


@pytest.fixture(scope="module")
def saved(_session_zygote, tmp_path_factory):
    """Of a kind, a method and a precision the folder of a checkpoint of step 6: written once."""
    folders = {}

    def of(kind: str, **words):
        key = (kind, *words.values())
        if key not in folders:
            folder = tmp_path_factory.mktemp("-".join(key))
            for rank in run(_session_zygote.pool, cases_contract.save, kind, folder=str(folder), **words):
                assert (rank["result"], rank["step"]) == ("stopped", 6)
            folders[key] = folder
        return folders[key]

    return of


def pair(before: str, method: str, after: str):
    """Who saves, and who goes on. What is saved are whole tensors, whoever saves them: each kind saves for one process
    and for itself, and goes on from what ddp has saved; all other pairs take turns."""
    rotates = after not in {before, "single"} and before != "ddp"
    return pytest.param(before, method, after, marks=[pytest.mark.rotating] * rotates)


@pytest.mark.parametrize(
    ("before", "method", "after"),
    [
        *(pair(before, "full", after) for before in GANGS for after in GANGS),
        *(pair(before, "lora", after) for before in ("ddp", "tp") for after in GANGS if after != "local-sgd"),
    ],
)
def test_saved_under_one_a_run_goes_on_under_every_other(pool, saved, alone, before, method, after):
    precision, tolerance = max(precision_of(before), precision_of(after), key=lambda each: each[1])
    words = {"method": method, "precision": precision, "device": "cpu"}
    steps = run(pool, cases_contract.resume, after, folder=str(saved(before, **words)), **words)[0]
    assert [step for step, _, _ in steps] == [7, 8]
    for (_, loss, _), (_, expected, _) in zip(steps, alone(cases_contract.resumed_alone, **words), strict=True):
        assert loss == pytest.approx(expected, rel=tolerance)


BY_ZERO = [
    *(
        {"precision": "fp16"},
        {"method": "qlora", "precision": "fp32"},
        {"optimizer": "adamw-8bit", "precision": "fp32"},
    ),
    {"precision": "bf16", "parameters": "compute"},
]
REFUSED = {
    "fsdp": [{"precision": "fp16"}],
    "hsdp": [{"precision": "fp16"}],
    "tp": BY_ZERO[:3],
    "pipeline": [{"precision": "fp16"}],
    "local-sgd": [{"method": "lora"}, {"optimizer": "adamw-8bit", "precision": "fp32"}],
    **dict.fromkeys(DEEPSPEED, BY_ZERO),
}
"""What a strategy does not train: it says so before a model is loaded."""


@pytest.mark.parametrize("kind", GANGS)
def test_what_it_does_not_train_is_refused_before_a_model_is_loaded(pool, kind):
    for changes in REFUSED.get(kind, []):
        for error in run(pool, cases_contract.refusal, kind, changes=changes, shares_gpus=False):
            assert f"cannot train this job: {kind} with " in error["what"], changes
            assert f"strategy: {kind}" in error["seen"]
            assert error["fix"]
    shared = run(pool, cases_contract.refusal, kind, changes={"precision": "fp32"}, shares_gpus=True)
    wants_own = kind not in SHARES_GPUS
    for error in shared:
        assert (error is not None) == wants_own
        assert not error or f"strategy: {kind} needs a GPU for every rank" in error["what"]
    assert run(pool, cases_contract.refusal, kind, changes={"precision": "fp32"}, shares_gpus=False)[0] is None


def test_a_plug_in_of_three_lines_averages_the_weights_after_every_step(pool):
    first, second = pool(2).run(cases_contract.averaging)
    assert first["kind"] == "Averaging"
    assert first["losses"] == second["losses"]
    assert first["digest"] == second["digest"]
    assert first["losses"][-1] < first["losses"][0]
