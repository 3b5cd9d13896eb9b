"""What a job reads from the user's computer, brought to where it is read: the model to every host, data to the head."""

from __future__ import annotations

import dataclasses
import fnmatch
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from gangline.errors import DataError, ModelError
from gangline.remote.transport import Transport
from gangline.runs.cluster import Cluster, Host
from gangline.runs.job import Job, SourceJob
from gangline.sync.fanout import Cargo, bring
from gangline.sync.private import HEAD_BYTES, is_no_source, is_private_key, is_secret
from gangline.sync.tell import SILENT, Tell, shown
from gangline.sync.trees import How, Spot, Tree, here, look, look_everywhere, spot_on
from gangline.sync.wrappers import seeing

OF_OTHERS = ("*.gguf", "*.onnx", "*.onnx_data", "*.h5", "*.msgpack", "*.ot", "*.tflite", "*.mlmodel", "*.mlpackage")
"""Weights that other programs read."""
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.safetensors.index.json", "*.bin.index.json")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """Where what a job reads lies on the hosts, if not where the job says."""

    models: Mapping[str, str] = field(default_factory=dict)
    """Host -> folder of the model."""
    data: Mapping[str, str] = field(default_factory=dict)
    """File on the user's computer -> file on the head."""

    def localised(self, job: Job, host: Host) -> Job:
        """The job as it reads on a host."""
        model = dataclasses.replace(job.model, path=self.models.get(host.name, job.model.path))
        evaluation = job.data.evaluation and self._source(job.data.evaluation)
        data = dataclasses.replace(job.data, train=self._source(job.data.train), evaluation=evaluation)
        return dataclasses.replace(job, model=model, data=data)

    def seen_from(self, cluster: Cluster, job: Job) -> Cluster:
        """The cluster whose images, if hosts work in any, see the model and the data that are used where they are."""
        hosts = []
        for host in cluster.hosts:
            own = self.localised(job, host)
            paths = [own.model.path, *(_data_files(own) if host == cluster.head else ())]
            hosts.append(seeing(host, [path for path in paths if PurePath(path).is_absolute()]))
        return dataclasses.replace(cluster, hosts=tuple(hosts))

    def _source(self, source: SourceJob) -> SourceJob:
        return dataclasses.replace(source, files=tuple(self.data.get(file, file) for file in source.files))


def bring_reads(
    job: Job, cluster: Cluster, transports: Mapping[str, Transport], *, home: Path, tell: Tell = SILENT
) -> Reads:
    """Bring a model folder to every host and data files to the head, where they lack it, by content.

    A host that has the very same path with the same content uses it in place; so does this computer. Names of the hub
    stay as they are. home: hashes are remembered there. Raises ModelError or DataError.
    """
    return Reads(
        models=_bring_model(job, cluster, transports, home=home, tell=tell),
        data=_bring_data(job, cluster, transports, home=home, tell=tell),
    )


def _bring_model(
    job: Job, cluster: Cluster, transports: Mapping[str, Transport], *, home: Path, tell: Tell
) -> dict[str, str]:
    folder = Path(job.model.path)
    away = [host for host in cluster.hosts if host.transport != "local"]
    if not away or not folder.is_dir():
        return {}
    files = model_files(folder, weights=job.model.start == "pretrained")
    source, tree = _hashed(folder, tuple(files), home=home, tell=tell)
    in_place = _in_place(away, transports, folder, tree, tell=tell)
    lacking = [host for host in away if host.name not in in_place]
    name = f"{_NOT_IN_NAMES.sub('-', folder.name).strip('-.') or 'model'}-{str(tree.hash)[:16]}"
    targets = [spot_on(host, transports, PurePath(host.workdir) / "models" / name) for host in lacking]
    what = f"model {shown(folder.name)}"
    cargo = Cargo(what=what, source=source, tree=tree, files=files, kind=ModelError)
    bring(cargo, targets, shared=cluster.shared, tell=tell)
    return in_place | {target.host.name: str(target.path) for target in targets}


def _bring_data(
    job: Job, cluster: Cluster, transports: Mapping[str, Transport], *, home: Path, tell: Tell
) -> dict[str, str]:
    if cluster.head.transport == "local":
        return {}
    found: dict[str, str] = {}
    for file in dict.fromkeys(_data_files(job)):
        path = Path(file)
        if not path.is_file():
            continue
        source, tree = _hashed(path, None, home=home, tell=tell)
        if in_place := _in_place([cluster.head], transports, path, tree, tell=tell):
            found |= {file: in_place[cluster.head.name]}
            continue
        folder = PurePath(cluster.head.workdir) / "inputs" / str(tree.hash)[:16]
        target = spot_on(cluster.head, transports, folder / path.name)
        bring(Cargo(what=f"data {shown(path.name)}", source=source, tree=tree, kind=DataError), [target], tell=tell)
        found[file] = str(target.path)
    return found


def _data_files(job: Job) -> Iterator[str]:
    for source in (job.data.train, job.data.evaluation):
        yield from source.files if source else ()


def _hashed(path: Path, names: tuple[str, ...] | None, *, home: Path, tell: Tell) -> tuple[Spot, Tree]:
    source = here(path, home=home)
    return source, look(source, How(remember=True, names=names), tell=tell)


def _in_place(
    hosts: list[Host], transports: Mapping[str, Transport], path: Path, tree: Tree, *, tell: Tell
) -> dict[str, str]:
    """Hosts that have the very path with the very content."""
    spots = [spot_on(host, transports, path) for host in hosts]
    names = tuple(tree.files) if tree.kind == "folder" else None
    found = look_everywhere(spots, How(remember=True, names=names), tell=tell)
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
