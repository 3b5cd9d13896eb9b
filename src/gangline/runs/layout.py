"""Where everything of a run lies. The same tree on the controller and on every host.

<root>/runs/<id>/
  job.json  cluster.json  inventory.json  plan.json  findings.json      what was asked, seen, decided
  state.json                                                            where the run stands (controller)
  inputs.json                                                           fingerprints of data and model in use
  typed.json                                                            the command that started it (controller)
  notify.secret  messages-<n>.json                                      where messages go, which are there (supervisor)
  attempts/<n>/
    request.json  gang.json  networks.json                              what was started, with which variables
    standby.json                                                        hosts that got ready meanwhile (controller)
    base.json                                                           the attempt that `train` or `resume` started, if
                                                                        this one followed it by itself (controller)
    <host>/agent.json  <host>/exit.json  <host>/console.log             the host agent's record, torchrun's output
    <host>/order-<epoch>.json  <host>/status.json  <host>/torchrun/     what it was ordered, what it sees
    <host>/resting.json  <host>/next.json  <host>/handed.json           it waits for the next attempt, and takes it over
    <host>/prefork/                                                    what it tells processes that outlive attempts
    rank-<r>.log  rank-<r>.phase  rank-<r>.pid  rank-<r>.error.json      one set per rank, on its own host
    rank-<r>.step  rank-<r>.count                                       its last step, by the user's own script; how
                                                                        many steps its optimizer has done
    rank-<r>.exit.json                                                  how it ended, by the prefork process
    cluster.json                                                        the hosts of this attempt (controller)
    save.json  rank-0.saves                                             the user wants a save; the user's own script
                                                                        asks for such orders (head)
    profile.json  profile-<id>-<r>.json, .trace.json.gz                 the user wants steps recorded (head); by a rank
    result.json                                                         how rank 0 left: finished or stopped (head)
    outcome.json                                                        how the attempt ended (controller)
    times.json                                                          where the time of every rank went (controller)
  comparison.json                                                       the plan beside what came of it (controller)
  deputies.json                                                         hosts that may take over from it (controller)
  lead/<host>/promise.json  lead/<host>/heard.json                      for whom this host has voted, when it last heard
                                                                        the leader
  lead/<host>/heartbeat-<term>.json  membership-<term>-<n>.json         by the leader: that it lives, who has a voice
  lead/<host>/records-<term>-<n>.json  deputy.log                       by the leader: what a successor needs; what a
                                                                        candidate has said
  lead/<host>/history-<term>-<n>.json  history.jsonl  history.json      by the leader: new lines of metrics.jsonl; the
                                                                        copy of them, and how far it goes
  lead/<host>/deposed-<term>.json                                       it led in that term, and has given up
  slurm.json  slurm.sbatch  slurm-<job>.log                             the job of Slurm that it is (controller)
  order.json  leave.json                                                what the user ordered of it (controller)
  prepare.lock  supervisor.lock                                         who looks after it (controller)
  metrics.jsonl  events.jsonl  tensorboard/  trackers/                  written by rank 0, on the head
  samples-<host>.jsonl                                                  what the host does during the run, on it
  checkpoints/step-00000100/COMMITTED, part-<host>/...                  on every host
  export/  evaluations/step-<k>-<time>.json                              models, and scores by `evaluate` (controller)
  served/step-<k>/                                                      on hosts that serve it together (controller)
  project/  project.json                                                a command's own folder, and what was laid there
<root>/sweeps/<id>/
  sweep.json                                                            what was asked
  state.json  order.json  supervisor.lock  supervisor.log               its supervisor, and what the user ordered
  trials/<n>/job.json  trial.json  tensorboard/<n>/                     one point, its run and its losses; command.json
                                                                        in place of job.json for a user's own script
  slurm.sbatch  trials/<n>/slurm-<array>_<n>.log                        the batch script of its last array on Slurm, and
                                                                        what each task wrote
<root>/endpoints/serve-<model>/
  request.json  state.json  key.secret  endpoint.log                    a model that is served, with `serve --detach`
<root>/data/<content hash>/                                             token files
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal, Protocol

PHASES = (
    "importing",
    "joining",
    "joined",
    "data",
    "compute",
    "exchange",
    "update",
    "evaluate",
    "save",
    "ended",
    "compile",
)
"""What a rank does, by number, as its phase file says. importing: torch. joining: the process group. joined: loading
the model, restoring. compile: of layers, before the first step. The rest: one step."""
EXPORT_NOTE = "gangline.json"
"""In the folder of an export: run, step, base model, and the form of its prompts."""
ADAPTER_CONFIG, MODEL_CARD = "adapter_config.json", "README.md"
"""In the same folder: what peft reads of an adapter; what the hub shows."""
SCHEMA_VERSION = (1, 0)
"""Major and minor, of all records of a run together; see `record_versions`."""
AGENT_NAMES: Mapping[str, str] = {
    "AGENT_RECORD": "agent.json",
    "STATUS": "status.json",
    "EXIT": "exit.json",
    "RESTING": "resting.json",
    "NEXT": "next.json",
    "HANDED": "handed.json",
    "CONSOLE_LOG": "console.log",
    "SUPERVISOR_LOCK": "supervisor.lock",
    "STATE": "state.json",
    "JOB": "job.json",
}
"""Files that the agent of a host writes into its folder of an attempt, or reads from the run's. The agent
imports nothing of this package, and has them by the same names in gangline/agent/host_files.py."""


class HasFolder(Protocol):
    """A layout whose files lie in one folder."""

    @property
    def folder(self) -> Path:
        """That folder."""
        ...


class RunFile:
    """A path in the run directory, as an attribute of `RunLayout`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, layout: HasFolder, owner: type) -> Path:
        return layout.folder / self._name


def attempt_file(name: str) -> Callable[[RunLayout, int], Path]:
    """A path in the folder of an attempt, as a method of `RunLayout`: `layout.gang(2)`."""

    def path(self: RunLayout, number: int) -> Path:
        return self.attempt(number) / name

    return path


@dataclass(frozen=True, slots=True)
class RunLayout:
    """Paths of one run below a root (the controller's home, or a host's work folder)."""

    root: Path
    run_id: str

    @property
    def folder(self) -> Path:
        """The run directory."""
        return self.root / "runs" / self.run_id

    job = RunFile(AGENT_NAMES["JOB"])
    """The resolved job."""
    cluster = RunFile("cluster.json")
    """The cluster of the last attempt whose gang was started."""
    plan = RunFile("plan.json")
    """The plan."""
    inventory = RunFile("inventory.json")
    """The facts of every host."""
    findings = RunFile("findings.json")
    """The findings of the checks."""
    chosen_networks = RunFile("networks.json")
    """The network interfaces that were chosen when the run was prepared, by host."""
    state = RunFile("state.json")
    """The state of the run: see `state.RunState`."""
    inputs = RunFile("inputs.json")
    """The inputs of the run: {"train": content hash, "evaluation": content hash or null, "model": fingerprint}."""
    metrics = RunFile("metrics.jsonl")
    """One JSON line per optimizer step and per evaluation."""
    comparison = RunFile("comparison.json")
    """The plan beside the measured figures, of the last attempt with enough steps."""
    events = RunFile("events.jsonl")
    """One JSON line per event."""
    typed = RunFile("typed.json")
    """The command that started the run, as it was typed."""
    sinks = RunFile("notify.secret")
    """Where messages go, with secrets; beside its supervisor, until the run has ended and all are delivered."""
    command = RunFile("command.json")
    """The user's own command, of a run that is no job."""
    supervisor_record = RunFile("supervision.json")
    """The host whose supervisor looks after the run."""
    deputies = RunFile("deputies.json")
    """The hosts that may take over the run from its supervisor, and how they reach each other."""
    lead = RunFile("lead")
    """What a host with a voice knows of the leader of the run (gangline.agent.supervise.voting)."""
    slurm = RunFile("slurm.json")
    """The job of Slurm that the run is."""
    trial = RunFile("trial.json")
    """The sweep that the run belongs to, and its number there; not of other runs."""
    order = RunFile("order.json")
    """The user's last order to end an attempt."""
    leave = RunFile("leave.json")
    """Hosts that the user wants to leave an attempt."""
    last_step = RunFile("last.json")
    """The last step of a run that has ended, kept for `ps`."""
    prepare_lock = RunFile("prepare.lock")
    """Held while a command prepares an attempt."""
    supervisor_lock = RunFile("supervisor.lock")
    """Held while a supervisor looks after the run."""
    tensorboard = RunFile("tensorboard")
    """TensorBoard's event files."""
    checkpoints = RunFile("checkpoints")
    """One folder per saved step."""
    export = RunFile("export")
    """Where `export` writes by default."""
    served = RunFile("served")
    """The model on each host of an endpoint over several hosts, as long as it is there."""
    evaluations = RunFile("evaluations")
    """Where `evaluate` writes the scores of the run's model."""
    project = RunFile("project")
    """The folder in which the user's own command runs, on every host."""

    def attempt(self, number: int) -> Path:
        """The folder of one attempt."""
        return self.folder / "attempts" / str(number)

    request = attempt_file("request.json")
    """The programs that one attempt starts, host by host."""
    standby = attempt_file("standby.json")
    """The programs on hosts that got ready for a later attempt beside one attempt."""
    outcome = attempt_file("outcome.json")
    """How one attempt ended."""
    board = attempt_file("board.json")
    """How far the start of one attempt has come on each host."""
    attempt_cluster = attempt_file("cluster.json")
    """The hosts of one attempt."""
    networks = attempt_file("networks.json")
    """Variables that name the network interfaces of each host, in one attempt."""
    base = attempt_file("base.json")
    """The attempt that `train` or `resume` started, if this one followed it by itself."""
    again = attempt_file("again.json")
    """How the user's own command is started again by itself after a failure."""
    supervisor_log = attempt_file("supervisor.log")
    """The output of the supervisor of one attempt."""
    gang = attempt_file("gang.json")
    """The gang of one attempt."""
    save_order = attempt_file("save.json")
    """The user's order to save, on the head, until rank 0 takes it away."""
    profile_order = attempt_file("profile.json")
    """The user's order to record steps, on the head (`profile_order.py`, which names what the ranks leave)."""
    script_saves = attempt_file("rank-0.saves")
    """The user's own script takes such orders."""
    result = attempt_file("result.json")
    """How rank 0 of one attempt left: {"result": "finished" or "stopped", "step": n}."""
    times = attempt_file("times.json")
    """The time of every rank of one attempt, part by part."""

    def samples(self, host: str) -> Path:
        """What a host did during the run, over all attempts, on that host."""
        return self.folder / f"samples-{host}.jsonl"

    def messages(self, sink: int | Literal["*"]) -> Path:
        """Which messages have reached a sink, by its number; `*`: a pattern for those of all sinks."""
        return self.folder / f"messages-{sink}.json"

    def token_set(self, content_hash: str) -> Path:
        """The folder of one tokenised data set."""
        return self.root / "data" / content_hash

    @staticmethod
    def of(folder: Path) -> RunLayout:
        """The layout whose run directory is `folder`."""
        return RunLayout(folder.parent.parent, folder.name)


@dataclass(frozen=True, slots=True)
class EndpointLayout:
    """Paths of a model that is served, on the computer where its users ask it."""

    home: Path
    endpoint_id: str

    @property
    def folder(self) -> Path:
        """Everything of the endpoint."""
        return self.home / "endpoints" / self.endpoint_id

    request = RunFile("request.json")
    """What was asked."""
    state = RunFile("state.json")
    """Where it stands."""
    key = RunFile("key.secret")
    """The key that requests have to bring, while it serves; only its owner reads it."""
    log = RunFile("endpoint.log")
    """The output of its process and of the worker."""


@dataclass(frozen=True, slots=True)
class SweepLayout:
    """Paths of one sweep, on the computer where it was started."""

    home: Path
    sweep_id: str

    @property
    def folder(self) -> Path:
        """Everything of the sweep but its runs."""
        return self.home / "sweeps" / self.sweep_id

    request = RunFile("sweep.json")
    """What was asked."""
    state = RunFile("state.json")
    """Where the sweep stands."""
    order = RunFile("order.json")
    """The order to end, if there is one."""
    lock = RunFile("supervisor.lock")
    """Held while a supervisor drives the sweep."""
    log = RunFile("supervisor.log")
    """The output of its supervisors."""
    tensorboard = RunFile("tensorboard")
    """One folder per trial."""

    def trial(self, number: int) -> Path:
        """The folder of one trial."""
        return self.folder / "trials" / str(number)

    def trial_record(self, number: int) -> Path:
        """Where a trial stands."""
        return self.trial(number) / "trial.json"

    def trial_job(self, number: int) -> Path:
        """Its resolved job."""
        return self.trial(number) / "job.json"

    def trial_command(self, number: int) -> Path:
        """Its command, in a sweep over the user's own script."""
        return self.trial(number) / "command.json"

    def numbers(self) -> list[int]:
        """The trials that there are."""
        found = (path.parent.name for path in (self.folder / "trials").glob("*/trial.json"))
        return sorted(int(name) for name in found if name.isdecimal())


# Names of runs: an adjective, an animal of the team, a number, such as calm-otter-7.


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ADJECTIVES = _words(
    """
    able agile amber ample arctic bold brave bright brisk calm candid clear clever cool crisp daring deep early
    eager easy fair fast firm fleet fond fresh gentle glad golden grand happy hardy honest ivory jolly keen kind
    late light lively loyal lucky lunar mellow merry mild misty modest neat nimble noble north open patient plain
    polar proud quick quiet rapid ready red royal rustic sharp shy silent silver simple sleek smart snowy snug
    solar solid spry steady still stout strong sturdy sunny swift tidy trim true vivid warm white wild winter wise
    young
    """
)

NOUNS = _words(
    """
    alder aspen badger bear beaver birch bison brook caribou cedar clover condor coyote crane creek curlew deer
    dove eagle elk ermine falcon fern finch fjord fox glacier goose grouse hare harp hawk heron husky ibex jay
    kestrel lake lark larch lemming lichen loon lynx marmot marten meadow mink moose moss narwhal otter owl petrel
    pika pine plover puffin rabbit raven reindeer river robin salmon seal sled snipe sparrow spruce stag stork
    swallow swan tern thistle thrush trout tundra vole walrus weasel whale willow wolf wren
    """
)

PATTERN = re.compile(r"[a-z]+-[a-z]+-[1-9][0-9]*")
"""What an id looks like; anything else in the folder of runs is not a run."""


def new_id(taken: Collection[str], dice: Random | None = None) -> str:
    """An id that is not in `taken`. The number grows with the runs there are, so that ids stay short."""
    dice = dice or Random()
    highest = 9
    while True:
        for _ in range(20):
            candidate = f"{dice.choice(ADJECTIVES)}-{dice.choice(NOUNS)}-{dice.randint(1, highest)}"
            if candidate not in taken:
                return candidate
        highest *= 10
