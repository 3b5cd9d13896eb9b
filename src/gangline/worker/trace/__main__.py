"""`python -m gangline.worker.trace [count] < order.json`: one JSON document on stdout, nothing else.

The order is a TraceOrder as JSON; a list of orders is answered by a list. An error is a document, too, of kind "error";
the exit code is that of the first error.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from gangline.errors import GanglineError, UsageError
from gangline.worker.json_lines import error_document, lacking
from gangline.worker.trace.order import TraceOrder

Answer = tuple[dict[str, Any], int]
"""A document and its exit code."""


def main(argv: list[str]) -> int:
    """Answer the order on stdin; returns the exit code."""
    if argv not in ([], ["count"]):
        sys.stderr.write("usage: python -m gangline.worker.trace [count] < order.json\n")
        return UsageError.exit_code
    # libraries print where they like; only the answer may go to the real stdout
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as stream:
        os.dup2(2, 1)
        document, code = _answer(sys.stdin.read(), count=bool(argv))
        stream.write(json.dumps(document) + "\n")
    return code


def _answer(text: str, *, count: bool) -> tuple[Any, int]:
    try:
        data = json.loads(text)
    except ValueError as error:
        return _failure(
            UsageError("the order for a trace is not JSON", seen=f"{error}", fix="write one JSON object to stdin")
        )
    if isinstance(data, list):
        answers = [_one(item, count=count) for item in data]
        return [document for document, _ in answers], next((code for _, code in answers if code), 0)
    return _one(data, count=count)


def _one(data: Any, *, count: bool) -> Answer:
    try:
        order = TraceOrder.from_json(data)
        # imported late: torch takes seconds, which an order with mistakes should not
        from gangline.worker.trace import line

        return line.count(order) if count else line.trace(order), 0
    except ModuleNotFoundError as error:
        return _failure(lacking(error))
    except GanglineError as error:
        return _failure(error)


def _failure(error: GanglineError) -> Answer:
    sys.stderr.write(f"{error}\n")
    return error_document(error), error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
