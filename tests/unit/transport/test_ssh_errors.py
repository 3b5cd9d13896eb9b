"""ssh's own last words, as recorded from OpenSSH 8.2 to 9.9, and what the user is told."""

import pytest

from gangline.errors import HostKeyRefused
from gangline.transport.ssh_options import NO_PYTHON, REFUSED_BY_GATE, ConnectionEnd, explain

KEY = ("ssh-ed25519", "AAAAC3NzaC1lZDI1NTE5AAAAIHwD2oBZockq0zbqJOQTGgLprCsnG5ehFRWSC7sTLU5o")
PINNED = "SHA256:XHZdqb+B5Sau3j7JelY6coVUEolhubkz6kU7FI3Rzbw"
NEW = "SHA256:CzjkjeE5MqyrC4UKlYWnMotRW10ac/m7vYFTAHjHRJ4"
CHANGED = f"""@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
IT IS POSSIBLE THAT SOMEONE IS DOING SOMETHING NASTY!
Someone could be eavesdropping on you right now (man-in-the-middle attack)!
It is also possible that a host key has just been changed.
The fingerprint for the ED25519 key sent by the remote host is
{NEW}.
Please contact your system administrator.
Add correct host key in /tmp/x/known_hosts to get rid of this message.
Offending ED25519 key in /tmp/x/known_hosts:1
Host key for gpu1 has changed and you have requested strict checking.
Host key verification failed."""


def told(stderr, *, returncode=255, **more):
    ending = {
        "host": "gpu1",
        "destination": "alice@10.0.0.7",
        "key": KEY,
        "known_hosts": "/tmp/x/known_hosts",
        "noise": "",
        "why": "",
        "greeted": False,
    }
    return explain(ConnectionEnd(**{**ending, "returncode": returncode, "stderr": stderr, **more}))


@pytest.mark.parametrize(
    ("stderr", "words"),
    [
        ("ssh: Could not resolve hostname gpu1: Name or service not known", "the name alice@10.0.0.7 is not known"),
        ("ssh: Could not resolve hostname gpu1: Temporary failure in name resolution", "is not known"),
        ("ssh: connect to host 10.0.0.7 port 22: Connection refused", "connection refused: the machine is there"),
        ("ssh: connect to host 10.0.0.7 port 22: Connection timed out", "gpu1 does not answer"),
        ("ssh: connect to host 10.0.0.7 port 22: No route to host", "gpu1 does not answer"),
        ("ssh: connect to host 10.0.0.7 port 22: Operation timed out", "gpu1 does not answer"),
        ("Timeout, server 10.0.0.7 not responding.", "gpu1 does not answer"),
        ("Connection timed out during banner exchange\nConnection to 10.0.0.7 port 22 timed out", "does not answer"),
        ("alice@10.0.0.7: Permission denied (publickey).", "refuses your key: permission denied"),
        ("Received disconnect from 10.0.0.7 port 22:2: Too many authentication failures", "refuses your key"),
        ("kex_exchange_identification: Connection closed by remote host", "closes the connection before"),
        ("kex_exchange_identification: read: Connection reset by peer", "closes the connection before"),
        ("banner exchange: Connection to UNKNOWN port 65535: Broken pipe", "closes the connection before"),
        ("Connection closed by 10.0.0.7 port 22", "closes the connection before"),
        (
            "Unable to negotiate with 10.0.0.7 port 22: no matching cipher found. Their offer: 3des-cbc",
            "have no method in common",
        ),
        ("/home/a/.ssh/config: line 3: Bad configuration option: hots", "does not accept its configuration"),
        ("Bad owner or permissions on /home/a/.ssh/config", "does not accept its configuration"),
        (
            "channel 0: open failed: connect failed: Connection refused\nstdio forwarding failed\nConnection closed by",
            "connection refused",
        ),
        ("something that ssh never said before", "gpu1: ssh cannot connect"),
    ],
)
def test_the_reason_is_named(stderr, words):
    error = told(stderr)
    assert words in error.what
    assert stderr.splitlines()[-1] in error.seen
    assert error.fix
    assert not isinstance(error, HostKeyRefused)


def test_a_banner_of_the_host_is_not_taken_for_the_reason():
    banner = "WARNING: connection refused to all but staff\nPermission denied to others\n" + "=====\n" * 5
    error = told(f"{banner}ssh: connect to host 10.0.0.7 port 22: Connection timed out")
    assert "does not answer" in error.what


def test_a_changed_key_names_both_fingerprints():
    error = told(CHANGED)
    assert isinstance(error, HostKeyRefused)
    assert (PINNED in error.seen, NEW in error.seen) == (True, True)
    assert "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub" in error.fix


@pytest.mark.parametrize(
    "stderr",
    [
        "No ED25519 host key is known for jump and you have requested strict checking.\nHost key verification failed.",
        CHANGED.replace("/tmp/x/", "/home/a/.ssh/"),
    ],
)
def test_the_key_of_a_jump_host_is_not_said_to_be_that_of_the_host(stderr):
    """Its key is in the user's own known_hosts, and none of ours."""
    error = told(f"{stderr}\nConnection closed by UNKNOWN port 65535")
    assert isinstance(error, HostKeyRefused)
    assert "a host on the way to it" in error.what
    assert "HAS ANOTHER" not in error.what


def test_a_host_without_python_is_told_so():
    assert "has no Python 3.8 or newer" in told("", returncode=NO_PYTHON).what


@pytest.mark.parametrize("returncode", [-9, -15, None])
def test_a_host_that_said_nothing_in_time_is_not_said_to_speak_another_protocol(returncode):
    error = told("", returncode=returncode, noise="", why="no answer within 30 s")
    assert error.what == "gpu1 does not answer"
    assert error.seen == "no answer within 30 s"


def test_what_a_host_printed_is_quoted_harmlessly():
    error = told(
        "", returncode=1, noise="\x1b]0;evil\x07\x1b[2JThis account is locked.\r\n", why="it ended with code 1"
    )
    assert "does not speak our protocol" in error.what
    assert "This account is locked." in error.seen
    assert "\x1b" not in str(error)


def test_a_connection_that_is_lost_later_is_another_thing():
    error = told("client_loop: send disconnect: Broken pipe", greeted=True, why="the connection ended with code 255")
    assert error.what == "gpu1: the connection was lost"
    assert "Broken pipe" in error.seen


@pytest.mark.parametrize("words", ["Host key verification failed.", CHANGED])
def test_what_is_printed_after_the_greeting_says_nothing_of_the_key(words):
    lost = told(words, greeted=True, why="the connection ended with code 255")
    assert not isinstance(lost, HostKeyRefused)
    assert lost.what == "gpu1: the connection was lost"


def test_the_gate_of_a_key_between_hosts_is_told_with_what_it_said_and_the_way_out():
    error = told("gangline: this key lets in another version of gangline", returncode=REFUSED_BY_GATE)
    assert error.what == "gpu1 does not let this gangline in by its key between hosts"
    assert error.seen == "gangline: this key lets in another version of gangline"
    assert error.fix == "on your computer: gangline prepare --between-hosts"
