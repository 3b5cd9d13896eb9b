"""A whole story of an ordinary user with secrets in the shell, everything going wrong once; then everything is
searched.

S2 hostile words arrive, S4 and S5 secrets are nowhere, S6 no socket of ours listens, S11 nobody else may write or read,
S14 no privilege is needed.
"""

import json
import re
import time

import pytest

from tests.lab.hosts import Lab
from tests.lab.searched import rights, search
from tests.lab.secret_story import TOKENS, Story, digest
from tests.lab.watched import Watch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
MADE = ("gangline", ".local")
"""What gangline makes below a home folder."""


@pytest.fixture(scope="module")
def story():
    """All of it is told once; the tests look at what is left."""
    with Lab(3, meshed=True, ttl_s=1200) as lab:
        story = Story(lab)
        story.tell()
        yield story


def test_s2_hostile_words_and_values_reach_the_ranks_byte_for_byte(story):
    assert [said["words"] for said in story.received] == [digest(story.words)] * 3
    assert [said["values"] for said in story.received] == [digest(story.values)] * 3
    packages = ("-path", "*/site-packages", "-prune", "-o")  # of other checkouts: transformers has a model of that name
    for machine in story.lab.machines:
        words = ["find", "/", "-xdev", *packages, "-name", "canary*", "-print"]
        assert machine.check(words, as_root=True) == ""


def test_s4_ranks_have_the_tokens_and_nobody_else_has_them_in_the_environment(story):
    assert [said["tokens"] for said in story.received] == [digest(TOKENS.values())] * 3
    launchers = [line for line in story.holding if "torch.distributed.run" in line]
    ranks = [line for line in story.holding if re.match(r"\S+python\S* train\.py ", line)]
    assert (len(launchers), len(ranks), len(story.holding)) == (3, 3, 6)


def test_s4_no_command_prints_a_secret(story):
    assert story.printed() == []
    assert any("Traceback" in text for _, _, text in story.said)
    assert len(story.said) > 14


def test_s4_no_secret_is_in_any_command_line(story):
    assert story.watch.of("word") == []
    assert story.watch.ticks > 500


def test_s4_no_secret_is_in_any_file_of_any_machine(story):
    assert story.found() == []


def test_s5_no_secret_is_left_where_supervisor_host_agent_and_controller_were_killed(story):
    assert story.left == []
    assert story.processes == []


def test_s6_nothing_of_ours_listens_but_the_bounded_listeners_of_check(story):
    hosts = {host.name: host.address for host in story.lab.hosts}
    probes, others = story.doors()
    assert {door["machine"] for door in probes} == set(hosts)
    assert [door for door in probes if door["address"] != hosts[door["machine"]]] == []
    assert [door for door in others if not door["address"].startswith("127.")] == []


def test_s11_nobody_else_may_read_or_write_what_it_made(story):
    """Though the shell and all logins have umask 000."""
    bad = []
    for machine in story.lab.machines:
        rows = rights(machine, [story.user.home / name for name in MADE])
        assert rows
        bad += [(machine.name, mode, path) for mode, _, path in rows if mode[0] != "l" and mode[4:] != "------"]
    assert bad == []


def test_s11_it_leaves_nothing_in_the_folders_of_everybody(story):
    """But for the folder of a connection whose process was killed; the next process of ours takes it away."""
    places = ("/tmp", "/var/tmp", "/dev/shm", "/run")
    for machine in story.lab.machines:
        left = machine.check(["find", *places, "-xdev", "-name", "*gangline*"], as_root=True).splitlines()
        assert [path for path in left if "gangline-ssh-" not in path] == []


def test_s14_all_of_this_takes_no_privilege(story):
    status = story.user.check(["cat", "/proc/self/status"])
    number = int(re.search(r"Uid:\s+(\d+)", status)[1])
    assert number != 0
    if not story.lab.mode.rootless:
        assert re.search(r"CapEff:\s+0+$", status, re.MULTILINE)
        assert re.search(r"NoNewPrivs:\s+1", status)
    for machine in story.lab.machines:
        assert {owner for _, owner, _ in rights(machine, [story.user.home / name for name in MADE])} == {number}


def test_who_looks_sees(story):
    """The watch and the search find what is there to be found."""
    desk, word = story.lab.user, "CanaryOfTheWatch"
    server = "import socket, time; door = socket.create_server(('127.0.0.1', 0)); time.sleep(2)"
    begun = time.time()
    with Watch(story.lab, {"canary": word}) as watch:
        desk.check(["sh", "-c", "sleep 0.1", word])
        desk.check(["python3", "-c", server, "server"])
        desk.write("note", json.dumps({"said": word}))
        desk.check(["sh", "-c", "echo CanaryOfTheWatch | base64 > encoded"])
    assert any("sleep 0.1" in each["command"] for each in watch.of("word"))
    (door,) = watch.of("may_replace")
    assert (door["machine"], door["protocol"], door["address"]) == ("desk", "tcp", "127.0.0.1")
    assert door["owners"][0].endswith("server")
    assert search(desk, {"canary": word}, since=begun) == [
        f"canary in {desk.home}/encoded",
        f"canary in {desk.home}/note",
    ]
