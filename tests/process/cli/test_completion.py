"""`gangline completion SHELL` in the real shells."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gangline
from gangline.cli.completion import SCRIPTS, Shell

ASK = f'gangline() {{ {sys.executable} -m gangline.cli.main "$@"; }}\n'
BASH = """
ask() { COMP_LINE=$1; COMP_POINT=${#1}; COMPREPLY=(); _gangline; printf '%s\\n' "${COMPREPLY[@]}"; }
compopt() { :; }
"""
ZSH = """
compdef() { :; }
compadd() { print -l -- ${(P)@[-1]}; }
_files() { print FILES; }
"""


def run(program, text, folder):
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    source = str(Path(gangline.__file__).parents[1])
    env = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "GANGLINE_HOME": str(folder / "home"), "PYTHONPATH": source}
    argv = {"bash": ["--norc"], "zsh": ["-f"], "fish": ["--no-config"]}[program]
    done = subprocess.run(
        [program, *argv, "-c", text], env=env, cwd=folder, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == ""
    return done.stdout.split("\n")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "home" / "runs" / "calm-otter-7").mkdir(parents=True)
    (tmp_path / "job.yaml").touch()
    return tmp_path


def test_bash(folder):
    lines = ["gangline tr", "gangline attach ca", "gangline train jo", "gangline train job.yaml method=q"]
    text = ASK + SCRIPTS[Shell.bash] + BASH + "".join(f"ask '{line}'\n" for line in lines)
    # bash takes `method=q` for three words, so only what follows `=` is replaced
    assert run("bash", text, folder) == ["train", "calm-otter-7", "job.yaml", "qlora", ""]


def test_zsh(folder):
    lines = ["(gangline tr)", "(gangline attach ca)", "(gangline train jo)", "(gangline train job.yaml method.k)"]
    asked = "".join(f"words={line}; CURRENT=$#words; _gangline\n" for line in lines)
    script = SCRIPTS[Shell.zsh]
    assert run("zsh", ASK + ZSH + script + asked, folder) == ["train", "calm-otter-7", "FILES", "method.kind=", ""]


def test_fish(folder):
    ask = f"function gangline; {sys.executable} -m gangline.cli.main $argv; end\n"
    lines = ["gangline tr", "gangline attach ca", "gangline train jo", "gangline train job.yaml method=q"]
    text = ask + SCRIPTS[Shell.fish] + "".join(f"complete -C '{line}'\n" for line in lines)
    found = [line.partition("\t")[0] for line in run("fish", text, folder)]
    assert found == ["train", "calm-otter-7", "job.yaml", "method=qlora", ""]
