"""Rows that lie on a host (`pc1:/data/rows.jsonl`), looked at there before anything is built or copied.

The look is the one of this computer (`row_reader`): gangline's own source travels into the memory of a Python of that
host, which needs no package for it. Nothing is written there.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import io
import json
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gangline.config.mistakes import GLOB, find_files
from gangline.decide.row_reader import SETUP_BUILDS, Looker, SourceReader, python_with_packages, sources_of
from gangline.errors import DataError, RunFailed, UsageError
from gangline.provision.ask import LOOK_S, OFFLINE, ask_look
from gangline.row_files import on_host
from gangline.runs.cluster import Cluster, Host
from gangline.runs.files import json_object
from gangline.runs.job import Job, SourceJob
from gangline.transport.transport import Transport

PYTHONS = ("python3", *(f"python3.{minor}" for minor in range(20, 9, -1)))
LOADER = """
import os, sys
stream = sys.stdin.buffer
source = stream.read(int(stream.read(16)))
memory = os.memfd_create("gangline-look", 0)
with open(memory, "wb", closefd=False) as file:
    file.write(source)
sys.path.insert(0, "/proc/%d/fd/%d" % (os.getpid(), memory))
from gangline.decide.rows_there import answer
answer(stream.read())
"""
"""Takes gangline's source from stdin into a file without a name, and answers the request behind it."""
FIRST_PYTHON = (
    'for p in "$@"; do '
    '"$p" -I -S -c "import sys;sys.exit(sys.version_info<(3,10))" </dev/null >/dev/null 2>&1 && '
    'exec "$p" -I -c "$LOADER"; '
    "done; exit 97"
)
NO_PYTHON = 97


# On the computer of the user.


def with_files_there(job: Job, cluster: Cluster, transports: Mapping[str, Transport]) -> Job:
    """The job with the full paths of its files on hosts; raises UsageError for a host that the cluster has not, and
    DataError where no file has such a name there.
    """
    named = {file: on_host(file) for _, source in sources_of(job) for file in source.files if on_host(file)[0]}
    found: dict[str, list[str]] = {}
    for name in dict.fromkeys(host for host, _ in named.values()):
        patterns = {file: path for file, (host, path) in named.items() if host == name}
        try:
            files = _ask(_host(cluster, name), transports, {"find": list(patterns.values())})["files"]
        except RunFailed as error:
            if any(GLOB & set(pattern) or pattern.startswith("~") for pattern in patterns.values()):
                error.fix = "write the full paths of the files, without ~ and patterns: nobody can look there"
                raise
            continue
        found |= {file: [f"{name}:{path}" for path in files[pattern]] for file, pattern in patterns.items()}
    for file, files in found.items():
        if not files:
            raise DataError(
                f"data: there is no file {file}",
                seen=f"expected files to read; no file of {named[file][0]} has that name",
                fix="write the full path that it has there, or a pattern such as pc1:/data/*.jsonl",
            )
    return _replaced(job, found) if found else job


def looker_there(
    job: Job, cluster: Cluster, transports: Mapping[str, Transport]
) -> Callable[[str, SourceJob, str], Mapping[str, Any]]:
    """Looks at the files that lie on a host of the cluster."""

    def look(key: str, source: SourceJob, name: str) -> dict[str, Any]:
        host = _host(cluster, name)
        paths = {file: on_host(file)[1] for file in source.files}
        moved = dataclasses.replace(job, data=job.data.moved(paths))
        request = {"look": key, "job": moved.to_json(), "python": host.python}
        try:
            answer = _ask(host, transports, request)
        except RunFailed as error:
            return _unseen(source, error)
        return dict(_named(answer["source"], {path: file for file, path in paths.items()}, name))

    return look


def _host(cluster: Cluster, name: str) -> Host:
    try:
        return cluster.host(name)
    except KeyError:
        hosts = ", ".join(host.name for host in cluster.hosts)
        raise UsageError(
            f"data: files of {name}, which is no host of the cluster",
            seen=f"the cluster has {hosts}",
            fix="name one of these hosts, or copy the files to this computer",
        ) from None


def _unseen(source: SourceJob, error: RunFailed) -> dict[str, Any]:
    why = "; ".join(filter(None, (error.what, error.seen)))
    empty = {"is_cut": False, "taken": None, "num_rows": 0, "num_bad": 0, "fits": ""}
    return {**empty, "examples": [], "broken": [], "sample": [], "unread": [f"{file}: {why}" for file in source.files]}


def _named(value: Any, files: Mapping[str, str], host: str) -> Any:
    """What a host said, with its files by the names that the job has for them."""
    if isinstance(value, dict):
        return {key: _named(each, files, host) for key, each in value.items()}
    if isinstance(value, list):
        return [_named(each, files, host) for each in value]
    if not isinstance(value, str):
        return value
    for path in sorted(files, key=len, reverse=True):
        if path in value:
            return value.replace(path, files[path])
    return value.replace(SETUP_BUILDS, "").replace("this computer", host)


def _replaced(job: Job, found: Mapping[str, list[str]]) -> Job:
    """The job with each of these files in the place of its pattern."""

    def of(source: SourceJob) -> SourceJob:
        files = tuple(dict.fromkeys(each for file in source.files for each in found.get(file, [file])))
        return dataclasses.replace(source, files=files, mix=tuple(map(of, source.mix)))

    evaluation = job.data.evaluation and of(job.data.evaluation)
    return dataclasses.replace(job, data=dataclasses.replace(job.data, train=of(job.data.train), evaluation=evaluation))


@functools.cache
def _source() -> bytes:
    """The package itself, as Python imports it from one file."""
    root = Path(str(importlib.resources.files("gangline")))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(root.rglob("*")):
            if path.suffix in {".py", ".json"}:
                archive.writestr(f"gangline/{path.relative_to(root).as_posix()}", path.read_bytes())
    return buffer.getvalue()


def _ask(host: Host, transports: Mapping[str, Transport], request: Mapping[str, Any]) -> dict[str, Any]:
    """What a Python of a host answers; raises RunFailed where there is none, or it says nothing."""
    pythons = dict.fromkeys(filter(None, (host.python, *PYTHONS)))
    stdin = b"%016d" % len(_source()) + _source() + json.dumps(request).encode()
    argv = ("sh", "-c", FIRST_PYTHON, "sh", *pythons)
    try:
        result = transports[host.name].run(argv, stdin=stdin, env={**OFFLINE, "LOADER": LOADER}, timeout_s=LOOK_S)
    except TimeoutError as error:
        raise RunFailed(f"{host.name} did not look at its rows in time", seen=str(error)) from error
    if result.returncode == NO_PYTHON:
        raise RunFailed(f"{host.name} has no Python 3.10 or newer to look at its rows with")
    answer = json_object((result.stdout.strip().splitlines() or [""])[-1])
    if answer is None:
        lines = result.stderr.strip().splitlines() or [f"exit code {result.returncode}"]
        raise RunFailed(f"{host.name} cannot look at its rows", seen=lines[-1])
    return answer


# On the host.


def answer(request: bytes) -> None:
    """Answer one request on stdout."""
    asked = json.loads(request)
    if "find" in asked:
        found = {name: [str(path) for path in find_files(name, Path.home())] for name in asked["find"]}
        record: dict[str, Any] = {"files": found}
    else:
        here = Host(name="this computer", workdir="", python=asked["python"])
        job, looker = Job.from_json(asked["job"]), Looker(*python_with_packages((here,)), ask_look)
        source = next(source for key, source in sources_of(job) if key == asked["look"])
        record = {"source": SourceReader(asked["look"], source, job, looker).read().to_json()}
    sys.stdout.write(json.dumps(record) + "\n")
