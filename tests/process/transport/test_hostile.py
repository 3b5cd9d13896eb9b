"""Whatever a word, a name or a tree contains: it arrives as it is, or is refused; nothing of it is ever executed."""

import io
import json
import os
import random
import shutil
import struct
import subprocess
import sys
from pathlib import Path, PurePath

import pytest

from gangline.agent.provision import tree_stream
from gangline.errors import GanglineError, UsageError
from gangline.runs.cluster import Host
from gangline.transport import ssh
from gangline.transport.bootstrap import remote_command
from gangline.transport.connect import connect
from gangline.transport.hostkeys import resolve, scan_key
from gangline.transport.local import copying
from gangline.transport.ssh import SshTransport
from tests import hostile
from tests.process.transport.sshd import Sshd

ECHO = "import sys, os, json; print(json.dumps([os.fsencode(word).hex() for word in sys.argv[1:]]))"
ECHO_ENV = "import os, json; print(json.dumps({name.decode(): value.hex() for name, value in os.environb.items()}))"


@pytest.fixture
def sshd(tmp_path):
    return Sshd(tmp_path)


@pytest.fixture(scope="module")
def transport(tmp_path_factory):
    """One connection for everything."""
    transport = Sshd(tmp_path_factory.mktemp("shared")).transport()
    yield transport
    transport.close()


@pytest.fixture
def canary(tmp_path):
    """A file that is made where a shell reads data; nothing in the home folder is called like it either."""
    path = tmp_path / "canary"
    yield path
    assert not path.exists()
    assert not (Path.home() / "canary").exists()
    assert not Path("canary").exists()


def as_hex(words):
    return [os.fsencode(word).hex() for word in words]


def batches(items, size):
    return [items[at : at + size] for at in range(0, len(items), size)]


# 10,000 words, values and paths (S2)


def test_5000_hostile_words_arrive_byte_for_byte(transport, canary):
    for batch in batches(hostile.words(5000, canary), 500):
        said = transport.run([sys.executable, "-S", "-c", ECHO, *batch]).stdout
        assert json.loads(said) == as_hex(batch)


def test_4000_hostile_values_arrive_byte_for_byte(transport, canary):
    for batch in batches(hostile.words(4000, canary, seed=5), 500):
        env = {f"V{number}": word for number, word in enumerate(batch)}
        said = json.loads(transport.run([sys.executable, "-S", "-c", ECHO_ENV], env=env).stdout)
        assert [said[name] for name in env] == as_hex(batch)


def test_1000_hostile_names_of_files_are_kept(transport, canary, tmp_path):
    names = hostile.names(1000)
    for name in names:
        transport.write(tmp_path / "files" / name, os.fsencode(name))
    assert sorted(map(os.fsencode, transport.names(tmp_path / "files"))) == sorted(map(os.fsencode, names))
    for name in names[::10]:
        assert transport.read(PurePath(tmp_path / "files" / name)) == os.fsencode(name)


@pytest.mark.parametrize("way", ["stream", "rsync"])
def test_a_tree_with_hostile_names_is_copied_there_and_back(transport, canary, tmp_path, way, monkeypatch):
    if way == "rsync":
        if shutil.which("rsync") is None:
            pytest.skip("no rsync on this machine")
        monkeypatch.setattr(ssh, "RSYNC_FROM_BYTES", 0)
    source = tmp_path / "a '$(touch canary)' ; touch canary; \n -e" / "tree"
    for name in hostile.names(300, seed=6):
        path = source / name / "file"
        path.parent.mkdir(parents=True)
        path.write_bytes(os.fsencode(name))
    target = tmp_path / "there `touch canary` 'x" / "tree"
    transport.push(source, target)
    transport.pull(target, tmp_path / "back")
    for copy in (target, tmp_path / "back"):
        assert {path.name for path in copy.iterdir()} == {path.name for path in source.iterdir()}
        assert all((path / "file").read_bytes() == os.fsencode(path.name) for path in copy.iterdir())


def shells():
    found = {name: shutil.which(name) for name in ("sh", "bash", "dash", "zsh", "ksh", "fish", "tcsh", "csh")}
    return [name for name, path in found.items() if path]


@pytest.mark.parametrize("shell", shells())
def test_words_of_a_command_in_a_terminal_arrive_whatever_the_login_shell(shell, canary):
    for batch in batches(hostile.words(1000, canary, seed=7), 200):
        command = remote_command([sys.executable, "-S", "-c", ECHO, *batch])
        done = subprocess.run([shell, "-c", command], capture_output=True, text=True, check=True)
        assert json.loads(done.stdout) == as_hex(batch)


@pytest.mark.parametrize("word", ["a\0b", "\0"])
def test_what_no_command_can_hold_is_refused(transport, word):
    for call in (
        lambda: transport.run(["echo", word]),
        lambda: transport.run(["echo"], env={"A": word}),
        lambda: transport.run(["echo"], env={word: "a"}),
        lambda: transport.read(PurePath(f"/tmp/{word}")),
        lambda: remote_command([word]),
    ):
        with pytest.raises(ValueError, match="null byte"):
            call()
    with pytest.raises(ValueError, match="illegal environment variable name"):
        transport.run(["echo"], env={"A=B": "c"})


# 200 destinations (S3)

BAD_DESTINATIONS = [
    "-oProxyCommand=touch canary",
    "-F/dev/stdin",
    "--",
    "-",
    "user@-oProxyCommand=x",
    "-u@host",
    "a b",
    "a;touch canary",
    "$(touch canary)",
    "`touch canary`",
    "host|x",
    "host\n",
    "host\nProxyCommand x",
    "host'",
    'host"',
    "host\\",
    "",
    " ",
    "@",
    "@host",
    "user@",
    "a@b@c",
    "user:password@host",
    "ssh://host",
    "host/path",
    "host:/path",
    "h\x00st",
    "h\x1b[2Jst",
    "hóst",
    "host%h",
    "{host}",
    "host*",
    "!host",
    "~host",
    "host,other",
    "x" * 300,
    "[::1]",
    "fe80::1%eth0;x",
    "host.",
]


def bad_destinations():
    generator = random.Random(8)
    made = list(BAD_DESTINATIONS)
    while len(made) < 200:
        place = generator.choice(["{bad}host", "ho{bad}st", "user{bad}@host", "user@ho{bad}st", "host{bad}"])
        made.append(
            place.format(bad=generator.choice(" ;|&$`'\"\\\n\r\t\x00\x1b<>(){}[]*?!#%^=+,/~") * generator.randint(1, 3))
        )
    return made


def test_200_hostile_destinations_are_refused_before_anything_is_started(canary, monkeypatch):
    started = []
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **options: started.append(args))
    for text in bad_destinations():
        host = Host(name="pc1", workdir="/w", python="", transport="ssh", ssh=text, host_key="ssh-ed25519 " + "A" * 68)
        for call in (lambda: connect(host), lambda: scan_key(text), lambda: resolve(text)):  # noqa: B023
            with pytest.raises(UsageError) as caught:
                call()
            assert caught.value.exit_code == 2
            assert str(caught.value).isprintable() or "\x1b" not in str(caught.value)
    assert started == []


@pytest.mark.parametrize("name", ["", "-o", "a b", "a\n", "*", "pc1,pc2", "@revoked", "|1|x", "#", "é", "!pc"])
def test_a_name_that_cannot_stand_in_known_hosts_is_refused(name):
    with pytest.raises(UsageError, match="is no name for a host"):
        SshTransport(Host(name=name, ssh="pc1", workdir="/w", python="", transport="ssh"))


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_a_port_that_is_none_is_refused(port):
    with pytest.raises(UsageError, match="is no port"):
        SshTransport(Host(name="pc1", ssh_port=port, workdir="/w", python="", transport="ssh"))


@pytest.mark.parametrize(
    "text", ["h0", "gpu-1.lan", "10.77.0.10", "alice@h0", "a.b@my_host", "fe80::1%eth0", "::1", "bob@2001:db8::1", "H1"]
)
def test_good_destinations_are_taken(text):
    SshTransport(Host(name="pc1", ssh=text, workdir="/w", python="", transport="ssh"))


@pytest.mark.parametrize(
    "key", ["", "ssh-ed25519", "x y", "ssh-ed25519 AAAA\n* ssh-ed25519 AAAA", "@cert-authority * ssh-rsa A"]
)
def test_a_pinned_key_that_is_none_is_refused(sshd, key):
    with pytest.raises(UsageError, match="its host key is not readable"):
        sshd.transport(host_key=key).home()


# Trees (S15)


def tree_with(folder, make):
    (folder / "tree" / "sub").mkdir(parents=True)
    (folder / "tree" / "good").write_bytes(b"good")
    (folder / "secret").write_bytes(b"secret")
    (folder / "outside").mkdir()
    (folder / "outside" / "key").write_bytes(b"secret")
    make(folder / "tree", folder)
    return folder / "tree"


HOSTILE_TREES = {
    "link to a secret": lambda tree, top: (tree / "x").symlink_to(top / "secret"),
    "relative link to a secret": lambda tree, top: (tree / "x").symlink_to("../secret"),
    "link to a folder outside": lambda tree, top: (tree / "x").symlink_to(top / "outside"),
    "link to the parent": lambda tree, top: (tree / "x").symlink_to(".."),
    "link to the root": lambda tree, top: (tree / "x").symlink_to("/"),
    "link to the home": lambda tree, top: (tree / "x").symlink_to(Path.home()),
    "link in a folder": lambda tree, top: (tree / "sub" / "x").symlink_to("../../secret"),
    "link over a link": lambda tree, top: [(tree / "a").symlink_to(".."), (tree / "x").symlink_to("a/secret")],
    "link to a brother with the same beginning": lambda tree, top: [
        (top / "tree2").write_bytes(b"secret"),
        (tree / "x").symlink_to("../tree2"),
    ],
    "link to a process": lambda tree, top: (tree / "x").symlink_to("/proc/self/environ"),
    "link to itself": lambda tree, top: (tree / "x").symlink_to("x"),
    "link to its folder": lambda tree, top: (tree / "sub" / "x").symlink_to("."),
    "links round in a ring": lambda tree, top: [
        (tree / "x").symlink_to("sub"),
        (tree / "sub" / "y").symlink_to("../sub"),
    ],
    "pipe": lambda tree, top: os.mkfifo(tree / "x"),
    "socket": lambda tree, top: os.mknod(tree / "x", 0o140600),
    "link to a device": lambda tree, top: (tree / "x").symlink_to("/dev/zero"),
    "link to nowhere": lambda tree, top: (tree / "x").symlink_to("nowhere"),
    "deep": lambda tree, top: (tree / "/".join("d" * 100)).mkdir(parents=True),
}


@pytest.mark.parametrize("kind", HOSTILE_TREES)
@pytest.mark.parametrize("way", ["push", "pull"])
@pytest.mark.parametrize("limit", [0, 1 << 40], ids=["rsync", "stream"])
def test_a_hostile_tree_is_refused_and_nothing_of_it_arrives(transport, tmp_path, kind, way, limit, monkeypatch):
    monkeypatch.setattr(ssh, "RSYNC_FROM_BYTES", limit)
    tree = tree_with(tmp_path, HOSTILE_TREES[kind])
    with pytest.raises((GanglineError, OSError)):
        getattr(transport, way)(tree, tmp_path / "target")
    assert not (tmp_path / "target").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".target")] == []


@pytest.mark.parametrize("kind", ["local", "ssh"])
def test_links_inside_a_tree_arrive_as_what_they_lead_to(tmp_path, kind, transport):
    transport = transport if kind == "ssh" else connect(Host(name="pc1", workdir=str(tmp_path), python=""))
    tree = tree_with(tmp_path, lambda tree, top: (tree / "sub" / "x").symlink_to("../good"))
    transport.push(tree, tmp_path / "target")
    assert (tmp_path / "target" / "sub" / "x").read_bytes() == b"good"
    assert not (tmp_path / "target" / "sub" / "x").is_symlink()


def member(name, data=b"", **header):
    words = json.dumps({"name": name, "size": len(data), "x": False, **header}).encode()
    return struct.pack("!I", len(words)) + words + data


FOLDER = member("", size=None)
END = struct.pack("!I", 0)
HOSTILE_STREAMS = {
    "nothing": b"",
    "only an end": END,
    "no end": FOLDER + member("a", b"x"),
    "cut in the middle": (FOLDER + member("a", b"x" * 100))[:-50],
    "parent": FOLDER + member("../x", b"x") + END,
    "parent within": FOLDER + member("a", size=None) + member("a/../../x", b"x") + END,
    "absolute": FOLDER + member("/x", b"x") + END,
    "absolute file": FOLDER + member("{outside}", b"x") + END,
    "double slash": FOLDER + member("a//b", b"x") + END,
    "dot": FOLDER + member(".", b"x") + END,
    "slash at the end": FOLDER + member("a/", b"x") + END,
    "nul": FOLDER + member("a\0b", b"x") + END,
    "the same twice": FOLDER + member("a", b"x") + member("a", b"y") + END,
    "a file as a folder": FOLDER + member("a", b"x") + member("a/b", b"y") + END,
    "a folder that was not named": FOLDER + member("a/b", b"y") + END,
    "the root twice": FOLDER + FOLDER + END,
    "negative size": FOLDER + member("a", size=-1) + END,
    "size in words": FOLDER + member("a", size="1") + END,
    "no size": FOLDER + struct.pack("!I", 20) + b'{"name":"a","x":true' + END,
    "huge size": FOLDER + member("a", size=1 << 62) + b"x" * 1000,
    "huge header": FOLDER + struct.pack("!I", 1 << 31) + b"x" * 1000,
    "not json": FOLDER + struct.pack("!I", 4) + b"abcd" + END,
    "a list": FOLDER + struct.pack("!I", 2) + b"[]" + END,
    "no name": FOLDER + struct.pack("!I", 2) + b"{}" + END,
    "name of a number": FOLDER + member(5, b"x") + END,
    "long name": FOLDER + member("n" * 5000, b"x") + END,
    "deep": FOLDER + b"".join(member("/".join("d" * n), size=None) for n in range(1, 99)) + END,
    "deep json": FOLDER + struct.pack("!I", 60000) + b"[" * 60000 + END,
    "lone surrogate": FOLDER + member("\ud800", b"x") + END,
    "gibberish": random.Random(1).randbytes(10000),
}


@pytest.mark.parametrize("kind", HOSTILE_STREAMS)
def test_a_hostile_stream_writes_nothing_outside_and_nothing_half(tmp_path, kind):
    inside = tmp_path / "inside"
    (inside / "target").mkdir(parents=True)
    (inside / "target" / "old").write_bytes(b"old")
    data = HOSTILE_STREAMS[kind].replace(b"{outside}", os.fsencode(tmp_path / "outside"))
    with pytest.raises((GanglineError, OSError)), copying():
        tree_stream.unpack(io.BytesIO(data), os.fsencode(inside / "target"))
    assert [path.name for path in inside.iterdir()] == ["target"]
    assert [path.name for path in (inside / "target").iterdir()] == ["old"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inside"]
