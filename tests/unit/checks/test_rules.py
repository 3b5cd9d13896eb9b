"""Rules whose misconfiguration is not among the planted ones, each by one small change of a healthy machine."""

import dataclasses
import sys

import pytest

from gangline.checks.judge import judge
from gangline.inventory.facts import HostFailure
from gangline.inventory.folders import Compared, CopyOnHost, SharedProbe, SharedView, WriteTry
from tests.unit.checks.machines import (
    GIB,
    MIB,
    cluster,
    container,
    cpu_only,
    cpu_torch,
    findings,
    folder,
    found,
    host,
    ib_port,
    inventory,
    nvlink_table,
    pc,
    server,
    wsl,
)

RADEON = {
    "maker": "AMD",
    "name": "AMD Radeon RX 7900 XTX",
    "pci": "0000:03:00.0",
    "memory_bytes": 24 * GIB,
    "integrated": False,
}


def with_other(answer, *cards):
    answer["other_gpus"] = list(cards)
    return answer


TOPOLOGY_FILE = """<system version="1"><cpu numaid="0"><pci busid="0000:{bus}:00.0" class="0x030200" link_width="16">
<gpu dev="0" sm="89" rank="0" gdr="1"/></pci></cpu></system>"""


def lease(slot):
    return {"slot": slot, "user": "anna", "run": "calm-otter-7", "seen": "since 2026-11-26 21:20:02 (process 4711)"}


def put(answer, place, **more):
    """The answer with other values at a place such as "nics.0" or "gpus.cards.0"."""
    target = answer
    for word in place.split(".") if place else ():
        target = target[int(word) if word.isdigit() else word]
    target |= more
    return answer


def variable(answer, name, value, source="/home/u/.bashrc:7"):
    answer["variables"].append({"name": name, "value": value, "source": source})
    return answer


def without_peer(answer, **port):
    answer["rdma"]["ports"] = [{**one, **port} for one in answer["rdma"]["ports"]]
    return answer


def topology_file(bus):
    answer = pc("pc2")
    answer["files"] = [{"path": "/etc/nccl-topo.xml", "digest": "d", "text": TOPOLOGY_FILE.format(bus=bus)}]
    return answer


def work_folder(**more):
    return put(pc("pc2"), "storage.0", **more)


def same_mac(name):
    return put(pc(name), "nics.0", mac="02:00:00:aa:bb:cc")


ONE_CHANGE = {
    "a work folder on one file server": (
        "E-NAME-01",
        ("pc1", "pc2"),
        {
            name: put(pc(name), "storage.0", filesystem="nfs4", source="nas:/home", real_path="/home/u/g")
            for name in ("pc1", "pc2")
        },
        (),
    ),
    "loopback as an address": (
        "E-NAME-06",
        ("pc2",),
        {"pc1": pc("pc1"), "pc2": pc("pc2")},
        (host("pc2", address="127.0.0.1"),),
    ),
    "an own name that is loopback first": (
        "E-NAME-03",
        ("pc2",),
        {
            "pc1": pc("pc1"),
            "pc2": put(pc("pc2"), "names.addresses", pc2=["127.0.1.1", *pc("pc2")["names"]["addresses"]["pc2"]]),
        },
        (),
    ),
    "a memory limit that is small": (
        "E-MEM-02",
        ("pc2",),
        {"pc2": put(container("pc2"), "system", memory_limit_bytes=4 * GIB)},
        (),
    ),
    "little memory available": (
        "E-MEM-01",
        ("pc2",),
        {"pc2": put(pc("pc2"), "system", memory_available_bytes=500 * MIB)},
        (),
    ),
    "little room": ("E-DISK-02", ("pc2",), {"pc2": work_folder(free_bytes=GIB)}, ()),
    "few inodes": ("E-DISK-04", ("pc2",), {"pc2": work_folder(inodes_free=17)}, ()),
    "a work folder in memory": ("E-DISK-08", ("pc2",), {"pc2": work_folder(filesystem="tmpfs")}, ()),
    "somebody else's work folder": ("E-DISK-11", ("pc2",), {"pc2": work_folder(owner="/scratch belongs to bob")}, ()),
    "others above it": (
        "E-DISK-12",
        ("pc2",),
        {"pc2": work_folder(may_replace="/data belongs to bob, who may...")},
        (),
    ),
    "both": ("E-DISK-11", ("pc2",), {"pc2": work_folder(owner="a link that bob made", may_replace="/data ...")}, ()),
    "locked memory beside InfiniBand": (
        "E-LIM-02",
        ("gpu1",),
        {"gpu1": put(server("gpu1"), "limits", memlock_soft=8 * MIB)},
        (host("gpu1", slots=8),),
    ),
    "few processes": ("E-LIM-04", ("pc2",), {"pc2": put(pc("pc2"), "limits", nproc_soft=100)}, ()),
    "processes that end at logout": (
        "E-LIM-05",
        ("pc2",),
        {"pc2": put(pc("pc2"), "system", kill_user_processes=True)},
        (),
    ),
    "an old Python": ("E-SW-11", ("pc2",), {"pc2": put(pc("pc2"), "packages", python="3.9.18")}, ()),
    "another processor": (
        "E-SW-12",
        ("pc1", "pc2"),
        {"pc1": cpu_only("pc1"), "pc2": put(cpu_only("pc2"), "packages", arch="aarch64")},
        (),
    ),
    "a package that is newer than the tested ones": (
        "E-SW-15",
        ("pc2",),
        {"pc2": put(pc("pc2"), "packages.packages", peft="0.99.0")},
        (),
    ),
    "a package that is older than the tested ones": (
        "E-SW-15",
        ("pc2",),
        {"pc2": put(pc("pc2"), "packages.packages", datasets="3.6.0")},
        (),
    ),
    "a Python that does not run": (
        "E-SW-13",
        ("pc2",),
        {"pc2": {**pc("pc2"), "packages": {"error": "OSError: exit code 1"}}},
        (),
    ),
    "builds for two CUDAs": (
        "E-SW-09",
        ("pc1", "pc2"),
        {
            "pc1": pc("pc1"),
            "pc2": put(put(pc("pc2"), "packages.torch", cuda="12.6"), "packages.packages", torch="2.13.0+cu126"),
        },
        (),
    ),
    "CPU torch beside the only GPUs": ("E-SW-10", ("pc2",), {"pc2": cpu_torch(pc("pc2"))}, ()),
    "a driver that is not loaded": (
        "E-GPU-09",
        ("pc2",),
        {
            "pc2": put(
                cpu_only("pc2"), "gpus", reason={"kind": "driver-not-loaded", "text": "Driver Not Loaded"}, on_the_bus=1
            )
        },
        (),
    ),
    "a card without a driver": ("E-GPU-09", ("pc2",), {"pc2": put(cpu_only("pc2"), "gpus", on_the_bus=1)}, ()),
    "a Radeon, whose processor would train": ("E-GPU-11", ("pc1",), {"pc1": with_other(cpu_only(), RADEON)}, ()),
    "a Radeon beside a GPU that trains": ("E-GPU-11", ("pc2",), {"pc2": with_other(cpu_only("pc2"), RADEON)}, ()),
    "much memory given to Strix Halo": (
        "E-GPU-11",
        ("pc1",),
        {"pc1": with_other(cpu_only(), {**RADEON, "integrated": True, "memory_bytes": 96 * GIB})},
        (),
    ),
    "a card that another user has": (
        "E-GPU-12",
        ("pc2",),
        {"pc2": put(pc("pc2"), "", leases=[lease("gpu-" + pc("pc2")["gpus"]["cards"][0]["uuid"])])},
        (),
    ),
    "cores that other users have": (
        "E-LIM-06",
        ("pc2",),
        {"pc2": put(cpu_only("pc2"), "", leases=[lease("cpu")] * cpu_only("pc2")["system"]["num_cpus"])},
        (),
    ),
    "a card in instances": ("E-GPU-10", ("pc2",), {"pc2": put(pc("pc2"), "gpus.cards.0", mig=True)}, ()),
    "a link that trained down": (
        "E-GPU-08",
        ("pc2",),
        {"pc2": put(pc("pc2"), "gpus.cards.0", pcie_generation=1, utilization_percent=97)},
        (),
    ),
    "InfiniBand beside RoCE": (
        "E-IB-04",
        ("gpu1", "gpu2"),
        {"gpu1": server("gpu1"), "gpu2": without_peer(server("gpu2"), link_layer="Ethernet")},
        (host("gpu1", slots=8), host("gpu2", slots=8)),
    ),
    "InfiniBand of two speeds": (
        "E-IB-04",
        ("gpu1", "gpu2"),
        {"gpu1": server("gpu1"), "gpu2": without_peer(server("gpu2"), rate_gbps=200.0)},
        (host("gpu1", slots=8), host("gpu2", slots=8)),
    ),
    "InfiniBand that may not be used": (
        "E-IB-05",
        ("gpu1",),
        {"gpu1": put(server("gpu1"), "rdma", may_open=False)},
        (host("gpu1", slots=8),),
    ),
    "a topology file of another machine": ("E-TOPO-03", ("pc2",), {"pc2": topology_file("c7")}, ()),
    "a tunnel": (
        "E-NET-14",
        ("pc2",),
        {"pc1": pc("pc1"), "pc2": put(pc("pc2"), "nics.0", name="tailscale0", kind="tunnel")},
        (),
    ),
    "half duplex": ("E-NET-15", ("pc2",), {"pc1": pc("pc1"), "pc2": put(pc("pc2"), "nics.0", duplex="half")}, ()),
    "copied virtual machines": ("E-NET-16", ("pc1", "pc2"), {"pc1": same_mac("pc1"), "pc2": same_mac("pc2")}, ()),
    "a link of ten times less": (
        "E-NET-07",
        ("pc2",),
        {"pc1": put(pc("pc1"), "nics.0", speed_mbps=10000), "pc2": pc("pc2")},
        (),
    ),
    "an interface without address": (
        "E-NET-09",
        ("pc2",),
        {
            "pc1": pc("pc1"),
            "pc2": {**pc("pc2"), "nics": [*pc("pc2")["nics"], {"name": "eno2", "kind": "ethernet", "addresses": []}]},
        },
        (host("pc2", interface="eno2"),),
    ),
    "gloo on loopback": (
        "E-ENV-03",
        ("pc2",),
        {"pc1": pc("pc1"), "pc2": variable(pc("pc2"), "GLOO_SOCKET_IFNAME", "lo")},
        (),
    ),
    "gloo on an interface that is not there": (
        "E-ENV-03",
        ("pc2",),
        {"pc2": variable(pc("pc2"), "GLOO_SOCKET_IFNAME", "eth7")},
        (),
    ),
    "InfiniBand switched off": (
        "E-ENV-05",
        ("gpu1",),
        {"gpu1": variable(server("gpu1"), "NCCL_IB_DISABLE", "1")},
        (host("gpu1", slots=8),),
    ),
    "a GID index": ("E-ENV-06", ("pc2",), {"pc2": variable(pc("pc2"), "NCCL_IB_GID_INDEX", "3")}, ()),
    "GPUs that are hidden": ("E-ENV-07", ("pc2",), {"pc2": variable(pc("pc2"), "CUDA_VISIBLE_DEVICES", "")}, ()),
}


@pytest.mark.parametrize("name", ONE_CHANGE)
def test_it_is_found_and_nothing_else_is(name):
    number, hosts, answers, given = ONE_CHANGE[name]
    assert [(one[0], one[2]) for one in found(answers, *given) if one[1] != "info"] == [(number, hosts)]


def test_a_dead_file_server_is_told_and_not_called_a_full_disk():
    answer = pc("pc2")
    answer["storage"][0] = {"path": "/mnt/nas/w", "error": "no answer within 5 s"}
    assert found({"pc2": answer}) == [("E-DISK-09", "fail", ("pc2",))]


def test_a_file_that_cannot_really_be_written_stops_the_start():
    row = WriteTry(host="pc2", folder="/w", error="Disk quota exceeded")
    assert found({"pc2": pc("pc2")}, writes=(row,)) == [("E-DISK-03", "fail", ("pc2",))]


def test_a_disk_that_takes_seconds_for_a_megabyte_is_told():
    row = WriteTry(host="pc2", folder="/w", seconds=9.5)
    assert found({"pc2": pc("pc2")}, writes=(row,)) == [("E-DISK-10", "warn", ("pc2",))]


def test_a_rename_that_is_seen_late_is_told():
    both = ("pc1", "pc2")
    views = (SharedView(host="pc1", sees=both), SharedView(host="pc2", sees=both, sees_rename=False))
    answers = {name: pc(name) for name in both}
    assert found(answers, shared=(SharedProbe(folder="/mnt/nas", views=views),)) == [("E-DISK-07", "warn", ("pc2",))]


def copies(*trees, error=None):
    rows = tuple(CopyOnHost(host=f"pc{number}", path="/m", tree=tree) for number, tree in enumerate(trees, 1))
    last = () if error is None else (CopyOnHost(host=f"pc{len(trees) + 1}", path="/m", error=error),)
    return (Compared(what="model", copies=rows + last),)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (copies("a", "a"), []),
        (copies("a", None), [("E-DATA-01", "info", ("pc2",))]),
        (copies(None, None), [("E-DATA-03", "fail", ("pc1", "pc2"))]),
        (copies("a", error="model.safetensors: Permission denied"), [("E-DATA-03", "fail", ("pc2",))]),
    ],
)
def test_model_and_data(data, expected):
    assert found({name: pc(name) for name in ("pc1", "pc2")}, data=data) == expected


def test_nccl_of_hosts_without_gpus_does_not_matter():
    answers = {"pc1": cpu_only("pc1"), "pc2": put(cpu_only("pc2"), "packages.packages", **{"nvidia-nccl-cu12": "2.1"})}
    assert found(answers) == []


def test_a_version_outside_of_the_tested_range_is_told_with_the_range():
    answer = put(pc("pc1"), "packages.packages", transformers="5.24.0")
    [finding] = findings({"pc1": answer})
    assert finding.title == "transformers is newer than the versions that gangline is tested with"
    assert finding.evidence.startswith("transformers 5.24.0; tested: 5.3.0 to ")
    assert "pip install 'transformers>=5.3.0,<=" in finding.fix


def test_the_users_own_command_needs_no_package_of_ours():
    answer = put(pc("pc1"), "packages.packages", transformers=None, peft=None, gangline=None)
    case = inventory({"pc1": answer}), cluster(host("pc1"))
    assert [one.id for one in judge(*case)] == ["E-SW-01"]
    assert judge(*case, own_worker=False) == ()


def test_the_users_own_command_needs_torchrun():
    case = inventory({"pc1": put(pc("pc1"), "packages.packages", torch=None)}), cluster(host("pc1"))
    assert [one.id for one in judge(*case, own_worker=False)] == ["E-SW-16"]
    assert [one.id for one in judge(*case)] == ["E-SW-01"]


def test_our_own_code_is_brought_to_hosts_over_ssh_only():
    answer = put(pc("pc1"), "packages.packages", gangline=None)
    local = host("pc1", transport="local", code=None, address="127.0.0.1", python=sys.executable)
    assert found({"pc1": answer}) == []
    assert found({"pc1": answer}, local) == [("E-SW-01", "fail", ("pc1",))]
    assert found({"pc1": answer}, dataclasses.replace(local, python="/opt/other/bin/python")) == []


def test_every_variable_of_the_cluster_file_has_the_last_word():
    answer = pc("pc2")
    assert found({"pc2": answer}, host("pc2", env={"GLOO_SOCKET_IFNAME": "eth7"})) == [("E-ENV-03", "fail", ("pc2",))]


def test_gpus_that_are_far_apart_are_told():
    table = nvlink_table(8, 0).replace("NV18", "SYS")
    answer = {**server("gpu1"), "topology": table}
    answer["rdma"]["ports"] = []
    told = findings({"gpu1": answer}, host("gpu1", slots=8), only=("topology",))
    assert [(one.id, one.severity) for one in told] == [("E-TOPO-01", "info")]


def test_an_adapter_on_the_other_socket_is_told():
    answer = server("gpu1")
    answer["rdma"]["ports"] = [ib_port(0)]
    (told,) = findings({"gpu1": answer}, host("gpu1", slots=8), only=("topology",))
    assert (told.id, told.severity) == ("E-TOPO-02", "info")
    assert "GPU4, GPU5, GPU6, GPU7 to mlx5_0: SYS" in told.evidence


def test_the_topology_file_of_this_machine_is_fine():
    assert found({"pc2": topology_file("01")}) == []


@pytest.mark.parametrize("kind", ["busy", "something new"])
def test_a_reason_that_nobody_knows_is_a_host_that_does_not_answer(kind):
    failure = HostFailure(host="pc2", why="why", unreachable=True, kind=kind)
    assert found({"pc1": pc("pc1")}, host("pc2"), failures=(failure,)) == [("E-ACC-01", "fail", ("pc2",))]


def test_no_text_of_a_rule_has_a_gap_left():
    told = [one for _, _, answers, given in ONE_CHANGE.values() for one in findings(answers, *given)]
    assert [one for one in told if "{" in one.title + one.meaning + one.fix] == []


def test_a_shared_folder_on_two_hosts_is_not_their_work_folder():
    answers = {name: pc(name) for name in ("pc1", "pc2")}
    for answer in answers.values():
        answer["storage"].append(folder("/mnt/nas", filesystem="nfs4", source="nas:/x"))
    assert found(answers) == []


def test_a_host_whose_gpu_cannot_train_is_told_what_to_write():
    (finding,) = findings({"pc1": with_other(cpu_only(), RADEON)}, only=["E-GPU-11"])
    assert finding.severity == "fail"
    assert "AMD Radeon RX 7900 XTX (AMD, 24 GiB)" in finding.evidence
    assert "gpu: none" in finding.fix


def test_a_users_own_program_may_train_on_any_gpu():
    members = inventory({"pc1": with_other(cpu_only(), RADEON)})
    assert "E-GPU-11" not in {one.id for one in judge(members, cluster(host("pc1")), own_worker=False)}


@pytest.mark.parametrize(
    "card",
    [
        {**RADEON, "integrated": True, "memory_bytes": 512 * MIB},
        {**RADEON, "integrated": True, "memory_bytes": 8 * GIB},
        {"maker": "Intel", "name": "Intel UHD Graphics 770", "integrated": True},
    ],
)
def test_graphics_of_a_processor_make_no_fuss(card):
    assert "E-GPU-11" not in {row[0] for row in found({"pc1": with_other(cpu_only(), card)})}


def test_a_container_does_not_own_the_cards_that_it_sees():
    answer = with_other(cpu_only(), RADEON)
    answer["system"]["container"] = "docker"
    assert "E-GPU-11" not in {row[0] for row in found({"pc1": answer})}


def test_a_radeon_beside_a_card_that_trains_is_for_the_screen():
    assert "E-GPU-11" not in {row[0] for row in found({"pc1": with_other(pc(), RADEON)})}


def test_whose_a_card_is_stands_in_the_evidence():
    answer = put(pc("pc2"), "", leases=[lease("gpu-" + pc("pc2")["gpus"]["cards"][0]["uuid"]), lease("cpu")])
    (row,) = [each for each in findings({"pc2": answer}) if each.id == "E-GPU-12"]
    assert row.evidence.startswith("GPU 0 (")
    assert row.evidence.endswith(") by anna: calm-otter-7 since 2026-11-26 21:20:02 (process 4711)")


def test_cores_of_others_are_no_fault_where_there_are_enough():
    answer = put(cpu_only("pc2"), "", leases=[lease("cpu")])
    assert "E-LIM-06" not in {row[0] for row in found({"pc2": answer})}


@pytest.mark.parametrize(("address", "is_told"), [("172.28.112.5", True), ("192.168.1.12", False)])
def test_wsl_behind_windows_is_told_and_mirrored_is_not(address, is_told):
    hosts = (host("pc1", address="192.168.1.11"), host("pc2", address=address))
    told = [one.hosts for one in findings({"pc1": pc("pc1"), "pc2": wsl("pc2")}, *hosts) if one.id == "E-NET-17"]
    assert told == ([("pc2",)] if is_told else [])
