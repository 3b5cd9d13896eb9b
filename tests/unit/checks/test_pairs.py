"""What was tried between the hosts is judged: one finding per cause, and none where all is well."""

import dataclasses

import pytest

from gangline.checks import access, clocks, links, network
from gangline.checks.rules import apply
from gangline.inventory.pairs import Clock, ListenerFacts, Outside, Pairs
from tests.unit.checks.pairs_story import (
    address,
    changed,
    closed,
    cluster,
    facts,
    healthy,
    inventory,
    mac,
    tries,
)

THREE = ("pc1", "pc2", "pc3")
RULES = (*network.RULES, *links.RULES, *clocks.RULES, *access.RULES)


def judged(pairs, *names, hosts=(), **options):
    mine = cluster(*(names or THREE), **options)
    return apply(RULES, inventory(pairs, *hosts), mine)


def brief(findings):
    return [(finding.id, finding.severity, finding.hosts) for finding in findings]


def test_healthy_hosts_have_no_findings():
    assert judged(healthy(*THREE), hosts=[facts(name) for name in THREE]) == []
    assert judged(healthy("pc1", "pc2"), "pc1", "pc2") == []


def test_nothing_that_was_not_tried_is_a_finding():
    assert judged(None) == []
    assert judged(Pairs(measured="", tier="quick")) == []
    unmeasured = changed(
        healthy(*THREE),
        lambda *_: True,
        full_segment=None,
        largest_packet=None,
        packets_sent=0,
        packets_answered=0,
        latency_min_s=None,
        throughput_mbps=None,
    )
    assert judged(unmeasured) == []


def test_a_host_that_lets_nobody_in_is_one_finding():
    findings = judged(closed(healthy(*THREE), lambda _, target: target == "pc3"))
    assert brief(findings) == [("E-NET-01", "fail", ("pc3",))]
    assert findings[0].evidence.startswith(
        "pc1 -> pc3 10.0.0.3:29500 :40001 :40002 timed out after 2.5 s, 2 times; pc2 -> pc3"
    )
    assert "let the hosts (10.0.0.1, 10.0.0.2) in on pc3" in findings[0].fix
    assert findings[0].step == "firewall"


def test_a_host_whose_cable_is_out_is_one_finding():
    cut = closed(healthy("pc1", "pc2", "pc3", "pc4"), lambda *pair: "pc3" in pair, how="no route")
    assert brief(judged(cut, "pc1", "pc2", "pc3", "pc4")) == [("E-NET-01", "fail", ("pc3",))]


def test_hosts_that_all_let_nobody_in_are_one_finding():
    findings = judged(closed(healthy(*THREE), lambda *_: True))
    assert brief(findings) == [("E-NET-01", "fail", THREE)]
    assert findings[0].evidence.endswith("; and 3 more")


@pytest.mark.parametrize("names", [("pc1", "pc2"), THREE])
def test_a_firewall_between_two_hosts_names_these_two(names):
    findings = judged(closed(healthy(*names), lambda *pair: set(pair) == {"pc1", "pc2"}), *names)
    assert brief(findings) == [("E-NET-01", "fail", ("pc1", "pc2"))]


@pytest.mark.parametrize("names", [("pc1", "pc3"), THREE])
def test_one_way_is_told_as_such(names):
    findings = judged(closed(healthy(*names), lambda *pair: pair == ("pc3", "pc1")), *names)
    assert brief(findings) == [("E-NET-05", "fail", ("pc3", "pc1"))]
    assert "pc3 -> pc1 10.0.0.1:29500 :40001 :40002 timed out" in findings[0].evidence
    assert findings[0].evidence.endswith("pc1 reaches pc3")


def test_a_host_that_reaches_nobody_but_is_reached_is_one_finding():
    assert brief(judged(closed(healthy(*THREE), lambda source, _: source == "pc3"))) == [("E-NET-05", "fail", ("pc3",))]


def test_the_port_where_ranks_meet_closed_on_the_head():
    pairs = changed(healthy(*THREE), lambda _, target: target == "pc1", tries=tries("pc1", "refused"))
    findings = judged(pairs)
    assert brief(findings) == [("E-NET-02", "fail", ("pc1",))]
    assert findings[0].title == "port 29500, where the ranks meet, is closed; others are open"
    assert "10.0.0.1:29500 refused, 2 times, 10.0.0.1:40001 :40002 answered" in findings[0].evidence


def test_the_port_where_ranks_meet_is_not_needed_elsewhere():
    assert judged(changed(healthy(*THREE), lambda _, target: target == "pc2", tries=tries("pc2", "refused"))) == []


def test_only_the_port_where_ranks_meet_is_open():
    pairs = changed(
        healthy(*THREE), lambda *_: True, tries=lambda pair: tries(pair.target, "ok", ("timed out", "timed out"))
    )
    findings = judged(pairs)
    assert brief(findings) == [("E-NET-03", "fail", THREE)]
    assert "32768 to 60999" in findings[0].meaning


def test_a_hole_in_the_range_is_found_too():
    pairs = changed(healthy(*THREE), lambda _, target: target == "pc2", tries=tries("pc2", "ok", ("ok", "no route")))
    assert brief(judged(pairs)) == [("E-NET-03", "fail", ("pc2",))]


def test_another_host_of_the_cluster_answers():
    pairs = changed(
        healthy(*THREE),
        lambda _, target: target == "pc2",
        tries=tries("pc2", "other", ("refused", "refused"), answered_by="pc3"),
    )
    findings = judged(pairs)
    assert brief(findings) == [("E-NET-04", "fail", ("pc2",))]
    assert "10.0.0.2:29500 was answered by pc3" in findings[0].evidence


def test_an_address_that_is_not_the_hosts_own_and_is_answered():
    pairs = closed(healthy(*THREE), lambda _, target: target == "pc2", how="refused")
    listeners = tuple(dataclasses.replace(listener, has_address=listener.host != "pc2") for listener in pairs.listeners)
    assert brief(judged(dataclasses.replace(pairs, listeners=listeners))) == [("E-NET-04", "fail", ("pc2",))]


def test_an_address_that_is_nobodys_is_left_to_the_check_of_names():
    pairs = closed(healthy(*THREE), lambda _, target: target == "pc2", how="no route")
    listeners = tuple(dataclasses.replace(listener, has_address=listener.host != "pc2") for listener in pairs.listeners)
    assert judged(dataclasses.replace(pairs, listeners=listeners)) == []


def test_an_address_behind_a_translation_that_works_is_fine():
    pairs = healthy(*THREE)
    listeners = tuple(dataclasses.replace(listener, has_address=listener.host != "pc2") for listener in pairs.listeners)
    assert judged(dataclasses.replace(pairs, listeners=listeners)) == []


@pytest.mark.parametrize(
    ("how", "answers", "expected"),
    [
        ("refused", "0e:00:00:00:00:99", "E-NET-04"),  # a second machine has the address and no program listens there
        ("timed out", "0e:00:00:00:00:99", "E-NET-01"),  # a repeater, perhaps: not enough to blame an address
        ("timed out", mac("pc1"), "E-NET-04"),
        ("refused", mac("pc2"), "E-NET-01"),
        ("refused", None, "E-NET-01"),
    ],
)
def test_whose_mac_answers_tells_two_machines_with_one_address(how, answers, expected):
    pairs = closed(healthy(*THREE), lambda _, target: target == "pc2", how=how)
    pairs = changed(pairs, lambda _, target: target == "pc2", neighbour=answers)
    findings = judged(pairs)
    assert brief(findings) == [(expected, "fail", ("pc2",))]
    assert (f"the MAC {answers}" in findings[0].evidence) == (expected == "E-NET-04")


def test_a_strange_mac_is_nothing_where_the_right_host_answers():
    assert judged(changed(healthy(*THREE), lambda *_: True, neighbour="0e:00:00:00:00:99")) == []


def test_a_second_card_that_the_others_do_not_reach():
    pairs = changed(
        healthy(*THREE), lambda _, target: target == "pc3", tries=tries("pc3", "ok", ("no route", "no route"))
    )
    listeners = tuple(
        dataclasses.replace(listener, data_address="10.9.0.3" if listener.host == "pc3" else None)
        for listener in pairs.listeners
    )
    mine = cluster(*THREE)
    hosts = tuple(dataclasses.replace(h, interface="eth1" if h.name == "pc3" else None) for h in mine.hosts)
    findings = apply(
        network.RULES,
        inventory(dataclasses.replace(pairs, listeners=listeners)),
        dataclasses.replace(mine, hosts=hosts),
    )
    assert brief(findings) == [("E-NET-09", "fail", ("pc3",))]
    assert findings[0].title == "the others do not reach its interface eth1"


def test_one_host_with_an_ipv6_address():
    mine = cluster(*THREE)
    hosts = tuple(dataclasses.replace(h, address="fd00::3" if h.name == "pc3" else h.address) for h in mine.hosts)
    findings = apply(network.RULES, inventory(None), dataclasses.replace(mine, hosts=hosts))
    assert brief(findings) == [("E-NET-10", "fail", ("pc3",))]
    assert findings[0].evidence == "pc1 10.0.0.1, pc2 10.0.0.2, pc3 fd00::3"


def test_a_cluster_of_ipv6_addresses_and_one_of_names_are_fine():
    mine = cluster(*THREE)
    for make in (lambda name: f"fd00::{name[-1]}", lambda name: f"{name}.lan"):
        hosts = tuple(dataclasses.replace(h, address=make(h.name)) for h in mine.hosts)
        assert apply(network.RULES, inventory(None), dataclasses.replace(mine, hosts=hosts)) == []


def test_a_black_hole_for_large_packets():
    pairs = changed(healthy(*THREE), lambda *pair: "pc2" in pair, full_segment=False, largest_packet=1000)
    findings = judged(pairs)
    assert brief(findings) == [("E-NET-06", "fail", ("pc2",))]
    assert "of UDP up to 1000 bytes arrive, eno1 has MTU 1500" in findings[0].evidence


def test_a_card_with_jumbo_frames_among_others():
    pairs = changed(healthy(*THREE), lambda source, _: source == "pc1", own_mtu=9000, largest_packet=1500)
    assert brief(judged(pairs)) == [("E-NET-06", "warn", ("pc1",))]
    # the cards say so themselves: one finding about it is enough
    assert judged(pairs, hosts=[facts(name) for name in THREE]) == []


def test_a_smaller_packet_on_the_way_is_fine_if_somebody_says_so():
    assert judged(changed(healthy(*THREE), lambda *_: True, largest_packet=1420, told_mtu=1420)) == []


def test_a_slow_link_names_its_host():
    findings = judged(changed(healthy(*THREE), lambda *pair: "pc3" in pair, throughput_mbps=94.0))
    assert brief(findings) == [("E-NET-07", "warn", ("pc3",))]
    assert findings[0].evidence.startswith("pc1 -> pc3 94 Mbit/s; ")
    assert findings[0].evidence.endswith("; pc1 -> pc2 940 Mbit/s")


def test_busy_hosts_are_not_taken_for_a_slow_link():
    busy = changed(healthy(*THREE), lambda *pair: "pc3" in pair, throughput_mbps=200.0, waited=0.5)
    assert judged(busy) == []
    slow = changed(busy, lambda *pair: "pc3" in pair, throughput_mbps=94.0, waited=0.5)
    assert brief(judged(slow)) == [("E-NET-07", "warn", ("pc3",))]


def test_two_slow_hosts_are_measured_by_their_cards():
    pairs = changed(healthy("pc1", "pc2"), lambda *_: True, throughput_mbps=94.0)
    assert judged(pairs, "pc1", "pc2") == []
    findings = judged(pairs, "pc1", "pc2", hosts=[facts("pc1"), facts("pc2")])
    assert brief(findings) == [("E-NET-07", "warn", ("pc1", "pc2"))]
    assert "94 Mbit/s, the cards can 1000" in findings[0].evidence


def test_a_link_that_gets_slow_when_it_is_warm_names_its_host():
    even = changed(healthy(*THREE), lambda *_: True, worst_mbps=800.0)
    assert judged(even) == []
    findings = judged(changed(even, lambda *pair: "pc3" in pair, worst_mbps=120.0))
    assert brief(findings) == [("E-NET-07", "warn", ("pc3",))]
    assert findings[0].title == "the link is slow at times"
    assert findings[0].evidence.startswith("pc1 -> pc3 120 to 940 Mbit/s")


def test_a_fast_card_that_our_probe_cannot_fill_is_fine():
    pairs = changed(healthy(*THREE), lambda *_: True, throughput_mbps=9000.0)
    assert judged(pairs, hosts=[facts(name, speed_mbps=100_000) for name in THREE]) == []


def test_links_of_1_and_of_2_5_gigabit_are_fine():
    pairs = changed(healthy(*THREE), lambda *pair: "pc3" not in pair, throughput_mbps=2350.0)
    hosts = [facts("pc1", speed_mbps=2500), facts("pc2", speed_mbps=2500), facts("pc3")]
    assert judged(pairs, hosts=hosts) == []


@pytest.mark.parametrize(("answered", "severity"), [(398, None), (380, "warn"), (300, "fail")])
def test_lost_packets(answered, severity):
    pairs = changed(healthy(*THREE), lambda *pair: "pc2" in pair, packets_sent=400, packets_answered=answered)
    findings = judged(pairs)
    assert brief(findings) == ([("E-NET-12", severity, ("pc2",))] if severity else [])
    assert not findings or f"{400 - answered} of 400 UDP packets" in findings[0].evidence


def test_udp_that_is_forbidden_is_no_loss():
    assert (
        judged(changed(healthy(*THREE), lambda *_: True, packets_sent=200, packets_answered=0, largest_packet=None))
        == []
    )


def test_a_host_that_is_far_away():
    findings = judged(changed(healthy(*THREE), lambda *pair: "pc3" in pair, latency_min_s=0.012))
    assert brief(findings) == [("E-NET-11", "warn", ("pc3",))]
    assert "12.0 ms there and back" in findings[0].evidence


def test_a_way_that_is_slow_in_one_direction_only_was_disturbed():
    busy = changed(healthy(*THREE), lambda *pair: pair[0] == "pc3", latency_min_s=0.012)
    assert judged(busy) == []


@pytest.mark.parametrize(
    ("ahead_s", "severity"), [(1.5, None), (2.5, "warn"), (90.0, "warn"), (-90.0, "warn"), (-86400.0, "fail")]
)
def test_clocks(ahead_s, severity):
    expected = [("E-CLOCK-01", severity, ("pc2",))] if severity else []
    by_network = dataclasses.replace(healthy(*THREE), clocks=(Clock(host="pc2", ahead_s=ahead_s, uncertainty_s=0.001),))
    assert brief(judged(by_network)) == expected
    hosts = [facts("pc1"), facts("pc2", time_s=1000.0 + ahead_s), facts("pc3")]
    assert brief(judged(None, hosts=hosts)) == expected
    assert brief(judged(healthy(*THREE), hosts=hosts)) == expected


def test_a_clock_is_told_in_words():
    hosts = [facts("pc1"), facts("pc2", time_s=1090.0)]
    assert judged(None, "pc1", "pc2", hosts=hosts)[0].title == "its clock is 1 min 30 s ahead of that of pc1"


def test_a_clock_that_was_read_slowly_is_not_blamed():
    slow = dataclasses.replace(facts("pc2", time_s=1003.0), asked_s=998.0, answered_s=1004.0)
    assert judged(None, "pc1", "pc2", hosts=[facts("pc1"), slow]) == []


def head_with(**what):
    pairs = healthy(*THREE)
    return dataclasses.replace(pairs, listeners=(dataclasses.replace(pairs.listeners[0], **what), *pairs.listeners[1:]))


def test_no_port_is_free_on_the_head():
    findings = judged(head_with(rendezvous_port=None, problems=("10.0.0.1: Address already in use (EADDRINUSE)",)))
    assert brief(findings) == [("E-PORT-01", "fail", ("pc1",))]
    assert findings[0].evidence == "29500-29999 on 10.0.0.1: Address already in use (EADDRINUSE)"


def test_a_port_that_anybody_may_be_given():
    findings = judged(head_with(rendezvous_port=40000), ports=(40000, 40010))
    assert brief(findings) == [("E-PORT-02", "warn", ("pc1",))]
    assert findings[0].fix.endswith("ip_local_reserved_ports=40000-40010")


def test_a_host_with_few_ports():
    assert brief(judged(head_with(ephemeral=(60000, 60100)))) == [("E-PORT-03", "warn", ("pc1",))]


def test_ports_that_are_reached_from_outside():
    outside = (
        Outside(host="pc1", tries=tries("pc1")),
        Outside(host="pc2", tries=tries("pc2", "timed out", ("timed out", "timed out"))),
    )
    findings = judged(dataclasses.replace(healthy(*THREE), outside=outside, outside_from="10.0.0.99"))
    assert brief(findings) == [("E-SEC-04", "warn", ("pc1",))]
    assert findings[0].title == "reachable from outside the cluster: port 29500 and the ports of the data"
    assert findings[0].evidence.startswith("this computer (10.0.0.99) -> pc1 10.0.0.1:29500 :40001 :40002 answered")


def test_nodes_of_slurm_that_the_login_host_reaches_are_the_business_of_the_site():
    outside = (Outside(host="pc1", tries=tries("pc1")),)
    pairs = dataclasses.replace(healthy(*THREE), outside=outside, outside_from="10.0.0.99")
    findings = judged(pairs, backend="slurm")
    assert brief(findings) == [("E-SEC-05", "info", ("pc1",))]
    assert "sudo" not in findings[0].fix


def test_a_machine_at_the_same_address_in_another_network_is_not_the_host():
    outside = (Outside(host="pc1", tries=tries("pc1", "stranger", ("refused", "other"))),)
    assert judged(dataclasses.replace(healthy(*THREE), outside=outside, outside_from="10.0.0.99")) == []


def test_pairs_survive_the_file():
    pairs = dataclasses.replace(healthy(*THREE), outside=(Outside(host="pc1", tries=tries("pc1")),))
    assert Pairs.from_json(pairs.to_json()) == pairs
    assert pairs.listener("pc2") == ListenerFacts(
        host="pc2", address=address("pc2"), has_address=True, rendezvous_port=29500, macs=(mac("pc2"),)
    )
