"""Files at an address (s3://, gs://, https:// ...), brought to this host by fsspec before their rows are read.

    <root>/data/remote/<hash>/<name>     a file, by its address and by what its store says of its version

A file whose version is here already is not brought again. What a set is made of is hashed like any other file, so a
run goes on only with the rows that it began with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gangline.errors import DataError, GanglineError, error_summary
from gangline.row_files import is_remote
from gangline.runs.files import sync_folder
from gangline.runs.job import Job, SourceJob
from gangline.worker.data.model_folder import combine

CHUNK_BYTES = 8 << 20


def bring_remote(job: Job, root: Path, *, beat: Callable[[], None] = lambda: None) -> Job:
    """The job with files of this host in place of addresses; raises DataError for what cannot be brought.

    beat: called for every chunk.
    """
    data = job.data
    train = _brought(data.train, root, beat)
    evaluation = data.evaluation and _brought(data.evaluation, root, beat)
    return dataclasses.replace(job, data=dataclasses.replace(data, train=train, evaluation=evaluation))


def _brought(source: SourceJob, root: Path, beat: Callable[[], None]) -> SourceJob:
    if not any(map(is_remote, source.all_files)):
        return source
    files = [here for file in source.files for here in (_bring(file, root, beat) if is_remote(file) else [file])]
    mix = tuple(_brought(part, root, beat) for part in source.mix)
    return dataclasses.replace(source, files=tuple(files), mix=mix)


def _bring(address: str, root: Path, beat: Callable[[], None]) -> list[str]:
    """The files of an address, which may be a glob, in the order of their names."""
    with _reachable(address):
        from fsspec.core import url_to_fs

        store, path = url_to_fs(address)
        signs = "*" if address.startswith("http") else "*?["  # there, `?` begins a query
        paths = sorted(map(str, store.glob(path))) if any(sign in path for sign in signs) else [path]
        if not paths:
            raise DataError(
                f"{address}: no file",
                seen="expected at least one file of that pattern; there is none",
                fix="check the pattern in data.train.files or data.eval.files",
            )
        return [str(_copy(store, each, root, beat)) for each in paths]


def _copy(store: Any, path: str, root: Path, beat: Callable[[], None]) -> Path:
    beat()
    version = combine([store.unstrip_protocol(path), store.size(path), _version(store, path)])
    name = path.partition("?")[0] if path.startswith("http") else path
    target = root / "data" / "remote" / version / name.rstrip("/").rpartition("/")[2]
    if target.is_file():
        return target
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.part")
    with store.open(path, "rb") as source, partial.open("wb") as stream:
        while chunk := source.read(CHUNK_BYTES):
            stream.write(chunk)
            beat()
    sync_folder(partial)
    partial.replace(target)
    return target


def _version(store: Any, path: str) -> str:
    """What the store says of the version: a hash or a time of change, where it says either."""
    info = store.info(path)
    names = ("ETag", "etag", "md5Hash", "md5", "contentHash", "generation", "LastModified", "last_modified", "mtime")
    return str([info[name] for name in names if info.get(name) is not None] or info.get("created") or "")


@contextmanager
def _reachable(address: str) -> Iterator[None]:
    protocol = address.partition("://")[0]
    try:
        yield
    except GanglineError:
        raise
    except ImportError as error:
        raise DataError(
            f"{address}: this host has no package for {protocol}://",
            seen=" ".join(str(error).split())[:200],
            fix=f"pip install {PACKAGES.get(protocol, 'the package named above')} into the environment of the head, "
            "or copy the files there",
        ) from error
    except Exception as error:  # every store has its own errors
        raise DataError(
            f"{address}: cannot be read",
            seen=error_summary(error),
            fix="check the address, and the credentials of that store on the head of the cluster",
        ) from error


PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "http": "aiohttp",
    "https": "aiohttp",
    "oci": "ocifs",
    "hf": "huggingface_hub",
    "sftp": "paramiko",
    "hdfs": "pyarrow",
}
"""Scheme of an address -> the package that fsspec needs for it."""
