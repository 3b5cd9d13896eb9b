"""Starts on a busy computer: does every healthy one train, and is everything true that its board says meanwhile?

    python -m benchmarks.busy_starts --out busy.jsonl --local 50 --lab 20 --hung 2

    local   `gangline train` on three hosts that are this computer
    lab     the same over ssh, on three hosts of a lab (tests/lab; as root)
    hung    as local, and one rank sleeps for ever in an import: it has to be named

Beside each start 8 processes (`--loops`) use all the processor time that they get; they end by themselves. Every
sentence of the board is compared with what busy_truth.py has seen in /proc: a host or rank that is said not to have
come to a stage must not have come to it, and nothing may be said of the network, which is well. One JSON line per
start; a file that has lines already is continued. Exit status 1 if a start was given up, a sentence was false, or a
hung rank unnamed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.lab.hosts import ROOT, Lab, lab_folders
from tests.lab.user import NewUser, make_model
from tests.train.story import make_user, write_corpus

LOOPS = 8
LIMIT_S = 900.0
"""A start that has not trained by then has not trained."""
NAMED_S = 600.0
SLACK_S = 6.0
"""A sentence may be so old when it is printed: a host agent looks once a second, if it gets a processor."""
LOOP = "import sys, time\nend = time.monotonic() + float(sys.argv[1])\nwhile time.monotonic() < end: pass\n"
JOB = {
    "model": "./model",
    "data": {"train": "corpus.jsonl", "sequence_length": 32},
    "batch": 12,
    "steps": 10,
    "evaluation": {"at_start": False},
}
LAB_JOB = """\
name: tiny
model: ./model
method: {kind: lora, rank: 4}
data: {train: ./fox.txt, sequence_length: 64}
batch: 12
micro_batch: 2
steps: 10
"""
HANG = """\
import os, sys, time

class Hang:
    def find_spec(self, name, path=None, target=None):
        if name == "transformers":
            time.sleep(1e6)

if os.environ.get("GANGLINE_HOST") == "pc3" and "RANK" in os.environ:
    sys.meta_path.insert(0, Hang())
"""
NOT_TRUE = ("answer", "a connection from", "cannot be asked", "done nothing", "was given up", "firewall")
"""Nothing of a healthy start is like this."""
JOINED = re.compile(r"^(?:all \d+ ranks have|the rank has) joined after ([\d.]+) s", re.MULTILINE)
STAGES: Sequence[tuple[str, str]] = (
    (r"torchrun on (.+?) has not imported torch yet", "launcher"),
    (r"torchrun on (.+?) has not opened the port", "port"),
    (r"torchrun on (.+?) is not connected to", "port"),
    (r"the ranks of (.+?) have not started yet", "rank"),
    (r"((?:ranks? [\d, ]+ on \S+(?: and )?)+) (?:has|have) not finished importing", "imported"),
    (r"((?:ranks? [\d, ]+ on \S+(?: and )?)+) (?:has|have) not joined", "joined"),
)
"""What a sentence says of hosts or ranks, and the stage that it says they have not reached."""

Line = dict[str, Any]


def main() -> int:
    """Try what the file does not have."""
    arguments = _arguments()
    lines = read(arguments.out)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder, "model"))
        tries: dict[str, Callable[[], Line]] = {
            "local": lambda: try_local(model, arguments.loops),
            "lab": lambda: try_lab(model, arguments.loops),
            "hung": lambda: try_hung(model, arguments.loops),
        }
        for kind, attempt in tries.items():
            for number in range(getattr(arguments, kind)):
                if any((line["kind"], line["number"]) == (kind, number) for line in lines):
                    continue
                load = os.getloadavg()[0]
                lines.append({"kind": kind, "number": number, **attempt(), **_more(load, arguments.loops)})
                with arguments.out.open("a", encoding="utf-8") as stream:
                    stream.write(json.dumps(lines[-1]) + "\n")
                print({name: value for name, value in lines[-1].items() if name not in {"said", "truth"}}, flush=True)
    return summary(lines)


def try_local(model: Path, loops: int) -> Line:
    """A start of three hosts that are this computer."""
    with user_folder(model) as folder, busy(loops):
        truth = Truth(subprocess.Popen, folder / "home")
        console = Console(_train(folder))
        return judged(console, truth)


def try_hung(model: Path, loops: int) -> Line:
    """The same with a rank that sleeps in an import; ended once it is named."""
    with user_folder(model, hang=True) as folder, busy(loops):
        console = Console(_train(folder))
        line = console.until(lambda text: "rank 2 on pc3 has done nothing for" in text, NAMED_S)
        named = re.search(r"joined after (\d+) s", line or "")
        named_s = int(named[1]) if named else None  # after the start of the gang
        others = sorted({text for _, text in console.lines if re.search(r"ranks? [01]\b[^;]*done nothing", text)})
        user = make_user(folder)
        for row in user.runs():
            user.gangline("stop", "--now", row["id"], code=None)
        console.process.wait(120)
        return {"named_s": named_s, "sentence": line, "false": others, "said": console.text()[-4000:]}


def try_lab(model: Path, loops: int) -> Line:
    """A start over ssh on three hosts of a lab of its own."""
    with Lab(3, binds=lab_folders(), meshed=True, disk="4g", shm="1g", ttl_s=1800) as lab:
        desk = lab.user
        desk.env["PYTHONPATH"] = str(ROOT / "src")
        user = NewUser(desk)
        user.brings(model, job=LAB_JOB)
        user.describes(*(host.name for host in lab.hosts))
        with busy(loops):
            truths = [Truth(host.popen, host.home / "gangline") for host in lab.hosts]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
            return judged(Console(desk.popen(["gangline", "train", "job.yaml"], **pipes)), *truths)


def judged(console: Console, *truths: Truth) -> Line:
    """How a start went, once its run has ended."""
    begun = time.monotonic()
    try:
        console.process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        console.process.kill()
    seconds = time.monotonic() - begun
    truth: dict[str, float] = {}
    for each in truths:
        truth |= each.end()
    text = console.text()
    joined = JOINED.search(text)
    return {
        "trained": console.process.returncode == 0 and re.search(r"^finished", text, re.MULTILINE) is not None,
        "given_up": "was given up" in text,
        "joined_s": float(joined[1]) if joined else None,
        "seconds": round(seconds, 1),
        "sentences": sum("have joined after" in line and ";" in line for _, line in console.lines),
        "tables": sum(line.startswith("host ") for _, line in console.lines),
        "false": [words for when, line in console.lines for words in untrue(when, line, truth)],
        "truth": truth,
        "said": text[-6000:],
    }


def untrue(when: float, line: str, truth: dict[str, float]) -> Iterator[str]:
    """What a line of the board says that was not so when it was printed."""
    if "ranks have joined after" not in line or ";" not in line:
        if "was given up" in line:
            yield line
        return
    for words in NOT_TRUE:
        if words in line:
            yield f"{words}: {line}"
    for pattern, stage in STAGES:
        for match in re.finditer(pattern, line):
            for name in _named(match[1], by_rank=stage in {"imported", "joined"}):
                keys = [f"{stage} {name}"] if stage != "rank" else []
                if any(when - truth.get(key, when) > SLACK_S for key in keys):
                    yield f"{name} had come to {stage!r} {when - truth[keys[0]]:.1f} s before: {line}"


def _named(words: str, *, by_rank: bool) -> list[str]:
    """The hosts, or the ranks, that a part of a sentence is about."""
    if not by_rank:
        return re.findall(r"\b(?:pc|h)\d\b", words)
    return [number for numbers in re.findall(r"ranks? ([\d, ]+) on", words) for number in re.findall(r"\d+", numbers)]


class Truth:
    """busy_truth.py on one machine. start: starts a command there."""

    def __init__(self, start: Callable[..., Any], root: Path) -> None:
        words = [
            "/usr/bin/env",
            "python3",
            "-I",
            "-c",
            Path(__file__).with_name("busy_truth.py").read_text(),
            str(root),
        ]
        self._process = start(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def end(self) -> dict[str, float]:
        """What it has seen."""
        said, _ = self._process.communicate("end\n", timeout=60)
        found: dict[str, float] = json.loads(said)
        return found


class Console:
    """A command, and the lines that it prints, each with its time."""

    def __init__(self, process: Any) -> None:
        self.process = process
        self.lines: list[tuple[float, str]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with suppress(ValueError):
            for text in self.process.stdout:
                self.lines.append((time.time(), text.rstrip("\n")))

    def until(self, is_it: Callable[[str], bool], limit_s: float) -> str | None:
        """The first line that is it; None: there is none in time, or the command has ended."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            has_ended = self.process.poll() is not None
            for _, text in list(self.lines):
                if is_it(text):
                    return text
            if has_ended:
                return None
            time.sleep(0.2)
        return None

    def text(self) -> str:
        """All of it."""
        self._reader.join(5)
        return "\n".join(text for _, text in self.lines)


@contextmanager
def user_folder(model: Path, *, hang: bool = False) -> Iterator[Path]:
    """A folder with a job and three hosts that are this computer."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        shutil.copytree(model, folder / "model")
        write_corpus(folder)
        (folder / "job.yaml").write_text(json.dumps(JOB))
        hosts: list[dict[str, Any]] = [{"name": each, "transport": "local"} for each in ("pc1", "pc2", "pc3")]
        if hang:
            (folder / "hang").mkdir()
            (folder / "hang" / "sitecustomize.py").write_text(HANG)
            hosts[2]["env"] = {"PYTHONPATH": f"{folder / 'hang'}:{ROOT / 'src'}"}
        (folder / "cluster.yaml").write_text(json.dumps({"hosts": hosts}))
        try:
            yield folder
        finally:
            user = make_user(folder)
            for row in user.runs():
                if row["phase"] not in {"finished", "failed", "stopped"}:
                    user.gangline("stop", "--now", row["id"], code=None)
            user.wait_until_quiet(timeout_s=60)


def _train(folder: Path) -> Any:
    environment = {
        "PATH": os.environ["PATH"], "HOME": str(folder), "GANGLINE_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    return subprocess.Popen(
        [str(Path(sys.executable).with_name("gangline")), "train", "job.yaml"],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@contextmanager
def busy(loops: int) -> Iterator[None]:
    """Other programs that want all processors, and end by themselves."""
    running = [subprocess.Popen([sys.executable, "-I", "-c", LOOP, str(LIMIT_S + 60)]) for _ in range(loops)]
    try:
        yield
    finally:
        for each in running:
            each.kill()
            each.wait()


def read(path: Path) -> list[Line]:
    """The lines that a file has."""
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def summary(lines: Sequence[Line]) -> int:
    """Print the figures; 1 if anything is not as it should be."""
    wrong = 0
    for kind in ("local", "lab"):
        of_kind = [line for line in lines if line["kind"] == kind]
        bad = [line for line in of_kind if not line["trained"] or line["given_up"] or line["false"]]
        joined = sorted(line["joined_s"] for line in of_kind if line["joined_s"] is not None)
        middle = f"{joined[len(joined) // 2]:.0f} s, at most {joined[-1]:.0f} s" if joined else "-"
        print(
            f"{kind}: {len(of_kind)} starts, {sum(line['trained'] for line in of_kind)} trained, "
            f"{sum(line['given_up'] for line in of_kind)} given up, {sum(line['sentences'] for line in of_kind)} "
            f"sentences, {sum(len(line['false']) for line in of_kind)} false; joined after {middle} (median)"
        )
        wrong += len(bad)
    hung = [line for line in lines if line["kind"] == "hung"]
    named = [line["named_s"] for line in hung if line["named_s"] is not None and not line["false"]]
    print(f"hung: {len(hung)} starts, the rank is named in {len(named)}, after {named} s")
    return 1 if wrong or len(named) < len(hung) else 0


def _more(load: float, loops: int) -> Line:
    return {"loops": loops, "loads": [load, os.getloadavg()[0]], "commit": _commit()}


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    for kind in ("local", "lab", "hung"):
        parser.add_argument(f"--{kind}", type=int, default=0, metavar="STARTS")
    parser.add_argument("--loops", type=int, default=LOOPS, metavar="PROCESSES", help="that use up the processors")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
