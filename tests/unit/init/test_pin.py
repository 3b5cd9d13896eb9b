"""Keys of a cluster file read again: shown, asked for, and nothing else changed."""

import json
import stat

import pytest

from gangline.errors import HostUnreachable, SpecError, UsageError
from gangline.init.pin import pin
from gangline.runs.cluster import Cluster, Host
from gangline.runs.files import write_json
from gangline.runs.layout import RunLayout
from tests.unit.init.world import Talk, World, fingerprint, key

TEXT = f"""\
# at home
hosts:
  - name: pc1   # under the desk
    host_key: {key("pc1")}
    address: 10.0.0.1
  - {{name: pc2, host_key: {key("pc2")}, address: 10.0.0.2}}
  - {{name: pc3, address: 10.0.0.3}}
  - {{name: here, transport: local, address: 10.0.0.4}}
"""


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text(TEXT)
    file.chmod(0o640)
    return file


@pytest.fixture
def world():
    return World(hosts={}, keys={"pc2": key("new")})


def pinned(world, path, *answers, yes=False, dry_run=False):
    console = Talk(answers=list(answers) or None)
    return pin(path, home=path.parent, yes=yes, dry_run=dry_run, console=console, deps=world.deps()), console


EXPECTED = TEXT.replace(key("pc2"), key("new")).replace("{name: pc3", f"{{name: pc3, host_key: {key('pc3')}")


def test_old_and_new_are_shown_before_the_question(world, path):
    found, console = pinned(world, path, "y")
    assert f"pc1  alice@pc1.lan  {fingerprint(key('pc1'))}  the same" in console.lines
    assert f"pc2  alice@pc2.lan  {fingerprint(key('pc2'))}  {fingerprint(key('new'))}" in console.lines
    assert f"pc3  alice@pc3.lan  -  {fingerprint(key('pc3'))}" in console.lines
    assert "somebody is in between" in console.text
    assert console.questions == ["trust 2 changed keys? [y/N]"]
    assert found.changed == ("pc2", "pc3")


def test_only_the_keys_change(world, path):
    pinned(world, path, "y")
    assert path.read_text() == EXPECTED
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_link_stays_one(world, path, tmp_path):
    link = tmp_path / "link.yaml"
    link.symlink_to(path)
    pinned(world, link, "y")
    assert link.is_symlink()
    assert path.read_text() == EXPECTED


@pytest.mark.parametrize("answers", [(), ("n",), ("",)])
def test_without_a_yes_nothing_changes(world, path, answers):
    with pytest.raises(UsageError) as caught:
        pinned(world, path, *answers)
    assert fingerprint(key("new")) in caught.value.seen
    assert path.read_text() == TEXT


def test_yes_trusts_and_says_so(world, path):
    _, console = pinned(world, path, yes=True)
    assert "trusted without a question (--yes): pc2, pc3" in console.lines
    assert path.read_text() == EXPECTED


def test_a_dry_run_shows_the_text_and_writes_nothing(world, path):
    found, _ = pinned(world, path, yes=True, dry_run=True)
    assert (found.text, found.path) == (EXPECTED, None)
    assert path.read_text() == TEXT


def test_the_second_time_there_is_nothing_to_do(world, path):
    pinned(world, path, "y")
    found, console = pinned(world, path)
    assert console.questions == []
    assert found.path is None
    assert "every key that was shown is the pinned one" in console.lines


def test_hosts_that_do_not_answer_keep_their_keys(world, path):
    world.silent = {"pc2"}
    _, console = pinned(world, path, "y")
    assert "left as it is: pc2 does not answer; timed out" in console.lines
    assert path.read_text() == EXPECTED.replace(key("new"), key("pc2"))


def test_nobody_answers(world, path):
    world.silent = {"pc1", "pc2", "pc3"}
    with pytest.raises(HostUnreachable, match="no host answers"):
        pinned(world, path, "y")


def test_a_file_without_hosts_over_ssh(world, tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text("hosts: [localhost]\n")
    with pytest.raises(UsageError, match="no hosts over SSH"):
        pinned(world, file)


def test_a_file_with_mistakes_is_not_touched(world, tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text("hosts: [{name: pc1, slot: 2}]\n")
    with pytest.raises(SpecError, match="slots"):
        pinned(world, file, yes=True)


def test_what_was_found_as_data(world, path):
    data = json.loads(json.dumps(pinned(world, path, "y")[0].to_json()))
    assert data["changed"] == ["pc2", "pc3"]
    assert data["keys"][1]["pinned_before"] == fingerprint(key("pc2"))
    assert data["keys"][1]["fingerprint"] == fingerprint(key("new"))


def test_runs_that_have_the_old_key_get_the_new_one(world, path, tmp_path):
    old = Host(name="box", ssh="pc2", workdir="/w", python="", host_key=key("pc2"))
    other = Host(name="pc2", workdir="/w", python="", host_key=key("somebody else's"))
    for run_id, host in (("calm-otter-7", old), ("quick-hare-2", other)):
        layout = RunLayout(tmp_path, run_id)
        layout.attempt(1).mkdir(parents=True)
        for file in (layout.cluster, layout.attempt(1) / "cluster.json"):
            write_json(file, Cluster(name="home", hosts=(host,)).to_json())
    _, console = pinned(world, path, "y")
    assert console.lines[-1] == "and in the records of 1 run: calm-otter-7"
    layout = RunLayout(tmp_path, "calm-otter-7")
    assert Cluster.of_attempt(layout, 1).hosts[0].host_key == key("new")
    assert Cluster.of_attempt(layout, 2).hosts[0].host_key == key("new")
    assert Cluster.of_attempt(RunLayout(tmp_path, "quick-hare-2"), 1).hosts == (other,)
