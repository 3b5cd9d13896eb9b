"""Hosts that lie, never end, or talk nonsense: an error in words, in bounded time and memory (S21)."""

import subprocess
import sys
import time
from pathlib import Path, PurePath

import pytest

from gangline.errors import HostUnreachable
from gangline.transport import channel, connection
from tests.process.transport.sshd import Sshd

LIARS = Path(__file__).with_name("far_ends.py")

AT_THE_START = ("flood_of_text", "flood_of_bytes", "greeting_of_wrong_types")
LATER = (
    "huge_frame",
    "huge_data",
    "bytes_after_greeting",
    "no_json",
    "deep_json",
    "list_for_object",
    "two_greetings",
    "more_than_the_window",
    "room_without_end",
    "empty_data",
    "answers_nobody_waits_for",
    "two_ends",
)


@pytest.fixture
def sshd(tmp_path):
    return Sshd(tmp_path)


def lying(sshd, kind):
    sshd.answer_with(f"ForceCommand={sys.executable} {LIARS} {kind}")
    return sshd.transport()


def read_often(transport):
    """What comes after the greeting may come after the first answer."""
    for _ in range(1000):
        transport.read(PurePath("/etc/hostname"))


@pytest.mark.parametrize("kind", [*AT_THE_START, *LATER])
def test_a_host_that_talks_nonsense_is_named(sshd, kind):
    transport = lying(sshd, kind)
    begun = time.monotonic()
    with pytest.raises(HostUnreachable, match="does not speak our protocol"):
        read_often(transport)
    assert time.monotonic() - begun < 20
    transport.close()


@pytest.mark.parametrize("kind", ["silence", "noise_without_end"])
def test_a_host_that_never_begins_costs_its_time_limit(sshd, kind, monkeypatch):
    monkeypatch.setattr(connection, "GREET_S", 1.0)
    transport = lying(sshd, kind)
    with pytest.raises(HostUnreachable, match=r"no answer within 1 s"):
        transport.run(["true"])


def test_a_slow_way_to_a_host_does_not_take_the_time_that_its_agent_has_to_greet():
    slow = channel.AgentChannel(connection.spawn([sys.executable, str(LIARS), "slow_twice"]))
    assert slow.greet(bytes(1 << 17), 2.2).python
    slow.close()


@pytest.mark.parametrize("kind", ["drip", "deaf"])
def test_a_host_that_never_answers_costs_the_time_limit_of_the_command(sshd, kind, monkeypatch):
    monkeypatch.setattr(connection, "MARGIN_S", 0.5)
    monkeypatch.setattr(channel, "CANCEL_S", 0.5)
    monkeypatch.setattr("gangline.transport.ssh.MARGIN_S", 0.5)
    transport = lying(sshd, kind)
    begun = time.monotonic()
    with pytest.raises(HostUnreachable, match=r"pc1 does not answer any more\n.*run had no answer within 1 s"):
        transport.run(["true"], timeout_s=0.5)
    assert time.monotonic() - begun < 10
    transport.close()


GROWTH = """
import resource, sys, time
from pathlib import Path, PurePath
from gangline.errors import GanglineError
from gangline.transport.ssh import SshTransport
from gangline.runs.cluster import Host

def transport(config):
    host = Host(name="pc1", workdir="/", python="", transport="ssh", host_key=sys.argv[1])
    return SshTransport(host, ssh_config=Path(config))

def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

honest = transport(sys.argv[2])
honest.run(["true"])
before = peak_bytes()
for config in sys.argv[3:]:
    try:
        for _ in range(1000):
            transport(config).read(PurePath("/etc/hostname"))
    except GanglineError:
        pass
lies = peak_bytes()
try:
    honest.run(["sh", "-c", "yes 'a host that never stops talking' | head -c 200000000"], timeout_s=60)
    honest.run(["sh", "-c", "head -c 100000000 /dev/zero >&2"], timeout_s=60)
    honest.run(["yes"], timeout_s=1)
except TimeoutError:
    pass
print((lies - before) >> 20, (peak_bytes() - before) >> 20)
"""


def test_neither_lies_nor_endless_output_cost_memory(sshd):
    """Hundreds of megabytes of an honest host included: the last 8 MiB are kept."""
    configs = []
    for kind in ("flood_of_text", "flood_of_bytes", "bytes_after_greeting", "more_than_the_window", "empty_data"):
        sshd.answer_with(f"ForceCommand={sys.executable} {LIARS} {kind}")
        configs.append(sshd.folder / f"{kind}.config")
        configs[-1].write_text(sshd.config.read_text())
    sshd.answer_with()
    argv = [sys.executable, "-c", GROWTH, sshd.host_key, sshd.config, *configs]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=100)
    lies_mb, all_mb = map(int, done.stdout.split())
    assert lies_mb <= 5
    assert all_mb <= 20
