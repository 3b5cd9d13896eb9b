"""What a run reads: a model and data of the user's computer, brought to where they are read, and token sets.

Data are tokenised once on the head, then brought to every host by content hash.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, Literal

from gangline.errors import DataError, GanglineError, ModelError
from gangline.provision.ask import OnProgress, ask_worker
from gangline.provision.code import HEAD_BYTES, is_no_source, is_private_key, is_secret
from gangline.provision.console import SILENT, Console, Ticks, shown
from gangline.provision.environment import seeing
from gangline.provision.relay import Cargo, Delivery, bring
from gangline.provision.trees import (
    REMEMBERED,
    How,
    Spot,
    Tree,
    differing,
    here,
    host_layout,
    look,
    look_everywhere,
    name_from,
    spot_on,
)
from gangline.row_files import on_host
from gangline.runs.cluster import Cluster, Host
from gangline.runs.job import Job
from gangline.runs.layout import RunLayout
from gangline.transport.transport import Transport

OF_OTHERS = ("*.gguf", "*.onnx", "*.onnx_data", "*.h5", "*.msgpack", "*.ot", "*.tflite", "*.mlmodel", "*.mlpackage")
"""Weights that other programs read."""
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.safetensors.index.json", "*.bin.index.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """Where what a job reads lies on the hosts, if not where the job says."""

    models: Mapping[str, str] = field(default_factory=dict)
    """Host -> folder of the model."""
    data: Mapping[str, str] = field(default_factory=dict)
    """File of the job (on the user's computer, or `pc1:/path` on a host) -> file on the head."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Host -> folder of the adapter that is trained on."""

    def localised(self, job: Job, host: Host) -> Job:
        """The job as it reads on a host."""
        model = dataclasses.replace(job.model, path=self.models.get(host.name, job.model.path))
        method = dataclasses.replace(job.method, adapter=self.adapters.get(host.name, job.method.adapter))
        return dataclasses.replace(job, model=model, data=job.data.moved(self.data), method=method)

    def named(self, text: str) -> str:
        """What the head said, with the files of the job instead of the copies there."""
        for file, copy in self.data.items():
            text = text.replace(copy, file)
        return text

    @contextlib.contextmanager
    def named_as_here(self) -> Iterator[None]:
        """Errors of the head name the files of the job, not the copies there."""
        try:
            yield
        except GanglineError as error:
            error.what, error.seen = self.named(error.what), self.named(error.seen)
            raise

    def seen_from(self, cluster: Cluster, job: Job) -> Cluster:
        """The cluster whose images, if hosts work in any, see the model and the data that are used where they are."""
        hosts = []
        for host in cluster.hosts:
            own = self.localised(job, host)
            paths = [own.model.path, own.method.adapter or "", *(_data_files(own) if host == cluster.head else ())]
            hosts.append(seeing(host, [path for path in paths if PurePath(path).is_absolute()]))
        return dataclasses.replace(cluster, hosts=tuple(hosts))


def bring_reads(
    job: Job, cluster: Cluster, transports: Mapping[str, Transport], *, home: Path, console: Console = SILENT
) -> Reads:
    """Bring the folders of a model and an adapter to every host and data files to the head, where they lack them, by
    content.

    A host that has the very same path with the same content uses it in place; so does this computer. Names of the hub
    stay as they are. home: hashes are remembered there. Raises ModelError or DataError.
    """
    weights = job.model.start == "pretrained"
    model = _Folder("model", Path(job.model.path), weights=weights)
    models = _bring_folder(model, cluster, transports, home=home, console=console)
    adapters: dict[str, str] = {}
    if job.method.adapter is not None:
        adapter = _Folder("adapter", Path(job.method.adapter), weights=True)
        adapters = _bring_folder(adapter, cluster, transports, home=home, console=console)
    return Reads(
        models=models,
        adapters=adapters,
        data=_bring_data(job, cluster, transports, home=home, console=console),
    )


@dataclass(frozen=True, slots=True)
class _Folder:
    kind: Literal["model", "adapter"]
    path: Path
    weights: bool
    """Whether its weights are read."""


def _bring_folder(
    read: _Folder, cluster: Cluster, transports: Mapping[str, Transport], *, home: Path, console: Console
) -> dict[str, str]:
    """Host -> where the folder is there."""
    away = [host for host in cluster.hosts if host.transport != "local"]
    kind, folder = read.kind, read.path
    if not away or not folder.is_dir():
        return {}
    files = model_files(folder, weights=read.weights)
    source, tree = _hashed(folder, tuple(files), home=home, console=console)
    in_place = _in_place(away, transports, folder, tree, console=console)
    lacking = [host for host in away if host.name not in in_place]
    name = f"{name_from(folder, otherwise=kind)}-{str(tree.hash)[:16]}"
    targets = [spot_on(host, transports, PurePath(host.workdir) / "models" / name) for host in lacking]
    what = f"{kind} {shown(folder.name)}"
    cargo = Cargo(what=what, source=source, tree=tree, files=files, kind=ModelError)
    bring(cargo, targets, shared=cluster.shared, console=console)
    return in_place | {target.host.name: str(target.path) for target in targets}


def _bring_data(
    job: Job, cluster: Cluster, transports: Mapping[str, Transport], *, home: Path, console: Console
) -> dict[str, str]:
    found: dict[str, str] = {}
    for file in dict.fromkeys(_data_files(job)):
        name, there = on_host(file)
        path = Path(there)
        if name == cluster.head.name:
            found[file] = there
            continue
        if not name and (cluster.head.transport == "local" or not path.is_file()):
            continue
        source = spot_on(cluster.host(name), transports, path) if name else here(path, home=home)
        tree = look(source, REMEMBERED, console=console)
        if tree.kind != "file":
            raise DataError(f"there is no file {file} any more", seen="it was there a moment ago", fix="put it back")
        if in_place := {} if name else _in_place([cluster.head], transports, path, tree, console=console):
            found |= {file: in_place[cluster.head.name]}
            continue
        folder = PurePath(cluster.head.workdir) / "inputs" / str(tree.hash)[:16]
        target = spot_on(cluster.head, transports, folder / path.name)
        cargo = Cargo(what=f"data {shown(path.name)}", source=source, tree=tree, kind=DataError)
        bring(cargo, [target], scratch=home, console=console)
        found[file] = str(target.path)
    return found


def _data_files(job: Job) -> Iterator[str]:
    for source in (job.data.train, job.data.evaluation):
        yield from source.all_files if source else ()


def _hashed(path: Path, names: tuple[str, ...] | None, *, home: Path, console: Console) -> tuple[Spot, Tree]:
    source = here(path, home=home)
    return source, look(source, How(remember=True, names=names), console=console)


def _in_place(
    hosts: list[Host], transports: Mapping[str, Transport], path: Path, tree: Tree, *, console: Console
) -> dict[str, str]:
    """Hosts that have the very path with the very content."""
    spots = [spot_on(host, transports, path) for host in hosts]
    names = tuple(tree.files) if tree.kind == "folder" else None
    found = look_everywhere(spots, How(remember=True, names=names), console=console)
    return {spot.host.name: str(path) for spot, there in zip(spots, found, strict=True) if there.hash == tree.hash}


def model_files(folder: Path, *, weights: bool = True) -> dict[str, Path]:
    """Name -> where it really lies, of every file of a model folder that transformers may read.

    Links are followed inside the folder, and in the hub's cache to its blobs; one that leads elsewhere may lead to a
    key or a password: ModelError.
    """
    folder = folder.absolute()
    found: dict[str, Path] = {}
    for parent, folders, names in os.walk(folder, followlinks=False):
        folders[:] = [name for name in folders if not (is_no_source(name) or is_secret(name))]
        for name in sorted(names):
            path = Path(parent) / name
            if _is_read(name, weights=weights) and path.is_file():
                found[path.relative_to(folder).as_posix()] = _real(path, folder)
    return {name: path for name, path in found.items() if not is_private_key(_beginning(path))}


def _is_read(name: str, *, weights: bool) -> bool:
    patterns = OF_OTHERS if weights else (*OF_OTHERS, *WEIGHTS)
    return not (is_no_source(name) or is_secret(name) or any(fnmatch.fnmatch(name, pattern) for pattern in patterns))


def _real(path: Path, folder: Path) -> Path:
    real, root = path.resolve(), folder.resolve()
    if root.parent.name == "snapshots":  # the hub's cache: snapshots/<commit>/file -> ../../blobs/<hash>
        root = root.parent.parent
    if root not in real.parents:
        raise ModelError(
            f"{shown(str(path))} is a link that leads out of the model's folder",
            seen=f"it leads to {shown(str(real))}, and would be copied to the hosts",
            fix="put the file itself in its place, or take the link away",
        )
    return real


def _beginning(path: Path) -> bytes:
    with path.open("rb") as stream:
        return stream.read(HEAD_BYTES)


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
    console: Console = SILENT,
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
        deliveries[what] = bring(cargo, targets, shared=cluster.shared, scratch=scratch, console=Ticks(console))
    for line in _lines(deliveries):
        console.report(line)
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
