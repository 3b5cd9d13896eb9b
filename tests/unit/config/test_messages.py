"""What a person reads who made a mistake: each folder of fixtures/ is one file with mistakes and the whole report.

`python tests/unit/config/test_messages.py` writes the reports anew; read the difference before you keep it.
"""

import contextlib
import os
import re
import shutil
import tempfile
from pathlib import Path

import pytest

from gangline.config.load import load_cluster, load_job
from gangline.errors import SpecError

FIXTURES = Path(__file__).parent / "fixtures"
CASES = sorted(folder.name for folder in FIXTURES.iterdir())


def lay_out(case, folder):
    """The case's files, beside a model and some data that exist."""
    shutil.copytree(FIXTURES / case, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("expected.txt"))
    (folder / "llama").mkdir()
    (folder / "data").mkdir()
    for name in ("train.jsonl", "test.jsonl"):
        (folder / "data" / name).touch()


def report(case, folder):
    lay_out(case, folder)
    file = next(Path(name) for name in ("job.yaml", "cluster.yaml", "hostfile") if (folder / name).exists())
    overrides_file = folder / "overrides.txt"
    overrides = overrides_file.read_text().splitlines() if overrides_file.exists() else []
    with changed_folder(folder):
        try:
            load_job(file, overrides) if file.stem == "job" else load_cluster(file, overrides, home=folder / "home")
        except SpecError as error:
            return f"{error}\n"
    return "no mistake was found\n"


@contextlib.contextmanager
def changed_folder(folder):
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@pytest.mark.parametrize("case", CASES)
def test_report(case, tmp_path):
    assert report(case, tmp_path) == (FIXTURES / case / "expected.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("case", CASES)
def test_every_mistake_has_its_place_what_was_seen_and_a_fix(case):
    text = (FIXTURES / case / "expected.txt").read_text(encoding="utf-8")
    blocks = [block.splitlines() for block in text.rstrip("\n").split("\n\n")]
    if " mistakes in " in text.splitlines()[0]:
        assert int(text.split()[0]) == len(blocks) - 1
        blocks = blocks[1:]
    for place, seen, fix in blocks:
        assert place.startswith(("job.yaml:", "cluster.yaml:", "hostfile:", "command line: "))
        assert re.fullmatch(r"  seen  \S.{6,}", seen)
        assert re.fullmatch(r"  fix   \S.{6,}", fix)


@pytest.mark.parametrize("case", CASES)
def test_a_report_is_safe_to_print(case):
    text = (FIXTURES / case / "expected.txt").read_text(encoding="utf-8")
    assert all(character.isprintable() or character == "\n" for character in text)


def write_reports():
    for case in CASES:
        with tempfile.TemporaryDirectory() as name:
            text = report(case, Path(name))
        (FIXTURES / case / "expected.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_reports()
