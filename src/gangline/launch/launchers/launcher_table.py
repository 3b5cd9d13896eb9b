"""Launchers of other systems in the command of `gangline run`: they are recognised, taken off, and "
                "never started. Pure,
but for the files that their options name.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from gangline.errors import UsageError
from gangline.launch.launchers.accelerate_options import ACCELERATE
from gangline.launch.launchers.deepspeed_options import DEEPSPEED
from gangline.launch.launchers.mpi_options import MPI
from gangline.launch.launchers.shell_options import CLUSH, COLOSSALAI, HOROVODRUN, PDSH, PSSH, RAY
from gangline.launch.launchers.srun_options import SRUN
from gangline.launch.launchers.taking_off import OptionTable, RankPlaces, Wishes, lines, read_options, shell_words
from gangline.launch.launchers.torchrun_options import TORCH_LAUNCH, TORCHRUN

PYTHON = re.compile(r"python(3(\.\d+)?)?")
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
NESTED = 5
"""Launchers in one command at the most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """A program that starts ranks, or commands on other hosts, by itself."""

    programs: tuple[str, ...]
    """Its names; errors use the first one."""
    verbs: tuple[str, ...] = ()
    """Its verbs that start something, such as `launch`, `job submit`; (): it has none."""
    modules: tuple[str, ...] = ()
    """Python modules that are the same program."""
    options: OptionTable | None
    """None: it cannot be taken off, as what it starts stands in a file of its own."""


LAUNCHERS = (
    Launcher(programs=("torchrun",), modules=("torch.distributed.run",), options=TORCHRUN),
    Launcher(programs=("torch.distributed.launch",), modules=("torch.distributed.launch",), options=TORCH_LAUNCH),
    Launcher(
        programs=("accelerate",),
        verbs=("launch",),
        modules=("accelerate.commands.launch", "accelerate.commands.accelerate_cli"),
        options=ACCELERATE,
    ),
    Launcher(programs=("accelerate-launch",), options=ACCELERATE),
    Launcher(
        programs=("deepspeed", "ds", "deepspeed.pt"),
        modules=("deepspeed.launcher.runner",),
        options=DEEPSPEED,
    ),
    Launcher(
        programs=(
            *("mpirun", "mpiexec", "orterun", "prterun", "mpirun.openmpi", "mpiexec.openmpi", "mpiexec.hydra"),
            *("mpirun.mpich", "mpiexec.mpich"),
        ),
        options=MPI,
    ),
    Launcher(programs=("horovodrun",), modules=("horovod.runner.launch",), options=HOROVODRUN),
    Launcher(programs=("srun",), options=SRUN),
    Launcher(programs=("sbatch", "salloc"), options=None),
    Launcher(programs=("pdsh", "dsh"), options=PDSH),
    Launcher(programs=("parallel-ssh", "pssh"), options=PSSH),
    Launcher(programs=("clush",), options=CLUSH),
    Launcher(programs=("ray",), verbs=("job submit",), options=RAY),
    Launcher(programs=("ray",), verbs=("submit", "exec", "start", "up", "attach"), options=None),
    Launcher(programs=("colossalai",), verbs=("run",), options=COLOSSALAI),
    Launcher(programs=("tune",), verbs=("run",), options=None),
    Launcher(programs=("deepspeed.launcher.launch",), modules=("deepspeed.launcher.launch",), options=None),
)
"""Every launcher that `run` knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """A program in front of another program."""

    verb: str = ""
    """The word that must follow it; 1: any one word."""
    values: frozenset[str] = frozenset()
    """Its options that take a value."""
    why: str = ""
    """The reason for which it is dropped in front of a launcher; "": it is refused there."""


def _prefix(verb: str = "", *, values: str = "", why: str = "") -> Prefix:
    return Prefix(verb=verb, values=frozenset(values.split()), why=why)


DETACHED = "the run goes on when you leave"
ENVIRONMENT = "the Python of the ranks stands in the cluster file (`environment`)"
PREFIXES: Mapping[str, Prefix] = {
    "env": _prefix(values="-u --unset -C --chdir -S"),
    "nohup": _prefix(why=DETACHED),
    "time": _prefix(values="-o -f", why="gangline measures it"),
    "exec": _prefix(values="-a", why=DETACHED),
    "setsid": _prefix(why=DETACHED),
    "nice": _prefix(values="-n"),
    "ionice": _prefix(values="-c -n"),
    "stdbuf": _prefix(values="-i -o -e", why="ranks of Python do not buffer their output"),
    "timeout": _prefix("1", values="-s -k"),
    "taskset": _prefix("1"),
    "numactl": _prefix(),
    "sudo": _prefix(values="-u -g -C -D -h -p -R -T -U"),
    "uv": _prefix(
        "run", values="--with --python -p --extra --group --project --directory --env-file --package", why=ENVIRONMENT
    ),
    "poetry": _prefix("run", why=ENVIRONMENT),
    "pipenv": _prefix("run", why=ENVIRONMENT),
    "pixi": _prefix("run", values="-e --environment", why=ENVIRONMENT),
    "conda": _prefix("run", values="-n --name -p --prefix --cwd", why=ENVIRONMENT),
    "mamba": _prefix("run", values="-n --name -p --prefix --cwd", why=ENVIRONMENT),
    "micromamba": _prefix("run", values="-n --name -p --prefix --cwd", why=ENVIRONMENT),
}
"""Programs that may stand in front of a launcher."""

OWN_RANKS: Mapping[str, str] = {
    "horovod": "its ranks are those of horovodrun",
    "mpi4py": "its ranks are those of MPI",
    "ray": "it asks a cluster of Ray for its workers",
}
"""Modules of a script whose ranks are not those of torch.distributed: each rank would be alone with them."""
IMPORT = re.compile(rf"^(?:import|from)\s+({'|'.join(OWN_RANKS)})\b", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenOff:
    """What a command asks for, without its launchers."""

    words: tuple[str, ...]
    """The program of a rank."""
    env: dict[str, str]
    placement: RankPlaces | None
    restarts: int
    notes: tuple[str, ...]
    """What the user is told; (): there was no launcher."""


def take_off(words: Sequence[str], *, folder: Path, variables: Mapping[str, str]) -> TakenOff:
    """The program of a rank, and what its launchers would set. Raises UsageError for what cannot be honoured.

    folder: the user's, which is copied to every host. variables: the user's environment.
    """
    wishes, left, names = Wishes(folder=folder, variables=variables), tuple(words), list[str]()
    while (found := _found(left)) is not None:
        launcher, begin, start = found
        wishes.launcher = _name(launcher, left[begin:], start - begin)
        if launcher.options is None or len(names) == NESTED:
            raise UsageError(
                f"{wishes.launcher} starts ranks itself, and so does gangline: every rank would "
                "start a gang of its own",
                seen=shlex.join(words),
                fix="leave it away: gangline run -- train.py --option value; hosts and ranks stand in cluster.yaml "
                "(hosts, slots)",
            )
        names.append(wishes.launcher)
        _read_prefixes(left[:begin], wishes)
        wishes.place(ranks_per_host=None)  # what stands in front of it starts launchers, not ranks
        left = _program(launcher.options, read_options(launcher.options, left[start:], wishes), wishes)
    if not names:
        begin = next((position for position, word in enumerate(left) if not ASSIGNMENT.fullmatch(word)), 0)
        _read_prefixes(left[:begin], wishes)
        return TakenOff(words=left[begin:], env=wishes.env, placement=None, restarts=0, notes=tuple(wishes.notes))
    begin = _begin(left)
    _read_prefixes(left[:begin], wishes)
    left = left[begin:]
    _require_ranks_of_torch(left, folder)
    placed = None if wishes.placement == RankPlaces() else wishes.placement
    told = tuple(lines(wishes, names))
    return TakenOff(words=left, env=wishes.env, placement=placed, restarts=wishes.restarts, notes=told)


def _program(table: OptionTable, words: tuple[str, ...], wishes: Wishes) -> tuple[str, ...]:
    """What a launcher starts, as words of `gangline run`."""
    if table.is_shell:
        words = shell_words(wishes, words)
    if not words:
        raise UsageError(
            f"{wishes.launcher} has no program to start",
            seen="nothing follows its options",
            fix=f"gangline run -- {wishes.launcher} OPTIONS train.py --option value",
        )
    if ":" in words and table is MPI:
        raise wishes.refuse("`:`, between several programs", "one program runs on all ranks", "name one of them")
    given = wishes.given
    script, rest = words[:1], words[1:]
    if flag := given.get("local_rank_flag"):
        rest = (f"{flag}=$local_rank", *rest)  # torchrun puts the number there
    if not table.runs_python or "no_python" in given:
        return (*script, *rest)
    if given.keys() & {"module", "m"}:
        return ("-m", *script, *rest)
    return (*script, *rest) if script[0].endswith(".py") else ("python", *script, *rest)


def _read_prefixes(words: Sequence[str], wishes: Wishes) -> None:
    """Assignments become variables of the ranks; raises UsageError for prefixes that change more than that."""
    for position, word in enumerate(words):
        name = PurePosixPath(word).name
        if ASSIGNMENT.fullmatch(word):
            variable, _, value = word.partition("=")
            wishes.export(variable, value)
        elif name == "env" and any(each.startswith("-") for each in words[position + 1 : position + 2]):
            raise wishes.refuse(f"env {words[position + 1]}", "gangline sets variables only", "write NAME=VALUE alone")
        elif name in PREFIXES and (position == 0 or not words[position - 1].startswith("-")):
            why = PREFIXES[name].why
            if not why and name != "env":
                raise wishes.refuse(
                    f"{name} in front of it", "gangline starts the ranks, not the launcher", "leave it out"
                )
            if why:
                wishes.notes.append(f"{name}: dropped; {why}")


def _require_ranks_of_torch(words: Sequence[str], folder: Path) -> None:
    """Raise UsageError for a script whose ranks only its own launcher starts; one that cannot be read passes."""
    script = next((word for word in words if word.endswith(".py")), None)
    try:
        text = "" if script is None else (folder / script).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    found = IMPORT.search(text)
    if found is not None:
        raise UsageError(
            f"{script} imports {found[1]}, and {OWN_RANKS[found[1]]}: each rank would train alone",
            seen=f"the line `{text[found.start() :].splitlines()[0]}`; gangline starts ranks of torch.distributed",
            fix="use torch.distributed in the script, or start it with its own launcher",
        )


# Which words are a launcher.


def find_launcher(command: Sequence[str]) -> str | None:
    """The launcher in a command, behind assignments and prefixes such as `env`; None: there is none."""
    words = tuple(command)
    found = _found(words)
    return None if found is None else _name(found[0], words[found[1] :], found[2] - found[1])


def _found(words: tuple[str, ...]) -> tuple[Launcher, int, int] | None:
    """The launcher, where it begins, and where its options begin."""
    begin = _begin(words)
    for launcher in LAUNCHERS if words[begin:] else ():
        start = _after(launcher, words[begin:])
        if start is not None:
            return launcher, begin, begin + start
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
        verb, with_value = PREFIXES[word].verb, PREFIXES[word].values
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


def module_position(words: Sequence[str]) -> int | None:
    """Where the name of the module stands that Python would run, if that is what the words ask for."""
    is_python = PYTHON.fullmatch(PurePosixPath(words[0]).name) is not None
    if "-m" not in words[:-1] or not (is_python or words[0] == "-m"):
        return None
    position = list(words).index("-m")
    if any(not word.startswith("-") for word in words[1:position] if is_python):
        return None  # it belongs to the script
    return position + 1
