"""Healthy clusters of every kind: no failures, and no warnings either."""

import pytest

from gangline.inventory.folders import SharedProbe, SharedView
from tests.unit.checks.machines import (
    GIB,
    MIB,
    card,
    container,
    cpu_only,
    findings,
    folder,
    host,
    ib_port,
    laptop,
    machine,
    nic,
    pc,
    server,
    with_gpus,
    wsl,
)


def with_nic(answer, **more):
    answer["nics"][0] |= more
    return answer


def with_system(answer, **more):
    answer["system"] |= more
    return answer


def with_torch(answer, cuda, **packages):
    answer["packages"]["torch"]["cuda"] = cuda
    answer["packages"]["packages"] |= packages
    return answer


def with_names(answer, **names):
    answer["names"]["addresses"] |= names
    return answer


def without_environment(answer):
    """Its environment is built at the start."""
    answer["packages"] = {}
    return answer


def with_share(answer):
    answer["storage"].append(folder("/mnt/nas", filesystem="nfs4", source="nas:/export", mount="/mnt/nas"))
    return answer


def on_nfs_home(answer):
    answer["storage"][0] |= {"filesystem": "nfs4", "source": "nas:/home", "mount": "/home"}
    return answer


def with_docker(answer):
    """Every host with docker has this very address."""
    answer["nics"].append(nic("docker0", "172.17.0.1", kind="bridge", speed=None, mac="02:42:ac:11:00:01"))
    return answer


def with_roce(answer):
    answer["rdma"]["ports"] = [ib_port(0, link_layer="Ethernet", rate_gbps=100.0)]
    return answer


def with_open_module(answer):
    """NVIDIA's open kernel module shares memory with adapters by itself."""
    answer["gpus"]["open_module"] = True
    answer["rdma"]["peer_memory"] = False
    return answer


def bridged(answer):
    """A host of virtual machines has its address on a bridge with a real port."""
    return with_nic(answer, name="br0", kind="bridge", speed_mbps=1000, ports=["eno1", "vnet3"])


def spark(name):
    """A DGX Spark: another architecture, and a card that uses the computer's memory."""
    gb10 = card("NVIDIA GB10", 120, "12.1", unified_memory=True, memory_free_bytes=30 * GIB)
    answer = with_system(with_gpus(machine(name), [gb10], driver="580.95.05", cuda="13.0"), arch="aarch64")
    answer["packages"]["arch"] = "aarch64"
    nccl = {"nvidia-nccl-cu12": None, "nvidia-nccl-cu13": "2.28.9"}
    return with_torch(answer, "13.0", torch="2.13.0+cu130", **nccl)


def rtx(**more):
    return [card("NVIDIA GeForce RTX 4090", 24, "8.9", **more)]


def blackwell(name):
    return pc(name, [card("NVIDIA GeForce RTX 5070 Ti", 16, "12.0")], driver="570.124.04", cuda="12.8")


def long_term(name):
    """The driver that data centres stay with."""
    return with_torch(pc(name, driver="535.183.01", cuda="12.2"), "12.6", torch="2.13.0+cu126")


EIGHT = (host("gpu1", slots=8), host("gpu2", slots=8))
HEALTHY = {
    "one PC": ({"pc1": pc()}, ()),
    "three mismatched PCs": ({"pc1": pc("pc1"), "pc2": laptop("pc2"), "pc3": blackwell("pc3")}, ()),
    "two servers with InfiniBand": ({"gpu1": server("gpu1"), "gpu2": server("gpu2")}, EIGHT),
    "two servers with RoCE": ({"gpu1": with_roce(server("gpu1")), "gpu2": with_roce(server("gpu2"))}, EIGHT),
    "servers with the open kernel module": (
        {"gpu1": with_open_module(server("gpu1")), "gpu2": with_open_module(server("gpu2"))},
        EIGHT,
    ),
    "three computers without GPU": ({name: cpu_only(name) for name in ("pc1", "pc2", "pc3")}, ()),
    "CUDA's torch without GPU": ({"pc1": machine("pc1"), "pc2": machine("pc2")}, ()),
    "WSL": ({"pc1": wsl()}, ()),
    "WSL beside Linux": ({"pc1": wsl("pc1"), "pc2": pc("pc2")}, ()),
    "a container": ({"pc1": container()}, ()),
    "two containers": ({"pc1": container("pc1"), "pc2": container("pc2")}, ()),
    "an environment that is not there yet": (
        {"pc1": without_environment(pc("pc1")), "pc2": without_environment(pc("pc2"))},
        (host("pc1", python=""), host("pc2", python="")),
    ),
    "an older driver of the same CUDA": ({"pc1": long_term("pc1"), "pc2": long_term("pc2")}, ()),
    "two cards on eight lanes each": ({"pc1": pc("pc1", rtx(pcie_width=8) * 2)}, (host("pc1", slots=2),)),
    "fewer slots than cards": ({"pc1": pc("pc1", rtx() * 2)}, (host("pc1", slots=1),)),
    "a desktop on the card": ({"pc1": pc("pc1", rtx(memory_free_bytes=24 * GIB - 1400 * MIB))}, ()),
    "a card at its power limit": ({"pc1": pc("pc1", rtx(throttle=["power cap"]))}, ()),
    "2.5 beside 1 Gbit/s": ({"pc1": with_nic(pc("pc1"), speed_mbps=2500), "pc2": pc("pc2")}, ()),
    "an interface by name": ({"pc1": pc("pc1"), "pc2": pc("pc2")}, (host("pc1", interface="enp5s0"), host("pc2"))),
    "an address on a bridge with a real port": ({"pc1": bridged(pc("pc1")), "pc2": pc("pc2")}, ()),
    "docker on all hosts": ({"pc1": with_docker(pc("pc1")), "pc2": with_docker(pc("pc2"))}, ()),
    "a folder that all share": ({"pc1": with_share(pc("pc1")), "pc2": with_share(pc("pc2"))}, ()),
    "homes on a file server": ({"pc1": on_nfs_home(pc("pc1")), "pc2": on_nfs_home(pc("pc2"))}, ()),
    "two DGX Sparks": ({"pc1": spark("pc1"), "pc2": spark("pc2")}, ()),
    "names that are right": (
        {"pc1": with_names(pc("pc1"), pc2=["192.168.1.12"]), "pc2": with_names(pc("pc2"), pc1=["192.168.1.11"])},
        (),
    ),
    "names that nobody knows": ({"pc1": with_names(pc("pc1"), pc2={"error": "not known"}), "pc2": pc("pc2")}, ()),
    "no systemd": ({"pc1": with_system(pc("pc1"), linger=None, kill_user_processes=None)}, ()),
    "three hosts on this computer": (
        {name: {**cpu_only("pc1"), "storage": [folder(f"/w/{name}")]} for name in ("a", "b", "c")},
        tuple(host(name, transport="local", address="127.0.0.1", code=None) for name in ("a", "b", "c")),
    ),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_wrong_with(name):
    answers, hosts = HEALTHY[name]
    assert [line for one in findings(answers, *hosts) if one.severity != "info" for line in one.lines()] == []


def test_cards_of_two_generations_are_told_and_stop_nothing():
    answers = {"pc1": pc("pc1"), "pc2": pc("pc2", [card("Tesla V100-SXM2-32GB", 32, "7.0")])}
    assert [(one.id, one.severity, one.hosts) for one in findings(answers)] == [("E-GPU-07", "info", ("pc2",))]


def test_a_machine_about_which_little_is_known_has_no_findings():
    """An old agent, a strange system: what nobody knows is no fault."""
    answers = {}
    for name in ("pc1", "pc2"):
        work = {"path": f"/w/{name}", "real_path": f"/w/{name}", "free_bytes": 100 * GIB}
        answers[name] = {"system": {"hostname": name, "num_cpus": 4}, "storage": [work]}
    assert findings(answers, host("pc1", python=""), host("pc2", python="")) == ()


def test_a_folder_that_is_one_on_all_hosts_has_no_findings():
    both = ("pc1", "pc2")
    views = (SharedView(host="pc1", sees=both), SharedView(host="pc2", sees=both, sees_rename=True))
    probe = SharedProbe(folder="/mnt/nas", views=views)
    assert findings({"pc1": pc("pc1"), "pc2": pc("pc2")}, shared=(probe,)) == ()
