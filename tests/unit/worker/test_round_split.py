"""Who does what in a round of local SGD: by speed, at one pace, and the same arithmetic for every rank."""

import pytest

from gangline.runs.gang import Gang, GangRank
from gangline.strategies.local_sgd.work_split import RoundBalancer


def gang(shares, hosts=None, *, moving=False):
    hosts = hosts or [f"pc{index}" for index in range(len(shares))]
    ranks = tuple(GangRank(host=host, share=share) for host, share in zip(hosts, shares, strict=True))
    return Gang(run_id="calm-otter-7", attempt=1, ranks=ranks, strategy="local-sgd", moving_shares=moving)


def counts(work_split):
    """Micro-batches and inner steps of every host."""
    return [(sum(len(batch.numbers) for batch in batches), len(batches)) for batches in work_split]


def test_every_micro_batch_is_dealt_once():
    work_split = RoundBalancer(gang([5, 3, 2]), per_step=10).split_work(47)
    numbers = [number for batches in work_split for batch in batches for number in batch.numbers]
    assert sorted(numbers) == list(range(47))


def test_a_faster_host_gets_more_and_takes_more_steps_of_the_same_size():
    work_split = RoundBalancer(gang([12, 6, 6]), per_step=24).split_work(24 * 10)
    assert counts(work_split) == [(120, 15), (60, 8), (60, 8)]
    assert {len(batch.numbers) for batches in work_split for batch in batches} == {8, 7}


def test_no_inner_step_is_a_short_rest():
    (batches,) = RoundBalancer(gang([4]), per_step=4).split_work(41)
    assert [len(batch.numbers) for batch in batches] == [5, *[4] * 9]


def test_one_host_does_the_steps_of_the_run():
    (batches,) = RoundBalancer(gang([6]), per_step=6).split_work(30)
    assert [batch.numbers for batch in batches] == [tuple(range(start, start + 6)) for start in range(0, 30, 6)]


def test_hosts_go_through_a_round_at_one_pace():
    work_split = RoundBalancer(gang([12, 6, 6]), per_step=24).split_work(24 * 10)
    for batches in work_split:
        for part, batch in enumerate(batches):
            assert batch.numbers[0] / 240 == pytest.approx(part / len(batches), abs=0.06)


def test_a_host_with_more_cards_takes_larger_steps_not_more_of_them():
    hosts = ["big"] * 4 + ["small"] * 2
    work_split = RoundBalancer(gang([2] * 6, hosts), per_step=12).split_work(12 * 5)
    assert counts(work_split) == [(40, 5), (20, 5)]
    assert all(len(part) == 2 for batches in work_split for batch in batches for part in batch.by_rank)


def test_a_rank_without_a_share_only_joins():
    work_split = RoundBalancer(gang([3, 0, 2], ["a", "a", "b"]), per_step=5).split_work(20)
    assert all(batch.by_rank[1] == () for batch in work_split[0])
    assert counts(work_split)[0][0] == 12


def test_a_host_without_a_share_does_nothing():
    work_split = RoundBalancer(gang([3, 0]), per_step=3).split_work(12)
    assert work_split[1] == []


def test_what_was_measured_decides_the_next_round():
    balancer = RoundBalancer(gang([5, 5], moving=True), per_step=10)
    assert balancer.learn([10.0, 10.0], [1000, 250]) == (8, 2)
    assert [count for count, _ in counts(balancer.split_work(100))] == [80, 20]
    assert balancer.learn([10.0, 10.0], [1000, 250]) is None
    assert balancer.learn([10.0, 10.0], [1000, 1000]) == (5, 5)


def test_ranks_of_a_host_share_by_their_speeds_too():
    balancer = RoundBalancer(gang([4, 4, 4], ["a", "a", "b"], moving=True), per_step=12)
    balancer.learn([1.0, 1.0, 1.0], [300, 100, 200])
    work_split = balancer.split_work(120)
    assert [count for count, _ in counts(work_split)] == [80, 40]
    assert [len(part) for part in work_split[0][0].by_rank] == [6, 2]


def test_times_that_are_none_change_nothing():
    balancer = RoundBalancer(gang([5, 5], moving=True), per_step=10)
    assert balancer.learn([0.0, 1.0], [10, 10]) is None
    assert balancer.learn([1.0, 1.0], [0, 10]) is None
    assert balancer.shares == (5, 5)


def test_shares_that_somebody_wrote_down_stay():
    balancer = RoundBalancer(gang([5, 5]), per_step=10)
    assert balancer.learn([1.0, 9.0], [10, 10]) is None
    assert balancer.shares == (5, 5)


def test_a_slow_rank_that_is_dealt_little_does_not_keep_others_from_being_learned_of():
    balancer = RoundBalancer(gang([1] * 4, ["a", "a", "b", "b"], moving=True), per_step=4)
    assert balancer.learn([1.0, 3.0, 1.0, 1.0], [1, 1, 1, 1]) == (1, 0, 2, 1)
    assert balancer.learn([80.0, 0.0, 240.0, 240.0], [80, 0, 60, 60]) == (3, 0, 1, 0)


def test_every_rank_at_work_does_something_in_a_round_so_that_it_is_heard_of_when_it_is_fast_again():
    balancer = RoundBalancer(gang([1] * 4, ["a", "a", "b", "b"], moving=True), per_step=4)
    balancer.learn([1.0, 3.0, 1.0, 1.0], [1, 1, 1, 1])
    (a, b) = balancer.split_work(200)
    assert [sum(len(batch.by_rank[rank]) for batch in a) for rank in range(2)] == [79, 1]
    balancer.learn([79.0, 1.0, 60.0, 60.0], [79, 1, 60, 60])
    assert balancer.shares == (1, 1, 1, 1)
    balancer.learn([1.0, 1.0, 1000.0, 1000.0], [1, 1, 1, 1])
    (a, b) = balancer.split_work(20)
    assert [len(part) for batch in b for part in batch.by_rank] == [1, 1]


def test_an_inner_step_has_work_for_every_rank_where_there_is_enough():
    (batches,) = RoundBalancer(gang([1] * 4, ["a"] * 4), per_step=4).split_work(6)
    assert [len(batch.numbers) for batch in batches] == [6]


def test_shares_move_between_hosts_of_which_one_has_a_first_rank_without_work():
    balancer = RoundBalancer(gang([0, 2, 1, 1], ["a", "a", "b", "b"], moving=True), per_step=4)
    assert balancer.moving
    assert balancer.learn([9.0, 1.0, 1.0, 1.0], [0, 6, 1, 1]) == (0, 3, 1, 0)
