"""A leader at work on hosts that are folders: what it does about another one that was elected while it slept."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gangline.agent.supervise.voting import HEARD_S, KEPT, HostVoice
from gangline.errors import HostUnreachable, RunFailed
from gangline.runs.cluster import Cluster
from gangline.runs.gang import Gang, GangRank
from gangline.runs.layout import RunLayout
from gangline.runs.record_versions import write_record
from gangline.runs.state import AttemptOutcome, RunState
from gangline.supervise import deputy
from gangline.supervise import lead as lead_module
from gangline.supervise.attempt_records import Superseded
from gangline.supervise.lead import (
    AGAIN_S,
    LOST_S,
    Deposed,
    Deputies,
    Lead,
    SealedRecords,
    files_of,
    give_up,
    lead_of,
    leading,
    seen_from,
    win,
)
from gangline.supervise.leadership import HOLD_S, with_voices
from gangline.transport.transport import CommandResult
from tests.fakes.backend import FakeBackend
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
        if argv[0] == "rm":
            Path(argv[-1]).unlink(missing_ok=True)
            return CommandResult(host=self.host, argv=tuple(argv), returncode=0, stdout="", stderr="")
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
    """Three hosts, each with its part of one run. is_witness: the third one trains nothing."""

    def __init__(self, folder, *, is_witness=False):
        self.now = 1000.0
        hosts = [replace(host, transport="ssh") for host in cluster_of(folder, *NAMES).hosts]
        witness = hosts.pop() if is_witness else None
        self.cluster = Cluster(name="home", hosts=tuple(hosts), witness=witness)
        self.deputies = Deputies(cluster=self.cluster, candidates=tuple(host.name for host in hosts[1:]), attempt=1)
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
        lead.await_records()  # a deputy takes those of the newest voter
        assert lead.campaign().term is not None
        lead._has_records = True
        self.tell(lead)
        return lead

    def elected_again(self, own):
        """One of whom a host has promised to another in vain."""
        lead = self.elected(own)
        self.now += HEARD_S
        vain = {"term": 2, "candidate": "h1", "membership": [1, 0], "trial": False}
        assert HostVoice(self.layouts["h1"].folder, "h1", clock=self.clock).vote(vain)["granted"]
        self.tell(lead)
        lead.check()
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


def test_of_two_hosts_one_goes_on_with_its_witness_and_is_alone_then(tmp_path):
    hosts = Hosts(tmp_path, is_witness=True)
    first = hosts.elected("h0")
    assert first.membership.members == ("h0", "h1", "h2")
    hosts.transports["h0"].reachable = False
    hosts.now += HEARD_S
    second = hosts.lead("h1")
    second.await_records()
    assert second.campaign().term == 2
    with pytest.raises(HostUnreachable):
        hosts.tell(second)
    hosts.tell(second, "h1", "h2")
    assert second.holds
    hosts.tell(first, "h2")
    assert not first.holds
    assert with_voices(["h1"], "h1", "h2") == ("h1",)


def test_a_witness_counts_the_silence_from_when_it_is_asked_and_keeps_few_records(tmp_path):
    """It has no host agent, which would look by itself."""
    hosts = Hosts(tmp_path, is_witness=True)
    lead = hosts.elected("h0")
    for number in range(9):
        write_record(hosts.layouts["h0"].plan, {"number": number})
        lead.tell("h2")
    folder = hosts.layouts["h2"].folder / "lead" / "h2"
    assert len(list(folder.glob("records-*.json"))) == KEPT
    hosts.now += HEARD_S
    voice = HostVoice(hosts.layouts["h2"].folder, "h2", clock=hosts.clock)
    lead.tell("h2")  # nobody has looked at this heartbeat yet
    asked = {"term": 2, "candidate": "h1", "membership": [1, 0], "trial": True}
    assert voice.vote(asked)["hears"] == "h0"
    hosts.now += HEARD_S
    assert voice.vote(asked)["granted"]


def test_a_successor_knows_which_messages_have_arrived_and_the_addresses_go_at_the_end(hosts):
    for layout in hosts.layouts.values():
        layout.sinks.write_text("{}")
    write_record(hosts.layouts["h0"].messages(1), {"keys": ["a"]})
    lead = hosts.elected("h0")
    sealed = (hosts.layouts["h2"].folder / "lead" / "h2" / "records-1-1.json").read_bytes()
    assert '"a"' in files_of(sealed, hosts.layouts["h0"])["messages-1.json"]
    assert hosts.layouts["h0"].sinks.name not in files_of(sealed, hosts.layouts["h0"])
    hosts.transports["h2"].reachable = False
    lead.start()
    lead.end()
    assert [name for name in NAMES if hosts.layouts[name].sinks.exists()] == ["h0", "h2"]  # its own is still needed


def test_addresses_of_messages_stay_where_another_host_may_lead_the_run(hosts, monkeypatch):
    lead = hosts.elected("h0")
    for layout in hosts.layouts.values():
        layout.sinks.write_text("{}")

    def deposed():
        raise Deposed("h1 leads")

    monkeypatch.setattr(lead, "check", deposed)
    lead.end()
    assert all(layout.sinks.exists() for layout in hosts.layouts.values())


def test_the_steps_of_rank_0_are_not_sent_to_a_witness(tmp_path):
    hosts = Hosts(tmp_path, is_witness=True)
    lead = hosts.elected("h0")
    assert sorted(lead.keepers_of_history) == ["h0", "h1"]


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


def test_one_whose_run_a_person_ended_around_it_names_no_other_host(hosts):
    error = hosts.elected("h0").give_way(1_000_002)
    assert type(error) is Superseded
    assert error.seen == "its epoch is 1000002; no other host has been elected"


def test_one_of_whom_a_host_has_promised_to_another_in_vain_is_elected_again(hosts):
    old = hosts.elected_again("h0")
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


# A supervisor that is started again, and the end of one.


@pytest.fixture
def patient(monkeypatch):
    """Nobody waits until he asks again."""
    monkeypatch.setattr(lead_module, "AGAIN_S", 0.0)


def test_one_that_is_started_again_after_another_host_has_led_does_not_go_on_with_its_old_records(hosts, patient):
    hosts.elected("h0").raise_epoch()
    hosts.now += HEARD_S
    hosts.elected("h1")
    hosts.now += HEARD_S
    hosts.transports["h1"].reachable = False
    again = hosts.lead("h0")
    with pytest.raises(Deposed, match=f"another host has led {RUN_ID} since h0 did") as caught:
        win(again, order=lambda: None)
    assert caught.value.seen == "h2 has its records, of term 2"
    assert again.term == 0
    successor = hosts.lead("h2")
    successor.await_records()  # it takes those of the newest voter
    assert successor.campaign().term == 4


def test_one_that_is_started_again_leads_on_where_nobody_else_has_also_after_it_was_elected_again(hosts, patient):
    old = hosts.elected_again("h0")
    hosts.tell(old)
    assert RunState.load(hosts.layouts["h0"]).epoch == 3_000_000
    again = hosts.lead("h0")
    win(again, order=lambda: None)
    again.close()
    assert again.term == 4


def test_one_that_is_started_again_after_the_run_has_ended_elsewhere_gives_up_at_once(hosts, patient):
    hosts.elected("h0")
    hosts.now += HEARD_S
    other = hosts.elected("h1")
    other._over = True
    hosts.tell(other)
    with pytest.raises(Deposed, match=f"another host has led {RUN_ID} to its end"):
        win(hosts.lead("h0"), order=lambda: None)


def test_a_host_that_was_off_since_an_end_does_not_end_what_a_person_began_after_it(hosts):
    first = hosts.elected("h0")
    first._over = True
    hosts.tell(first)
    hosts.transports["h2"].reachable = False
    hosts.deputies = replace(hosts.deputies, attempt=2)
    lead = hosts.lead("h0")
    assert lead.campaign().term == 2
    hosts.tell(lead, "h0", "h1")
    hosts.transports["h2"].reachable = True
    tried = hosts.lead("h0").campaign()
    assert (tried.over, tried.term) == (False, 3)


def test_without_a_majority_an_order_ends_the_ranks_that_are_reached(hosts, patient, monkeypatch):
    hosts.elected("h0").raise_epoch()
    fake, touches = FakeBackend(), []
    gang = Gang(run_id=RUN_ID, attempt=1, ranks=tuple(GangRank(host=name, share=1) for name in NAMES))
    request = fake.render(hosts.cluster, gang, port=1)
    fake.start(request, {})
    fake.silent = {"h1", "h2"}
    hosts.layouts["h0"].attempt(1).mkdir(parents=True)
    request.save(hosts.layouts["h0"].request(1))
    monkeypatch.setattr(lead_module, "backend", lambda _: fake)
    monkeypatch.setattr(lead_module, "ELECT_S", 0.0)
    monkeypatch.setattr(lead_module, "END_S", 2.0)
    for name in ("h1", "h2"):
        hosts.transports[name].reachable = False
    with pytest.raises(RunFailed, match="h0 is not elected"):
        win(hosts.lead("h0"), beat=lambda: touches.append(1), order=lambda: "stop")
    assert (fake.statuses["h0"].phase, fake.statuses["h1"].phase, set(fake.orders)) == ("ended", "running", {"stop"})
    assert touches


@pytest.mark.parametrize(("phase", "is_told"), [("running", False), ("restarting", False), ("failed", True)])
def test_only_where_the_run_has_ended_do_the_others_hear_so_when_its_supervisor_fails(
    hosts, monkeypatch, phase, is_told
):
    """Else nobody would take it over, and its ranks would go on unwatched."""
    lead, said = hosts.elected("h0"), []
    monkeypatch.setattr(lead, "end", lambda: said.append("over"))

    def fail():
        raise RunFailed("the polls fail")

    RunState(name="tiny", attempt=1, phase=phase).save(hosts.layouts["h0"])
    with pytest.raises(RunFailed, match="the polls fail"), leading(hosts.layouts["h0"], 1, lead):
        fail()
    assert bool(said) == is_told


def test_one_that_gives_up_marks_its_own_term_and_changes_nothing_of_another_supervisor_of_its_host(hosts):
    old = hosts.elected("h0")
    hosts.now += HEARD_S
    hosts.tell(hosts.elected("h1"))
    layout, error = hosts.layouts["h0"], Deposed(f"h1 leads {RUN_ID} now")
    running = RunState(name="tiny", attempt=1, phase="running", epoch=2_000_001)
    running.save(layout)
    give_up(old, error)
    assert RunState.load(layout).phase == "running"
    replace(running, epoch=1_000_001).save(layout)
    give_up(old, error)
    assert RunState.load(layout).phase == "failed"
    assert [path.name for path in sorted((layout.lead / "h0").glob("deposed-*"))] == ["deposed-1.json"]


def test_records_that_change_while_they_are_read_are_read_again(hosts, monkeypatch):
    """Before an attempt begins a majority has its records: not those of before under a new number."""
    layout, read = hosts.layouts["h0"], lead_module._text
    sealed = SealedRecords(layout)

    def read_and_write(path):
        text = read(path)
        if path == layout.state:
            RunState(name="tiny", attempt=22).save(layout)
        return text

    with monkeypatch.context() as patch:
        patch.setattr(lead_module, "_text", read_and_write)
        sealed.renew()
    assert sealed.renew() == 2
    _, data = sealed.sealed(1, layout.state)
    assert json.loads(files_of(data, layout)["state.json"])["attempt"] == 22
    assert sealed.renew() == 2


def test_a_winner_takes_hosts_that_answered_late_for_present(hosts):
    lead = hosts.lead("h1")
    assert lead.campaign().term == 1
    hosts.tell(lead, "h1", "h2")
    assert lead.await_heard({"h0", "h2"}, within_s=0.0) == {"h0"}


@pytest.mark.parametrize(("away", "end"), [((), "; h0 itself answers"), (("h0",), ", without h0")])
def test_the_end_of_an_attempt_names_the_hosts_that_the_successor_goes_on_without(hosts, away, end):
    gang = Gang(run_id=RUN_ID, attempt=1, ranks=tuple(GangRank(host=name, share=1) for name in NAMES))
    layout = hosts.layouts["h1"]
    layout.attempt(1).mkdir(parents=True)
    deputy._record_end(layout, FakeBackend().render(hosts.cluster, gang, port=1), leader="h0", away=away)
    error = AttemptOutcome.load(layout.outcome(1)).error
    assert error["seen"] == f"the other hosts have elected a successor{end}"


def test_a_deputy_waits_as_long_as_hosts_wait_before_they_vote_for_another_one():
    assert deputy.SILENT_S == HEARD_S
