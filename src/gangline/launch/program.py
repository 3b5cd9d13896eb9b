"""What torchrun starts as each rank: our worker, or the words of the user. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Literal

from gangline.errors import UsageError
from gangline.runs.record_versions import Record

# Launchers of other systems as the command of `gangline run`: recognised, taken off, and never started. Pure.


PYTHON = re.compile(r"python(3(\.\d+)?)?")
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
MODULE_OPTIONS = {"-m", "--module"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a program, as far as they tell where the next program begins."""

    values: Mapping[str, int] = field(default_factory=dict)
    """How many words follow an option, where it is not `default`."""
    default: int = 0
    """How many words follow an option that is not in `values`; none where the option has its value after `=`."""

    def end(self, words: Sequence[str], start: int) -> int:
        """The position of the first word that is neither an option nor the value of one."""
        position = start
        while position < len(words) and words[position].startswith("-"):
            word = words[position]
            if word == "--":
                return position + 1
            name, has_value, _ = word.partition("=")
            position += 1 + (0 if has_value else self.values.get(name, self.default))
        return position


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """A program that starts ranks, or commands on other hosts, by itself."""

    programs: tuple[str, ...] = ()
    """What it is called; the first name is the one in errors."""
    verbs: tuple[str, ...] = ()
    """Its verbs that start something, such as `launch`, `job submit`; (): it has none."""
    modules: tuple[str, ...] = ()
    """Python modules that are the same."""
    options: Options = field(default_factory=Options)
    has_program: bool = True
    """After its options comes the program of a rank; else a file of its own, or nothing."""


def _options(*, flags: str = "", values: str = "", pairs: str = "", default: int = 0) -> Options:
    counts = dict.fromkeys(flags.split(), 0) | dict.fromkeys(values.split(), 1)
    return Options(values=counts | dict.fromkeys(pairs.split(), 2), default=default)


LAUNCHERS = (
    Launcher(
        programs=("torchrun",),
        modules=("torch.distributed.run",),
        options=_options(
            flags="--standalone --no-python --no_python -m --module --run-path --run_path --virtual-local-rank "
            "--virtual_local_rank",
            default=1,
        ),
    ),
    Launcher(
        programs=("torch.distributed.launch",),
        modules=("torch.distributed.launch",),
        options=_options(
            flags="--standalone --no-python --no_python -m --module --use-env --use_env --run-path --run_path",
            default=1,
        ),
    ),
    Launcher(
        programs=("accelerate",),
        verbs=("launch",),
        modules=("accelerate.commands.launch", "accelerate.commands.accelerate_cli"),
        options=_options(
            flags="--cpu --multi_gpu --multi-gpu --tpu --use_deepspeed --use-deepspeed --use_fsdp --use-fsdp "
            "--use_megatron_lm --use_parallelism_config --use_xpu --ipex -m --module --no_python --no-python --debug "
            "-q --quiet --same_network --same-network --tpu_cluster --no_tpu_cluster --tpu_use_sudo "
            "--enable_cpu_affinity --use_mps_device",
            default=1,
        ),
    ),
    Launcher(
        programs=("deepspeed", "ds", "deepspeed.pt"),
        modules=("deepspeed.launcher.runner", "deepspeed.launcher.launch"),
        options=_options(
            flags="--module --no_python --no_local_rank --no_ssh --no_ssh_check --force_multi --save_pid "
            "--elastic_training --bind_cores_to_rank",
            default=1,
        ),
    ),
    Launcher(
        programs=("mpirun", "mpiexec", "orterun", "prterun", "mpirun.openmpi", "mpiexec.openmpi", "mpiexec.hydra"),
        options=_options(
            values="-n --n -np --np -c -H -host --host -hosts --hosts -hostfile --hostfile -machinefile --machinefile "
            "-f -x -wdir --wdir -wd -map-by --map-by -bind-to --bind-to -rank-by --rank-by -N -npernode --npernode "
            "-ppn -perhost -ppr --prefix -output-filename --output-filename -rf --rankfile --timeout -iface "
            "-genvlist -envlist -path --path -launcher -bootstrap -am --am --slot-list --cpu-set --cpu-list --app",
            pairs="-mca --mca -gmca --gmca --prtemca --pmixmca -genv -env",
        ),
    ),
    Launcher(
        programs=("horovodrun",),
        modules=("horovod.runner.launch",),
        options=_options(
            flags="--gloo --mpi --jsrun --verbose --check-build -cb --disable-cache --start-timeout-disable "
            "--prefix-output-with-timestamp --autotune --no-autotune --hierarchical-allreduce --hierarchical-allgather "
            "--timeline-mark-cycles --no-stall-check --mpi-threads-disable --tcp -v --version",
            default=1,
        ),
    ),
    Launcher(
        programs=("srun",),
        options=_options(
            values="-n -N -c -t -p -J -A -w -x -D -o -e -i -G -C -L -M -d -m -q -r -T -W -B -K --ntasks --nodes "
            "--cpus-per-task --time --partition --job-name --account --nodelist --exclude --chdir --output --error "
            "--input --gpus --gres --constraint --mem --mem-per-cpu --mem-per-gpu --ntasks-per-node --gpus-per-node "
            "--gpus-per-task --qos --reservation --jobid --container-image --container-mounts --export --wait --mpi "
            "--distribution --dependency --relative",
        ),
    ),
    Launcher(programs=("sbatch", "salloc"), has_program=False),
    Launcher(
        programs=("pdsh", "dsh"),
        options=_options(values="-w -x -g -X -R -M -l -t -u -f -o -P"),
    ),
    Launcher(
        programs=("parallel-ssh", "pssh"),
        options=_options(
            values="-h -H -l -p -o -e -t -O -x -X --hosts --host --user --par --outdir --errdir --timeout --option "
            "--extra-args --extra-arg",
        ),
    ),
    Launcher(programs=("clush",), options=_options(values="-w -x -g -X -f -t -u -l -o -R -O -m")),
    Launcher(
        programs=("ray",),
        verbs=("job submit",),
        options=_options(flags="--no-wait -v --verbose --log-color", default=1),
    ),
    Launcher(programs=("ray",), verbs=("submit", "exec", "start", "up", "attach"), has_program=False),
    Launcher(programs=("colossalai",), verbs=("run",), options=_options(flags="--no_python -m", default=1)),
    Launcher(programs=("tune",), verbs=("run",), has_program=False),
)
"""Every launcher that `run` knows."""

PREFIXES: Mapping[str, tuple[str, Options]] = {
    "env": ("", _options(flags="-i --ignore-environment -0 -v", values="-u --unset -C --chdir -S")),
    "nohup": ("", Options()),
    "time": ("", _options(values="-o -f")),
    "exec": ("", _options(values="-a")),
    "setsid": ("", Options()),
    "nice": ("", _options(values="-n")),
    "ionice": ("", _options(values="-c -n")),
    "stdbuf": ("", _options(values="-i -o -e")),
    "timeout": ("1", _options(values="-s -k")),
    "taskset": ("1", Options()),
    "numactl": ("", Options()),
    "sudo": ("", _options(values="-u -g -C -D -h -p -R -T -U")),
    "uv": ("run", _options(values="--with --python -p --extra --group --project --directory --env-file --package")),
    "poetry": ("run", Options()),
    "pipenv": ("run", Options()),
    "pixi": ("run", _options(values="-e --environment")),
    "conda": ("run", _options(values="-n --name -p --prefix --cwd")),
    "mamba": ("run", _options(values="-n --name -p --prefix --cwd")),
    "micromamba": ("run", _options(values="-n --name -p --prefix --cwd")),
}
"""Programs in front of another program -> the word that must follow them ("1": any one word), and their options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A launcher that was found in a command."""

    name: str
    program: tuple[str, ...]
    """The program that it would start as every rank, with its own options; (): it is not known."""


def find_launcher(words: Sequence[str]) -> Launch | None:
    """The launcher that a command would start, whatever stands in front of it; None where it starts none."""
    words = tuple(words[_begin(words) :])
    if not words:
        return None
    for launcher in LAUNCHERS:
        start = _after(launcher, words)
        if start is not None:
            name = _name(launcher, words, start)
            return Launch(name=name, program=_program(launcher, words, start))
    return None


def _begin(words: Sequence[str]) -> int:
    """Where the command itself begins, after assignments and programs that only prepare something for it."""
    position = 0
    while position < len(words):
        word = PurePosixPath(words[position]).name
        if ASSIGNMENT.fullmatch(words[position]):
            position += 1
            continue
        verb, options = PREFIXES.get(word, ("", None))
        if options is None:
            return position
        after = options.end(words, position + 1) if verb in {"", "1"} else position + 1
        if verb == "1":
            after += 1
        elif verb:
            if list(words[after : after + 1]) != [verb]:
                return position
            after = options.end(words, after + 1)
        position = after
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


def _program(launcher: Launcher, words: Sequence[str], start: int) -> tuple[str, ...]:
    if not launcher.has_program:
        return ()
    end = launcher.options.end(words, start)
    program = tuple(words[end:])
    if not program:
        return ()
    flags = {name for name in MODULE_OPTIONS if launcher.options.values.get(name) == 0}
    if flags & set(words[start:end]):
        return ("-m", *program)
    begin = _begin(program)
    inner = program[begin:]
    if len(inner) > 1 and PYTHON.fullmatch(inner[0]) and (not inner[1].startswith("-") or inner[1] == "-m"):
        return inner[1:]  # the hosts' own Python is meant
    return inner


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
"""The file that the host agent lays beside its own, and which becomes the user's program
(gangline.agent.supervise.rank_start).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StallWatch:
    """What is done once no rank of the user's own program prints any more."""

    after_s: float
    """How long no rank has printed anything then."""
    action: Literal["tell", "stop"] = "tell"
    """tell: it is said. stop: the run is ended, and has failed."""
    can_resume: bool = False
    """The user has said how the program goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What every rank runs."""

    kind: Literal["worker", "command"] = "worker"
    """worker: our trainer. command: the user's own, which knows nothing of gangline."""
    argv: tuple[str, ...] = ()
    """command: the user's words."""
    cwd: str | None = None
    """command: where it runs, a folder on every host; one that is not absolute lies in the host's work folder."""
    env: dict[str, str] = field(default_factory=dict)
    """Variables on top of those of the host."""
    stall: StallWatch | None = None
    """command: None: nobody looks whether it prints."""
    rest_s: float = 0.0
    """worker: how long host agents rest after an attempt (`backend.StandBy`); 0: they end with it."""
    alone: bool = False
    """worker: launchers do not meet, only ranks do: in an attempt that follows one whose host agents may still rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Again(Record):
    """again.json: how the user's own program is started once more after a failure, without anybody being asked."""

    restarts: int
    """How often at the most."""
    program: Program


WORKER = Program()


def rank_words(words: tuple[str, ...], *, python: str) -> tuple[str, ...]:
    """The user's words as a command that starts one rank. python: of the host.

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
    """Raise UsageError for words that cannot be the program of a rank."""
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
