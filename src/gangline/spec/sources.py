"""`data.train` and `data.eval`: from the user's words to files and hub data sets."""

from __future__ import annotations

import re
from pathlib import Path

from gangline.runs.job import SourceJob
from gangline.spec.job_words import EvaluationSourceWords, JobWords, SourceWords
from gangline.spec.mistakes import KeyPath, quote
from gangline.spec.paths import absolute, find_files, what_is_there, what_was_meant
from gangline.spec.validate import Checked

HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")
REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")
_HUB = "hub:"
_HUB_SHORT = re.compile(
    r"hub:(?P<hub>[^/@#\s]+(/[^/@#\s]+)?)(/(?P<config>[^/@#\s]+))?(@(?P<revision>[^@#\s]+))?(#(?P<split>[^@#\s]+))?"
)


def resolve_source(checked: Checked[JobWords], key: KeyPath, source: SourceWords, *, folder: Path) -> SourceJob | None:
    """Files found, or the hub data set taken apart; None, with mistakes recorded, where that cannot be done."""
    if source.files is None and source.hub is None:
        checked.report(
            key,
            seen="neither files nor a hub data set",
            expected="one of the two",
            fix=f"write, for example, `{key[-1]}: rows.jsonl` or `{key[-1]}: hub:owner/name`",
        )
        return None
    if source.files is not None and source.hub is not None:
        checked.report(
            (*key, "hub"), seen="files and a hub data set", expected="one of the two", fix="delete one of the keys"
        )
        return None
    files = source.files or []
    if len(files) == 1 and files[0].startswith(_HUB):
        short = _taken_apart(checked, key, files[0])
        return _hub(checked, key, short) if short else None
    return _hub(checked, key, source) if source.hub else _files(checked, key, source, folder=folder)


def _taken_apart(checked: Checked[JobWords], key: KeyPath, text: str) -> SourceWords | None:
    match = _HUB_SHORT.fullmatch(text)
    if match:
        return SourceWords.model_validate(match.groupdict())
    checked.report(
        (*key, "files"),
        seen=quote(text),
        expected="hub:owner/name[/config][@revision][#split]",
        fix="write, for example, hub:openai/gsm8k/main@v1#train",
    )
    return None


def _hub(checked: Checked[JobWords], key: KeyPath, source: SourceWords) -> SourceJob | None:
    name = source.hub or ""
    words = {"hub": name, "config": source.config, "split": source.split, "revision": source.revision}
    good = True
    for part, value in words.items():
        pattern = HUB_NAME if part == "hub" else REVISION
        if value is not None and not pattern.fullmatch(value):
            good = False
            checked.report(
                (*key, part),
                seen=quote(value),
                expected="letters, digits, `.`, `_` and `-`, beginning with a letter or a digit",
                fix="copy the name from the data set's page on the hub",
            )
    if key[-1] == "eval" and source.split is None:
        good = False
        checked.report(
            key,
            seen="a hub data set without its split",
            expected="the split to evaluate on, so that it is not the one that is trained on",
            fix="add the split, such as `hub:owner/name#test` or `split: test`",
        )
    if not good:
        return None
    return SourceJob(
        hub=name, hub_config=source.config, split=source.split or "train", revision=source.revision, files=()
    )


def _files(checked: Checked[JobWords], key: KeyPath, source: SourceWords, *, folder: Path) -> SourceJob | None:
    good = _refuse_hub_keys(checked, key, source)
    found: list[str] = []
    for index, text in enumerate(source.files or ()):
        place = checked.document.located((*key, "files", index))
        base = Path.cwd() if checked.document.from_command_line(place) else folder
        files = find_files(text, base) if not text.startswith(_HUB) else []
        found += map(str, files)
        if files:
            continue
        path = absolute(text, base)
        if not (checked.needs_data or text.startswith(_HUB) or path.exists()):
            found.append(str(path))
            continue
        good = False
        if text.startswith(_HUB):
            seen, fix = "a hub data set among files", "give a hub data set alone, or files alone"
        else:
            seen, fix = what_is_there(text, base), what_was_meant(text, base)
        checked.report(place, seen=seen, expected="files to read", fix=fix)
    return SourceJob(files=tuple(dict.fromkeys(found))) if good else None


def _refuse_hub_keys(checked: Checked[JobWords], key: KeyPath, source: SourceWords) -> bool:
    good = True
    for part in ("config", "split", "revision"):
        if getattr(source, part) is not None:
            good = False
            checked.report(
                (*key, part), seen="a key for a hub data set beside files", expected="files alone", fix="delete it"
            )
    return good


def resolve_evaluation(
    checked: Checked[JobWords], source: EvaluationSourceWords | None, *, folder: Path
) -> tuple[SourceJob | None, float]:
    """The evaluation rows: a source of their own, or a fraction of the training rows."""
    key: KeyPath = ("data", "eval")
    if source is None:
        return None, 0.0
    if source.fraction is None:
        return resolve_source(checked, key, source, folder=folder), 0.0
    if source.files or source.hub:
        checked.report(
            (*key, "fraction"), seen="a fraction and a source", expected="one of the two", fix="delete one of the keys"
        )
    return None, source.fraction
