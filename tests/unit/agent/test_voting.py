"""The voice of a host: what it writes down of the leader and of its votes, and what follows from it."""

import json

import pytest

from gangline.agent.supervise.voting import HEARD_S, PAUSE_S, WAKE_S, Deputise, HostVoice, require_charge
from gangline.agent.verbs import VerbFailed


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "lead/h2").mkdir(parents=True)
    return tmp_path


def beat(folder, number, *, term=1, leader="h0", over=False):
    words = {"leader": leader, "number": number, "over": over}
    (folder / "lead/h2" / f"heartbeat-{term}.json").write_text(json.dumps(words))


def asked(term, candidate="h1", *, trial=False, afresh=False):
    return {"term": term, "candidate": candidate, "membership": [0, 0], "trial": trial, "afresh": afresh}


def test_a_leader_counts_as_silent_once_its_heartbeat_stays_the_same(folder, clock):
    voice = HostVoice(folder, "h2", clock=clock)
    assert voice.listen() is None
    beat(folder, 1)
    assert voice.listen() == 0.0
    clock.now += 9.0
    assert voice.listen() == 9.0
    beat(folder, 2)
    assert voice.listen() == 0.0


def test_after_a_new_start_of_the_machine_the_waiting_begins_anew(folder, clock):
    beat(folder, 1)
    HostVoice(folder, "h2", clock=clock).listen()
    heard = folder / "lead/h2" / "heard.json"
    said = json.loads(heard.read_text())
    said["mark"][2] = "another boot"
    heard.write_text(json.dumps(said))
    clock.now += 100.0
    assert HostVoice(folder, "h2", clock=clock).listen() == 0.0


def test_a_vote_is_written_before_it_is_given_and_given_once(folder, clock):
    beat(folder, 1)
    voice = HostVoice(folder, "h2", clock=clock)
    assert voice.vote(asked(2))["why"] == "it hears h0"
    clock.now += HEARD_S
    said = voice.vote(asked(2))
    assert (said["granted"], said["term"]) == (True, 1)
    assert json.loads((folder / "lead/h2" / "promise.json").read_text())["term"] == 2
    assert voice.vote(asked(2, "h2"))["why"] == "it has voted for h1 in term 2"


def test_a_trial_changes_nothing(folder, clock):
    voice = HostVoice(folder, "h2", clock=clock)
    assert voice.vote(asked(7, trial=True))["granted"]
    assert not (folder / "lead/h2" / "promise.json").exists()


def test_a_heartbeat_that_comes_while_the_vote_is_written_makes_it_void(folder, clock, monkeypatch):
    from gangline.agent.supervise import voting

    beat(folder, 1)
    voice = HostVoice(folder, "h2", clock=clock)
    voice.listen()
    clock.now += HEARD_S
    written = voting.write_record

    def slow(path, record):
        written(path, record)
        beat(folder, 2)

    monkeypatch.setattr(voting, "write_record", slow)
    assert voice.vote(asked(2))["why"] == "it hears h0"
    assert voice.known().promised == (2, "h1")  # the leader reads that, and does not count its heartbeat


def test_nothing_starts_for_a_leader_whose_term_is_over(folder):
    part = {"rank_files": str(folder / "attempts" / "2"), "host": "h2", "led": True}
    beat(folder, 1)
    require_charge(part, 1_000_005)
    (folder / "lead/h2" / "promise.json").write_text(json.dumps({"term": 2, "candidate": "h1"}))
    with pytest.raises(VerbFailed, match="another supervisor leads this run"):
        require_charge(part, 1_000_006)
    require_charge(part, 2_000_001)


def test_after_a_start_by_a_person_without_votes_nobody_succeeds_the_leader_of_before(folder, clock):
    beat(folder, 1)
    require_charge({"rank_files": str(folder / "attempts" / "2"), "host": "h2"}, 1)
    clock.now += 100.0
    voice = HostVoice(folder, "h2", clock=clock)
    assert voice.vote(asked(3))["why"] == "the run has ended"
    assert voice.vote(asked(3, afresh=True))["granted"]


def test_a_host_without_votes_gets_no_files_of_them(tmp_path):
    require_charge({"rank_files": str(tmp_path / "attempts" / "1"), "host": "h2"}, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_deputy_is_started_while_the_leader_is_silent_and_not_again_at_once(folder, clock, monkeypatch):
    from gangline.agent.supervise import voting

    started = []
    monkeypatch.setattr(voting, "start_detached", lambda words, stdin: started.append((words["argv"][1:], stdin)))
    words = {"argv": ["-m", "deputy"], "env": {}, "folder": str(folder)}
    part = {"rank_files": str(folder / "attempts" / "1"), "host": "h2", "led": True, "deputy": words}
    deputise = Deputise(part, secrets={"KEY": "x"}, complain=lambda _text: None, clock=clock)
    deputise.look()
    beat(folder, 1)
    deputise.look()
    clock.now += WAKE_S - 1
    deputise.look()
    assert started == []
    clock.now += 1
    deputise.look()
    deputise.look()
    assert started == [(["-m", "deputy"], b'{"secrets": {"KEY": "x"}}')]
    clock.now += PAUSE_S
    deputise.look()
    assert len(started) == 2
    beat(folder, 2, over=True)
    deputise.look()
    clock.now += 100.0
    deputise.look()
    assert len(started) == 2


def test_a_late_write_does_not_take_the_place_of_a_newer_one(folder, clock):
    for number in (2, 11, 10):
        text = json.dumps({"term": 1, "number": number})
        (folder / "lead/h2" / f"membership-1-{number}.json").write_text(text)
    voice = HostVoice(folder, "h2", clock=clock)
    assert voice.known().membership == (1, 11)
    for number in range(12, 20):
        (folder / "lead/h2" / f"membership-1-{number}.json").write_text(json.dumps({"term": 1, "number": number}))
    voice.prune()
    assert sorted(path.name for path in (folder / "lead/h2").glob("membership-*")) == [
        "membership-1-17.json",
        "membership-1-18.json",
        "membership-1-19.json",
    ]


def send(folder, start, lines, *, head="h0"):
    path = folder / "lead/h2" / f"history-1-{start}.json"
    path.write_text(json.dumps({"head": head, "lines": lines}))


def test_a_host_keeps_the_history_of_rank_0_once_whatever_is_sent_again(folder):
    voice, kept = HostVoice(folder, "h2"), folder / "lead/h2/history.jsonl"
    send(folder, 0, "one\n")
    voice.keep_history()
    send(folder, 0, "one\ntwo\n")  # sent before it was known that the first line is here
    send(folder, 20, "later\n")  # what lies between has not come
    voice.keep_history()
    send(folder, 8, "three\n")
    send(folder, 0, "of another host\n", head="h1")
    voice.keep_history()
    assert kept.read_text().splitlines() in (
        ["one", "two", "of another host", "three"],
        ["one", "two", "three", "of another host"],
    )
    positions = json.loads((folder / "lead/h2/history.json").read_text())
    assert (positions["h0"], positions["h1"]) == (14, 16)
    assert not list((folder / "lead/h2").glob("history-*"))
