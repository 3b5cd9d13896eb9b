"""What an environment holds, said by its own Python: every installed distribution with its version and its content.

A program by itself, also for `python -c`: it imports the standard library only and takes no words. It prints one line,
gangline-contents{"python", "executable", "packages": {NAME: [VERSION, DIGEST or null]}}.

DIGEST is over what RECORD says of the files: their hashes as they were when they were installed. Rows that differ from
folder to folder are left out: programs (they begin with the path of their Python), compiled files, notes of installers.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import platform
import re
import sys
from typing import Any, Dict, List, Optional, Tuple

HEADER = re.compile(r"^(Name|Version):[ \t]*(.*?)[ \t]*$", re.MULTILINE | re.IGNORECASE)
NOTES = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json", "uv_build.json")


def main() -> None:
    """Print it."""
    sys.path[:] = [path for path in sys.path if path]  # "" is wherever this was started
    from importlib import metadata

    packages: Dict[str, List[Any]] = {}
    for found in metadata.distributions():
        name, version = known_as(found)
        if name:  # else half of it is gone
            key = re.sub(r"[-_.]+", "-", name).lower()
            if key not in packages:  # the first on the path is the one that counts
                packages[key] = [version, digest(found)]
    answer = {"python": platform.python_version(), "executable": sys.executable, "packages": packages}
    sys.stdout.write("gangline-contents" + json.dumps(answer) + "\n")


def known_as(found: Any) -> Tuple[Optional[str], Optional[str]]:
    """Name and version. `found.metadata` would read its whole description as an e-mail, each time it is asked."""
    text = found.read_text("METADATA") or found.read_text("PKG-INFO") or found.read_text("") or ""
    head = text.partition("\n\n")[0]
    said = {name.lower(): value for name, value in reversed(HEADER.findall(head))}
    return said.get("name"), said.get("version")


def digest(found: Any) -> Optional[str]:
    """One hash over the files of a distribution; None where nobody wrote down what they are."""
    record = found.read_text("RECORD")
    if not record:
        return None
    # torch alone has 10,000 rows, and csv takes twice as long for them
    every = csv.reader(io.StringIO(record)) if '"' in record else (line.split(",") for line in record.split("\n"))
    rows = [row for row in every if len(row) == 3 and row[1] and counts(row[0])]
    text = json.dumps(sorted([name, mark] for name, mark, _ in rows))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def counts(name: str) -> bool:
    """Whether a row of RECORD is about content that is the same wherever it is installed."""
    return not (name.startswith(("../", "/")) or name.endswith(".pyc") or name.rpartition("/")[2] in NOTES)


if __name__ == "__main__":
    main()
