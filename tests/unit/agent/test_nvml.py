"""Cards by NVIDIA's library: what it says, what it cannot say, and what is missing in an old one. The library is a fake."""

# ruff: noqa: N802, N815 - the functions have the library's names

import ctypes

import pytest

from gangline.agent.host_facts import nvidia


class Fake:
    """Functions of the library with the arguments that ctypes hands over."""

    def __init__(self, **refusals):
        self.refusals = refusals

    def __getattr__(self, name):
        if name.startswith("_") or name == "gangline_simulated" or self.refusals.get(name) == "absent":
            raise AttributeError(name)
        if name == "nvmlErrorString":
            return lambda code: {3: b"Not Supported", 9: b"Driver Not Loaded"}.get(code, b"Unknown Error")
        if name in self.refusals:
            return lambda *_: self.refusals[name]
        return getattr(Working, name, lambda *_: 3)


class Working:
    """One card. What is not here is not supported by it."""

    nvmlInit_v2 = nvmlShutdown = staticmethod(lambda: 0)

    @staticmethod
    def nvmlSystemGetDriverVersion(buffer, _size):
        buffer.value = b"570.124.06"
        return 0

    @staticmethod
    def nvmlSystemGetCudaDriverVersion_v2(number):
        number._obj.value = 12080
        return 0

    @staticmethod
    def nvmlDeviceGetCount_v2(count):
        count._obj.value = 1
        return 0

    nvmlDeviceGetHandleByIndex_v2 = staticmethod(lambda _index, _device: 0)

    @staticmethod
    def nvmlDeviceGetName(_device, buffer, _size):
        buffer.value = b"NVIDIA H100 80GB HBM3"
        return 0

    @staticmethod
    def nvmlDeviceGetMemoryInfo(_device, memory):
        memory._obj.total, memory._obj.free = 80 << 30, 79 << 30
        return 0

    @staticmethod
    def nvmlDeviceGetCudaComputeCapability(_device, major, minor):
        major._obj.value, minor._obj.value = 9, 0
        return 0

    @staticmethod
    def nvmlDeviceGetCurrentClocksThrottleReasons(_device, reasons):
        reasons._obj.value = 0x4 | 0x1
        return 0

    @staticmethod
    def nvmlDeviceGetComputeRunningProcesses_v3(_device, count, rows):
        count._obj.value = 1
        rows[0].pid, rows[0].used = 1, nvidia.NOT_SAID
        return 0


def asked(monkeypatch, **refusals):
    fake = Fake(**refusals)
    monkeypatch.setattr(nvidia.ctypes, "CDLL", lambda _path: fake)
    monkeypatch.setattr(nvidia, "path", lambda: None)
    return nvidia.gpus({})


def test_what_the_library_says(monkeypatch):
    answer = asked(monkeypatch)
    (card,) = answer["cards"]
    assert (answer["driver"], answer["cuda"], answer["reason"], answer["simulated"]) == (
        "570.124.06",
        "12.8",
        None,
        False,
    )
    assert (card["name"], card["memory_total_bytes"], card["compute_capability"]) == (
        "NVIDIA H100 80GB HBM3",
        80 << 30,
        "9.0",
    )
    assert card["throttle"] == ["power cap"]
    assert [row["memory_bytes"] for row in card["processes"]] == [None]


def test_what_a_card_cannot_say_is_unknown(monkeypatch):
    (card,) = asked(monkeypatch)["cards"]
    assert {
        card[name] for name in ("temperature_c", "power_w", "ecc_uncorrected", "mig", "pci", "pcie_width", "uuid")
    } == {None}


def test_a_function_that_an_old_library_lacks_is_unknown(monkeypatch):
    names = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetMigMode", "nvmlDeviceGetPciInfo_v3")
    assert len(asked(monkeypatch, **dict.fromkeys(names, "absent"))["cards"]) == 1


def test_a_card_without_memory_of_its_own_has_the_computers(monkeypatch):
    (card,) = asked(monkeypatch, nvmlDeviceGetMemoryInfo=3)["cards"]
    assert card["unified_memory"] is True
    assert card["memory_total_bytes"] > 0


@pytest.mark.parametrize(("code", "kind"), [(9, "driver-not-loaded"), (4, "no-permission"), (999, "other")])
def test_why_there_are_no_cards(monkeypatch, code, kind):
    answer = asked(monkeypatch, nvmlInit_v2=code)
    assert answer["cards"] == []
    assert answer["reason"]["kind"] == kind


def test_without_the_library_nvidia_smi_is_asked(monkeypatch):
    def absent(path):
        raise OSError(f"{path}: cannot open shared object file")

    said = {"cards": [], "faults": [], "driver": "570.1", "reason": None}
    monkeypatch.setattr(nvidia.ctypes, "CDLL", absent)
    monkeypatch.setattr(nvidia, "path", lambda: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(nvidia, "query", lambda _program: said)
    answer = nvidia.gpus({})
    assert (answer["driver"], answer["reason"], answer["source"]) == ("570.1", None, "nvidia-smi")


def test_sizes_of_what_the_library_fills_in_are_those_of_its_header():
    assert ctypes.sizeof(nvidia._Pci) == 68
    assert ctypes.sizeof(nvidia._Process) == 24
    assert ctypes.sizeof(nvidia._Memory) == 24
