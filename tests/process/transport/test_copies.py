"""Files and folders over ssh: by stream or by rsync, whole or not at all."""

import os
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from gangline.errors import GanglineError, HostUnreachable
from gangline.transport import connection, ssh
from tests.process.transport.sshd import Sshd
from tests.waiting import wait_until

WAYS = ["stream", "rsync"]


@pytest.fixture
def sshd(tmp_path):
    return Sshd(tmp_path)


@pytest.fixture(scope="module")
def transport(tmp_path_factory):
    """One connection for all that do not break it."""
    transport = Sshd(tmp_path_factory.mktemp("sshd")).transport()
    yield transport
    transport.close()


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    """By which of the two everything goes."""
    if request.param == "rsync" and shutil.which("rsync") is None:
        pytest.skip("no rsync on this machine")
    monkeypatch.setattr(ssh, "RSYNC_FROM_BYTES", 0 if request.param == "rsync" else 1 << 60)
    return request.param


def tree(folder, size=1000):
    (folder / "sub" / "empty").mkdir(parents=True)
    (folder / "run.sh").write_bytes(b"#!/bin/sh")
    (folder / "run.sh").chmod(0o755)
    (folder / "sub" / "data").write_bytes(os.urandom(size))
    (folder / "sub" / "data").chmod(0o666)
    return folder


def listing(folder):
    return {
        str(path.relative_to(folder)): (
            path.is_dir(),
            path.stat().st_mode & 0o7777,
            path.is_file() and path.read_bytes(),
        )
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize("direction", ["push", "pull"])
def test_a_copy_is_equal_and_for_its_owner_alone(transport, tmp_path, way, direction):
    source = tree(tmp_path / "source")
    getattr(transport, direction)(source, tmp_path / "new" / "target")
    copied = listing(tmp_path / "new" / "target")
    assert {name: data for name, (_, _, data) in copied.items()} == {
        name: data for name, (_, _, data) in listing(source).items()
    }
    modes = {name: mode for name, (_, mode, _) in copied.items()}
    assert modes == {"sub": 0o700, "sub/empty": 0o700, "run.sh": 0o700, "sub/data": 0o600}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["target"]


@pytest.mark.parametrize("direction", ["push", "pull"])
@pytest.mark.parametrize("old", ["file", "folder"])
@pytest.mark.parametrize("new", ["file", "folder"])
def test_whatever_was_there_is_replaced(transport, tmp_path, way, direction, old, new):
    target = tmp_path / "there" / "target"
    tree(target) if old == "folder" else (target.parent.mkdir(), target.write_bytes(b"old"))
    source = tree(tmp_path / "source")
    getattr(transport, direction)(source if new == "folder" else source / "run.sh", target)
    assert listing(target).keys() == listing(source).keys() if new == "folder" else target.read_bytes() == b"#!/bin/sh"
    assert [path.name for path in target.parent.iterdir()] == ["target"]


@pytest.mark.parametrize("direction", ["push", "pull"])
def test_progress_ends_at_all_of_it(transport, tmp_path, way, direction):
    source = tree(tmp_path / "source", size=3_000_000)
    seen = []
    getattr(transport, direction)(
        source, tmp_path / "target", on_progress=lambda done, total: seen.append((done, total))
    )
    assert seen[-1] == (3_000_009, 3_000_009)
    assert seen == sorted(seen)


def test_a_large_tree_goes_by_rsync_a_small_one_does_not(transport, tmp_path, monkeypatch):
    if not connection.is_here():
        pytest.skip("no rsync on this machine")
    used = []
    real = connection.copy
    monkeypatch.setattr(connection, "copy", lambda *args: used.append(args[1]) or real(*args))
    transport.push(tree(tmp_path / "small"), tmp_path / "a")
    assert used == []
    transport.push(tree(tmp_path / "large", size=9 << 20), tmp_path / "b")
    assert used == [(9 << 20) + 9]


def test_without_rsync_there_a_large_tree_goes_as_a_stream(tmp_path, sshd):
    path = tmp_path / "bin"
    path.mkdir()
    for name in ("sh", "python3"):
        (path / name).symlink_to(shutil.which(name, path="/usr/bin:/bin") or shutil.which(name))
    sshd.answer_with(path=path)
    transport = sshd.transport()
    transport.push(tree(tmp_path / "large", size=9 << 20), tmp_path / "b")
    assert (tmp_path / "b" / "sub" / "data").stat().st_size == 9 << 20
    transport.close()


def test_a_noisy_login_does_not_confuse_rsync(tmp_path, sshd):
    sshd.answer_with('ForceCommand=echo welcome; exec sh -c "$SSH_ORIGINAL_COMMAND"')
    transport = sshd.transport()
    transport.push(tree(tmp_path / "large", size=9 << 20), tmp_path / "b")
    assert (tmp_path / "b" / "sub" / "data").stat().st_size == 9 << 20
    transport.close()


@pytest.mark.parametrize("direction", ["push", "pull"])
def test_a_copy_that_was_broken_off_leaves_the_old_one_and_is_gone_on_with(transport, tmp_path, direction):
    """Killed in the middle; what rsync has brought is beside the target, and used by the next try."""
    if not connection.is_here():
        pytest.skip("no rsync on this machine")
    source = tree(tmp_path / "source", size=12 << 20)
    target = tmp_path / "there" / "target"
    tree(target)
    before = listing(target)

    def cut(done, _total):
        if done > 2 << 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        getattr(transport, direction)(source, target, on_progress=cut)
    assert listing(target) == before
    wait_until(lambda: [path for path in target.parent.iterdir() if path.name.endswith(".part")], "the part is kept")
    getattr(transport, direction)(source, target)
    assert (target / "sub" / "data").read_bytes() == (source / "sub" / "data").read_bytes()
    assert [path.name for path in target.parent.iterdir()] == ["target"]


@pytest.mark.parametrize("direction", ["push", "pull"])
def test_a_stream_that_was_broken_off_leaves_nothing(transport, tmp_path, direction, monkeypatch):
    monkeypatch.setattr(ssh, "RSYNC_FROM_BYTES", 1 << 60)
    source = tree(tmp_path / "source", size=12 << 20)

    def cut(done, _total):
        if done > 2 << 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        getattr(transport, direction)(source, tmp_path / "there" / "target", on_progress=cut)
    assert list((tmp_path / "there").iterdir()) == []


def test_a_connection_lost_in_the_middle_of_a_copy_is_an_error(transport, tmp_path, way, monkeypatch):
    source = tree(tmp_path / "source", size=12 << 20)

    def cut(done, _total):
        if done > 2 << 20:
            transport._link.connection().channel.end("cut")

    with monkeypatch.context() as slow:
        slow.setattr(
            connection, "OPTIONS", (*connection.OPTIONS, "--bwlimit=4000")
        )  # it tells how far it is once a second
        with pytest.raises(HostUnreachable, match="the connection was lost"):
            transport.push(source, tmp_path / "there" / "target", on_progress=cut)
    assert not (tmp_path / "there" / "target").exists()
    transport.push(source, tmp_path / "there" / "target")
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["target"]


@pytest.mark.parametrize("direction", ["push", "pull"])
def test_where_nothing_can_be_written_the_reason_is_told(transport, tmp_path, way, direction):
    source = tree(tmp_path / "source")
    (tmp_path / "file").touch()
    with pytest.raises((GanglineError, OSError), match=r"(?i)not a directory|file exists"):
        getattr(transport, direction)(source, tmp_path / "file" / "target")


def test_two_copies_at_once_do_not_meet(transport, tmp_path, way):
    sources = [tree(tmp_path / f"source{number}", size=5 << 20) for number in range(4)]
    threads = [
        threading.Thread(target=transport.push, args=(source, tmp_path / "there" / source.name)) for source in sources
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(listing(tmp_path / "there" / source.name).keys() == listing(source).keys() for source in sources)


def test_the_command_of_rsync_is_ours_alone():
    argv = connection.argv("/a b;$(x)/", connection.far("/c d/"), Path("/tmp/gl/ctl"))
    assert argv[-3:] == ["--", "/a b;$(x)/", "gangline:/c d/"]
    assert argv[argv.index("-e") + 1] == (
        "ssh -F none -o ControlMaster=no -o ControlPath=/tmp/gl/ctl -o ProxyCommand=false -o BatchMode=yes"
    )
    assert {"--safe-links", "--partial", "-s"} <= set(argv)
    assert not {"-a", "--archive", "--links", "-l", "--owner", "--group", "--devices"} & set(argv)
    with pytest.raises(ValueError, match="would have to be quoted"):
        connection.shell_words(Path("/tmp/a b/ctl"))


@pytest.mark.parametrize(
    ("said", "fits"),
    [
        ("rsync  version 3.2.7  protocol version 31", True),
        ("rsync  version v3.4.1  protocol version 32", True),
        ("rsync  version 3.1.0  protocol version 31", True),
        ("rsync  version 3.0.9  protocol version 30", False),
        ("openrsync: protocol version 29\nrsync version 2.6.9 compatible", False),
        ("sh: rsync: not found", False),
    ],
)
def test_only_an_rsync_that_has_what_we_need_is_used(said, fits):
    assert connection.is_new_enough(said) is fits


def test_an_rsync_without_its_connection_goes_nowhere(tmp_path):
    """It must not look for a host that happens to be called like our placeholder."""
    if not connection.is_here():
        pytest.skip("no rsync on this machine")
    (tmp_path / "file").touch()
    argv = connection.argv(str(tmp_path / "file"), connection.far("/file"), Path("/tmp/no-such-socket"))
    assert subprocess.run(argv, capture_output=True, timeout=20).returncode != 0
