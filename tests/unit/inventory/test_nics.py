"""The interface and the variables of every host's ranks, each with its reason."""

import pytest

from gangline.inventory.rank_interface import rank_network
from tests.unit.checks.machines import cluster, host, ib_port, inventory, nic, pc, server


def choices(answers, *hosts):
    given = {one.name: one for one in hosts}
    return rank_network(cluster(*[given.get(name) or host(name) for name in answers]), inventory(answers))


def named(name, interface):
    answer = pc(name)
    answer["nics"][0]["name"] = interface
    return answer


def with_ports(name, *ports):
    answer = server(name)
    answer["rdma"]["ports"] = list(ports)
    return answer


def test_names_may_differ_and_every_host_is_told_its_own():
    chosen = choices({"pc1": named("pc1", "eno1"), "pc2": named("pc2", "enp5s0")})
    assert {name: choice.env for name, choice in chosen.items()} == {
        "pc1": {"GLOO_SOCKET_IFNAME": "eno1", "NCCL_SOCKET_IFNAME": "=eno1", "NCCL_IB_DISABLE": "1"},
        "pc2": {"GLOO_SOCKET_IFNAME": "enp5s0", "NCCL_SOCKET_IFNAME": "=enp5s0", "NCCL_IB_DISABLE": "1"},
    }


def test_every_variable_has_its_reason():
    for choice in choices({"pc1": pc("pc1"), "gpu2": server("gpu2")}).values():
        assert set(choice.reasons) == set(choice.env)
        assert all(choice.reasons.values())


def test_the_interface_that_has_the_address_is_taken():
    answer = pc("pc1")
    answer["nics"].insert(0, nic("wlp4s0", "192.168.7.3", kind="wifi"))
    choice = choices({"pc1": answer, "pc2": pc("pc2")})["pc1"]
    assert (choice.interface, choice.reason) == ("enp5s0", "it has the address of the host in cluster.yaml")


def test_the_interface_that_the_user_names_wins():
    answer = server("gpu1")
    choice = choices({"gpu1": answer, "gpu2": server("gpu2")}, host("gpu1", interface="ib0"))["gpu1"]
    assert (choice.interface, choice.env["GLOO_SOCKET_IFNAME"]) == ("ib0", "ib0")


def test_a_name_as_address_is_looked_up_on_the_host_itself_but_not_as_loopback():
    answer = pc("pc1")
    answer["names"]["addresses"]["pc1"] = ["127.0.1.1", "192.168.1.11"]
    choice = choices({"pc1": answer, "pc2": pc("pc2")}, host("pc1", address="pc1"))["pc1"]
    assert choice.interface == "enp5s0"


def test_an_address_that_nobody_has_chooses_nothing():
    choice = choices({"pc1": pc("pc1"), "pc2": pc("pc2")}, host("pc1", address="10.9.9.9"))["pc1"]
    assert choice.interface is None
    assert "GLOO_SOCKET_IFNAME" not in choice.env
    assert "10.9.9.9" in choice.reason


def test_infiniband_is_used_where_all_hosts_have_it():
    chosen = choices({"gpu1": server("gpu1"), "gpu2": server("gpu2")})
    assert all("NCCL_IB_DISABLE" not in choice.env for choice in chosen.values())
    assert all("NCCL_IB_HCA" not in choice.env for choice in chosen.values())


def test_all_go_the_same_way_where_one_has_none():
    chosen = choices({"gpu1": server("gpu1"), "gpu2": with_ports("gpu2", ib_port(0, state="DOWN"))})
    assert {choice.env["NCCL_IB_DISABLE"] for choice in chosen.values()} == {"1"}
    assert "no active port on gpu2" in chosen["gpu1"].reasons["NCCL_IB_DISABLE"]
    assert chosen["gpu2"].reasons["NCCL_IB_DISABLE"] == "this host has no active InfiniBand or RoCE port"


def test_infiniband_and_roce_do_not_meet():
    chosen = choices({"gpu1": server("gpu1"), "gpu2": with_ports("gpu2", ib_port(0, link_layer="Ethernet"))})
    assert {choice.env["NCCL_IB_DISABLE"] for choice in chosen.values()} == {"1"}


def test_ports_of_the_kind_that_all_have_are_named_where_there_are_others():
    both = with_ports("gpu1", ib_port(0), ib_port(1), ib_port(2, link_layer="Ethernet"))
    chosen = choices({"gpu1": both, "gpu2": server("gpu2")})
    assert chosen["gpu1"].env["NCCL_IB_HCA"] == "=mlx5_0:1,mlx5_1:1"
    assert "NCCL_IB_HCA" not in chosen["gpu2"].env


@pytest.mark.parametrize("answers", [{"gpu1": server("gpu1"), "gpu2": server("gpu2")}, {"pc1": pc("pc1")}])
def test_a_gid_is_never_written_down(answers):
    assert not any("GID" in name for choice in choices(answers).values() for name in choice.env)


def test_what_the_cluster_file_says_stays():
    given = host("pc1", env={"NCCL_SOCKET_IFNAME": "=eth9", "NCCL_DEBUG": "INFO"})
    choice = choices({"pc1": pc("pc1"), "pc2": pc("pc2")}, given)["pc1"]
    assert choice.env["NCCL_SOCKET_IFNAME"] == "=eth9"
    assert choice.reasons["NCCL_SOCKET_IFNAME"] == "cluster.yaml says so"
    assert "NCCL_DEBUG" not in choice.env


def test_on_one_computer_loopback_always_works():
    local = [host(name, transport="local", address="127.0.0.1") for name in ("a", "b")]
    chosen = choices({"a": pc("a"), "b": pc("b")}, *local)
    assert {choice.interface for choice in chosen.values()} == {"lo"}
    assert chosen["a"].env == {"GLOO_SOCKET_IFNAME": "lo"}


def test_a_host_that_does_not_answer_has_no_choice():
    chosen = rank_network(cluster(host("pc1"), host("pc2")), inventory({"pc1": pc("pc1")}))
    assert list(chosen) == ["pc1"]
