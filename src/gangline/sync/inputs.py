"""What a run reads: tokenised once on the head, then brought to every host by content hash."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from gangline.errors import DataError, GanglineError, ModelError
from gangline.remote.transport import Transport
from gangline.runs.cluster import Cluster, Host
from gangline.runs.layout import RunLayout
from gangline.sync.ask import OnProgress, ask_worker
from gangline.sync.place import host_layout


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
    """Bring the token sets to hosts that lack them; the names of the hosts that got something."""
    served = []
    for host in cluster.hosts[1:]:
        missing = [
            content_hash
            for content_hash in (inputs.train, inputs.evaluation)
            if content_hash and not transports[host.name].names(_token_set(host, content_hash))
        ]
        for content_hash in missing:
            # the head is this computer as long as `Host.transport` knows nothing but "local"
            transports[host.name].push(Path(_token_set(cluster.head, content_hash)), _token_set(host, content_hash))
        served += [host.name] if missing else []
    return served


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
