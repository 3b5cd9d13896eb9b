"""The planted misconfigurations (tests/lab/planted) that are not held out, in facts: each is found under its id.

Only rows that are not held out have a plant here; a test makes sure of it.
"""

import pytest

from gangline.inventory.facts import HostFailure
from gangline.inventory.folders import Compared, CopyOnHost, SharedProbe, SharedView
from tests.lab.planted.listed import PLANTED
from tests.unit.checks.machines import GIB, card, cpu_torch, found, host, pc

BOTH = ("pc1", "pc2")


def two(second, *hosts, **more):
    return found({"pc1": pc("pc1"), "pc2": second}, *hosts, **more)


def failing(kind, why):
    return found(
        {"pc1": pc("pc1")}, host("pc2"), failures=(HostFailure(host="pc2", why=why, unreachable=True, kind=kind),)
    )


def with_packages(answer, **packages):
    answer["packages"]["packages"] |= packages
    return answer


def with_card(**more):
    return pc("pc2", [card("NVIDIA GeForce RTX 4070", 12, "8.9", **more)])


def off():
    return failing("unreachable", "pc2 does not answer; connection timed out")


def no_sshd():
    return failing("refused", "pc2: connection refused")


def another_key():
    return failing("key-changed", "pinned SHA256:a, it shows SHA256:b")


def no_key_pinned():
    return failing("key-unpinned", "pc2: no host key is pinned")


def address_of_nobody():
    return two(pc("pc2"), host("pc2", address="192.168.1.99"))


def wrong_line_in_the_hosts_file():
    answer = pc("pc2")
    answer["names"]["addresses"]["pc1"] = ["192.168.1.77"]
    return two(answer)


def no_transformers():
    return two(with_packages(pc("pc2"), transformers=None))


def old_torch():
    return [row for row in two(with_packages(pc("pc2"), torch="2.6.0+cu128")) if row[0] != "E-SW-04"]


def old_transformers():
    answers = {name: with_packages(pc(name), transformers="5.1.0") for name in BOTH}
    return found(answers)


def two_nccls():
    return two(with_packages(pc("pc2"), **{"nvidia-nccl-cu12": "2.21.5"}))


def torch_for_the_cpu():
    return two(cpu_torch(pc("pc2")))


def two_slots_on_one_card():
    return two(pc("pc2"), host("pc2", slots=2))


def card_held_by_others():
    processes = [{"pid": 4711, "name": "blender", "memory_bytes": 9 * GIB}]
    return two(with_card(memory_free_bytes=3 * GIB, processes=processes))


def hot_card():
    return two(with_card(throttle=["hardware slowdown", "temperature (hardware)"], temperature_c=94))


def one_lane():
    return two(with_card(pcie_width=1))


def absent_interface():
    return two(pc("pc2"), host("pc2", interface="eth7"))


def shared_folder_not_writable():
    views = (SharedView(host="pc1", sees=("pc1",)), SharedView(host="pc2", error="Permission denied", sees=("pc1",)))
    return two(pc("pc2"), shared=(SharedProbe(folder="/mnt/nas", views=views),))


def a_byte_of_the_model():
    copies = tuple(
        CopyOnHost(host=name, path="/m", tree=tree, num_files=3, num_bytes=99)
        for name, tree in zip(BOTH, "ab", strict=True)
    )
    return two(pc("pc2"), data=(Compared(what="model", copies=copies, differing=("model.safetensors",)),))


PLANTS = {
    "A01": off,
    "A02": no_sshd,
    "A03": another_key,
    "A08": no_key_pinned,
    "N04": address_of_nobody,
    "N05": wrong_line_in_the_hosts_file,
    "S01": no_transformers,
    "S02": old_torch,
    "S03": old_transformers,
    "S08": two_nccls,
    "S09": torch_for_the_cpu,
    "G01": two_slots_on_one_card,
    "G02": card_held_by_others,
    "G03": hot_card,
    "G08": one_lane,
    "W09": absent_interface,
    "D04": shared_folder_not_writable,
    "M01": a_byte_of_the_model,
}
ON_BOTH = {"S03", "S08", "M01"}


@pytest.mark.parametrize("name", PLANTS)
def test_it_is_found_once_and_nothing_else_is(name):
    row = next(row for row in PLANTED if row.name == name)
    ids = [(number, hosts) for number, severity, hosts in PLANTS[name]() if severity in {"fail", "warn"}]
    assert ids == [(row.finding, BOTH if name in ON_BOTH else ("pc2",))]


def test_no_row_that_is_held_out_is_planted_here():
    assert [row.name for row in PLANTED if row.held_out and row.name in PLANTS] == []
