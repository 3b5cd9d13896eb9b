"""A tokenised data set on disk, and the samples in it.

    <root>/data/<hash>/
      tokens.bin          uint16 or uint32   every token, documents one after the other
      learned.bin         uint8              1 where the token is a target; absent: all are (format text)
      row_offsets.bin     int64  rows + 1    a row is tokens[offset : next offset], at most sequence_length long
      row_continues.bin   uint8  rows        1 where the document goes on in the next row (a text that was split)
      sample_rows.bin     int64              the rows of all samples, one sample after the other
      sample_offsets.bin  int64  samples+1   a sample is sample_rows[offset : next offset]
      label_counts.bin    int64  samples     positions with a target
      lengths.bin         int64  samples     tokens
      set.json                               counts, and size, dtype and hash of every file; written last

Little-endian, without headers. A folder with this name is whole: it is written elsewhere and renamed. Samples are in
an order that is random and always the same for as many of them, so that any first few are a fair choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gangline.errors import DataError
from gangline.runs.files import file_digest, read_json

FORMAT_VERSION = 1
NO_TARGET = -100
"""A position without a target (what torch's cross_entropy ignores)."""
MANIFEST = "set.json"

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sample; three arrays of the same length."""

    input_ids: Int64s
    targets: Int64s
    """The token that each position must predict (already shifted), `NO_TARGET` where there is none."""
    position_ids: Int64s
    """From 0 for every row in the sample: the rows cannot see each other."""


class TokenSet:
    """A tokenised data set, memory-mapped: `len(tokens)`, `tokens.sample(i)`, `tokens.label_counts`."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder = folder
        self.manifest = manifest

    @staticmethod
    def open(folder: Path) -> TokenSet:
        """Open a set and check the sizes of its files; raises DataError for one that is missing or damaged."""
        try:
            manifest = read_json(folder / MANIFEST)
            version = manifest["format_version"]
            files = {str(name): int(entry["size"]) for name, entry in manifest["files"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise _damaged(folder, f"{MANIFEST}: {type(error).__name__}: {error}") from error
        if version != FORMAT_VERSION:
            raise _damaged(folder, f"format version {version}, expected {FORMAT_VERSION}")
        for name, size in files.items():
            path = folder / name
            seen = path.stat().st_size if path.exists() else None
            if seen != size:
                raise _damaged(folder, f"{name} has {seen} bytes, expected {size}")
        return TokenSet(folder, manifest)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples."""
        return int(self.manifest["counts"]["tokens"])

    @property
    def num_label_tokens(self) -> int:
        """Positions with a target, in all samples."""
        return int(self.manifest["counts"]["label_tokens"])

    @property
    def sequence_length(self) -> int:
        """Tokens in a sample at the most."""
        return int(self.manifest["sequence_length"])

    @cached_property
    def label_counts(self) -> Int64s:
        """Positions with a target, per sample."""
        return self._array("label_counts.bin")

    @cached_property
    def lengths(self) -> Int64s:
        """Tokens, per sample."""
        return self._array("lengths.bin")

    def sample(self, index: int) -> Sample:
        """Sample `index` (0 to len - 1); raises IndexError beyond."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        start, end = self._sample_offsets[index : index + 2]
        rows = [self._row(int(row)) for row in self._sample_rows[start:end]]
        ids, targets = zip(*rows, strict=True)
        return Sample(
            input_ids=np.concatenate(ids),
            targets=np.concatenate(targets),
            position_ids=np.concatenate([np.arange(len(row), dtype=np.int64) for row in ids]),
        )

    def _row(self, row: int) -> tuple[Int64s, Int64s]:
        start, end = (int(offset) for offset in self._row_offsets[row : row + 2])
        # the first token of the rest of a split text is the last target of this row: no label is lost
        last = end + int(self._row_continues[row])
        ids = self._tokens[start:last].astype(np.int64)
        targets = np.full(end - start, NO_TARGET, dtype=np.int64)
        targets[: last - start - 1] = ids[1:]
        if self._learned is not None:
            targets[: last - start - 1][self._learned[start + 1 : last] == 0] = NO_TARGET
        return ids[: end - start], targets

    @cached_property
    def _tokens(self) -> npt.NDArray[Any]:
        return self._array("tokens.bin")

    @cached_property
    def _learned(self) -> npt.NDArray[np.uint8] | None:
        return self._array("learned.bin") if "learned.bin" in self.manifest["files"] else None

    @cached_property
    def _row_offsets(self) -> Int64s:
        return self._array("row_offsets.bin")

    @cached_property
    def _row_continues(self) -> npt.NDArray[np.uint8]:
        return self._array("row_continues.bin")

    @cached_property
    def _sample_rows(self) -> Int64s:
        return self._array("sample_rows.bin")

    @cached_property
    def _sample_offsets(self) -> Int64s:
        return self._array("sample_offsets.bin")

    def _array(self, name: str) -> npt.NDArray[Any]:
        # a plain view: every slice of a np.memmap costs ten times as much
        return np.memmap(self.folder / name, dtype=self.manifest["files"][name]["dtype"], mode="r").view(np.ndarray)


def verify(folder: Path) -> TokenSet:
    """Open a set and check the hash of every file; raises DataError for the first that differs."""
    tokens = TokenSet.open(folder)
    for name, entry in tokens.manifest["files"].items():
        seen = file_digest(folder / name)
        if seen != entry["blake2b"]:
            raise _damaged(folder, f"{name} has the hash {seen[:16]}, expected {entry['blake2b'][:16]}")
    return tokens


def _damaged(folder: Path, seen: str) -> DataError:
    return DataError(
        f"{folder}: not a whole token set", seen=seen, fix="remove this folder; it is made again from the data files"
    )
