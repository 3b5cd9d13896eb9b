"""Words in, types out: read `job.yaml` and `cluster.yaml`, lay `key=value` over them, check, resolve."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gangline.config.cluster_file import resolve_cluster
from gangline.config.cluster_model import ClusterWords
from gangline.config.document import (
    Document,
    apply_overrides,
    drop_rivals,
    looks_like_hostfile,
    name_of,
    parse_hostfile,
    read_document,
)
from gangline.config.fields import NAME, PATTERNS
from gangline.config.foreign import ForeignKind, kind_of, kind_of_text
from gangline.config.job_file import resolve_job, resolve_notify
from gangline.config.job_model import FOREIGN, JobWords, SettingsWords
from gangline.config.mistakes import (
    KeyPath,
    Mistake,
    Mistakes,
    Position,
    folder_content,
    printable,
    quote,
    what_was_meant,
)
from gangline.config.validate import check
from gangline.errors import SpecError, UsageError
from gangline.plugins import Table
from gangline.runs.cluster import Cluster, Host
from gangline.runs.job import Job, NotifyJob

MAX_BYTES = 4 << 20
"""A job or cluster file is short; anything larger was named by mistake."""


DEFAULT = "cluster.yaml"
"""The cluster file that is meant where none is named."""


def default_cluster(folder: Path) -> Path | None:
    """The cluster file of a folder; None where there is none."""
    path = folder / DEFAULT
    return path if path.is_file() else None


def load_job(source: Path | Mapping[str, Any], overrides: Sequence[str] = (), *, needs_data: bool = True) -> Job:
    """The job that a file (or its keys) and `key=value` overrides mean. Reads no model and no data, but finds the
    files.

    Relative paths in the file begin at its folder, others at the current folder. needs_data: whether
    files of data have to be there; else the paths of those that are not are kept as they would be. Raises SpecError
    with all mistakes at once.
    """
    path = source if isinstance(source, Path) else Path("job")
    text = read_text(path, kind="job") if isinstance(source, Path) else json.dumps(source, default=str, indent=1)
    document = read_document(text, str(path))
    _refuse_foreign(kind_of(document.values), path, ours="a job.yaml")
    return _resolved_job(document, path, overrides, needs_data=needs_data)


def _resolved_job(document: Document, path: Path, overrides: Sequence[str], *, needs_data: bool) -> Job:
    apply_overrides(document, overrides, JobWords)
    drop_rivals(document, rivals=("epochs", "steps"))
    drop_rivals(document, rivals=("exact", "about"), within="batch")
    checked = check(JobWords, document, foreign=FOREIGN)
    checked.needs_data = needs_data
    return resolve_job(checked, folder=path.absolute().parent, default_name=_name(path, otherwise="job"))


def read_settings(path: Path) -> NotifyJob | None:
    """Who gets messages by a file of settings, at present all that it says; None: it says nothing.

    Relative paths begin at the folder of the file. Raises SpecError with all mistakes at once.
    """
    text = read_text(path, kind="settings")
    if all(not line.strip() or line.lstrip().startswith("#") for line in text.splitlines()):
        return None
    return _settings(read_document(text, str(path)), path.absolute().parent)


def settings_of(notify: object) -> NotifyJob | None:
    """Who gets messages by the value of `notify` in settings, of a command line; as `read_settings`."""
    return _settings(read_document(json.dumps({"notify": notify}), "--notify"), Path.cwd())


def _settings(document: Document, folder: Path) -> NotifyJob | None:
    checked = check(SettingsWords, document)
    notify = resolve_notify(checked, checked.words.notify, folder=folder)
    document.mistakes.raise_if_any()
    return notify


def job_mistakes(text: str, path: Path, overrides: Sequence[str] = ()) -> tuple[Mistake, ...]:
    """What is off in the text of a job that is to stand at `path`, whether or not its data are there.

    A job that another program writes is checked with it before it is written.
    """
    document = read_document(text, str(path))
    try:
        _resolved_job(document, path, overrides, needs_data=False)
    except SpecError:
        if not document.mistakes.found:
            raise
    return tuple(document.mistakes.found)


def read_values(path: Path, *, kind: str) -> dict[str, Any]:
    """The plain values of a YAML or JSON file of another tool. Raises SpecError."""
    text = read_text(path, kind=kind)
    if path.suffix.lower() == ".json":
        with contextlib.suppress(ValueError):
            values = json.loads(text)
            if isinstance(values, dict):
                return values
    document = read_document(text, str(path))
    document.mistakes.raise_if_any()
    return document.values


def _refuse_foreign(kind: ForeignKind | None, path: Path, *, ours: str) -> None:
    """Raise SpecError for a file of another tool: none of its keys is a slip of the pen."""
    if kind is not None:
        raise SpecError(
            str(path),
            seen=f"a file of {kind.tool} with {kind.holds}; expected {ours}",
            fix=f"gangline convert {path}",
        )


def load_cluster(
    path: Path | None, overrides: Sequence[str] = (), *, home: Path, backends: Table[Any] | None = None
) -> Cluster:
    """The cluster that a cluster file or a hostfile means; None: this computer alone, with `home` to work in.

    home: the controller's own folder; a host without a work folder gets `<home>/hosts/<name>`. backends: the table
    of what `backend` may be; None: anything. Raises SpecError with all mistakes at once.
    """
    if path is None:
        return _this_computer(overrides, home=home)
    return read_cluster_text(read_text(path, kind="cluster"), path, overrides, home=home, backends=backends)


def read_cluster_text(
    text: str, path: Path, overrides: Sequence[str] = (), *, home: Path, backends: Table[Any] | None = None
) -> Cluster:
    """The cluster that the text of a file means, whether it has been written yet or not; see `load_cluster`."""
    name = _name(path, otherwise="cluster")
    _refuse_foreign(kind_of_text(text), path, ours="a cluster.yaml or a hostfile")
    document = parse_hostfile(text, str(path)) if _is_hostfile(path, text) else read_document(text, str(path))
    _refuse_foreign(kind_of(document.values), path, ours="a cluster.yaml or a hostfile")
    apply_overrides(document, overrides, ClusterWords)
    checked = check(ClusterWords, document)
    folder = path.absolute().parent
    return resolve_cluster(checked, folder=folder, home=home.absolute(), default_name=name, backends=backends)


def require_name(name: str | None) -> None:
    """Raise UsageError for what cannot be the name of a cluster."""
    if name is not None and (not re.search(NAME, name) or "\n" in name):
        raise UsageError(
            f"{quote(name)} is no name for a cluster", seen=f"expected {PATTERNS[NAME]}", fix="--name home, for example"
        )


def _this_computer(overrides: Sequence[str], *, home: Path) -> Cluster:
    document = Document(source="this computer", mistakes=Mistakes("the command line"))
    host = {"name": "local", "transport": "local", "workdir": str(home.absolute())}
    document.values = {"name": "local", "hosts": [host]}
    for path in (("name",), ("hosts",), ("hosts", 0), *(("hosts", 0, key) for key in host)):
        document.mark(path, Position(source=document.source))
    apply_overrides(document, overrides, ClusterWords)
    checked = check(ClusterWords, document)
    return resolve_cluster(checked, folder=Path.cwd(), home=home.absolute(), default_name="local")


def _is_hostfile(path: Path, text: str) -> bool:
    if path.suffix.lower() == ".json":
        return False
    return looks_like_hostfile(text, named_yaml=path.suffix.lower() in {".yaml", ".yml"})


def read_text(path: Path, *, kind: str) -> str:
    """A file of the user, as text; `kind` says in errors what it should have been. Raises SpecError."""
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except FileNotFoundError as error:
        raise SpecError(
            str(path),
            seen=f"there is no such file; expected a {kind} file",
            fix=what_was_meant(str(path), Path.cwd()),
        ) from error
    except IsADirectoryError as error:
        raise SpecError(
            str(path), seen=f"a folder; expected a {kind} file", fix=f"name a file in it: {folder_content(path)}"
        ) from error
    except OSError as error:
        raise SpecError(
            str(path), seen=f"{error.strerror}; expected a {kind} file that can be read", fix="check its permissions"
        ) from error
    if len(data) > MAX_BYTES:
        raise SpecError(
            str(path), seen="more than 4 MiB; expected a short text file", fix=f"is this the {kind} file at all?"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise SpecError(
            f"{path}:{line}:{error.start - data.rfind(10, 0, error.start)}",
            seen=f"the byte {data[error.start]:#04x}; expected text in UTF-8",
            fix="save the file as UTF-8; is it a text file at all?",
        ) from error


def _name(path: Path, *, otherwise: str) -> str:
    """A name out of a file's name: "my job.yaml" -> "my-job"."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("-._")[:63] or otherwise


# Hosts that are only named so far: on the command line, or in a hostfile.


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedHost:
    """A host of which nobody knows yet what it is."""

    host: Host
    has_slots: bool
    """Whether the user said how many ranks run there."""


def named_hosts(destinations: Sequence[str], *, home: Path) -> tuple[NamedHost, ...]:
    """The hosts that the command line names: `pc1`, `alice@pc1`. Raises SpecError with all mistakes at once."""
    source = "command line"
    document = Document(source=source, named_keys=False, mistakes=Mistakes("the command line"))
    document.mark(("hosts",), Position(source=source))
    hosts: list[dict[str, Any]] = []
    for index, text in enumerate(destinations):
        hosts.append({"name": name_of(text)} if name_of(text) == text else {"name": name_of(text), "ssh": text})
        position = Position(source=f"{source}: {printable(text)}", column=index + 1)
        path: KeyPath = ("hosts", index)
        for place in (path, *((*path, key) for key in hosts[-1])):
            document.mark(place, position)
    document.values = {"hosts": hosts}
    return _resolved(document, folder=Path.cwd(), home=home)


def hostfile_hosts(path: Path, *, home: Path) -> tuple[NamedHost, ...]:
    """The hosts of a hostfile. Raises SpecError with all mistakes at once."""
    document = parse_hostfile(read_text(path, kind="host"), str(path))
    return _resolved(document, folder=path.absolute().parent, home=home)


def listed_hosts(text: str, source: str, *, home: Path) -> tuple[NamedHost, ...]:
    """The hosts of a text in the words of cluster.yaml, which came from another tool's list. Raises SpecError."""
    return _resolved(read_document(text, source), folder=Path.cwd(), home=home)


def _resolved(document: Document, *, folder: Path, home: Path) -> tuple[NamedHost, ...]:
    checked = check(ClusterWords, document)
    cluster = resolve_cluster(checked, folder=folder, home=home.absolute(), default_name="cluster", complete=False)
    return tuple(
        NamedHost(host=host, has_slots=checked.wrote("hosts", index, "slots"))
        for index, host in enumerate(cluster.hosts)
    )
