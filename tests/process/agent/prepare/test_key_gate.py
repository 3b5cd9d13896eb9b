"""The gate of keys between hosts, started as sshd would: whom it lets in, and whom not."""

import os
import shlex
import subprocess
import sys

import pytest

from gangline.agent.prepare import key_gate
from gangline.prepare.keys_between import GATE, gate_program
from gangline.prepare.prepare_step import FileRead, HostReading, StepView
from gangline.runs.cluster import Cluster, Host
from gangline.transport import bootstrap, channel, connection, ssh_options

RSYNC = ("rsync", *connection.OPTIONS)
SECLUDED = b"rsync\0--timeout=300\0--delete\0--partial\0--safe-links\0.\0%s\0\0"
WAY_IN = "rsync --server -stpre.iLsfxCIvu"
READING = HostReading(
    user="alice", uid=1000, home="/home/alice", files={GATE: FileRead()}, folders={}, commands={}, programs={}
)


@pytest.fixture
def gate(tmp_path):
    """The words that sshd runs, with a home folder of their own; runs lie in ~/gangline."""
    home = tmp_path / "home"
    (home / "gangline").mkdir(parents=True)
    host = Host(name="pc2", workdir="~/gangline", python="", transport="ssh")
    view = StepView(host=host, cluster=Cluster(name="home", hosts=(host,)), reading=READING, readings={})
    program = home / "gate.py"
    program.write_text(gate_program(view))
    return [sys.executable, "-I", "-S", str(program)], {**os.environ, "HOME": str(home)}, home


def ask(gate, command, said=b""):
    argv, environment, _ = gate
    environment = {name: value for name, value in environment.items() if name != "SSH_ORIGINAL_COMMAND"}
    asked = {} if command is None else {"SSH_ORIGINAL_COMMAND": command}
    return subprocess.run(argv, input=said, env={**environment, **asked}, capture_output=True, timeout=60, check=False)


def refusal(done):
    """What it said, given that it refused."""
    assert done.returncode == key_gate.REFUSED == ssh_options.REFUSED_BY_GATE, done
    assert done.stdout == b""
    (line,) = done.stderr.decode().splitlines()
    return line


def test_gangline_s_own_agent_is_let_in_and_serves(gate):
    argv, environment, home = gate
    process = subprocess.Popen(
        argv,
        env={**environment, "SSH_ORIGINAL_COMMAND": bootstrap.BOOTSTRAP},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    link = channel.AgentChannel(process)
    try:
        assert link.greet(bootstrap.first_words(), 30).home == str(home)
        run = {"op": "run", "argv": ["gangline-agent", "room"], "agent": True, "env": {}, "timeout_s": 20}
        assert "returncode" in link.ask(run, timeout_s=30, data=b"{}")[0]
        link.ask({"op": "write", "path": str(home / "gangline/word")}, timeout_s=30, data=b"here")
    finally:
        link.close()
    assert (home / "gangline/word").read_text() == "here"


def test_another_agent_is_refused_before_any_of_it_runs(gate):
    mark = gate[2] / "mark"
    harm = f"open({str(mark)!r}, 'w')\n"
    words = bootstrap.first_words()
    first = harm.encode().ljust(bootstrap.START_BYTES, b"\n") + words[bootstrap.START_BYTES :]
    assert ask(gate, bootstrap.BOOTSTRAP, first).returncode == 0  # its program is not run; the agent leaves at once
    other = bootstrap._said(bootstrap.START, bootstrap.zlib.compress(bootstrap.prepare_zipapp()))
    assert "another version of gangline; gangline prepare --between-hosts" in refusal(
        ask(gate, bootstrap.BOOTSTRAP, other)
    )
    assert not mark.exists()


@pytest.mark.parametrize(
    "length", [b"%016d" % (1 << 40), b"-000000000000001", b"%016d" % 8], ids=["huge", "negative", "no zlib"]
)
def test_what_is_no_agent_is_refused(gate, length):
    words = bytes(bootstrap.START_BYTES) + length + b"nonsense"
    assert refusal(ask(gate, bootstrap.BOOTSTRAP, words)) == "gangline: what was sent is no agent of gangline"


@pytest.mark.parametrize(
    "command",
    [None, "", "true", "sh -c true", "/usr/lib/openssh/sftp-server", "scp -t .", bootstrap.BOOTSTRAP + " ; true"],
)
def test_everything_else_is_refused_with_a_word(gate, command):
    said = refusal(ask(gate, command))
    assert said == "gangline: this key opens gangline's agent, and rsync below ~/gangline, and nothing else"


def copied(gate, source, target, options=RSYNC):
    """rsync as gangline runs it, with the gate in the place of ssh."""
    argv, environment, home = gate
    ssh = home / "ssh"
    ssh.write_text(f'#!/bin/sh\nshift\nSSH_ORIGINAL_COMMAND="$*" exec {shlex.join(argv)}\n')
    ssh.chmod(0o700)
    words = [*options, "-e", str(ssh), "--", str(source), str(target)]
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_rsync_goes_both_ways_below_the_folder_of_runs(gate, tmp_path):
    home = gate[2]
    source = tmp_path / "source"
    source.mkdir()
    (source / "a file").write_text("words")
    done = copied(gate, f"{source}/", connection.far("gangline/in *"))
    assert done.returncode == 0, done.stderr
    assert (home / "gangline/in */a file").read_text() == "words"
    done = copied(gate, connection.far(f"{home}/gangline/in */"), tmp_path / "back")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "back/a file").read_text() == "words"


def test_rsync_elsewhere_is_refused_by_a_link_and_by_dots_too(gate, tmp_path):
    home = gate[2]
    (home / "secret").write_text("canary")
    (home / "gangline/link").symlink_to(home)
    for path in (home / "secret", home / "gangline/link/secret", "gangline/../secret"):
        done = copied(gate, connection.far(str(path)), tmp_path / "taken")
        assert "gangline: rsync is let in below ~/gangline only" in done.stderr, done
        assert not (tmp_path / "taken").exists()


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("rsync --server --daemon .", b""),
        ("rsync --server -tpre.iLsfxCIvu . gangline/x", b""),
        ("rsync --server -stpre.iLsfxCIvu --rsh=sh", b""),
        (WAY_IN, SECLUDED.replace(b"--delete", b"--log-file=x") % b"gangline/x"),
        (WAY_IN, SECLUDED.replace(b"--delete", b"--files-from=x") % b"gangline/x"),
        (WAY_IN, SECLUDED % b"gangline/x\0/etc/passwd"),
        (WAY_IN, b"\0\0"),
    ],
)
def test_rsync_with_other_words_is_refused(gate, command, said):
    assert "gangline: rsync is let in " in refusal(ask(gate, command, said))
