"""What happens in the process of test_gguf: tokenizers are looked at, templates are written in Ollama's language."""

import contextlib
import json
import os
from pathlib import Path

from transformers import AutoTokenizer

from gangline.errors import GanglineError
from gangline.worker.gguf import PATTERNS, new_folder, ollama_template, pre_tokenizer, stop_line, write_modelfile
from tests.train.tiny import write_tokenizer


def names(folder):
    """What each known pattern is called, and the error of each that is changed by a letter."""
    found, errors = [], []
    for pattern, whole in PATTERNS:
        level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": pattern == "ByteLevel"}
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        steps = level if pattern == "ByteLevel" else {"type": "Sequence", "pretokenizers": [split, level]}
        found.append(pre_tokenizer({"pre_tokenizer": steps, "model": {"ignore_merges": whole}}))
        errors.append(error_of({"pre_tokenizer": steps, "model": {"ignore_merges": not whole}}))
        changed = {**split, "pattern": {"Regex": f"{pattern}x"}}
        errors.append(error_of({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [changed, level]}}))
    errors.append(error_of({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}}))
    errors.append(error_of({"pre_tokenizer": None}))
    return {"found": found, "known": list(PATTERNS.values()), "errors": errors}


def error_of(description):
    try:
        return f"none, but {pre_tokenizer(description)}"
    except GanglineError as error:
        return error.what


def template(folder, *, text):
    write_tokenizer(Path(folder), chat_template=text)
    try:
        return ollama_template(AutoTokenizer.from_pretrained(folder))
    except GanglineError as error:
        return {"what": error.what, "seen": error.seen}


def modelfile(folder, *, text):
    write_tokenizer(Path(folder), chat_template=text)
    write_modelfile(Path(folder), Path(folder), "model-f16.gguf")
    return (Path(folder) / "Modelfile").read_text(encoding="utf-8")


def of_tokenizers(folder):
    """The name for a tokenizer that the library tokenizers wrote."""
    write_tokenizer(Path(folder))
    return pre_tokenizer(json.loads((Path(folder) / "tokenizer.json").read_text(encoding="utf-8")))


def stops(folder, *, words):
    """The line of each stop word, or why it has none."""
    said = []
    for word in words:
        try:
            said.append(stop_line(word))
        except GanglineError as error:
            said.append(f"{error.what}: {error.seen}")
    return said


def new_folders(folder):
    """What lies in `folder` while a new folder is written, after a failure, and after it went well."""
    to, seen = Path(folder) / "out", []

    def there():
        return sorted(each.name.replace(str(os.getpid()), "PID") for each in Path(folder).iterdir())

    for error in (KeyError, None):
        with contextlib.suppress(KeyError), new_folder(to) as fresh:
            (fresh / "part").write_text("half")
            seen.append(there())
            if error:
                raise error
        seen.append(there())
    try:
        with new_folder(to):
            seen.append("entered")
    except GanglineError as error:
        seen.append(error.what)
    return seen, [each.name for each in to.iterdir()]
