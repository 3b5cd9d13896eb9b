"""A batch script that brings a run to nodes that do not see gangline's home: the program, its records, what it reads.

It unpacks them on the first node below `<workdir>/.controller`, where the batch step then works as it does in a home
that is shared. The records are read from there by gangline.control.unshared_home.
"""

from __future__ import annotations

import base64
import io
import json
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from gangline.control.unshared_home import CONTROLLER
from gangline.control.user_command import CommandRecord
from gangline.errors import UsageError
from gangline.provision.code import packed_project, source_files
from gangline.provision.inputs import Reads, model_files
from gangline.row_files import on_host
from gangline.runs.cluster import Host, SlurmRequest
from gangline.runs.job import Job
from gangline.runs.layout import RunLayout
from gangline.runs.record_versions import load_if_there
from gangline.supervise.allocation import SlurmRecord
from gangline.transport.slurm_commands import in_script
from gangline.units import format_bytes

READS = "reads.json"
"""In the run's folder on the node: where what the job reads lies there. It goes once the job says so itself."""
SCRIPT_BYTES = 4_000_000
"""A longer script is refused by Slurm, whose limit is 4 MiB where the site has not set another (max_script_size)."""
READS_BYTES = 64 << 20
"""What a run reads is not even packed above this size."""
END_OF_ARCHIVE = "END_OF_ARCHIVE"
LINE = 76 * 16
FIX = (
    "put the model and the data on the disks of the nodes or take their names at the hub; or set GANGLINE_HOME to a "
    "folder that login host and nodes share, and leave `slurm.shared_home` out"
)


def packed(layout: RunLayout, *, packages: tuple[str, ...] = ()) -> bytes:
    """The program, the records of a run and what it reads, as one archive. packages: of plug-ins that the run uses.

    Raises UsageError and ModelError for what cannot be brought.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:xz") as tar:
        for name, plain in sorted(source_files(packages).items()):
            _add(tar, f"code/{name}", plain.data)
        command = CommandRecord.of(layout)
        said = _add_project(tar, command) if command is not None else _add_reads(tar, Job.load(layout.job))
        _add(tar, f"run/{READS}", json.dumps(said).encode())
        for path in (layout.job, layout.command, layout.trial, layout.slurm, layout.state):  # the last: all is there
            if path.exists():
                _add(tar, f"run/{path.name}", path.read_bytes())
    return buffer.getvalue()


def _add(tar: tarfile.TarFile, name: str, data: bytes, *, is_program: bool = False) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), 0o700 if is_program else 0o600
    tar.addfile(entry, io.BytesIO(data))


def _add_project(tar: tarfile.TarFile, command: CommandRecord) -> Mapping[str, str]:
    with packed_project(Path(command.folder)) as (_project, archive, _chosen), tarfile.open(archive.path) as source:
        for member in source:
            data = source.extractfile(member) if member.isfile() else None
            member.name = f"reads/project/{member.name}"
            tar.addfile(member, data)
    return {"project": "project"}


def _add_reads(tar: tarfile.TarFile, job: Job) -> Mapping[str, object]:
    """What the job reads on this computer. Names of the hub, and what is not here, are left to the nodes."""
    said: dict[str, object] = {}
    found: dict[str, Path] = {}
    for kind, folder, weights in (
        ("model", job.model.path, job.model.start == "pretrained"),
        ("adapter", job.method.adapter, True),
    ):
        if folder is not None and Path(folder).is_dir():
            said[kind] = kind
            found |= {f"{kind}/{name}": path for name, path in model_files(Path(folder), weights=weights).items()}
    data = {file: f"{number}/{Path(file).name}" for number, file in enumerate(_data_here(job))}
    found |= {name: Path(file) for file, name in data.items()}
    num_bytes = sum(path.stat().st_size for path in found.values())
    if num_bytes > READS_BYTES:
        raise _too_large(f"{format_bytes(num_bytes)} of model and data")
    for name, path in found.items():
        _add(tar, f"reads/{name}", path.read_bytes())
    return {**said, "data": data}


def _data_here(job: Job) -> Iterator[str]:
    sources = [source for source in (job.data.train, job.data.evaluation) if source is not None]
    for file in dict.fromkeys(file for source in sources for file in source.all_files):
        if not on_host(file)[0] and Path(file).is_file():
            yield file


def _too_large(seen: str) -> UsageError:
    return UsageError(
        "the run is too large for a batch script, which alone reaches these nodes (`slurm.shared_home: false`)",
        seen=f"{seen}; packed at most {format_bytes(SCRIPT_BYTES)}",
        fix=FIX,
    )


def script_lines(layout: RunLayout, asked: SlurmRequest, archive: bytes) -> list[str]:
    """The lines of the batch script behind the options of sbatch; raises UsageError where they are too much."""
    text = base64.b64encode(archive).decode()
    if len(text) > SCRIPT_BYTES:
        raise _too_large(f"{format_bytes(len(text))} of program, model and data, packed")
    own = [asked.python] if asked.environment.kind == "own" and asked.python else []
    return [
        f"controller={_in_bash(asked.workdir)}/{CONTROLLER}",
        f'run="$controller"/runs/{layout.run_id}',
        "umask 077",
        'mkdir -p "$run" && exec </dev/null >>"$run/slurm-$SLURM_JOB_ID.log" 2>&1 || exit 1',
        'cp "$0" "$run/slurm.sbatch"',
        *asked.setup,
        "python=",
        f"for each in {' '.join(map(in_script, [*own, *PYTHONS]))}; do",
        "  \"$each\" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && python=$each && break",
        "done",
        f'if [ -z "$python" ]; then echo {in_script(NO_PYTHON)}; exit 97; fi',
        f'exec "$python" -c {in_script(UNPACK)} "$controller" {layout.run_id} <<\'{END_OF_ARCHIVE}\'',
        *(text[start : start + LINE] for start in range(0, len(text), LINE)),
        END_OF_ARCHIVE,
    ]


PYTHONS = ("python3", *(f"python3.{minor}" for minor in range(20, 9, -1)))
NO_PYTHON = "this node has no Python 3.10 or newer on its PATH: load one by a line of slurm.setup"
UNPACK = """\
import base64, io, os, sys, tarfile
root, run_id = sys.argv[1:]
run = os.path.join(root, "runs", run_id)
begun = os.path.exists(os.path.join(run, "state.json"))
requeued = os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
archive = tarfile.open(fileobj=io.BytesIO(base64.b64decode(sys.stdin.buffer.read())), mode="r:xz")
places = {"code": os.path.join(root, "code", run_id), "reads": os.path.join(root, "reads", run_id), "run": run}
for member in archive:
    kind, _, name = member.name.partition("/")
    if kind == "run" and begun and (requeued or name != "slurm.json"):
        continue
    path = os.path.join(places[kind], name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    fresh = path + ".fresh"
    if os.path.lexists(fresh):
        os.unlink(fresh)
    if member.issym():
        os.symlink(member.linkname, fresh)
    else:
        with open(fresh, "wb") as stream:
            stream.write(archive.extractfile(member).read())
        os.chmod(fresh, member.mode & 0o700)
    os.replace(fresh, path)
env = dict(os.environ, PYTHONPATH=places["code"], GANGLINE_OWN_PATH=places["code"])
os.execve(sys.executable, [sys.executable, "-m", "gangline.batch_step", run], env)
"""
"""Runs on the node. Records that a job before has left there stay: they are newer than those of the script."""


def _in_bash(folder: str) -> str:
    """A path of the node as bash reads it."""
    return f'"$HOME"/{in_script(folder[2:])}' if folder.startswith("~/") else in_script(folder)


# --- on the node


def take_over(layout: RunLayout, number: str) -> None:
    """Before the batch step begins: the records name the job, and what was brought where it lies here."""
    record = SlurmRecord.of(layout)
    if record is None or record.asked.shared_home:
        return
    replace(record, job=number, read=number).save(layout.slurm)  # all there is to read is here
    said = load_if_there(layout.folder / READS, dict)
    if said is None:
        return
    folder = reads_folder(layout)
    if (command := CommandRecord.of(layout)) is not None:
        replace(command, folder=str(folder / said["project"])).save(layout.command)
    else:
        here = Host(name="", workdir="", python="")
        reads = Reads(
            models={"": str(folder / said["model"])} if "model" in said else {},
            adapters={"": str(folder / said["adapter"])} if "adapter" in said else {},
            data={file: str(folder / name) for file, name in said["data"].items()},
        )
        reads.localised(Job.load(layout.job), here).save(layout.job)
    (layout.folder / READS).unlink()


def reads_folder(layout: RunLayout) -> Path:
    """What the script has brought for a run to read, on the node."""
    return layout.root / "reads" / layout.run_id
