"""Step `between`: keys of the hosts' own for one another. Facts in, changes out."""

import dataclasses
import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from gangline.errors import RunFailed
from gangline.prepare import prepare_hosts
from gangline.prepare.keys_between import BETWEEN, FOLDER, GATE, KEY, gate_program
from gangline.prepare.prepare_step import CommandChange, FileChange, FileRead, HostReading, StepView
from gangline.prepare.ssh_access import AUTHORIZED, CONFIG, OWN_CONFIG
from gangline.runs.cluster import Cluster, Host

HOSTS = tuple(
    Host(name=f"pc{n}", workdir="/w", python="", transport="ssh", ssh=f"alice@pc{n}", address=f"192.168.1.1{n}")
    for n in (1, 2, 3)
)
COMMAND = 'command="/usr/bin/python3 -I -S /home/alice/.ssh/gangline_gate.py"'


def public(name):
    return f"ssh-ed25519 AAAA{name} gangline-{name}\n"


def line(name, address=None):
    return f'restrict,from="{address or f"192.168.1.1{name[2]}"}",{COMMAND} {public(name).strip()}'


def reading(folder=("id_ed25519", "id_ed25519.pub", "config"), python="Python 3.11.2", programs=None, **files):
    texts = {AUTHORIZED: None, CONFIG: None, OWN_CONFIG: None, f"{KEY}.pub": None, GATE: None, **files}
    return HostReading(
        user="alice",
        uid=1000,
        home="/home/alice",
        files={path: FileRead(content=None if text is None else text.encode()) for path, text in texts.items()},
        folders={FOLDER: folder},
        commands={"python3": python},
        programs={"python3": "/usr/bin/python3", **(programs or {})},
    )


def with_keys(*names):
    """What hosts answer that have their keys, and none of the others' lines."""
    return {name: reading(**{f"{KEY}.pub": public(name)}) for name in names}


def view_of(name, readings=None, hosts=HOSTS, named=()):
    cluster = Cluster(name="home", hosts=hosts)
    readings = {name: reading(), **(readings or {})}
    return StepView(
        host=cluster.host(name), cluster=cluster, reading=readings[name], readings=readings, named=tuple(named)
    )


def planned(name, readings=None, hosts=HOSTS, named=()):
    return BETWEEN.plan(view_of(name, readings, hosts, named))


def texts_of(plan):
    files = [each for each in plan.changes if isinstance(each, FileChange)]
    return {"~" + each.path.removeprefix("/home/alice"): each.content.decode() for each in files}


@pytest.mark.parametrize("name", ["pc1", "pc3"])
def test_each_host_makes_a_key_and_uses_it_for_the_others_after_those_that_ssh_tried(name):
    plan = BETWEEN.plan_first(view_of(name, {name: reading(folder=("id_ed25519", "id_ed25519_sk"))}))
    key, config, own = plan.changes
    assert isinstance(key, CommandChange)
    assert key.argv[-2:] == ("-f", "/home/alice/.ssh/gangline_between")
    assert key.undo[2:] == ("/home/alice/.ssh/gangline_between", "/home/alice/.ssh/gangline_between.pub")
    assert b"Include ~/.ssh/gangline.conf" in config.content
    others = " ".join(host.address for host in HOSTS if host.name != name)
    assert own.content.decode() == (
        "# BEGIN gangline prepare between\n"
        f"Host {others}\n"
        "    IdentityFile ~/.ssh/id_ed25519\n"
        "    IdentityFile ~/.ssh/gangline_between\n"
        "    IdentityFile ~/.ssh/id_ed25519_sk\n"
        "# END gangline prepare between\n"
    )


def test_every_host_takes_the_others_keys_from_their_addresses_and_for_the_gate_only():
    own = reading(**{f"{KEY}.pub": public("pc2"), AUTHORIZED: "ssh-rsa AAAAother bob"})
    plan = planned("pc2", {**with_keys("pc1", "pc3"), "pc2": own})
    assert texts_of(plan)[AUTHORIZED] == f"ssh-rsa AAAAother bob\n{line('pc1')}\n{line('pc3')}\n"
    assert {(change.mode, change.scope) for change in plan.changes[-2:]} == {(0o600, "user")}
    assert "whoever is you, or root, on pc1, pc3 can run programs here as you" in plan.risk


def test_the_gate_comes_before_the_lines_that_name_it_and_knows_this_agent():
    paths = [change.path for change in planned("pc2", with_keys("pc1", "pc2", "pc3")).changes][-2:]
    assert paths == ["/home/alice/.ssh/gangline_gate.py", "/home/alice/.ssh/authorized_keys"]
    told: dict[str, object] = {"__name__": "the gate"}
    exec(gate_program(view_of("pc2")), told)
    assert [len(digest) for digest in told["ADMITTED"]] == [64]
    assert told["FOLDERS"] == ("/w",)
    assert str(told["BOOTSTRAP"]).startswith("exec sh -c")


def test_the_agent_of_before_stays_let_in_and_no_older_one():
    def admitted(text):
        return re.findall(r"[0-9a-f]{64}", next(row for row in text.splitlines() if row.startswith("ADMITTED")))

    first = gate_program(view_of("pc2"))
    (now,) = admitted(first)
    old = first.replace(now, "a" * 64)
    second = gate_program(view_of("pc2", {"pc2": reading(**{GATE: old})}))
    assert admitted(second) == [now, "a" * 64]
    assert gate_program(view_of("pc2", {"pc2": reading(**{GATE: second})})) == second
    third = gate_program(view_of("pc2", {"pc2": reading(**{GATE: second.replace(now, "b" * 64)})}))
    assert admitted(third) == [now, "b" * 64]


def test_with_named_hosts_only_these_get_a_key_and_every_host_their_lines():
    readings = with_keys("pc1")
    assert BETWEEN.plan_first(view_of("pc2", readings, named=["pc1"])).changes == ()
    for name in ("pc2", "pc3"):
        assert texts_of(planned(name, readings, named=["pc1"]))[AUTHORIZED] == f"{line('pc1')}\n"
    assert AUTHORIZED not in texts_of(planned("pc1", readings, named=["pc1"]))


def test_a_witness_lets_the_hosts_in_and_gets_no_key_of_its_own():
    *hosts, witness = HOSTS

    def view(name, readings):
        readings = {name: reading(), **readings}
        cluster = Cluster(name="home", hosts=tuple(hosts), witness=witness)
        return StepView(host=cluster.host(name), cluster=cluster, reading=readings[name], readings=readings)

    readings = with_keys("pc1", "pc2")
    assert BETWEEN.plan_first(view("pc3", readings)).changes == ()
    assert texts_of(BETWEEN.plan(view("pc3", readings)))[AUTHORIZED] == f"{line('pc1')}\n{line('pc2')}\n"
    of_host = texts_of(BETWEEN.plan(view("pc1", with_keys("pc2"))))
    assert "Host 192.168.1.12 192.168.1.13" in of_host[OWN_CONFIG]
    assert of_host[AUTHORIZED] == f"{line('pc2')}\n"


@pytest.mark.parametrize(
    "old",
    [line("pc1", "192.168.1.99"), 'restrict,from="192.168.1.11" ' + public("pc1").strip()],
    ids=["moved", "plain"],
)
def test_an_older_line_of_a_key_goes(old):
    own = reading(**{AUTHORIZED: f"{old}\nssh-rsa AAAAother bob\n"})
    plan = planned("pc2", {**with_keys("pc1"), "pc2": own}, hosts=HOSTS[:2])
    assert texts_of(plan)[AUTHORIZED] == f"ssh-rsa AAAAother bob\n{line('pc1')}\n"


def test_nothing_is_left_to_do_afterwards():
    readings = with_keys("pc1", "pc2", "pc3")
    after = {}
    for name in readings:
        texts = texts_of(planned(name, readings))
        after[name] = reading(**{f"{KEY}.pub": public(name), **texts})
    for name in after:
        assert planned(name, after).changes == ()


def test_without_a_key_of_another_host_its_line_waits_for_it():
    plan = planned("pc2", with_keys("pc1"))
    assert plan.remains == ("its line follows once pc3 has its key",)
    assert texts_of(plan)[AUTHORIZED] == f"{line('pc1')}\n"


def test_an_address_that_sshd_cannot_compare_is_told_and_its_host_gets_no_key():
    hosts = (dataclasses.replace(HOSTS[0], address="pc1.lan"), *HOSTS[1:])
    plan = planned("pc2", with_keys("pc2", "pc3"), hosts=hosts)
    assert plan.remains == ("write `address` of pc1 in the cluster file in numbers: sshd looks no name up",)
    assert texts_of(plan)[AUTHORIZED] == f"{line('pc3')}\n"
    assert BETWEEN.plan_first(view_of("pc1", hosts=hosts)).changes == ()


def test_this_computer_gets_no_key_and_is_reached_by_none():
    hosts = (dataclasses.replace(HOSTS[0], transport="local", ssh=None), *HOSTS[1:])
    assert planned("pc1", with_keys("pc2", "pc3"), hosts=hosts).changes == ()
    assert b"Host 192.168.1.13\n" in BETWEEN.plan_first(view_of("pc2", hosts=hosts)).changes[-1].content


def test_one_host_needs_no_key():
    assert planned("pc1", hosts=HOSTS[:1]).changes == ()


@pytest.mark.parametrize(
    ("python", "programs", "used"),
    [
        ("Python 3.6.9", {"python3.9": "/opt/python3.9"}, "/opt/python3.9"),
        ("", {"python3": None, "python3.8": "/usr/bin/python3.8"}, "/usr/bin/python3.8"),
    ],
)
def test_a_python_that_is_too_old_for_the_agent_does_not_run_the_gate(python, programs, used):
    own = reading(python=python, programs=programs)
    plan = planned("pc2", {**with_keys("pc1"), "pc2": own}, hosts=HOSTS[:2])
    assert f'command="{used} -I -S ' in texts_of(plan)[AUTHORIZED]


def test_a_home_that_a_shell_would_have_to_be_told_in_quotes_gets_no_line():
    own = dataclasses.replace(reading(), home="/home/al ice")
    plan = planned("pc2", {**with_keys("pc1"), "pc2": own}, hosts=HOSTS[:2])
    assert {AUTHORIZED, GATE}.isdisjoint(texts_of(plan))
    assert "would have to be quoted for sshd" in plan.remains[0]


@pytest.mark.parametrize("takeover", ["none", "votes"])
def test_a_head_that_must_supervise_and_cannot_fails_unless_hosts_are_prepared_one_by_one(monkeypatch, takeover):
    def refuse(*_):
        raise RunFailed("pc1 cannot supervise the run")

    monkeypatch.setattr(prepare_hosts, "located", lambda cluster, _: cluster)
    monkeypatch.setattr(prepare_hosts, "place_code", lambda cluster, *_, **__: cluster)
    monkeypatch.setattr(prepare_hosts, "choose_supervisor_host", refuse)
    said = []
    cluster = Cluster(name="home", hosts=HOSTS, supervisor="head", takeover=takeover)
    session = SimpleNamespace(
        cluster=cluster, steps=(BETWEEN,), readings={"pc1": reading()}, console=SimpleNamespace(report=said.append)
    )
    with nullcontext() if takeover == "votes" else pytest.raises(RunFailed):
        prepare_hosts._Session.report_supervisor(session, SimpleNamespace(transports={}))
    assert len(said) == (takeover == "votes")
