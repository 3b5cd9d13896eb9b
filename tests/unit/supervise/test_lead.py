"""A leader at work on hosts that are folders: what it does about another one that was elected while it slept."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gangline.agent.supervise.voting import HEARD_S, HostVoice
from gangline.errors import HostUnreachable
from gangline.runs.cluster import Cluster
from gangline.runs.layout import RunLayout
from gangline.runs.record_versions import write_record
from gangline.runs.state import RunState
from gangline.supervise.lead import AGAIN_S, LOST_S, Deposed, Deputies, Lead, lead_of, seen_from
from gangline.supervise.leadership import HOLD_S
from gangline.transport.transport import CommandResult
from tests.saved import read_events
from tests.unit.supervise.runs import RUN_ID, cluster_of

NAMES = ("h0", "h1", "h2")


class VotingHost:
    """A transport to a host whose files lie in a folder, and that votes."""

    def __init__(self, host, clock):
        self.host = host
        self.reachable = True
        self._clock = clock

    def run(self, argv, *, stdin=b"", **_):
        self._need_host()
        asked = json.loads(stdin)
        said = HostVoice(Path(asked["folder"]), asked["host"], clock=self._clock).vote(asked)
        return CommandResult(host=self.host, argv=tuple(argv), returncode=0, stdout=json.dumps(said), stderr="")

    def write(self, path, data):
        self._need_host()
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(data)

    def read(self, path, *, offset=0, limit=1 << 22):
        self._need_host()
        return Path(path).read_bytes()[offset : offset + limit]

    def _need_host(self):
        if not self.reachable:
            raise HostUnreachable(f"{self.host} does not answer")


class Hosts:
    """Three hosts, each with its part of one run."""

    def __init__(self, folder):
        self.now = 1000.0
        hosts = cluster_of(folder, *NAMES).hosts
        self.cluster = Cluster(name="home", hosts=tuple(replace(host, transport="ssh") for host in hosts))
        self.deputies = Deputies(cluster=self.cluster, candidates=("h1", "h2"), attempt=1)
        self.layouts = {name: RunLayout(folder / name, RUN_ID) for name in NAMES}
        self.transports = {name: VotingHost(name, self.clock) for name in NAMES}
        for layout in self.layouts.values():
            layout.folder.mkdir(parents=True)
            RunState(name="tiny", attempt=1).save(layout)

    def clock(self):
        return self.now

    def lead(self, own):
        return Lead(self.layouts[own], self.deputies, own, self.transports, clock=self.clock)

    def elected(self, own):
        lead = self.lead(own)
        assert lead.campaign().term is not None
        self.tell(lead)
        return lead

    def tell(self, lead, *hosts):
        """A heartbeat, of which the host agents there take note."""
        for host in hosts or NAMES:
            lead.tell(host)
            voice = HostVoice(self.layouts[host].folder, host, clock=self.clock)
            with voice.alone():
                voice.listen()


def test_hosts_that_might_take_over_an_attempt_before_have_no_say_in_one_that_a_person_began_without_votes(hosts):
    """It may have begun again with `supervisor: here`, or with two hosts: nothing removes deputies.json."""
    layout = hosts.layouts["h0"]
    write_record(layout.deputies, hosts.deputies.to_json())
    for attempt in (1, 2, 3):
        layout.attempt(attempt).mkdir(parents=True)
        write_record(layout.attempt_cluster(attempt), seen_from(hosts.cluster, "h0").to_json())

    def is_led(attempt):
        return lead_of(layout, attempt, lambda _: hosts.transports) is not None

    write_record(layout.base(2), {"attempt": 1})
    assert [is_led(attempt) for attempt in (1, 2, 3)] == [True, True, False]


@pytest.fixture
def hosts(tmp_path):
    return Hosts(tmp_path)


def test_a_leader_that_slept_for_long_holds_nothing_until_most_have_heard_it_again(hosts):
    lead = hosts.elected("h0")
    assert lead.holds
    hosts.now += HOLD_S
    assert not lead.holds
    hosts.tell(lead, "h0")
    assert not lead.holds
    hosts.tell(lead, "h2")
    assert lead.holds
    assert lead.failure() is None


def test_one_that_reaches_no_majority_for_long_ends_its_ranks(hosts):
    lead = hosts.elected("h0")
    hosts.now += HOLD_S + LOST_S - 0.1
    assert lead.failure() is None
    hosts.now += 0.2
    assert lead.failure().what == "h0, which leads the run, does not reach most of its hosts"


def test_one_that_wakes_up_hears_from_the_promises_that_another_one_was_elected(hosts):
    old = hosts.elected("h0")
    hosts.now += HEARD_S
    hosts.elected("h1")
    hosts.tell(old)
    assert not old.holds
    with pytest.raises(Deposed) as caught:
        old.check()
    assert (caught.value.what, old.term) == (f"h1 leads {RUN_ID} now", 1)


def test_one_that_first_sees_the_epoch_of_another_one_gives_up_as_well(hosts):
    """Its host agents may answer before it has told any host that it lives."""
    old = hosts.elected("h0")
    hosts.now += HEARD_S
    hosts.elected("h1")
    old.check()
    assert old.give_way(2_000_001).what == f"h1 leads {RUN_ID} now"
    hosts.now += HEARD_S
    assert old.give_way(2_000_001).what == f"another host leads {RUN_ID} now"


def test_one_of_whom_a_host_has_promised_to_another_in_vain_is_elected_again(hosts):
    old = hosts.elected("h0")
    hosts.now += HEARD_S
    vain = {"term": 2, "candidate": "h1", "membership": [1, 0], "trial": False}
    assert HostVoice(hosts.layouts["h1"].folder, "h1", clock=hosts.clock).vote(vain)["granted"]
    hosts.tell(old)
    old.check()
    assert old.term == 3
    assert [event["event"] for event in read_events(hosts.layouts["h0"].events)] == ["leads"]


def test_one_that_wins_again_after_another_one_has_led_meanwhile_does_not_go_on_with_its_old_records(hosts):
    """The other one may have begun an attempt, and be lost itself."""
    old = hosts.elected("h0")
    hosts.now += HEARD_S
    hosts.elected("h1")
    hosts.now += HEARD_S
    hosts.transports["h1"].reachable = False
    hosts.tell(old, "h0", "h2")
    old.check()  # it learns that the members were written anew
    hosts.now += AGAIN_S
    with pytest.raises(Deposed, match=f"another host leads {RUN_ID} now"):
        old.check()
    assert old.term == 1
    assert read_events(hosts.layouts["h0"].events) == []


def test_every_host_keeps_the_history_of_rank_0_and_a_new_head_has_it_without_doubles(hosts):
    lead = hosts.elected("h0")
    original = hosts.layouts["h0"].metrics
    original.write_text('{"step": 1}\n{"step": 2}\n{"ste')
    lead.send_history("h1")
    assert not list(hosts.layouts["h1"].lead.rglob("history*"))  # no attempt has begun
    lead.follow_head("h0")
    for more in ("", 'p": 3}\n'):
        with original.open("a") as stream:
            stream.write(more)
        lead.send_history("h1")
        HostVoice(hosts.layouts["h1"].folder, "h1").keep_history()
    hosts.layouts["h1"].metrics.write_text('{"step": 2}\n')  # it was the head once
    assert lead.restore_history("h1")
    assert sorted(hosts.layouts["h1"].metrics.read_text().splitlines()) == [
        '{"step": 1}',
        '{"step": 2}',
        '{"step": 3}',
    ]
    assert not lead.restore_history("h2")


def test_nobody_waits_for_a_host_that_does_not_hear_the_leader(hosts):
    lead = hosts.elected("h0")
    hosts.layouts["h0"].metrics.write_text('{"step": 1}\n')
    lead.follow_head("h0")
    hosts.now += HOLD_S
    hosts.transports["h1"].reachable = False  # asking it would raise
    lead.send_history("h1")
