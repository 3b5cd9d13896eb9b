"""Scripts of other projects, unchanged, below `gangline run` on three lab hosts: what works, and with which flags.

    python -m benchmarks.third_party_inputs FOLDER/in          # tiny models and data of our own
    python -m benchmarks.third_party --from FOLDER --out third_party.jsonl             # as root, for the lab
    python -m benchmarks.third_party --from FOLDER --out third_party.jsonl --only trl_sft run_clm

FOLDER/src has checkouts of the projects and FOLDER/venv one environment for each name in `third_party.json`; whoever
runs this fetches them, nothing of theirs is here. Ranks: one on the first host, two on the second, one on the third;
real sshd, torchrun and gloo on the processor. All hosts share /shared, as many sites do. Five things are looked at:

starts    all four ranks are there
follows   gangline knows a step that gets on, from the output or the optimizer
restarts  kill -9 of rank 2 once the script has saved; the next attempt, by --restarts 1, goes on from that save. A
          script without a flag to resume begins anew: its line says so
hangs     rank 3 is stopped (SIGSTOP): it and its host are named; then it may go on
stops     `gangline stop`: all ranks end, nothing is left on any host; the script saved in answer, or had before

One JSON line per case; a file that has lines already is continued. A script that needs GPUs is listed with the reason
and not run. Exit code 1 if a case fails that is not listed so.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.lab_runs import OwnLab
from benchmarks.plan_time import read
from benchmarks.scaling import commit
from tests.lab.hosts import LabHost, lab_folders
from tests.lab.namespaces import LabFailed
from tests.lab.user import NewUser, processes_of_runs

ROWS = Path(__file__).with_name("third_party.json")
COLUMNS = ("starts", "follows", "restarts", "hangs", "stops")
COMMON = ("OMP_NUM_THREADS=1", "HF_HUB_OFFLINE=1", "HF_DATASETS_OFFLINE=1")
SLOTS = {"h0": 1, "h1": 2, "h2": 1}
KILLED, HALTED = (2, "h1"), (3, "h2")
"""A rank, and its host."""
START_S, SAVE_S, END_S, HANG_S = 600.0, 200.0, 300.0, 300.0
STALL_AFTER = "30s"
STEPS_SEEN = 3
VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*=")
Line = dict[str, Any]
Row = dict[str, Any]


class Missed(AssertionError):
    """What was waited for did not come."""


class Trial:
    """One script on three hosts, from its start to its hang."""

    def __init__(self, row: Row, *, folder: Path) -> None:
        self._row, self._folder = row, folder
        hosts: Any = {"binds": [*lab_folders(), folder], "disk": "8g", "shm": "1g", "shared": {"/shared": "saves"}}
        self.lab = OwnLab(3, ttl_s=3000, **hosts)
        self.run_id = ""

    def bring(self) -> None:
        """The script and what lies beside it, and a cluster file."""
        self.user = NewUser(self.lab.user)
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as tar:
            for name in self._row["files"]:
                tar.add(self._folder / "src" / self._row["folder"] / name, f"project/{name}")
            for name in self._row.get("beside", ()):
                tar.add(self._folder / "in" / name, f"project/{name}")
        self.user.desk.write("project.tgz", packed.getvalue())
        self.user.desk.check(["tar", "xzf", "project.tgz"])
        python = self._folder / "venv" / self._row["venv"] / "bin/python"
        self.user.describes(*SLOTS, python=python)
        text = self.user.desk.read("cluster.yaml").decode()
        text = re.sub(r"(name: h1\b(?:.|\n)*?slots: )1", r"\g<1>2", text)
        self.user.desk.write("cluster.yaml", text)

    def start(self) -> None:
        """`gangline run`."""
        words = self._row["words"].replace("{in}", str(self._folder / "in")).split()
        first = next(number for number, word in enumerate(words) if not VARIABLE.match(word))
        options = ["--dir", "project", "--detach", "--restarts", "1", "--stall-after", STALL_AFTER]
        if self._row.get("resume"):
            options.append(f"--resume-flag={self._row['resume']}")
        command = [*COMMON, *words[:first], *words[first:]]
        done = self.user.types("run", *options, "--", *command, code=None, timeout_s=600)
        if done.returncode:
            raise Missed(done.stderr.strip()[-1500:])
        self.run_id = done.stdout.split()[-1]

    def row(self) -> Row:
        """The state of the run, as its supervisor wrote it: `gangline ps` would take half a second of a core."""
        path = f".local/state/gangline/runs/{self.run_id}/state.json"
        found: Row = json.loads(self.lab.user.read(path))
        return found

    def until(self, condition: Callable[[], Any], what: str, *, seconds: float) -> Any:
        """Wait for something; raises Missed if the run ends before, or the time is over."""
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            row = self.row()
            if row["phase"] in {"failed", "finished", "stopped", "lost"}:
                raise Missed(f"{what}: the run is {row['phase']}: {self._why(row)}")
            if time.monotonic() > deadline:
                raise Missed(f"{what}: not within {seconds:.0f} s; the run is {row['phase']}")
            time.sleep(2.0)
        return found

    def figures(self, attempt: int) -> list[Line]:
        """Lines of metrics.jsonl since the attempt began."""
        text = self.lab["h0"].run(["cat", f"{self._home}/metrics.jsonl"]).stdout
        began = self.lab["h0"].run(["stat", "-c", "%Y", f"{self._home}/attempts/{attempt}/rank-0.pid"]).stdout.strip()
        if not began:
            return []
        lines = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(int(began)))
        return [line for line in lines if line["kind"] == "step" and line["time"] >= stamp]

    def saves(self) -> dict[str, float]:
        """What the script has saved -> when."""
        pattern = self._row.get("saved")
        if not pattern:
            return {}
        script = f'for each in /shared/out/{pattern}; do [ -e "$each" ] && stat -c "%Y %n" "$each"; done; true'
        lines = self.lab["h0"].run(["sh", "-c", script]).stdout.splitlines()
        return {name: float(when) for when, name in (line.split(maxsplit=1) for line in lines)}

    def pid(self, rank: int, host: str) -> int:
        """Of a rank of the newest attempt, on its host."""
        path = f"{self._home}/attempts/{self.row()['attempt']}/rank-{rank}.pid"
        return int(json.loads(self.lab[host].read(path))["pid"])

    def log(self, rank: int, host: str, *, attempt: int) -> str:
        """What a rank has printed."""
        path = f"{self._home}/attempts/{attempt}/rank-{rank}.log"
        text: str = self.lab[host].run(["tail", "-c", "200000", path]).stdout
        return text

    def left(self) -> list[str]:
        """Processes of the run on any host."""
        return [line for host in self.lab.hosts for line in processes_of_runs(host)]

    @property
    def hosts(self) -> list[LabHost]:
        """All of them."""
        return self.lab.hosts

    @property
    def _home(self) -> str:
        return f"gangline/runs/{self.run_id}"

    @staticmethod
    def _why(row: Row) -> str:
        error = row.get("error") or {}
        return " | ".join(str(error.get(name, "")) for name in ("what", "seen"))[:1500]

    # --- the five things, in the order in which they can be seen

    def starts(self) -> str:
        """All four ranks are there, and rank 0 has done something that can be seen."""
        begun = time.monotonic()
        self.start()
        self.until(lambda: self.row()["phase"] == "running", "it runs", seconds=START_S)
        places = [(0, "h0"), (1, "h1"), (2, "h1"), (3, "h2")]
        self.until(lambda: all(self._is_there(*place) for place in places), "four ranks", seconds=START_S)
        return f"4 ranks after {time.monotonic() - begun:.0f} s"

    def follows(self) -> str:
        """A step that gets on."""

        def seen() -> Line | None:
            lines = self.figures(1)
            steps = {line["step"] for line in lines}
            return lines[-1] if len(steps) >= STEPS_SEEN else None

        last = self.until(seen, "steps", seconds=START_S)
        names = [
            name for name in ("step", "steps", "loss", "learning_rate", "tokens_per_s") if last.get(name) is not None
        ]
        return f"{', '.join(names)} from {last.get('source', 'hooks')}; step {last['step']}"

    def restarts(self) -> str:
        """SIGKILL after a save; the next attempt begins there."""
        if not self._row.get("resume"):
            self._kill()
            lines = self.until(lambda: self.figures(2), "the second attempt", seconds=START_S)
            why = self._row.get("no_flag", "it has no flag to resume")
            return f"{why}: the next attempt, from its beginning, is at step {lines[0]['step']}"
        self.until(self.saves, "a save", seconds=SAVE_S)
        time.sleep(3.0)  # until it is whole
        named = re.search(r"\d+$", self._row["resume"])
        saved = int(named[0]) if named else max(map(_number, self.saves()))
        self._kill()
        lines = self.until(lambda: [line for line in self.figures(2) if line["step"] > 0], "a step", seconds=START_S)
        first = lines[0]["step"]
        said = re.search(r"(?i)[^\r\n]*resum[^\r\n]*", self.log(0, "h0", attempt=2))
        if lines[0].get("source") == "output" and first < saved:
            raise Missed(f"saved at step {saved}, and the next attempt began at step {first}")
        if lines[0].get("source") != "output" and said is None:
            raise Missed(f"saved at step {saved}, and the next attempt does not say that it resumed")
        told = f"; it says: {said[0].strip()[:100]}" if said else ""
        return f"from the save of step {saved}; the first step by {lines[0]['source']} is {first}{told}"

    def _kill(self) -> None:
        rank, host = KILLED
        self.lab[host].check(["kill", "-9", str(self.pid(rank, host))])
        self.until(lambda: self.row()["attempt"] == 2, "another attempt", seconds=END_S)

    def stops(self) -> str:
        """In good order, with what was saved."""
        self._be_at_work()
        before, begun = self.saves(), time.monotonic()
        self.user.types("stop", self.run_id, timeout_s=END_S)
        took = time.monotonic() - begun
        phase, left, after = self.row()["phase"], self.left(), self.saves()
        if phase != "stopped" or left:
            raise Missed(f"the run is {phase}: {self._why(self.row())}; left {left}")
        new = sorted(set(after) - set(before), key=_number)
        if not after:
            none = "it has saved nothing yet" if self._row.get("saved") else "it saves nothing on a stop"
            return f"after {took:.0f} s, nothing is left; {none}"
        kept = f"meanwhile it saved {new[-1].rpartition('/')[2]}" if new else "has its saves of before"
        return f"after {took:.0f} s, nothing is left; {kept}"

    def hangs(self) -> str:
        """A rank is stopped until somebody is told of it, and then goes on."""
        self._be_at_work()
        rank, host = HALTED
        pid = str(self.pid(rank, host))
        begun = time.monotonic()
        self.lab[host].check(["kill", "-STOP", pid])
        wanted = re.compile(rf"rank {rank} on {host}[^|]{{0,200}}stopped")
        try:
            while time.monotonic() - begun < HANG_S:
                found = wanted.search(told := self._told())
                if found:
                    return f"after {time.monotonic() - begun:.0f} s: {found[0][:160]}"
                time.sleep(2.0)
        finally:
            self.lab[host].run(["kill", "-CONT", pid])
        raise Missed(f"rank {rank} on {host} is not named: {told[-800:]}")

    def _be_at_work(self) -> None:
        """Start anew if the run has ended, because it could not resume for example."""
        if self.row()["phase"] == "running":
            return
        self.start()
        self.until(lambda: len(self.figures(1)) > 1, "it works", seconds=START_S)

    def _told(self) -> str:
        """What the supervisor wrote of the run."""
        lines = self.lab.user.run(["cat", f".local/state/gangline/runs/{self.run_id}/events.jsonl"]).stdout.splitlines()
        return " | ".join([self._why(self.row()), *lines])

    def _is_there(self, rank: int, host: str) -> bool:
        return self.lab[host].exists(f"{self._home}/attempts/1/rank-{rank}.pid")


def _number(name: str) -> int:
    return int(re.findall(r"\d+", name)[-1])


def try_one(name: str, row: Row, *, folder: Path) -> Line:
    """One case's line."""
    line: Line = {"case": name, "project": row["project"], "version": row["version"], "commit": commit()}
    if row.get("gpu"):
        return {**line, "gpu": row["gpu"]}
    trial = Trial(row, folder=folder)
    begun = time.monotonic()
    with trial.lab:
        trial.bring()
        for column in COLUMNS:
            try:
                line[column] = {"ok": True, "seen": getattr(trial, column)()}
            except (AssertionError, OSError, LabFailed) as error:
                line[column] = {"ok": False, "seen": str(error)[-1500:]}
            sys.stderr.write(f"{name} {column}: {line[column]}\n")
            if column == "starts" and not line[column]["ok"]:
                break
        if not all(line.get(column, {}).get("ok") for column in COLUMNS) and trial.run_id:
            line["log"] = trial.log(0, "h0", attempt=trial.row()["attempt"] or 1)[-3000:]
    return {**line, "took_s": round(time.monotonic() - begun)}


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Scripts of other projects below gangline run.")
    parser.add_argument("--from", dest="folder", type=Path, help="what holds src, venv and in")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", metavar="CASE")
    args = parser.parse_args(argv)
    rows: dict[str, Row] = json.loads(ROWS.read_text())
    have = {line["case"] for line in read(args.out)}
    for name in args.only or rows:
        if name in have:
            continue
        line = try_one(name, rows[name], folder=args.folder.resolve())
        with args.out.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")
    lines = [line for line in read(args.out) if "gpu" not in line]
    return int(not all(line.get(column, {}).get("ok") for line in lines for column in COLUMNS))


if __name__ == "__main__":
    sys.exit(main())
