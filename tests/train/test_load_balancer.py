"""Who does how much: shares follow lasting changes of speed within a few steps, and nothing else."""

from __future__ import annotations

import math
import random
import sys
from types import SimpleNamespace

import pytest

from gangline.worker.balance import MOVE_STEPS, SAVED_STEPS, LoadBalancer

TRIO = (1.0, 0.55, 0.45)


class Machines:
    """Ranks of given speeds under one balancer. A micro-batch of 100 tokens takes a rank of speed 1 one second."""

    def __init__(self, speeds, *, shares, seed=0, noise=0.0, together=0.0, measured=True):
        self.speeds = list(speeds)
        self.balancer = LoadBalancer(shares, moving=True)
        self.dice = random.Random(seed)
        self.noise, self.together = noise, together
        self.moves = []
        self.step = 0
        if measured:
            self.balancer.begin([1 / speed for speed in speeds])

    def run(self, num_steps, *, work=None, floor=0.0, stalls=None):
        """Steps; `work` gives the tokens of every micro-batch of one, `stalls` seconds more by (step, rank)."""
        for _ in range(num_steps):
            tokens = work() if work else [100] * sum(self.balancer.shares)
            times, weather = [], max(0.2, self.dice.gauss(1.0, self.together))
            for rank, mine in enumerate(self.balancer.split_work(len(tokens))):
                seconds = sum(tokens[index] / 100 + floor for index in mine) / self.speeds[rank]
                seconds *= weather * max(0.2, self.dice.gauss(1.0, self.noise))
                times.append(SimpleNamespace(data_s=0.0, compute_s=seconds + (stalls or {}).get((self.step, rank), 0)))
            moved = self.balancer.learn(times, tokens)
            if moved is not None:
                self.moves.append((self.step, moved))
            self.step += 1
        return self

    @property
    def efficiency(self):
        """Of the sum of speeds, with the present shares."""
        ends = [share / speed for share, speed in zip(self.balancer.shares, self.speeds, strict=True)]
        return sum(self.balancer.shares) / max(ends) / sum(self.speeds)


def test_shares_follow_what_was_measured_at_the_start():
    machines = Machines(TRIO, shares=(14, 13, 13))
    assert machines.balancer.shares == (20, 11, 9)
    assert machines.efficiency == pytest.approx(1.0)


def test_the_planned_shares_stay_where_the_measurement_promises_little():
    balancer = LoadBalancer((200, 110, 90), moving=True)
    moved = balancer.begin([1.0, 1.02 / 0.55, 0.98 / 0.45])
    assert moved.before == moved.after == balancer.shares == (200, 110, 90)
    assert balancer.begin([1.0, 1.04 / 0.55, 0.96 / 0.45]).after != (200, 110, 90)


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_a_machine_that_becomes_twice_as_slow_is_dealt_less_within_4_steps_and_gets_its_work_back(rank, noise):
    machines = Machines(TRIO, shares=(14, 13, 13), noise=noise).run(50)
    assert machines.moves == []
    machines.speeds[rank] /= 2
    machines.run(4)
    assert machines.balancer.shares[rank] < (20, 11, 9)[rank]
    assert machines.efficiency >= 0.95
    machines.run(96)
    machines.speeds[rank] *= 2
    machines.run(4)
    assert machines.balancer.shares == (20, 11, 9)
    assert [step for step, _ in machines.moves] == [53, 153]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("speeds", "count"), [(TRIO, 40), (TRIO, 400), ((1.0, 0.7), 300), ((1.0,) * 16, 256)])
def test_unsteady_times_move_nothing(speeds, count, seed):
    shares = [count // len(speeds) + (rank < count % len(speeds)) for rank in range(len(speeds))]
    assert Machines(speeds, shares=shares, seed=seed, noise=0.05).run(200).moves == []


def test_a_small_lasting_drift_moves_shares_after_ten_steps():
    machines = Machines((1.0,) * 8, shares=(100,) * 8).run(20)
    machines.speeds[2] /= 1.05
    ((step, moved),) = machines.run(60).moves
    assert step - 20 < 10
    assert moved.gain >= 0.03


def test_what_makes_all_machines_slow_at_once_hides_no_drift_of_one():
    machines = Machines((1.0,) * 8, shares=(100,) * 8, noise=0.01, together=0.3).run(40)
    assert machines.moves == []
    machines.speeds[2] /= 1.08
    machines.run(20)
    assert len(machines.moves) == 1
    assert machines.balancer.shares[2] < 97


def test_a_small_lasting_drift_moves_nothing_where_no_whole_micro_batch_gains_by_it():
    machines = Machines((1.0,) * 8, shares=(10,) * 8).run(20)
    machines.speeds[2] /= 1.05
    assert machines.run(60).moves == []


def test_what_gains_two_per_cent_is_moved_after_thirty_steps():
    machines = Machines((1.0, 1.05), shares=(50, 50), measured=False).run(60)
    assert [(step, moved.after) for step, moved in machines.moves] == [(31, (49, 51))]


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("stalled", [[(20, 1)], [(20, 1), (21, 1)], [(20, 1), (21, 2)]])
def test_a_stall_moves_nothing_however_often_it_comes_back(stalled, noise):
    stalls = {(step + later, rank): 30.0 for step, rank in stalled for later in (0, 10, 20, 30)}
    assert Machines(TRIO, shares=(20, 11, 9), noise=noise).run(60, stalls=stalls).moves == []


def test_slow_first_steps_move_nothing():
    stalls = {(0, 0): 40.0, (0, 1): 20.0, (1, 0): 5.0}
    assert Machines(TRIO, shares=(20, 11, 9)).run(20, stalls=stalls).moves == []


def test_a_wrong_measurement_at_the_start_is_put_right_within_5_steps():
    machines = Machines(TRIO, shares=(14, 13, 13), measured=False)
    machines.balancer.begin([30.0, 1 / 0.55, 1 / 0.45])
    assert machines.balancer.shares[0] <= 2
    machines.run(5)
    assert machines.efficiency >= 0.95


@pytest.mark.parametrize("floor", [0.0, 1.2, 5.0, 20.0])
def test_machines_are_judged_rightly_by_rows_of_unlike_lengths_even_where_short_ones_cost_as_much(floor):
    found = []
    for seed in range(4):
        dice = random.Random(seed)
        machines = Machines(TRIO, shares=(14, 13, 13), seed=seed, noise=0.01, measured=False)
        machines.run(150, work=lambda dice=dice: [8 + int(dice.lognormvariate(5, 1)) for _ in range(40)], floor=floor)
        found.append(machines.efficiency)
    assert sum(found) / 4 >= 0.98


def test_two_machines_that_differ_only_in_their_floor_are_dealt_by_what_rows_cost_them():
    """The first takes as long as 4 mean rows for every micro-batch; per token alone it would be misjudged."""
    dice = random.Random(1)
    balancer = LoadBalancer((10, 2), moving=True)
    for _ in range(60):
        tokens = [dice.choice((10, 190)) for _ in range(12)]
        first, second = (sum(tokens[index] for index in mine) / 100 for mine in balancer.split_work(12))
        counts = balancer.counts(12)
        times = [first + 4 * counts[0], 5 * second]
        balancer.learn([SimpleNamespace(data_s=0.0, compute_s=each) for each in times], tokens)
    assert balancer.shares == (6, 6)


def test_the_short_last_step_of_an_epoch_is_dealt_by_speed_and_says_nothing_where_somebody_has_no_work():
    machines = Machines(TRIO, shares=(20, 11, 9))
    assert machines.balancer.counts(10) == (5, 3, 2)
    assert sum(machines.balancer.counts(1)) == 1
    for _ in range(30):
        machines.run(1).run(1, work=lambda: [100, 40])
    assert machines.moves == []
    machines.speeds[0] /= 2
    for _ in range(4):
        machines.run(1).run(1, work=lambda: [100, 40])
    assert machines.efficiency >= 0.95


def test_without_measured_speeds_a_short_step_is_cut_by_the_planned_shares():
    assert LoadBalancer((20, 11, 9), moving=False).counts(10) == (5, 3, 2)


def test_a_rank_without_a_share_never_gets_one():
    machines = Machines((1.0, 1.0, 1.0), shares=(10, 2, 0))
    assert machines.balancer.shares == (6, 6, 0)
    machines.speeds[0] /= 3
    machines.run(30)
    assert machines.balancer.shares == (3, 9, 0)
    assert machines.balancer.counts(1) == (0, 1, 0)
    assert machines.moves[0][1].micro_batch_s[2] is None


def test_a_rank_with_work_keeps_some_and_is_noticed_when_it_becomes_faster():
    machines = Machines((1.0, 0.01), shares=(10, 10))
    assert machines.balancer.shares == (19, 1)
    machines.speeds[1] = 1.0
    machines.run(5)
    assert machines.balancer.shares == (10, 10)


def test_shares_that_were_given_stay():
    balancer = LoadBalancer((10, 10), moving=False)
    for _ in range(40):
        assert balancer.learn([SimpleNamespace(data_s=0.0, compute_s=each) for each in (1.0, 9.0)], [1] * 20) is None
    assert balancer.shares == (10, 10)
    assert not LoadBalancer((10,), moving=True).moving
    assert not LoadBalancer((10, 0), moving=True).moving


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_times_that_are_none_move_nothing_and_break_nothing(bad):
    balancer = LoadBalancer((20, 11, 9), moving=True)
    assert balancer.begin([bad, 1.0, 1.0]).after == (20, 11, 9)
    for _ in range(20):
        assert (
            balancer.learn([SimpleNamespace(data_s=0.0, compute_s=each) for each in (20, bad, 1)], [100] * 40) is None
        )
    assert balancer.counts(10) == (5, 3, 2)


def test_the_time_of_reading_data_counts():
    balancer = LoadBalancer((10, 10), moving=True)
    balancer.begin([1.0, 1.0])
    for _ in range(5):
        balancer.learn([SimpleNamespace(data_s=each, compute_s=10.0) for each in (0.0, 10.0)], [100] * 20)
    assert balancer.shares == (14, 6)


def test_a_machine_that_changes_its_mind_all_the_time_moves_shares_now_and_then_only():
    machines = Machines((1.0, 1.0), shares=(10, 10))
    for _ in range(100):
        machines.speeds[0] = 1.5 - machines.speeds[0]
        machines.run(10)
    assert 20 <= len(machines.moves) <= (SAVED_STEPS + 1000) / MOVE_STEPS


def test_every_rank_deals_alike_from_the_same_reports():
    one, other = (Machines(TRIO, shares=(14, 13, 13), seed=3, noise=0.2) for _ in range(2))
    for machines in (one, other):
        for step in range(120):
            machines.speeds[1] = 0.55 * (1 + step // 20 % 3)
            machines.run(1)
    assert len(one.moves) > 2
    assert one.moves == other.moves


def test_the_cost_of_keeping_the_books_is_small():
    """Of 64 ranks and 1,024 micro-batches of unlike lengths: not the time, which depends on the machine, but calls."""
    machines = Machines((1.0,) * 64, shares=(16,) * 64, noise=0.05)
    calls = 0

    def count(frame, event, _):
        nonlocal calls
        calls += event == "call"

    dice = random.Random(0)
    machines.run(40, work=lambda: [dice.randint(10, 200) for _ in range(1024)])
    sys.setprofile(count)
    machines.run(1, work=lambda: [dice.randint(10, 200) for _ in range(1024)])
    sys.setprofile(None)
    assert calls < 40_000


def test_a_move_is_told_in_words():
    balancer = LoadBalancer((20, 11, 9), moving=True)
    hosts = ("pc1", "pc2", "pc3")
    start = balancer.begin([1.0, 1 / 0.55, 1 / 0.45])
    assert start.words(hosts) == "pc1 20 micro-batches, pc2 11, pc3 9, as before"
    machines = Machines(TRIO, shares=(20, 11, 9))
    machines.speeds[0] /= 2
    _, moved = machines.run(5).moves[0]
    assert moved.words(hosts) == "pc1 20 -> 13 micro-batches, pc2 11 -> 15, pc3 9 -> 12; steps get 32 % shorter"
    assert moved.micro_batch_s == pytest.approx((2.0, 1 / 0.55, 1 / 0.45))


def test_ranks_of_a_host_are_told_together_and_many_hosts_in_short():
    speeds = [1.0] * 32
    machines = Machines(speeds, shares=(32,) * 32)
    machines.speeds[0] = machines.speeds[1] = 0.5
    hosts = [f"gpu{rank // 2}" for rank in range(32)]
    words = machines.run(5).moves[0][1].words(hosts)
    assert words.startswith("gpu0 64 -> ")
    assert " and " in words
    assert len(words) < 160
    within = LoadBalancer((5, 5), moving=True).begin([1.0, 2.0])
    assert within.words(["pc1", "pc1"]).startswith("moved between ranks of a host")


def test_ranks_of_a_crew_get_the_same_micro_batches_and_move_together():
    balancer = LoadBalancer((20, 20, 20, 20), moving=True, replica_groups=(0, 0, 1, 1))
    assert balancer.split_work(40) == [range(20), range(20), range(20, 40), range(20, 40)]
    moved = balancer.begin([1.0, 1.0, 3.0, 3.0])
    assert moved.after == balancer.shares == (30, 30, 10, 10)
    assert moved.micro_batch_s == (1.0, 1.0, 3.0, 3.0)
    assert moved.words(["pc1", "pc1", "pc2", "pc2"]).startswith("pc1 20 -> 30 micro-batches, pc2 20 -> 10")
    assert balancer.split_work(4) == [range(3), range(3), range(3, 4), range(3, 4)]
    assert LoadBalancer((12, 12), moving=True, replica_groups=(0, 0)).split_work(5) == [range(5), range(5)]
