"""Container images of podman and docker: one and the same on every host, handed on between them, and run by its id.

Ranks run in a container of their host with the network, the processes and the memory segments of the host, so the host
agent sees and ends them as it does others (docs/decisions/0069-containers.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import PurePath
from typing import TYPE_CHECKING

from gangline.errors import CheckFailed, GanglineError, RunFailed
from gangline.provision.ask import TIMEOUT_S, run_there
from gangline.provision.console import Console, shown
from gangline.provision.relay import Cargo, bring
from gangline.provision.trees import Spot, look
from gangline.runs.cluster import Host
from gangline.transport.fanout import in_parallel
from gangline.transport.transport import CommandResult

if TYPE_CHECKING:
    from gangline.provision.environment import Ground

START = (
    'folder=$1; engine=$2; shift 2; case $PWD/ in "$folder"/*) at=$PWD ;; *) at=$folder ;; esac; '
    'uid=$(id -u); case $engine in docker) set -- --user "$uid:$(id -g)" "$@" ;; '
    '*) [ "$uid" -eq 0 ] || set -- --userns=keep-id "$@" ;; esac; '
    "names=$(awk 'BEGIN { for (name in ENVIRON) if (name ~ /^[A-Za-z_][A-Za-z0-9_]*$/ && "
    "name !~ /^(PATH|HOME|HOSTNAME|PWD|OLDPWD|SHELL|SHLVL|TMPDIR|LD_LIBRARY_PATH|LD_PRELOAD|_|XDG_.*|SSH_.*)$/) "
    'print "--env", name }\'); exec "$engine" run --workdir "$at" --env HOME="$folder" $names "$@"'
)
"""Words: the work folder, the engine, its options, the image, the program. A program has the variables that it would
have on the host, but for those that belong to the host's own files; and the user's number, so that it writes his files.
"""
AT_OPTIONS = 6
"""Where in a prefix the options of the engine begin."""
FIXED = (
    *("--rm", "--interactive", "--pull=never", "--entrypoint=", "--network=host", "--pid=host", "--ipc=host"),
    "--pids-limit=-1",
)
"""An image's own entry point would stand in front of the Python. podman's own limit of 2048 counts threads, of which
the ranks of a host have more."""
LABELS = ("--security-opt", "label=disable")
"""Else SELinux keeps a container from the work folder."""
GPUS = {"podman": ("--device", "nvidia.com/gpu=all"), "docker": ("--gpus", "all")}

NO_ENGINE, NO_CDI = 91, 92
LOOK = (
    f'command -v "$1" >/dev/null || exit {NO_ENGINE}; '
    'if [ "$3" = podman-gpu ]; then grep -qsr nvidia.com/gpu /etc/cdi /var/run/cdi || '
    f"exit {NO_CDI}; fi; "
    'exec "$1" image inspect --format "{{.Id}}" "$2"'
)
"""Words: the engine, the image, and what else it needs. Says the image's id."""
FOLDER = "images"
ID_LETTERS = 12


def in_image(host: Host, image: str, *, has_gpu: bool, shared: Sequence[str] = ()) -> Host:
    """The host with `prefix` and `python` for its container image. image: an id, or a name."""
    engine = host.environment.kind
    gpu = GPUS[engine] if has_gpu else ()
    words = ("sh", "-c", START, "gangline-image", host.workdir, engine, *FIXED, *LABELS, *gpu, image)
    found = dataclasses.replace(host, prefix=words, python=host.environment.python or "python3")
    return with_volumes(found, [host.workdir, *shared])


def with_volumes(host: Host, folders: Sequence[str]) -> Host:
    """The host whose container sees these folders, too."""
    new = [f"{folder}:{folder}" for folder in dict.fromkeys(folders) if f"{folder}:{folder}" not in host.prefix]
    volumes = [word for each in new for word in ("--volume", each)]
    return dataclasses.replace(host, prefix=(*host.prefix[:AT_OPTIONS], *volumes, *host.prefix[AT_OPTIONS:]))


class ContainerImage:
    """An image that one host has, or can pull; see `gangline.provision.environment.Provider`."""

    def preview(self, hosts: Sequence[Host], ground: Ground) -> list[Host]:
        """See `Provider.preview`."""
        return _located(hosts, _ids(hosts, ground), ground)

    def place(self, hosts: Sequence[Host], ground: Ground, *, console: Console) -> list[Host]:
        """See `Provider.place`. Hosts of one engine and one image have it by one id afterwards."""
        console.progress("looking for container images")
        ids = _ids(hosts, ground)
        for engine, name in dict.fromkeys((host.environment.kind, _name(host)) for host in hosts):
            alike = [host for host in hosts if (host.environment.kind, _name(host)) == (engine, name)]
            ids |= _Distribution(alike, ground, console=console).equal(ids)
        return _located(hosts, ids, ground)


def _located(hosts: Sequence[Host], ids: Mapping[str, str | None], ground: Ground) -> list[Host]:
    return [
        in_image(
            host,
            ids[host.name] or _name(host),
            has_gpu=ground.gpus.get(host.name, False),
            shared=ground.shared,
        )
        for host in hosts
    ]


def _name(host: Host) -> str:
    return host.environment.path or ""


def _ids(hosts: Sequence[Host], ground: Ground) -> dict[str, str | None]:
    """Host -> the id that its image has there, None where it lacks it. Raises CheckFailed for what else is missing."""
    answers = in_parallel(lambda host: _look(host, _name(host), ground), hosts)
    for host, answer in zip(hosts, answers, strict=True):
        engine = host.environment.kind
        if answer.returncode == NO_ENGINE:
            raise CheckFailed(
                f"{host.name}: {engine} is not installed",
                seen=f"its environment is the image {shown(_name(host))}, and no program {engine} is in its PATH",
                fix=f"install {engine} there, or give the host another `environment`",
            )
        if answer.returncode == NO_CDI:
            raise CheckFailed(
                f"{host.name}: containers of podman would not see its GPUs",
                seen="no file in /etc/cdi or /var/run/cdi names nvidia.com/gpu",
                fix="`gangline prepare` sets that up; or, as root there: "
                "nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml",
            )
        if answer.returncode != 0 and not _is_unknown(answer):
            raise CheckFailed(
                f"{host.name}: {engine} cannot say whether it has the image {shown(_name(host))}",
                seen=_last(answer),
                fix=f"try `{engine} image inspect {_name(host)}` there",
            )
    return {host.name: _id_of(answer) for host, answer in zip(hosts, answers, strict=True)}


def _look(host: Host, image: str, ground: Ground) -> CommandResult:
    engine = host.environment.kind
    needs = f"{engine}-gpu" if ground.gpus.get(host.name, False) else engine
    return run_there(ground.transports[host.name], ("sh", "-c", LOOK, "gangline-image", engine, image, needs))


def _is_unknown(answer: CommandResult) -> bool:
    """Whether an engine said that it has no such image: podman and docker word it so."""
    return any(words in answer.stderr.lower() for words in ("image not known", "no such image"))


def _id_of(answer: CommandResult) -> str | None:
    words = answer.stdout.split()
    return words[-1].removeprefix("sha256:") if answer.returncode == 0 and words else None


def _last(answer: CommandResult) -> str:
    lines = [line for line in answer.stderr.splitlines() if line.strip()]
    return shown(lines[-1]) if lines else f"exit code {answer.returncode}"


class _Distribution:
    """One image, and the hosts that are to have it."""

    def __init__(self, hosts: Sequence[Host], ground: Ground, *, console: Console) -> None:
        self._hosts, self._ground, self._console = hosts, ground, console
        self._engine, self._image = hosts[0].environment.kind, _name(hosts[0])

    def equal(self, ids: Mapping[str, str | None]) -> dict[str, str | None]:
        """Host -> the one id. The first host pulls the image if nobody has it, and hosts that lack it get it."""
        known = {host.name: found for host in self._hosts if (found := ids[host.name])}
        if not known:
            known = {self._hosts[0].name: self._pull(self._hosts[0])}
        if len(set(known.values())) > 1:
            raise CheckFailed(
                f"the image {shown(self._image)} is not the same on all hosts",
                seen="; ".join(f"{found[:ID_LETTERS]} on {name}" for name, found in known.items()),
                fix=f"name it by its digest, or remove it where it is old: {self._engine} image rm {self._image}",
            )
        wanted = next(iter(known.values()))
        # one that was handed on may have lost its name
        lacking = [host for host in self._hosts if host.name not in known and not self._has(host, wanted)]
        if lacking:
            self._hand_on(next(host for host in self._hosts if host.name in known), lacking, wanted)
        return {host.name: wanted for host in self._hosts}

    def _has(self, host: Host, wanted: str) -> bool:
        return _id_of(_look(host, wanted, self._ground)) == wanted

    def _pull(self, host: Host) -> str:
        self._console.progress(f"{host.name} pulls {shown(self._image)}")
        answer = self._runs(host, "pull", self._image)
        found = _id_of(_look(host, self._image, self._ground)) if answer.returncode == 0 else None
        if found is None:
            raise CheckFailed(
                f"no host has the image {shown(self._image)}, and {host.name} cannot pull it",
                seen=_last(answer),
                fix=f"build or load it on one host, by `{self._engine} build` or `{self._engine} load`; "
                "the others get it from there",
            )
        return found

    def _hand_on(self, source: Host, lacking: Sequence[Host], wanted: str) -> None:
        """Save it on one host, bring the file to the others, load it there; the files are gone afterwards."""
        spots = {host.name: self._spot(host, wanted) for host in (source, *lacking)}
        first = spots[source.name]
        self._clear([first])  # podman writes over no file that an earlier start has left
        self._console.progress(f"{source.name} saves {shown(self._image)}")
        try:
            self._must(source, "saved", "mkdir", "-p", "-m", "700", "--", str(first.path))
            file = str(first.path / "image.tar")
            self._must(source, "saved", self._engine, "save", "--output", file, self._image)
            cargo = Cargo(what=f"image {self._image}", source=first, tree=look(first))
            targets = [spots[host.name] for host in lacking]
            bring(cargo, targets, shared=self._ground.shared, console=self._console)
            in_parallel(lambda host: self._load(host, spots[host.name], wanted), lacking)
        finally:
            self._clear(spots.values())

    def _clear(self, spots: Iterable[Spot]) -> None:
        """Take away what was saved; a host that does not answer keeps it until the image is handed on again."""
        for spot in spots:
            with suppress(GanglineError):
                run_there(spot.transport, ("rm", "-rf", "--", str(spot.path)))

    def _load(self, host: Host, spot: Spot, wanted: str) -> None:
        self._must(host, "loaded", self._engine, "load", "--input", str(spot.path / "image.tar"))
        if not self._has(host, wanted):
            raise RunFailed(
                f"{host.name}: the image {shown(self._image)} is another one after it was loaded",
                seen=f"there is none with the id {wanted[:ID_LETTERS]}, which it was saved with",
                fix=f"bring it there yourself, so that `{self._engine} image inspect` says the same on all hosts",
            )

    def _must(self, host: Host, done: str, *words: str) -> None:
        answer = run_there(self._ground.transports[host.name], words, timeout_s=TIMEOUT_S)
        if answer.returncode != 0:
            raise RunFailed(
                f"{host.name}: the image {shown(self._image)} cannot be {done}",
                seen=_last(answer),
                fix="there may be no room left on its disk; try the command there: " + " ".join(words),
            )

    def _runs(self, host: Host, *words: str) -> CommandResult:
        return run_there(self._ground.transports[host.name], (self._engine, *words), timeout_s=TIMEOUT_S)

    def _spot(self, host: Host, wanted: str) -> Spot:
        path = PurePath(host.workdir) / FOLDER / wanted[:ID_LETTERS]
        return Spot(host=host, transport=self._ground.transports[host.name], path=path)
