"""The model of a run: its checkpoints, its export, chat."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

from gangline.errors import GanglineError, HostUnreachable, RunFailed, UsageError
from gangline.provision.ask import ask_worker, run_there
from gangline.provision.checkpoint_sources import (
    CheckpointHost,
    Places,
    at_step,
    bring_parts,
    rejected_error,
    survey_places,
)
from gangline.provision.code import trainer_here
from gangline.provision.console import SILENT, Console
from gangline.provision.relay import Cargo, bring
from gangline.provision.trees import Spot, host_layout, look
from gangline.runs.checkpoints import CheckpointChoice, choose, part_folder, step_folder
from gangline.runs.cluster import Cluster, Host
from gangline.runs.files import read_json, write_json
from gangline.runs.job import Job
from gangline.runs.layout import ADAPTER_CONFIG, RunLayout
from gangline.runs.manifest import COMMIT_FILE
from gangline.transport.fanout import in_parallel
from gangline.transport.local import our_python
from gangline.transport.terminal import interactive
from gangline.transport.transport import Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPart:
    """A whole part of a committed checkpoint, on the host that has it."""

    place: CheckpointHost
    run_folder: Path
    part: Path
    """Of a step in parts, one of them; `complete` brings the others beside it."""
    step: int
    choice: CheckpointChoice
    places: Places
    """Where the run's checkpoints lie, by host."""


def find_saved(
    run_id: str, cluster: Cluster, transports: Mapping[str, Transport], *, step: int | None = None
) -> SavedPart:
    """The newest valid checkpoint of a run, or that of one step. Reads every byte of it; changes nothing.

    Raises UsageError or CheckpointError where there is none, HostKeyRefused where another host answers in place of one.
    """
    places = {host.name: CheckpointHost(host=host, transport=transports[host.name]) for host in cluster.hosts}
    surveys = survey_places(places, run_id, strict=True)
    choice = choose(surveys) if step is None else at_step(surveys, step)
    if choice.step is None:
        silent = [name for name in places if name not in surveys]
        committed = sorted({entry["step"] for survey in surveys.values() for entry in survey if entry["record"]})
        raise _nothing_saved(run_id, choice, committed=committed, silent=silent, step=step)
    # the head's copy if it has one: that is where the model and the caches are warm
    source = next((source for source in choice.sources if source.host == cluster.head.name), choice.sources[0])
    place = places[source.host]
    return SavedPart(
        place=place,
        run_folder=host_layout(place.host, run_id).folder,
        part=part_folder(place.checkpoints(run_id), choice.step, source.part),
        step=choice.step,
        choice=choice,
        places=places,
    )


def complete(saved: SavedPart, run_id: str, *, console: Console = SILENT) -> None:
    """Bring the parts that its host lacks, where a checkpoint lies in parts. Raises GanglineError."""
    if saved.choice.held and saved.choice.record is not None:
        host = saved.place.host.name
        saved.place.transport.write(saved.part.parent / COMMIT_FILE, saved.choice.record)
        bring_parts(saved.places, run_id, saved.choice, targets=[host], console=console)


def bring_saved(saved: SavedPart, run_id: str, name: str, *, console: Console = SILENT) -> SavedPart:
    """The same checkpoint on another host of the run, brought there where it lacks. Raises GanglineError."""
    place, choice = saved.places[name], saved.choice
    if choice.record is not None:
        place.transport.write(step_folder(place.checkpoints(run_id), saved.step) / COMMIT_FILE, choice.record)
    bring_parts(saved.places, run_id, choice, targets=[name], console=console)
    own = [source.part for source in choice.sources if source.host == name]
    part = part_folder(place.checkpoints(run_id), saved.step, (own or choice.parts)[0])
    return replace(saved, place=place, run_folder=host_layout(place.host, run_id).folder, part=part)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlace:
    """A host with the folder of a whole model."""

    host: Host
    transport: Transport
    folder: PurePath


@contextlib.contextmanager
def placed_model(
    saved: SavedPart, layout: RunLayout, hosts: Sequence[Host], *, home: Path, shared: Sequence[str], console: Console
) -> Iterator[list[ModelPlace]]:
    """The whole model of a checkpoint on each of these hosts of its run, while the context lasts.

    A host that has the export of that step serves it. The others get the model into the folder `served` of the run,
    exported once and brought from host to host where they reach each other; it is taken away at the end. shared:
    folders that are the same on all hosts. Raises GanglineError.
    """
    merged = Job.load(layout.job).method.kind != "full"

    def spot_of(host: Host) -> Spot:
        there = host_layout(host, layout.run_id)
        exported, served = (
            Spot(host=host, transport=saved.places[host.name].transport, path=folder / _name(saved, merged))
            for folder in (there.export, there.served)
        )
        return exported if _is_model(exported) else served

    spots = [spot_of(host) for host in hosts]
    source = next((spot for spot in spots if not _passes(spot, layout.run_id)), spot_of(saved.place.host))
    passing = {spot.host.name: spot for spot in (source, *spots) if _passes(spot, layout.run_id)}
    try:
        if passing:
            if not _is_model(source):
                _export_to_serve(saved, source, layout.run_id, merged=merged, console=console)
            cargo = Cargo(what=f"the model of step {saved.step}", source=source, tree=look(source, console=console))
            bring(cargo, list(passing.values()), shared=shared, scratch=home, console=console)
        yield [ModelPlace(host=spot.host, transport=spot.transport, folder=spot.path) for spot in spots]
    finally:
        in_parallel(_take_away, list(passing.values()))


def _is_model(spot: Spot) -> bool:
    """Folders of models appear whole or not at all."""
    return "config.json" in spot.transport.names(spot.path)


def _passes(spot: Spot, run_id: str) -> bool:
    """Whether what lies there is taken away at the end."""
    return spot.path.parent == host_layout(spot.host, run_id).served


def _export_to_serve(saved: SavedPart, spot: Spot, run_id: str, *, merged: bool, console: Console) -> None:
    complete(saved, run_id, console=console)
    ask_worker(
        spot.host,
        spot.transport,
        _export_words(saved, spot.path, merged=merged),
        on_progress=lambda record: console.progress(f"{spot.host.name}: {record.get('text', '')}"),
    )


def _take_away(spot: Spot) -> None:
    """Delete the model, and what there is of one on its way. A host that does not answer keeps it until next time."""
    served, own = spot.path.parent, spot.path.name
    with contextlib.suppress(GanglineError):
        names = [name for name in spot.transport.names(served) if name.lstrip(".").partition(".")[0] == own]
        run_there(spot.transport, ("rm", "-rf", "--", *(str(served / name) for name in names)))
        run_there(spot.transport, ("rmdir", "--", str(served)))  # another step may be served, too


def export_argv(saved: SavedPart, *, to: Path | None, merged: bool) -> tuple[str, ...]:
    """The worker's words that export a checkpoint; by default into the run directory of its host."""
    return _export_words(saved, _written(saved, to, merged), merged=merged)


def _export_words(saved: SavedPart, target: PurePath, *, merged: bool) -> tuple[str, ...]:
    words = ("export", str(saved.run_folder), "--checkpoint", str(saved.part), "--to", str(target))
    return (*words, "--merged") if merged else words


def export_model(
    saved: SavedPart, layout: RunLayout, *, to: Path | None = None, merged: bool = False, on_text: Callable[[str], None]
) -> dict[str, Any]:
    """Write the model of a checkpoint for transformers and peft, loaded again and compared: the worker's record.

    It ends up on this computer: written by another host, it is fetched. `layout`: this computer's records of the run.
    """
    host, transport = saved.place.host, saved.place.transport
    fetched = host.transport != "local"
    target = exported_folder(saved, layout, to=to, merged=merged)
    if fetched and target.exists():
        raise UsageError(f"{target} exists", seen="expected a new folder", fix="name another one: --to DIR")
    complete(saved, layout.run_id, console=_Ticking(on_text))
    record = ask_worker(
        host,
        transport,
        export_argv(saved, to=None if fetched else to, merged=merged),
        on_progress=lambda record: on_text(str(record.get("text", ""))),
    )
    if fetched:
        on_text(f"fetching {record['folder']} from {host.name}")
        transport.pull(PurePath(record["folder"]), target)
        name_base(target, Job.load(layout.job).model.path)
        record = {**record, "folder": str(target)}
    return record


def exported_folder(saved: SavedPart, layout: RunLayout, *, to: Path | None, merged: bool) -> Path:
    """The folder on this computer that an export of a checkpoint ends in."""
    if saved.place.host.transport != "local":
        return (to or layout.export / _name(saved, merged)).absolute()
    return _written(saved, to, merged)


class _Ticking:
    """The reports of the parts on their way, as one line that changes."""

    def __init__(self, on_text: Callable[[str], None]) -> None:
        self.report = self.progress = on_text


def name_base(folder: Path, base: str) -> None:
    """Write the path of an adapter's base model on this computer: the host that exported it has another one."""
    for name, key in ((ADAPTER_CONFIG, "base_model_name_or_path"), ("gangline.json", "base_model")):
        path = folder / name
        if path.exists() and (said := read_json(path))[key] != base:
            write_json(path, {**said, key: base})


def _name(saved: SavedPart, merged: bool) -> str:
    return f"step-{saved.step}{'-merged' if merged else ''}"


def _written(saved: SavedPart, to: Path | None, merged: bool) -> Path:
    """The folder on the host of the checkpoint; a path of the user is one of this computer."""
    if saved.place.host.transport != "local":
        return saved.run_folder / "export" / _name(saved, merged)
    return (to or saved.run_folder / "export" / _name(saved, merged)).absolute()


def is_model_folder(folder: Path) -> bool:
    """Whether a folder holds a model or an adapter that can be talked with."""
    return any((folder / name).is_file() for name in ("config.json", ADAPTER_CONFIG))


def chat_with_folder(folder: Path, options: Sequence[str], *, home: Path) -> int:
    """Talk in this terminal with the model of a folder; the exit code of the talk."""
    here = trainer_here(home)
    words = here.argv("-m", "gangline.worker", "generate", str(folder.absolute()), *options)
    return interactive(here, (*_with_code(here), *words))


def chat_with_saved(saved: SavedPart, options: Sequence[str]) -> int:
    """Talk in this terminal with the model of a checkpoint; the exit code of the talk."""
    words = ("generate", "--run", str(saved.run_folder), "--checkpoint", str(saved.part), *options)
    host = saved.place.host
    return interactive(host, (*_with_code(host), *host.argv("-m", "gangline.worker", *words)))


def chat_with_endpoint(url: str, options: Sequence[str]) -> int:
    """Talk in this terminal with a model behind an endpoint; the exit code of the talk."""
    host = Host(name="this computer", workdir="", python=sys.executable)
    return interactive(host, our_python("gangline.worker", "talk", url, *options))


def refuse_killed(code: int) -> int:
    """The exit code of a talk. Raises RunFailed for one that the system killed."""
    if code not in {-signal.SIGKILL, 128 + signal.SIGKILL}:
        return code
    raise RunFailed(
        "the talk was killed by the system",
        seen=f"exit code {code}: mostly the memory of its computer was used up",
        fix="end what else runs there; or take a smaller form: gangline export --gguf q8_0 for llama.cpp and Ollama",
    )


def _with_code(host: Host) -> tuple[str, ...]:
    """Words that let the host's Python find gangline, where it is not installed in it."""
    return ("env", *(f"{name}={value}" for name, value in host.code_env.items())) if host.code_env else ()


def _nothing_saved(
    run_id: str, choice: CheckpointChoice, *, committed: list[int], silent: list[str], step: int | None
) -> GanglineError:
    if choice.rejected:
        return rejected_error(run_id, choice)
    if silent:
        return HostUnreachable(
            f"no checkpoint of {run_id} was found on the hosts that answer",
            seen=f"no answer from {', '.join(silent)}",
            fix="bring them back: gangline check says what is wrong",
        )
    return UsageError(
        f"{run_id} has no checkpoint{'' if step is None else f' of step {step}'}",
        seen=f"committed steps: {', '.join(map(str, committed)) or 'none'}",
        fix="name a step that is there" if committed else "wait for the first save, or let the run finish",
    )
