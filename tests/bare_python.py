"""A Python that has gangline and what it needs for planning, and nothing of the trainer: `pip install gangline`."""

import json
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

SOURCE = Path(__file__).parents[1] / "src"
PROGRAMS = {"pip", "uv"}


def needed():
    """The packages of gangline without an extra, and what these need."""
    found, queue = set(), ["gangline"]
    while queue:
        for text in metadata.requires(queue.pop()) or []:
            requirement = Requirement(text)
            name = requirement.name.lower()
            is_needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if is_needed and name not in found | PROGRAMS:
                found.add(name)
                queue.append(name)
    return sorted(found)


def bare_python(folder):
    """The path of such a Python: a virtual environment in `folder` with links to the packages of this one."""
    venv.create(folder, with_pip=False, symlinks=True)
    site = next(folder.glob("lib/python3*/site-packages"))
    for name in needed():
        for file in metadata.files(name):
            top = Path(file).parts[0]
            if top not in {"..", "__pycache__"} and not (site / top).exists():
                (site / top).symlink_to(Path(metadata.distribution(name).locate_file(top)).resolve())
    info = site / "gangline-0.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: gangline\nVersion: 0\n")
    site.joinpath("gangline.pth").write_text(f"{SOURCE}\n")
    return folder / "bin" / "python"


VERBS = """
import contextlib, io, json, sys
from gangline.cli.main import main
before = json.loads(sys.argv[1])
for words in json.loads(sys.argv[2]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        exec(before)  # noqa: S102
        code = main(words)
    print(json.dumps([code, out.getvalue(), err.getvalue()]), flush=True)
"""


def run_verbs(python, verbs, *, folder, home, before=""):
    """Run each list of words as `gangline WORDS` in one process; exit code, stdout and stderr of each.

    before: Python code that is executed first.
    """
    done = subprocess.run(
        [python, "-P" if sys.version_info >= (3, 11) else "-s", "-c", VERBS, json.dumps(before), json.dumps(verbs)],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "GANGLINE_HOME": str(home)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(answers) == len(verbs), done.stdout + done.stderr
    return answers, done.stderr
