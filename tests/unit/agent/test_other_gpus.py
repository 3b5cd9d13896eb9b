"""GPUs of other makers: read off a bus as the kernel shows it, without their drivers' libraries."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from gangline.agent.host_facts import other_gpus
from gangline.agent.host_facts.other_gpus import on_the_bus

GIB = 1 << 30
AMD, INTEL, NVIDIA = "0x1002", "0x8086", "0x10de"
VGA, DISPLAY, ACCELERATOR, SECURITY = "0x030000", "0x038000", "0x120000", "0x108000"


@pytest.fixture
def root(tmp_path):
    """A machine without cards, with the lists of names that distributions install."""
    share = tmp_path / "usr" / "share"
    (share / "libdrm").mkdir(parents=True)
    (share / "libdrm" / "amdgpu.ids").write_text(
        "# List of AMDGPU IDs\n1.0.0\n744C,\tC8,\tAMD Radeon RX 7900 XTX\n744C,\tCC,\tAMD Radeon RX 7900 XT\n"
        "1586,\tC1,\tAMD Radeon 8060S Graphics\n"
    )
    (share / "misc").mkdir()
    (share / "misc" / "pci.ids").write_text(
        "# a list\n1002  Advanced Micro Devices, Inc. [AMD/ATI]\n\t1681  Rembrandt [Radeon 680M]\n"
        "\t744c  Navi 31 [Radeon RX 7900 XT/7900 XTX/7900 GRE/7900M]\n\t\t1002 0e3b  a board\n"
        "8086  Intel Corporation\n\t56a0  DG2 [Arc A770]\n\t4680  AlderLake-S GT1 [UHD Graphics 770]\n\t744c  no card\n"
    )
    return tmp_path


def put(root, place, vendor, device, kind=VGA, **files):
    folder = root / "devices" / place
    folder.mkdir(parents=True)
    for name, text in {"vendor": vendor, "device": device, "class": kind, **files}.items():
        (folder / name).write_text(f"{text}\n")


def found(root: Path):
    return on_the_bus(root / "devices", root)


def test_a_radeon_is_named_by_its_revision_and_has_its_memory(root):
    put(root, "0000:03:00.0", AMD, "0x744c", revision="0xc8", mem_info_vram_total=24 * GIB)
    put(root, "0000:03:00.1", AMD, "0xab30", "0x040300")  # its sound
    assert found(root) == [
        {
            "maker": "AMD",
            "name": "AMD Radeon RX 7900 XTX",
            "pci": "0000:03:00.0",
            "memory_bytes": 24 * GIB,
            "integrated": False,
        }
    ]


def test_graphics_of_a_processor_are_known_by_what_is_beside_them(root):
    put(root, "0000:05:00.0", AMD, "0x1681", revision="0x0a", mem_info_vram_total=512 << 20)
    put(root, "0000:05:00.2", AMD, "0x1649", SECURITY)
    put(root, "0000:00:02.0", INTEL, "0x4680")
    (amd, intel) = sorted(found(root), key=lambda gpu: gpu["maker"])
    assert (amd["name"], amd["integrated"]) == ("AMD Radeon 680M", True)
    assert (intel["name"], intel["integrated"]) == ("Intel UHD Graphics 770", True)


def test_an_arc_in_a_slot_is_a_card(root):
    put(root, "0000:03:00.0", INTEL, "0x56a0", DISPLAY)
    (arc,) = found(root)
    assert (arc["name"], arc["integrated"], arc["memory_bytes"]) == ("Intel Arc A770", False, None)


def test_an_instinct_is_no_display_and_says_its_name(root):
    put(
        root,
        "0000:c1:00.0",
        AMD,
        "0x74a1",
        ACCELERATOR,
        product_name="AMD Instinct MI300X",
        mem_info_vram_total=192 * GIB,
    )
    (instinct,) = found(root)
    assert instinct["name"] == "AMD Instinct MI300X"


def test_others_are_none_of_these(root):
    put(root, "0000:01:00.0", NVIDIA, "0x2684")
    put(root, "0000:02:00.0", "0x1a03", "0x2000")  # the screen of a server's remote control
    put(root, "0000:00:0b.0", INTEL, "0x7d1d", ACCELERATOR)  # the NPU of a processor
    assert found(root) == []


def test_without_lists_a_card_has_its_number(tmp_path):
    put(tmp_path, "0000:03:00.0", AMD, "0x744c", revision="0xc8")
    (card,) = found(tmp_path)
    assert (card["name"], card["memory_bytes"]) == ("AMD GPU 744c", None)


def test_a_mac_says_its_chip_and_its_memory(monkeypatch):
    monkeypatch.setattr(other_gpus.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(other_gpus, "run", lambda _words: SimpleNamespace(stdout="Apple M3 Max\n"))
    monkeypatch.setattr(other_gpus.os, "sysconf", {"SC_PHYS_PAGES": 2 << 20, "SC_PAGE_SIZE": 16384}.__getitem__)
    (chip,) = other_gpus.other_gpus({})
    assert (chip["maker"], chip["name"], chip["memory_bytes"]) == ("Apple", "Apple M3 Max", 32 * GIB)


def test_a_mac_with_intels_processor_has_none_of_apples(monkeypatch):
    monkeypatch.setattr(other_gpus.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(other_gpus, "run", lambda _words: SimpleNamespace(stdout="Intel(R) Core(TM) i9\n"))
    assert other_gpus.other_gpus({}) == []
