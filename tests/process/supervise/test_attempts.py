"""A run over its attempts: hosts are played, what lies on them is real."""

import dataclasses
import errno
import inspect
import json
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from gangline.errors import HostUnreachable, RunFailed
from gangline.launch.backend import LaunchRequest, RankSigns, StartSigns
from gangline.launch.program import Again, Program
from gangline.runs import checkpoints as disk
from gangline.runs.cluster import Cluster, Host
from gangline.runs.files import write_json
from gangline.runs.gang import Gang, GangRank, held_by
from gangline.runs.job import DataJob, FailureJob, Job, ModelJob, SourceJob
from gangline.runs.layout import RunLayout
from gangline.runs.manifest import describe_part
from gangline.runs.record_versions import load_record
from gangline.runs.state import AttemptOutcome, ProcessId, RunState, write_leave, write_order
from gangline.supervise import attempts as attempts_module
from gangline.supervise import lost_hosts as away_module
from gangline.supervise import lost_hosts as reach_module
from gangline.supervise import next_attempt
from gangline.supervise import standby as standby_module
from gangline.supervise import supervisor as loop_module
from gangline.supervise.attempts import Attempts
from gangline.supervise.gang_control import PollIntervals, SupervisedRun
from gangline.supervise.lead import Deputies
from gangline.supervise.leadership import EPOCHS
from gangline.supervise.lost_hosts import Partition
from gangline.supervise.next_attempt import Base, failures_of
from gangline.transport.local import LocalTransport
from tests.fakes.backend import FakeBackend, StandbyFakeBackend
from tests.saved import read_events
from tests.unit.supervise.runs import RUN_ID, create_run
from tests.waiting import wait_until

NAMES = ("pc1", "pc2", "pc3")
SHARES = (20, 11, 9)


class Hosts:
    """Folders that stand for machines; one may be off."""

    def __init__(self, folder):
        hosts = [Host(name=name, workdir=str(folder / name), python=sys.executable) for name in NAMES]
        self.cluster = Cluster(name="home", hosts=tuple(hosts))
        self.off = set()
        self.transports = {host.name: _Transport(host, self.off) for host in hosts}

    def layout(self, name):
        return RunLayout(Path(self.cluster.host(name).workdir), RUN_ID)

    def save(self, step, *, on=NAMES, attempt=1, held=None):
        """Parts of a step, which nobody has committed. held: what each holds; None: all of them everything."""
        for name in on:
            folder = disk.part_folder(self.layout(name).checkpoints, step, name)
            folder.mkdir(parents=True)
            (folder / "weights").write_text(f"step {step}", encoding="utf-8")
            description = {"attempt": attempt, "hosts": NAMES, "num_ranks": 3, "fingerprints": {}, "held": held or {}}
            describe_part(folder, step=step, host=name, description=description)


class _Transport(LocalTransport):
    def __init__(self, host, off):
        super().__init__(host)
        self._off = off

    def run(self, *words, **options):
        self._require_on()
        return super().run(*words, **options)

    def home(self):
        self._require_on()
        return super().home()

    def _require_on(self):
        if self.host in self._off:
            raise HostUnreachable(f"{self.host} does not answer")


class Story:
    """A run on three hosts, and who looks after it in a thread."""

    def __init__(self, folder, *, micro_batch=1, strategy="ddp", stages=(), draws="sample", backend=None, **failures):
        self.folder = folder
        self.hosts = Hosts(folder)
        self.backend = backend or FakeBackend()
        self.outcome = None
        self.failed = None
        self.lead = None
        cluster = self.hosts.cluster
        ranks = tuple(GangRank(host=name, share=share) for name, share in zip(NAMES, SHARES, strict=True))
        gang = Gang(run_id=RUN_ID, attempt=1, ranks=ranks, strategy=strategy, stages=stages)
        request = self.backend.render(cluster, gang, port=1, program=Program(rest_s=600.0))
        self.layout = create_run(folder, cluster, request)
        for name, value in {"cluster": cluster.to_json(), "gang": gang.to_json(), "networks": {}}.items():
            write_json(self.layout.attempt(1) / f"{name}.json", value)
        data, model = DataJob(train=SourceJob(files=("/a.txt",))), ModelJob(path="m")
        how = {"wait_s": 0.0, **failures}
        job = Job(name="tiny", model=model, data=data, batch=40, micro_batch=micro_batch, failures=FailureJob(**how))
        job = dataclasses.replace(job, draws=draws)
        job.save(self.layout.job)
        self.tell(*NAMES)

    def tell(self, *names, step=40, phase="compute"):
        """What the ranks of hosts say from their next start on."""
        for name in names:
            sign = RankSigns(rank=NAMES.index(name), phase=phase, has_torch=True, has_met=True, step=step)
            self.backend.signs[name] = StartSigns(launcher=True, met=True, ranks=(sign,))

    def begin(self, *, joins=True):
        """joins: the ranks of the first attempt say that they have joined; else they only begin."""
        if not joins:
            said, silence = self.backend.signs, StartSigns(launcher=True, met=False, ranks=())
            self.backend.signs = dict.fromkeys(NAMES, silence)
        pace = PollIntervals(poll_s=0.005, notice_s=0.0, verify_s=0.3, break_grace_s=5.0)
        connect = lambda cluster: {host.name: self.hosts.transports[host.name] for host in cluster.hosts}  # noqa: E731
        run = SupervisedRun(
            layout=self.layout, backend=lambda _name: self.backend, connect=connect, pace=pace, lead=self.lead
        )
        attempts = Attempts(run, 1)
        attempts.begin({"HF_TOKEN": "x"})
        self.thread = threading.Thread(target=self._watch, args=(attempts,), daemon=True)
        self.thread.start()
        if not joins:
            self.backend.signs = said
            return
        self.joined()

    def _watch(self, attempts):
        try:
            self.outcome = attempts.watch()
        except BaseException as error:
            self.failed = error
            raise

    def joined(self, number=1):
        wait_until(lambda: self.count("joined") >= number or self.failed, f"attempt {number} has joined", timeout_s=30)
        assert self.failed is None

    def end(self):
        self.thread.join(30)
        assert not self.thread.is_alive()
        return self.outcome

    def finish(self):
        head = self.request().hosts[0]
        path = Path(head.rank_files)
        path.mkdir(parents=True, exist_ok=True)
        (path / "result.json").write_text(json.dumps({"result": "finished"}))
        for name in self.request().names:
            self.backend.end(name, returncode=0, reason="finished")
        return self.end()

    def kill_rank(self, name, **how):
        failure = {"rank": NAMES.index(name), "pid": 1, "time": 0.0, "ordered": False, "error": None, "exit": -9}
        self.backend.change(name, failures=({**failure, "log": "l", "log_tail": []},), **how)
        self.backend.end(name, returncode=1, reason="finished", rests=True)

    def state(self):
        return RunState.load(self.layout)

    def request(self):
        return load_record(self.layout.attempt(self.state().attempt) / "request.json", LaunchRequest)

    def gang(self, number=None):
        return Gang.load(self.layout.gang(number or self.state().attempt))

    def count(self, event):
        return [each["event"] for each in read_events(self.layout.events)].count(event)

    def last(self, event):
        return [each for each in read_events(self.layout.events) if each["event"] == event][-1]


@pytest.fixture
def story(tmp_path):
    return Story(tmp_path)


def test_after_a_rank_was_killed_the_next_attempt_goes_on_from_the_newest_step_on_the_same_hosts(story):
    story.hosts.save(39)
    story.begin()
    story.kill_rank("pc2")
    story.joined(2)
    gang = story.gang(2)
    assert (gang.attempt, gang.resume_step, gang.hosts) == (2, 39, NAMES)
    assert [rank.share for rank in gang.ranks] == list(SHARES)
    assert story.backend.secrets == {"HF_TOKEN": "x"}
    told = story.last("restarting")
    assert (told["next"], told["step"], told["lost_steps"], told["without"]) == (2, 39, 0, [])
    assert "rank 1 on pc2 was killed by SIGKILL" in told["what"]
    assert AttemptOutcome.load(story.layout.attempt(1) / "outcome.json").result == "failed"
    assert story.finish().result == "finished"
    assert story.state().phase == "finished"


def test_the_others_are_told_that_the_gang_is_broken_and_rest(story):
    story.begin()
    story.kill_rank("pc2")
    story.joined(2)
    assert set(story.backend.orders) == {"break"}
    story.finish()


def run_out_of_memory(story, *names):
    """names: whose ranks do, all in one attempt."""
    oom = {"line": None, "cgroup": "/lab", "limit_bytes": 1 << 30, "memory_bytes": 1 << 33}
    failure = {"pid": 1, "time": 0.0, "ordered": False, "error": None, "exit": -9, "log": "l", "log_tail": []}
    for name in names:
        story.backend.change(name, failures=({**failure, "rank": NAMES.index(name), "oom": oom},))
    for name in names:
        story.backend.end(name, returncode=1, reason="finished", rests=True)


def test_a_rank_whose_memory_does_not_suffice_goes_on_with_smaller_settings_and_the_others_as_before(tmp_path):
    story = Story(tmp_path, micro_batch=2, smaller_micro_batch=True)
    story.hosts.save(39)
    story.begin()
    run_out_of_memory(story, "pc2")
    story.joined(2)
    gang, twice = story.gang(2), [2 * share for share in SHARES]
    assert (gang.micro_batch, [rank.share for rank in gang.ranks]) == (1, twice)
    assert [rank.micro_batch_size for rank in gang.ranks] == [2, 1, 2]
    words = "rank 1 on pc2 takes micro-batches of 1 in place of 2; the others keep theirs"
    assert story.last("restarting")["settings"] == words
    run_out_of_memory(story, "pc2")
    story.joined(3)
    assert [rank.activation_checkpointing for rank in story.gang(3).ranks] == [None, True, None]
    assert "rank 1 on pc2 computes activations again" in story.last("restarting")["settings"]
    story.kill_rank("pc3")
    story.joined(4)
    gang = story.gang(4)
    assert [rank.share for rank in gang.ranks] == twice
    assert [(rank.micro_batch_size, rank.activation_checkpointing) for rank in gang.ranks][1] == (1, True)
    assert "settings" not in story.last("restarting")
    assert len(Base.of(story.layout, 4).settings) == 2
    story.finish()


def test_ranks_that_run_out_of_memory_one_after_the_other_each_go_on_with_smaller_settings(tmp_path):
    """From 4 to 1 and then with recomputation, without a step between, though the job allows two attempts in vain."""
    story = Story(tmp_path, micro_batch=4, smaller_micro_batch=True, restarts=2)
    story.begin()
    for number, name in enumerate(NAMES * 3, 2):
        run_out_of_memory(story, name)
        story.joined(number)
    gang = story.gang()
    assert (gang.attempt, gang.micro_batch) == (10, 1)
    assert [(rank.micro_batch_size, rank.activation_checkpointing) for rank in gang.ranks] == [(1, True)] * 3
    run_out_of_memory(story, "pc1")
    story.joined(11)
    run_out_of_memory(story, "pc1")
    assert story.end().result == "failed"
    assert "twice for the same cause" in story.last("failed")["why"]


def test_all_ranks_that_run_out_of_memory_in_one_attempt_go_on_with_smaller_settings(tmp_path):
    story = Story(tmp_path, micro_batch=2, smaller_micro_batch=True)
    story.begin()
    run_out_of_memory(story, "pc1", "pc3")
    story.joined(2)
    assert [rank.micro_batch_size for rank in story.gang(2).ranks] == [1, 2, 1]
    words = "rank 0 on pc1 takes micro-batches of 1 in place of 2, rank 2 on pc3 takes micro-batches of 1 in place of 2"
    assert story.last("restarting")["settings"] == f"{words}; the others keep theirs"
    story.finish()


def test_in_a_run_whose_dropout_belongs_to_micro_batches_all_take_smaller_ones(tmp_path):
    story = Story(tmp_path, micro_batch=2, smaller_micro_batch=True, draws="micro_batch")
    story.hosts.save(39)
    story.begin()
    run_out_of_memory(story, "pc2")
    story.joined(2)
    gang = story.gang(2)
    assert (gang.micro_batch, [rank.share for rank in gang.ranks]) == (1, [2 * share for share in SHARES])
    assert story.last("restarting")["micro_batch"] == 1
    story.kill_rank("pc3")
    story.joined(3)
    assert [rank.share for rank in story.gang(3).ranks] == [2 * share for share in SHARES]
    story.finish()


def test_another_supervisor_goes_on_with_the_smaller_micro_batches(tmp_path):
    story = Story(tmp_path, micro_batch=2, smaller_micro_batch=True, draws="micro_batch")
    story.begin()
    run_out_of_memory(story, "pc2")
    story.joined(2)
    assert Base.of(story.layout, 2).micro_batch == 1
    story.finish()


def test_else_it_goes_on_as_it_was(tmp_path):
    story = Story(tmp_path, micro_batch=2, smaller_micro_batch=False)
    story.begin()
    run_out_of_memory(story, "pc2")
    story.joined(2)
    assert (story.gang(2).micro_batch, [rank.share for rank in story.gang(2).ranks]) == (None, list(SHARES))
    assert "ran out of memory" in story.last("restarting")["what"]
    story.finish()


class OwnProgram(Story):
    """The same with a program of the user's own."""

    def __init__(self, folder, *, restarts):
        super().__init__(folder)
        self.layout.job.unlink()
        program = Program(kind="command", argv=("train.py", "--resume"), cwd="runs/calm-otter-7/project")
        write_json(self.layout.attempt(1) / "again.json", Again(restarts=restarts, program=program).to_json())


def test_a_program_of_the_users_own_is_started_again_as_often_as_he_says(tmp_path, monkeypatch):
    monkeypatch.setattr(attempts_module, "PAUSE_S", 0.0)
    story = OwnProgram(tmp_path, restarts=2)
    story.begin()
    for number in (2, 3):
        story.kill_rank("pc2")
        story.joined(number)
        assert story.gang(number).hosts == NAMES
        assert story.request().hosts[0].argv[2:] == ("train.py", "--resume")
    story.kill_rank("pc2")
    assert story.end().result == "failed"
    assert story.last("failed")["why"] == "it was started 3 times"


def test_it_is_started_again_though_it_failed_before_anybody_saw_its_ranks_meet(tmp_path):
    story = OwnProgram(tmp_path, restarts=1)
    story.begin(joins=False)
    story.kill_rank("pc2")
    story.joined(1)
    assert (story.state().attempt, story.count("restarting")) == (2, 1)
    story.finish()


def test_ranks_of_our_own_trainer_say_when_they_have_joined(story):
    story.begin(joins=False)
    story.kill_rank("pc2")
    assert story.end().result == "failed"
    assert story.last("failed")["why"] == "it had not begun"


def test_another_supervisor_knows_how_it_goes_on(tmp_path):
    story = OwnProgram(tmp_path, restarts=1)
    story.begin()
    story.kill_rank("pc2")
    story.joined(2)
    assert failures_of(story.layout, 2).restarts == 1
    assert Base.of(story.layout, 2).again.program.argv == ("train.py", "--resume")
    story.kill_rank("pc2")
    assert story.end().result == "failed"


def test_a_program_of_the_users_own_does_not_go_on_without_a_host(tmp_path, monkeypatch):
    monkeypatch.setattr(next_attempt, "COMMAND_WAIT_S", 0.0)
    story = OwnProgram(tmp_path, restarts=2)
    story.begin()
    lose(story, "pc2")
    assert story.end().result == "failed"
    assert story.last("failed")["why"] == "it cannot continue without a host"


def test_where_nothing_was_saved_it_begins_anew(story):
    story.begin()
    story.kill_rank("pc2")
    story.joined(2)
    assert story.gang(2).resume_step is None
    story.finish()


def test_one_whole_part_is_enough_and_ranks_of_other_hosts_get_it_from_those_that_have_it(story):
    story.hosts.save(30)
    story.hosts.save(39, on=("pc3",))
    story.begin()
    story.kill_rank("pc2")
    story.joined(2)
    assert (story.gang(2).resume_step, story.gang(2).lacking) == (39, ("pc1", "pc2"))
    for name in NAMES:
        assert disk.read_commit(story.hosts.layout(name).checkpoints, 39)
    story.hosts.save(45)
    story.kill_rank("pc2")
    story.joined(3)
    assert (story.gang(3).resume_step, story.gang(3).lacking) == (45, ())
    story.finish()


@pytest.mark.parametrize("said", [{"strategy": "fsdp"}, {"strategy": "pipeline", "stages": (4, 2, 2)}])
def test_where_ranks_have_parts_of_the_state_every_host_gets_a_copy(tmp_path, said):
    story = Story(tmp_path, **said)
    story.hosts.save(30)
    story.hosts.save(39, on=("pc3",))
    story.begin()
    story.kill_rank("pc2")
    story.joined(2)
    assert (story.gang(2).resume_step, story.gang(2).lacking) == (39, ())
    for name in NAMES:
        assert disk.find_parts(story.hosts.layout(name).checkpoints, 39, host=name)
    story.finish()


def in_parts(story):
    return held_by(Gang.load(story.layout.gang(1)))


def test_a_rank_that_died_costs_no_copy_of_parts_that_stay_where_they_are(tmp_path):
    story = Story(tmp_path, strategy="fsdp")
    story.hosts.save(39, held=in_parts(story))
    story.begin()
    story.kill_rank("pc2")
    story.joined(2)
    assert (story.gang(2).resume_step, story.gang(2).lacking) == (39, ())
    for name in NAMES:
        parts = disk.find_parts(story.hosts.layout(name).checkpoints, 39, host=name)
        assert [folder.name for folder, _ in parts] == [f"part-{name}"]
    story.finish()


def test_a_lost_host_takes_its_part_with_it_and_the_run_says_so_and_ends(tmp_path):
    story = Story(tmp_path, strategy="fsdp", restarts=1)
    story.hosts.save(39, held=in_parts(story))
    story.begin()
    lose(story, "pc2")
    story.thread.join(20)
    assert story.outcome.result == "failed"
    why = story.last("failed")["why"]
    assert why.endswith("no checkpoint of calm-otter-7 can be used without pc2: they lie in parts, one on each host")
    for name in ("pc1", "pc3"):  # nothing is removed or moved: it goes on once the host is back
        assert disk.saved_steps(story.hosts.layout(name).checkpoints) == [39]
    story.hosts.off.clear()
    surveys = {name: disk.survey(story.hosts.layout(name).checkpoints) for name in NAMES}
    assert disk.choose(surveys).step == 39


def test_a_host_that_has_left_and_still_answers_hands_its_part_over(tmp_path):
    story = Story(tmp_path, strategy="fsdp")
    story.hosts.save(39, held=in_parts(story))
    story.begin()
    write_leave(story.layout, ["pc3"], attempt=1)
    story.joined(2)
    assert (story.gang(2).hosts, story.gang(2).resume_step) == (("pc1", "pc2"), 39)
    for name in ("pc1", "pc2"):  # the rows of two ranks are not those of three
        parts = disk.find_parts(story.hosts.layout(name).checkpoints, 39, host=name)
        assert {folder.name for folder, _ in parts} == {"part-pc1", "part-pc2", "part-pc3"}
    story.finish()


def test_what_was_saved_whole_before_is_gone_on_from_without_a_part(tmp_path):
    story = Story(tmp_path, strategy="fsdp")
    story.hosts.save(30)
    story.hosts.save(39, held=in_parts(story))
    story.begin()
    lose(story, "pc2")
    story.joined(2)
    assert (story.gang(2).hosts, story.gang(2).resume_step) == (("pc1", "pc3"), 30)
    story.finish()


def lose(story, name):
    story.hosts.off.add(name)
    story.backend.silent.add(name)
    for other in NAMES:
        if other != name:
            failure = {"rank": NAMES.index(other), "pid": 1, "time": 0.0, "ordered": False, "exit": 5}
            error = {"kind": "RunFailed", "what": "Connection reset by peer", "seen": "", "fix": "", "exit_code": 5}
            row = {**failure, "error": error, "log": "l", "log_tail": []}
            story.backend.change(other, failures=(row,))
            story.backend.end(other, returncode=1, reason="finished", rests=True)


def test_without_a_lost_host_the_others_share_its_work(story):
    story.hosts.save(39)
    story.begin()
    lose(story, "pc2")
    story.joined(2)
    gang = story.gang(2)
    assert gang.hosts == ("pc1", "pc3")
    assert sum(rank.share for rank in gang.ranks) == 40
    told = story.last("restarting")
    assert (told["hosts"], told["without"]) == (["pc1", "pc3"], ["pc2"])
    assert "pc2 does not answer" in told["what"]
    assert ("pc2",) not in [tuple(names) for names in story.backend.polled]  # that takes as long as a connection may
    story.finish()


def test_without_the_head_the_next_host_is_the_head(story):
    story.hosts.save(39)
    story.begin()
    lose(story, "pc1")
    story.joined(2)
    assert story.gang(2).hosts == ("pc2", "pc3")
    assert Cluster.of_attempt(story.layout, 2).head.name == "pc2"
    assert load_record(story.layout.cluster, Cluster).head.name == "pc2"
    story.finish()


def cut_off(story, monkeypatch, *names):
    """Ranks lose each other, and their hosts say who is cut off; an empty tuple: nobody any more."""
    said = [
        Partition(hosts=hosts, what=f"{hosts[0]} is cut off", seen="timed out") if hosts else None for hosts in names
    ]
    asked = []

    def find(hosts, cluster, transports, *, port):
        asked.append([host.name for host in hosts])
        return said[min(len(asked), len(said)) - 1]

    for module in (attempts_module, loop_module):
        monkeypatch.setattr(module, "find_partition", find)
    for name in NAMES:
        failure = {"rank": NAMES.index(name), "pid": 1, "time": 0.0, "ordered": False, "exit": 5}
        error = {"kind": "RunFailed", "what": "Connection reset by peer", "seen": "", "fix": "", "exit_code": 5}
        story.backend.change(name, failures=({**failure, "error": error, "log": "l", "log_tail": []},))
        story.backend.end(name, returncode=1, reason="finished", rests=True)
    return asked


def test_a_host_that_the_others_do_not_reach_is_left_out_though_it_answers_us(story, monkeypatch):
    story.hosts.save(39)
    story.begin()
    asked = cut_off(story, monkeypatch, ("pc1",))
    story.joined(2)
    assert story.gang(2).hosts == ("pc2", "pc3")
    assert story.last("restarting")["what"] == "pc1 is cut off"
    outcome = AttemptOutcome.load(story.layout.attempt(1) / "outcome.json")
    assert (outcome.error["what"], outcome.error["host"], outcome.error["seen"]) == (
        "pc1 is cut off",
        "pc1",
        "timed out",
    )
    assert asked[0] == list(NAMES)
    story.finish()


def test_a_host_that_is_reached_again_in_time_goes_on_with_the_others(tmp_path, monkeypatch):
    story = Story(tmp_path, wait_s=30.0)
    story.hosts.save(39)
    story.begin()
    cut_off(story, monkeypatch, ("pc1",), ("pc1",), ())
    story.joined(2)
    assert story.gang(2).hosts == NAMES
    story.finish()


def test_a_host_that_answers_us_again_does_not_join_before_the_others_reach_it(story, monkeypatch):
    monkeypatch.setattr(away_module, "BACK_S", 0.05)
    monkeypatch.setattr(away_module, "LOOK_S", 0.01)
    monkeypatch.setattr(reach_module, "FRESH_S", 0.0)
    story.hosts.save(39)
    story.begin()
    asked = cut_off(story, monkeypatch, ("pc3",), *[("pc3",)] * 5, ())
    story.joined(2)
    assert story.gang(2).hosts == ("pc1", "pc2")
    wait_until(lambda: "yield" in story.backend.orders, "it is back")
    assert len(asked) > 6
    story.joined(3)
    assert story.gang(3).hosts == NAMES
    story.finish()


def test_a_host_that_is_back_joins_again_in_good_order(story, monkeypatch):
    monkeypatch.setattr(away_module, "BACK_S", 0.05)
    monkeypatch.setattr(away_module, "LOOK_S", 0.01)
    story.hosts.save(39)
    story.begin()
    lose(story, "pc2")
    story.joined(2)
    story.hosts.off.clear()
    story.backend.silent.clear()
    story.joined(3)
    assert story.gang(3).hosts == NAMES
    assert [rank.share for rank in story.gang(3).ranks] == list(SHARES)
    assert "pc2 answers again" in story.last("restarting")["what"]
    assert "yield" in story.backend.orders
    story.finish()


def lose_and_return(tmp_path, monkeypatch, **settings):
    """A run that goes on without pc2, which answers again and has nothing in memory."""
    monkeypatch.setattr(away_module, "BACK_S", 0.05)
    monkeypatch.setattr(away_module, "LOOK_S", 0.01)
    monkeypatch.setattr(standby_module, "LOOK_S", 0.01)
    story = Story(tmp_path, backend=StandbyFakeBackend(), **settings)
    story.hosts.save(39)
    story.begin()
    lose(story, "pc2")
    story.joined(2)
    story.hosts.off.clear()
    story.backend.silent.clear()
    return story


def standing_by(story, number=1):
    wait_until(lambda: len(story.backend.getting_ready) >= number or story.failed, "it was asked to get ready")
    assert story.failed is None
    return story.backend.getting_ready[-1]


def say_ready(part, *, ready=True):
    """What a host agent writes that waits there."""
    folder = Path(part.folder)
    folder.mkdir(parents=True, exist_ok=True)
    me = ProcessId.current().to_json()
    write_json(folder / "resting.json", {**me, "ready": ready, "holds": []})
    ended = {"returncode": 0, "reason": "finished", "error": None, "failures": [], "console_tail": []}
    write_json(folder / "exit.json", ended)


def test_nobody_waits_for_a_host_that_is_back_until_it_is_ready(tmp_path, monkeypatch):
    story = lose_and_return(tmp_path, monkeypatch)
    part = standing_by(story)
    assert (part.host, part.ranks, part.alone) == ("pc2", (1,), True)
    say_ready(part, ready=False)
    waited = story.backend.num_polls
    wait_until(lambda: story.backend.num_polls > waited + 20, "the run goes on")
    assert "yield" not in story.backend.orders
    assert (story.gang().hosts, story.count("preparing")) == (("pc1", "pc3"), 1)
    say_ready(part)
    story.joined(3)
    assert story.gang(3).hosts == NAMES
    assert (story.count("leaving"), story.last("leaving")["what"]) == (1, "pc2 answers again and joins")
    assert story.request().on({"pc2"}).hosts[0].ranks == part.ranks
    assert len(story.backend.getting_ready) == 1
    assert load_record(story.layout.standby(2), LaunchRequest).names == ("pc2",)
    story.finish()


def test_a_host_that_does_not_get_ready_is_told_of_once_and_tried_again_later_and_later(tmp_path, monkeypatch):
    monkeypatch.setattr(standby_module, "PAUSE_S", 0.02)
    story = lose_and_return(tmp_path, monkeypatch)
    story.backend.cannot = "pc2: no room on its disk"
    standing_by(story, 4)
    assert story.count("not-ready") == 1
    assert story.last("not-ready")["what"] == (
        "pc2 does not get ready, and the run goes on without it: pc2: no room on its disk"
    )
    assert (story.gang().hosts, story.state().phase) == (("pc1", "pc3"), "running")
    assert "yield" not in story.backend.orders
    story.backend.cannot = None
    number = len(story.backend.getting_ready) + 1
    say_ready(standing_by(story, number))
    story.joined(3)
    assert story.gang(3).hosts == NAMES
    story.finish()


def test_an_attempt_that_follows_meanwhile_does_not_wait_for_it_either(tmp_path, monkeypatch):
    story = lose_and_return(tmp_path, monkeypatch)
    part = standing_by(story)
    say_ready(part, ready=False)
    story.kill_rank("pc3")
    story.joined(3)
    assert story.gang(3).hosts == ("pc1", "pc3")
    say_ready(part)
    story.joined(4)
    assert story.gang(4).hosts == NAMES
    story.finish()


def test_what_waits_on_a_host_ends_with_the_run(tmp_path, monkeypatch):
    story = lose_and_return(tmp_path, monkeypatch)
    say_ready(standing_by(story), ready=False)
    wait_until(story.layout.standby(2).exists, "it is written down")
    story.backend.statuses["pc2"] = replace(story.backend.statuses["pc2"], phase="ended", rests=True)
    write_order(story.layout, "stop", attempt=2)
    assert story.end().result == "stopped"
    assert "kill" in story.backend.orders


def test_a_host_may_be_asked_to_leave(story):
    story.hosts.save(39)
    story.begin()
    write_leave(story.layout, ["pc3"], attempt=1)
    story.joined(2)
    assert story.gang(2).hosts == ("pc1", "pc2")
    assert story.last("restarting")["what"] == "pc3 leaves, as ordered"
    story.finish()


def test_a_machine_that_shuts_down_in_good_order_leaves_and_the_others_go_on(story):
    story.hosts.save(39)
    story.begin()
    story.backend.end("pc3", returncode=0, reason="stopped")  # its host agent was told so by the machine
    for name in ("pc1", "pc2"):
        story.backend.end(name, returncode=0, reason="finished")
    story.joined(2)
    assert (story.gang(2).hosts, story.gang(2).resume_step) == (("pc1", "pc2"), 39)
    assert AttemptOutcome.load(story.layout.attempt(1) / "outcome.json").result == "stopped"
    assert story.last("restarting")["without"] == ["pc3"]
    story.finish()


def test_the_same_cause_twice_without_a_step_ends_the_run(story):
    story.hosts.save(39)
    story.begin()
    story.kill_rank("pc2")
    story.joined(2)  # the first attempt had got somewhere, so this is the first time
    story.kill_rank("pc2")
    story.joined(3)
    story.kill_rank("pc2")
    outcome = story.end()
    assert outcome.result == "failed"
    assert "twice for the same cause" in story.last("failed")["why"]
    assert story.state().phase == "failed"
    assert not any(status.rests for status in story.backend.statuses.values())


def test_with_progress_between_it_goes_on(story):
    story.hosts.save(39)
    story.begin()
    story.kill_rank("pc2")
    story.joined(2)
    story.hosts.save(50, attempt=2)
    story.kill_rank("pc2")
    story.joined(3)
    assert story.gang(3).resume_step == 50
    story.finish()


def test_a_job_may_end_at_the_first_failure(tmp_path):
    story = Story(tmp_path, restarts=0)
    story.begin()
    story.kill_rank("pc2")
    assert story.end().result == "failed"
    assert story.state().attempt == 1


def test_a_stop_of_the_user_ends_it_as_ever(story):
    story.begin()
    write_order(story.layout, "stop", attempt=1)
    assert story.end().result == "stopped"
    assert (story.state().phase, story.state().attempt) == ("stopped", 1)


def test_a_stop_between_two_attempts_counts(story, monkeypatch):
    story.hosts.save(39)
    story.begin()
    plain = attempts_module.prepare

    def prepare(*words, **how):
        write_order(story.layout, "stop", attempt=1)
        return plain(*words, **how)

    monkeypatch.setattr(attempts_module, "prepare", prepare)
    story.kill_rank("pc2")
    story.end()
    assert (story.state().phase, story.state().error) == ("stopped", None)
    assert story.state().attempt == 1
    assert not any(status.rests for status in story.backend.statuses.values())


def test_how_long_the_way_back_took_is_told(story):
    story.hosts.save(39)
    story.begin()
    story.tell(*NAMES, step=41)
    story.kill_rank("pc2")
    story.joined(2)
    wait_until(lambda: story.count("returned") == 1, "it has come back", timeout_s=30)
    told = story.last("returned")
    assert set(told["stages"]) == {"ended", "prepared", "started", "joined", "step"}
    assert told["seconds"] >= 0
    story.finish()


def test_another_supervisor_takes_over_between_two_attempts(story):
    story.hosts.save(39)
    story.begin()
    story.finish()
    outcome = AttemptOutcome.load(story.layout.attempt(1) / "outcome.json")
    error = {"kind": "RunFailed", "what": "rank 1 on pc2 was killed by SIGKILL", "seen": "", "fix": "", "exit_code": 5}
    replace(outcome, result="failed", error=error).save(story.layout.attempt(1) / "outcome.json")
    replace(story.state(), phase="restarting").save(story.layout)
    for name in NAMES:
        story.backend.end(name, returncode=1, reason="broken", rests=True)
    story.begin()
    story.joined(2)
    assert story.gang(2).resume_step == 39
    story.finish()


def test_who_has_left_and_who_was_lost_is_known_to_another_supervisor(story):
    story.hosts.save(39)
    story.begin()
    write_leave(story.layout, ["pc3"], attempt=1)
    story.joined(2)
    lose(story, "pc2")
    story.joined(3)
    said = load_record(story.layout.base(3), lambda data: data)
    assert said == {"attempt": 1, "left": ["pc3"], "away": ["pc2"], "micro_batch": None, "settings": []}
    connect = lambda cluster: {host.name: story.hosts.transports[host.name] for host in cluster.hosts}  # noqa: E731
    again = Attempts(SupervisedRun(layout=story.layout, backend=lambda _name: story.backend, connect=connect), 3)
    assert (again._left, again._lost.silent) == ({"pc3"}, {"pc2"})
    story.finish()


@pytest.mark.parametrize(
    ("problem", "why"),
    [
        (RunFailed("pc2: no room for the checkpoint"), "no room for the checkpoint"),
        (OSError(errno.ENOSPC, "pc2: No space left on device", "/w/COMMITTED"), "pc2: No space left on device"),
        (OSError(errno.EIO, "pc2: Input/output error"), "the next attempt could not be prepared"),
    ],
    ids=["said", "full", "broken"],
)
def test_a_host_that_cannot_do_its_part_again_and_again_ends_the_run(story, monkeypatch, problem, why):
    story.hosts.save(39)
    story.begin()
    tries = []

    def prepare(*_words, **_how):
        tries.append(1)
        raise problem

    monkeypatch.setattr(attempts_module, "prepare", prepare)
    story.kill_rank("pc2")
    assert story.end().result == "failed"
    assert len(tries) == 2
    assert why in story.last("failed")["why"]


def test_a_disk_that_has_room_again_is_tried_again(story, monkeypatch):
    story.hosts.save(39)
    story.begin()
    real, tries = attempts_module.prepare, []

    def prepare(*words, **how):
        tries.append(1)
        if len(tries) == 1:
            raise OSError(errno.ENOSPC, "pc2: No space left on device", "/w/COMMITTED")
        return real(*words, **how)

    monkeypatch.setattr(attempts_module, "prepare", prepare)
    story.tell(*NAMES, step=41)
    story.kill_rank("pc2")
    story.joined(2)
    assert len(tries) == 2
    story.finish()


# A run that others could take over.


class PlayedLead:
    """The lead of a supervisor. commits: what becomes of the start of each attempt; True once there are no more."""

    own = "pc1"
    holds = True

    def __init__(self, layout, *commits):
        self.deputies = Deputies(cluster=Cluster(name="home", hosts=()), candidates=(), attempt=1)
        self.term = 1
        self._layout = layout
        self._commits = list(commits)

    @property
    def least_epoch(self):
        return self.term * EPOCHS

    def commit(self, hosts, is_ordered):
        answer = self._commits.pop(0) if self._commits else True
        return answer() if callable(answer) else answer

    def elected_again(self):
        self.term += 2
        self.raise_epoch()
        return True

    def raise_epoch(self):
        state = RunState.load(self._layout)
        replace(state, epoch=max(state.epoch, self.least_epoch)).save(self._layout)

    def follow(self, hosts):
        pass

    def check(self):
        pass

    def failure(self):
        return None

    def await_hold(self, is_ordered):
        return True


def died(story):
    """Its supervisor has died: nobody looks after it until the next one begins."""
    pace = PollIntervals(poll_s=0.005, notice_s=0.0, verify_s=0.3)
    run = SupervisedRun(
        layout=story.layout, backend=lambda _: story.backend, connect=lambda _: story.hosts.transports, pace=pace
    )
    Attempts(run, 1).begin()


def never():
    raise AssertionError("nothing is to be confirmed")


def test_an_order_ends_a_run_whose_supervisor_has_died_without_a_word_of_the_others(story):
    """Most hosts may not have confirmed yet who leads, and the order ends the wait for them."""
    died(story)
    write_order(story.layout, "stop", attempt=1)
    story.lead = PlayedLead(story.layout, never)
    story.begin(joins=False)
    assert story.end().result == "stopped"


def test_what_made_room_for_the_next_attempt_goes_on_though_its_supervisor_has_died(story):
    story.hosts.save(39)
    died(story)
    for name in NAMES:
        story.backend.end(name, returncode=0, reason="stopped", rests=True)
    AttemptOutcome(result="stopped", hosts={}).save(story.layout.outcome(1))
    replace(story.state(), phase="restarting").save(story.layout)
    story.lead = PlayedLead(story.layout)
    story.begin()
    assert (story.state().attempt, story.last("restarting")["what"]) == (2, "its hosts were to change")
    assert story.finish().result == "finished"


def test_one_that_is_elected_again_while_an_attempt_is_to_begin_stays_in_charge(story):
    story.hosts.save(39)
    story.lead = lead = PlayedLead(story.layout)
    lead._commits = [lead.elected_again, lead.elected_again]
    story.begin()
    assert set(story.backend.epochs[-1:]) == {3_000_001}
    story.kill_rank("pc2")
    story.joined(2)
    assert story.state().epoch == 5_000_001
    assert story.finish().result == "finished"


def test_an_order_that_comes_while_the_next_attempt_is_not_confirmed_is_seen(story):
    """state.json names the next attempt already, so the order is written for that one."""

    def ordered():
        write_order(story.layout, "stop", attempt=story.state().attempt)
        return False

    story.hosts.save(39)
    story.lead = PlayedLead(story.layout, True, ordered)
    story.begin()
    story.kill_rank("pc2")
    assert story.end().result == "stopped"
    assert (story.state().phase, story.count("joined")) == ("stopped", 1)


def test_one_whose_hosts_do_not_confirm_for_hours_tries_without_end(story):
    depths = []

    def depth():
        depths.append(len(inspect.stack()))
        return False

    story.hosts.save(39)
    story.lead = PlayedLead(story.layout, True, depth, depth, depth)
    story.begin()
    story.kill_rank("pc2")
    story.joined(2)
    assert (len(depths), len(set(depths))) == (3, 1)
    assert story.finish().result == "finished"
