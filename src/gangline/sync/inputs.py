"""What a run reads: tokenised once on the head, then brought to every host by content hash."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from gangline.errors import DataError, GanglineError, ModelError
from gangline.remote.transport import Transport
from gangline.runs.cluster import Cluster, Host
from gangline.runs.layout import RunLayout
from gangline.runs.manifest import digest_of
from gangline.sync.ask import OnProgress, ask_worker
from gangline.sync.place import host_layout

SET_FILE = "set.json"
TIMEOUT_S = 6 * 3600.0
"""Every byte of a token set is read and hashed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Fingerprints of what a run reads, and the record in which the worker said them."""

    train: str
    evaluation: str | None
    model: str
    record: dict[str, Any]
    """The whole content of inputs.json."""

    @staticmethod
    def from_json(record: dict[str, Any]) -> Inputs:
        """Inputs from inputs.json, or from the worker's result."""
        record = {key: value for key, value in record.items() if key != "kind"}
        return Inputs(train=record["train"], evaluation=record.get("evaluation"), model=record["model"], record=record)


def prepare_inputs(
    cluster: Cluster, transports: Mapping[str, Transport], run_id: str, *, on_progress: OnProgress
) -> Inputs:
    """Tokenise and fingerprint on the head; what is there already by its hash is not done again."""
    layout = host_layout(cluster.head, run_id)
    words = ("inputs", str(layout.job), str(layout.root))
    return Inputs.from_json(ask_worker(cluster.head, transports[cluster.head.name], words, on_progress=on_progress))


def distribute(cluster: Cluster, transports: Mapping[str, Transport], inputs: Inputs) -> list[str]:
    """Bring the token sets to hosts that lack them or have others; the names of the hosts that got something.

    What a host has is read and hashed there, and compared with the head's set.json. Raises DataError where a set is
    damaged even after it was brought.
    """
    head, served = cluster.head, []
    for content_hash in filter(None, (inputs.train, inputs.evaluation)):
        source = _token_set(head, content_hash)
        expected = _expected(transports[head.name], source)
        for host in cluster.hosts[1:]:
            target = _token_set(host, content_hash)
            if not _wrong(host, transports[host.name], target, expected):
                continue
            # the head is this computer as long as `Host.transport` knows nothing but "local"
            transports[host.name].push(Path(source), target)
            served.append(host.name)
            if wrong := _wrong(host, transports[host.name], target, expected):
                raise _damaged(host, target, wrong)
    return list(dict.fromkeys(served))


def _expected(transport: Transport, folder: PurePath) -> dict[str, str]:
    """Name -> digest of every file of the head's set."""
    text = transport.read(folder / SET_FILE)
    files = {name: entry["blake2b"] for name, entry in json.loads(text)["files"].items()}
    return {**files, SET_FILE: digest_of(text)}


def _wrong(host: Host, transport: Transport, folder: PurePath, expected: Mapping[str, str]) -> list[str]:
    """The files on a host that are not the head's, or are missing; [] when all are the same."""
    names = transport.names(folder)
    if missing := [name for name in expected if name not in names]:
        return missing
    argv = (host.python, "-m", "gangline.runs.files", str(folder))
    result = transport.run(argv, timeout_s=TIMEOUT_S)
    if result.returncode != 0:
        raise DataError(
            f"{host.name}: the token set {folder} cannot be verified",
            seen=f"exit code {result.returncode}: {result.stderr.strip()[-400:]}",
            fix=f"on that host: {' '.join(argv)}",
        )
    found = json.loads(result.stdout)
    return [name for name, digest in expected.items() if found.get(name) != digest]


def _damaged(host: Host, folder: PurePath, wrong: Sequence[str]) -> DataError:
    return DataError(
        f"{host.name}: {', '.join(str(folder / name) for name in wrong)} is damaged",
        seen="expected the content of the head's file; it was brought again and still differs",
        fix="look at the disk of that host, and at the head's: its set may have changed while it was copied",
    )


def require_same(run_id: str, before: Inputs, now: Inputs) -> None:
    """A run goes on only with the data and the model it began with."""
    _require(run_id, DataError, "training data", before.train, now.train)
    _require(run_id, DataError, "evaluation data", before.evaluation, now.evaluation)
    _require(run_id, ModelError, "model", before.model, now.model)


def _require(run_id: str, kind: type[GanglineError], name: str, before: str | None, now: str | None) -> None:
    if before != now:
        raise kind(
            f"the {name} of {run_id} changed since the run began",
            seen=f"expected fingerprint {_short(before)}, found {_short(now)}",
            fix=f"put the {name} back as it was, or start a new run: gangline train",
        )


def _short(fingerprint: str | None) -> str:
    return "none" if fingerprint is None else fingerprint[:12]


def _token_set(host: Host, content_hash: str) -> PurePath:
    return RunLayout(Path(host.workdir), "").token_set(content_hash)
