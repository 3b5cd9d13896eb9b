"""Random sequences of changes, undos, kills and changes by others: nobody's line is lost, and the journal is true."""

import base64
import hashlib
import json
import os
import random
import signal
from pathlib import Path

import pytest

from gangline.agent.prepare import host_changes
from gangline.agent.prepare.change_journal import Journal
from gangline.agent.prepare.host_changes import Staged
from gangline.agent.prepare.preparation import prepare
from gangline.agent.verbs import VerbFailed

FILES = ("etc/hosts", "etc/fstab", "etc/ssh/sshd_config")
STEPS = ("names", "limits", "access")
BASE = "first\nsecond\n"


def answers(root, request):
    """What the host half says, in this process."""
    try:
        return list(
            prepare({"scope": "root", "root_folder": str(root), "by": "alice@desk", "revert_s": None, **request})
        )
    except VerbFailed as failed:
        return [failed.record]


def in_child(work, kill_at):
    """Do it in a process that kills itself with SIGKILL at one of the points where something has just, or not yet, happened."""
    child = os.fork()
    if child == 0:
        left = [kill_at]

        def counted(function):
            def call(*args, **options):
                _count(left)
                value = function(*args, **options)
                _count(left)
                return value

            return call

        Journal.append = counted(Journal.append)
        Staged.place = counted(Staged.place)
        host_changes.execute = counted(host_changes.execute)
        work()
        os._exit(0)
    os.waitpid(child, 0)


def _count(left):
    left[0] -= 1
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)


class Host:
    """A folder that stands for a host, and what has to be true of it."""

    def __init__(self, root, dice):
        self.root, self.dice, self.number = root, dice, 0
        self.theirs = {name: [] for name in FILES}
        for name in FILES:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(BASE)

    def change(self):
        """A line of ours at the beginning or the end of a file, a new file, and a command."""
        self.number += 1
        name, line = self.dice.choice(FILES), f"ours {self.number}\n"
        before = (self.root / name).read_bytes()
        content = before + line.encode() if self.dice.random() < 0.5 else line.encode() + before
        new, switch = f"/etc/new{self.number}/file", str(self.root / f"etc/switch{self.number}")
        changes = [
            _file(f"/{name}", before, content),
            _file(new, None, line.encode()),
            {
                "kind": "command",
                "argv": ["touch", switch],
                "undo": ["rm", "-f", switch],
                "probe": ["ls", switch],
                "before": "",
                "after": switch,
            },
        ]
        self.dice.shuffle(changes)
        step = self.dice.choice(STEPS)
        self._maybe_killed({"do": "apply", "step": step, "txn": f"t{self.number}", "changes": changes})

    def undo(self, steps):
        """Some steps, or all."""
        shown = answers(self.root, {"do": "undo", "steps": steps, "dry": True, "expect": None})
        assert [each for each in shown if each["kind"] == "refused"] == []
        self._maybe_killed({"do": "undo", "steps": steps, "dry": False, "expect": shown[-1]["token"]})

    def _maybe_killed(self, request):
        if self.dice.random() < 0.5:
            in_child(lambda: answers(self.root, request), self.dice.randint(1, 16))
        else:
            answers(self.root, request)

    def other(self):
        """Somebody else adds a line."""
        self.number += 1
        name, line = self.dice.choice(FILES), f"theirs {self.number}\n"
        text = (self.root / name).read_text()
        (self.root / name).write_text(text + line if self.dice.random() < 0.5 else line + text)
        self.theirs[name].append(line)

    def check(self):
        """The journal says what is there, and nobody's line is lost."""
        standing = answers(self.root, {"do": "status"})
        assert [each for each in standing if each["kind"] == "error"] == []
        numbers = {
            each["what"].removeprefix("/etc/new").partition("/")[0] for each in standing if "/new" in each["what"]
        }
        files = {path.parent.name.removeprefix("new") for path in self.root.glob("etc/new*/file")}
        switches = {path.name.removeprefix("switch") for path in self.root.glob("etc/switch*")}
        lines = [line for name in FILES for line in (self.root / name).read_text().splitlines(keepends=True)]
        ours = {line.split()[1] for line in lines if line.startswith("ours")}
        assert numbers == files == switches == ours
        for name in FILES:
            text = (self.root / name).read_text().splitlines(keepends=True)
            assert sorted(line for line in text if line.startswith("theirs")) == sorted(self.theirs[name])
            assert [line for line in text if not line.startswith(("ours", "theirs"))] == BASE.splitlines(keepends=True)

    def left_over(self):
        """Files that nobody but a half-done change could have made."""
        return [str(path) for path in self.root.rglob("*gangline-t*")]


def _file(path, before, content):
    digest = None if before is None else hashlib.sha256(before).hexdigest()
    encoded = base64.b64encode(content).decode()
    return {"kind": "file", "path": path, "before": digest, "content": encoded, "mode": None}


@pytest.mark.parametrize("sequences", [range(12), pytest.param(range(12, 200), marks=pytest.mark.slow)])
@pytest.mark.timeout(900)
def test_random_sequences(tmp_path, sequences):
    for seed in sequences:
        dice = random.Random(seed)
        host = Host(Path(tmp_path / str(seed)), dice)
        for _ in range(8):
            act = dice.choice(["change", "change", "other", "undo", "undo all"])
            if act == "change":
                host.change()
            elif act == "other":
                host.other()
            else:
                host.undo(None if act == "undo all" else [dice.choice(STEPS)])
            try:
                host.check()
            except AssertionError as error:
                journal = (host.root / "var/lib/gangline/prepare/journal.jsonl").read_text()
                raise AssertionError(
                    f"seed {seed}: {error}\n{json.dumps(journal.splitlines()[-12:], indent=1)}"
                ) from error
        shown = answers(host.root, {"do": "undo", "steps": None, "dry": True, "expect": None})
        assert [each for each in shown if each["kind"] == "refused"] == [], f"seed {seed}"
        answers(host.root, {"do": "undo", "steps": None, "dry": False, "expect": shown[-1]["token"]})
        host.check()
        assert answers(host.root, {"do": "status"}) == []
        assert list(host.root.glob("etc/new*")) == []
        assert host.left_over() == []
