"""What the tests of the transport do on the user's computer of a lab; see `LabHost.call`."""

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gangline.errors import GanglineError, HostUnreachable
from gangline.runs.cluster import Host
from gangline.transport import connection
from gangline.transport.fanout import fan_out
from gangline.transport.hostkeys import known_already, scan_key
from gangline.transport.ssh import SshTransport
from gangline.transport.transport import AGENT


def transport_to(entry):
    """A transport to a host of the lab, by the name that the user's ssh_config has for it."""
    return SshTransport(Host(workdir="/", python="", transport="ssh", **entry))


def look(host):
    """What the agent says of its host, and of itself in a process of its own."""
    transport = transport_to(host)
    hello = transport._link.connection().hello
    said = transport.run((AGENT, "trees", "measure", "/etc/hostname"))
    transport.close()
    return {"hostname": hello.hostname, "python": hello.python, "home": hello.home, "verb": said.returncode}


def copy(host, num_bytes):
    """A tree there and back; by which way it went."""
    ways = []
    real = connection.copy
    connection.copy = lambda *args: ways.append("rsync") or real(*args)
    tree = Path.home() / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "sub" / "data").write_bytes(os.urandom(num_bytes))
    transport = transport_to(host)
    there = transport.home() / "copy"
    transport.push(tree, there)
    transport.pull(there, Path.home() / "back")
    transport.close()
    equal = (Path.home() / "back" / "sub" / "data").read_bytes() == (tree / "sub" / "data").read_bytes()
    return {"ways": ways, "equal": equal}


def scan(host):
    """The key that a host shows, and whether the user's ssh knows it."""
    key = scan_key(host["name"])
    return {"line": key.line, "known": known_already(host["name"], key.line)}


def error_of(host):
    """What is said of a host that cannot be reached, and after how long."""
    begun = time.monotonic()
    try:
        transport_to(host).run(["true"])
    except GanglineError as error:
        return {"kind": type(error).__name__, "text": str(error), "seconds": time.monotonic() - begun}
    return {"kind": None}


def errors_of(hosts):
    """What is said of each of several hosts, all of them tried at the same time, and after how long."""
    with ThreadPoolExecutor(len(hosts)) as pool:
        return dict(zip([host["name"] for host in hosts], pool.map(error_of, hosts), strict=True))


def outlast(host):
    """A long command, a network that goes away and comes back. Says "running", then "lost"."""
    transport = transport_to(host)
    transport.run(["true"])
    sys.stdout.write("running\n")
    sys.stdout.flush()
    begun = time.monotonic()
    error = None
    try:
        transport.run(["sleep", "4321"], timeout_s=600)
    except HostUnreachable as caught:
        error = str(caught)
    lost_s = time.monotonic() - begun
    sys.stdout.write("lost\n")
    sys.stdout.flush()
    begun = time.monotonic()
    while time.monotonic() - begun < 60:
        try:
            said = transport.run(["echo", "again"]).stdout
            break
        except HostUnreachable:
            said = None
    transport.close()
    return {"error": error, "lost_s": lost_s, "said": said, "again_s": time.monotonic() - begun}


def ask_all(hosts, timeout_s):
    """How long each of many hosts took, and what those said that gave an error."""
    transports = {host["name"]: transport_to(host) for host in hosts}
    seconds = {}
    begun = time.monotonic()
    outcomes = fan_out(
        lambda transport: transport.run(["hostname"]).stdout.strip(),
        transports,
        timeout_s=timeout_s,
        on_outcome=lambda name, _: seconds.update({name: time.monotonic() - begun}),
    )
    for transport in transports.values():
        transport.close()
    return {name: [seconds[name], outcome.value, str(outcome.error or "")] for name, outcome in outcomes.items()}


def left(_=None):
    """ssh processes and folders of ours on the user's computer."""
    names = [path.read_text() for path in Path("/proc").glob("[0-9]*/comm")]
    return [name for name in names if name.startswith("ssh\n")] + [
        path.name for path in Path("/tmp").glob("gangline-ssh-*")
    ]
