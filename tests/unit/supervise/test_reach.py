"""Hosts that answer us, and do not reach each other."""

import pytest

from gangline.errors import HostUnreachable
from gangline.inventory.pairs import Pair, PortTry
from gangline.supervise.lost_hosts import FRESH_S, CutOff, Reaching, find_partition, judge
from tests.unit.supervise.runs import cluster_of
from tests.waiting import wait_until

NAMES = ("pc1", "pc2", "pc3", "pc4")


def pairs(*closed):
    """All ordered pairs; those that are closed as (source, target)."""
    return [
        Pair(source=source, target=target, tries=(may_replace("timed out" if (source, target) in closed else "ok"),))
        for source in NAMES
        for target in NAMES
        if source != target
    ]


def may_replace(outcome):
    return PortTry(kind="ephemeral", address="10.77.0.11", port=4711, outcome=outcome, seconds=3.8, tries=2)


def both(one, *others):
    return [way for other in others for way in ((one, other), (other, one))]


def test_if_all_reach_each_other_nobody_is_cut_off():
    assert judge(pairs(), NAMES) is None


def test_a_host_that_none_of_the_others_reach_is_cut_off():
    cut = judge(pairs(*both("pc1", "pc2", "pc3", "pc4")), NAMES)
    assert cut.hosts == ("pc1",)
    assert cut.what == "pc1 does not reach pc2, pc3 and pc4, and is not reached from there"
    assert "from pc1 to pc2: 10.77.0.11:4711 timed out after 3.8 s, 2 times" in cut.seen
    error = cut.to_json()
    assert (error["host"], error["kind"]) == ("pc1", "RunFailed")
    assert "gangline check" in error["fix"]


def test_of_two_that_reach_all_others_the_one_further_back_leaves():
    assert judge(pairs(*both("pc1", "pc3")), NAMES).hosts == ("pc3",)


@pytest.mark.parametrize(
    ("closed", "what"),
    [
        ([("pc2", "pc3")], "pc2 does not reach pc3"),
        ([("pc3", "pc1"), ("pc3", "pc2")], "pc3 does not reach pc1 and pc2"),
        ([("pc1", "pc3"), ("pc2", "pc3")], "pc1 and pc2 do not reach pc3"),
    ],
)
def test_which_way_is_closed_is_said(closed, what):
    cut = judge(pairs(*closed), NAMES)
    assert (cut.hosts, cut.what) == (("pc3",), what)


def test_two_hosts_may_be_cut_off():
    cut = judge(pairs(*both("pc2", "pc1", "pc3", "pc4"), *both("pc3", "pc1", "pc4")), NAMES)
    assert cut.hosts == ("pc3", "pc2")
    assert cut.what == (
        "pc3 does not reach pc1, pc2 and pc4, and is not reached from there; "
        "pc2 does not reach pc1 and pc4, and is not reached from there"
    )


def test_hosts_that_are_one_machine_are_not_asked(tmp_path):
    cluster = cluster_of(tmp_path, "pc1", "pc2")
    assert find_partition(cluster.hosts, cluster, {}, port=29500) is None


def test_who_was_cut_off_is_asked_again_until_it_is_not():
    said = [judge(pairs(*both("pc2", "pc1")), NAMES), HostUnreachable("pc1 does not answer"), None]

    def find():
        found = said.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    cut = CutOff(["pc3"], find)
    wait_until(lambda: cut.look() == {"pc2"}, "the first answer")
    wait_until(lambda: cut.look() == set(), "the last one")
    assert (cut.look(), said) == (set(), [])


def test_nobody_is_asked_if_nobody_was_cut_off():
    assert CutOff([], pytest.fail).look() == set()


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def test_whether_a_host_is_back_among_the_others_is_asked_once_in_a_while():
    asked, clock = [], Clock()
    cuts = [judge(pairs(*both("pc3", "pc1", "pc2")), NAMES), judge(pairs(*both("pc4", "pc1")), NAMES), None]

    def find(hosts):
        asked.append(tuple(hosts))
        return cuts[len(asked) - 1]

    reaching = Reaching(find, clock=clock)
    said = []
    for _ in range(3):
        said += [reaching.reaches("pc3", ["pc1", "pc2"]), reaching.reaches("pc3", ["pc1", "pc2"])]
        clock.now += FRESH_S + 1
    assert said == [False, False, True, True, True, True]
    assert asked == [("pc1", "pc2", "pc3")] * 3


def test_a_host_that_cannot_be_asked_is_not_back():
    def find(hosts):
        raise HostUnreachable("pc1 does not answer")

    assert not Reaching(find).reaches("pc3", ["pc1"])
