"""`gangline convert FILE`: a configuration of another tool becomes job.yaml or cluster.yaml.

recognise  which tool reads this file        config.foreign
gather     the files that it names           DeepSpeed's JSON, dataset_info.json, chat templates
ask        the world size that it meant
judge      one verdict for every key         draft.draft, by the table of the tool
fit        what job.yaml has words for       draft.fit
write      the file, where nothing is refused
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from gangline.config.document import looks_like_hostfile, read_value
from gangline.config.foreign import ForeignKind, kind_of, kind_of_text
from gangline.config.load import job_mistakes, read_text, read_values
from gangline.config.mistakes import Mistake, quote
from gangline.convert.axolotl import AXOLOTL_TOOL
from gangline.convert.draft import Draft, KeyVerdict, draft, fit
from gangline.convert.hugging_face import TRAINER_TOOL, TRL_TOOL
from gangline.convert.job_text import counts_line, job_text, report_json
from gangline.convert.llama_factory import LLAMA_FACTORY_TOOL
from gangline.convert.outcomes import Foreign, Tool, flatten, refused
from gangline.convert.strategy_files import ACCELERATE_TOOL, DEEPSPEED_TOOL
from gangline.convert.torchtune import TORCHTUNE_TOOL
from gangline.errors import SpecError, UsageError
from gangline.runs.files import write_atomic

TOOLS: Mapping[str, Tool] = {
    tool.name: tool
    for tool in (
        AXOLOTL_TOOL,
        LLAMA_FACTORY_TOOL,
        TRL_TOOL,
        TRAINER_TOOL,
        TORCHTUNE_TOOL,
        DEEPSPEED_TOOL,
        ACCELERATE_TOOL,
    )
}
"""Every tool whose jobs can be converted, by the name that `config.foreign` gives it."""
TEMPLATE_FOLDERS = ("", "src/axolotl/utils/chat_templates/templates", "axolotl/utils/chat_templates/templates")
"""Below a folder: where the text of a template may lie."""


class MoveConsole(Protocol):
    """What converting needs of a terminal."""

    def ask(self, question: str) -> str | None:
        """The answer of the user; None without a terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveQuestion:
    """What the user asked for."""

    files: tuple[Path, ...]
    """The file of the trainer first; DeepSpeed's or accelerate's may come beside it."""
    overrides: tuple[str, ...] = ()
    output: Path = Path("job.yaml")
    world_size: int | None = None
    templates: Path | None = None
    """The text of the chat template, or a folder with templates by name."""
    leave_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """A converted job, written or not."""

    tool: str
    made: Draft
    text: str
    files: Mapping[Path, str]
    """Files beside it: a chat template."""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "tool": self.tool,
            "world_size": self.made.foreign.world_size,
            "refused": len(self.made.refused),
            "keys": report_json(self.made),
            "job": self.text,
        }


def recognise(path: Path) -> ForeignKind:
    """The kind of a foreign file. Raises SpecError for one that is unknown, or ours."""
    text = read_text(path, kind="foreign")
    if looks_like_hostfile(text, named_yaml=True):
        raise SpecError(
            str(path),
            seen="a hostfile, which needs no conversion",
            fix=f"gangline init --hostfile {path}",
        )
    kind = kind_of_text(text) or kind_of(read_values(path, kind="foreign"))
    if kind is None:
        raise SpecError(
            str(path),
            seen="its keys are those of no tool that is known here",
            fix=f"gangline convert reads files of {', '.join(TOOLS)}, and hosts of Ray, SkyPilot, Ansible, ssh",
        )
    return kind


def move_job(asked: MoveQuestion, *, console: MoveConsole) -> Moved:
    """Convert the file of a trainer and what belongs to it. Writes nothing.

    Raises SpecError for files that cannot be read, UsageError where the world size is not known.
    """
    path = asked.files[0]
    kind = recognise(path)
    tool = TOOLS.get(kind.tool)
    if tool is None:
        raise SpecError(
            str(path), seen=f"a file of {kind.tool}", fix=f"no table of its keys is here; write {asked.output} by hand"
        )
    foreign = _gather(tool, asked)
    foreign = replace(foreign, world_size=_world_size(tool, foreign, asked, console))
    files, foreign = _with_template(tool, foreign, asked)
    given = [word.partition("=")[0] for word in asked.overrides]
    made = draft(tool, foreign, leave_out=asked.leave_out, given=given)
    made = fit(_overridden(made, asked.overrides), lambda job: _check(job, asked.output.name, files))
    made = _whole(made, asked)
    head = (f"Converted by `gangline convert` from {path.name}, a file of {tool.name}:", f"{counts_line(made)}.")
    return Moved(tool=tool.name, made=made, text=job_text(made.job, head=head), files=files)


def _check(job: Mapping[str, Any], name: str, files: Mapping[Path, str]) -> Sequence[Mistake]:
    """What the loader says of a job beside its files, in a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        for path, text in files.items():
            Path(folder, path.name).write_text(text, encoding="utf-8")
        return job_mistakes(job_text(job, head=()), Path(folder, name))


# The files that belong together.


def _gather(tool: Tool, asked: MoveQuestion) -> Foreign:
    path = asked.files[0]
    values = read_values(path, kind="foreign")
    for part in tool.parts:
        named = values.get(part)
        if isinstance(named, str) and (found := _beside(named, path)) is not None:
            values[part] = read_values(found, kind=part)
    for other in asked.files[1:]:
        _add_part(values, other, tool)
    flat = dict(flatten(values))
    folder = path.absolute().parent
    return Foreign(
        values=flat,
        folder_has=lambda name: (folder / name).exists(),
        data_sets=_data_sets(str(values.get("dataset_dir", "data")), path),
    )


def _add_part(values: dict[str, Any], path: Path, tool: Tool) -> None:
    kind = recognise(path)
    if kind.tool == "DeepSpeed" and "deepspeed" in tool.parts:
        values["deepspeed"] = read_values(path, kind="DeepSpeed")
    elif kind.tool == "accelerate" and tool.name != "accelerate":
        values["accelerate"] = read_values(path, kind="accelerate")
    else:
        raise UsageError(
            f"{path} is a file of {kind.tool}",
            seen=f"beside a file of {tool.name}, only DeepSpeed's or accelerate's says something",
            fix=f"gangline convert {path}",
        )


def _beside(name: str, path: Path) -> Path | None:
    """A file that another names: from the current folder, from the file's own, or from one above it."""
    folders = (Path.cwd(), *path.absolute().parents)
    return next((folder / name for folder in folders if name and (folder / name).is_file()), None)


def _data_sets(folder: str, path: Path) -> Mapping[str, Any]:
    found = _beside(f"{folder}/dataset_info.json", path)
    return read_values(found, kind="dataset_info.json") if found else {}


def _with_template(tool: Tool, foreign: Foreign, asked: MoveQuestion) -> tuple[dict[Path, str], Foreign]:
    """The text of the chat template that the rows go through, as a file beside the job."""
    name = tool.template(foreign)
    if name is None:
        return {}, foreign
    text = _template_text(name, asked) or tool.template_text(name)
    if text is None:
        return {}, foreign
    file = asked.output.with_name(f"{asked.output.stem}.{name}.jinja")
    return {file: text}, replace(foreign, template=f"./{file.name}")


def _template_text(name: str, asked: MoveQuestion) -> str | None:
    given = asked.templates
    if given is not None and given.is_file():
        return read_text(given, kind="chat template")
    spec = importlib.util.find_spec("axolotl")
    installed = [Path(place).parent for place in (spec.submodule_search_locations or ()) if spec] if spec else []
    folders = [*([given] if given else []), *asked.files[0].absolute().parents, *installed]
    places = (folder / below / f"{name}.jinja" for folder in folders for below in TEMPLATE_FOLDERS)
    found = next((place for place in places if place.is_file()), None)
    return read_text(found, kind="chat template") if found else None


# The world size.


def _world_size(tool: Tool, foreign: Foreign, asked: MoveQuestion, console: MoveConsole) -> int:
    """Given, in the file, or asked: the batch is that of so many processes."""
    if asked.world_size is not None:
        return asked.world_size
    said = tool.world_size(foreign) or ACCELERATE_TOOL.world_size(foreign.below("accelerate"))
    if said is not None:
        return said
    answer = console.ask("How many GPUs (processes) did this file run on, over all machines?")
    if answer is not None and answer.isascii() and answer.isdigit() and int(answer) > 0:
        return int(answer)
    raise UsageError(
        f"{asked.files[0]} does not say on how many GPUs it ran",
        seen="its batch is that of one process times their number" if answer is None else f"the answer {quote(answer)}",
        fix="add --world-size N: the number of GPUs over all machines; the batch of the job then stays the same",
    )


# What the command line adds, and what the file left open.


def _overridden(made: Draft, overrides: Sequence[str]) -> Draft:
    for word in overrides:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise UsageError(
                f"{quote(word)} is no override", seen="expected key=value", fix="write, for example, batch=32"
            )
        value = read_value(text, f"command line: {word}")
        gone = {job for job in made.job if job == key or job.startswith(f"{key}.") or key.startswith(f"{job}.")}
        for job in gone:
            del made.job[job]
        made.verdicts = [_overruled(each, gone, word) for each in made.verdicts]
        made.job[key] = value
        made.writers[key] = "the command line"
    return made


def _overruled(each: KeyVerdict, gone: Collection[str], word: str) -> KeyVerdict:
    """What is left of a key of the file where the command line says something else."""
    job = {key: value for key, value in each.outcome.job.items() if key not in gone}
    if len(job) == len(each.outcome.job):
        return each
    verdict, reason = (each.verdict if job else "dropped"), f"the command line says {word}"
    return replace(each, outcome=replace(each.outcome, verdict=verdict, job=job, reason=reason))


_REQUIRED = {
    "model.path": ("the model", "model=./llama"),
    "data.train": ("the rows", "data.train=rows.jsonl"),
    "batch": ("the samples of a step", "batch=32"),
}


def _whole(made: Draft, asked: MoveQuestion) -> Draft:
    """A job needs a model, rows and a batch; a file that says nothing of them, nor refuses to, is only a part."""
    if made.refused:
        return made
    for key, (what, word) in _REQUIRED.items():
        if not any(job == key or job.startswith(f"{key}.") or key.startswith(f"{job}.") for job in made.job):
            made.record(key, None, refused(f"not in {asked.files[0].name}; give {what}: `{word}`", settled_by=(key,)))
    return made


def require_whole(moved: Moved, asked: MoveQuestion) -> None:
    """Raise UsageError where a key that changes numbers has no counterpart."""
    names = [each.key for each in moved.made.refused]
    absent = [_REQUIRED[each.key] for each in moved.made.refused if each.key in _REQUIRED and each.value is None]
    if absent and len(absent) == len(names):
        raise UsageError(
            f"{asked.files[0]} is a part of a job: it lacks {', '.join(what for what, _ in absent)}",
            seen="every key that it has was converted; nothing was written",
            fix=f"add to the command: {' '.join(word for _, word in absent)}",
        )
    if names:
        raise UsageError(
            f"{asked.files[0]} was not converted: {len(names)} of its keys change numbers and have no counterpart",
            seen=", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else ""),
            fix=f"say it in a key of the job ({_settling(moved.made.refused[0])}), "
            f"or give one up: --leave-out {names[0]}",
        )


def _settling(each: KeyVerdict) -> str:
    return f"{each.outcome.settled_by[0]}=VALUE" if each.outcome.settled_by else "KEY=VALUE"


def write(moved: Moved, asked: MoveQuestion, *, force: bool) -> None:
    """Write the job and the files beside it. Raises UsageError where a key is refused, or a file is there already."""
    require_whole(moved, asked)
    there = [path for path in (asked.output, *moved.files) if path.exists()]
    if there and not force:
        raise UsageError(
            f"{there[0]} is there already", seen="nothing was written", fix="choose another --output, or add --force"
        )
    for path, text in {**moved.files, asked.output: moved.text}.items():
        write_atomic(path, text.encode())
