"""gangline's own source on the hosts, so that the same code runs everywhere and nothing has to be installed there."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path, PurePath

import gangline
from gangline.remote.once import once
from gangline.remote.transport import Transport
from gangline.runs.cluster import Cluster, Host
from gangline.sync.archive import Plain, place_archive, read_plain, scratch_folder, write_archive
from gangline.sync.tell import SILENT, Tell
from gangline.sync.trees import How, Tree, look_everywhere, spot_on, tree_of

SOURCE = How(exact=True, skip=("__pycache__",))
"""All but what Python adds by itself."""


def place_code(cluster: Cluster, transports: Mapping[str, Transport], *, tell: Tell = SILENT) -> Cluster:
    """Bring the source to every host over ssh that lacks it; the cluster with `code` set there.

    What a host has is hashed there; a folder that differs in one byte is replaced. Hosts that are this computer have
    it installed.
    """
    tree, placed = source_tree(), foresee_code(cluster)
    spots = [spot_on(host, transports, host.code) for host in placed.hosts if host.code is not None]
    found = look_everywhere(spots, SOURCE)
    lacking = [spot for spot, there in zip(spots, found, strict=True) if there.hash != tree.hash]
    if lacking:
        tell.tick(f"bringing gangline's code to {' '.join(spot.host.name for spot in lacking)}")
        with scratch_folder() as folder:
            place_archive(write_archive(Path(folder) / "code.tar", source_files()), lacking)
    return placed


def foresee_code(cluster: Cluster) -> Cluster:
    """The cluster as `place_code` gives it back; changes nothing."""
    return dataclasses.replace(cluster, hosts=tuple(map(_with_code, cluster.hosts)))


def _with_code(host: Host) -> Host:
    if host.transport == "local":
        return host
    digest = source_tree().hash
    assert digest is not None
    return dataclasses.replace(host, code=str(PurePath(host.workdir) / "code" / digest[:16]))


@once
def source_files() -> dict[str, Plain]:
    """Name in the code folder -> content, of all that is source. Read once: while gangline is being updated, hosts get
    what this process began with.
    """
    package = Path(gangline.__file__).parent
    paths = [path for path in package.rglob("*.py") if "__pycache__" not in path.parts] + [package / "py.typed"]
    return {f"gangline/{path.relative_to(package).as_posix()}": read_plain(path) for path in paths if path.is_file()}


@once
def source_tree() -> Tree:
    """What a code folder holds."""
    return tree_of({name: plain.mark for name, plain in source_files().items()})
