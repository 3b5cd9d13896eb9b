"""Lists of hosts that other tools keep become a cluster.yaml, or the command that asks the hosts."""

import pytest

from gangline.config.load import load_cluster
from gangline.convert.host_lists import listed_elsewhere, move_hosts, write_hosts
from gangline.errors import SpecError, UsageError

SSH_CONFIG = """\
Host *
  ServerAliveInterval 30
Host pc1
  HostName 192.168.1.11
  User alice
  Port 2222
Host pc2
  HostName 192.168.1.12
  IdentityFile ~/.ssh/lab
"""
INVENTORY = """\
[gpu]
pc1 ansible_host=192.168.1.11 ansible_user=alice  # the fast one
pc[2:3] ansible_user=bob
[gpu:vars]
ansible_port=2222
[web]
shop ansible_host=192.168.1.30
[all:vars]
ansible_python_interpreter=/usr/bin/python3
"""
INVENTORY_YAML = """\
all:
  vars: {ansible_user: alice}
  children:
    gpu:
      hosts:
        pc1: {ansible_host: 192.168.1.11}
        pc2: {ansible_host: 192.168.1.12, ansible_port: 2222}
"""
RAY = """\
cluster_name: lab
provider: {type: local, head_ip: 192.168.1.10, worker_ips: [192.168.1.11, 192.168.1.12]}
auth: {ssh_user: alice, ssh_private_key: ~/.ssh/lab}
setup_commands: [pip install ray]
"""
POOLS = """\
lab:
  user: alice
  hosts:
    - 192.168.1.11
    - {ip: 192.168.1.12, user: bob, password: secret}
"""


@pytest.fixture
def hosts(tmp_path):
    def run(text, name="list.yaml"):
        (tmp_path / name).write_text(text)
        return move_hosts(tmp_path / name, tmp_path / "cluster.yaml")

    return run


def destinations(moved):
    return [host.destination for host in moved.listed.hosts]


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        (SSH_CONFIG, "config", ["alice@192.168.1.11", "192.168.1.12"]),
        (INVENTORY_YAML, "hosts.yaml", ["alice@192.168.1.11", "alice@192.168.1.12"]),
        (RAY, "ray.yaml", ["alice@192.168.1.10", "alice@192.168.1.11", "alice@192.168.1.12"]),
        (POOLS, "pools.yaml", ["alice@192.168.1.11", "bob@192.168.1.12"]),
    ],
)
def test_a_list_of_addresses_becomes_a_cluster_file(hosts, tmp_path, text, name, expected):
    moved = hosts(text, name)
    assert destinations(moved) == expected
    write_hosts(moved, home=tmp_path, force=False)
    cluster = load_cluster(tmp_path / "cluster.yaml", home=tmp_path)
    assert [host.ssh or host.name for host in cluster.hosts] == expected
    assert [host.address for host in cluster.hosts] == [each.rpartition("@")[2] for each in expected]


def test_groups_variables_and_ranges_of_an_inventory(hosts):
    found = {host.name: host for host in hosts(INVENTORY, "inventory").listed.hosts}
    assert list(found) == ["pc1", "pc2", "pc3", "shop"]
    assert (found["pc1"].destination, found["pc1"].port) == ("alice@192.168.1.11", 2222)
    assert (found["pc3"].destination, found["pc3"].port) == ("bob@pc3", 2222)
    assert found["shop"].port is None


def test_names_without_addresses_are_for_init_to_ask(hosts, tmp_path):
    with pytest.raises(UsageError, match="no address of pc2, pc3") as caught:
        write_hosts(hosts(INVENTORY, "inventory"), home=tmp_path, force=False)
    assert "gangline init alice@192.168.1.11 bob@pc2 bob@pc3" in caught.value.fix
    assert not (tmp_path / "cluster.yaml").exists()


def test_this_computer_needs_no_ssh(hosts):
    moved = hosts("[gpu]\nhere ansible_connection=local\npc1 ansible_host=192.168.1.11\n", "inventory")
    assert moved.init_words == "gangline init localhost 192.168.1.11"
    assert "{name: here, transport: local}" in moved.text


def test_groups_of_groups_ranges_and_ports_of_an_inventory(hosts):
    text = """\
[lab:children]
gpu
[lab:vars]
ansible_user=lab
[gpu]
pc[a:c:2]:2222
"pc[01:02]" ansible_ssh_common_args='-o ProxyJump=gate -v'
[gpu:vars]
ansible_user=alice
[other]
far
"""
    listed = {host.name: host for host in hosts(text, "inventory").listed.hosts}
    assert list(listed) == ["pca", "pcc", "pc01", "pc02", "far"]
    assert {host.user for name, host in listed.items() if name != "far"} == {"alice"}
    assert (listed["pca"].port, listed["pc01"].port, listed["far"].user) == (2222, None, "")


def test_another_tools_list_is_told_from_a_hostfile(tmp_path):
    for name, text, tool in (
        ("inventory", INVENTORY, "Ansible"),
        ("inventory.yml", INVENTORY_YAML, "Ansible"),
        ("hostfile", "pc1 slots=4\npc2\n", None),
        ("cluster.yaml", "hosts:\n  - {name: pc1}\n", None),
    ):
        (tmp_path / name).write_text(text)
        moved = listed_elsewhere(tmp_path / name)
        assert (moved and moved.listed.tool) == tool, name


def test_keys_and_passwords_belong_into_the_users_own_ssh(hosts):
    rows = {row.key: row for row in hosts(POOLS).listed.rows}
    assert rows["lab.hosts.1.password"].verdict == "equivalent"
    assert rows["lab.hosts.1.password"].value == ""
    assert "~/.ssh/config" in rows["lab.hosts.1.password"].reason


@pytest.mark.parametrize(
    "text",
    ["resources: {accelerators: 'H100:8'}\nnum_nodes: 2\nrun: train\n", "cluster_name: c\nprovider: {type: aws}\n"],
)
def test_machines_that_are_ordered_are_no_hosts(hosts, tmp_path, text):
    with pytest.raises(UsageError, match="was not converted") as caught:
        write_hosts(hosts(text), home=tmp_path, force=False)
    assert "ordered by the start" in caught.value.seen


def test_a_list_without_a_host_is_none(hosts):
    with pytest.raises(SpecError, match="list") as caught:
        hosts("all: {hosts: {}}\n")
    assert caught.value.seen == "no host at all"


def test_a_host_that_ssh_cannot_be_told_is_refused(hosts):
    with pytest.raises(SpecError, match="list") as caught:
        hosts("all: {hosts: {'-oProxyCommand=x': {}}}\n")
    assert "ssh cannot be told" in caught.value.seen


def test_a_range_of_too_many_hosts_is_refused_before_it_is_written_out(hosts):
    with pytest.raises(SpecError, match=r"pc\[1:20000000\]") as caught:
        hosts("[gpu]\npc[1:20000000]\n", "inventory.ini")
    assert "a range of 20000000 hosts" in str(caught.value)
