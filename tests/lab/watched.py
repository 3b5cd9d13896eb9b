"""What happens on the machines of a lab while commands run: words in command lines, and sockets that listen.

    with Watch(lab, {"HF_TOKEN": "hf_canary"}) as watch:
        ...
    watch.said          # [{"kind": "word", ...}, {"kind": "may_replace", ...}]

A process of its own looks every 10 ms at the command lines of all processes, and every 50 ms at all sockets.
"""

import contextlib
import json
import select
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.lab.settings import ROOT

TICK_S = 0.01
DOORS_EVERY = 5
YOUNG_S = 2.0
"""A command line changes when a process becomes another program, which is soon or never."""
OLD_EVERY = 50
LISTENS = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}


class Watch:
    """Looks as long as the block lasts."""

    def __init__(self, lab, words):
        machines = {machine.name: machine.pid for machine in lab.machines}
        self._told = json.dumps({"machines": machines, "words": words})
        self.said = []
        self.ticks = 0
        self.longest_s = 0.0
        """Between two looks."""

    def __enter__(self):
        self._out = tempfile.TemporaryFile("w+")
        argv = [sys.executable, "-m", "tests.lab.watched"]
        pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE}
        self._process = subprocess.Popen(argv, stdout=self._out, text=True, cwd=ROOT, **pipes)
        self._process.stdin.write(self._told + "\n")
        self._process.stdin.flush()
        assert self._process.stderr.readline() == "ready\n"
        return self

    def __exit__(self, *problem):
        _, errors = self._process.communicate(timeout=30)
        self._out.seek(0)
        self.said = [json.loads(line) for line in self._out]
        self._out.close()
        assert self._process.returncode == 0, errors
        last = self.said.pop()
        self.ticks, self.longest_s = last["ticks"], last["longest_s"]

    def of(self, kind):
        """What was seen of one kind."""
        return [each for each in self.said if each["kind"] == kind]


class Looker:
    """The process that looks."""

    def __init__(self, machines, words):
        self.machines = machines
        self.words = {name: word.encode() for name, word in words.items()}
        self.spaces = {str(Path(f"/proc/{pid}/ns/net").readlink()): name for name, pid in machines.items()}
        self.born = {}
        self.doors = set()
        self.ticks = 0

    def look(self):
        now = time.monotonic()
        pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
        for pid in pids:
            is_young = now - self.born.setdefault(pid, now) < YOUNG_S
            if is_young or self.ticks % OLD_EVERY == pid % OLD_EVERY:
                self.read(pid)
        for pid in self.born.keys() - set(pids):
            del self.born[pid]
        if self.ticks % DOORS_EVERY == 0:
            for name, pid in self.machines.items():
                self.look_at_doors(name, pid)
        self.ticks += 1

    def read(self, pid):
        line = content(pid, "cmdline")
        for name, word in self.words.items():
            if word in line:
                say(kind="word", word=name, command=line.replace(b"\0", b" ").decode(errors="replace")[:300])

    def look_at_doors(self, name, pid):
        for protocol, state in LISTENS.items():
            for line in content(pid, f"net/{protocol}").decode().splitlines()[1:]:
                fields = line.split()
                door = (name, protocol, fields[1], fields[9])
                if fields[3] == state and door not in self.doors:
                    self.doors.add(door)
                    if self.ticks:  # what was there before is not ours
                        self.tell(*door)

    def tell(self, name, protocol, place, inode):
        address, _, port = place.partition(":")
        owners = [content(pid, "cmdline") for pid in self.of(name) if f"socket:[{inode}]" in descriptors(pid)]
        words = [owner.replace(b"\0", b" ").decode(errors="replace").strip() for owner in owners]
        where = {"address": written(address), "port": int(port, 16)}
        say(kind="may_replace", machine=name, protocol=protocol, **where, owners=sorted(set(words)))

    def of(self, name):
        """Processes of a machine."""
        for pid in self.born:
            with contextlib.suppress(OSError):
                if self.spaces.get(str(Path(f"/proc/{pid}/ns/net").readlink())) == name:
                    yield pid


def content(pid, name):
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def descriptors(pid):
    """What the open files of a process are."""
    found = []
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.append(str(descriptor.readlink()))
    return found


def written(address):
    raw = bytes.fromhex(address)
    words = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
    return socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, words)


def say(**words):
    sys.stdout.write(json.dumps(words) + "\n")


def main():
    """Until stdin is closed."""
    looker = Looker(**json.loads(sys.stdin.readline()))
    longest_s = 0.0
    looker.look()
    sys.stderr.write("ready\n")
    sys.stderr.flush()
    last = time.monotonic()
    while not select.select([sys.stdin], [], [], 0)[0]:
        looker.look()
        now = time.monotonic()
        longest_s, last = max(longest_s, now - last), now
        time.sleep(TICK_S)
    say(ticks=looker.ticks, longest_s=longest_s)


if __name__ == "__main__":
    main()
