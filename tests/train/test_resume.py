"""Promise 3: a resumed run is the run that was not interrupted."""

import random

import pytest

from tests.train import cases_resume
from tests.train.tolerances import FP32, FP64


def run(pool, folder, shares, **changes):
    """One attempt over these shares."""
    arguments = {"steps": 12, "resume_step": None, "stop_after": None, "job": {}, **changes}
    size = 2 * len(shares) if arguments.get("strategy") == "tp" else len(shares)
    return pool(size, arguments.get("device", "cpu")).run(
        cases_resume.piece, folder=str(folder), shares=shares, **arguments
    )


@pytest.mark.parametrize(
    "job",
    [
        {"method": "full", "precision": "fp32"},
        {"method": "lora", "precision": "bf16"},
        # the loss scale is state, too
        {"method": "full", "precision": "fp16"},
    ],
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_stopped_at_any_step_it_goes_on_bit_equal_on_the_same_ranks(pool, tmp_path, job, device):
    words = {"job": job, "device": device}
    whole = run(pool, tmp_path / "whole", [5, 3, 2], **words)
    stop_after = random.Random(str(job)).randrange(2, 11)
    first = run(pool, tmp_path / "cut", [5, 3, 2], **words, stop_after=stop_after)
    assert [(rank["result"], rank["step"]) for rank in first] == [("stopped", stop_after)] * 3
    second = run(pool, tmp_path / "cut", [5, 3, 2], **words, resume_step=stop_after)
    for rank in range(3):
        assert first[rank]["losses"] + second[rank]["losses"] == whole[rank]["losses"]
        assert first[rank]["samples"] + second[rank]["samples"] == whole[rank]["samples"]
        assert second[rank]["digest"] == whole[rank]["digest"]


@pytest.mark.parametrize(
    ("job", "lacking"),
    [({"precision": "fp16"}, ["pc0", "pc2"]), ({"method": "lora", "precision": "fp32"}, ["pc1"])],
)
def test_ranks_whose_hosts_lack_the_step_get_it_from_the_others_to_the_bit(pool, tmp_path, job, lacking):
    whole = run(pool, tmp_path / "whole", [5, 3, 2], job=job)
    run(pool, tmp_path / "cut", [5, 3, 2], job=job, stop_after=5)
    second = run(pool, tmp_path / "cut", [5, 3, 2], job=job, resume_step=5, stop_after=8, lacking=lacking)
    for rank in range(3):
        assert second[rank]["losses"] == whole[rank]["losses"][5:8]
    assert len({rank["digest"] for rank in second}) == 1


@pytest.mark.parametrize(
    ("job", "tolerance"),
    [
        ({"precision": "fp64"}, FP64),
        ({"precision": "fp64", "method": "lora"}, FP64),
        ({"precision": "fp32", "warmup": 50}, FP32),
    ],
)
def test_three_then_two_then_four_ranks_have_the_losses_of_one_gang(pool, tmp_path, job, tolerance):
    whole = run(pool, tmp_path / "whole", [4, 3, 3], job=job)
    first = run(pool, tmp_path / "cut", [5, 3, 2], job=job, stop_after=3)
    second = run(pool, tmp_path / "cut", [7, 3], job=job, resume_step=3, stop_after=8)
    third = run(pool, tmp_path / "cut", [1, 2, 3, 4], job=job, resume_step=8)
    pieces = first[0]["losses"] + second[0]["losses"] + third[0]["losses"]
    assert [step for step, _, _ in pieces] == list(range(1, 13))
    for (_, loss, _), (_, expected, _) in zip(pieces, whole[0]["losses"], strict=True):
        assert loss == pytest.approx(expected, rel=tolerance)
    order = sample_order(first, second, third)
    assert order == sample_order(whole)
    # 64 samples in steps of 10: the seventh step of an epoch is short
    assert [len(order[step]) for step in range(8)] == [10, 10, 10, 10, 10, 10, 4, 10]


def sample_order(*attempts):
    """The samples of every step in order: ranks read adjacent parts of it."""
    order = {}
    for ranks in attempts:
        for rank in ranks:
            for step, sample in rank["samples"]:
                order.setdefault(step, []).append(sample)
    return order
