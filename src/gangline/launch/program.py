"""The program of each rank: our worker, or the command of the user. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Literal

from gangline.errors import UsageError
from gangline.runs.record_versions import Record

# Launchers of other systems in the command of `gangline run`: gangline recognises them and never starts them. Pure.


PYTHON = re.compile(r"python(3(\.\d+)?)?")
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
MODULE_OPTIONS = {"-m", "--module"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """A program that starts ranks, or commands on other hosts, by itself."""

    programs: tuple[str, ...]
    """Its names; errors use the first one."""
    verbs: tuple[str, ...] = ()
    """Its verbs that start something, such as `launch`, `job submit`; (): it has none."""
    modules: tuple[str, ...] = ()
    """Python modules that are the same program."""
    has_program: bool = True
    """The program of a rank follows its options; otherwise a file of its own, or nothing."""


LAUNCHERS = (
    Launcher(programs=("torchrun",), modules=("torch.distributed.run",)),
    Launcher(programs=("torch.distributed.launch",), modules=("torch.distributed.launch",)),
    Launcher(
        programs=("accelerate",),
        verbs=("launch",),
        modules=("accelerate.commands.launch", "accelerate.commands.accelerate_cli"),
    ),
    Launcher(
        programs=("deepspeed", "ds", "deepspeed.pt"),
        modules=("deepspeed.launcher.runner", "deepspeed.launcher.launch"),
    ),
    Launcher(
        programs=("mpirun", "mpiexec", "orterun", "prterun", "mpirun.openmpi", "mpiexec.openmpi", "mpiexec.hydra")
    ),
    Launcher(programs=("horovodrun",), modules=("horovod.runner.launch",)),
    Launcher(programs=("srun",)),
    Launcher(programs=("sbatch", "salloc"), has_program=False),
    Launcher(programs=("pdsh", "dsh")),
    Launcher(programs=("parallel-ssh", "pssh")),
    Launcher(programs=("clush",)),
    Launcher(programs=("ray",), verbs=("job submit",)),
    Launcher(programs=("ray",), verbs=("submit", "exec", "start", "up", "attach"), has_program=False),
    Launcher(programs=("colossalai",), verbs=("run",)),
    Launcher(programs=("tune",), verbs=("run",), has_program=False),
)
"""Every launcher that `run` knows."""


def _prefix(verb: str = "", *, values: str = "") -> tuple[str, frozenset[str]]:
    return verb, frozenset(values.split())


PREFIXES: Mapping[str, tuple[str, frozenset[str]]] = {
    "env": _prefix(values="-u --unset -C --chdir -S"),
    "nohup": _prefix(),
    "time": _prefix(values="-o -f"),
    "exec": _prefix(values="-a"),
    "setsid": _prefix(),
    "nice": _prefix(values="-n"),
    "ionice": _prefix(values="-c -n"),
    "stdbuf": _prefix(values="-i -o -e"),
    "timeout": _prefix("1", values="-s -k"),
    "taskset": _prefix("1"),
    "numactl": _prefix(),
    "sudo": _prefix(values="-u -g -C -D -h -p -R -T -U"),
    "uv": _prefix("run", values="--with --python -p --extra --group --project --directory --env-file --package"),
    "poetry": _prefix("run"),
    "pipenv": _prefix("run"),
    "pixi": _prefix("run", values="-e --environment"),
    "conda": _prefix("run", values="-n --name -p --prefix --cwd"),
    "mamba": _prefix("run", values="-n --name -p --prefix --cwd"),
    "micromamba": _prefix("run", values="-n --name -p --prefix --cwd"),
}
"""Programs in front of another program -> the word that must follow them ("1": any one word), and their options that
take a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A launcher that was found in a command."""

    name: str
    program: tuple[str, ...]
    """The program of its ranks, with its options; (): unknown."""


def find_launcher(command: Sequence[str]) -> Launch | None:
    """The launcher in a command, behind assignments and prefixes such as `env`; None: there is none."""
    words = tuple(command)[_begin(tuple(command)) :]
    if not words:
        return None
    for launcher in LAUNCHERS:
        start = _after(launcher, words)
        if start is not None:
            name = _name(launcher, words, start)
            return Launch(name=name, program=_program(launcher, words, start))
    return None


def _begin(words: tuple[str, ...]) -> int:
    """The position of the command itself, behind assignments and prefixes."""
    position = 0
    while position < len(words):
        word = PurePosixPath(words[position]).name
        if ASSIGNMENT.fullmatch(words[position]):
            position += 1
            continue
        if word not in PREFIXES:
            return position
        verb, with_value = PREFIXES[word]
        if verb in {"", "1"}:
            position = _end_of_options(words, position + 1, with_value) + (verb == "1")
        elif words[position + 1 : position + 2] == (verb,):
            position = _end_of_options(words, position + 2, with_value)
        else:
            return position
    return position


def _end_of_options(words: Sequence[str], position: int, with_value: Collection[str]) -> int:
    """The position of the first word that is neither an option nor the value of one."""
    while position < len(words) and words[position].startswith("-"):
        if words[position] == "--":
            return position + 1
        position += 2 if words[position] in with_value else 1
    return position


def _after(launcher: Launcher, words: Sequence[str]) -> int | None:
    """The position after the launcher and its verb; None where the words do not start it."""
    module = module_position(words)
    if module is not None:
        if words[module] not in launcher.modules:
            return None
        start = module + 1
        is_cli = words[module].endswith("_cli")
        return _after_verb(launcher, words, start) if is_cli else start
    if PurePosixPath(words[0]).name not in launcher.programs:
        return None
    return _after_verb(launcher, words, 1)


def _after_verb(launcher: Launcher, words: Sequence[str], start: int) -> int | None:
    if not launcher.verbs:
        return start
    for verb in launcher.verbs:
        wanted = verb.split()
        if list(words[start : start + len(wanted)]) == wanted:
            return start + len(wanted)
    return None


def _name(launcher: Launcher, words: Sequence[str], start: int) -> str:
    """As the user would call it: `torchrun`, `accelerate launch`."""
    if module_position(words) is not None:
        return " ".join([launcher.programs[0], *launcher.verbs[:1]])
    return " ".join([PurePosixPath(words[0]).name, *(words[1:start] if launcher.verbs else ())])


def _program(launcher: Launcher, words: tuple[str, ...], start: int) -> tuple[str, ...]:
    """The first word that looks like a program, and what follows it; (): no word does.

    Options of a launcher are not known here: the program only completes an error message.
    """
    if not launcher.has_program:
        return ()
    for position in range(start, len(words)):
        word, rest = words[position], words[position + 1 :]
        if word in MODULE_OPTIONS and (launcher.modules or launcher.verbs):
            while rest and rest[0].startswith("-"):
                rest = rest[1:]
            return ("-m", *rest) if rest else ()
        if PYTHON.fullmatch(word) and rest and (not rest[0].startswith("-") or rest[0] == "-m"):
            return rest  # the hosts' own Python is meant
        is_path = word.startswith("./") and not words[position - 1].startswith("-")
        if is_path or PYTHON.fullmatch(word) or word.endswith((".py", ".sh")):
            return words[position:]
    return ()


def module_position(words: Sequence[str]) -> int | None:
    """Where the name of the module stands that Python would run, if that is what the words ask for."""
    is_python = PYTHON.fullmatch(PurePosixPath(words[0]).name) is not None
    if "-m" not in words[:-1] or not (is_python or words[0] == "-m"):
        return None
    position = list(words).index("-m")
    if any(not word.startswith("-") for word in words[1:position] if is_python):
        return None  # it belongs to the script
    return position + 1


SHIM = "rank_start.py"
"""The file that the host agent writes beside its own, and which executes the user's program
(gangline.agent.supervise.rank_start).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StallWatch:
    """The reaction to ranks of the user's own program without output."""

    after_s: float
    """Seconds without output of any rank."""
    action: Literal["report", "stop"] = "report"
    """stop: the run is ended as failed, too."""
    can_resume: bool = False
    """The user has given a --resume-flag."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The program of every rank."""

    kind: Literal["worker", "command"] = "worker"
    """worker: our trainer. command: the user's own, which knows nothing of gangline."""
    argv: tuple[str, ...] = ()
    """command: the user's words."""
    cwd: str | None = None
    """command: where it runs, a folder on every host; one that is not absolute lies in the host's work folder."""
    env: dict[str, str] = field(default_factory=dict)
    """Variables on top of those of the host."""
    stall: StallWatch | None = None
    """command: None: its output is not watched."""
    rest_s: float = 0.0
    """worker: how long host agents rest after an attempt (`backend.WarmPool`); 0: they end with it."""
    alone: bool = False
    """worker: launchers do not meet, only ranks do: in an attempt that follows one whose host agents may still rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Again(Record):
    """again.json: the automatic restart of the user's own program after a failure."""

    restarts: int
    """The maximum number."""
    program: Program


WORKER = Program()


def rank_words(words: tuple[str, ...], *, python: str) -> tuple[str, ...]:
    """The user's command as the command of one rank. python: of the host.

    A script (`train.py`) or a module (`-m package.train`) is run by the host's Python; `python` means that Python, too;
    any other program is started as it is. Raises UsageError for programs that start ranks themselves.
    """
    require_runnable(words)
    first, *rest = words
    if first.endswith(".py") or first == "-m":
        return (python, *words)
    if PYTHON.fullmatch(PurePosixPath(first).name) and "/" not in first:
        return (python, *rest)
    return words


def require_runnable(words: tuple[str, ...]) -> None:
    """Raise UsageError for a command that cannot be the program of a rank."""
    if not words:
        raise UsageError("there is nothing to run", fix="gangline run -- train.py --option value")
    launch = find_launcher(words)
    if launch is not None:
        program = shlex.join(launch.program) or "train.py --option value"
        raise UsageError(
            f"{launch.name} starts ranks itself, and so does gangline: every rank would start a gang of its own",
            seen=shlex.join(words),
            fix=f"leave it away: gangline run -- {program}; hosts and ranks stand in cluster.yaml (hosts, slots)",
        )
    if words[0].startswith("-") and (words[0] != "-m" or len(words) == 1):
        raise UsageError(
            f"{words[0]} is no program",
            seen="expected a script, -m and a module, or a program",
            fix="gangline run -- train.py --option value",
        )
