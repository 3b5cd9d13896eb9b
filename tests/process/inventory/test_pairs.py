"""Trying the network between hosts: who asks whom, what comes back, and what is left out with which reason."""

import dataclasses
import itertools
import json
import sys
import time

import pytest

from gangline.errors import HostUnreachable
from gangline.inventory import probe as ears_module
from gangline.inventory.facts import HostFailure, Inventory
from gangline.inventory.pairs import (
    Clock,
    Pair,
    PortTry,
    blame,
    both_ways,
    examples,
    far,
    rounds,
    sample,
    say_tries,
    with_quicker,
)
from gangline.inventory.probe import (
    CannotAsk,
    Probe,
    ask,
    askable,
    clocks,
    is_member,
    listening,
    median_of,
    own_address,
    probe_outsider,
    probe_pairs,
    suspects,
)
from gangline.runs.cluster import Cluster, Host
from gangline.transport.local import LocalTransport
from tests.fakes.transport import FakeTransport, Scripted


def host(name, address, **more):
    return Host(name=name, workdir="/w", python=sys.executable, address=address, **more)


def loopback(num):
    """A cluster on this computer whose hosts have addresses of their own."""
    return Cluster(name="c", hosts=tuple(host(f"pc{n}", f"127.0.0.{n + 1}") for n in range(1, num + 1)))


def inventory(*failures):
    return Inventory(gathered="2026-01-01T00:00:00+00:00", hosts=(), failures=failures)


def local(cluster):
    return {each.name: LocalTransport(each) for each in cluster.hosts}


# --- all of it, on this computer


def test_every_ordered_pair_is_tried():
    cluster = loopback(3)
    begun = time.monotonic()
    found = probe_pairs(cluster, inventory(), local(cluster))
    assert time.monotonic() - begun < 15
    assert {(pair.source, pair.target) for pair in found.pairs} == set(itertools.permutations(["pc1", "pc2", "pc3"], 2))
    assert all(pair.is_open and pair.full_segment and pair.loss == 0 for pair in found.pairs)
    assert [(len(pair.of_kind("rendezvous")), len(pair.of_kind("ephemeral"))) for pair in found.pairs] == [(1, 2)] * 6
    assert {attempt.address for pair in found.to("pc2") for attempt in pair.tries} == {"127.0.0.3"}
    assert [clock.host for clock in found.clocks] == ["pc2", "pc3"]
    assert all(abs(clock.ahead_s) < 0.5 for clock in found.clocks)
    assert [(skip.what, skip.why[:35]) for skip in found.skipped] == [
        ("who outside the cluster reaches the ports", "this computer is a host of the clus")
    ]


def test_a_host_whose_listener_does_not_start_is_left_out_with_the_reason():
    cluster = loopback(3)
    transports = local(cluster)
    transports["pc2"] = FakeTransport("pc2", answer=lambda _: Scripted(returncode=1, stderr="noise\nno python3 here\n"))
    found = probe_pairs(cluster, inventory(), transports)
    assert {pair.source for pair in found.pairs} == {"pc1", "pc3"}
    assert (found.skipped[0].what, found.skipped[0].why) == ("pc2", "no python3 here")


def test_a_host_that_is_gone_costs_the_others_little(monkeypatch):
    monkeypatch.setattr(ears_module, "STRAGGLER_S", 0.5)

    class Silent(FakeTransport):
        def run(self, argv, **_):
            time.sleep(4)  # as a connection that is never made
            raise HostUnreachable("pc3 does not answer")

    cluster = loopback(3)
    begun = time.monotonic()
    found = probe_pairs(cluster, inventory(), {**local(cluster), "pc3": Silent("pc3")})
    assert time.monotonic() - begun < 9
    assert {pair.source for pair in found.pairs} == {"pc1", "pc2"}
    assert found.skipped[0].what == "pc3"


def test_throughput_is_measured_in_the_full_tier(monkeypatch):
    monkeypatch.setattr("gangline.inventory.probe.RATE_S", {"full": 0.1})
    cluster = loopback(2)
    found = probe_pairs(cluster, inventory(), local(cluster), tier="full")
    assert all(pair.throughput_mbps > 10 for pair in found.pairs)


def test_in_the_burn_tier_pairs_are_measured_over_and_over_until_the_time_is_up(monkeypatch):
    monkeypatch.setattr("gangline.inventory.probe.RATE_S", {"burn": 0.05})
    monkeypatch.setattr("gangline.inventory.probe.RATE_BUDGET_S", {"burn": 3.0})
    asked = []
    look = Probe._rate
    monkeypatch.setattr(Probe, "_rate", lambda self, *words: asked.append(words) or look(self, *words))
    cluster = loopback(2)
    found = probe_pairs(cluster, inventory(), local(cluster), tier="burn")
    assert len(asked) >= 4
    assert all(pair.worst_mbps > 0 for pair in found.pairs)


def test_of_several_looks_the_median_and_the_worst_count():
    looks = [pair_of(throughput_mbps=rate, waited=waited) for rate, waited in ((940, 0.0), (300, 0.5), (900, 0.0))]
    found = median_of(looks)
    assert (found.throughput_mbps, found.worst_mbps) == (900, 600)
    assert median_of(looks[:1]).worst_mbps is None


def pair_of(**more):
    return Pair(source="pc1", target="pc2", tries=(), **more)


def test_the_port_where_ranks_will_meet_is_the_one_that_is_tried():
    cluster = loopback(2)
    found = probe_pairs(cluster, inventory(), local(cluster), rendezvous_port=29733)
    assert {attempt.port for pair in found.pairs for attempt in pair.of_kind("rendezvous")} == {29733}


# --- who is asked


def test_hosts_that_do_not_answer_are_not_asked_again():
    failure = HostFailure(host="pc2", why="ssh: no route\n  seen more", unreachable=True)
    hosts, skipped = askable(loopback(3), inventory(failure))
    assert [each.name for each in hosts] == ["pc1", "pc3"]
    assert [(skip.what, skip.why) for skip in skipped] == [("pc2", "ssh: no route")]


def test_one_machine_is_not_tried_with_itself():
    cluster = Cluster(name="c", hosts=(host("pc1", "127.0.0.1"), host("pc2", "127.0.0.1")))
    found = probe_pairs(cluster, inventory(), {})
    assert found.pairs == ()
    assert [skip.what for skip in found.skipped] == ["pc2", "pairs of hosts"]


def test_a_listener_ends_with_the_block():
    cluster = loopback(2)
    with listening(cluster, cluster.hosts, local(cluster), seconds=60) as listeners:
        each = list(listeners._listeners.values())
        assert sorted(listeners.up) == ["pc1", "pc2"]
        begun = time.monotonic()
    assert time.monotonic() - begun < 5
    assert not any(listener.is_up for listener in each)


@pytest.mark.parametrize(
    "words", ['{"instance": 1}', '{"instance": "x", "ports": 3, "data": null}', '{"instance": [], "ports": [{}]}']
)
def test_a_listener_that_says_nonsense_is_left_out(words):
    cluster = loopback(2)
    transports = {name: FakeTransport(name, answer=lambda _: Scripted(stdout=words + "\n")) for name in ("pc1", "pc2")}
    with listening(cluster, cluster.hosts, transports, seconds=1) as listeners:
        assert listeners.up == {}
        assert set(listeners.problems.values()) == {"its listener says what cannot be understood"}


# --- what comes back


def asked(stdout="", **more):
    return ask(FakeTransport("pc1", answer=lambda _: Scripted(stdout=stdout, **more)), "t", [], measure=())


def test_what_a_host_found_out_is_read():
    attempt = {
        "kind": "ephemeral",
        "address": "10.0.0.2",
        "port": 40000,
        "outcome": "timed out",
        "seconds": 2.5,
        "tries": 2,
    }
    record = {
        "target": "pc2",
        "tries": [attempt],
        "source_address": "10.0.0.1",
        "interface": "eno1",
        "neighbour": "02:00:00:00:00:02",
        "latency_min_s": 0.001,
        "own_mtu": 1500,
        "largest_packet": 1400,
        "told_mtu": 1400,
        "packets_sent": 200,
        "packets_answered": 150,
        "burst_mbps": 800,
        "throughput_mbps": 940.5,
        "retransmits": 3,
    }
    (pair,) = asked("noise of a login\n" + json.dumps(record) + "\n")
    assert (pair.source, pair.target, pair.neighbour, pair.loss) == ("pc1", "pc2", "02:00:00:00:00:02", 0.25)
    assert (pair.own_mtu, pair.largest_packet, pair.told_mtu) == (1500, 1400, 1400)
    assert (pair.throughput_mbps, pair.retransmits, pair.burst_mbps) == (940.5, 3, 800)
    assert say_tries(pair.tries) == "10.0.0.2:40000 timed out after 2.5 s, 2 times"


@pytest.mark.parametrize(
    "stdout",
    ["{", "{}", '{"target": "x"}', '{"target": "x", "tries": [1]}', '{"target": "x", "tries": [], "own_mtu": "3"}'],
)
def test_nonsense_is_a_reason_not_a_crash(stdout):
    with pytest.raises(CannotAsk, match="cannot be read"):
        asked(stdout)


def test_a_probe_that_fails_says_why():
    with pytest.raises(CannotAsk, match="no such module"):
        asked(returncode=1, stderr="Traceback\nno such module\n")
    with pytest.raises(CannotAsk, match="did not end"):
        asked(duration_s=1e6)
    gone = FakeTransport("pc1")
    gone.reachable = False
    with pytest.raises(CannotAsk, match="pc1 does not answer"):
        ask(gone, "t", [], measure=())


def attempt(outcome, port=1, address="10.0.0.2", **more):
    return PortTry(kind="ephemeral", address=address, port=port, outcome=outcome, seconds=2.5, **more)


def test_ports_with_the_same_fate_are_told_together():
    tries = [attempt("ok", 1), attempt("timed out", 2, tries=2), attempt("timed out", 3, tries=2), attempt("ok", 4)]
    assert say_tries(tries) == "10.0.0.2:1 :4 answered, 10.0.0.2:2 :3 timed out after 2.5 s, 2 times"
    assert say_tries([attempt("refused", 5, "fd00::2")]) == "[fd00::2]:5 refused"
    assert say_tries([attempt("other", answered_by="pc9")]) == "10.0.0.2:1 was answered by pc9"
    assert say_tries([attempt("no route", detail="No route to host")]) == "10.0.0.2:1 no route (No route to host)"


# --- the parts


@pytest.mark.parametrize("num", [2, 3, 4, 5, 8, 9])
def test_rounds_have_every_pair_once_and_no_host_twice(num):
    hosts = [f"pc{n}" for n in range(num)]
    found = rounds(hosts)
    assert len(found) == (num if num % 2 else num - 1)
    for pairs in found:
        names = [name for pair in pairs for name in pair]
        assert len(names) == len(set(names))
    assert sorted(tuple(sorted(pair)) for pairs in found for pair in pairs) == sorted(itertools.combinations(hosts, 2))
    there, back = both_ways(found[0])
    assert [pair[::-1] for pair in there] == back


def test_one_host_has_no_rounds():
    assert rounds(["pc1"]) == []
    assert rounds([]) == []


def test_a_sample_of_rounds_is_spread():
    found = rounds([f"pc{n}" for n in range(50)])
    few = sample(found, 10)
    assert len(few) == 10
    assert few[0] == found[0]
    assert few[-1] == found[44]
    assert sample(found, 100) == found


def way(source, target, **more):
    return Pair(source=source, target=target, tries=(attempt("ok"),), **more)


@pytest.mark.parametrize(
    ("bad", "hosts"),
    [
        ([], []),
        ([("a", "b")], [("a", "b")]),
        ([("a", "b"), ("b", "a")], [("a", "b")]),
        ([("a", "c"), ("c", "a"), ("b", "c")], [("c",)]),
        ([("a", "b"), ("b", "c"), ("c", "a")], [("a", "b", "c")]),
        ([("a", "b"), ("c", "d")], [("a", "b"), ("c", "d")]),
        ([("x", "a"), ("x", "b"), ("x", "c"), ("a", "b")], [("x",), ("a", "b")]),
    ],
)
def test_blame_names_what_bad_pairs_have_in_common(bad, hosts):
    groups = blame(way(*pair) for pair in bad)
    assert [group.hosts for group in groups] == hosts
    assert sorted((p.source, p.target) for group in groups for p in group.pairs) == sorted(bad)


def test_examples_are_few():
    assert examples(["a"]) == "a"
    assert examples(["a", "b", "c", "d", "e"]) == "a; b; c; and 2 more"


def test_a_slow_first_mebibyte_is_looked_into():
    fast = [way("a", "b", burst_mbps=900.0), way("b", "a", burst_mbps=800.0)]
    assert suspects(fast) == []
    slow = [way("a", "c", burst_mbps=90.0), way("c", "a", burst_mbps=80.0), way("b", "c")]
    assert suspects([*fast, *slow]) == [("c", "a"), ("a", "c"), ("a", "b")]
    assert suspects([way("a", "b", burst_mbps=30_000.0), way("b", "a", burst_mbps=2_000.0)]) == []
    assert suspects([]) == []


class Asked(Probe):
    """Hosts whose round trips are what a test has laid down, look after look."""

    def __init__(self, **trips):
        super().__init__(listeners=None, transports={})
        self.trips = {tuple(ordered.split("_")): list(seconds) for ordered, seconds in trips.items()}
        self.asked = []

    def _measure(self, pair, measure, seconds=1.0):
        assert tuple(measure) == ("time",)
        self.asked.append((pair.source, pair.target))
        seconds = self.trips[pair.source, pair.target].pop(0)
        return dataclasses.replace(pair, latency_min_s=seconds, latency_median_s=seconds, ahead_s=seconds)


def both(seconds, back):
    return [way("a", "b", latency_min_s=seconds, ahead_s=9.0), way("b", "a", latency_min_s=back, ahead_s=9.0)]


def trips(pairs):
    return [pair.latency_min_s for pair in pairs]


def test_hosts_are_near_if_one_round_trip_of_either_was_quick():
    probe = Asked()
    assert trips(probe.looked_again(both(0.03, 0.0002))) == [0.03, 0.0002]
    assert probe.asked == []
    assert far(both(0.03, 0.0002)) == []


def test_what_seems_far_is_tried_again_alone_and_the_quickest_counts():
    probe = Asked(a_b=[0.02, 0.0003])
    again = probe.looked_again(both(0.03, 0.04))
    assert trips(again) == [0.0003, 0.04]
    assert again[0].ahead_s == 0.0003  # the clock as the quickest saw it
    assert probe.asked == [("a", "b")] * 2
    assert far(again) == []


def test_what_is_far_stays_so_and_is_not_tried_for_ever():
    probe = Asked(a_b=[0.013, 0.05])
    again = probe.looked_again(both(0.03, 0.04))
    assert trips(again) == [0.013, 0.04]
    assert len(probe.asked) == 2
    assert far(again) == again


def test_what_could_not_be_timed_is_neither_near_nor_far():
    assert far([way("a", "b"), way("b", "a")]) == []
    assert far([way("a", "b"), way("b", "a", latency_min_s=0.02)]) == [way("a", "b"), way("b", "a", latency_min_s=0.02)]


def test_a_look_while_data_is_sent_does_not_make_a_pair_slower():
    better = way("a", "b", latency_min_s=0.0002, latency_median_s=0.0003, ahead_s=1.0)
    worse = way("a", "b", latency_min_s=0.03, latency_median_s=0.04, ahead_s=2.0, throughput_mbps=95.0)
    assert with_quicker(worse, better) == dataclasses.replace(better, throughput_mbps=95.0)
    assert with_quicker(better, worse) == better
    assert with_quicker(way("a", "b"), better) == better
    assert with_quicker(better, way("a", "b")) == better


def test_the_clock_of_the_quicker_way_counts():
    cluster = loopback(4)
    pairs = [
        way("pc1", "pc2", ahead_s=5.0, latency_min_s=0.010),
        way("pc2", "pc1", ahead_s=-5.2, latency_min_s=0.001),
        way("pc3", "pc2", ahead_s=9.0, latency_min_s=0.001),
    ]
    by_ssh = {"pc3": Clock(host="pc3", ahead_s=-90.0, uncertainty_s=0.25, method="ssh")}
    assert clocks(cluster, pairs, by_ssh) == [
        Clock(host="pc2", ahead_s=5.2, uncertainty_s=0.0005),
        by_ssh["pc3"],
    ]


# --- from outside


def test_this_computer_is_a_member_if_it_is_a_host():
    assert is_member(loopback(2))
    over_ssh = Cluster(
        name="c", hosts=(host("pc1", "192.0.2.10", transport="ssh"), host("pc2", "127.0.0.1", transport="ssh"))
    )
    assert is_member(over_ssh)
    assert not is_member(dataclasses.replace(over_ssh, hosts=over_ssh.hosts[:1]))
    assert own_address("no such name.invalid") is None


def test_from_outside_only_the_host_itself_counts():
    cluster = loopback(2)
    with listening(cluster, cluster.hosts, local(cluster), seconds=60) as listeners:
        targets = [opened.target for opened in listeners.up.values()]
        reached = probe_outsider(listeners.token, targets)
        assert [(each.host, {one.outcome for one in each.tries}) for each in reached] == [
            ("pc1", {"ok"}),
            ("pc2", {"ok"}),
        ]
        (other,) = probe_outsider(listeners.token, [{**targets[0], "instance": "another"}])
        assert {(one.outcome, one.answered_by) for one in other.tries} == {("other", "pc1")}
        (strange,) = probe_outsider("f" * 32, targets[:1], timeout_s=3.0)
        assert {one.outcome for one in strange.tries} == {"stranger"}
    (closed,) = probe_outsider("f" * 32, targets[:1])
    assert {one.outcome for one in closed.tries} == {"refused"}
