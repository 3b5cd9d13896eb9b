"""A machine that becomes slow is named while ranks train, with the cause; links are looked at by all ranks at once."""

import itertools

import pytest

from tests.train import cases_stragglers

pytestmark = pytest.mark.rotating

FROM = 22


@pytest.mark.parametrize("num_hosts", [2, 3, 4, 7, 8])
def test_every_two_hosts_meet_once_and_nobody_is_in_two_pairs_at_a_time(pool, num_hosts):
    rounds = pool(1).run(cases_stragglers.rounds, num_hosts=num_hosts)[0]
    met = [tuple(pair) for pairing in rounds for pair in pairing]
    assert sorted(met) == list(itertools.combinations(range(num_hosts), 2))
    assert all(len(set(itertools.chain(*pairing))) == 2 * len(pairing) for pairing in rounds)
    assert len(rounds) == num_hosts - 1 + num_hosts % 2


@pytest.mark.parametrize(
    ("num_hosts", "slow", "blamed"),
    [
        (3, [[0, 2], [1, 2]], [[2]]),
        (3, [[0, 1]], [[0, 1]]),
        (3, [[0, 1], [0, 2], [1, 2]], [[]]),
        (2, [[0, 1]], [[0, 1]]),
        (4, [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3]], [[0], [1]]),
        (4, [[0, 1], [2, 3]], [[0, 1], [2, 3]]),
    ],
)
def test_the_host_all_of_whose_links_became_slow_is_blamed(pool, num_hosts, slow, blamed):
    found = pool(1).run(cases_stragglers.blamed, num_hosts=num_hosts, slow=slow)[0]
    assert [hosts for hosts, _ in found] == blamed
    assert all(factor == 3.0 for _, factor in found)


def test_links_that_are_a_little_slower_are_no_reason(pool):
    assert pool(1).run(cases_stragglers.blamed, num_hosts=3, slow=[], rest=1.15)[0] == []
    assert pool(1).run(cases_stragglers.blamed, num_hosts=3, slow=[], rest=1.25)[0] == [[[], 1.25]]


@pytest.mark.parametrize("hosts", [["pc1", "pc2", "pc3"], ["pc1", "pc1", "pc2"]])
def test_all_ranks_know_how_long_messages_take_between_any_two_hosts(pool, hosts):
    found = pool(3).run(cases_stragglers.looked, hosts=hosts)
    assert found[0] == found[1] == found[2]
    assert [row[:2] for row in found[0]] == [list(each) for each in itertools.combinations(range(len(set(hosts))), 2)]
    assert all(0 < seconds < 1 for _, _, seconds in found[0])


@pytest.mark.parametrize(
    ("cause", "rank", "says"), [("compute", 2, "pc3 computes"), ("data", 1, "pc2 waits"), ("network", 0, "link of pc1")]
)
def test_a_slow_machine_is_named_with_the_cause_within_twenty_steps(pool, cause, rank, says):
    told = pool(3).run(cases_stragglers.trained, cause=cause, rank=rank)
    assert told[1] == told[2] == []  # rank 0 speaks for all
    assert [(event["event"], event["cause"], event["host"]) for event in told[0]] == [
        ("straggler", cause, f"pc{rank + 1}")
    ]
    (event,) = told[0]
    assert FROM < event["step"] <= FROM + 20
    assert event["rank"] == rank
    assert 1.2 < event["factor"] < 5
    assert says in event["what"]


def test_where_every_step_is_followed_by_a_save_nobody_is_named(pool):
    assert pool(2).run(cases_stragglers.saved, shares=[2, 1]) == [["finished", []]] * 2


def test_what_is_said_has_figures_and_tells_where_to_look(pool):
    gpu, cpu, data, host, pair, everywhere = pool(1).run(cases_stragglers.words)[0]
    assert gpu == (
        "pc3 computes 1.60 x as slowly as before (0.42 -> 0.672 s per micro-batch): heat, a power limit or another "
        "program? nvidia-smi -q -d PERFORMANCE there says more"
    )
    assert "? top there" in cpu
    assert data.startswith(
        "pc1 waits for its samples (0.002 -> 0.085 s per micro-batch), which makes it 1.20 x as slow"
    )
    assert "the link of pc2: 3.1 x as slow as before (932 -> 301 Mbit/s), steps take 0.4 s longer" in host
    assert pair.startswith("the link between pc1 and pc3: ")
    assert everywhere.startswith("the links between all hosts: ")
