"""Run a short set of tests with the lowest and with the newest versions of the tested range: `make versions`.

    python -m benchmarks.versions                    both ends, each in a virtual environment of its own below .versions
    python -m benchmarks.versions lowest             one of them
    python -m benchmarks.versions lowest -- -k nf4   with words for pytest in place of the tests below

Lowest: the exact versions of `gangline.tested`. Newest: what pip finds below its upper bounds. The last line of each
end is JSON, with the versions that were installed and how many tests passed.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
import venv
from collections.abc import Sequence
from pathlib import Path

from gangline.tested import TESTED

ROOT = Path(__file__).parents[1]
ENDS = ("lowest", "newest")
TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "jsonschema")
TESTS = (
    "tests/train/test_compat.py",
    "tests/train/test_model.py",
    "tests/train/test_export.py",
    "tests/train/test_nf4.py",
    "tests/train/test_adam8.py",
    "tests/train/data",
    "tests/unit/config",
    "--deselect=tests/unit/config/test_written_files.py",  # the newest pydantic writes the schema, in words of its own
    "tests/unit/provision/test_lock.py",
    "tests/process/provision/test_environment.py",
    "tests/train/test_contract.py",
)
"""Private names, loading, export, LoRA and QLoRA, data, the words of the user, environments, and the contract of all
strategies."""


def requirements(end: str) -> list[str]:
    """What pip is asked for: all of it at once, so that nothing moves a version that is there already."""
    if end == "lowest":
        return [f"{each.package}=={each.lowest}" for each in TESTED]
    return [f"{each.package}>={each.lowest},<{each.below}" for each in TESTED]


def make(end: str, folder: Path) -> Path:
    """The Python of an environment with the versions of one end. It is made anew once the requirements change."""
    python, stamp = folder / "bin" / "python", folder / "requirements.txt"
    wanted = "\n".join([*requirements(end), *TOOLS])
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    venv.create(folder, with_pip=True, clear=True)
    torch = next(row for row in requirements(end) if row.startswith("torch"))
    pip = [python, "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, torch], check=True)  # alone: the largest download is not repeated when a row fails
    subprocess.run([*pip, *requirements(end), *TOOLS], check=True)
    subprocess.run([*pip, "--no-deps", "--editable", ROOT], check=True)
    subprocess.run([python, "-m", "pip", "check"], check=True)
    stamp.write_text(wanted)
    return python


def installed(python: Path) -> dict[str, str]:
    """Package -> version."""
    rows = json.loads(subprocess.check_output([python, "-m", "pip", "list", "--format", "json"]))
    found = {row["name"].lower(): row["version"] for row in rows}
    return {each.package: found[each.package] for each in TESTED}


def run(end: str, folder: Path, words: Sequence[str]) -> int:
    """Run the tests with one end; 0 if all of them passed."""
    python = make(end, folder)
    started = time.monotonic()
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", "--dist", "loadfile", *words]
    told = subprocess.run(
        command, check=False, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE
    )
    text = told.stdout.decode(errors="replace")
    print(text, flush=True)
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)", text)}
    line = {"end": end, "returncode": told.returncode, "seconds": round(time.monotonic() - started), **counts}
    print(json.dumps({**line, "versions": installed(python)}), flush=True)
    return told.returncode


def main(argv: Sequence[str]) -> int:
    """0 if every test passed with each end."""
    own, words = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = argparse.ArgumentParser(prog="python -m benchmarks.versions", description=__doc__.splitlines()[0])
    parser.add_argument("ends", nargs="*", metavar="lowest|newest", help="both, unless one is named")
    parser.add_argument("--folder", type=Path, default=ROOT / ".versions", help="where the environments are")
    options = parser.parse_args(own)
    if strange := set(options.ends) - set(ENDS):
        parser.error(f"expected lowest or newest, saw {', '.join(sorted(strange))}")
    failed = [end for end in options.ends or ENDS if run(end, options.folder / end, words or TESTS)]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
