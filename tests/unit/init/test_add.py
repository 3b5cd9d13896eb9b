"""More hosts in a cluster file that somebody has edited: everything else in it stays as it is, comments too."""

import pytest

from gangline.config.load import load_cluster
from gangline.errors import HostUnreachable, SpecError, UsageError
from gangline.init.add import AddQuestion, add
from tests.unit.init.world import Talk, World, facts, gpu, home_lan, key, nic

FILE = """\
# ours; ask Eva before you touch it
name: attic
hosts:
  # the head
  - name: pc1   # never switched off
    address: 192.168.1.10
    env: {NCCL_DEBUG: INFO}  # until June

  - name: pc2
    address: 192.168.1.11
    slots: 2   # the third card is for games

# Nothing below this line
ports: 29500-29599
"""


@pytest.fixture
def world():
    lan = home_lan()
    pc4 = facts("pc4", nic("eno1", "192.168.1.14/24"), nic("docker0", "172.17.0.1/16", kind="bridge"), gpus=[gpu()])
    pc5 = facts("pc5", nic("eno1", "10.9.9.9/24"))
    return World(hosts={**lan, "pc4": pc4, "pc5": pc5})


def put(world, folder, *names, text=FILE, console=None, **options):
    (folder / "cluster.yaml").write_bytes(text.encode())
    asked = AddQuestion(path=folder / "cluster.yaml", home=folder / "home", names=names, **options)
    return add(asked, console=console or Talk(answers=["y"]), deps=world.deps())


def test_a_host_comes_behind_the_others_and_nothing_else_changes(world, tmp_path):
    found = put(world, tmp_path, "alice@pc4")
    text = found.path.read_text()
    above, below = FILE.split("\n# Nothing")
    assert text.startswith(above)
    assert text.endswith(f"\n# Nothing{below}")
    assert text[len(above) : -len(f"\n# Nothing{below}")] == (
        "  - name: pc4\n"
        "    ssh: alice@pc4\n"
        f"    host_key: {key('pc4')}\n"
        "    address: 192.168.1.14  # eno1 1 Gb/s\n"
        "    slots: 1  # NVIDIA GeForce RTX 4070, 8 GiB\n"
    )
    cluster = load_cluster(found.path, home=tmp_path / "home")
    assert [host.name for host in cluster.hosts] == ["pc1", "pc2", "pc4"]


@pytest.mark.parametrize(
    "text",
    [
        "hosts:\n- name: pc1\n  address: 192.168.1.10",
        "hosts:\n-   192.168.1.10\n-   {name: pc2, address: 192.168.1.11}\n",
        "hosts:\r\n  - 192.168.1.10\r\n",
    ],
)
def test_files_that_are_indented_in_their_own_way_stay_so(world, tmp_path, text):
    found = put(world, tmp_path, "pc4", text=text)
    assert found.text.startswith(text)
    assert load_cluster(found.path, home=tmp_path / "home").hosts[-1].name == "pc4"


def test_hosts_in_brackets_are_left_to_the_user(world, tmp_path):
    with pytest.raises(SpecError, match="hosts cannot be put in") as caught:
        put(world, tmp_path, "pc4", text="hosts: [192.168.1.10, 192.168.1.11]\n")
    assert "name: pc4" in caught.value.fix
    assert (tmp_path / "cluster.yaml").read_text() == "hosts: [192.168.1.10, 192.168.1.11]\n"


def test_a_host_that_is_there_already_is_refused_before_anybody_is_asked(world, tmp_path):
    with pytest.raises(UsageError, match="has pc2 already") as caught:
        put(world, tmp_path, "pc4", "pc2")
    assert "--pin" in caught.value.fix
    assert world.trusted == []


def test_a_host_that_does_not_answer_changes_nothing(world, tmp_path):
    world.silent.add("pc4")
    with pytest.raises(HostUnreachable, match="does not answer"):
        put(world, tmp_path, "pc4")
    assert (tmp_path / "cluster.yaml").read_text() == FILE


def test_a_host_in_another_network_is_told(world, tmp_path):
    console = Talk(answers=["y"])
    put(world, tmp_path, "pc5", console=console)
    assert "pc5 has no address in the network of the file's hosts" in console.text


def test_a_rehearsal_writes_nothing(world, tmp_path):
    found = put(world, tmp_path, "pc4", dry_run=True)
    assert found.path is None
    assert "pc4" in found.text
    assert (tmp_path / "cluster.yaml").read_text() == FILE


def test_a_host_that_wants_a_password_is_brought_a_key(world, tmp_path):
    world.broken["pc4"] = "pc4 refuses your key: permission denied"
    with pytest.raises(HostUnreachable) as caught:
        put(world, tmp_path, "pc4")
    assert caught.value.fix.startswith("gangline prepare access pc4: asks for the password once")
