"""Environments that are there already: the words that put a host's Python in its place. Pure.

Scripts are constant; what differs from host to host is given to them as words.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import PurePath

from gangline.errors import UsageError
from gangline.runs.cluster import Host

PYTHON = "python3"
"""Behind a module system or inside an image, where none is named."""

CONDA = (
    'folder=$1; shift; PATH="$folder/bin:$PATH"; CONDA_PREFIX=$folder; '
    'LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$folder/lib"; '
    'export PATH CONDA_PREFIX LD_LIBRARY_PATH; exec "$@"'
)
"""What activating would do, without a shell that has been set up for it."""

MODULES = (
    'names=(); while [ "$1" != -- ]; do names+=("$1"); shift; done; shift; '
    'if ! type module >/dev/null 2>&1; then echo "there is no module system: no command module" >&2; exit 90; fi; '
    'module load "${names[@]}" >&2 || exit 91; exec "$@"'
)
"""In a login shell, for that is where a site defines `module`."""


def wrapped(host: Host, *, has_gpu: bool = False) -> Host:
    """The host with `python` and `prefix` for an environment that is there already; raises UsageError."""
    kind, path = host.environment.kind, host.environment.path
    if kind == "own":
        return dataclasses.replace(host, python=path or host.python)
    if kind == "modules":
        words = ("bash", "-lc", MODULES, "gangline-modules", *host.environment.modules, "--")
        return dataclasses.replace(host, prefix=words, python=host.python or PYTHON)
    if path is None:
        raise UsageError(
            f"{host.name}: environment {kind} without a path", seen="nothing", fix="write it in cluster.yaml"
        )
    if kind == "conda":
        words = ("sh", "-c", CONDA, "gangline-conda", path)
        return dataclasses.replace(host, prefix=words, python=str(PurePath(path) / "bin" / "python"))
    gpu = ("--nv",) if has_gpu else ()
    words = ("apptainer", "exec", *gpu, "--bind", host.workdir, path)
    return dataclasses.replace(host, prefix=words, python=host.python or PYTHON)


def seeing(host: Host, folders: Sequence[str]) -> Host:
    """The host whose image, if it works in one, sees these folders too."""
    hidden = [folder for folder in folders if PurePath(host.workdir) not in PurePath(folder).parents]
    if host.environment.kind != "apptainer" or not hidden:
        return host
    program, verb, *others = host.prefix
    binds = [word for folder in hidden for word in ("--bind", folder)]
    return dataclasses.replace(host, prefix=(program, verb, *binds, *others))
