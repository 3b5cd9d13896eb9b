"""Every way a start fails between hosts: does `gangline check` find it, and if not, does the start say it in 30 s?

    python -m benchmarks.start_failures --out start.jsonl            # as root, for the lab
    python -m benchmarks.start_failures --out start.jsonl --only data-ports lo

Each row (start_cases.py) is tried twice, in a lab of three hosts of its own with real sshd, torchrun and gloo:

(a) planted before: the user's computer runs `gangline check`; its findings, and its seconds.
(b) planted behind the back of the checks, once they have passed: the user's computer runs `gangline run -- script.py`
    (or `train`), and what it prints is read line by line until one sentence names host and cause. The seconds count
    from the fault, or from when the ranks begin to join if that is later. Rows without such a sentence have to work in
    spite of the fault.

One JSON line per row; rows that the file has already are passed over, but for those that did not come to it. Exit
code 0 if every row was found by the check or named in time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.start_cases import CASES, PROJECT, ROOT, SCRIPT, Case, Stage
from benchmarks.start_moments import RUNS, Console, GaveUp, plant_late
from tests.lab.hosts import Lab, lab_folders
from tests.lab.namespaces import end

BAR_S = 30.0
CHECK_S = 120.0
NAME_S = 90.0
"""How long a sentence is waited for."""
END_S = 20.0
"""How long the run may then take to end by itself, before it is told to."""
BUG, TRACEBACK = "this is a bug in gangline", ".local/state/gangline/last-traceback.txt"
JOB = """\
name: tiny
model: ./model
method: {kind: lora, rank: 4}
data: {train: ./a.txt, sequence_length: 64}
batch: 6
micro_batch: 2
steps: 5
"""

Line = dict[str, Any]


def main() -> int:
    """Try every row that the file does not have."""
    arguments = _arguments()
    done = {name for name, line in read(arguments.out).items() if "problem" not in line["start"]}
    for case in CASES:
        if case.name in done or (arguments.only and case.name not in arguments.only):
            continue
        line = try_case(case)
        with arguments.out.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")
        print(_row(line), flush=True)
        if arguments.said:
            print(line["start"].get("said", ""), flush=True)
    return _summary(read(arguments.out))


def try_case(case: Case) -> Line:
    """Both tries of one row."""
    return {
        "case": case.name,
        "words": case.words,
        "alone": case.alone,
        "check": try_check(case) if case.before else None,
        "start": try_start(case),
        "load": os.getloadavg()[0],
        "commit": _commit(),
    }


def try_check(case: Case) -> Line:
    """What the checks find if it is wrong before."""
    assert case.before is not None
    with staged(case) as stage:
        case.before(stage)
        stage.desk.write(f"{PROJECT}/cluster.yaml", json.dumps(stage.file))
        begun = time.monotonic()
        done = stage.desk.run(["gangline", "check", "--json"], cwd=stage.desk.home / PROJECT, timeout_s=CHECK_S)
        seconds = time.monotonic() - begun
    try:
        findings = json.loads(done.stdout)["findings"]
    except (ValueError, KeyError):
        return {"right": False, "ids": [], "seconds": seconds, "said": done.stderr[-3000:]}
    found = {each["id"]: each["severity"] for each in findings if each["severity"] in {"warn", "fail"}}
    right = [name for name in case.ids if name in found]
    severity = found[right[0]] if right else None
    return {"right": bool(right), "ids": found, "found": right, "severity": severity, "seconds": round(seconds, 2)}


def try_start(case: Case) -> Line:
    """What is said of a start that goes wrong although the checks have passed."""
    with staged(case) as stage:
        if case.config:
            case.config(stage)
        stage.desk.write(f"{PROJECT}/cluster.yaml", json.dumps(stage.file))
        write_project(stage, case)
        words = ["train", "job.yaml"] if case.program == "train" else ["run", "--", "script.py", *case.script]
        console = Console(stage.desk, ["gangline", *words])
        try:
            begun = plant_late(stage, case, console)
            line = _listen(case, console, begun)
            line["ended"] = _end(stage, console, begun)
        except GaveUp as problem:
            line = {"right": False, "problem": str(problem)}
        finally:
            end(console.process)
        if BUG in console.text():
            line |= {"right": False, "problem": stage.desk.read(TRACEBACK).decode()}
        return {**line, "exit": console.process.returncode, "said": console.text()[-6000:]}


def _listen(case: Case, console: Console, begun: float) -> Line:
    """The first sentence that names host and cause, and its seconds; or whether all went well."""
    deadline = time.monotonic() + NAME_S
    while time.monotonic() < deadline:
        over = console.has_ended
        for when, who, text in console.sentences():
            if when >= begun and case.names(text) and (who == "board" or over):
                seconds = round(when - begun, 1)
                return {"right": seconds <= BAR_S, "by": who, "seconds": seconds, "sentence": text}
        if over:
            works = not case.named and console.process.returncode == 0
            return {"right": works, "by": "works" if works else None, "seconds": None, "sentence": None}
        time.sleep(0.05)
    return {"right": False, "by": None, "seconds": None, "sentence": None}


def _end(stage: Stage, console: Console, begun: float) -> Line:
    """How the run ends: by itself, or because it is told to."""
    deadline = time.monotonic() + END_S
    while not console.has_ended and time.monotonic() < deadline:
        time.sleep(0.1)
    if console.has_ended:
        return {"by": "itself", "seconds": round(console.lines[-1][0] - begun, 1) if console.lines else None}
    asked = time.monotonic()
    run_id = stage.desk.check(["ls", RUNS]).split()[0]
    done = stage.desk.run(["gangline", "stop", "--now", run_id], timeout_s=150)
    return {"by": "stop --now", "exit": done.returncode, "seconds": round(time.monotonic() - asked, 1)}


@contextmanager
def staged(case: Case) -> Iterator[Stage]:
    """A lab for one try."""
    with Lab(3, binds=lab_folders(), meshed=True, **case.lab) as lab:
        yield Stage(lab)


def write_project(stage: Stage, case: Case) -> None:
    """The user's folder on the user's computer."""
    if case.program == "run":
        stage.desk.write(f"{PROJECT}/script.py", SCRIPT)
        return
    for path, data in _job_files().items():
        stage.desk.write(f"{PROJECT}/{path}", data)


def _job_files() -> dict[str, bytes]:
    from tests.train.tiny import write_model, write_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for write in (write_model, write_tokenizer):
            write(root / "model")
        (root / "a.txt").write_text("".join(f"fox {number} jumps over the lazy dog\n\n" for number in range(2000)))
        (root / "job.yaml").write_text(JOB)
        return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def read(path: Path) -> dict[str, Line]:
    """What the file has, by name of the row; the last line of a row counts."""
    lines: dict[str, Line] = {}
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        with suppress(ValueError):
            line = json.loads(text)
            lines[line["case"]] = line
    return lines


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", metavar="ROW", choices=[case.name for case in CASES])
    parser.add_argument("--said", action="store_true", help="print all that the start said")
    return parser.parse_args()


def _row(line: Line) -> str:
    check, start = line["check"], line["start"]
    found = "-" if check is None else f"{' '.join(check.get('found', ())) or 'NO'} {check['seconds']:.1f} s"
    seconds = "" if start.get("seconds") is None else f" {start['seconds']:.1f} s"
    named = f"{start.get('by') or 'NO'}{seconds}"
    words = (start.get("sentence") or start.get("problem") or "").replace("\n", " ")
    return f"{line['case']:17} {found:22} {named:14} {words[:200]}"


def _summary(lines: dict[str, Line]) -> int:
    print(f"\n{'row':17} {'found by check':22} {'named by':14} sentence")
    for line in lines.values():
        print(_row(line))
    found = {name for name, line in lines.items() if line["check"] and line["check"]["right"]}
    named = {name for name, line in lines.items() if line["start"]["right"]}
    missed = {name for name, line in lines.items() if line["check"]} - found
    print(f"\nfound by the check: {len(found)}; not: {' '.join(sorted(missed)) or '-'}")
    print(f"named in {BAR_S:.0f} s, or harmless: {len(named)}; not: {' '.join(sorted(set(lines) - named)) or '-'}")
    neither = sorted(set(lines) - found - named)
    print(f"neither: {' '.join(neither) or '-'}")
    return 1 if neither else 0


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
