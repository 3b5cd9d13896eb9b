"""Writing a token set: streaming, in a temporary folder, whole or absent.

Tokens are written as they come. In memory stay 17 bytes per row (offset, label count, flag), and while packing about
60 (measured: benchmarks/tokenise_rows.py).
"""

from __future__ import annotations

import os
import shutil
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from gangline.runs.files import file_digest, sync_folder, write_json
from gangline.worker.data.pack import mixed, pack
from gangline.worker.data.tokens import FORMAT_VERSION, MANIFEST, Int64s

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

    def add(self, ids: Sequence[int], learned: bytearray, *, continues: bool = False) -> None:
        """Add a document, or the next piece of one that `continues` in the next call.

        A document longer than a sample becomes several rows; only sets in which all is learned have such ones.
        """
        self._tokens.extend(ids)
        if self._masked:
            self._learned += learned
            self._close_row(self._end, labels=sum(learned[1:]), continues=False)
        else:
            # strictly more: a row that is just full may be the document's last
            while self._end - self._row_starts[-1] > self._length:
                self._close_row(self._row_starts[-1] + self._length, labels=self._length, continues=True)
            if not continues:
                self._close_row(self._end, labels=self._end - self._row_starts[-1] - 1, continues=False)
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
            _write(self._temporary / name, values)
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


def _write(path: Path, values: npt.NDArray[Any]) -> None:
    with path.open("wb") as stream:
        values.tofile(stream)
        stream.flush()
        os.fsync(stream.fileno())


def _entries(folder: Path, dtypes: dict[str, str]) -> dict[str, dict[str, Any]]:
    return {
        name: {"size": (folder / name).stat().st_size, "dtype": dtype, "blake2b": file_digest(folder / name)}
        for name, dtype in sorted(dtypes.items())
    }
