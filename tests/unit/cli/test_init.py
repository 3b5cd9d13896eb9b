"""`gangline init` as it is typed: exit codes, what goes to stdout, and names that mean harm."""

from __future__ import annotations

import itertools
import json
import subprocess
from pathlib import Path

import pytest

from gangline.cli.main import VERBS, main
from gangline.init import describe, pin
from tests.unit.init.world import World, home_lan, key


@pytest.fixture(autouse=True)
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """Three hosts, and an empty folder to be in."""
    found = World(hosts=home_lan())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GANGLINE_HOME", str(tmp_path / "home"))
    monkeypatch.setitem(VERBS, "init", ("gangline.cli.init", "write cluster.yaml"))
    for function in (describe.init, pin.pin):
        monkeypatch.setitem(function.__kwdefaults__, "deps", found.deps())
    return found


def test_init_writes_and_says_what_comes_next(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "pc1", "pc2", "pc3", "--yes"]) == 0
    seen = capsys.readouterr()
    assert seen.out == ""
    assert seen.err.splitlines()[-1] == "Next: gangline check cluster.yaml"
    assert Path("cluster.yaml").exists()


def test_a_dry_run_prints_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "pc1", "pc2", "--yes", "--dry-run", "-o", "other.yaml"]) == 0
    assert "  - name: pc2\n" in capsys.readouterr().out
    assert not Path("other.yaml").exists()


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "pc1", "--yes", "--json", "--name", "home"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["schema_version"], data["cluster"]["name"], data["file"]) == (1, "home", "cluster.yaml")


def test_without_a_terminal_nobody_is_trusted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "pc1"]) == 2
    assert "nobody is here" in capsys.readouterr().err
    assert main(["init"]) == 2
    assert "no hosts are named" in capsys.readouterr().err


def test_nobody_answers(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.silent = {"pc1", "pc2"}
    assert main(["init", "pc1", "pc2", "--yes"]) == 4
    assert "no host answers" in capsys.readouterr().err


def test_a_changed_key_is_pinned_by_a_clear_word_only(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "pc1", "pc2", "--yes"]) == 0
    before = Path("cluster.yaml").read_text(encoding="utf-8")
    world.keys["pc2"] = key("another")
    assert main(["init", "--pin", "cluster.yaml"]) == 2
    assert Path("cluster.yaml").read_text(encoding="utf-8") == before
    assert main(["init", "--pin", "cluster.yaml", "--yes"]) == 0
    assert Path("cluster.yaml").read_text(encoding="utf-8") == before.replace(key("pc2"), key("another"))
    assert capsys.readouterr().err.splitlines()[-1] == "Next: gangline check cluster.yaml"


def test_an_inventory_of_ansible_gives_hosts_with_its_names(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    Path("inventory").write_text(
        "[gpu]\npc[1:2]\n[gpu:vars]\nansible_user=alice\nansible_ssh_private_key_file=~/.ssh/lab\n"
    )
    assert main(["init", "--hostfile", "inventory", "--yes"]) == 0
    text = Path("cluster.yaml").read_text(encoding="utf-8")
    assert [word in text for word in ("name: pc1", "ssh: alice@pc1", "name: pc2", "ssh: alice@pc2")] == [True] * 4
    said = capsys.readouterr().err
    assert "inventory is a list of Ansible: 2 hosts" in said
    assert "not taken: pc1.ansible_ssh_private_key_file: put it into ~/.ssh/config" in said


@pytest.mark.parametrize("words", [["pc1"], ["--force"], ["--name", "x"], ["-o", "x"], ["--hostfile", "x"]])
def test_pin_takes_nothing_else(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--pin", "cluster.yaml", *words]) == 2
    assert "only updates the host keys" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["pc1"], ["--add", "pc1"], ["--hostfile", "x"], ["--pin", "x"], ["--slurm"]])
def test_found_hosts_and_named_ones_do_not_mix(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--discover", *words]) == 2
    assert "error: " in capsys.readouterr().err


SIGNS = [
    *" \t\n\r\0;|&$`'\"\\<>(){}[]*?!#~,=/%^",
    "\x1b[2J",
    "\u202e",
    "\u200b",
    "é",
    "\uff41",
    "$(id)",
    "`id`",
    "//",
]
SHAPES = ["pc{}1", "{}pc1", "alice{}@pc1", "alice@{}pc1", "{}"]
OPTIONS = [
    "..",
    "../pc1",
    "-oProxyCommand=x",
    "--",
    "-",
    "-F/etc/passwd",
    "--help",
    "alice@-oProxyCommand=x",
    "-l@pc1",
    "@pc1",
    "pc1@",
]
HOSTILE = [*OPTIONS, *(shape.format(sign) for shape, sign in itertools.product(SHAPES, SIGNS))]


def test_200_hostile_names_are_refused_before_anything_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(HOSTILE) >= 200
    monkeypatch.setattr(subprocess, "Popen", None)
    passed = [name for name in HOSTILE if main(["init", "--yes", "--force", "--", name]) != 2]
    assert passed == []
    told = capsys.readouterr()
    assert "\x1b" not in told.err
    assert told.out == ""
    assert not Path("cluster.yaml").exists()
