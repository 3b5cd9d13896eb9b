"""A new user's way through a lab: a job on the user's computer, hosts with nothing of ours, and the real command."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.lab.machine import LabHost

JOB = """
name: tiny
model: ./model
method: {kind: lora, rank: 4}
data: {train: ./fox.txt, sequence_length: 64}
batch: 12
micro_batch: 2
steps: 400
checkpoint: {every_steps: 50}
"""
TEXT = "".join(f"fox number {number} jumps over the lazy dog and runs into the snow\n\n" for number in range(2000))
MAKE_MODEL = """
import json, sys
from pathlib import Path
from tests.train.tiny import *
folder = Path(sys.argv[1])
write_model(folder, **json.loads(sys.argv[2]))
write_tokenizer(folder)
"""
UNTOLD = "slots: 1  # no GPU"
"""What `init` writes of a host without a GPU."""
PATIENCE_S = 150.0
"""Four ranks that import torch on two cores, beside other tests that do."""


def make_model(folder: Path, **more: object) -> Path:
    """A tiny model with random weights, and more of its configuration; in a process of its own, for torch is not wanted in this one."""
    command = [sys.executable, "-c", MAKE_MODEL, str(folder), json.dumps(more)]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())})
    return folder


class NewUser:
    """Somebody at the desk of a lab."""

    def __init__(self, desk: LabHost) -> None:
        self.desk = desk

    def brings(self, model: Path, *, job: str = JOB) -> None:
        """A job, a text and a model, in the home folder."""
        self.desk.run(["mkdir", "-p", "model"])
        for file in model.iterdir():
            self.desk.write(f"model/{file.name}", file.read_bytes())
        self.desk.write("fox.txt", TEXT)
        self.desk.write("job.yaml", job)

    def types(self, *words: str, code: int | None = 0, timeout_s: float = 150.0) -> subprocess.CompletedProcess:
        """`gangline WORDS`, and its end."""
        done = self.desk.run(["gangline", *words], timeout_s=timeout_s)
        assert code in {None, done.returncode}, f"gangline {words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def describes(
        self,
        *hosts: str,
        python: Path | str = sys.executable,
        slots: int = 1,
        words: str = "",
        more: str = "",
        name: str = "cluster.yaml",
    ) -> None:
        """`gangline init`, and for each host a Python that trains. words: more lines for each host; more: of the file."""
        self.types("init", *hosts, "--yes", "--output", name)
        lines = "\n    ".join([f"slots: {slots}", f"python: {python}", *words.splitlines()])
        text = self.desk.read(name).decode()
        assert text.count(UNTOLD) == len(hosts), text
        self.desk.write(name, text.replace(UNTOLD, lines) + more)

    def row(self, run: str) -> dict:
        """What `ps` says of a run."""
        rows = json.loads(self.types("ps", "--json").stdout)["runs"]
        return next(row for row in rows if row["id"] == run)

    def awaits(self, run: str, condition, what: str, *, patience_s: float = PATIENCE_S) -> dict:
        """Look at `ps` until something is true."""
        deadline = time.monotonic() + patience_s
        while not condition(row := self.row(run)):
            assert time.monotonic() < deadline, f"waited in vain: {what}\n{row}"
            time.sleep(1.0)  # `ps` takes half a second of a core, which ranks that come up have better use for
        return row


LOOK = """
import os
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        words = open(f"/proc/{pid}/cmdline").read().split(chr(0))
        marked = b"GANGLINE_PART=" in open(f"/proc/{pid}/environ", "rb").read()
    except OSError:
        continue
    if marked or "gangline.supervise" in words:
        print(pid, *words)
"""


def processes_of_runs(host: LabHost) -> list[str]:
    """Processes on a host that carry the mark of a run, or are a supervisor."""
    return host.run(["/usr/bin/python3", "-c", LOOK]).stdout.splitlines()
