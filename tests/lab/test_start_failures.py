"""What goes wrong with a start once all checks have passed is named, with its host; and nothing is left of it.

The user's own program is started with `gangline run`; torchrun is played (played_torch.py). All rows of the table, with
torchrun and gloo themselves: benchmarks/start_failures.py.
"""

import json
import re
import subprocess
import threading
import time

import pytest

from tests.lab import played_torch
from tests.lab.gang import assert_nothing_left

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

BAR_S = 30.0
RANK = """
import mmap, os, socket, sys, time

def until_there(path):
    while not os.path.exists(path):
        time.sleep(0.02)

def call(place):
    deadline = time.monotonic() + 300
    while True:
        try:
            return socket.create_connection(place, 300)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.05)

with open("/tmp/libtorch_played.so", "wb+") as library:  # by which a host agent knows that torch is there
    library.write(bytes(4096))
    library.flush()
    torch = mmap.mmap(library.fileno(), 4096, prot=mmap.PROT_READ)
meet = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
others = int(os.environ["WORLD_SIZE"]) - 1
if os.environ["RANK"] == "0":
    store, door = socket.create_server(meet), socket.create_server((meet[0], 0))
    met = [store.accept()[0] for _ in range(others)]
    for each in met:
        each.sendall(b"%d\\n" % door.getsockname()[1])
    open("/tmp/met", "w").close()
    peers = [door.accept()[0] for _ in range(others)]
else:
    store = call(meet)
    port = int(store.makefile().readline())
    open("/tmp/met", "w").close()
    until_there("/tmp/go")
    peer = call((meet[0], port))
print("joined", flush=True)
"""


class Launch:
    """`gangline run -- rank.py` on the user's computer, and what it prints."""

    def __init__(self, lab):
        self.lab, self.desk = lab, lab.user
        self.python = played_torch.install(Anybody(), lab.hosts)
        self.entries = [
            {"name": host.name, "host_key": host.host_key, "address": host.address, "port": host.ssh_port, "slots": 1}
            for host in lab.hosts
        ]
        self.lines, self.texts = [], []

    def begin(self):
        entries = [{"python": self.python, **entry} for entry in self.entries]
        self.desk.write("project/cluster.yaml", json.dumps({"hosts": entries}))
        self.desk.write("project/rank.py", RANK)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.process = self.desk.popen(["gangline", "run", "--", "rank.py"], cwd=self.desk.home / "project", **pipes)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    def until(self, host, pattern):
        """Until a file is there on a host."""
        script = f'until set -- {pattern}; [ -e "$1" ]; do sleep 0.03; done'
        waiting = host.popen(["sh", "-c", script])
        deadline = time.monotonic() + 60
        while waiting.poll() is None:
            assert self.process.poll() is None, "\n".join(self.lines)
            assert time.monotonic() < deadline, "\n".join(self.lines)
            time.sleep(0.02)

    def names(self, *words):
        """Wait for a line with all these words; fails after 30 s."""
        deadline = time.monotonic() + BAR_S
        while True:
            for line in list(self.lines):
                if all(re.search(word, line) for word in words):
                    return line
            assert time.monotonic() < deadline, "\n".join(self.lines)
            time.sleep(0.05)

    def stop(self):
        run = next(line for line in self.lines if re.fullmatch(r"[a-z]+-[a-z]+-\d+", line))
        self.desk.check(["gangline", "stop", "--now", run], timeout_s=90)
        assert self.process.wait(timeout=60) == 0


class Anybody:
    """Who makes environments."""

    def check(self, argv, *, on):
        return on.check(argv)

    def write(self, path, text, *, on):
        on.write(path, text)


@pytest.fixture
def launch(lab):
    return Launch(lab(3, meshed=True))


def test_data_ports_that_are_shut_are_named_although_all_ranks_have_met(launch):
    launch.begin()
    for host in launch.lab.hosts:
        launch.until(host, "/tmp/met")
    for ports in ("1-21", "23-29499", "30000-65535"):
        launch.lab["h0"].faults.drop(port=ports)
    for host in launch.lab.hosts:
        host.write("/tmp/go", "")
    line = launch.names("gets no answer from h0 ", "rank 1 on h1 and rank 2 on h2 have not joined")
    assert "rank 0 on h0" not in line
    launch.names("a connection from h1 to h0 .*timed out: packets are dropped on the way")
    launch.stop()
    assert_nothing_left(launch.lab, folder=f"{launch.lab['h0'].home}/gangline")


def test_an_environment_that_hangs_is_named(launch):
    h2 = launch.lab["h2"]
    real = f"{h2.home}/{played_torch.FOLDER}/bin/python"
    h2.write("wrapped/python", f'#!/bin/sh\nexec {real} "$@"\n', mode=0o755)
    launch.entries[2]["python"] = "~/wrapped/python"
    launch.begin()
    launch.until(launch.lab["h0"], "gangline/runs/*/attempts/1/request.json")
    h2.write("wrapped/python", "#!/bin/sh\nexec sleep 1000\n", mode=0o755)
    launch.names("torchrun on h2 has not imported torch yet")
    launch.stop()
    assert_nothing_left(launch.lab, folder=f"{h2.home}/gangline")


def test_a_host_that_dies_after_the_checks_is_named_and_nothing_runs_elsewhere(launch):
    launch.begin()
    launch.until(launch.desk, ".local/state/gangline/runs/*/findings.json")
    launch.lab["h2"].power_off()
    launch.names("^error: .*h2")
    assert launch.process.wait(timeout=60) != 0
    assert_nothing_left(launch.lab, folder=f"{launch.lab['h0'].home}/gangline", skip={"h2"})
