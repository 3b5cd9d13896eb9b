"""Which checkpoint a run goes on from, looked for on every host, and brought to the hosts that lack it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gangline.errors import CheckpointError, HostKeyRefused, HostUnreachable
from gangline.provision import relay
from gangline.provision.ask import run_there
from gangline.provision.console import SILENT, Console
from gangline.provision.relay import Cargo
from gangline.provision.trees import Spot, host_layout, look
from gangline.runs.checkpoints import CheckpointChoice, choose, part_folder, step_folder, with_record
from gangline.runs.cluster import Host
from gangline.runs.manifest import COMMIT_FILE, PART_FILE, Commit
from gangline.transport.fanout import in_parallel
from gangline.transport.transport import Transport

TIMEOUT_S = 6 * 3600.0
"""Every byte of every checkpoint of a host is read and hashed."""
ASIDE_TIMEOUT_S = 600.0
"""A few folders are renamed, and what lay aside before is removed."""

Survey = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointHost:
    """A host on which checkpoints of a run may lie."""

    host: Host
    transport: Transport

    def checkpoints(self, run_id: str) -> Path:
        """The folder of the run's checkpoints there."""
        return host_layout(self.host, run_id).checkpoints


Places = Mapping[str, CheckpointHost]
"""By label: the host's name, made unique where two clusters use one name for two places."""


def survey_places(places: Places, run_id: str, *, strict: bool = False, newest_only: bool = False) -> dict[str, Survey]:
    """What every place has, every file hashed, all places at once. One that does not answer has nothing.

    newest_only: of older steps than the newest of a place sizes are looked at only.
    strict: raise HostKeyRefused where somebody else answers. Else that is one more place that has nothing: a host that
    was given up need not be trusted for the run to go on without it.
    """
    verify = "--verify-newest" if newest_only else "--verify"
    surveys = in_parallel(lambda place: _survey(place, run_id, verify, strict=strict), places.values())
    return {label: survey for label, survey in zip(places, surveys, strict=True) if survey is not None}


def find_checkpoint(places: Places, run_id: str) -> CheckpointChoice:
    """The newest valid checkpoint anywhere; whole ones that nobody lived to commit are committed first.

    As a rule the newest of all is it, so older ones are hashed only where it is not.
    """
    surveys = survey_places(places, run_id, newest_only=True)
    newest = max((entry["step"] for survey in surveys.values() for entry in survey), default=None)
    choice = _choose_or_adopt(places, run_id, surveys)
    if choice.step == newest:
        return choice
    return _choose_or_adopt(places, run_id, survey_places(places, run_id))


def _choose_or_adopt(places: Places, run_id: str, surveys: Mapping[str, Survey]) -> CheckpointChoice:
    choice = choose(surveys)
    if not choice.adoptable:
        return choice
    newest = max(choice.adoptable)
    _adopt(places, run_id, choice.adoptable[newest])
    return choose(with_record(surveys, newest, choice.adoptable[newest]))


def at_step(surveys: Mapping[str, Survey], step: int) -> CheckpointChoice:
    """The checkpoint of one step, if it is valid."""
    return choose({label: [entry for entry in survey if entry["step"] == step] for label, survey in surveys.items()})


def bring(
    places: Places,
    run_id: str,
    choice: CheckpointChoice,
    *,
    targets: Sequence[str],
    bare: Collection[str] = (),
    console: Console = SILENT,
) -> list[str]:
    """See to it that every target has the commit record and the parts that it needs; the labels of those that got any.

    bare: targets that get the record only.

    Last, the steps newer than the choice are moved aside at every place that answers: the run writes them anew.
    """
    if choice.step is None or choice.record is None:
        return []
    for label in targets:
        place = places[label]
        place.transport.write(step_folder(place.checkpoints(run_id), choice.step) / COMMIT_FILE, choice.record)
    lacking = bring_parts(
        places, run_id, choice, targets=[label for label in targets if label not in bare], console=console
    )
    for label in _with_newer(choice, places):
        with contextlib.nullcontext() if label in targets else contextlib.suppress(HostUnreachable):
            failure = f"checkpoints newer than step {choice.step} cannot be moved aside"
            _run(places[label], run_id, "aside", str(choice.step), timeout_s=ASIDE_TIMEOUT_S, failure=failure)
    return lacking


def bring_parts(
    places: Places, run_id: str, choice: CheckpointChoice, *, targets: Sequence[str], console: Console = SILENT
) -> list[str]:
    """The parts that the targets need and lack, each from any place that has it; the labels of those that got any."""
    lacking = {label: parts for label in targets if (parts := choice.lacks(label))}
    for label, parts in lacking.items():
        _blank_parts(places[label], run_id, choice, parts)
    for part in choice.parts:
        labels = [label for label, parts in lacking.items() if part in parts]
        if labels:
            _bring_part(places, run_id, choice, part, labels, console=console)
    return list(lacking)


def rejected_error(run_id: str, choice: CheckpointChoice) -> CheckpointError:
    """There are checkpoints, and none can be used."""
    what = f"no checkpoint of {run_id} can be used"
    fix = "bring back the host or disk that has a whole copy and try again, or start a new run: gangline train"
    lost = [rejection for rejection in choice.rejected if rejection.in_parts]
    if lost:
        what += f" without {lost[0].host}: they lie in parts, one on each host"
        fix = (
            "bring that host or disk back, or put its part-<host> beside the others, into "
            f"runs/{run_id}/checkpoints/step-<number> in the work folder of any host; then: gangline resume {run_id}"
        )
    return CheckpointError(
        what,
        seen="; ".join(str(rejection) for rejection in choice.rejected),
        fix=fix,
    )


def _survey(place: CheckpointHost, run_id: str, verify: str, *, strict: bool) -> Survey | None:
    try:
        survey: Survey = json.loads(
            _run(
                place, run_id, "survey", verify, timeout_s=TIMEOUT_S, failure="its checkpoints cannot be looked through"
            )
        )
    except HostUnreachable as error:
        if strict and isinstance(error, HostKeyRefused):
            raise
        return None
    return survey


def _run(place: CheckpointHost, run_id: str, verb: str, word: str, *, timeout_s: float, failure: str) -> str:
    """What `python -m gangline.runs.checkpoints VERB FOLDER WORD` prints there; CheckpointError where it fails."""
    argv = place.host.argv("-m", "gangline.runs.checkpoints", verb, str(place.checkpoints(run_id)), word)
    result = run_there(place.transport, argv, env=place.host.code_env, timeout_s=timeout_s)
    if result.returncode != 0:
        raise CheckpointError(
            f"{place.host.name}: {failure}",
            seen=f"exit code {result.returncode}: {result.stderr.strip()[-400:]}",
            fix=f"on that host: {' '.join(argv)}",
        )
    return result.stdout


def _with_newer(choice: CheckpointChoice, places: Places) -> list[str]:
    """All places, if anything newer than the choice was passed over."""
    return list(places) if any(rejection.step > (choice.step or 0) for rejection in choice.rejected) else []


def _adopt(places: Places, run_id: str, record: bytes) -> None:
    commit = Commit.from_bytes(record)
    for place in places.values():
        if place.host.name in commit.parts:
            place.transport.write(step_folder(place.checkpoints(run_id), commit.step) / COMMIT_FILE, record)


def _bring_part(
    places: Places, run_id: str, choice: CheckpointChoice, part: str, lacking: Sequence[str], *, console: Console
) -> None:
    """One whole part to the places that lack it, from any that has it."""
    assert choice.step is not None
    source = next(source for source in choice.sources if source.part == part)
    spot = _part_spot(places, source.host, run_id, step=choice.step, part=part)
    targets = [_part_spot(places, label, run_id, step=choice.step, part=part) for label in lacking]
    what = f"step {choice.step}" + (f", the part of {part}" if choice.held else "")
    relay.bring(Cargo(what=what, source=spot, tree=look(spot), kind=CheckpointError), targets, console=console)


def _part_spot(places: Places, label: str, run_id: str, *, step: int, part: str) -> Spot:
    """A part at a place; the host under the label, for two clusters may use one name for two places."""
    place = places[label]
    path = part_folder(place.checkpoints(run_id), step, part)
    return Spot(host=dataclasses.replace(place.host, name=label), transport=place.transport, path=path)


def _blank_parts(place: CheckpointHost, run_id: str, choice: CheckpointChoice, parts: Collection[str]) -> None:
    """A damaged part whose part.json is intact would be preferred by the ranks, and refused. Of a step in parts others
    than those that are brought may be whole.
    """
    assert choice.step is not None
    folder = step_folder(place.checkpoints(run_id), choice.step)
    for name in place.transport.names(folder):
        is_part = name.startswith("part-") and not name.endswith(".tmp")
        if is_part and (not choice.held or name.removeprefix("part-") in parts):
            place.transport.write(folder / name / PART_FILE, b"")
