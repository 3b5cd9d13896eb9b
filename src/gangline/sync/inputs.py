"""What a run reads: tokenised once on the head, then brought to every host by content hash."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gangline.errors import DataError, GanglineError, ModelError
from gangline.remote.transport import Transport
from gangline.runs.cluster import Cluster, Host
from gangline.runs.layout import RunLayout
from gangline.sync.ask import OnProgress, ask_worker
from gangline.sync.fanout import Cargo, Delivery, bring
from gangline.sync.place import host_layout
from gangline.sync.tell import SILENT, Tell, Ticks
from gangline.sync.trees import Spot, Tree, differing, look, spot_on

SET_FILE = "set.json"


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
    cluster: Cluster,
    transports: Mapping[str, Transport],
    run_id: str,
    *,
    secrets: Mapping[str, str] | None = None,
    on_progress: OnProgress,
) -> Inputs:
    """Tokenise and fingerprint on the head; what is there already by its hash is not done again.

    secrets: tokens for the hub, as environment.
    """
    layout = host_layout(cluster.head, run_id)
    words = ("inputs", str(layout.job), str(layout.root))
    head = transports[cluster.head.name]
    return Inputs.from_json(ask_worker(cluster.head, head, words, secrets=secrets, on_progress=on_progress))


def distribute(
    cluster: Cluster,
    transports: Mapping[str, Transport],
    inputs: Inputs,
    *,
    scratch: Path | None = None,
    tell: Tell = SILENT,
) -> list[str]:
    """Bring the head's token sets to hosts that lack them or have others; the names of the hosts that got something.

    What a host has is hashed there. Hosts send them on to each other where they can; else they pass through this
    computer's `scratch`. Raises DataError where a set is damaged on the head, or even after it was brought.
    """
    deliveries: dict[str, Delivery] = {}
    for what, content_hash in (("training tokens", inputs.train), ("evaluation tokens", inputs.evaluation)):
        source, *targets = (_token_set(host, transports, content_hash or "") for host in cluster.hosts)
        if content_hash is None or not targets:
            continue
        cargo = Cargo(what=what, source=source, tree=_verified(source), kind=DataError)
        deliveries[what] = bring(cargo, targets, shared=cluster.shared, scratch=scratch, tell=Ticks(tell))
    for line in _lines(deliveries):
        tell.say(line)
    return list(dict.fromkeys(host for delivery in deliveries.values() for host in delivery.served))


def _lines(deliveries: Mapping[str, Delivery]) -> list[str]:
    """What was brought, once where all of it went the same ways."""
    first, *others = deliveries.values() or [Delivery()]
    if all(other == first for other in others):
        return first.lines("tokens")
    return [line for what, delivery in deliveries.items() for line in delivery.lines(what)]


def _verified(source: Spot) -> Tree:
    """What lies on the head, if it is what it was when it was made."""
    tree = look(source)
    if SET_FILE not in tree.files:
        raise _damaged(source, [SET_FILE])
    entries = json.loads(source.transport.read(source.path / SET_FILE))["files"]
    expected = {name: (0, str(entry["blake2b"])) for name, entry in entries.items()}
    if wrong := differing(expected, tree.files, extra=False):
        raise _damaged(source, wrong)
    return tree


def _damaged(source: Spot, wrong: Sequence[str]) -> DataError:
    return DataError(
        f"{source.host.name}: {', '.join(str(source.path / name) for name in wrong)} is damaged",
        seen="it is not what was written when the data was tokenised",
        fix=f"look at the disk of that host; on it: rm -r {source.path}, and the data is tokenised anew",
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


def _token_set(host: Host, transports: Mapping[str, Transport], content_hash: str) -> Spot:
    return spot_on(host, transports, RunLayout(Path(host.workdir), "").token_set(content_hash))
