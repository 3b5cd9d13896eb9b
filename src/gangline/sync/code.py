"""gangline's own source on the hosts, so that the same code runs everywhere and nothing has to be installed there.

The packages of plug-ins that a job or a cluster uses lie beside it, in the same folder: the entry points in their
metadata make them rows of the same tables there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path, PurePath

import gangline
from gangline.plugins import package_files
from gangline.remote.once import once
from gangline.remote.transport import Transport
from gangline.runs.cluster import Cluster, Host
from gangline.sync.archive import Plain, place_archive, read_plain, scratch_folder, write_archive
from gangline.sync.tell import SILENT, Tell
from gangline.sync.trees import How, Tree, look_everywhere, spot_on, tree_of

SOURCE = How(exact=True, skip=("__pycache__",))
"""All but what Python adds by itself."""


def place_code(
    cluster: Cluster, transports: Mapping[str, Transport], *, packages: Collection[str] = (), tell: Tell = SILENT
) -> Cluster:
    """Bring the source to every host over ssh that lacks it; the cluster with `code` set there.

    What a host has is hashed there; a folder that differs in one byte is replaced. Hosts that are this computer have
    gangline installed, so they get the folder only with `packages`: plug-ins, which their Python need not have.
    Raises PluginError for a package that cannot be brought.
    """
    key = tuple(sorted(packages))
    tree, placed = source_tree(key), foresee_code(cluster, packages=packages)
    spots = [spot_on(host, transports, host.code) for host in placed.hosts if host.code is not None]
    found = look_everywhere(spots, SOURCE)
    lacking = [spot for spot, there in zip(spots, found, strict=True) if there.hash != tree.hash]
    if lacking:
        tell.tick(f"bringing gangline's code to {' '.join(spot.host.name for spot in lacking)}")
        with scratch_folder() as folder:
            place_archive(write_archive(Path(folder) / "code.tar", source_files(key)), lacking)
    return placed


def foresee_code(cluster: Cluster, *, packages: Collection[str] = ()) -> Cluster:
    """The cluster as `place_code` gives it back; changes nothing."""
    key = tuple(sorted(packages))
    return dataclasses.replace(cluster, hosts=tuple(_with_code(host, key) for host in cluster.hosts))


def _with_code(host: Host, packages: tuple[str, ...]) -> Host:
    if host.transport == "local" and not packages:
        return host
    digest = source_tree(packages).hash
    assert digest is not None
    return dataclasses.replace(host, code=str(PurePath(host.workdir) / "code" / digest[:16]))


@once
def source_files(packages: tuple[str, ...] = ()) -> dict[str, Plain]:
    """Name in the code folder -> content, of all that is source, ours and that of plug-ins. Read once: while gangline
    is being updated, hosts get what this process began with.
    """
    package = Path(gangline.__file__).parent
    paths = [path for path in package.rglob("*.py") if "__pycache__" not in path.parts] + [package / "py.typed"]
    found = {f"gangline/{path.relative_to(package).as_posix()}": read_plain(path) for path in paths if path.is_file()}
    for each in packages:
        found |= {name: Plain(data=data, is_program=False) for name, data in package_files(each).items()}
    return found


@once
def source_tree(packages: tuple[str, ...] = ()) -> Tree:
    """What a code folder holds."""
    return tree_of({name: plain.mark for name, plain in source_files(packages).items()})
