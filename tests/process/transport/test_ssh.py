"""One connection per host over the system's ssh: what it trusts, what it survives, what it leaves behind."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gangline.errors import HostKeyRefused, HostUnreachable
from gangline.runs.state import ProcessId
from gangline.transport import connection as connections
from gangline.transport.connection import HANDSHAKES
from gangline.transport.transport import AGENT
from tests.process.transport.sshd import Sshd
from tests.process.transport.test_local import FAMILY, gone, pids_in
from tests.waiting import wait_until


@pytest.fixture
def sshd(tmp_path):
    return Sshd(tmp_path)


@pytest.fixture
def transport(sshd):
    transport = sshd.transport()
    yield transport
    transport.close()


def ssh_of(transport) -> ProcessId:
    """The ssh process of a transport that is connected."""
    return ProcessId.of(transport._link.connection().channel._process.pid)


def answers(transport):
    return transport.run(["echo", "hello"]).stdout == "hello\n"


# Whom it trusts


def test_another_host_key_stops_every_command(sshd, transport):
    old = sshd.host_key
    transport.close()
    sshd.new_key("host_key")
    calls = [
        lambda: transport.run(["touch", str(sshd.folder / "canary")]),
        lambda: transport.read(sshd.config),
        lambda: transport.write(sshd.folder / "canary", b""),
        lambda: transport.names(sshd.folder),
        lambda: transport.push(sshd.config, sshd.folder / "canary"),
        lambda: transport.pull(sshd.config, sshd.folder / "canary"),
        transport.home,
    ]
    for call in calls:
        with pytest.raises(HostKeyRefused, match="pc1 HAS ANOTHER HOST KEY than the pinned one"):
            call()
    assert not (sshd.folder / "canary").exists()
    assert sshd.host_key == old


def test_both_fingerprints_are_shown_and_how_to_look_on_the_console(sshd, transport):
    sshd.new_key("host_key")
    with pytest.raises(HostKeyRefused) as caught:
        transport.home()
    error = str(caught.value)
    (sshd.folder / "old.pub").write_text(sshd.host_key)
    for name in ("old", "host_key"):
        words = subprocess.check_output(["ssh-keygen", "-lf", sshd.folder / f"{name}.pub"], text=True).split()
        assert words[1] in error
    assert "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub" in error


def test_a_host_that_lost_the_kind_of_its_pinned_key_is_refused(sshd):
    path = sshd.folder / "ecdsa"
    subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-N", "", "-f", path], check=True)
    sshd.config.write_text(sshd.config.read_text().replace(f"{sshd.folder}/host_key", str(path)))
    with pytest.raises(HostKeyRefused, match=r"HAS ANOTHER HOST KEY[^\n]*\n.*it has only ecdsa-sha2-nistp256"):
        sshd.transport().home()


def test_without_a_pinned_key_nobody_is_asked(sshd):
    with pytest.raises(HostKeyRefused, match=r"pc1: no host key is pinned.*\n.*\n.*gangline init"):
        sshd.transport(host_key=None).home()


def test_what_the_users_ssh_trusts_does_not_count(sshd):
    """The user's known_hosts has the new key, ours has the old one."""
    fresh = sshd.new_key("host_key")
    known = sshd.folder / "known_hosts"
    known.write_text(f"pc1 {fresh}\n")
    text = sshd.config.read_text()
    lines = [f"    UserKnownHostsFile {known}", f"    GlobalKnownHostsFile {known}", "    HostKeyAlias pc1"]
    lines += ["    StrictHostKeyChecking accept-new", f"    KnownHostsCommand /bin/cat {known}"]
    sshd.config.write_text(text + "\n".join(lines) + "\n")
    with pytest.raises(HostKeyRefused):
        sshd.transport().home()


@pytest.mark.parametrize("name", ["pc1", "PC-1.lan", "h_2"])
def test_the_pinned_key_is_found_under_any_name(sshd, name):
    transport = sshd.transport(name=name)
    assert answers(transport)
    transport.close()


def test_a_refused_key_of_the_user_is_named(sshd, transport):
    (sshd.folder / "authorized_keys").write_text("")
    with pytest.raises(HostUnreachable, match=r"pc1 refuses your key: permission denied\n.*\n.*ssh-copy-id pc1"):
        transport.home()


# What it survives


def test_a_login_that_prints_is_no_problem(sshd):
    program = (
        "printf 'Welcome! 3 updates\\n\\0\\1gangline chan'; echo on stderr >&2; exec sh -c \"$SSH_ORIGINAL_COMMAND\""
    )
    sshd.answer_with(f"ForceCommand={program}")
    transport = sshd.transport()
    assert answers(transport)
    transport.close()


def test_a_login_that_prints_and_leaves_is_quoted(sshd):
    sshd.answer_with("ForceCommand=echo 'This account is currently not available.'")
    with pytest.raises(HostUnreachable, match=r"(?s)does not speak our protocol.*currently not available"):
        sshd.transport().home()


def test_a_lost_connection_is_an_error_now_and_mended_at_the_next_call(transport, tmp_path):
    flag = tmp_path / "flag"
    errors = []

    def run():
        try:
            transport.run(["sh", "-c", 'echo $$ > "$0"; exec sleep 600', str(flag)])
        except HostUnreachable as error:
            errors.append(error)

    assert answers(transport)
    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: flag.exists() and flag.read_text().strip(), "the command runs")
    os.kill(ssh_of(transport).pid, signal.SIGKILL)
    thread.join(30)
    assert "pc1: the connection was lost" in str(errors[0])
    wait_until(lambda: ProcessId.of(int(flag.read_text())) is None, "what ran for us there is ended")
    assert answers(transport)


def test_who_detached_himself_there_outlives_the_connection(transport, tmp_path):
    """As the host agent does."""
    flag = tmp_path / "flag"
    program = "import os, sys, time\nif os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)\n"
    program += "open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
    transport.run([sys.executable, "-c", program, str(flag)])
    wait_until(lambda: flag.exists() and flag.read_text(), "it runs")
    transport.close()
    pid = int(flag.read_text())
    assert ProcessId.of(pid) is not None
    os.kill(pid, signal.SIGKILL)


def test_with_the_connection_everything_that_runs_there_ends(transport, tmp_path):
    family = tmp_path / "family"
    family.touch()

    def run():
        with pytest.raises(HostUnreachable):
            transport.run([sys.executable, "-c", FAMILY, str(family)])

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: len(pids_in(family)) == 2, "the family is there")
    transport.close()
    thread.join(30)
    wait_until(lambda: gone(pids_in(family)), "nobody is left")


def test_a_command_that_takes_too_long_is_ended_with_its_family(transport, tmp_path):
    family = tmp_path / "family"
    family.touch()
    with pytest.raises(TimeoutError):
        transport.run([sys.executable, "-c", FAMILY, str(family)], timeout_s=3)
    assert gone(pids_in(family))


def test_ctrl_c_ends_the_command_there(transport, tmp_path):
    family = tmp_path / "family"
    family.touch()

    def press(_line):
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        transport.run([sys.executable, "-c", FAMILY, str(family)], on_line=press)
    assert gone(pids_in(family))
    assert answers(transport)


def test_an_error_of_the_reader_of_lines_comes_through(transport):
    def fail(line):
        raise ValueError(line)

    with pytest.raises(ValueError, match="one"):
        transport.run(["sh", "-c", "echo one; sleep 600"], on_line=fail)
    assert answers(transport)


def test_a_hundred_commands_at_once_do_not_mix(transport):
    results = {}

    def work(number):
        text = f"{number} " * 5000
        program = "import sys; sys.stdout.write(sys.stdin.read()); sys.stderr.write(sys.argv[1]); sys.exit(int(sys.argv[1]) % 7)"
        result = transport.run([sys.executable, "-S", "-c", program, str(number)], stdin=text.encode())
        results[number] = (result.stdout == text, result.stderr, result.returncode)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {number: (True, str(number), number % 7) for number in range(100)}


def test_a_slow_reader_of_lines_gets_them_all(transport):
    """The window closes while it thinks; the command waits, and nothing is lost when it ends meanwhile."""
    seen = []

    def slowly(line):
        seen.append(line)
        if len(seen) % 50_000 == 0:
            time.sleep(0.3)

    transport.run(["seq", "400000"], on_line=slowly)
    assert len(seen) == 400_000


def test_others_are_answered_while_one_command_takes_no_input(transport):
    done = threading.Event()

    def work():
        transport.run(["sleep", "3"], stdin=b"x" * (8 << 20))
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    while not done.is_set():
        assert answers(transport)
    thread.join(30)


def test_the_time_limit_holds_while_input_waits(transport):
    with pytest.raises(TimeoutError):
        transport.run(["sleep", "600"], stdin=b"x" * (8 << 20), timeout_s=0.5)


def test_large_input_and_output_pass_each_other(transport):
    data = os.urandom(3 << 20).hex()
    assert transport.run(["cat"], stdin=data.encode()).stdout == data


def test_the_agents_program_runs_there(transport):
    """Also with environment and input, and again after its file was used by others."""
    for _ in range(2):
        result = transport.run((AGENT, "trees", "measure", "/etc/hostname"))
        assert (result.returncode, result.argv[0]) == (0, AGENT)
        assert '"folder": false' in result.stdout
    assert transport.run((AGENT, "nonsense")).returncode == 2


# What it leaves behind


def children():
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid() and fields[0] != b"Z":
            found.add(int(path.parent.name))
    return found


@pytest.mark.parametrize("way", ["close", "forget"])
def test_nothing_is_left(sshd, way):
    before = children()
    threads = threading.active_count()
    transport = sshd.transport()
    assert answers(transport)
    folder = transport._link.connection().folder
    assert folder.stat().st_mode & 0o077 == 0
    assert (folder / "ctl").is_socket()
    if way == "close":
        transport.close()
    del transport
    gc.collect()
    wait_until(lambda: children() <= before, "no process is left")
    wait_until(lambda: threading.active_count() <= threads, "no thread is left")
    assert not folder.exists()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_process_that_was_forked_takes_nothing_away(transport):
    """Also if Python ends it in an orderly way, with everything that it does at the end."""
    assert answers(transport)
    folder = transport._link.connection().folder
    pid = os.fork()
    if pid == 0:
        try:
            gc.collect()
            transport.close()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert (folder / "known_hosts").exists()
    assert answers(transport)


def test_a_closed_transport_connects_again(transport):
    assert answers(transport)
    transport.close()
    assert answers(transport)


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path, monkeypatch):
    from gangline.transport import ssh_options

    monkeypatch.setattr(ssh_options, "_base", lambda: tmp_path)
    left = tmp_path / "gangline-ssh-dead"
    left.mkdir()
    (left / "lock").touch()
    os.utime(left, (1, 1))
    other = tmp_path / "gangline-ssh-without-lock"
    other.mkdir()
    folder = ssh_options.PrivateFolder()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([other.name, folder.path.name])
    folder.close()


def test_the_terminals_ctrl_c_does_not_reach_ssh(transport):
    assert answers(transport)
    assert os.getpgid(ssh_of(transport).pid) != os.getpgid(0)


# Many at once


def test_threads_that_wait_for_a_dead_host_share_its_one_failure(sshd, monkeypatch):
    sshd.answer_with(proxy="/bin/sleep 600")
    monkeypatch.setattr(connections, "GREET_S", 1.0)
    transport = sshd.transport()
    errors = []

    def work():
        with pytest.raises(HostUnreachable) as caught:
            transport.run(["true"])
        errors.append(caught.value)

    threads = [threading.Thread(target=work) for _ in range(8)]
    begun = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(errors) == 8
    assert time.monotonic() - begun < 8


def test_no_more_than_16_handshakes_at_once(sshd):
    held = [HANDSHAKES.acquire(timeout=1) for _ in range(16)]
    transport = sshd.transport()
    thread = threading.Thread(target=answers, args=(transport,))
    thread.start()
    thread.join(0.5)
    assert thread.is_alive()
    for _ in held:
        HANDSHAKES.release()
    thread.join(30)
    assert not thread.is_alive()
    transport.close()
