"""Hosts that are only named: on the command line of init, or in a hostfile."""

import socket

import pytest

from gangline.config.load import hostfile_hosts, named_hosts
from gangline.errors import SpecError


def test_names_of_the_command_line(tmp_path):
    pc1, pc2, address, here = (
        named.host for named in named_hosts(["pc1", "alice@pc2", "bob@10.0.0.3", "localhost"], home=tmp_path)
    )
    assert (pc1.name, pc1.ssh, pc1.transport) == ("pc1", None, "ssh")
    assert (pc2.name, pc2.ssh, pc2.transport) == ("pc2", "alice@pc2", "ssh")
    assert (address.name, address.ssh) == ("10.0.0.3", "bob@10.0.0.3")
    assert (here.name, here.transport) == ("localhost", "local")
    assert named_hosts([socket.gethostname()], home=tmp_path)[0].host.transport == "local"


def test_all_bad_names_of_the_command_line_at_once(tmp_path):
    with pytest.raises(SpecError) as caught:
        named_hosts(["-oProxyCommand=x", "pc1", "a b", "alice@-x", "pc1"], home=tmp_path)
    told = str(caught.value)
    assert told.startswith("4 mistakes in the command line\n")
    assert "\n\ncommand line: -oProxyCommand=x\n" in told
    assert "hosts." not in told


def test_a_hostfile_needs_no_addresses_yet(tmp_path):
    (tmp_path / "hostfile").write_text("node1 slots=8 ib0 NCCL_DEBUG=INFO\nalice@node2:4\nnode3\n")
    node1, node2, node3 = hostfile_hosts(tmp_path / "hostfile", home=tmp_path)
    assert (node1.host.slots, node1.host.interface, node1.host.env, node1.has_slots) == (
        8,
        "ib0",
        {"NCCL_DEBUG": "INFO"},
        True,
    )
    assert (node2.host.name, node2.host.ssh, node2.host.slots, node2.has_slots) == ("node2", "alice@node2", 4, True)
    assert (node3.host.name, node3.has_slots) == ("node3", False)


@pytest.mark.parametrize(
    ("text", "told"), [("-x slots=1\n", "hostfile:1:1"), ("a HF_TOKEN=x\n", "secret"), ("a\na\n", "second host")]
)
def test_the_rules_hold_for_a_hostfile(tmp_path, text, told):
    (tmp_path / "hostfile").write_text(text)
    with pytest.raises(SpecError, match=told):
        hostfile_hosts(tmp_path / "hostfile", home=tmp_path)
