"""Damage committed checkpoints on purpose, and see what a resume makes of them (promise 2).

    python -m benchmarks.corruptions --out corruptions.jsonl                # 200 cases and 200 sound ones; no lab

Three hosts (folders) with three committed checkpoints that the trainer's own Saver wrote. A case damages one file, or a
whole part, of the newest one: a bit flips, the end is cut off, it is empty or missing, it is the file of another step,
a block of zeros or of noise lies in it, something hangs on its end, a value in its JSON is another, a file
is there that does not belong there, the whole part is missing or another step's. At a random place, on one host, on
two, or on all; in a quarter of the cases the checkpoint before is damaged on all hosts, too. What is damaged and where
follows from the number and the seed.

Noticed means all of this: a rank on a damaged host refuses to load what it has, with an error that names the file; the
step chosen is the newest of which a whole part is left anywhere, no damaged part is among its sources, and every
rejection is named with step, host and file; and after the resume every host loads the state of that step to the bit.
Before the damage the same checkpoints are looked at with something harmless done to them (times and inodes changed,
leftovers of a killed save, a record missing on a host or on all): none of them may be refused.
One JSON line per case; a file that has lines already is continued. Exit code 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.checkpoint_hosts import (
    RUN,
    checkpoints_of,
    load_as_rank,
    places_of,
    require_loadable,
    resume,
    tensors_of,
)
from benchmarks.plan_time import read
from benchmarks.scaling import commit
from gangline.errors import CheckpointError
from gangline.provision.checkpoint_sources import survey_places
from gangline.runs import checkpoints as disk
from gangline.runs.job import CheckpointJob
from gangline.runs.manifest import COMMIT_FILE, PART_FILE, commit_record
from gangline.worker.checkpoint import Saver
from tests.saved import place_commit

HOSTS = ("pc1", "pc2", "pc3")
STEPS = (100, 200, 300)
TENSORS, METADATA, STATE = "__0_0.distcp", ".metadata", "state.json"
PART = (TENSORS, METADATA, STATE, PART_FILE)
BLOCK_BYTES = 512
Line = dict[str, Any]
Change = Callable[[bytes, bytes, random.Random], bytes]
"""(content, content of the same file of another step, chance) -> damaged content."""


def flipped(data: bytes, _other: bytes, chance: random.Random) -> bytes:
    """One bit is another."""
    place = chance.randrange(len(data))
    return data[:place] + bytes([data[place] ^ (1 << chance.randrange(8))]) + data[place + 1 :]


def cut(data: bytes, _other: bytes, chance: random.Random) -> bytes:
    """The end is missing."""
    return data[: chance.randrange(1, len(data))]


def empty(_data: bytes, _other: bytes, _chance: random.Random) -> bytes:
    """Nothing is in it."""
    return b""


def of_another_step(_data: bytes, other: bytes, _chance: random.Random) -> bytes:
    """It is the file of another step."""
    return other


def zeros(data: bytes, _other: bytes, chance: random.Random) -> bytes:
    """A lost block."""
    return _overwritten(data, bytes(min(BLOCK_BYTES, len(data))), chance)


def noise(data: bytes, _other: bytes, chance: random.Random) -> bytes:
    """A block of something else."""
    return _overwritten(data, chance.randbytes(min(BLOCK_BYTES, len(data))), chance)


def longer(data: bytes, _other: bytes, chance: random.Random) -> bytes:
    """Something hangs on its end."""
    return data + chance.randbytes(chance.randint(1, 64))


def another_value(data: bytes, _other: bytes, chance: random.Random) -> bytes:
    """It is JSON as before, and a number or a text in it is another."""
    value = json.loads(data)
    key = chance.choice([key for key, each in value.items() if isinstance(each, int | str) and key != "seal"])
    value[key] = value[key] + 1 if isinstance(value[key], int) else f"{value[key]}x"
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def _overwritten(data: bytes, block: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(data) - len(block) + 1)
    return data[:place] + block + data[place + len(block) :]


ANY: tuple[Change, ...] = (flipped, cut, empty, of_another_step, zeros, noise, longer)
JSON_ONLY: dict[str, tuple[Change, ...]] = {
    STATE: (another_value,),
    PART_FILE: (another_value,),
    COMMIT_FILE: (another_value,),
}
WHOLE_PART = ("part missing", "part of another step", "stranger")
SAME_IN_ALL_STEPS = "of_another_step .metadata"
KINDS = (
    *(
        kind
        for name in (*PART, COMMIT_FILE)
        for change in (*ANY, *JSON_ONLY.get(name, ()))
        if (kind := f"{change.__name__} {name}") != SAME_IN_ALL_STEPS
    ),
    *(f"missing {name}" for name in PART),
    *WHOLE_PART,
)
CHANGES = {change.__name__: change for change in (*ANY, another_value)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """What is done to one step on some hosts."""

    kind: str
    step: int
    hosts: tuple[str, ...]

    @property
    def name(self) -> str:
        """What an error has to name: the file, or the part."""
        if self.kind == "stranger":
            return "notes.txt"
        return PART_FILE if self.kind in WHOLE_PART else self.kind.rsplit(maxsplit=1)[-1]

    @property
    def of_record(self) -> bool:
        """Whether the commit record is damaged, and all parts are whole."""
        return self.name == COMMIT_FILE

    def apply(self, root: Path, chance: random.Random) -> None:
        """Do it."""
        for host in self.hosts:
            folder = disk.step_folder(checkpoints_of(root, host), self.step)
            other = disk.step_folder(checkpoints_of(root, host), STEPS[0])
            if self.of_record:
                _change(folder / COMMIT_FILE, other / COMMIT_FILE, self.kind, chance)
            elif self.kind in WHOLE_PART:
                self._apply_to_part(folder / f"part-{host}", other / f"part-{host}")
            else:
                name = Path(f"part-{host}", self.name)
                _change(folder / name, other / name, self.kind, chance)

    def _apply_to_part(self, part: Path, other: Path) -> None:
        if self.kind == "stranger":
            (part / "notes.txt").write_text("mine")
            return
        shutil.rmtree(part)
        if self.kind == "part of another step":
            shutil.copytree(other, part)


def _change(path: Path, other: Path, kind: str, chance: random.Random) -> None:
    word = kind.split(maxsplit=1)[0]
    if word == "missing":
        path.unlink()
        return
    before, changed = path.read_bytes(), path.read_bytes()
    while changed == before:  # a block of zeros among zeros is no damage
        changed = CHANGES[word](before, other.read_bytes(), chance)
    path.write_bytes(changed)


def damages_of(number: int, chance: random.Random) -> list[Damage]:
    """What a case damages; the kinds take turns."""
    hosts = tuple(chance.sample(HOSTS, chance.choice((1, 2, 3, 3))))
    found = [Damage(kind=KINDS[number % len(KINDS)], step=STEPS[-1], hosts=hosts)]
    if number % 4 == 3:
        kind = chance.choice([kind for kind in KINDS if not kind.endswith(COMMIT_FILE)])
        found.append(Damage(kind=kind, step=STEPS[-2], hosts=HOSTS))
    return found


# --- what has to come of it


def expected_step(damages: Sequence[Damage]) -> int:
    """The newest step of which some host has a whole part: its record is somewhere, or can be written anew."""
    spoilt = {each.step for each in damages if set(each.hosts) == set(HOSTS) and not each.of_record}
    return max(set(STEPS) - spoilt)


def look(root: Path, damages: Sequence[Damage]) -> list[str]:
    """Resume; what is wrong with what it chose, said and brought."""
    expected = expected_step(damages)
    surveyed = disk.choose(survey_places(places_of(root, HOSTS), RUN))
    wrong = [f"not named: {words}" for each in damages if each.step >= expected for words in _unnamed(each, surveyed)]
    wrong += [
        f"{host} loads step {each.step} in spite of {each.kind}"
        for each in damages
        for host in each.hosts
        if not _is_refused(root, host, each)
    ]
    try:
        choice = resume(root, HOSTS)
    except CheckpointError as error:
        return [*wrong, f"nothing can be resumed: {error.what}; {error.seen}"]
    if choice.step != expected:
        return [*wrong, f"step {choice.step} was chosen instead of {expected}"]
    sound = sound_hosts(damages, expected)
    if {source.host for source in choice.sources} != set(sound):
        wrong.append(f"taken for whole: {[source.host for source in choice.sources]}, whole are {sound}")
    return wrong + require_loadable(root, HOSTS, expected)


def sound_hosts(damages: Sequence[Damage], step: int) -> list[str]:
    """Hosts whose own part of a step is whole."""
    spoilt = {host for each in damages if each.step == step and not each.of_record for host in each.hosts}
    return [host for host in HOSTS if host not in spoilt]


def _unnamed(damage: Damage, choice: disk.CheckpointChoice) -> list[str]:
    """Hosts of which no rejection names the step and the file."""
    said = [rejection for rejection in choice.rejected if rejection.step == damage.step]
    named = {each.host for each in said if damage.name in each.reason}
    if damage.kind == "part missing":
        named = {host for host in HOSTS for each in said if f"part-{host} was not found" in each.reason}
    return [f"{damage.kind} of step {damage.step} on {host}" for host in damage.hosts if host not in named]


def _is_refused(root: Path, host: str, damage: Damage) -> bool:
    """Whether a rank there would refuse it, and say why."""
    try:
        load_as_rank(root, host, damage.step)
    except CheckpointError as error:
        return bool(error.fix) and ("no part here" in error.what or _is_named(damage, f"{error.what} {error.seen}"))
    return False


def _is_named(damage: Damage, said: str) -> bool:
    return damage.name in said or ("no commit record" in said and damage.of_record)


# --- what is no damage


def untouched(_root: Path, _chance: random.Random) -> None:
    """Nothing is done."""


def copied(root: Path, _chance: random.Random) -> None:
    """Other inodes, other times, the same bytes: as after a copy to a new disk."""
    for path in sorted(root.rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            path.unlink()
            path.write_bytes(data)
            os.utime(path, (1, 1))


def leftovers(root: Path, chance: random.Random) -> None:
    """What a kill leaves beside them."""
    checkpoints = checkpoints_of(root, chance.choice(HOSTS))
    (disk.step_folder(checkpoints, STEPS[-1]) / "part-pc9.tmp").mkdir()
    (disk.step_folder(checkpoints, STEPS[-1]) / ".COMMITTED.7.tmp").write_text("{")
    (disk.step_folder(checkpoints, 400) / "part-pc1.tmp").mkdir(parents=True)
    (checkpoints / ".trash-step-00000050").mkdir()


def record_missing(root: Path, chance: random.Random) -> None:
    """Whoever commits was killed before the record was on all hosts."""
    for host in chance.sample(HOSTS, chance.choice((1, 2))):
        (disk.step_folder(checkpoints_of(root, host), STEPS[-1]) / COMMIT_FILE).unlink()


def never_committed(root: Path, _chance: random.Random) -> None:
    """Whoever commits was killed before the record was on any host."""
    for host in HOSTS:
        (disk.step_folder(checkpoints_of(root, host), STEPS[-1]) / COMMIT_FILE).unlink()


SOUND = (untouched, copied, leftovers, record_missing, never_committed)


def refused(root: Path) -> list[str]:
    """What is refused of checkpoints that are sound."""
    choice = resume(root, HOSTS)
    wrong = [f"sound, and refused: {rejection}" for rejection in choice.rejected]
    if choice.step != STEPS[-1] or len(choice.sources) != len(HOSTS):
        wrong.append(f"sound, and step {choice.step} was chosen, from {[source.host for source in choice.sources]}")
    return wrong + require_loadable(root, HOSTS, STEPS[-1])


# --- cases


def write_checkpoints(root: Path) -> None:
    """Three steps on three hosts, by the trainer's own Saver."""
    description = {"attempt": 1, "hosts": HOSTS, "num_ranks": 3, "fingerprints": {"job": "f00d"}}
    job = CheckpointJob(keep_last=len(STEPS))
    for step in STEPS:
        parts = {}
        for host in HOSTS:
            saver = Saver(checkpoints_of(root, host), host=host, job=job, description=description)
            saver.save(step, tensors_of(step), {"step": step, "evaluation_loss": None}, wait=True)
            if saver.failure:
                raise saver.failure
            parts[host] = (disk.part_folder(checkpoints_of(root, host), step, host) / PART_FILE).read_bytes()
        for host in HOSTS:
            place_commit(checkpoints_of(root, host), commit_record(parts))


def play(number: int, seed: int, *, source: Path, folder: Path) -> Line:
    """One case: first what is sound, then what is damaged."""
    began_s = time.perf_counter()
    chance = random.Random(f"{seed} {number}")
    harmless = SOUND[number % len(SOUND)]
    shutil.copytree(source, folder / "sound")
    harmless(folder / "sound", chance)
    wrong = refused(folder / "sound")
    damages = damages_of(number, chance)
    shutil.copytree(source, folder / "damaged")
    for each in damages:
        each.apply(folder / "damaged", chance)
    wrong += look(folder / "damaged", damages)
    return {
        "number": number,
        "seed": seed,
        "sound": harmless.__name__,
        "damages": [dataclasses.asdict(each) for each in damages],
        "chosen": expected_step(damages),
        "wrong": wrong,
        "duration_s": round(time.perf_counter() - began_s, 3),
    }


def report(lines: Sequence[Line]) -> int:
    """A table; 1 if anything is wrong."""
    print("\n| damaged | cases | noticed | sound ones refused |\n|---|---|---|---|")
    for name, count in sorted(Counter(map(_where, lines)).items()):
        mine = [line for line in lines if _where(line) == name]
        refusals = sum(any(words.startswith("sound") for words in line["wrong"]) for line in mine)
        print(f"| {name} | {count} | {sum(not line['wrong'] for line in mine)} | {refusals} |")
    bad = [line for line in lines if line["wrong"]]
    for line in bad:
        print(json.dumps(line))
    print(f"\n{len(lines)} corruptions, {len(lines) - len(bad)} noticed, {len(bad)} with something wrong")
    return 1 if bad else 0


def _where(line: Line) -> str:
    kind = str(line["damages"][0]["kind"])
    return "a whole part" if kind in WHOLE_PART else kind.rsplit(maxsplit=1)[-1]


def main() -> int:
    """Do what the file does not have yet, and sum up."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, continued if it exists")
    arguments = parser.parse_args()
    done = {(line["number"], line["seed"]) for line in read(arguments.out)}
    measured = commit()
    with tempfile.TemporaryDirectory(prefix="corruptions-") as folder:
        source = Path(folder) / "source"
        write_checkpoints(source)
        for number in range(arguments.cases):
            if (number, arguments.seed) in done:
                continue
            with tempfile.TemporaryDirectory(dir=folder) as own:
                line = play(number, arguments.seed, source=source, folder=Path(own)) | {"commit": measured}
            with arguments.out.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")
            if line["wrong"]:
                print(number, line["damages"], line["wrong"], flush=True)
    return report(read(arguments.out))


if __name__ == "__main__":
    sys.exit(main())
