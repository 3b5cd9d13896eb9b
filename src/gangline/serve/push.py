"""An exported folder onto the Hugging Face hub: refused early, shown first, then sent by a worker of this computer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gangline.errors import UsageError
from gangline.provision.ask import ask_worker
from gangline.provision.code import trainer_here
from gangline.provision.hub import OFF, is_on
from gangline.runs.files import read_json
from gangline.runs.hub_names import is_hub_name
from gangline.runs.layout import ADAPTER_CONFIG, EXPORT_NOTE
from gangline.transport.local import LocalTransport


def refuse_push(name: str, variables: Mapping[str, str]) -> None:
    """Raise UsageError for a name that is none, and where the hub is switched off."""
    if "/" not in name or not is_hub_name(name):
        raise UsageError(
            f"--push {name}: this is no name of a repository",
            seen="expected owner/name: letters, digits, - _ and . , at most 96 characters",
            fix="--push YOU/tea-adapter, with your name on the hub",
        )
    if off := next((f"{key}={variables[key]}" for key in OFF if is_on(variables.get(key, ""))), ""):
        raise UsageError(
            f"--push {name}: the hub is switched off", seen=off, fix=f"unset {off.partition('=')[0]} for this command"
        )


def refuse_local_base(base: str, *, is_adapter: bool) -> None:
    """Raise UsageError for an adapter whose base model nobody else could load."""
    if is_adapter and not is_hub_name(base):
        raise UsageError(
            "--push: the adapter names a base model that nobody else has",
            seen=f"its base is {base}, a folder of this computer; expected a model of the hub",
            fix="send the whole model: gangline export RUN --merged --push owner/name",
        )


def note_of(folder: Path) -> dict[str, Any]:
    """What an export says of itself. Raises UsageError for another folder."""
    if not (folder / EXPORT_NOTE).is_file():
        raise UsageError(
            f"--push: {folder} is no export of gangline",
            seen=f"expected {EXPORT_NOTE} in it, which says what was trained on what",
            fix="name a run, or a folder that gangline export wrote",
        )
    if linked := next((path for path in sorted(folder.rglob("*")) if path.is_symlink()), None):
        raise UsageError(f"--push: {linked} is a link", seen="an export has none", fix="remove it, or export again")
    return dict(read_json(folder / EXPORT_NOTE))


def is_adapter_folder(folder: Path) -> bool:
    """Whether the folder holds an adapter, which lies over a base model."""
    return (folder / ADAPTER_CONFIG).is_file()


def files_of(folder: Path) -> list[tuple[str, int]]:
    """What would be sent: names and bytes."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return [(path.relative_to(folder).as_posix(), path.stat().st_size) for path in paths]


def look_at_hub(name: str, base: str, *, home: Path) -> dict[str, Any]:
    """Who we are on the hub, what the repository holds, and the base model's license and terms: the worker's record.

    Raises UsageError where the token is missing, wrong, or may not write there; HostUnreachable.
    """
    words = ["publish", "--look", "--to", name, *(["--base", base] if is_hub_name(base) else [])]
    return _ask(words, home=home, on_text=lambda _text: None)


def others_in(seen: Mapping[str, Any], run: str, *, merged: bool) -> list[str]:
    """Files in the repository that are of no earlier push of the same run in the same form."""
    return [] if (seen["run"], seen["merged"]) == (run, merged) else list(seen["files"])


def refuse_public(name: str, seen: Mapping[str, Any], *, private: bool) -> None:
    """Raise UsageError where a private repository is asked for, and there is a public one."""
    if private and seen["exists"] and not seen["private"]:
        raise UsageError(
            f"--private: {name} is there and public",
            seen="gangline makes new repositories private, and changes none",
            fix="change it in its settings on the hub, or name a new one",
        )


def send_folder(
    folder: Path, name: str, *, private: bool, license_name: str, home: Path, on_text: Callable[[str], None]
) -> dict[str, Any]:
    """Send a folder: the worker's record. What an earlier call has sent is not sent again."""
    words = ["publish", str(folder.absolute()), "--to", name]
    words += [*(["--private"] if private else []), *([f"--license={license_name}"] if license_name else [])]
    return _ask(words, home=home, on_text=on_text)


def _ask(words: Sequence[str], *, home: Path, on_text: Callable[[str], None]) -> dict[str, Any]:
    here = trainer_here(home)
    return ask_worker(
        here, LocalTransport(here), words, on_progress=lambda record: on_text(str(record.get("text", "")))
    )
