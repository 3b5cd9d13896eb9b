"""Slurm's commands: what they are given, what their words mean."""

import pytest

from gangline.errors import GanglineError, HostUnreachable
from gangline.runs.cluster import Host
from gangline.transport import slurm_commands, srun, terminal


def test_commands_see_neither_the_options_of_an_allocation_nor_secrets():
    around = {
        "PATH": "/bin",
        "SLURM_CONF": "/etc/s.conf",
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": "3",
        "SBATCH_PARTITION": "x",
        "HF_TOKEN": "hf_secret",
    }
    assert slurm_commands.environment(around) == {"PATH": "/bin", "SLURM_CONF": "/etc/s.conf"}


def test_a_step_takes_nothing_from_others_and_names_its_job_and_node():
    words = slurm_commands.step_argv(Host(name="n3", workdir="/w", python="", transport="srun", allocation="41"))
    assert words[:3] == ["srun", "--jobid=41", "--nodelist=n3"]
    assert {"--overlap", "--mem=0", "--no-kill", "--ntasks=1"} <= set(words)


SUBMISSION = "sbatch: error: Batch job submission failed: "


@pytest.mark.parametrize(
    ("stderr", "kind", "fix"),
    [
        (f"{SUBMISSION}Invalid partition name specified", GanglineError, "slurm.partition"),
        (f"{SUBMISSION}Invalid account or account/partition combination specified", GanglineError, "slurm.account"),
        (f"{SUBMISSION}Invalid generic resource (gres) specification", GanglineError, "gpus_per_node"),
        (f"{SUBMISSION}Requested node configuration is not available", GanglineError, "sinfo -N"),
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", HostUnreachable, "slurmctld"),
        ("slurm_load_jobs error: Socket timed out on send/recv operation", HostUnreachable, "slurmctld"),
    ],
)
def test_a_refusal_has_the_words_of_slurm_and_ours(stderr, kind, fix):
    error = slurm_commands.refused(("sbatch", "x"), stderr)
    assert type(error) is kind
    assert stderr in error.seen
    assert fix in error.fix


def test_escape_sequences_of_slurm_reach_no_terminal():
    assert "\x1b" not in slurm_commands.refused(("sbatch",), "sbatch: error: \x1b[31mno\x1b[0m").seen


def test_jobs_are_read_from_squeue():
    job = slurm_commands.read_job("41|PENDING|Priority||2026-11-27T01:02:03|gpu|41")
    assert (job.id, job.waits, job.active, job.nodes) == ("41", True, True, ())
    assert (job.reason, job.starts) == ("Priority", "2026-11-27T01:02:03")
    job = slurm_commands.read_job("42|RUNNING|None|n1,n2|2026-11-27T01:02:03|gpu|42")
    assert (job.waits, job.active, job.nodes, job.reason) == (False, True, ("n1", "n2"), "")
    assert not slurm_commands.read_job("43|CANCELLED|None||N/A|gpu|43").active


def test_a_waiting_job_knows_its_place_in_its_partition(monkeypatch):
    asked, queue = [], ["17_1", "17_2", "41", "50+0", "50+1"]

    def answer(*words):
        asked.append(words)
        return "".join(f"{number}\n" for number in queue)

    monkeypatch.setattr(slurm_commands, "slurm", answer)
    job = slurm_commands.read_job("41|PENDING|Priority||N/A|gpu|41")
    assert slurm_commands.place_in_queue(job) == (3, 4)
    assert "--partition=gpu" in asked[0]
    queue[:] = ["41"]  # the site shows one's own jobs alone
    assert slurm_commands.place_in_queue(job) is None
    queue[:] = ["17_1"]  # it has just begun
    assert slurm_commands.place_in_queue(job) is None


def test_several_jobs_are_asked_about_once(monkeypatch):
    asked = []

    def answer(*words):
        asked.append(words)
        return "41|RUNNING|None|n1|N/A|gpu|41\n42|PENDING|Priority||N/A|gpu|42\n"

    monkeypatch.setattr(slurm_commands, "slurm", answer)
    with slurm_commands.asked_once({"41", "42", "43"}):
        states = [getattr(slurm_commands.find_job(number), "state", None) for number in ("41", "42", "43")]
        assert len(asked) == 1
        slurm_commands.find_job("44")  # not among them
        assert len(asked) == 2
    assert states == ["RUNNING", "PENDING", None]
    slurm_commands.find_job("41")
    assert len(asked) == 3
    with slurm_commands.asked_once(set()):
        assert len(asked) == 3


def test_a_silent_controller_is_asked_once_about_several_jobs(monkeypatch):
    asked = []

    def silent(*words):
        asked.append(words)
        raise slurm_commands.refused(("squeue",), "Unable to contact slurm controller")

    monkeypatch.setattr(slurm_commands, "slurm", silent)
    with slurm_commands.asked_once({"41", "42"}):
        for number in ("41", "42"):
            with pytest.raises(HostUnreachable):
                slurm_commands.find_job(number)
    assert len(asked) == 1


def test_a_command_in_this_terminal_is_a_step_on_the_node(monkeypatch):
    given = []
    monkeypatch.setattr(terminal, "_hand_over", lambda argv, env: given.append((argv, env)) or 0)
    node = Host(name="n3", workdir="/w", python="", transport="srun", allocation="41")
    assert terminal.interactive(node, ("python", "-m", "gangline.worker")) == 0
    ((argv, env),) = given
    assert argv[:3] == ["srun", "--jobid=41", "--nodelist=n3"]
    assert argv[-3:] == ["python", "-m", "gangline.worker"]
    assert "SLURM_JOB_ID" not in env
    with pytest.raises(HostUnreachable, match=r"carries no ports"), terminal.forward(node, 6006):
        pass


def test_a_job_that_slurm_has_forgotten_is_none(monkeypatch):
    def forgotten(*_words):
        raise slurm_commands.refused(("squeue",), "slurm_load_jobs error: Invalid job id specified")

    monkeypatch.setattr(slurm_commands, "slurm", forgotten)
    assert slurm_commands.find_job("41") is None


def test_a_heterogeneous_job_has_the_nodes_of_all_its_components(monkeypatch):
    monkeypatch.setattr(
        slurm_commands, "slurm", lambda *_words: "41+0|RUNNING|None|n0|N/A|gpu|41\n41+1|RUNNING|None|n1,n2|N/A|gpu|42\n"
    )
    for number in ("41", "41+1"):
        job = slurm_commands.find_job(number)
        assert (job.id, job.state, job.nodes) == ("41", "RUNNING", ("n0", "n1", "n2"))


def test_a_silent_controller_is_no_answer(monkeypatch):
    def silent(*_words):
        raise slurm_commands.refused(("squeue",), "Unable to contact slurm controller")

    monkeypatch.setattr(slurm_commands, "slurm", silent)
    with pytest.raises(HostUnreachable):
        slurm_commands.find_job("41")


class Step:
    """An srun that ends, or a node that answers."""

    def __init__(self, said):
        self.said = said
        self.is_closed = False

    def greet(self, _words):
        if self.said:
            raise HostUnreachable("n0: the step of Slurm's job 41 did not start", seen=self.said)

    def close(self):
        self.is_closed = True


BUSY = "srun: error: Unable to create step for job 41: Memory required by task is not available"


@pytest.mark.parametrize(
    ("said", "tries", "answers"),
    [
        (["", "never asked"], 1, True),
        ([BUSY, BUSY, ""], 3, True),
        ([BUSY] * 9, srun.TRIES, False),
        (["srun: error: Invalid job id specified", ""], 1, False),
    ],
)
def test_a_controller_that_has_just_come_back_is_asked_again(monkeypatch, said, tries, answers):
    steps = []

    def connect(_host):
        steps.append(Step(said[len(steps)]))
        return steps[-1]

    monkeypatch.setattr(srun, "SrunConnection", connect)
    monkeypatch.setattr(srun, "BUSY_S", 0.0)
    node = Host(name="n0", workdir="/w", python="", transport="srun", allocation="41")
    link = srun.SrunLink(node, "", lambda: b"")
    if answers:
        assert link._connect() is steps[-1]
    else:
        with pytest.raises(HostUnreachable):
            link._connect()
    assert len(steps) == tries
    assert [step.is_closed for step in steps] == [True] * (tries - answers) + [False] * answers
