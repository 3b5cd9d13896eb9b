"""Runs for supervisor tests: the controller's folder, hosts with work folders of their own, parts of checkpoints."""

import sys
from dataclasses import asdict
from pathlib import Path

from gangline.launch.backend import LaunchRequest
from gangline.runs.checkpoints import part_folder
from gangline.runs.cluster import Cluster, Host
from gangline.runs.files import write_json
from gangline.runs.layout import RunLayout
from gangline.runs.manifest import CheckpointPart
from gangline.runs.state import RunState
from gangline.transport.transport import Transport

RUN_ID = "calm-otter-7"


def cluster_of(folder: Path, *names: str) -> Cluster:
    hosts = tuple(Host(name=name, workdir=str(folder / name), python=sys.executable) for name in names)
    return Cluster(name="home", hosts=hosts)


def create_run(folder: Path, cluster: Cluster, request: LaunchRequest) -> RunLayout:
    """A run whose attempt can be supervised."""
    layout = RunLayout(folder / "home", RUN_ID)
    layout.attempt(request.attempt).mkdir(parents=True)
    write_json(layout.cluster, cluster.to_json())
    write_json(layout.attempt(request.attempt) / "request.json", asdict(request))
    RunState(name="tiny", attempt=request.attempt).save(layout)
    return layout


def save_part(transport: Transport, root: Path, step: int, *, hosts: tuple[str, ...], attempt: int = 1) -> None:
    """What a host has once its part of a checkpoint is written; without tensors."""
    part = CheckpointPart(
        step=step,
        host=transport.host,
        attempt=attempt,
        hosts=hosts,
        num_ranks=len(hosts),
        fingerprints={"job": "a"},
        evaluation_loss=None,
        files=(),
    )
    folder = part_folder(RunLayout(root, RUN_ID).checkpoints, step, transport.host)
    transport.write(folder / "part.json", part.to_bytes())
