"""Which key a host shows, and what the user's own ssh knows of it."""

import subprocess

import pytest

from gangline.errors import HostUnreachable, UsageError
from gangline.transport.hostkeys import fingerprint, known_already, known_fingerprints, resolve, scan_key
from tests.process.transport.sshd import Sshd


@pytest.fixture
def sshd(tmp_path):
    return Sshd(tmp_path)


def test_the_key_that_a_host_shows_is_seen_without_logging_in(sshd):
    (sshd.folder / "authorized_keys").write_text("")
    key = scan_key("alice@pc1", 2222, ssh_config=sshd.config)
    assert key.line == sshd.host_key
    assert key.fingerprint == fingerprint(sshd.host_key)
    assert sorted(path.name for path in sshd.folder.iterdir() if "known" in path.name) == []


def test_the_fingerprint_is_that_of_ssh_keygen(sshd):
    for kind in ("ed25519", "ecdsa", "rsa"):
        path = sshd.folder / kind
        subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-f", path], check=True)
        said = subprocess.check_output(["ssh-keygen", "-lf", f"{path}.pub"], text=True).split()[1]
        assert fingerprint(path.with_suffix(".pub").read_text()) == said


@pytest.mark.parametrize(("kind", "name"), [("ecdsa", "ecdsa-sha2-nistp256"), ("rsa", "ssh-rsa")])
def test_a_host_without_an_ed25519_key_can_be_pinned_too(sshd, kind, name):
    path = sshd.folder / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-f", path], check=True)
    sshd.config.write_text(sshd.config.read_text().replace(f"{sshd.folder}/host_key", str(path)))
    key = scan_key("pc1", ssh_config=sshd.config)
    assert key.line.startswith(f"{name} ")
    transport = sshd.transport(host_key=key.line)
    assert transport.run(["echo", "hello"]).stdout == "hello\n"
    transport.close()


def test_where_nobody_answers_there_is_no_key(sshd):
    sshd.answer_with(proxy="/bin/false")
    with pytest.raises(HostUnreachable, match="pc1 closes the connection before it has begun"):
        scan_key("alice@pc1", ssh_config=sshd.config)


@pytest.mark.parametrize(("port", "name"), [(None, "pc1"), (2222, "[pc1]:2222")])
@pytest.mark.parametrize("is_hashed", [False, True])
def test_a_key_that_the_users_ssh_knows_is_recognised(sshd, port, name, is_hashed):
    known = sshd.folder / "known"
    known.write_text(f"# a comment\n{name} {sshd.host_key}\n@revoked * {sshd.host_key}\n")
    if is_hashed:
        subprocess.run(["ssh-keygen", "-q", "-H", "-f", known], check=True, capture_output=True)
    sshd.config.write_text(f"{sshd.config.read_text()}    UserKnownHostsFile {known}\n")
    other = sshd.new_key("other")
    assert known_already("alice@pc1", sshd.host_key, port, ssh_config=sshd.config)
    assert not known_already("alice@pc1", other, port, ssh_config=sshd.config)
    assert not known_already("pc2", sshd.host_key, port, ssh_config=sshd.config)
    assert known_fingerprints("pc1", other, port, ssh_config=sshd.config) == (fingerprint(sshd.host_key),)


def test_ssh_config_says_what_a_name_means(sshd):
    text = "Host box\n    HostName 10.0.0.7\n    User alice\n    Port 2022\n    HostKeyAlias other\n"
    sshd.config.write_text(text)
    way = resolve("box", ssh_config=sshd.config)
    assert (way.user, way.hostname, way.port, way.host_key_alias) == ("alice", "10.0.0.7", 2022, "other")
    assert resolve("bob@box", 22, ssh_config=sshd.config).user == "bob"
    assert resolve("bob@box", 22, ssh_config=sshd.config).port == 22


def test_a_broken_ssh_config_is_told(sshd):
    sshd.config.write_text("Nonsense yes\n")
    with pytest.raises(UsageError, match=r"(?s)ssh cannot make anything of 'box'.*nonsense"):
        resolve("box", ssh_config=sshd.config)
