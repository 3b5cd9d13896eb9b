"""A model folder without loading the model: its limits, its tokenizer files, its fingerprint; and data sets of the hub.

Only the hub may need a network. Hashes of files are remembered by path, size and time of change, so that a second start
need not read the files again.
"""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from gangline.errors import DataError, ModelError, error_summary
from gangline.row_files import SourceRow
from gangline.runs.files import file_digest, read_json, write_json
from gangline.runs.job import ModelJob, SourceJob
from gangline.worker.data.rows import without_nulls

TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model", "*.tiktoken",
    "chat_template*", "additional_chat_templates/*", "tekken.json", "spiece*", "sentencepiece*",
)  # fmt: skip
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model*.bin.index.json")
WEIGHTS_INDEX, ONE_WEIGHTS_FILE = "model.safetensors.index.json", "model.safetensors"
POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A model on disk: a folder of the user's, or the hub's cache."""

    name: str
    path: Path
    commit: str | None
    """The hub's commit; None for a folder."""
    config: dict[str, Any]

    @property
    def vocab_size(self) -> int | None:
        """Token ids are below this; None if config.json does not say."""
        return self._limit(("vocab_size",))

    @property
    def max_positions(self) -> int | None:
        """Tokens in a sequence at the most; None if config.json does not say."""
        return self._limit(POSITION_KEYS)

    def tokenizer_digest(self, cache: DigestCache) -> str:
        """One hash of everything that decides how words become tokens."""
        files = {path for pattern in TOKENIZER_FILES for path in self.path.glob(pattern) if path.is_file()}
        digests = {path.relative_to(self.path).as_posix(): cache.digest(path) for path in sorted(files)}
        return combine({"files": digests, "model_type": self.config.get("model_type")})

    def fingerprint(self, cache: DigestCache, *, weights: bool) -> str:
        """One hash of config.json and all weight files, or the hub's commit.

        weights: the weights count (they do not for a model that starts from random ones); raises ModelError without.
        """
        if self.commit:
            return self.commit
        files = weight_files(self.path) if weights else []
        return combine({path.name: cache.digest(path) for path in [self.path / "config.json", *files]})

    def _limit(self, keys: tuple[str, ...]) -> int | None:
        nested = self.config.get("text_config")
        for config in (self.config, nested if isinstance(nested, dict) else {}):
            for key in keys:
                if isinstance(config.get(key), int):
                    return int(config[key])
        return None


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a folder; raises ModelError where there are none."""
    files = sorted({path for pattern in WEIGHT_FILES for path in folder.glob(pattern)})
    if files:
        return files
    raise ModelError(
        f"model.path: {folder} has no weights",
        seen=f"expected model.safetensors (or an index of parts, or pytorch_model.bin); it holds {_names(folder)}",
        fix="copy the weights there, or set model.start: random to train from fresh ones",
    )


def open_model_folder(model: ModelJob) -> ModelFolder:
    """Find the model and read its config.json; raises ModelError."""
    path, commit = Path(model.path), None
    if not path.is_dir():
        if path.is_absolute() or model.path.startswith(("./", "../", "~")):
            raise ModelError(
                f"model.path: {model.path}: no such folder",
                seen="expected a folder with config.json, or the name of a model on the hub",
                fix="check the path; it is read on the head of the cluster",
            )
        path = _download(model, ["config.json", *TOKENIZER_FILES])
        commit = path.name
    return ModelFolder(name=model.path, path=path, commit=commit, config=_read_config(path))


def weights_folder(model: ModelJob) -> Path:
    """Where the weights lie as safetensors, if they come so: the user's folder, or the hub's cache, once brought.

    Of the hub no file is loaded but those that its index names, for the same weights may lie there in other forms, too.
    Raises ModelError.
    """
    if Path(model.path).is_dir():
        return Path(model.path)
    folder = _download(model, ["config.json", WEIGHTS_INDEX])
    pinned = replace(model, revision=folder.name)  # the commit
    if not (folder / WEIGHTS_INDEX).is_file():
        return _download(pinned, [ONE_WEIGHTS_FILE])
    with suppress(ValueError, KeyError, AttributeError):  # whoever reads it says what is wrong with it
        index = json.loads((folder / WEIGHTS_INDEX).read_text(encoding="utf-8"))
        return _download(pinned, sorted(set(index["weight_map"].values())))
    return folder


def check_sequence_length(folder: ModelFolder, sequence_length: int) -> None:
    """Raise DataError if samples would be longer than the model can read."""
    limit = folder.max_positions
    if limit is not None and sequence_length > limit:
        raise DataError(
            f"data.sequence_length: {sequence_length} is more than the model reads",
            seen=f"{folder.path / 'config.json'} allows {limit} positions",
            fix=f"set data.sequence_length to {limit} or less",
        )


def _download(model: ModelJob, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model.path, revision=model.revision, allow_patterns=patterns))
    except Exception as error:  # as in `_reachable`: the errors of the HTTP client change with its versions
        raise ModelError(
            f"model.path: {model.path} is neither a folder nor a model that the hub gives",
            seen=f"on {platform.node()}: {error_summary(error)}",
            fix="check the name and the network (HF_TOKEN for a gated model), or name a folder that holds the model",
        ) from error


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"model.path: {path} has no config.json that can be read",
            seen=f"{type(error).__name__}: {error}; the folder holds {_names(path)}",
            fix="name the folder that save_pretrained wrote, or one downloaded from the hub",
        ) from error
    if not isinstance(config, dict):
        raise ModelError(
            f"model.path: {path / 'config.json'} is not a configuration",
            seen=f"expected a JSON object; it is a {type(config).__name__}",
            fix="copy the model folder again",
        )
    return config


def _names(path: Path) -> str:
    return ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "nothing"


class Hub(Protocol):
    """What is asked of the hub; tests give a fake."""

    def revision(self, source: SourceJob) -> str:
        """The commit that `source` means now; raises DataError."""
        ...

    def rows(self, source: SourceJob, commit: str) -> Iterator[SourceRow]:
        """The rows, streamed; raises DataError."""
        ...


class HuggingFace:
    """The real hub, by huggingface_hub and datasets."""

    def revision(self, source: SourceJob) -> str:
        """The commit that `source` means now; raises DataError when it cannot be had."""
        with _reachable(source):
            from huggingface_hub import HfApi

            return str(HfApi().dataset_info(str(source.hub), revision=source.revision).sha)

    def rows(self, source: SourceJob, commit: str) -> Iterator[SourceRow]:
        """The rows of one split, streamed; raises DataError."""
        with _reachable(source):
            from datasets import load_dataset

            table: Any = load_dataset(
                str(source.hub), source.hub_config, split=source.split, revision=commit, streaming=True
            )
            for number, values in enumerate(table, start=1):
                yield SourceRow(f"{source.hub}/{source.split}", number, without_nulls(values), unit="row")


@contextmanager
def _reachable(source: SourceJob) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the hub's HTTP client, and so its errors, changed with its versions: httpx, httpx2
        raise DataError(
            f"hub data set {source.hub} (split {source.split}): cannot be read",
            seen=f"on {platform.node()}: {error_summary(error)}",
            fix="check the name, the split and the network (HF_TOKEN for a gated one), "
            "or download it and name its files in data.train",
        ) from error


# A file that changed this recently may change again without a new time of change.
_SETTLED_NS = 2_000_000_000


class DigestCache:
    """The remembered hashes of one root, in `<root>/data/digests.json`. `beat` is called before every file."""

    def __init__(self, path: Path, *, beat: Callable[[], None] = lambda: None) -> None:
        self._path = path
        self._beat = beat
        self._entries = _read(path)
        self._changed = False

    def digest(self, path: Path) -> str:
        """blake2b-256 of a file's content in hexadecimal; raises OSError."""
        status = path.stat()
        stamp = [status.st_size, status.st_mtime_ns]
        known = self._entries.get(str(path))
        if known and known[:2] == stamp:
            return str(known[2])
        self._beat()
        found = file_digest(path)
        if time.time_ns() - status.st_mtime_ns > _SETTLED_NS:
            self._entries[str(path)] = [*stamp, found]
            self._changed = True
        return found

    def save(self) -> None:
        """Write what was learned; the entries of files that are gone go with them."""
        if not self._changed:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        entries = {**_read(self._path), **self._entries}
        write_json(self._path, {path: entry for path, entry in entries.items() if Path(path).exists()})
        self._changed = False


def combine(value: Any) -> str:
    """One hash (blake2b-128, hexadecimal) of plain data, whatever the order of its keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _read(path: Path) -> dict[str, list[Any]]:
    try:
        entries = read_json(path)
    except (OSError, ValueError):
        return {}
    return {str(name): entry for name, entry in entries.items() if isinstance(entry, list) and len(entry) == 3}
