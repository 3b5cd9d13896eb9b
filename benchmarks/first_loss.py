"""From `pip install gangline` to the first loss on three hosts, and a plan by `uvx`, with caches and without.

    python -m benchmarks.first_loss --out first_loss.jsonl --wheels wheels

The wheel is built from this repository. It, what it needs and what hosts need lie in the folder `--wheels` (filled once
by pip, 390 MB): pip and uv take them from there and ask no index, so no figure holds a download. The places:

local      three hosts of `transport: local`: venv, pip install, `gangline setup`, `gangline train`
lab        three hosts of the lab (tests/lab) with Python and sshd and nothing else: venv, pip install, `init`, `check`,
           `train`, which builds the environment on the hosts
uvx        `uvx gangline plan JOB --hosts ...` for machines that are not there

Each is done in an empty home (`cold`), then again without what was installed and built, but with what pip and uv keep
(`warm`). A case begins once the load of the last minute is below `--load`. One line per case is appended to `--out`,
with the load before and after it; cases of a round that the file has already are passed over. The last lines printed
are the table for RESULTS.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.environment import gathered
from tests.lab import network
from tests.lab.hosts import ROOT, HostKind, Lab
from tests.lab.settings import Settings, login_key
from tests.lab.test_story_built import NOT_THERE, PYTHON
from tests.lab.user import JOB, TEXT, make_model

CACHES = ("cold", "warm")
MARKS = {
    "wheels gathered": r"packages for .* gathered",
    "wheels on the hosts": r"copied packages for",
    "environment built": r"environment built",
    "tokens on the hosts": r"data  +\d+ steps",
    "run started": r"run \S+ started",
    "ranks joined": r"all 3 ranks have joined",
    "first loss": r"step 1/",
}
"""What `train` prints -> the stage that is complete then."""
LOCAL = "hosts:\n" + "".join(
    f"  - {{name: pc{number}, transport: local, workdir: ~/pc{number}}}\n" for number in (1, 2, 3)
)
MACHINES = ("--hosts", "pc1=rtx5070ti-laptop,pc2=rtx4070-laptop,pc3=rtx3070ti", "--link", "1gbit")
PATIENCE_S = 900.0


@dataclass(slots=True)
class Clock:
    """Seconds of each step of a case."""

    parts: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """This takes part of the time."""
        begun_s = time.monotonic()
        yield
        self.parts[name] = time.monotonic() - begun_s


@dataclass(slots=True)
class Place:
    """Where somebody types: `popen` starts words there, in a home of its own; `remove` takes paths of it away."""

    popen: Callable[..., subprocess.Popen]
    home: Path
    python: str
    wheels: Path

    def types(self, *words: str) -> str:
        """Words, and what they print."""
        with self.start(*words) as process:
            said, errors = process.communicate(timeout=PATIENCE_S)
        if process.returncode:
            raise SystemExit(f"{words}: {process.returncode}\n{said}\n{errors}")
        return said

    def start(self, *words: str) -> subprocess.Popen:
        """Words in the background."""
        env = {
            "PATH": f"{self.home}/venv/bin:/usr/bin:/bin",
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.wheels),
            "OMP_NUM_THREADS": "1",
        }
        return self.popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def install(self, clock: Clock) -> None:
        """A virtual environment with gangline."""
        with clock.part("venv"):
            self.types(self.python, "-m", "venv", "venv")
        with clock.part("pip install"):
            self.types("pip", "install", "--quiet", "gangline")

    def train(self, clock: Clock) -> None:
        """`gangline train` up to the first loss; every stage counts from its start."""
        begun_s, run, lines = time.monotonic(), None, []
        process = self.start("gangline", "train", "job.yaml")
        for line in process.stderr:
            lines.append(line)
            stage = next((stage for stage, words in MARKS.items() if re.match(rf"\d* ?{words}", line)), None)
            if started := re.match(r"run (\S+) started", line):
                run = started[1]
            if stage:
                clock.parts[f"train: {stage}"] = time.monotonic() - begun_s
            if stage == "first loss":
                break
        else:
            raise SystemExit("".join(lines))
        self.types("gangline", "stop", str(run), "--now")
        process.communicate()


def here(scratch: Path, wheels: Path) -> Place:
    """This computer, with an empty home."""
    home = scratch / "home"
    home.mkdir()

    def popen(words: Sequence[str], *, env: dict[str, str], **options: Any) -> subprocess.Popen:
        dropped = {"GANGLINE_HOME", "PYTHONPATH", "VIRTUAL_ENV"}
        kept = {name: value for name, value in os.environ.items() if name not in dropped}
        program = shutil.which(words[0], path=env["PATH"]) or words[0]
        return subprocess.Popen([program, *words[1:]], env={**kept, **env, "HOME": str(home)}, cwd=home, **options)

    return Place(popen=popen, home=home, python=sys.executable, wheels=wheels)


class Town(Lab):
    """A lab whose user sees a folder of wheels, and nothing of this repository."""

    def __init__(self, wheels: Path) -> None:
        self._wheels = wheels
        super().__init__(3, names=("pc1", "pc2", "pc3"), disk="4g", shm="1g", hide=NOT_THERE, ttl_s=3600)

    def _desk(self, key: tuple[str, str]) -> Settings:
        kind = HostKind(binds=(self._wheels,), disk="4g")
        settings = self._site.machine("desk", network.DESK_NUMBER, kind)
        return {**settings, **login_key(key), "SSH_config": self._site.ssh_config()}


def bring(model: Path, write: Callable[[str, bytes], object]) -> None:
    """The job, its rows and its model."""
    for file in model.iterdir():
        write(f"model/{file.name}", file.read_bytes())
    write("fox.txt", TEXT.encode())
    write("job.yaml", JOB.encode())


def local(wheels: Path, model: Path) -> Iterator[dict[str, float]]:
    """Three local hosts."""
    with tempfile.TemporaryDirectory(prefix="gangline-first-loss-") as scratch:
        place = here(Path(scratch), wheels)
        (place.home / "model").mkdir()
        bring(model, lambda name, data: (place.home / name).write_bytes(data))
        (place.home / "cluster.yaml").write_text(LOCAL)
        for _ in CACHES:
            clock = Clock()
            place.install(clock)
            with clock.part("gangline setup"):
                place.types("gangline", "setup")
            place.train(clock)
            yield clock.parts
            built = place.home / ".local/state/gangline/environments"
            for each in [place.home / "venv", *built.glob("[0-9a-f]*")]:
                shutil.rmtree(each)


def lab(wheels: Path, model: Path) -> Iterator[dict[str, float]]:
    """Three hosts of the lab."""
    with Town(wheels) as town:
        place = Place(popen=town.user.popen, home=town.user.home, python=PYTHON, wheels=wheels)
        bring(model, town.user.write)
        for _ in CACHES:
            clock = Clock()
            place.install(clock)
            with clock.part("gangline init"):
                place.types("gangline", "init", "pc1", "pc2", "pc3", "--yes", "--force")
            with clock.part("gangline check"):
                place.types("gangline", "check")
            place.train(clock)
            yield clock.parts
            for host in town.hosts:
                host.check(["sh", "-c", "rm -r gangline/environments/[0-9a-f]*"])
            place.types("rm", "-r", "venv")


def uvx(wheels: Path, model: Path) -> Iterator[dict[str, float]]:
    """A plan without an installation; `MB` is what lies in the home afterwards."""
    del model
    with tempfile.TemporaryDirectory(prefix="gangline-uvx-") as scratch:
        place = here(Path(scratch), wheels)
        shutil.copy(ROOT / "src/gangline/recipes/three-pcs-7b-qlora.yaml", place.home / "job.yaml")
        words = ("uvx", "--no-index", "--find-links", str(wheels), "--python", sys.executable, "gangline", "plan")
        for _ in CACHES:
            clock, before = Clock(), os.times()
            with clock.part("uvx gangline plan"):
                place.types(str(Path(sys.prefix) / "bin" / words[0]), *words[1:], "job.yaml", *MACHINES)
            stats = [file.stat() for file in place.home.rglob("*") if file.is_file() and not file.is_symlink()]
            size = sum({(each.st_dev, each.st_ino): each.st_size for each in stats}.values())  # uv links what it has
            after = os.times()  # processor time does not depend on what else runs here
            work_s = after.children_user + after.children_system - before.children_user - before.children_system
            yield {**clock.parts, "of it processor time": work_s, "MB": size / 1e6}


PLACES = {"uvx": uvx, "local": local, "lab": lab}


def fill(wheels: Path) -> None:
    """The wheels of this repository, of what it needs, and of what hosts need."""
    wheels.mkdir(parents=True, exist_ok=True)
    for old in wheels.glob("gangline-*.whl"):
        old.unlink()
    pip = [sys.executable, "-m", "pip", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", wheels, ROOT], check=True)
    if not (wheels / "whole").exists():
        house = gathered(wheels / "gathered").folder
        for file in house.glob("*.whl"):
            file.rename(wheels / file.name)
        shutil.rmtree(wheels / "gathered")
        subprocess.run([*pip, "download", "--dest", wheels, *wheels.glob("gangline-*.whl")], check=True)
        (wheels / "whole").touch()


def await_quiet(most: float, patience_s: float) -> None:
    """Wait until this computer has time."""
    deadline = time.monotonic() + patience_s
    while (load := os.getloadavg()[0]) >= most:
        if time.monotonic() > deadline:
            raise SystemExit(f"the load is {load:.1f}, not below {most}: start again later, what is done is kept")
        time.sleep(5)


def main() -> None:
    """Do every case that the file does not have, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("first_loss.jsonl"))
    parser.add_argument("--wheels", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--load", type=float, default=2.0, help="a case begins once the load is below")
    parser.add_argument("--patience", type=float, default=600.0, help="seconds to wait for that")
    words = parser.parse_args()
    wheels = words.wheels.resolve()
    fill(wheels)
    with tempfile.TemporaryDirectory(prefix="gangline-model-") as folder:
        model = make_model(Path(folder))
        for number in range(words.rounds):
            for name, measure in PLACES.items():
                if {(line["place"], line["round"]) for line in _read(words.out)} >= {(name, number)}:
                    continue
                _do(name, measure(wheels, model), number, words)
    _print_table(_read(words.out))


def _do(name: str, cases: Iterator[dict[str, float]], number: int, words: argparse.Namespace) -> None:
    lines = []
    for cache in CACHES:
        await_quiet(words.load, words.patience)
        before = os.getloadavg()[0]
        parts = {part: round(value, 2) for part, value in next(cases).items()}
        load = [round(before, 1), round(os.getloadavg()[0], 1)]
        lines.append(
            {"place": name, "cache": cache, "round": number, "load": load, "commit": _commit(), "parts": parts}
        )
        print(json.dumps(lines[-1]), flush=True)
    with words.out.open("a", encoding="utf-8") as stream:  # a warm case needs the cold one before it
        stream.writelines(json.dumps(line) + "\n" for line in lines)


def _commit() -> str:
    return subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip()


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def _print_table(lines: list[dict[str, Any]]) -> None:
    for place in PLACES:
        print(f"\n| {place} | {' | '.join(CACHES)} |\n|---|---|---|")
        sides = [[line for line in lines if (line["place"], line["cache"]) == (place, cache)] for cache in CACHES]
        names = dict.fromkeys(name for side in sides for line in side for name in line["parts"])
        for part in names:
            values = [[line["parts"][part] for line in side if part in line["parts"]] for side in sides]
            print(f"| {part} | {' | '.join(_figure(each) for each in values)} |")
        if place != "uvx":
            sums = [[_total(line["parts"]) for line in side] for side in sides]
            print(f"| **to the first loss** | {' | '.join(_figure(each) for each in sums)} |")
        loads = [", ".join(f"{line['load'][0]}-{line['load'][1]}" for line in side) for side in sides]
        print(f"| load before-after | {' | '.join(loads)} |")


def _total(parts: dict[str, float]) -> float:
    """Stages of `train` count from its start, the others on their own."""
    return parts["train: first loss"] + sum(value for part, value in parts.items() if not part.startswith("train: "))


def _figure(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})" if values else "-"


if __name__ == "__main__":
    main()
