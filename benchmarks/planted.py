"""Sixty planted misconfigurations and fifteen healthy variants: what does `gangline check` find?

    python -m benchmarks.planted --out planted.jsonl            # as root, for the lab
    python -m benchmarks.planted --out planted.jsonl --shown --only W01 W02 --findings

Every case is a lab of two or three hosts with real sshd, in which one thing is wrong (tests/lab/planted). The user's
computer there runs `gangline check cluster.yaml --json`. One JSON line per case; cases that the file has already are
passed over, so that a run can be continued, but for those where the command broke: the last line of a case counts.
A row is right if its finding is shown as a failure or a warning, a healthy variant if the command worked and shows no
failure.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.lab.planted.listed import PLANTED
from tests.lab.planted.plants import FILE, HEALTHY, PLANTS, Scene, scene_of

ROOT = Path(__file__).resolve().parents[1]
"""The code that is looked at is the one beside this file."""
TIMEOUT_S = 180.0
ANSWERS = (0, 3, 4)
"""Exit codes of a command that has looked: well, a failure, a host that does not answer."""

Line = dict[str, Any]


def main() -> int:
    """Do every case that the file does not have; 0 if the bar is met by all cases in the file."""
    arguments = _arguments()
    held_out = {row.name: row.held_out for row in PLANTED} | dict.fromkeys(HEALTHY, False)
    done = {name for name, line in read(arguments.out).items() if line["exit"] in ANSWERS}
    rows = [row.name for row in PLANTED if arguments.held_out in {None, row.held_out}]
    names = arguments.only or [*rows, *(HEALTHY if arguments.healthy else [])]
    for name in [name for name in names if name not in done]:
        line = {**try_case(name), "held_out": held_out[name], "commit": _commit()}
        with arguments.out.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")
        _print(line, with_findings=arguments.findings)
    return _print_summary([*read(arguments.out).values()])


def try_case(name: str) -> Line:
    """Build one lab, look at it with `gangline check`, and compare."""
    row = next((row for row in PLANTED if row.name == name), None)
    plant = HEALTHY[name] if row is None else PLANTS[name]
    with scene_of(plant) as scene:
        start = time.monotonic()
        report = check(scene)
        seconds = time.monotonic() - start
    found = shown(report["findings"])
    is_healthy = not found["fail"] and report["exit"] == 0
    about_it = shown([finding for finding in report["findings"] if not {*finding["hosts"]} & {*plant.spared}])
    return {
        "name": name,
        "words": plant.words if row is None else row.words,
        "expected": "no failure" if row is None else row.finding,
        **found,
        "right": is_healthy if row is None else row.finding in about_it["fail"] + about_it["warn"],
        "seconds": round(seconds, 2),
        **report,
    }


def check(scene: Scene) -> Line:
    """Exit code, findings, and what was said instead of findings."""
    argv = ["gangline", "check", FILE, "--json", *scene.words]
    try:
        done = scene.desk.run(argv, env={"PYTHONPATH": str(ROOT / "src")}, timeout_s=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return {"exit": None, "findings": [], "said": f"nothing in {TIMEOUT_S:.0f} s"}
    try:
        findings = json.loads(done.stdout)["findings"]
    except (ValueError, KeyError, TypeError):
        findings = []
    return {"exit": done.returncode, "findings": findings, "said": done.stderr[-3000:]}


def shown(findings: list[Line]) -> dict[str, list[str]]:
    """Ids by severity, each once."""
    by_severity = {"fail": [], "warn": []}
    for finding in findings:
        ids = by_severity.setdefault(finding["severity"], [])
        if finding["id"] not in ids:
            ids.append(finding["id"])
    return {severity: by_severity[severity] for severity in ("fail", "warn")}


def read(path: Path) -> dict[str, Line]:
    """What the file has, by name; a line that was cut off is left out."""
    lines: dict[str, Line] = {}
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        lines[line["name"]] = line
    return lines


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[*PLANTS, *HEALTHY], help="only these cases")
    parser.add_argument("--findings", action="store_true", help="print the findings of cases that are not right")
    parser.add_argument("--no-healthy", dest="healthy", action="store_false", help="only the misconfigurations")
    half = parser.add_mutually_exclusive_group()
    half.add_argument("--held-out", action="store_const", const=True, default=None, help="only rows that are held out")
    half.add_argument("--shown", dest="held_out", action="store_const", const=False, help="only rows that are not")
    return parser.parse_args()


def _print(line: Line, *, with_findings: bool) -> None:
    verdict = "right" if line["right"] else "WRONG"
    ids = " ".join([*line["fail"], *(f"({each})" for each in line["warn"])]) or "nothing"
    print(f"{line['name']}  {verdict}  {line['seconds']:6.1f} s  wanted {line['expected']:12}  found {ids}", flush=True)
    if with_findings and not line["right"]:
        print(json.dumps(line["findings"], indent=1), line["said"], f"exit {line['exit']}", sep="\n", flush=True)


def _print_summary(rows: list[Line]) -> int:
    planted = [line for line in rows if line["name"] in PLANTS]
    healthy = [line for line in rows if line["name"] in HEALTHY]
    held_out = [line for line in planted if line["held_out"]]
    print()
    for title, part in (("planted", planted), ("of these held out", held_out), ("healthy without failure", healthy)):
        right = sum(line["right"] for line in part)
        print(f"{title:24} {right:3} of {len(part)}")
    missed = [line["name"] for line in rows if not line["right"]]
    print(f"{'not right':24} {' '.join(missed) or '-'}")
    enough = sum(line["right"] for line in planted) >= 0.95 * len(planted)
    return 0 if enough and all(line["right"] for line in healthy) else 1


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
