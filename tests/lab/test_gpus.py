"""The simulated GPUs of the lab answer as NVML and nvidia-smi do, and say that they are simulated."""

import json
import sys
from xml.etree import ElementTree

import pytest

from tests.lab import gpus
from tests.lab.hosts import lab_folders

pytestmark = pytest.mark.lab("gcc")

# With nvidia-ml-py, the library that most tools ask.
ASK = """
import json, sys, pynvml as nvml
try:
    nvml.nvmlInit()
except nvml.NVMLError as error:
    sys.exit(f"{type(error).__name__}: {error}")
cards = []
for index in range(nvml.nvmlDeviceGetCount()):
    try:
        card = nvml.nvmlDeviceGetHandleByIndex(index)
        cards.append({
            "name": nvml.nvmlDeviceGetName(card),
            "memory": nvml.nvmlDeviceGetMemoryInfo(card).free >> 20,
            "capability": nvml.nvmlDeviceGetCudaComputeCapability(card),
            "width": nvml.nvmlDeviceGetCurrPcieLinkWidth(card),
            "throttle": nvml.nvmlDeviceGetCurrentClocksEventReasons(card),
            "power": nvml.nvmlDeviceGetPowerUsage(card),
            "pci": nvml.nvmlDeviceGetPciInfo(card).busId,
            "processes": [(p.pid, p.usedGpuMemory >> 20) for p in nvml.nvmlDeviceGetComputeRunningProcesses(card)],
            "ecc": nvml.nvmlDeviceGetTotalEccErrors(card, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, 0),
        })
    except nvml.NVMLError as error:
        cards.append(type(error).__name__)
print(json.dumps({"driver": nvml.nvmlSystemGetDriverVersion(), "cuda": nvml.nvmlSystemGetCudaDriverVersion(), "cards": cards}))
"""


def ask(host):
    return host.run([sys.executable, "-c", ASK])


def smi(host, *words):
    return host.run(["nvidia-smi", *words])


def test_nvml_tells_of_the_cards(lab):
    host = lab(1, binds=lab_folders())["h0"]
    assert ask(host).stderr == "NVMLError_LibraryNotFound: NVML Shared Library Not Found\n"
    slow = gpus.like(
        gpus.H100, throttle=gpus.HOT_HARDWARE, pcie_width=1, ecc_uncorrected=7, processes={4711: 900}, used_mb=1000
    )
    gpus.install(host, [slow, gpus.RTX_3090, gpus.like(gpus.RTX_3090, is_lost=True)], driver="560.35.03", cuda="12.6")
    seen = json.loads(ask(host).stdout)
    assert seen == {
        "driver": "560.35.03",
        "cuda": 12060,
        "cards": [
            {
                "name": "NVIDIA H100 80GB HBM3",
                "memory": 80559,
                "capability": [9, 0],
                "width": 1,
                "throttle": 0x40,
                "power": 20000,
                "pci": "00000000:01:00.0",
                "processes": [[4711, 900]],
                "ecc": 7,
            },
            "NVMLError_NotSupported",
            "NVMLError_GpuIsLost",
        ],
    }


@pytest.mark.parametrize(
    ("problem", "error", "words"),
    [
        ("mismatch", "NVMLError_LibRmVersionMismatch", "Driver/library version mismatch"),
        ("no-driver", "NVMLError_DriverNotLoaded", "couldn't communicate with the NVIDIA driver"),
    ],
)
def test_a_driver_that_does_not_work(lab, problem, error, words):
    host = lab(1, binds=lab_folders())["h0"]
    gpus.install(host, [gpus.RTX_4070], problem=problem)
    assert error in ask(host).stderr
    said = smi(host)
    assert said.returncode != 0
    assert words in said.stdout


def test_a_machine_without_cards(lab):
    host = lab(1)["h0"]
    gpus.install(host, [], problem="no-devices")
    assert (smi(host).returncode, smi(host).stdout) == (6, "No devices were found\n")


def test_nvidia_smi_answers_queries(lab):
    host = lab(1)["h0"]
    gpus.install(host, [gpus.RTX_5070_TI, gpus.like(gpus.RTX_5070_TI, used_mb=9000, processes={12: 8800})])
    asked = "--query-gpu=index,name,memory.free,mig.mode.current"
    assert smi(host, asked, "--format=csv,noheader,nounits").stdout.splitlines() == [
        "0, NVIDIA GeForce RTX 5070 Ti, 16299, [N/A]",
        "1, NVIDIA GeForce RTX 5070 Ti, 7303, [N/A]",
    ]
    assert smi(host, asked, "--format=csv").stdout.splitlines()[:2] == [
        "index, name, memory.free [MiB], mig.mode.current",
        "0, NVIDIA GeForce RTX 5070 Ti, 16299 MiB, [N/A]",
    ]
    assert "is not a valid field" in smi(host, "--query-gpu=index,colour", "--format=csv").stdout
    held = smi(host, "--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader").stdout
    assert held == f"{gpus.uuid(1)}, 12, 8800 MiB\n"
    assert smi(host, "-L").stdout.count("RTX 5070 Ti") == 2
    found = ElementTree.fromstring(smi(host, "-q", "-x").stdout)
    assert [card.findtext("fb_memory_usage/free") for card in found.iter("gpu")] == ["16299 MiB", "7303 MiB"]
    assert found.findtext("gpu[2]/processes/process_info/pid") == "12"


def test_how_the_cards_are_joined(lab):
    host = lab(1)["h0"]
    gpus.install(host, [gpus.H100] * 3, topology=gpus.matrix(3, link="NV18", nics=["mlx5_0"], far={(0, 2): "SYS"}))
    rows = smi(host, "topo", "-m").stdout.splitlines()
    assert rows[0].split("\t")[1:5] == ["GPU0", "GPU1", "GPU2", "NIC0"]
    assert rows[1].split("\t")[:5] == ["GPU0", " X ", "NV18", "SYS", "PHB"]
    assert "NIC0: mlx5_0" in rows[-1]


def test_the_simulation_says_so(lab):
    host = lab(1, binds=lab_folders())["h0"]
    gpus.install(host, [gpus.RTX_4070])
    loads = "import ctypes; print(hasattr(ctypes.CDLL('libnvidia-ml.so.1'), 'gangline_simulated'))"
    assert host.check([sys.executable, "-c", loads]) == "True\n"
    for words in (["--version"], [], ["-q", "-x"]):
        said = smi(host, *words)
        assert "simulated" in said.stdout + said.stderr
