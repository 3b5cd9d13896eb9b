"""What `gangline plan` answers to the commands in the examples' READMEs, whole screens.

`python -m tests.unit.cli.test_plan_examples` writes them anew; read the difference before you keep it.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from gangline.cli.main import main

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden" / "plans"
EXAMPLES = ("home_lan", "two_by_eight", "slurm_llama70b", "zero3_four_by_eight")


def commands(example: str) -> list[str]:
    """The lines of a README's blocks; one that begins with dots goes on from the first."""
    text = (ROOT / "examples" / example / "README.md").read_text(encoding="utf-8")
    lines: list[str] = []
    for block in re.findall(r"```\n(.*?)```", text, flags=re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = " ".join(line.partition(" #")[0].split())
            lines.append(words.replace("...", lines[0]) if words.startswith("...") else words)
    return lines


CASES = [(example, number) for example in EXAMPLES for number in range(len(commands(example)))]


@contextlib.contextmanager
def inside(example: str, home: Path) -> Iterator[None]:
    """In the example's folder, with a home and a hub's cache that are empty."""
    before, variables = Path.cwd(), dict(os.environ)
    os.chdir(ROOT / "examples" / example)
    os.environ.update(GANGLINE_HOME=str(home), HF_HOME=str(home / "hub"), COLUMNS="120")
    os.environ.pop("HF_HUB_CACHE", None)
    try:
        yield
    finally:
        os.chdir(before)
        os.environ.clear()
        os.environ.update(variables)


def screen(example: str, number: int, home: Path) -> str:
    """The command, what it prints, and how it ends."""
    command = commands(example)[number]
    out, err = io.StringIO(), io.StringIO()
    with inside(example, home), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(shlex.split(command)[1:])
    return f"$ {command}\n{out.getvalue()}{err.getvalue()}exit code {code}\n"


@pytest.mark.parametrize(("example", "number"), CASES)
def test_the_screen_is_the_one_that_was_read(example: str, number: int, tmp_path: Path) -> None:
    assert screen(example, number, tmp_path) == (GOLDEN / f"{example}-{number}.txt").read_text(encoding="utf-8")


def test_the_screen_in_the_readme_is_one_of_them() -> None:
    screen, _ = (GOLDEN / "home_lan-1.txt").read_text(encoding="utf-8").split("exit code")
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert screen in re.sub(r" \\\n +", " ", page)


def test_every_example_ends_in_a_plan_or_says_what_instead() -> None:
    for example, number in CASES:
        text = (GOLDEN / f"{example}-{number}.txt").read_text(encoding="utf-8")
        assert text.endswith("exit code 0\n") or ("does not fit" in text and "\ninstead " in text)


if __name__ == "__main__":
    import tempfile

    GOLDEN.mkdir(parents=True, exist_ok=True)
    for name, index in CASES:
        with tempfile.TemporaryDirectory() as folder:
            (GOLDEN / f"{name}-{index}.txt").write_text(screen(name, index, Path(folder)), encoding="utf-8")
