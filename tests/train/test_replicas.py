"""Replicas that are not the same any more: noticed, the rank named, nothing of it saved; honest machines left alone."""

import pytest

from tests.train import cases_replicas

pytestmark = pytest.mark.rotating

SIGN, EXPONENT, LAST = 31, 29, 0


@pytest.mark.parametrize("exchange", ["fp32", "bf16"])
def test_the_summed_gradient_has_the_same_bits_on_all_ranks(pool, exchange):
    found = pool(3).run(cases_replicas.gradients, shares=[5, 3, 2], exchange=exchange)
    assert found[0] == found[1] == found[2]


def test_a_digest_changes_with_any_bit_and_with_the_order(pool):
    assert pool(1).run(cases_replicas.digests, bits=list(range(32)))[0] == [[True] * 32, True]


@pytest.mark.parametrize("rounds", [False, True])
def test_ranks_that_do_as_they_should_are_left_alone(pool, rounds):
    for rank in pool(3).run(cases_replicas.training, shares=[5, 3, 2], rounds=rounds):
        assert (rank["result"], rank["step"], rank["events"]) == ("finished", 12, [])


@pytest.mark.parametrize("bit", [SIGN, EXPONENT, LAST])
def test_of_three_the_one_with_a_flipped_bit_is_named_at_the_next_look(pool, bit):
    for rank in pool(3).run(cases_replicas.training, shares=[5, 3, 2], flip={"rank": 2, "step": 7, "bit": bit}):
        assert rank["step"] == 10
        assert rank["error"]["kind"] == "BadState"
        assert rank["error"]["what"] == "the weights of rank 2 on pc2 are not those of the other ranks, at step 10"
        assert "at step 5 they were" in rank["error"]["seen"]
        assert [(event["step"], event["hosts"], event["sure"]) for event in rank["events"]] == [(10, ["pc2"], True)]


def test_of_two_both_are_named_for_nobody_knows_which(pool):
    for rank in pool(2).run(cases_replicas.training, shares=[3, 2], flip={"rank": 1, "step": 7, "bit": LAST}):
        assert "rank 0 on pc0 and rank 1 on pc1 differ, and nobody can know" in rank["error"]["what"]
        assert rank["events"][0]["sure"] is False


def test_nothing_is_saved_of_replicas_that_differ(pool):
    flip = {"rank": 0, "step": 7, "bit": LAST}
    for rank in pool(3).run(cases_replicas.training, shares=[2, 2, 2], flip=flip, save_at=4, every=50):
        assert (rank["saves"], rank["step"]) == ([4], 8)
        assert "rank 0 on pc0" in rank["error"]["what"]


def test_where_nothing_but_skipping_is_left_a_damaged_replica_is_named_as_the_cause(pool):
    flip = {"rank": 1, "step": 6, "bit": None}
    for rank in pool(3).run(cases_replicas.training, shares=[2, 2, 2], flip=flip, every=50):
        assert rank["error"]["kind"] == "BadState"
        assert "the weights of rank 1 on pc1 are not those of the other ranks" in rank["error"]["what"]


def test_machines_of_different_kinds_may_round_differently(pool):
    kinds = ["a", "b", "c"]
    for rank in pool(3).run(cases_replicas.training, shares=[5, 3, 2], kinds=kinds, drift=1e-7):
        assert (rank["result"], rank["error"]) == ("finished", None)


@pytest.mark.parametrize("bit", [SIGN, EXPONENT])
def test_between_different_kinds_a_high_bit_is_noticed_all_the_same(pool, bit):
    flip = {"rank": 1, "step": 7, "bit": bit}
    for rank in pool(3).run(cases_replicas.training, shares=[5, 3, 2], kinds=["a", "b", "c"], drift=1e-7, flip=flip):
        assert "rank 1 on pc1 are not those" in rank["error"]["what"]


def test_under_moments_of_8_bits_kinds_may_differ_by_more_and_one_kind_by_nothing(pool):
    """A rounding may move a moment to its next value, and a weight by some per cent of a step."""
    drifting = {"shares": [5, 3, 2], "kinds": ["a", "b", "c"], "drift": 1e-4}
    for rank in pool(3).run(cases_replicas.training, optimizer="adamw-8bit", **drifting):
        assert (rank["result"], rank["error"]) == ("finished", None)
    assert pool(3).run(cases_replicas.training, **drifting)[0]["error"]["kind"] == "BadState"
    for kinds, bit in ((["a", "a", "a"], LAST), (["a", "b", "c"], None)):
        flip = {"rank": 2, "step": 7, "bit": bit}
        case = {"shares": [2, 2, 2], "kinds": kinds, "flip": flip, "save_at": 7, "optimizer": "adamw-8bit"}
        for rank in pool(3).run(cases_replicas.training, **case):
            assert "rank 2 on pc2 are not those" in rank["error"]["what"]


def test_among_those_of_one_kind_any_bit_is_noticed_whatever_the_others_are(pool):
    flip = {"rank": 2, "step": 7, "bit": LAST}
    for rank in pool(4).run(cases_replicas.training, shares=[2, 2, 2, 2], kinds=["a", "a", "a", "b"], flip=flip):
        assert "rank 2 on pc2 are not those" in rank["error"]["what"]


def test_at_the_end_of_a_round_of_local_sgd_any_bit_is_noticed_between_all_kinds(pool):
    flip = {"rank": 2, "step": 6, "bit": LAST}
    kinds = ["a", "b", "c"]
    for rank in pool(3).run(cases_replicas.training, shares=[5, 3, 2], kinds=kinds, flip=flip, rounds=True):
        assert "rank 2 on pc2 are not those" in rank["error"]["what"]


def test_what_an_attempt_begins_with_is_compared_by_values(pool):
    """Hosts read what they wrote themselves, and may have got it from a machine of another kind."""
    shares, kinds = [1, 1, 1], ["a", "a", "a"]
    assert pool(3).run(cases_replicas.begins, shares=shares, kinds=kinds, factor=1 + 2e-6) == [None] * 3
    for error in pool(3).run(cases_replicas.begins, shares=shares, kinds=kinds, factor=-1.0):
        assert "rank 1 on pc1" in error["what"]
        assert "this is what they began with" in error["seen"]
