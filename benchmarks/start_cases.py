"""The rows of start_failures.py: what goes wrong with a start, planted for the checks and planted behind their back."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.lab.hosts import Lab, LabHost

ROOT = Path(__file__).resolve().parents[1]
"""The code that is looked at is the one beside this file."""
PYTHON = str(Path(sys.prefix) / "bin" / "python")
PROJECT = "project"
"""The user's folder, below the home folder."""
READY, GO = "/tmp/ready", "/tmp/go"
PORT = 29500
DATA_PORTS = "32768-60999"

Moment = Literal["checked", "handed over", "standing", "started", "ready"]
"""checked: all checks have passed. handed over: the head has got the plan of the start. standing: every host has its
host agent, torchrun imports torch. started: the supervisor knows it. ready: every rank has imported torch and waits at
init_process_group."""

SCRIPT = f"""\
import os, pathlib, sys, time

for word in sys.argv[1:]:
    name, _, value = word.partition("=")
    host, _, name = name.rpartition(":")
    if host in ("", os.environ["GANGLINE_HOST"]):
        os.environ.pop(name, None)
        if value:
            os.environ[name] = value

import torch
import torch.distributed as dist

pathlib.Path("{READY}").touch()
while not pathlib.Path("{GO}").exists():
    time.sleep(0.02)
print("begins to join", time.time(), flush=True)
dist.init_process_group("gloo")
one = torch.ones(1)
dist.all_reduce(one)
print("has joined", time.time(), one.item(), flush=True)
dist.destroy_process_group()
"""
"""As a user's own: it may set variables (`name=value`, `host:name=value`, `name=` to remove one)."""


class Stage:
    """Three hosts that nothing is wrong with, a user's computer with a project, and the cluster file in it."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.desk = lab.user
        self.hosts = lab.hosts
        self.desk.env["PYTHONPATH"] = str(ROOT / "src")
        self.file: dict[str, Any] = {"hosts": [self._entry(host) for host in lab.hosts]}

    def __getitem__(self, name: str) -> LabHost:
        return self.lab[name]

    def _entry(self, host: LabHost) -> dict[str, Any]:
        return {
            "name": host.name,
            "host_key": host.host_key,
            "address": host.address,
            "slots": 1,
            "python": PYTHON,
        }

    def entry(self, name: str) -> dict[str, Any]:
        """What the cluster file says of a host; change it at will."""
        return next(entry for entry in self.file["hosts"] if entry["name"] == name)

    def wrap_python(self, name: str, script: str = f'exec {PYTHON} "$@"') -> None:
        """The Python of a host's environment is a script there, as one behind a module system."""
        self.entry(name)["python"] = "/opt/env/bin/python"
        self[name].write("/opt/env/bin/python", f"#!/bin/sh\n{script}\n", mode=0o755)

    def take_port(self, name: str) -> None:
        """Another program listens there."""
        words = ["python3", "-I", "-c", f"import socket; s = socket.create_server(('', {PORT})); print(); input()"]
        server = self[name].popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        server.stdout.readline()

    def close_data_ports(self) -> None:
        """`ufw allow 22,29500/tcp` on the head."""
        self["h0"].faults.drop(port=DATA_PORTS)

    def close_rendezvous(self) -> None:
        """The head does not let one host in where the ranks meet."""
        self["h0"].faults.drop(port="29500-29999", peer=self["h2"].address)


Plant = Callable[[Stage], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way in which a start goes wrong."""

    name: str
    words: str
    """The row, for people."""
    alone: str
    """What torchrun alone does about it (shared facts, lab.md section 3)."""
    before: Plant | None = None
    """Makes what the checks are to find; None: there is nothing that could be seen before a start."""
    ids: tuple[str, ...] = ()
    """Any of these findings is the right one."""
    config: Plant | None = None
    """How the cluster is, where that is not wrong in itself."""
    after: Plant | None = None
    """Makes it go wrong once the checks have passed; None: the script does it."""
    moment: Moment = "ready"
    script: tuple[str, ...] = ()
    """Words of the script."""
    named: tuple[str, ...] = ()
    """What a sentence has to match that names host and cause; empty: the run has to work in spite of it."""
    program: Literal["run", "train"] = "run"
    lab: Mapping[str, Any] = field(default_factory=dict)

    def names(self, text: str) -> bool:
        """Whether a sentence names host and cause."""
        return bool(self.named) and all(re.search(each, text) for each in self.named)


def _put(stage: Stage, **entries: str) -> None:
    for entry in stage.file["hosts"]:
        entry.update(entries)


def _env(value: str, *names: str) -> Plant:
    def plant(stage: Stage) -> None:
        for name in names:
            stage.entry(name)["env"] = {"GLOO_SOCKET_IFNAME": value}

    return plant


def _bashrc(value: str) -> Plant:
    def plant(stage: Stage) -> None:
        for host in stage.hosts:
            host.write(".bashrc", f"export GLOO_SOCKET_IFNAME={value}\n")

    return plant


def _fixed_port(stage: Stage) -> None:
    stage.file["ports"] = f"{PORT}-{PORT}"


def _taken(stage: Stage) -> None:
    _fixed_port(stage)
    stage.take_port("h0")


def _all_on_eth1(stage: Stage) -> None:
    _put(stage, interface="eth1")


def _one_on_eth1(stage: Stage) -> None:
    _all_on_eth1(stage)
    stage["h2"].faults.unplug(nic=1)


def _full(stage: Stage) -> None:
    stage["h2"].fill_disk()


HANGS, EVERYWHERE = "901 s, all", ("h0", "h1", "h2")
CASES = [
    Case(
        name="off",
        words="a host is off",
        alone=HANGS,
        before=lambda stage: stage["h2"].power_off(),
        ids=("E-ACC-01",),
        after=lambda stage: stage["h2"].power_off(),
        moment="checked",
        named=("h2", "does not answer|no answer|lost"),
    ),
    Case(
        name="dies-early",
        words="a host loses power as soon as its host agent stands",
        alone=HANGS,
        after=lambda stage: stage["h2"].power_off(),
        moment="standing",
        named=("h2", "not answer"),
    ),
    Case(
        name="dies",
        words="a host loses power once all host agents stand",
        alone=HANGS,
        after=lambda stage: stage["h2"].power_off(),
        moment="started",
        named=("h2", "not answer"),
    ),
    Case(
        name="crashes",
        words="a host crashes once all host agents stand",
        alone=HANGS,
        after=lambda stage: stage["h2"].kill(),
        moment="started",
        named=("h2", "not answer"),
    ),
    Case(
        name="no-torch",
        words="the environment of a host has no torch",
        alone=HANGS,
        before=lambda stage: stage.wrap_python("h2", 'exec /usr/bin/python3 "$@"'),
        ids=("E-SW-01",),
        config=lambda stage: stage.wrap_python("h2"),
        after=lambda stage: stage.wrap_python("h2", 'exec /usr/bin/python3 "$@"'),
        moment="checked",
        named=("h2", "torch"),
    ),
    Case(
        name="stuck-python",
        words="the environment of a host hangs, as on a dead network folder",
        alone=HANGS,
        before=lambda stage: stage.wrap_python("h2", "exec sleep 1000"),
        ids=("E-SW-13",),
        config=lambda stage: stage.wrap_python("h2"),
        after=lambda stage: stage.wrap_python("h2", "exec sleep 1000"),
        moment="handed over",
        named=("h2", "not imported torch|has not begun"),
    ),
    Case(
        name="full",
        words="no host agent can stand: the disk of a host is full",
        alone=HANGS,
        before=_full,
        ids=("E-DISK-01",),
        after=_full,
        moment="checked",
        named=("h2", "[Nn]o space|disk is full"),
    ),
    Case(
        name="rendezvous",
        words="port 29500 is dropped for one host",
        alone="901 s",
        before=lambda stage: stage.close_rendezvous(),
        ids=("E-NET-02", "E-NET-05"),
        after=lambda stage: stage.close_rendezvous(),
        moment="standing",
        named=("h2 is not connected to h0", str(PORT)),
    ),
    Case(
        name="train-rendezvous",
        words="the same, with our trainer",
        alone="901 s",
        after=lambda stage: stage.close_rendezvous(),
        moment="standing",
        named=("h2 is not connected to h0", str(PORT)),
        program="train",
    ),
    Case(
        name="port-taken",
        words="the port is in use on the head",
        alone="head 12 s, others > 140 s",
        before=_taken,
        ids=("E-PORT-01",),
        config=_fixed_port,
        after=lambda stage: stage.take_port("h0"),
        moment="handed over",
        named=("h0", str(PORT), "in use|taken|listens"),
    ),
    Case(
        name="data-ports",
        words="29500 is open, the data ports of the head are dropped",
        alone="h1, h2: 545 s; rank 0 > 1478 s",
        before=lambda stage: stage.close_data_ports(),
        ids=("E-NET-03", "E-NET-05"),
        after=lambda stage: stage.close_data_ports(),
        named=("h1|h2", "no answer from h0"),
    ),
    Case(
        name="train-data-ports",
        words="the same, with our trainer",
        alone="h1, h2: 545 s; rank 0 > 1478 s",
        after=lambda stage: stage.close_data_ports(),
        moment="standing",
        named=("h1|h2", "no answer from h0"),
        program="train",
    ),
    Case(
        name="lo",
        words="GLOO_SOCKET_IFNAME=lo for all, set in the script",
        alone="2 ranks < 1 s, one > 140 s",
        before=_env("lo", *EVERYWHERE),
        ids=("E-ENV-03",),
        script=("GLOO_SOCKET_IFNAME=lo",),
        named=("h0|h1|h2", r"127\.0\.0\.1"),
    ),
    Case(
        name="lo-one",
        words="the same for one host, which happens to be the calling side",
        alone="may work, may hang",
        before=_env("lo", "h1"),
        ids=("E-ENV-03",),
        script=("h1:GLOO_SOCKET_IFNAME=lo",),
    ),
    Case(
        name="lo-shell",
        words="GLOO_SOCKET_IFNAME=lo in everybody's .bashrc",
        alone="2 ranks < 1 s, one > 140 s",
        before=_bashrc("lo"),
        ids=("E-ENV-03",),
        config=_bashrc("lo"),
        moment="standing",
    ),
    Case(
        name="absent",
        words="GLOO_SOCKET_IFNAME=enp5s0, which one host lacks",
        alone="that host at once, others hang",
        before=_env("enp5s0", "h1"),
        ids=("E-ENV-03",),
        script=("h1:GLOO_SOCKET_IFNAME=enp5s0",),
        named=("h1", "enp5s0"),
    ),
    Case(
        name="absent-shell",
        words="GLOO_SOCKET_IFNAME=enp5s0 in everybody's .bashrc",
        alone="all at once",
        before=_bashrc("enp5s0"),
        ids=("E-ENV-03",),
        config=_bashrc("enp5s0"),
        moment="standing",
    ),
    Case(
        name="wrong-nic",
        words="the interface of one host leads where the others are not",
        alone="may work, may hang",
        lab={"nics": 2},
        before=_one_on_eth1,
        ids=("E-NET-09",),
        config=_all_on_eth1,
        after=lambda stage: stage["h2"].faults.unplug(nic=1),
        named=("h2", "no answer from|no way"),
    ),
    Case(
        name="own-name",
        words="127.0.1.1 NAME in /etc/hosts (Debian)",
        alone="rank 0 in 2 s, others > 120 s",
        lab={"hosts_file": "debian"},
        before=lambda _stage: None,
        ids=("E-NAME-03",),
        moment="standing",
    ),
    Case(
        name="own-name-bare",
        words="the same, and the script removes our GLOO_SOCKET_IFNAME",
        alone="rank 0 in 2 s, others > 120 s",
        lab={"hosts_file": "debian"},
        script=("GLOO_SOCKET_IFNAME=",),
        named=("h0|h1|h2", r"127\.0\.1\.1"),
    ),
]
