"""Step `between`: hosts log in to each other by keys of their own, so that each can look after a run.

A key is made on its host and never leaves it. On each other host it counts from its own host's address only, opens no
terminal and no forwarding, and runs one command: a gate that lets in gangline's agent, known by its digest, and rsync
below the folders of runs (`gangline.agent.prepare.key_gate`). Decision 66 says what that is worth.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import re

from gangline.config.host_file import is_ip
from gangline.prepare.prepare_step import (
    Asks,
    Change,
    FileChange,
    HostReading,
    PrepareStep,
    StepPlan,
    StepView,
    with_block,
)
from gangline.prepare.ssh_access import AUTHORIZED, CONFIG, OWN_CONFIG, new_key, own_files, with_include
from gangline.runs.cluster import Host
from gangline.transport.bootstrap import BOOTSTRAP, PYTHONS, agent_zipapp
from gangline.transport.ssh_options import SAFE_PATH

KEY = "~/.ssh/gangline_between"
GATE = "~/.ssh/gangline_gate.py"
FOLDER = "~/.ssh"
DEFAULTS = ("id_rsa", "id_ecdsa", "id_ed25519")
TOUCHED = ("id_ecdsa_sk", "id_ed25519_sk")
"""Which keys ssh tries by itself, ssh_config(5); it tries none of them where a block names another one. Ours comes
after the user's, which open more, and before those that have to be touched."""
LINE = 'restrict,from="{address}",command="{python} -I -S {gate}" {key} gangline-{name}'
LOWEST = (3, 8)


def plan_keys(view: StepView) -> StepPlan:
    """On a host that may lead: its key pair, and the use of it."""
    others = [host.address for host in _reached(view) if host.name != view.host.name]
    if view.host not in _leaders(view) or not others:
        return StepPlan()
    home, files = view.reading.home, view.reading.files
    texts = {
        CONFIG: with_include(files[CONFIG].text),
        OWN_CONFIG: with_block(files[OWN_CONFIG].text, "between", _entry(view, others)),
    }
    key = KEY.replace("~", home, 1)
    made = [new_key(key, comment=f"gangline-{view.host.name}")] if files[f"{KEY}.pub"].content is None else []
    return StepPlan(
        changes=(*made, *own_files(view.reading, texts)),
        reason="it can look after runs once it reaches the other hosts without you; then your computer may be off",
        risk=f"the key has no passphrase: whoever can read {KEY} on {view.host.name} can run programs on the other "
        "hosts as you, from there",
    )


def plan(view: StepView) -> StepPlan:
    """The key pair of this host, and the lines of the others' keys in its authorized_keys, with the gate."""
    if view.host.transport == "local":
        return StepPlan()
    own = plan_keys(view)
    remains = [
        f"write `address` of {host.name} in the cluster file in numbers: sshd looks no name up"
        for host in _reached(view)
        if _may_lead(view, host) and not is_ip(host.address)
    ]
    keys: dict[str, str] = {}
    for host in _leaders(view):
        of_leader = view.readings.get(host.name)
        words = of_leader.files[f"{KEY}.pub"].text.split() if of_leader else []
        if host.name == view.host.name:
            continue
        if len(words) < 2:
            remains.append(f"its line follows once {host.name} has its key")
        else:
            keys[host.name] = f"{words[0]} {words[1]}"
    lines, problem = _lines(view, keys) if keys else ((), "")
    if problem:
        remains.append(problem)
    if not lines:
        return StepPlan(changes=own.changes, reason=own.reason, risk=own.risk, remains=tuple(remains))
    names = ", ".join(keys)
    opens = f"whoever is you, or root, on {names} can run programs here as you, from there; without a terminal or "
    return StepPlan(
        changes=(*own.changes, *lines),
        reason="; ".join(filter(None, (own.reason, f"{names} can look after runs on this host without you"))),
        risk="; ".join(filter(None, (own.risk, f"{opens}forwarding, and only as gangline does it"))),
        remains=tuple(remains),
    )


def _reached(view: StepView) -> list[Host]:
    """The hosts that others reach by ssh, and the witness."""
    return [host for host in view.cluster.reached if host.transport == "ssh"]


def _may_lead(view: StepView, host: Host) -> bool:
    """A witness looks after no run."""
    return host in view.cluster.hosts and (not view.named or host.name in view.named)


def _leaders(view: StepView) -> list[Host]:
    """The hosts that get a key: all, or those that are named."""
    return [host for host in _reached(view) if _may_lead(view, host) and is_ip(host.address)]


def _entry(view: StepView, addresses: list[str]) -> list[str]:
    there = view.reading.folders[FOLDER] or ()
    before, after = ([f"{FOLDER}/{name}" for name in names if name in there] for names in (DEFAULTS, TOUCHED))
    return [f"Host {' '.join(addresses)}", *(f"    IdentityFile {path}" for path in (*before, KEY, *after))]


def _lines(view: StepView, keys: dict[str, str]) -> tuple[tuple[Change, ...], str]:
    """The gate and the lines of these keys; or what stands in the way."""
    reading = view.reading
    python, gate = _python(reading), GATE.replace("~", reading.home, 1)
    if not (python and SAFE_PATH.fullmatch(python) and SAFE_PATH.fullmatch(gate)):
        return (), f"its home folder {reading.home} or its Python {python} would have to be quoted for sshd"
    rows = reading.files[AUTHORIZED].text.splitlines()
    wanted = {
        key.split()[1]: LINE.format(
            address=view.cluster.host(name).address, python=python, gate=gate, key=key, name=name
        )
        for name, key in keys.items()
    }
    missing = {word: line for word, line in wanted.items() if line not in rows}
    rows = [row for row in rows if missing.keys().isdisjoint(row.split())] + list(missing.values())
    texts = {GATE: gate_program(view)}
    if missing:
        texts[AUTHORIZED] = "".join(f"{row}\n" for row in rows)
    changes = (
        FileChange(
            path=path.replace("~", reading.home, 1),
            before=reading.files[path].content,
            content=text.encode("utf-8", "surrogateescape"),
            mode=0o600,
            folder_mode=0o700,
            scope="user",
        )
        for path, text in texts.items()
        if text != reading.files[path].text
    )
    return tuple(changes), ""


def _python(reading: HostReading) -> str:
    """The Python of this host that runs the gate: the first that is new enough for the agent."""
    said = re.search(r"Python (\d+)\.(\d+)", reading.output("python3"))
    if said and (int(said[1]), int(said[2])) >= LOWEST and reading.has("python3"):
        return str(reading.programs["python3"])
    return next((str(path) for name, path in reading.programs.items() if name != "python3" and path), "")


def gate_program(view: StepView) -> str:
    """The gate, with what it lets in on this host: the agent of this version, and rsync below the folders of runs.

    The agent that it let in before stays: a run goes on under the gangline that started it.
    """
    source = importlib.resources.files("gangline").joinpath("agent/prepare/key_gate.py").read_text("utf-8")
    digest = hashlib.sha256(agent_zipapp()).hexdigest()
    admitted = re.search(r"^ADMITTED.*", view.reading.files[GATE].text, re.MULTILINE)
    before = [each for each in re.findall(r"\b[0-9a-f]{64}\b", admitted[0] if admitted else "") if each != digest]
    folders = (view.host.workdir, *view.cluster.shared)
    for name, value in {"ADMITTED": (digest, *before[:1]), "FOLDERS": folders}.items():
        source = _with_value(source, f"{name}: Tuple[str, ...] = ()", f"{name}: Tuple[str, ...] = {value!r}")
    return _with_value(source, 'BOOTSTRAP = ""', f"BOOTSTRAP = {BOOTSTRAP!r}")


def _with_value(source: str, empty: str, filled: str) -> str:
    assert source.count(f"\n{empty}\n") == 1, empty
    return source.replace(f"\n{empty}\n", f"\n{filled}\n")


BETWEEN = PrepareStep(
    name="between",
    summary="a key of its own for each host, or for those named, for the other hosts; only where it is named",
    asks=Asks(
        files=(AUTHORIZED, CONFIG, OWN_CONFIG, f"{KEY}.pub", GATE),
        folders=(FOLDER,),
        commands={"python3": ("python3", "-V")},
        programs=tuple(PYTHONS.split()),
    ),
    plan=plan,
    only_by_name=True,
    plan_first=plan_keys,
    on_every_host=True,
    on_witness=True,
)
