"""Environments for lab hosts: real venvs with the metadata of packages, and next to nothing of the packages themselves.

Everything that tells a version says the same: the name of the dist-info folder, METADATA, `torch/version.py`, the module's
`__version__`, NCCL's library. torch can be imported; it sees the simulated cards where it is built for CUDA.
"""

import functools
import io
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

FOLDER = "/opt/train"

CPU = {
    "torch": "2.13.0+cpu",
    "transformers": "5.23.0",
    "peft": "0.21.2",
    "datasets": "5.2.0",
    "safetensors": "0.8.0",
    "tokenizers": "0.23.3",
    "huggingface-hub": "2.4.0",
    "accelerate": "1.15.0",
    "numpy": "2.4.6",
    "nvidia-ml-py": "13.615.71",
    "tensorboard": "2.21.0",
}
CUDA = {
    **CPU,
    "torch": "2.13.0+cu128",
    "triton": "3.7.0",
    "nvidia-cuda-runtime-cu12": "12.8.90",
    "nvidia-cublas-cu12": "12.8.4.1",
    "nvidia-nccl-cu12": "2.27.5",
}

MODULES = {"nvidia-ml-py": "pynvml", "huggingface-hub": "huggingface_hub"}
"""Where a package's module is called otherwise."""

ARCHITECTURES = {
    "11.8": "sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_37 sm_90",
    "12.4": "sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90",
    "12.6": "sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90",
    "12.8": "sm_70 sm_75 sm_80 sm_86 sm_90 sm_100 sm_120",
}
"""CUDA of a wheel -> the cards that it has kernels for."""

TORCH = """
from . import version
from .version import __version__
from . import cuda
"""

TORCH_CUDA = """
import ctypes
from .. import version
from . import nccl

def device_count():
    # Simulated cards are seen through NVML's stand-in only.
    count = ctypes.c_uint(0)
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        if version.cuda is None or library.nvmlInit_v2() or library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return 0
    except OSError:
        return 0
    return count.value

def is_available():
    return device_count() > 0

def get_arch_list():
    return ARCHITECTURES if is_available() else []
"""

NCCL = "int ncclGetVersion(int *version) { *version = NUMBER; return 0; }\n"


def make(host, packages: Mapping[str, str], folder: str = FOLDER) -> None:
    """Make a virtual environment on a host, of its own Python, with these packages."""
    script = 'exec "$(readlink -f "$(command -v python3)")" -m venv --without-pip "$1"'
    host.check(["sh", "-euc", script, "make", folder], as_root=True)
    fill(host, packages, folder)


def fill(host, packages: Mapping[str, str], folder: str = FOLDER) -> None:
    """Put these packages into an environment, in place of those it has."""
    host.write("/var/tmp/packages.tar", archive(tuple(sorted(packages.items()))))
    script = (
        'cd "$1"/lib/python3.*/site-packages && rm -rf ./* && tar -xf /var/tmp/packages.tar && rm /var/tmp/packages.tar'
    )
    host.check(["sh", "-euc", script, "fill", folder], as_root=True)


@functools.cache
def archive(packages: tuple[tuple[str, str], ...]) -> bytes:
    """A site-packages folder as a tar file."""
    files: dict[str, bytes] = {}
    for name, version in packages:
        own = (
            _torch(version)
            if name == "torch"
            else _nccl(version)
            if name.startswith("nvidia-nccl")
            else _other(name, version)
        )
        files |= own | _metadata(name, version, [*own], dict(packages))
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for path, data in files.items():
            member = tarfile.TarInfo(path)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return stream.getvalue()


def _metadata(name: str, version: str, paths: list[str], packages: Mapping[str, str]) -> dict[str, bytes]:
    folder = f"{name.replace('-', '_')}-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    if name == "torch":
        lines += [
            f"Requires-Dist: {each}=={packages[each]}"
            for each in packages
            if each.startswith("nvidia-") and "cu" in each
        ]
    texts = {
        "METADATA": "\n".join(lines) + "\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: setuptools (81.0.0)\nRoot-Is-Purelib: false\nTag: py3-none-any\n",
        "INSTALLER": "pip\n",
        "top_level.txt": f"{MODULES.get(name, name.replace('-', '_'))}\n",
    }
    record = [*paths, *(f"{folder}/{each}" for each in (*texts, "RECORD"))]
    texts["RECORD"] = "".join(f"{path},,\n" for path in record)
    return {f"{folder}/{each}": text.encode() for each, text in texts.items()}


def _other(name: str, version: str) -> dict[str, bytes]:
    if name.startswith("nvidia-c"):
        return {f"nvidia/{name.removeprefix('nvidia-').rpartition('-')[0].replace('-', '_')}/__init__.py": b""}
    return {f"{MODULES.get(name, name)}/__init__.py": f"__version__ = {version!r}\n".encode()}


def _torch(version: str) -> dict[str, bytes]:
    local = version.partition("+")[2]
    cuda = f"{local[2:-1]}.{local[-1]}" if local.startswith("cu") else None
    texts = {
        "torch/__init__.py": TORCH,
        "torch/version.py": f"from typing import Optional\n\n__version__ = {version!r}\ndebug = False\n"
        f"cuda: Optional[str] = {cuda!r}\ngit_version = 'simulated'\nhip: Optional[str] = None\n",
        "torch/cuda/__init__.py": TORCH_CUDA.replace("ARCHITECTURES", repr(ARCHITECTURES.get(cuda, "").split())),
        "torch/cuda/nccl.py": TORCH_NCCL,
        "torch/lib/libtorch.so": "",
        "torch/lib/libtorch_cpu.so": "",
    }
    if cuda:
        texts |= {"torch/lib/libtorch_cuda.so": "", "torch/lib/libc10_cuda.so": ""}
    return {path: text.encode() for path, text in texts.items()}


TORCH_NCCL = """
import ctypes, pathlib

def version():
    path = pathlib.Path(__file__).parents[2] / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    number = ctypes.c_int(0)
    ctypes.CDLL(str(path)).ncclGetVersion(ctypes.byref(number))
    return number.value // 10000, number.value // 100 % 100, number.value % 100
"""


@functools.cache
def _nccl(version: str) -> dict[str, bytes]:
    major, minor, patch = (int(part) for part in version.split(".")[:3])
    text = NCCL.replace("NUMBER", str(major * 10000 + minor * 100 + patch))
    return {"nvidia/nccl/__init__.py": b"", "nvidia/nccl/lib/libnccl.so.2": library(text)}


@functools.cache
def library(text: str, *options: str) -> bytes:
    """A shared library of a few lines of C."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "library.so"
        argv = ["gcc", "-shared", "-fPIC", "-O1", *options, "-x", "c", "-", "-o", str(path)]
        subprocess.run(argv, input=text.encode(), check=True)
        return path.read_bytes()
