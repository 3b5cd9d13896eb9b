"""The questions of init on a real (pseudo) terminal."""

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 60
CHILD = """
import sys
from pathlib import Path
from gangline.cli.output import Terminal
from gangline.init.describe import InitQuestion, init
from gangline.errors import GanglineError
from tests.unit.init.world import World, home_lan

folder, *names = sys.argv[1:]
world = World(hosts=home_lan(), ssh_config=Path(folder, "config"))
try:
    init(InitQuestion(home=Path(folder), output=Path(folder, "cluster.yaml"), names=tuple(names)), console=Terminal(), deps=world.deps())
except GanglineError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


class Terminal:
    """A terminal with init in it."""

    def __init__(self, folder, *names):
        self.text = ""
        self._ours, theirs = pty.openpty()
        self._child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(folder), *names],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}", "TERM": "xterm", "COLUMNS": "200"},
        )
        os.close(theirs)

    def expect(self, words):
        """Read until these words stand there."""
        deadline = time.monotonic() + TIMEOUT_S
        while words not in self.text:
            assert select.select([self._ours], [], [], max(0, deadline - time.monotonic()))[0], self.text
            self.text += os.read(self._ours, 4096).decode()

    def type(self, words):
        os.write(self._ours, words.encode())

    def end(self):
        """The exit code."""
        while True:
            try:
                piece = os.read(self._ours, 4096)
            except OSError:  # Linux: the other end is closed
                break
            if not piece:
                break
            self.text += piece.decode()
        os.close(self._ours)
        return self._child.wait(TIMEOUT_S)

    def kill(self):
        self._child.kill()
        self._child.wait()


@pytest.fixture
def terminal(tmp_path):
    started = []

    def start(*names):
        started.append(Terminal(tmp_path, *names))
        return started[-1]

    yield start
    for each in started:
        each.kill()


def test_a_yes_writes_the_file(terminal, tmp_path):
    screen = terminal("pc1", "pc2", "pc3")
    screen.expect("trust 3 new keys? [y/N] ")
    assert "SHA256:" in screen.text
    screen.type("y\n")
    assert screen.end() == 0
    assert (tmp_path / "cluster.yaml").exists()


@pytest.mark.parametrize("typed", ["\n", "n\n", "\x04"])
def test_anything_else_writes_nothing(terminal, tmp_path, typed):
    screen = terminal("pc1")
    screen.expect("trust 1 new key? [y/N] ")
    screen.type(typed)
    assert screen.end() == 2
    assert not (tmp_path / "cluster.yaml").exists()


def test_without_names_the_hosts_of_ssh_config_are_offered(terminal, tmp_path):
    (tmp_path / "config").write_text("Host pc1 pc2\nHost *\n")
    screen = terminal()
    screen.expect("? [pc1 pc2] ")
    screen.type("\n")
    screen.expect("trust 2 new keys? [y/N] ")
    screen.type("yes\n")
    assert screen.end() == 0
    assert "name: pc2" in (tmp_path / "cluster.yaml").read_text()
