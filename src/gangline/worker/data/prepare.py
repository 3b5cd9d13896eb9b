"""The inputs of a run, made before any process group exists: token sets by content hash, the model's fingerprint.

`python -m gangline.worker inputs <job.json> <root>` writes JSON lines on stdout: {"kind": "progress", "done_bytes",
"total_bytes", "rows"} at most twice a second, and last {"kind": "result", "train", "evaluation", "model", "counts"}.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gangline.errors import UsageError
from gangline.formats import has_conversations
from gangline.runs.job import NO_TOKENS, Job
from gangline.worker.data.build import Tooling, ensure_set, plan_sets, sweep
from gangline.worker.data.model_folder import (
    DigestCache,
    Hub,
    HuggingFace,
    ModelFolder,
    check_sequence_length,
    open_model_folder,
)
from gangline.worker.data.remote import bring_remote
from gangline.worker.data.row_formats import Format
from gangline.worker.json_lines import write_line

PROGRESS_INTERVAL_S = 0.5

RowProgress = Callable[[int, int, int], None]
"""(bytes done, bytes in all or 0 if unknown, rows done)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedInputs:
    """The inputs of a run: content hashes of its token sets, the fingerprint of its model."""

    train: str
    evaluation: str | None
    model: str
    counts: dict[str, Any]
    """The counts of each set's manifest (see `tokens`), by purpose (evaluation: None without a set); with `bad_rows`,
    the first rows that were skipped (file, line, reason), and `reused`, whether the set was there already."""


def prepare_inputs(
    job: Job, root: Path, *, progress: RowProgress | None = None, hub: Hub | None = None
) -> PreparedInputs:
    """Make the token sets that are not yet below `root`/data, and fingerprint the model.

    Raises DataError or ModelError; a set that could not be finished leaves nothing behind.
    """
    hub = hub or HuggingFace()
    meter = _Meter(progress)
    job = bring_remote(job, root, beat=meter.beat)
    folder = open_model_folder(job.model)
    check_sequence_length(folder, job.data.sequence_length)
    sweep(root)
    cache = DigestCache(root / "data" / "digests.json", beat=meter.beat)
    requests = plan_sets(
        job,
        tokenizer_digest=folder.tokenizer_digest(cache),
        vocab_size=folder.vocab_size,
        cache=cache,
        hub=hub,
    )
    model = folder.fingerprint(cache, weights=job.model.start == "pretrained")
    cache.save()
    tooling = functools.cache(lambda: load_tooling(job, folder))
    meter.total_bytes = sum(request.num_bytes for request in requests)
    hashes: dict[str, str] = {}
    counts: dict[str, Any] = {"evaluation": None}
    for request in requests:
        tokens, reused = ensure_set(request, root, tooling=tooling, hub=hub, tick=meter.tick)
        meter.next_source(request.num_bytes)
        manifest = tokens.manifest
        hashes[request.purpose] = request.content_hash
        counts[request.purpose] = {**manifest["counts"], "bad_rows": manifest["bad_rows"], "reused": reused}
    return PreparedInputs(train=hashes["train"], evaluation=hashes.get("evaluation"), model=model, counts=counts)


def inputs_main(argv: list[str]) -> int:
    """`inputs <job.json> <root>`: JSON lines on stdout; raises GanglineError for the caller to report."""
    if len(argv) != 2:
        raise UsageError("inputs takes two words", seen=f"{len(argv)} words", fix="inputs <job.json> <root>")

    def progress(done_bytes: int, total_bytes: int, rows: int) -> None:
        write_line("progress", done_bytes=done_bytes, total_bytes=total_bytes, rows=rows)

    inputs = prepare_inputs(Job.load(Path(argv[0])), Path(argv[1]), progress=progress)
    write_line("result", **dataclasses.asdict(inputs))
    return 0


def load_tooling(job: Job, folder: ModelFolder) -> Tooling:
    """What turns the rows of a job into tokens. Raises ModelError, and DataError without a chat template."""
    return tooling_of(job, folder, load_tokenizer_of(job, folder))


def load_tokenizer_of(job: Job, folder: ModelFolder) -> Any:
    """The tokenizer as transformers has it. Raises ModelError."""
    # it imports torch and transformers, seconds that a set found by its hash does not cost
    from gangline.worker.tokenizer import load_tokenizer

    # the folder itself also for a hub model, unless it needs the Python files that only the hub has
    model = job.model if job.model.trust_remote_code else dataclasses.replace(job.model, path=str(folder.path))
    return load_tokenizer(model, job.tokens)


def tooling_of(job: Job, folder: ModelFolder, tokenizer: Any) -> Tooling:
    """The same with a tokenizer that is there. Raises DataError."""
    # jinja2 is not everywhere
    from gangline.worker.data.tokenise import Encoder, conversations_of

    vocab_size = folder.vocab_size or len(tokenizer)
    if job.tokens != NO_TOKENS:  # the model gets a row for each
        vocab_size = max(vocab_size, len(tokenizer))
    chat = any(map(has_conversations, job.data.formats))
    render = conversations_of(tokenizer, job.data, model=folder.name) if chat else None
    return Tooling(
        encoder=Encoder(tokenizer, learn_end=job.data.learn.end_token),
        format=Format.of(job.data, render),
        vocab_size=vocab_size,
    )


class _Meter:
    """Passes progress on, at most twice a second."""

    def __init__(self, progress: RowProgress | None) -> None:
        self.total_bytes = 0
        self._progress = progress
        self._base_bytes = 0
        self._base_rows = 0
        self._rows = 0
        self._last_s = float("-inf")

    def beat(self) -> None:
        """A sign of life while files are hashed."""
        self.tick(0, 0)

    def tick(self, done_bytes: int, rows: int) -> None:
        """This many bytes and rows of the present source are done."""
        self._rows = rows
        now = time.monotonic()
        if self._progress is not None and now - self._last_s >= PROGRESS_INTERVAL_S:
            self._last_s = now
            self._progress(self._base_bytes + done_bytes, self.total_bytes, self._base_rows + rows)

    def next_source(self, num_bytes: int) -> None:
        """The present source is done."""
        self._base_bytes += num_bytes
        self._base_rows += self._rows
        self._rows = 0
