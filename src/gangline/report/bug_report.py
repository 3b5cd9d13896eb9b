"""One archive with what a maintainer needs to see why a run failed, redacted; and `explain` on such an archive.

The archive holds records of the run in the folders of a home, so that it is explained as the run itself:

    about.json                            versions, and how much was redacted
    explanation.txt                       what `gangline explain RUN` printed
    runs/<id>/...                         the records of the run and of its attempts
    logs/<host>-rank-<r>.log, ...         the beginning and the end of each log of the last attempt
"""

from __future__ import annotations

import io
import json
import platform
import re
import tarfile
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gangline import __version__
from gangline.errors import GanglineError, UsageError
from gangline.report.explanation import explain_lines
from gangline.report.follow import View
from gangline.report.redaction import Redaction
from gangline.report.run_history import RunHistory, read_history
from gangline.report.tail import LogFile, Tail
from gangline.runs.cluster import Cluster, Host
from gangline.runs.layout import PATTERN, RunLayout
from gangline.runs.registry import read_record
from gangline.transport.local import LocalTransport

FIRST_LINES, LAST_LINES = 200, 2_000
"""Of each log, and of the file of metrics, this much is kept."""
MOST_BYTES = 64 << 20
"""Of an archive and of each of its files, unpacked."""
MOST_MEMBERS = 5_000

_MEMBER = re.compile(r"[\w.-]{1,200}(/[\w.-]{1,200}){0,6}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BugReport:
    """What goes into the archive."""

    run_id: str
    files: Mapping[str, bytes]
    redacted: Mapping[str, int]
    """How many different values of each kind had to go."""
    missing: tuple[str, ...]
    """What could not be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivedRun:
    """The run of an archive, to be explained."""

    history: RunHistory
    is_job: bool
    can_resume: bool


def gather(
    view: View,
    run: ArchivedRun,
    cluster: Cluster,
    logs: Sequence[LogFile],
    *,
    private: Iterable[str],
    missing: Iterable[str] = (),
) -> BugReport:
    """Read and redact everything. private: texts that must not stand anywhere. missing: what could not be asked."""
    layout, redaction = view.layout, _redaction(view.layout, cluster, private)
    gaps = [*run.history.gaps, *missing]
    explained = explain_lines(run.history, is_job=run.is_job, can_resume=run.can_resume)
    files = {"explanation.txt": redaction.text("\n".join(explained) + "\n")}
    for path in _records(layout):
        files[f"runs/{layout.run_id}/{path.relative_to(layout.folder)}"] = redaction.lines(_text(path.read_bytes()))
    for name, tails in ((layout.metrics.name, view.tails()[:1]), (layout.events.name, view.tails()[1:])):
        text = "".join(f"{line}\n" for tail in tails for line in _kept(tail, gaps))
        files[f"runs/{layout.run_id}/{name}"] = redaction.lines(text)
    for log in logs:
        text = "".join(f"{line}\n" for line in _kept(Tail(log.transport, log.path), gaps))
        files[f"logs/{redaction.text(log.name).replace(' ', '-')}.log"] = redaction.text(text)
    about = {
        "gangline": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "run": layout.run_id,
        "is_job": run.is_job,
        "can_resume": run.can_resume,
        "redacted": redaction.counts,
        "missing": [redaction.text(gap) for gap in gaps],
    }
    files["about.json"] = json.dumps(about, indent=2) + "\n"
    return BugReport(
        run_id=layout.run_id,
        files={name: text.encode() for name, text in sorted(files.items())},
        redacted=dict(redaction.counts),
        missing=tuple(gaps),
    )


def pack(report: BugReport) -> bytes:
    """The archive, a .tar.gz; the same files give the same bytes."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz", compresslevel=6) as archive:
        for name, data in report.files.items():
            member = tarfile.TarInfo(f"bug-{report.run_id}/{name}")
            member.size, member.mode = len(data), 0o600
            archive.addfile(member, io.BytesIO(data))
    return stream.getvalue()


def read_archive(path: Path, folder: Path) -> ArchivedRun:
    """The run in an archive, which is unpacked into an empty folder; raises UsageError for any other file."""
    try:
        with tarfile.open(path, mode="r:gz") as archive:
            for name, data in _members(archive, path):
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(data)
        about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
        run_id, is_job, can_resume = str(about["run"]), bool(about["is_job"]), bool(about["can_resume"])
    except (OSError, EOFError, tarfile.TarError, ValueError, KeyError, TypeError) as error:
        raise _no_report(path, str(error)) from error
    if not PATTERN.fullmatch(run_id):
        raise _no_report(path, f"a run with the id {run_id[:80]!r}")
    layout = RunLayout(folder, run_id)
    here = LocalTransport(Host(name="local", workdir=str(folder), python="python3"))
    view = View(
        layout=layout, head=here, head_layout=layout, read=lambda: read_record(layout, is_alive=lambda _process: True)
    )
    try:
        history = read_history(view, records=layout, remote=None)
    except GanglineError as error:
        raise _no_report(path, f"{error.what}: {error.seen}") from error
    return ArchivedRun(history=history, is_job=is_job, can_resume=can_resume)


def is_archive(path: Path) -> bool:
    """Whether a file may be an archive of `report-bug`, by its name."""
    return path.name.startswith("bug-") and path.name.endswith(".tar.gz")


def _members(archive: tarfile.TarFile, path: Path) -> Iterator[tuple[str, bytes]]:
    """Files of the archive by their names below its folder; others than plain files are refused."""
    size = 0
    for number, member in enumerate(archive):
        inner = member.name.partition("/")[2]
        size += member.size
        if number >= MOST_MEMBERS or size > MOST_BYTES:
            raise _no_report(path, f"more than {MOST_MEMBERS:,} files or {MOST_BYTES >> 20} MiB")
        if not member.isfile() or not _MEMBER.fullmatch(member.name) or not inner or ".." in inner.split("/"):
            raise _no_report(path, f"a member {member.name[:80]!r}")
        stream = archive.extractfile(member)
        yield inner, stream.read(MOST_BYTES) if stream else b""


def _no_report(path: Path, seen: str) -> UsageError:
    return UsageError(
        f"{path} is no archive of gangline report-bug",
        seen=seen,
        fix="ask for it once more: gangline report-bug RUN writes it",
    )


def _redaction(layout: RunLayout, cluster: Cluster, private: Iterable[str]) -> Redaction:
    targets = [(host.ssh or "").rpartition("@") for host in cluster.hosts]
    names = [host.name for host in cluster.hosts] + [target[2] for target in targets]
    names += [*sorted(_hostnames(layout.inventory)), platform.node(), platform.node().partition(".")[0]]
    return Redaction(
        hosts=[name for name in names if name],
        users=[target[0] for target in targets if target[0]],
        secrets=private,
    )


def _hostnames(inventory: Path) -> set[str]:
    """Names that hosts have for themselves."""
    try:
        told = re.findall(r'"hostname": "([^"\\]{1,253})"', _text(inventory.read_bytes()))
    except OSError:
        return set()
    return {part for name in told for part in (name, name.partition(".")[0])}


def _records(layout: RunLayout) -> Iterator[Path]:
    """All records of the run and of its attempts."""
    for folder in (layout.folder, *sorted((layout.folder / "attempts").glob("[0-9]*"))):
        for path in sorted(folder.glob("*.json")):
            if path.is_file() and not path.is_symlink() and path.stat().st_size <= MOST_BYTES:
                yield path


def _kept(tail: Tail, gaps: list[str]) -> list[str]:
    """The first and the last lines of a file on a host."""
    first: list[str] = []
    last: deque[str] = deque(maxlen=LAST_LINES)
    count = 0
    try:
        for count, line in enumerate(tail.stream(), 1):
            (first if count <= FIRST_LINES else last).append(line)
    except GanglineError as error:
        gaps.append(f"{error.what}: {error.seen}")
    left_out = count - len(first) - len(last)
    return [*first, *([f"... {left_out:,} lines ..."] if left_out > 0 else []), *last]


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")
