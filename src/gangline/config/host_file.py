"""One host: from its words to the `Host` that they mean."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import ipaddress
import re
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from gangline.config.cluster_model import (
    KEY_FIX,
    ClusterWords,
    ComponentWords,
    EnvironmentWords,
    HostWords,
    SlurmWords,
    WitnessWords,
)
from gangline.config.fields import HOST_PATH, HOST_PROGRAM, PATTERNS, SECRET
from gangline.config.mistakes import KeyPath, absolute, listed, quote, what_is_there, what_was_meant
from gangline.config.validate import Checked
from gangline.runs.cluster import ENGINES, Environment, Host, SlurmComponent, SlurmRequest
from gangline.runs.training_environment import training_python

# Where the Python of a host comes from: from the words to `Environment`, and the Python behind it.


SOURCES = ("kind", "lock", "conda", "modules", "apptainer", *ENGINES)
"""Keys of which one says where the Python comes from; `python` alone is one more way."""
LOCKED = Environment(kind="locked")
INSIDE = "python3"
"""The Python behind a module system or inside an image, where none is named."""


def resolve_environment(
    checked: Checked[ClusterWords], key: KeyPath, words: EnvironmentWords, *, folder: Path
) -> Environment:
    """What the words mean; mistakes are recorded.

    An own Python is left as it was written: what it means depends on the host.
    """
    given = [name for name in SOURCES if getattr(words, name) is not None]
    if len(given) > 1 or (words.python is not None and set(given) & {"kind", "lock", "conda"}):
        given = [*given, "python"] if words.python is not None else given
        checked.report(
            key, seen=listed(given), expected="one source of Python", fix=f"keep one of the keys: {listed(given)}"
        )
    elif not given and words.python is None:
        checked.report(
            key, seen="nothing", expected="one source of Python", fix="write `locked`, or delete the key `environment`"
        )
    for name in ("conda", "apptainer"):
        refuse_parents(checked, (*key, name), getattr(words, name) or "")
    if words.conda:
        return Environment(kind="conda", path=words.conda)
    if words.modules:
        return Environment(kind="modules", modules=tuple(words.modules))
    if words.apptainer:
        return Environment(kind="apptainer", path=words.apptainer)
    if image := words.podman or words.docker:
        refuse_foreign_python(checked, (*key, "python"), words.python or INSIDE)
        return Environment(kind="podman" if words.podman else "docker", path=image, python=words.python)
    if words.lock:
        return Environment(kind="locked", path=_lock(checked, (*key, "lock"), words.lock, folder=folder))
    return Environment(kind="own", path=words.python) if words.python else LOCKED


def _lock(checked: Checked[ClusterWords], key: KeyPath, text: str, *, folder: Path) -> str:
    base = Path.cwd() if checked.document.from_command_line(key) else folder
    path = absolute(text, base)
    if not path.is_file():
        fix = what_was_meant(text, base)
        checked.report(key, seen=what_is_there(text, base), expected="a lock file on this computer", fix=fix)
    return str(path)


def python_here(
    checked: Checked[Any], key: KeyPath, text: str, *, folder: Path, reads: tuple[KeyPath, ...] = ()
) -> str:
    """The whole path of a Python on this computer."""
    path = str(absolute(text, folder)) if "/" in text or text[0] == "~" else text
    found = shutil.which(path)
    if found is None:
        checked.report(
            key,
            seen=f"{quote(text)}, which is no program on this computer",
            expected="a Python with the packages of gangline[train]",
            fix="write the whole path of a Python, or delete the line for the one that `gangline setup` builds",
            reads=reads,
        )
    return str(found or text)


def refuse_foreign_python(checked: Checked[Any], key: KeyPath, text: str, *, reads: tuple[KeyPath, ...] = ()) -> None:
    """Record a mistake for what cannot be a Python on another host; nobody has looked there yet."""
    if not _matches(HOST_PROGRAM, text):
        fix = "write, for example, /opt/train/bin/python"
        checked.report(key, seen=f"the text {quote(text)}", expected=PATTERNS[HOST_PROGRAM], fix=fix, reads=reads)


def _matches(pattern: str, text: str) -> bool:
    """`$` also matches before a last newline."""
    return re.search(pattern, text) is not None and "\n" not in text


def refuse_parents(checked: Checked[Any], key: KeyPath, text: str) -> None:
    """Record a mistake for a path that leaves the folder it names."""
    if ".." in text.split("/"):
        checked.report(key, seen=quote(text), expected="a path without `..`", fix="write the folder that is meant")


WORKDIR = "~/gangline"
"""Where gangline works on a host over SSH that says nothing else."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
OURS = frozenset(
    [
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "ROLE_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "ROLE_WORLD_SIZE",
        "GROUP_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
    ]
)
"""Variables that the start of the ranks sets by itself."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a host's words leave to others."""

    folder: Path
    """Where relative paths of the file begin."""
    home: Path
    """The controller's own folder."""
    environment: Environment | None
    """What the cluster says for every host."""


def is_this_computer(name: str) -> bool:
    """Whether a name or address means the computer that gangline runs on; asks no name server."""
    own = socket.gethostname().lower()
    return name.lower() in {"localhost", "127.0.0.1", own, own.partition(".")[0]}


def transport_of(words: HostWords) -> Literal["local", "ssh"]:
    """How a host is reached: as it says, or by its name."""
    if words.transport is not None:
        return words.transport
    has_ssh = any(value is not None for value in (words.ssh, words.port, words.host_key))
    return "local" if is_this_computer(words.name) and not has_ssh else "ssh"


def address_of(words: HostWords | WitnessWords) -> str | None:
    """Where the others reach a host: as it says, or the IP address that it is named or reached by."""
    if words.address is not None:
        return words.address
    if isinstance(words, HostWords) and transport_of(words) == "local":
        return None
    host = (words.ssh or words.name).rpartition("@")[2].partition("%")[0]
    return host if is_ip(host) else None


def is_ip(text: str) -> bool:
    """Whether this is an IPv4 or IPv6 address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def resolve_host(checked: Checked[ClusterWords], index: int, *, around: Surroundings) -> Host:
    """The host that the words mean; mistakes are recorded."""
    words = checked.words.hosts[index]
    transport = transport_of(words)
    environment, python = _python(checked, index, around=around)
    gpu = _gpu(checked, index)
    if transport == "local":
        _refuse_ssh_keys(checked, index)
    else:
        _check_ssh(checked, ("hosts", index), words)
    return Host(
        name=words.name,
        workdir=_workdir(checked, index, around=around),
        python=python,
        transport=transport,
        ssh=words.ssh,
        ssh_port=words.port,
        host_key=words.host_key,
        environment=environment,
        address=address_of(words) or "127.0.0.1",
        interface=words.interface,
        slots=words.slots,
        share=None if words.share is None else float(words.share),
        gpu=gpu,
        env={**(HIDDEN if gpu == {} else {}), **_env(checked, ("hosts", index), words.env)},
    )


def resolve_witness(checked: Checked[ClusterWords], words: WitnessWords) -> Host:
    """The machine that the words mean; mistakes are recorded."""
    _check_ssh(checked, ("witness",), words)
    refuse_parents(checked, ("witness", "workdir"), words.workdir)
    address = address_of(words)
    if address is None:
        checked.report(
            ("witness", "address"),
            seen="this key is missing",
            expected="where the hosts reach it",
            fix="write its IP address, such as `address: 192.168.1.5`",
            reads=(("witness", "ssh"), ("witness", "name")),
        )
    return Host(
        name=words.name,
        workdir=words.workdir,
        python="",
        transport="ssh",
        ssh=words.ssh,
        ssh_port=words.port,
        host_key=words.host_key,
        address=address or "",
    )


HIDDEN = {"CUDA_VISIBLE_DEVICES": ""}
"""Hides NVIDIA GPUs from ranks that are meant for the processor."""
NEEDED_FIGURES = ("tflops_bf16", "memory_gib", "bandwidth_gbs")


def _gpu(checked: Checked[ClusterWords], index: int) -> dict[str, float] | None:
    """The figures of a card that no list has, {} for `none`; a part of the figures says nothing."""
    words, key = checked.words.hosts[index].gpu, ("hosts", index, "gpu")
    if words is None:
        return None
    given = {name: float(value) for name, value in words.model_dump(exclude={"kind"}).items() if value is not None}
    missing = [name for name in NEEDED_FIGURES if name not in given and not checked.is_faulty(*key, name)]
    if words.kind is not None and given:
        checked.report(key, seen=f"none, and {listed(list(given))}", expected="one of both", fix="keep one")
    elif words.kind is None and missing and not checked.is_faulty(*key):
        checked.report(
            key,
            seen=f"no {listed(missing)}",
            expected=f"all of {listed(NEEDED_FIGURES)}",
            fix="take them from the card's data sheet: `gpu: {tflops_bf16: 100, memory_gib: 24, bandwidth_gbs: 900}`",
        )
    return {} if words.kind else given if not missing else None


def _workdir(checked: Checked[ClusterWords], index: int, *, around: Surroundings) -> str:
    words = checked.words.hosts[index]
    if transport_of(words) == "local":
        return str(absolute(words.workdir, around.folder) if words.workdir else around.home / "hosts" / words.name)
    key: KeyPath = ("hosts", index, "workdir")
    if words.workdir is not None and not _matches(HOST_PATH, words.workdir):
        checked.report(
            key,
            seen=f"the text {quote(words.workdir)}",
            expected=PATTERNS[HOST_PATH],
            fix=f"write, for example, `workdir: {WORKDIR}`: this computer's folders are not there",
            reads=_decides_transport(checked, index),
        )
    elif words.workdir is not None:
        refuse_parents(checked, key, words.workdir)
    return words.workdir or WORKDIR


def _python(checked: Checked[ClusterWords], index: int, *, around: Surroundings) -> tuple[Environment, str]:
    """Where the host's Python comes from, and that Python as far as it is known before anybody looks there."""
    words = checked.words.hosts[index]
    key: KeyPath = ("hosts", index)
    local = transport_of(words) == "local"
    if words.python is not None and words.environment is not None:
        checked.report(
            (*key, "python"),
            seen="a Python and an environment",
            expected="one source of Python",
            fix="delete one of the keys; a Python behind modules or in an image is written in the environment",
        )
    if words.python is not None:
        environment, place = Environment(kind="own", path=words.python), (*key, "python")
    elif words.environment is not None:
        place = (*key, "environment")
        environment = resolve_environment(checked, place, words.environment, folder=around.folder)
        place = (*place, "python")
    else:
        environment = around.environment or (Environment() if local else LOCKED)
        place = ("environment", "python")
    return environment, _program(checked, place, environment, index=index, around=around)


def _program(
    checked: Checked[ClusterWords], place: KeyPath, environment: Environment, *, index: int, around: Surroundings
) -> str:
    """The Python of an environment; "" where only a look at the host tells."""
    words = checked.words.hosts[index]
    reads = _decides_transport(checked, index)
    if environment.kind in {"modules", "apptainer"}:
        source = words.environment or checked.words.environment
        python = (source and source.python) or INSIDE
        refuse_foreign_python(checked, place, python)
        return python
    if environment.kind != "own":
        return ""
    if transport_of(words) == "local":
        if environment.path is None:
            return training_python(around.home)
        return python_here(checked, place, environment.path, folder=around.folder, reads=reads)
    python = environment.path or ""
    refuse_foreign_python(checked, place, python, reads=reads)
    return python


def _decides_transport(checked: Checked[ClusterWords], index: int) -> tuple[KeyPath, ...]:
    """What has to be right before it is known which computer a path is on."""
    said = checked.words.hosts[index].transport is not None
    return () if said else (("hosts", index, "name"), ("hosts", index, "transport"))


def _refuse_ssh_keys(checked: Checked[ClusterWords], index: int) -> None:
    words = checked.words.hosts[index]
    given = [name for name in ("ssh", "port", "host_key") if getattr(words, name) is not None]
    if given:
        checked.report(
            ("hosts", index, given[0]),
            seen=f"a key for hosts over SSH, but {words.name} is `transport: local`",
            expected="neither ssh, port nor host_key",
            fix="delete it, or write `transport: ssh`",
        )


def _check_ssh(checked: Checked[ClusterWords], key: KeyPath, words: HostWords | WitnessWords) -> None:
    bare, percent, _ = (words.ssh or "").rpartition("@")[2].partition("%")
    if (":" in bare or percent) and not is_ip(bare):
        checked.report(
            (*key, "ssh"),
            seen=quote(words.ssh or ""),
            expected="a name of your ssh_config, user@name or user@address",
            fix="write the port as a key of its own, such as `port: 2222`",
        )
    if words.host_key is not None and not _is_whole(words.host_key):
        checked.report(
            (*key, "host_key"),
            seen="a key that is cut off or has a letter changed",
            expected="the public key of its sshd",
            fix=KEY_FIX,
        )


def _is_whole(host_key: str) -> bool:
    """Whether the base64 can be read and begins with the type that stands before it."""
    kind, _, text = host_key.partition(" ")
    try:
        blob = base64.b64decode(text, validate=True)
    except binascii.Error:
        return False
    fields = []
    while len(blob) >= 4:
        size = int.from_bytes(blob[:4], "big")
        if size > len(blob) - 4:
            return False
        fields.append(blob[4 : 4 + size])
        blob = blob[4 + size :]
    return not blob and len(fields) > 1 and fields[0] == kind.encode()


def _env(checked: Checked[ClusterWords], key: KeyPath, words: Mapping[str, str | int | float | bool]) -> dict[str, str]:
    env: dict[str, str] = {}
    for name, value in words.items():
        path: KeyPath = (*key, "env", name)
        env[name] = value if isinstance(value, str) else checked.document.texts.get(path, str(value))
        if not _VARIABLE.fullmatch(name):
            checked.report(
                path,
                seen=f"the name {quote(name)}",
                expected="a variable: letters, digits and `_`, not beginning with a digit",
                fix="write it as a shell would take it, such as OMP_NUM_THREADS",
            )
        elif SECRET.search(name):
            checked.report(
                path,
                seen=f"{name}, which sounds like a secret",
                expected="no secrets in this file: it is copied into every run",
                fix=f"delete it and set it in your shell: export {name}=...",
            )
        elif name in OURS:
            checked.report(
                path,
                seen=f"{name}, which gangline sets for each rank",
                expected="other variables",
                fix="delete it; ranks are counted from slots",
            )
        elif "\0" in env[name]:
            checked.report(path, seen="a zero character", expected="text", fix="delete the character")
    return env


# The nodes of a Slurm cluster, which are not known before there is an allocation.


def _component(words: SlurmWords, component: ComponentWords) -> SlurmComponent:
    return SlurmComponent(
        nodes=component.nodes,
        partition=component.partition or words.partition,
        gpus_per_node=None if component.gpus_per_node is None else str(component.gpus_per_node),
        gpu=component.gpu,
        cpus_per_node=component.cpus_per_node,
        memory=None if component.memory is None else str(component.memory),
        constraint=component.constraint,
        exclude=component.exclude,
        slots=component.slots,
        options=tuple(component.options),
    )


def resolve_slurm(checked: Checked[ClusterWords], *, around: Surroundings) -> SlurmRequest:
    """What the words ask of Slurm; mistakes are recorded.

    Without an environment, nodes use the Python of this computer: a login host and its nodes share folders.
    """
    words, key = checked.words.slurm, ("slurm",)
    assert words is not None
    environment = around.environment or Environment()
    refuse_parents(checked, (*key, "workdir"), words.workdir)
    if words.components and not words.shared_home:
        checked.report(
            (*key, "components"),
            seen="components, and `shared_home: false`",
            expected="one of both: such a run needs its nodes again, and Slurm takes a list of nodes for one kind only",
            fix="use a folder that login host and nodes share, or one kind of nodes",
        )
    if environment.kind in ENGINES:
        checked.report(
            ("environment", environment.kind),
            seen=f"an image of {environment.kind}",
            expected="an environment that starts inside a job of Slurm",
            fix="write `environment: {apptainer: IMAGE.sif}`",
        )
    python = ""
    if environment.kind == "own":
        python = environment.path or training_python(around.home)
    elif environment.kind in {"modules", "apptainer"}:
        python = (checked.words.environment and checked.words.environment.python) or INSIDE
    return SlurmRequest(
        nodes=words.nodes,
        partition=words.partition,
        account=words.account,
        qos=words.qos,
        gpus_per_node=None if words.gpus_per_node is None else str(words.gpus_per_node),
        gpu=words.gpu,
        cpus_per_node=words.cpus_per_node,
        memory=None if words.memory is None else str(words.memory),
        constraint=words.constraint,
        time=None if words.time is None else str(words.time),
        exclude=words.exclude,
        dialect=words.gpus_by,
        options=tuple(words.options),
        components=tuple(_component(words, component) for component in words.components),
        setup=tuple(words.setup),
        notice_s=words.save_before,
        poll_s=words.ask_every,
        slots=words.slots,
        shared_home=words.shared_home,
        workdir=words.workdir,
        python=python,
        environment=environment,
        env=_env(checked, key, words.env),
    )
