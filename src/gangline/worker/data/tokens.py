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

Counts: samples; rows (a text that was split is several); tokens; label_tokens (positions with a target); and of the
source: source_rows, skipped_rows, truncated_rows, dropped_rows.

Little-endian, without headers. A folder with this name is whole: it is written elsewhere and renamed. Samples are in
an order that is random and always the same for as many of them, so that any first few are a fair choice.

A set is written as its tokens come, in a temporary folder. In memory stay 17 bytes per row (offset, label count,
flag), and about 60 while rows are packed (measured: benchmarks/tokenise_rows.py).

Rows are packed into samples by best fit decreasing on their lengths alone, so the result is fixed with the content of
the set. Johnson (1973) shows that best fit decreasing needs at most 11/9 of the fewest bins plus a constant; on text it
fills samples to more than 99 %.
"""

from __future__ import annotations

import os
import shutil
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from gangline.errors import DataError
from gangline.runs.files import file_digest, read_json, sync_folder, write_json

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
        # plain views: every slice of a np.memmap costs ten times as much
        self._arrays = {
            name.removesuffix(".bin"): np.memmap(folder / name, dtype=entry["dtype"], mode="r").view(np.ndarray)
            for name, entry in manifest["files"].items()
        }

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

    @property
    def label_counts(self) -> Int64s:
        """Positions with a target, per sample."""
        return self._arrays["label_counts"]

    @property
    def lengths(self) -> Int64s:
        """Tokens, per sample."""
        return self._arrays["lengths"]

    def sample(self, index: int) -> Sample:
        """Sample `index` (0 to len - 1); raises IndexError beyond."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        start, end = self._arrays["sample_offsets"][index : index + 2]
        rows = [self._row(int(row)) for row in self._arrays["sample_rows"][start:end]]
        ids, targets = zip(*rows, strict=True)
        return Sample(
            input_ids=np.concatenate(ids),
            targets=np.concatenate(targets),
            position_ids=np.concatenate([np.arange(len(row), dtype=np.int64) for row in ids]),
        )

    def _row(self, row: int) -> tuple[Int64s, Int64s]:
        start, end = (int(offset) for offset in self._arrays["row_offsets"][row : row + 2])
        # the first token of the rest of a split text is the last target of this row: no label is lost
        last = end + int(self._arrays["row_continues"][row])
        ids = self._arrays["tokens"][start:last].astype(np.int64)
        targets = np.full(end - start, NO_TARGET, dtype=np.int64)
        targets[: last - start - 1] = ids[1:]
        if (learned := self._arrays.get("learned")) is not None:
            targets[: last - start - 1][learned[start + 1 : last] == 0] = NO_TARGET
        return ids[: end - start], targets


class RepeatedSamples:
    """A set without files, for measurements: `num_samples` samples of one length, a few of which repeat."""

    def __init__(self, samples: Sequence[Sample], num_samples: int) -> None:
        self._samples = samples
        self.lengths: Int64s = np.full(num_samples, len(samples[0].input_ids))
        self.label_counts: Int64s = np.full(num_samples, np.count_nonzero(samples[0].targets != NO_TARGET))

    def __len__(self) -> int:
        return len(self.lengths)

    def sample(self, index: int) -> Sample:
        """Sample `index`."""
        return self._samples[index % len(self._samples)]


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


FLUSH_TOKENS = 1 << 18


class SetWriter:
    """Takes documents as tokens, cuts them into rows, and publishes the set under its name.

    Use as a context manager: without `publish`, nothing is left.
    """

    def __init__(self, folder: Path, *, vocab_size: int, sequence_length: int, masked: bool) -> None:
        self._folder = folder
        self._temporary = folder.with_name(f"{folder.name}.tmp")
        self._length = sequence_length
        self._masked = masked
        self._tokens = array("H" if vocab_size <= 1 << 16 else "I")
        self._learned = bytearray()
        self._num_written = 0
        self._row_starts = array("q", [0])
        self._row_labels = array("q")
        self._row_continues = bytearray()
        self._streams: dict[str, IO[bytes]] = {}

    def __enter__(self) -> SetWriter:
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary.mkdir(mode=0o700, parents=True)
        for name in ("tokens.bin", "learned.bin") if self._masked else ("tokens.bin",):
            self._streams[name] = (self._temporary / name).open("wb")
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self._streams.values():
            stream.close()
        shutil.rmtree(self._temporary, ignore_errors=True)

    @property
    def num_rows(self) -> int:
        """Rows so far."""
        return len(self._row_labels)

    @property
    def num_label_tokens(self) -> int:
        """Positions with a target so far."""
        return sum(self._row_labels)

    def add(self, ids: Sequence[int], learned: bytearray) -> None:
        """Add a document that fits into a sample. learned: 1 where a token is a target."""
        self._tokens.extend(ids)
        if self._masked:
            self._learned += learned
        self._close_row(self._end, labels=sum(learned[1:]), continues=False)
        self._flush_if_full()

    def add_text(self, ids: Sequence[int], *, continues: bool = False) -> None:
        """Add a document of which all is learned, or the next piece of one that `continues` in the next call.

        One that is longer than a sample becomes several rows.
        """
        self._tokens.extend(ids)
        if self._masked:
            self._learned += b"\1" * len(ids)
        # strictly more: a row that is just full may be the document's last
        while self._end - self._row_starts[-1] > self._length:
            self._close_row(self._row_starts[-1] + self._length, labels=self._length, continues=True)
        if not continues:
            self._close_row(self._end, labels=self._end - self._row_starts[-1] - 1, continues=False)
        self._flush_if_full()

    def _flush_if_full(self) -> None:
        if len(self._tokens) > FLUSH_TOKENS:
            self._flush()

    def publish(self, manifest: dict[str, Any], *, packing: bool) -> None:
        """Index the rows, write everything to disk and rename the folder. `manifest["counts"]` is completed."""
        self._flush()
        for name in list(self._streams):
            with self._streams.pop(name) as stream:
                os.fsync(stream.fileno())
        offsets = np.frombuffer(self._row_starts, dtype=np.int64)
        labels = np.frombuffer(self._row_labels, dtype=np.int64)
        index = _index(np.diff(offsets), labels, self._length if packing else None)
        index |= {"row_offsets.bin": offsets, "row_continues.bin": np.frombuffer(self._row_continues, dtype=np.uint8)}
        for name, values in index.items():
            values.tofile(self._temporary / name)
            sync_folder(self._temporary / name)
        counts = {
            "samples": len(index["lengths.bin"]),
            "rows": len(index["sample_rows.bin"]),
            "tokens": int(index["lengths.bin"].sum()),
            "label_tokens": int(labels.sum()),
        }
        dtypes = {name: values.dtype.str for name, values in index.items()}
        dtypes |= {"tokens.bin": np.dtype(self._tokens.typecode).str}
        dtypes |= {"learned.bin": "|u1"} if self._masked else {}
        manifest |= {"format_version": FORMAT_VERSION, "sequence_length": self._length}
        manifest |= {"counts": manifest.get("counts", {}) | counts, "files": _entries(self._temporary, dtypes)}
        write_json(self._temporary / MANIFEST, manifest)
        self._temporary.replace(self._folder)
        sync_folder(self._folder.parent)

    @property
    def _end(self) -> int:
        return self._num_written + len(self._tokens)

    def _close_row(self, end: int, *, labels: int, continues: bool) -> None:
        self._row_starts.append(end)
        self._row_labels.append(max(0, labels))
        self._row_continues.append(continues)

    def _flush(self) -> None:
        self._num_written += len(self._tokens)
        self._tokens.tofile(self._streams["tokens.bin"])
        del self._tokens[:]
        if self._masked:
            self._streams["learned.bin"].write(self._learned)
            self._learned.clear()


def _index(lengths: Int64s, labels: Int64s, capacity: int | None) -> dict[str, npt.NDArray[Any]]:
    """Samples of the rows that have a target; a row without one (the end mark of a text that filled a row) is none."""
    rows = np.flatnonzero(labels)
    sample_of = np.arange(len(rows)) if capacity is None else pack(lengths[rows], capacity)
    num_samples = int(sample_of.max()) + 1 if len(rows) else 0
    sample_of = mixed(num_samples)[sample_of]
    sizes = np.bincount(sample_of, minlength=num_samples)
    # float64 weights are exact below 2**53
    label_counts = np.bincount(sample_of, weights=labels[rows], minlength=num_samples).astype(np.int64)
    sample_lengths = np.bincount(sample_of, weights=lengths[rows], minlength=num_samples).astype(np.int64)
    return {
        "sample_rows.bin": rows[np.argsort(sample_of, kind="stable")].astype(np.int64),
        "sample_offsets.bin": np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        "label_counts.bin": label_counts,
        "lengths.bin": sample_lengths,
    }


def _entries(folder: Path, dtypes: dict[str, str]) -> dict[str, dict[str, Any]]:
    return {
        name: {"size": (folder / name).stat().st_size, "dtype": dtype, "blake2b": file_digest(folder / name)}
        for name, dtype in sorted(dtypes.items())
    }


_SEED = 0x67616E67


def mixed(num_samples: int) -> npt.NDArray[np.int64]:
    """The new number of every sample: a permutation of 0 to `num_samples` - 1 that follows from their count alone.

    Packing makes the fullest samples first, and files are often sorted; `evaluation.max_samples` takes the first.
    """
    # NEP 19 fixes the stream of a bit generator for ever, but not what Generator.permutation makes of it.
    numbers = np.random.PCG64(_SEED).random_raw(num_samples)
    return np.argsort(numbers, kind="stable")


def pack(lengths: npt.NDArray[np.int64], capacity: int) -> npt.NDArray[np.int64]:
    """The sample of every row, numbered from 0 in the order of their first row's length, longest first.

    lengths: tokens of every row, 1 to `capacity`. Memory: about 40 bytes per row.
    """
    sample_of = np.empty(len(lengths), dtype=np.int64)
    open_samples: dict[int, array[int]] = {}
    # bit c is set where an open sample has room for c tokens: best fit is then the lowest bit from `length` on
    rooms, num_samples = 0, 0
    for row in np.argsort(-lengths, kind="stable"):
        length = int(lengths[row])
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            sample = open_samples[room].pop()
            if not open_samples[room]:
                rooms ^= 1 << room
        else:
            room, sample = capacity, num_samples
            num_samples += 1
        sample_of[row] = sample
        if left := room - length:
            open_samples.setdefault(left, array("q")).append(sample)
            rooms |= 1 << left
    return sample_of
