"""Changes of a host in a folder that stands for its /: made whole, recorded, taken back, whatever happens in between."""

import base64
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.waiting import wait_until

ARGV = [sys.executable, "-m", "gangline.agent.prepare", "answer"]


def start(root, request):
    """The agent at work on a request."""
    process = subprocess.Popen(ARGV, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    body = {"scope": "root", "root_folder": str(root), "by": "alice@desk", "revert_s": None, **request}
    process.stdin.write(json.dumps(body).encode())
    process.stdin.close()
    return process


def ask(root, request):
    """Its answers."""
    process = start(root, request)
    with process:
        records = [json.loads(line) for line in process.stdout]
        assert process.stderr.read() == b""
    return records


def apply(root, *changes, txn="t1", step="names", **more):
    return ask(root, {"do": "apply", "step": step, "txn": txn, "changes": list(changes), **more})


def undo(root, steps=None):
    """What is shown, then done."""
    shown = ask(root, {"do": "undo", "steps": steps, "dry": True, "expect": None})
    done = ask(root, {"do": "undo", "steps": steps, "dry": False, "expect": shown[-1]["token"]})
    return shown, done


def standing(root):
    return [each for each in ask(root, {"do": "status"}) if each["kind"] == "change"]


def file(path, before, content, **more):
    """A change of a file from one text to another."""
    encoded = None if content is None else base64.b64encode(content).decode()
    digest = None if before is None else hashlib.sha256(before).hexdigest()
    return {"kind": "file", "path": path, "before": digest, "content": encoded, "mode": None, **more}


def command(argv, *, undo=(), probe=(), before="", after=None):
    return {
        "kind": "command",
        "argv": list(argv),
        "undo": list(undo),
        "probe": list(probe),
        "before": before,
        "after": after,
    }


def snapshot(root):
    """Content, mode, owner and extended attributes of everything but the journal."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if name.startswith("var/lib/gangline") or name in {"var", "var/lib"}:
            continue
        state = path.lstat()
        data = path.read_bytes() if path.is_file() else b""
        xattrs = {each: os.getxattr(path, each) for each in os.listxattr(path)}
        found[name] = (data, stat.filemode(state.st_mode), state.st_uid, state.st_gid, xattrs)
    return found


@pytest.fixture
def root(tmp_path):
    """A host: its /etc/hosts has a mode and an attribute of its own."""
    folder = tmp_path / "root"
    (folder / "etc").mkdir(parents=True)
    hosts = folder / "etc/hosts"
    hosts.write_bytes(b"127.0.0.1 localhost\n")
    hosts.chmod(0o664)
    with contextlib.suppress(OSError):
        os.setxattr(hosts, "user.note", b"kept")
    return folder


HOSTS = b"127.0.0.1 localhost\n"


def test_a_change_keeps_mode_and_attributes_and_is_undone_exactly(root):
    before = snapshot(root)
    records = apply(root, file("/etc/hosts", HOSTS, HOSTS + b"10.0.0.2 pc2\n"))
    assert records[-1] == {"kind": "applied", "txn": "t1", "num_changes": 1}
    after = snapshot(root)
    assert after["etc/hosts"][0] == HOSTS + b"10.0.0.2 pc2\n"
    assert after["etc/hosts"][1:] == before["etc/hosts"][1:]
    (row,) = standing(root)
    assert (row["what"], row["by"], row["as_made"]) == ("/etc/hosts", "alice@desk", True)
    undo(root)
    assert snapshot(root) == before
    assert standing(root) == []


def test_a_link_stays_one(root):
    (root / "etc/hosts").rename(root / "etc/real")
    (root / "etc/hosts").symlink_to("real")
    apply(root, file("/etc/hosts", HOSTS, b"new\n"))
    assert (root / "etc/hosts").is_symlink()
    assert (root / "etc/real").read_bytes() == b"new\n"


def test_new_folders_go_with_the_file_that_needed_them(root):
    before = snapshot(root)
    apply(root, file("/etc/ssh/sshd_config.d/60.conf", None, b"x\n", mode=0o600, folder_mode=0o700))
    made = snapshot(root)
    assert made["etc/ssh/sshd_config.d/60.conf"][1] == "-rw-------"
    assert made["etc/ssh"][1] == "drwx------"
    undo(root)
    assert snapshot(root) == before


def test_what_is_not_as_it_was_shown_is_refused(root):
    (root / "etc/hosts").write_bytes(b"somebody was here\n")
    before = snapshot(root)
    records = apply(root, file("/etc/new", None, b"x"), file("/etc/hosts", HOSTS, b"ours\n"))
    assert records[-1]["what"] == "/etc/hosts is not as it was shown"
    assert snapshot(root) == before
    (root / "state").write_text("on")
    probe = ("cat", str(root / "state"))
    records = apply(root, command(["true"], probe=probe, before="off"))
    assert "not as it was shown" in records[-1]["what"]


def test_a_command_that_fails_takes_everything_back(root):
    before = snapshot(root)
    switch = [sys.executable, "-c", "import sys; open(sys.argv[1], 'w').write(sys.argv[2])", str(root / "etc/switch")]
    on = command([*switch, "on"], undo=["rm", str(root / "etc/switch")], probe=["cat", str(root / "etc/switch")])
    records = apply(root, file("/etc/hosts", HOSTS, b"ours\n"), on, command(["sh", "-c", "echo broken >&2; exit 3"]))
    assert records[-1]["kind"] == "error"
    assert "exit code 3: broken" in records[-1]["seen"]
    assert records[-1]["seen"].endswith("nothing was changed")
    assert snapshot(root) == before
    assert standing(root) == []


def test_a_command_that_does_not_bring_what_it_should_is_an_error(root):
    records = apply(root, command(["true"], probe=["echo", "off"], before="off", after="on"))
    assert records[-1]["seen"].startswith("expected 'on', saw 'off'")


def test_commands_are_undone_in_reverse_and_a_reload_comes_last(root):
    log = root / "log"
    say = [sys.executable, "-c", "import sys; open(sys.argv[1], 'a').write(open(sys.argv[2]).read())"]
    reload = [*say, str(log), str(root / "etc/hosts")]
    apply(root, command([], undo=reload), file("/etc/hosts", HOSTS, b"ours\n"), command(reload))
    assert log.read_text() == "ours\n"
    undo(root)
    assert log.read_text() == "ours\n127.0.0.1 localhost\n"


def test_an_undo_where_nothing_was_changed_leaves_nothing(root):
    before = sorted(root.rglob("*"))
    assert [each["kind"] for each in undo(root)[0]] == ["token"]
    assert sorted(root.rglob("*")) == before


def test_an_undo_keeps_what_others_added(root):
    apply(root, file("/etc/hosts", HOSTS, HOSTS + b"10.0.0.2 pc2\n"))
    with (root / "etc/hosts").open("ab") as stream:
        stream.write(b"10.9.9.9 printer\n")
    (root / "etc/hosts").chmod(0o600)
    _, done = undo(root)
    assert [each["kind"] for each in done] == ["undone"]
    assert (root / "etc/hosts").read_bytes() == HOSTS + b"10.9.9.9 printer\n"
    assert snapshot(root)["etc/hosts"][1] == "-rw-------"


def test_an_undo_of_what_others_changed_is_refused_and_shows_both(root):
    apply(root, file("/etc/hosts", HOSTS, HOSTS + b"10.0.0.2 pc2\n"), file("/etc/a", None, b"1\n"))
    apply(root, file("/etc/b", None, b"2\n"), txn="t2", step="limits")
    (root / "etc/hosts").write_bytes(HOSTS + b"10.0.0.77 pc2\n")
    _, done = undo(root)
    assert [(each["kind"], each["step"]) for each in done] == [("undone", "limits"), ("refused", "names")]
    assert "10.0.0.2 pc2" in done[-1]["ours"]
    assert "10.0.0.77 pc2" in done[-1]["theirs"]
    assert (root / "etc/a").exists(), "a step is undone whole or not at all"
    assert not (root / "etc/b").exists()


def test_one_step_is_undone_below_another_in_the_same_file(root):
    first = HOSTS + b"10.0.0.2 pc2\n"
    apply(root, file("/etc/hosts", HOSTS, first))
    apply(root, file("/etc/hosts", first, first + b"# other\n"), txn="t2", step="limits")
    undo(root, ["names"])
    assert (root / "etc/hosts").read_bytes() == HOSTS + b"# other\n"
    undo(root)
    assert (root / "etc/hosts").read_bytes() == HOSTS


def test_an_undo_that_was_shown_otherwise_is_refused(root):
    apply(root, file("/etc/hosts", HOSTS, b"ours\n"))
    (last,) = ask(root, {"do": "undo", "steps": None, "dry": False, "expect": "something else"})
    assert "not as it was shown" in last["what"]
    assert (root / "etc/hosts").read_bytes() == b"ours\n"


def test_a_path_that_leads_elsewhere_is_refused(root, tmp_path):
    for path in ("etc/hosts", "/etc/../../elsewhere"):
        assert "a change names" in apply(root, file(path, None, b"x"))[-1]["what"]
    assert not (tmp_path / "elsewhere").exists()


def test_a_folder_in_the_place_of_a_file_is_refused(root):
    (root / "etc/hosts").unlink()
    (root / "etc/hosts").mkdir()
    assert apply(root, file("/etc/hosts", None, b"x"))[-1]["what"].endswith("is no file")


def test_a_journal_in_a_folder_of_somebody_else_is_not_trusted(root):
    folder = root / "var/lib/gangline/prepare"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert "cannot be trusted" in apply(root, file("/etc/hosts", HOSTS, b"x"))[-1]["what"]
    assert (root / "etc/hosts").read_bytes() == HOSTS


def test_a_torn_line_stands_for_nothing_and_a_damaged_one_stops_everything(root):
    apply(root, file("/etc/hosts", HOSTS, b"ours\n"))
    journal = root / "var/lib/gangline/prepare/journal.jsonl"
    whole = journal.read_bytes()
    journal.write_bytes(whole + b'{"kind": "intent", "txn": "t')
    assert len(standing(root)) == 1
    assert journal.read_bytes() == whole
    journal.write_bytes(b"nonsense\n" + whole)
    (error,) = ask(root, {"do": "status"})
    assert error["what"] == "the journal of changes is damaged"


SLOW = "import sys, time; open(sys.argv[1], 'w').write('on'); time.sleep(0.2)"


@pytest.mark.parametrize("seed", range(8))
def test_a_killed_agent_leaves_everything_or_nothing(root, seed):
    """The next call takes back what was half-done; what it says of the host is true."""
    before, dice = snapshot(root), random.Random(seed)
    changes = [
        file("/etc/one", None, b"1\n"),
        command(
            [sys.executable, "-c", SLOW, str(root / "etc/switch")],
            undo=["rm", "-f", str(root / "etc/switch")],
            probe=["cat", str(root / "etc/switch")],
            after="on",
        ),
        file("/etc/hosts", HOSTS, b"ours\n"),
        file("/etc/new/two", None, b"2\n"),
    ]
    process = start(root, {"do": "apply", "step": "names", "txn": "t1", "changes": changes})
    journal = root / "var/lib/gangline/prepare/journal.jsonl"
    wanted = dice.randint(0, 9)  # so many lines of the journal, then a moment
    with process:
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if journal.exists() and journal.read_bytes().count(b"\n") >= wanted:
                time.sleep(dice.random() * 0.2)
                process.send_signal(signal.SIGKILL)
                break
    time.sleep(0.3)  # a command that it had started may still end
    if rows := standing(root):
        assert [row["what"] for row in rows].count("/etc/hosts") == 1
        assert all(row["as_made"] for row in rows)
        assert len(rows) == len(changes)
        undo(root)
    assert snapshot(root) == before


def timed(root, seconds, *changes, txn="t1"):
    return apply(root, *changes, txn=txn, revert_s=seconds)


def timers(root):
    """Guards of this host that live."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if b"revert-timer" in words and os.fsencode(root) in b" ".join(words):
                found.append(words)
    return found


def test_a_timer_takes_back_what_nobody_confirms(root):
    before = snapshot(root)
    assert timed(root, 1.0, file("/etc/hosts", HOSTS, b"locked out\n"))[-1]["kind"] == "applied"
    wait_until(lambda: snapshot(root) == before and not timers(root), "the timer takes it back")
    (error,) = ask(root, {"do": "confirm", "txn": "t1"})
    assert error["what"] == "the change was taken back"
    assert standing(root) == []


def test_a_confirmed_change_stays_and_its_timer_ends(root):
    timed(root, 60.0, file("/etc/hosts", HOSTS, b"fine\n"))
    assert len(timers(root)) == 1
    assert ask(root, {"do": "confirm", "txn": "t1"}) == [{"kind": "confirmed", "txn": "t1"}]
    wait_until(lambda: not timers(root), "the timer ends")
    assert (root / "etc/hosts").read_bytes() == b"fine\n"
    assert [row["as_made"] for row in standing(root)] == [True]


def test_a_timer_outlives_the_agent_and_keeps_the_text_of_others(root):
    process = start(
        root,
        {
            "do": "apply",
            "step": "sshd",
            "txn": "t1",
            "revert_s": 1.5,
            "changes": [file("/etc/hosts", HOSTS, b"locked out\n"), command(["sleep", "30"])],
        },
    )
    with process:
        wait_until(lambda: (root / "etc/hosts").read_bytes() == b"locked out\n", "the change")
        process.send_signal(signal.SIGKILL)
    (root / "etc/hosts").write_bytes(b"somebody else\n")
    wait_until(lambda: (root / "etc/hosts").read_bytes() == HOSTS and not timers(root), "the timer")
    (kept,) = (root / "var/lib/gangline/prepare").glob("kept-*")
    assert kept.read_bytes() == b"somebody else\n"


def test_a_timer_that_died_is_replaced_by_the_next_call(root):
    timed(root, 600.0, file("/etc/hosts", HOSTS, b"locked out\n"))
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if b"revert-timer" in words and os.fsencode(root) in b" ".join(words):
                os.kill(int(path.parent.name), signal.SIGKILL)
    wait_until(lambda: not timers(root), "the timer ends")
    assert standing(root) == []
    assert (root / "etc/hosts").read_bytes() == HOSTS


def test_without_a_timer_nothing_is_changed(root):
    """Its folder cannot hold the program that it runs."""
    folder = root / "var/lib/gangline/prepare"
    folder.mkdir(parents=True, mode=0o700)
    folder.chmod(0o700)
    (folder / "agent.pyz").mkdir()
    before = snapshot(root)
    assert timed(root, 5.0, file("/etc/hosts", HOSTS, b"x\n"))[-1]["kind"] == "error"
    assert snapshot(root) == before


def test_what_a_step_asks_for_is_read_and_nothing_is_changed(root):
    before = snapshot(root)
    (record,) = ask(
        root,
        {
            "do": "read",
            "files": ["/etc/hosts", "/etc/none", "/etc"],
            "folders": ["/etc", "/none"],
            "commands": {"name": ["echo", "pc1"], "gone": ["no-such-program"]},
            "programs": ["sh", "no-such-program"],
        },
    )
    assert base64.b64decode(record["files"]["/etc/hosts"]["content"]) == HOSTS
    assert record["files"]["/etc/none"] == {"kind": "absent"}
    assert record["files"]["/etc"]["kind"] == "unreadable"
    assert record["folders"] == {"/etc": ["hosts"], "/none": None}
    assert record["commands"]["name"]["stdout"] == "pc1\n"
    assert record["commands"]["gone"]["returncode"] == 127
    assert record["programs"] == {"sh": shutil.which("sh"), "no-such-program": None}
    assert snapshot(root) == before


@pytest.mark.parametrize(
    ("has_systemd", "words"),
    [(True, "systemctl --no-block reboot"), (False, "shutdown -r now")],
    ids=["systemd", "none"],
)
def test_a_restart_goes_by_the_hosts_own_means_and_waits_for_no_change_on_trial(
    root, tmp_path, monkeypatch, has_systemd, words
):
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("systemctl", "shutdown"):  # simulated: nothing is restarted by a test
        (programs / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/said\n')
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    if has_systemd:
        (root / "run/systemd/system").mkdir(parents=True)
    assert ask(root, {"do": "restart"}) == [{"kind": "restarting"}]
    assert (tmp_path / "said").read_text() == f"{words}\n"
    (root / "etc").mkdir(exist_ok=True)
    apply(root, file("/etc/x", None, b"1\n"), revert_s=60)
    (record,) = ask(root, {"do": "restart"})
    assert (record["kind"], record["what"]) == ("error", "it is not restarted")
    assert (tmp_path / "said").read_text() == f"{words}\n"
    ask(root, {"do": "confirm", "txn": "t1"})
