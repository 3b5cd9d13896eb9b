"""The frame of a verb: a JSON request on stdin, one JSON record per line on stdout."""

from __future__ import annotations

import json
import os
import sys
from typing import Any, Callable, Dict, Iterable, Union

Record = Dict[str, Any]
Answers = Callable[[Record], Union[Record, Iterable[Record]]]
"""Takes the request; gives the record that answers it, or several, each written as soon as it comes."""


class VerbFailed(Exception):
    """The verb cannot do what it was asked for: its answer is {"kind": "error", "what", "seen", "fix"}."""

    def __init__(self, what: str, seen: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.record = {"kind": "error", "what": what, "seen": seen, "fix": fix}


def answer(function: Answers) -> int:
    """Answer the request on stdin; the exit code."""
    text = sys.stdin.read()
    try:
        records = function(json.loads(text) if text.strip() else {})
        for record in [records] if isinstance(records, dict) else records:
            write_line(record)
    except VerbFailed as failed:
        write_line(failed.record)
        return 1
    except BrokenPipeError:  # nobody reads any more
        os._exit(0)
    return 0


def write_line(record: Record) -> None:
    """One line of JSON on stdout, at once."""
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()
