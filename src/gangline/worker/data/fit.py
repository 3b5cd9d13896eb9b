"""Documents into rows no longer than a sample, by the job's rule for longer ones (`data.overlong`).

split      a text goes on in the next row, and no label is lost; other rows are truncated (an answer cut in the
           middle of a conversation would be learned without its question)
truncate   what is beyond the sample's end is left out, and counted
fail       the row cannot be used
"""

from __future__ import annotations

from gangline.formats import FORMATS, RowError
from gangline.runs.job import DataJob
from gangline.worker.data.tokenise import Encoded
from gangline.worker.data.writer import SetWriter


class Fitter:
    """Hands documents to a writer, row by row."""

    def __init__(self, writer: SetWriter, data: DataJob) -> None:
        self._writer = writer
        self._limit = data.sequence_length
        self._rule = data.overlong
        self._splits = FORMATS[data.format].whole and data.overlong == "split"
        self._pending: list[int] = []
        self._pending_learned = bytearray()
        self.num_truncated = 0

    def take(self, encoded: Encoded) -> None:
        """Add a document or a piece of one; raises RowError for a row that cannot be used."""
        if self._splits:
            self._writer.add(encoded.ids, encoded.learned, continues=encoded.document.continues)
            return
        # one token more than fits is enough to know that the document is too long
        room = self._limit + 1 - len(self._pending)
        self._pending += encoded.ids[:room]
        self._pending_learned += encoded.learned[:room]
        if not encoded.document.continues:
            ids, learned = self._pending, self._pending_learned
            self._pending, self._pending_learned = [], bytearray()
            self._finish(ids, learned)

    def _finish(self, ids: list[int], learned: bytearray) -> None:
        overlong = len(ids) > self._limit
        if overlong and self._rule == "fail":
            raise RowError(f"longer than data.sequence_length ({self._limit} tokens)")
        ids, learned = ids[: self._limit], learned[: self._limit]
        if not any(learned[1:]):
            if overlong:
                raise RowError(f"the prompt alone fills the sample ({self._limit} tokens); nothing is left to learn")
            raise RowError("no token to learn")
        self.num_truncated += overlong
        self._writer.add(ids, learned)
