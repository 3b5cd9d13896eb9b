"""Code, environments, models and projects on real computers: without rsync, without ensurepip, with another Python."""

import pytest

from tests.lab import pythons

CASES = "tests.lab.cases_sync"


def entries(lab):
    return [{"name": host.name, "host_key": host.host_key, "address": host.address} for host in lab.hosts]


def do(lab, what, **arguments):
    return lab.user.call(f"{CASES}:{what}", hosts=entries(lab), **arguments)


def test_our_code_runs_on_every_host_and_is_brought_once(lab):
    said = do(lab(3, special={"h2": {"hide": ("rsync",)}}), "code")
    for name in ("h0", "h1", "h2"):
        assert said["ran"][name] == f"{said['code'][name]}/gangline/__init__.py"
    assert said["again"] == 0


def test_hosts_that_know_each_other_send_a_model_on(lab):
    said = do(lab(4, meshed=True), "spread", num_bytes=20 << 20)
    assert said["equal"]
    assert said["hops"][0] == ["this computer", "h0"]
    assert {source for source, _ in said["hops"][1:]} <= {"h0", "h1", "h2", "h3"}
    assert said["again"] == []
    assert said["left"] == [["m"]] * 4


def test_a_host_without_rsync_gets_it_from_the_users_computer(lab):
    said = do(lab(3, meshed=True, special={"h1": {"hide": ("rsync",)}}), "spread", num_bytes=20 << 20)
    assert said["equal"]
    assert ["this computer", "h1"] in said["hops"]
    assert any("h0 cannot send to h1: " in line for line in said["said"])


def test_hosts_that_may_not_log_in_to_each_other_get_it_from_the_users_computer(lab):
    said = do(lab(3), "spread", num_bytes=20 << 20)
    assert said["equal"]
    assert {source for source, _ in said["hops"]} == {"this computer"}
    assert any("h0 cannot send to h1: " in line and "ermission denied" in line for line in said["said"])


def test_a_host_that_somebody_else_stands_in_for_gets_nothing_from_its_peers(lab):
    """At the address that h1 is said to have answers h2, which has another key."""
    three = lab(3, meshed=True)
    hosts = entries(three)
    hosts[1]["address"] = three["h2"].address
    said = three.user.call(f"{CASES}:spread", hosts=hosts, num_bytes=20 << 20)
    assert said["equal"]
    assert ["h0", "h1"] not in said["hops"]
    assert any("h0 cannot send to h1: " in line and "ost key verification failed" in line for line in said["said"])


@pytest.mark.parametrize("meshed", [False, True])
def test_tokens_made_on_the_head_come_to_the_others(lab, meshed):
    said = do(lab(3, meshed=meshed), "tokens")
    assert said["served"] == ["h1", "h2"]
    assert ("from h0 to" in said["said"][0]) is meshed
    assert said["left"] == []


def test_an_environment_is_built_without_pip_venv_rsync_or_network(lab):
    special = {"h1": {"hide": ("ensurepip", "venv", "rsync")}, "h2": {"hide": ("pip", "pip3", "uv")}}
    said = do(lab(3, special=special), "locked")
    assert {name: " ".join(words[:2]) for name, words in said["ran"].items()} == dict.fromkeys(said["left"], "1.0 2.0")
    assert said["left"] == {"h0": [], "h1": [], "h2": []}
    assert said["differences"] == []


def test_a_host_with_another_python_gets_wheels_of_its_own(lab):
    if not pythons.has("3.13"):
        pytest.skip("no Python 3.13 on this machine")
    said = do(lab(2, special={"h1": {"python": "3.13"}}), "locked")
    assert said["ran"]["h0"][:2] == said["ran"]["h1"][:2] == ["1.0", "2.0"]


@pytest.fixture
def old():
    """A host that has no Python but 3.8, with which gangline's agent runs, and torch does not."""
    if not pythons.has("3.8"):
        pytest.skip("no Python 3.8 on this machine")
    return {"python": "3.8", "hide": pythons.of_the_system()}


def test_a_host_with_an_old_python_is_told_what_it_has(lab, old):
    said = do(lab(2, special={"h1": old}), "locked")
    assert said["error"].startswith("h1: no Python to build an environment with")
    assert "(Python 3.8." in said["error"]


def test_the_checks_say_so_before_and_change_nothing(lab, old):
    said = do(lab(3, special={"h1": old, "h2": old}), "judged")
    assert [(number, hosts) for number, hosts, _ in said["findings"]] == [("E-SW-14", ["h1", "h2"])]
    assert all("(Python 3.8." in evidence for _, _, evidence in said["findings"])
    assert said["left"] == {"h0": [], "h1": [], "h2": []}
    assert said["building_s"] < 5.0, "one short question"


def test_a_project_is_the_same_everywhere_or_nothing_starts(lab):
    said = do(lab(2, special={"h1": {"hide": ("rsync",)}}), "project")
    assert said["ran"] == {"h0": "hello\n", "h1": "hello\n"}
    assert said["names"] == {"h0": ["go.sh", "train.py"], "h1": ["go.sh", "train.py"]}
    assert said["error"] == "h1: train.py is not what was brought there"


def test_a_model_comes_to_every_host_and_data_to_the_head(lab):
    said = do(lab(2), "reads")
    assert said["texts"] == ["weights", "weights"]
    assert said["data"] == '{"text": "x"}\n'
