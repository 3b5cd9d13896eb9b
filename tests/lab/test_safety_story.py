"""A whole story of an ordinary user with secrets in the shell, everything going wrong once; then everything is searched.

S2 hostile words arrive, S4 and S5 secrets are nowhere, S6 no socket of ours listens, S11 nobody else may write or read,
S14 no privilege is needed.
"""

import json
import re
import time

import pytest

from tests.lab.hosts import Lab
from tests.lab.searched import rights, search
from tests.lab.secret_story import NEARBY, TOKENS, Story, digest
from tests.lab.watched import Watch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
HOMES = ("gangline", ".local")
"""What gangline makes below a home folder."""


@pytest.fixture(scope="module")
def story():
    """All of it is told once; the tests look at what is left."""
    with Lab(3, meshed=True, ttl_s=1200) as lab:
        story = Story(lab)
        story.plants()
        story.watch = Watch(lab, {**TOKENS, **NEARBY})
        with story.watch:
            tell(story)
        yield story


def tell(story):
    h0, h1, h2 = story.lab.hosts
    story.writes()
    story.types("check", "--json", code=3)  # the trainer is not installed
    story.types("run", "--dry-run", "--dir", "project", "--", *story.program("wait"))
    # a rank is killed, and the run resumed
    run = story.starts("wait")
    story.received = [story.awaits(run, host) for host in (h0, h1, h2)]
    story.holding = [line for host in (h0, h1, h2) for line in story.holders(host)]
    story.types("ps")
    story.types("ps", "--json")
    story.types("logs", run)
    story.types("logs", run, "--console")
    story.kills(h2, "train[.]py")
    story.types("attach", run, code=5)
    story.types("resume", run)
    # a script that fails
    story.types("run", "--dir", "project", "--", *story.program("fail"), code=5)
    # supervisor, guard and controller are killed
    run = story.starts("wait")
    story.awaits(run, h1)
    with story.user.popen(["gangline", "attach", run], stdout=-3, stderr=-3):
        story.kills(h0, "[g]angline.supervise")
        story.kills(h1, "[g]uard")
        story.kills(story.lab.user, "[g]angline attach")
    story.left = found(story)
    story.types("ps")
    story.types("stop", run, "--now")
    story.processes = [line for host in (h0, h1, h2) for line in host.processes()]
    # gangline itself has a bug
    story.user.write(f".local/state/gangline/runs/{run}/keeper.json", "[]")
    story.types("--debug", "attach", run, code=1)
    story.types("attach", run, code=1)


def found(story):
    """Every place of every machine where a secret is and should not be."""
    words = {**TOKENS, **NEARBY}
    places = [
        f"{machine.name}: {place}"
        for machine in story.lab.machines
        for place in search(machine, words, since=story.since)
    ]
    home = story.user.home
    planted = {f"desk: netrc in {home}/.netrc", f"desk: dotenv in {home}/project/.env"}
    planted |= {f"desk: key comment in {home}/.ssh/id_ed25519.pub", f"desk: key comment in {home}/.ssh/id_ed25519"}
    planted |= {f"{host.name}: host in {home}/.bashrc" for host in story.lab.hosts}
    assert planted - {f"desk: key comment in {home}/.ssh/id_ed25519"} <= set(places)  # else the search does not work
    return sorted(set(places) - planted)


def test_s2_hostile_words_and_values_reach_the_ranks_byte_for_byte(story):
    assert [said["words"] for said in story.received] == [digest(story.words)] * 3
    assert [said["values"] for said in story.received] == [digest(story.values)] * 3
    for machine in story.lab.machines:
        assert machine.check(["find", "/", "-xdev", "-name", "canary*"], as_root=True) == ""


def test_s4_ranks_have_the_tokens_and_nobody_else_has_them_in_the_environment(story):
    assert [said["tokens"] for said in story.received] == [digest(TOKENS.values())] * 3
    launchers = [line for line in story.holding if "torch.distributed.run" in line]
    ranks = [line for line in story.holding if re.match(r"\S+python\S* train\.py ", line)]
    assert (len(launchers), len(ranks), len(story.holding)) == (3, 3, 6)


def test_s4_no_command_prints_a_secret(story):
    words = {**TOKENS, **NEARBY}
    assert [(command, name) for command, _, text in story.said for name, word in words.items() if word in text] == []
    assert any("Traceback" in text for _, _, text in story.said)
    assert len(story.said) > 14


def test_s4_no_secret_is_in_any_command_line(story):
    assert story.watch.of("word") == []
    assert story.watch.ticks > 500


def test_s4_no_secret_is_in_any_file_of_any_machine(story):
    assert found(story) == []


def test_s5_no_secret_is_left_where_supervisor_guard_and_controller_were_killed(story):
    assert story.left == []
    assert story.processes == []


def test_s6_nothing_of_ours_listens_but_the_bounded_listeners_of_check(story):
    doors = story.watch.of("door")
    hosts = {host.name: host.address for host in story.lab.hosts}
    listeners = [door for door in doors if is_listener(door)]
    assert {door["machine"] for door in listeners} == set(hosts)
    assert [door for door in listeners if door["address"] != hosts[door["machine"]]] == []
    others = [door for door in doors if door not in listeners]
    assert [door for door in others if not door["address"].startswith("127.")] == []


def is_listener(door):
    """One that `check` opens for the other hosts; who is gone before it was looked at was one that never said more."""
    return any(re.search(r"/proc/self/fd/\d+ listen$", owner) for owner in door["owners"])


def test_s11_nobody_else_may_read_or_write_what_it_made(story):
    bad = []
    for machine in story.lab.machines:
        tops = [story.user.home / name for name in HOMES]
        rows = [row for row in rights(machine, tops) if not row[0].startswith("l")]
        assert rows or machine.name == "outsider"
        bad += [(machine.name, mode, path) for mode, _, path in rows if mode[4:] != "------"]
    assert bad == []


def test_s11_it_leaves_nothing_in_the_folders_of_everybody(story):
    for machine in story.lab.machines:
        left = machine.check(
            ["find", "/tmp", "/var/tmp", "/dev/shm", "/run", "-xdev", "-name", "*gangline*"], as_root=True
        )
        assert [line for line in left.splitlines() if "gangline-ssh-" not in line] == []


def test_s14_all_of_this_takes_no_privilege(story):
    number = json.loads(story.user.check(["python3", "-c", "import os; print(os.getuid())"]))
    assert number != 0
    status = story.user.check(["cat", "/proc/self/status"])
    assert re.search(r"CapEff:\s+0+$", status, re.MULTILINE) or story.lab.mode.rootless
    assert re.search(r"NoNewPrivs:\s+1", status) or story.lab.mode.rootless
    for machine in story.lab.machines:
        tops = [story.user.home / name for name in HOMES]
        assert {owner for _, owner, _ in rights(machine, tops)} <= {number}
    assert time.time() - story.since < 400
