"""Rows of a data set on the hub, streamed; the only part that may need a network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from gangline.errors import DataError
from gangline.runs.job import SourceJob
from gangline.worker.data.rows import Row


class Hub(Protocol):
    """What is asked of the hub; tests give a fake."""

    def revision(self, source: SourceJob) -> str:
        """The commit that `source` means now; raises DataError."""
        ...

    def rows(self, source: SourceJob, commit: str) -> Iterator[Row]:
        """The rows, streamed; raises DataError."""
        ...


class HuggingFace:
    """The real hub, by huggingface_hub and datasets."""

    def revision(self, source: SourceJob) -> str:
        """The commit that `source` means now; raises DataError when it cannot be had."""
        with _reachable(source):
            from huggingface_hub import HfApi

            return str(HfApi().dataset_info(str(source.hub), revision=source.revision).sha)

    def rows(self, source: SourceJob, commit: str) -> Iterator[Row]:
        """The rows of one split, streamed; raises DataError."""
        with _reachable(source):
            from datasets import load_dataset

            table: Any = load_dataset(
                str(source.hub), source.hub_config, split=source.split, revision=commit, streaming=True
            )
            for number, values in enumerate(table, start=1):
                yield Row(file=f"{source.hub}/{source.split}", number=number, values=values)


@contextmanager
def _reachable(source: SourceJob) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the hub's HTTP client, and so its errors, changed with its versions: httpx, httpx2
        text = str(error).strip()
        raise DataError(
            f"hub data set {source.hub} (split {source.split}): cannot be read",
            seen=f"{type(error).__name__}: {text.splitlines()[0][:300] if text else ''}",
            fix="check the name, the split and the network (HF_TOKEN for a gated one), "
            "or download it and name its files in data.train.files",
        ) from error
