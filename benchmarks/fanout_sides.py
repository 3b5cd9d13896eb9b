"""The sides of the fan-out benchmark, on the user's computer of the lab."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path, PurePath

from gangline.remote.fanout import fan_out
from gangline.remote.ssh import SshTransport
from gangline.remote.transport import AGENT
from gangline.remote.zipapp import agent_zipapp
from gangline.runs.cluster import Host

CONNECT_S = 10
TIMEOUT_S = 60
REQUEST = {"workdir": "/tmp", "python_argv": None, "python_env": {}, "names": [], "shared": [], "files": []}
AGENT_PATH, REQUEST_PATH = "/tmp/agent.pyz", "/tmp/request.json"
ANSIBLE = shutil.which("ansible") or "/opt/ansible-venv/bin/ansible"


def measure(case, tool, names, keys):
    """Run one side; None where its program is missing."""
    if case == "prepare":
        return prepare(keys)
    argv, env = SIDES[tool](case, names, keys)
    if shutil.which(argv[0]) is None:
        return None
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begun = time.monotonic()
    done = subprocess.run(argv, env={**os.environ, **env}, capture_output=True, text=True, check=False, timeout=600)
    wall_s = time.monotonic() - begun
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    more = (
        json.loads(done.stdout.splitlines()[-1]) if tool == "ours" else {"answered": answered(case, tool, done.stdout)}
    )
    return {
        "wall_s": wall_s,
        "cpu_s": cpu_s - more.get("again_cpu_s", 0),
        **more,
        "wall_s": wall_s - more.get("again_s", 0),
    }


def answered(case, tool, text):
    """How many hosts answered."""
    if tool == "pdsh":
        return len({line.partition(":")[0] for line in text.splitlines() if re.match(r"h\d+: ", line)})
    return len(re.findall(r"^h\d+ \| (?:SUCCESS|CHANGED)", text, re.MULTILINE))


def ours(case, names, keys):
    """A process of ours that asks all hosts."""
    chosen = {name: keys[name] for name in names}
    return [sys.executable, "-m", "benchmarks.fanout_sides", case, json.dumps(chosen)], {}


def pdsh(case, names, _keys):
    """Pdsh with its usual 32 connections at once."""
    command = f"python3 -I {AGENT_PATH} facts < {REQUEST_PATH}" if case == "facts" else "hostname"
    options = f"-o BatchMode=yes -o ConnectTimeout={CONNECT_S}"
    env = {"PDSH_RCMD_TYPE": "ssh", "PDSH_SSH_ARGS_APPEND": options}
    return ["pdsh", "-w", ",".join(names), command], env


def ansible(case, names, _keys):
    """Ansible with as many forks as hosts."""
    module = ["-m", "setup"] if case == "facts" else ["-m", "raw", "-a", "hostname"]
    env = {
        "ANSIBLE_PYTHON_INTERPRETER": "/usr/bin/python3",
        "ANSIBLE_NOCOLOR": "1",
        # its masters outlive a run by a minute: from nothing means in a new folder
        "ANSIBLE_SSH_CONTROL_PATH_DIR": tempfile.mkdtemp(),
        "ANSIBLE_SSH_ARGS": "-C -o ControlMaster=auto -o ControlPersist=5s",
    }
    return [ANSIBLE, "all", "-i", ",".join(names) + ",", "-f", str(len(names)), "-T", str(CONNECT_S), *module], env


SIDES = {"ours": ours, "pdsh": pdsh, "ansible": ansible}


def transports(keys):
    """Transports to all hosts."""
    hosts = [Host(name=name, workdir="/", python="", transport="ssh", host_key=key) for name, key in keys.items()]
    return {host.name: SshTransport(host) for host in hosts}


def prepare(keys):
    """The agent and a question on every host, for those who cannot bring them."""

    def bring(transport):
        transport.write(PurePath(AGENT_PATH), agent_zipapp())
        transport.write(PurePath(REQUEST_PATH), json.dumps(REQUEST).encode())
        transport.close()

    outcomes = fan_out(bring, transports(keys), timeout_s=300)
    return {"answered": sum(outcome.get() is None for outcome in outcomes.values()), "wall_s": 0, "cpu_s": 0}


def cpu_s():
    """Of this process and its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def children_cpu_s():
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


def main(case, keys):
    """Our side: ask all hosts, and for `hello` ask them once more."""

    def ask(transport):
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
