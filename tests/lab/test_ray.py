"""The backend ray with a real Ray on three hosts: a cluster of our own, the end of each of its parts, and an outsider.
Nothing is left on any host, Ray's daemons included.

`make ray` puts Ray into `.ray`; without it these tests are skipped.
"""

import json

import pytest

from tests.lab.gang import Gang, assert_nothing_left
from tests.lab.hosts import ROOT, lab_folders

PYTHON = ROOT / ".ray" / "bin" / "python"
pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason="no .ray: make ray"),
    pytest.mark.timeout(300),
]


@pytest.fixture
def gang(lab):
    return Gang(lab(3, binds=lab_folders()))


def begun(gang, **options):
    gang.begin(backend="ray", python=str(PYTHON), **options)
    gang.joined()
    return gang


def assert_failed(gang, words):
    outcome = gang.outcome(timeout_s=150.0)
    assert outcome["result"] == "failed"
    assert words in outcome["error"]["what"], outcome["error"]
    assert (outcome["left"], outcome["unverified"]) == ([], [])
    assert_nothing_left(gang.lab, folder=gang.folder, within_s=60)
    assert [host.run(["sh", "-c", "ls -d /tmp/gangline-ray-*"]).stdout for host in gang.lab.hosts] == [""] * 3


def test_a_gang_is_started_followed_and_stopped_and_secrets_are_on_no_disk(gang):
    begun(gang)
    assert gang.goes_on()
    head = gang.lab.hosts[0]
    nodes = head.check(["pgrep", "-x", "raylet"]).split()
    secret = head.check(
        ["sh", "-c", f"tr '\\0' '\\n' < /proc/{nodes[0]}/environ | sed -n s/^RAY_AUTH_TOKEN=//p"]
    ).strip()
    assert len(secret) == 64
    for host in gang.lab.hosts:
        words = host.check(["ps", "-eo", "args"])
        assert [word for word in (secret, "hf_canary") if word in words] == []
        found = host.run(["grep", "-rlE", f"{secret}|hf_canary", gang.folder, "/tmp"]).stdout
        assert found == ""
    gang.order("stop")
    outcome = gang.outcome()
    assert (outcome["result"], outcome["error"], outcome["left"], outcome["unverified"]) == ("stopped", None, [], [])
    assert_nothing_left(gang.lab, folder=gang.folder, within_s=60)
    assert [host.run(["sh", "-c", "ls -d /tmp/gangline-ray-*"]).stdout for host in gang.lab.hosts] == [""] * 3


def kill(host, *words):
    host.check(["pkill", "-9", *words])


def kill_actor(gang):
    h1 = gang.lab.hosts[1]
    below = h1.check(["pgrep", "-f", "foreground below"]).split()[0]
    h1.check(["kill", "-9", h1.check(["ps", "-o", "ppid=", "-p", below]).strip()])


def kill_agent(gang):
    h1 = gang.lab.hosts[1]
    h1.check(["kill", "-9", str(gang.record(h1, "h1/agent.json")["pid"])])


def kill_program(gang):
    pid = json.loads(gang.lab.hosts[0].read(f"{gang.attempt(None)}/ray/launcher.json"))["pid"]
    gang.lab.hosts[0].check(["kill", "-9", str(pid)])


KILLS = {
    "program": (kill_program, "ray on h0 was killed by signal 9"),
    "raylet": (lambda gang: kill(gang.lab.hosts[1], "-x", "raylet"), "ray on h0 has lost h1"),
    "head": (lambda gang: kill(gang.lab.hosts[0], "-x", "gcs_server"), "ray on h0"),
    "actor": (kill_actor, "ray on h0 has lost h1"),
    "agent": (kill_agent, "the gangline agent on h1 died; its ranks were stopped"),
}


@pytest.mark.parametrize("part", KILLS)
def test_a_killed_part_ends_the_gang_and_is_named(gang, part):
    how, words = KILLS[part]
    begun(gang)
    how(gang)
    assert_failed(gang, words)


OUTSIDER = """
import sys
from ray._raylet import GcsClient
try:
    print("saw", len(GcsClient(address=sys.argv[1]).get_all_node_info()))
except Exception as error:
    print(type(error).__name__, error)
"""


def test_an_outsider_without_the_token_sees_nothing_and_joins_nothing(gang):
    begun(gang)
    address = gang.record(gang.lab.hosts[0], "h0/ray/address.json")["address"]
    desk = gang.lab.user
    for variables in ({}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}):
        seen = desk.run([str(PYTHON), "-c", OUTSIDER, address], env=variables, timeout_s=100)
        assert "saw" not in seen.stdout
        assert "uthenticat" in seen.stdout, (seen.stdout, seen.stderr)
        ray = [str(PYTHON), "-m", "ray.scripts.scripts"]
        joined = desk.run([*ray, "start", f"--address={address}"], env=variables, timeout_s=100)
        assert joined.returncode != 0, joined.stdout
    assert gang.goes_on()
    gang.order("kill")
    gang.outcome()
    assert_nothing_left(gang.lab, folder=gang.folder, within_s=60)
