"""What lab hosts are given beforehand, so that more can go wrong on them than a signal or a cable does (faults.py).

- A Python of their own, which is that of the bench and imports `faults_in_rank.py` when it starts.
- A clock that can be wrong (`faults_clock.c`), for every program that is started on them from now on.
- A limit of memory, and the file systems by which a host of one's own shows what its control groups have counted.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from benchmarks.faults_in_rank import ORDER
from tests.lab import limits
from tests.lab.machine import LabHost
from tests.lab.namespaces import LabFailed

PLACE = "/opt/plug"
PYTHON = f"{PLACE}/bin/python"
"""The Python of a host, as cluster.yaml names it."""
CLOCK = "/var/lib/lab-clock"
CLOCK_LIBRARY = "/usr/local/lib/lab-clock.so"
MEMORY_MB = 3000
"""Of all programs of a host; what an idle rank, torchrun and a host agent need is below 1000."""
HERE = Path(__file__).parent
ASKED = "import importlib.util, sys; print(sys.executable, importlib.util.find_spec('torch').name)"

_CGROUPS = {
    1: "mkdir {0}/memory && mount -t cgroup -o memory memory {0}/memory",
    2: "mount -t cgroup2 cgroup2 {0}",
}


def plant(host: LabHost) -> None:
    """Prepare a host on which nothing runs yet. Raises LabFailed where this machine lacks what it takes."""
    _plant_python(host)
    _plant_clock(host)
    plant_limit(host, memory_mb=MEMORY_MB)


def order(host: LabHost, word: str) -> None:
    """Have the rank on a host do one of the things that `faults_in_rank.py` lists."""
    host.write(f"{ORDER}.new", word)
    host.check(["mv", f"{ORDER}.new", ORDER], as_root=True)


def is_pending(host: LabHost) -> bool:
    """Whether no rank has taken the order yet."""
    return host.exists(ORDER)


def set_clock(host: LabHost, ahead_s: int) -> None:
    """Let the clock of a host be ahead by so much; 0: it is right."""
    # the same file, which processes have mapped
    octal = "".join(f"\\{byte:03o}" for byte in ahead_s.to_bytes(8, sys.byteorder, signed=True))
    host.check(["sh", "-c", f"printf '{octal}' | dd of={CLOCK} conv=notrunc status=none"], as_root=True)


def _plant_python(host: LabHost) -> None:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = f"{PLACE}/lib/{version}/site-packages"
    base = Path(sys.base_prefix, "bin", version)
    host.write(f"{PLACE}/pyvenv.cfg", f"home = {base.parent}\ninclude-system-site-packages = false\n")
    host.write(f"{site}/bench.pth", f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    host.write(f"{site}/sitecustomize.py", (HERE / "faults_in_rank.py").read_bytes())
    host.check(["mkdir", "-p", f"{PLACE}/bin", str(Path(ORDER).parent)], as_root=True)
    host.check(["ln", "-sfn", str(base), PYTHON], as_root=True)
    said = host.check([PYTHON, "-c", ASKED]).split()
    if said != [PYTHON, "torch"]:
        raise LabFailed(f"{host.name}: the Python of the bench says {said}")


def _plant_clock(host: LabHost) -> None:
    host.write(CLOCK, bytes(8))
    host.write(CLOCK_LIBRARY, _clock_library(), 0o755)
    host.write("/etc/ld.so.preload", f"{CLOCK_LIBRARY}\n")
    set_clock(host, 3600)
    is_wrong = ahead_s(host) > 3000
    set_clock(host, 0)
    if not is_wrong:
        raise LabFailed(f"{host.name}: its clock cannot be shown wrong")


def ahead_s(host: LabHost) -> float:
    """By how much the clock of a host is ahead of ours, as its Python sees it, but for the time of asking."""
    return float(host.check([PYTHON, "-c", "import time; print(time.time())"])) - time.time()


def _clock_library() -> bytes:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise LabFailed("no C compiler here: a clock cannot be shown wrong")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "clock.so")
        words = ["-shared", "-fPIC", "-O2", "-o", str(library), str(HERE / "faults_clock.c"), "-ldl"]
        subprocess.run([compiler, *words], check=True, capture_output=True)
        return library.read_bytes()


def plant_limit(host: LabHost, *, memory_mb: int) -> None:
    """A bound on the memory of all its programs, and the file systems by which the host itself sees what it did.

    Raises LabFailed where this machine has no control groups.
    """
    version = limits.version()
    if version is None:
        raise LabFailed("no control groups here: a host's memory cannot be limited")
    folder = "/sys/fs/cgroup"
    mount = _CGROUPS[version].format(folder)
    if version == 1:
        mount = f"mount -t tmpfs -o size=1m,mode=755 cgroups {folder} && {mount}"
    host.check(["sh", "-c", mount], as_root=True)
    host.limit(memory_mb=memory_mb)
