"""The sides of the fan-out benchmark, on the user's computer of the lab."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path, PurePath
from typing import Any

from gangline.runs.cluster import Host
from gangline.transport.bootstrap import agent_zipapp
from gangline.transport.fanout import fan_out
from gangline.transport.ssh import SshTransport
from gangline.transport.transport import AGENT

Keys = dict[str, str]
"""Every host, and its key."""
Side = tuple[list[str], dict[str, str]]
"""A command, and what is added to its environment."""
CONNECT_S = 10
TIMEOUT_S = 60
REQUEST = {"workdir": "/tmp", "python_argv": None, "python_env": {}, "names": [], "shared": [], "files": []}
AGENT_PATH, REQUEST_PATH = "/tmp/agent.pyz", "/tmp/request.json"


def measure(case: str, tool: str, keys: Keys, folder: str) -> dict[str, Any] | None:
    """Run one side; None where its program is missing. folder: looked into before PATH."""
    os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
    if case == "prepare":
        return prepare(keys)
    argv, env = SIDES[tool](case, keys)
    if shutil.which(argv[0]) is None:
        return None
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begun = time.monotonic()
    done = subprocess.run(argv, env={**os.environ, **env}, capture_output=True, text=True, check=False, timeout=600)
    wall_s = time.monotonic() - begun
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    more = json.loads(done.stdout.splitlines()[-1]) if tool == "ours" else {"answered": answered(tool, done.stdout)}
    again_s, again_cpu_s = more.get("again_s", 0.0), more.get("again_cpu_s", 0.0)
    return {**more, "wall_s": wall_s - again_s, "cpu_s": cpu_s - again_cpu_s}


def answered(tool: str, text: str) -> int:
    """How many hosts answered."""
    if tool.endswith("pdsh"):
        return len({line.partition(":")[0] for line in text.splitlines() if re.match(r"h\d+: ", line)})
    return len(re.findall(r"^h\d+ \| (?:SUCCESS|CHANGED)", text, re.MULTILINE))


def ours(case: str, keys: Keys) -> Side:
    """A process of ours that asks all hosts."""
    return [sys.executable, "-m", "benchmarks.fanout_sides", case, json.dumps(keys)], {}


def pdsh(case: str, keys: Keys) -> Side:
    """Pdsh with its usual 32 connections at once."""
    command = f"python3 -I {AGENT_PATH} facts < {REQUEST_PATH}" if case == "facts" else "hostname"
    options = f"-o BatchMode=yes -o ConnectTimeout={CONNECT_S}"
    env = {"PDSH_RCMD_TYPE": "ssh", "PDSH_SSH_ARGS_APPEND": options}
    return ["pdsh", "-w", ",".join(keys), command], env


def pdsh_scp(case: str, keys: Keys) -> Side:
    """Pdsh with what a user types before it, where nothing is there: scp to every host, as many at once."""
    if case != "facts":
        return ["none"], {}
    bring = f"xargs -P 32 -I HOST scp -q -o BatchMode=yes {AGENT_PATH} {REQUEST_PATH} HOST:/tmp/"
    argv, env = pdsh(case, keys)
    line = f"printf '%s\\n' {' '.join(keys)} | {bring} && exec {shlex.join(argv)}"
    return ["sh", "-c", line], env


def ansible(case: str, keys: Keys) -> Side:
    """Ansible with as many forks as hosts."""
    module = ["-m", "setup"] if case == "facts" else ["-m", "raw", "-a", "hostname"]
    env = {
        "ANSIBLE_PYTHON_INTERPRETER": "/usr/bin/python3",
        "ANSIBLE_NOCOLOR": "1",
        # its masters outlive a run by a minute: from nothing means in a new folder
        "ANSIBLE_SSH_CONTROL_PATH_DIR": tempfile.mkdtemp(),
        "ANSIBLE_SSH_ARGS": "-C -o ControlMaster=auto -o ControlPersist=5s",
    }
    return ["ansible", "all", "-i", ",".join(keys) + ",", "-f", str(len(keys)), "-T", str(CONNECT_S), *module], env


SIDES = {"ours": ours, "pdsh": pdsh, "scp+pdsh": pdsh_scp, "ansible": ansible}


def transports(keys: Keys) -> dict[str, SshTransport]:
    """Transports to all hosts."""
    hosts = [Host(name=name, workdir="/", python="", transport="ssh", host_key=key) for name, key in keys.items()]
    return {host.name: SshTransport(host) for host in hosts}


def prepare(keys: Keys) -> dict[str, Any]:
    """The agent and a question on every host, for those who cannot bring them."""
    Path(AGENT_PATH).write_bytes(agent_zipapp())
    Path(REQUEST_PATH).write_text(json.dumps(REQUEST), encoding="utf-8")

    def bring(transport: SshTransport) -> None:
        transport.write(PurePath(AGENT_PATH), agent_zipapp())
        transport.write(PurePath(REQUEST_PATH), json.dumps(REQUEST).encode())
        transport.close()

    outcomes = fan_out(bring, transports(keys), timeout_s=300)
    return {"answered": sum(outcome.get() is None for outcome in outcomes.values()), "wall_s": 0, "cpu_s": 0}


def cpu_s() -> float:
    """Of this process and its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def children_cpu_s() -> float:
    """Of the children that run: what /proc says."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid():
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def main(case: str, keys: Keys) -> None:
    """Our side: ask all hosts, and for `hello` ask them once more."""

    def ask(transport: SshTransport) -> str:
        if case == "facts":
            return transport.run((AGENT, "facts"), stdin=json.dumps(REQUEST).encode(), timeout_s=TIMEOUT_S).stdout
        return transport.run(["hostname"], timeout_s=TIMEOUT_S).stdout

    there = transports(keys)
    outcomes = fan_out(ask, there, timeout_s=TIMEOUT_S)
    said = {"answered": sum(bool(outcome.value) for outcome in outcomes.values())}
    if case == "hello":
        before_s, before_cpu_s = time.monotonic(), cpu_s() + children_cpu_s()
        fan_out(ask, there, timeout_s=TIMEOUT_S)
        said["again_s"] = time.monotonic() - before_s
        said["again_cpu_s"] = cpu_s() + children_cpu_s() - before_cpu_s
    fan_out(SshTransport.close, there, timeout_s=TIMEOUT_S)
    sys.stdout.write(json.dumps(said) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
