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
from typing import Any, Dict, List, Optional

NOTES = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json", "uv_build.json")


def main() -> None:
    """Print it."""
    sys.path[:] = [path for path in sys.path if path]  # "" is wherever this was started
    from importlib import metadata

    packages: Dict[str, List[Any]] = {}
    for found in metadata.distributions():
        name = found.metadata["Name"]
        if name:  # else half of it is gone
            key = re.sub(r"[-_.]+", "-", name).lower()
            packages.setdefault(key, [found.version, digest(found)])  # the first on the path is the one that counts
    answer = {"python": platform.python_version(), "executable": sys.executable, "packages": packages}
    sys.stdout.write("gangline-contents" + json.dumps(answer) + "\n")


def digest(found: Any) -> Optional[str]:
    """One hash over the files of a distribution; None where nobody wrote down what they are."""
    record = found.read_text("RECORD")
    if not record:
        return None
    rows = [row for row in csv.reader(io.StringIO(record)) if len(row) == 3 and row[1] and counts(row[0])]
    text = json.dumps(sorted([name, mark] for name, mark, _ in rows))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def counts(name: str) -> bool:
    """Whether a row of RECORD is about content that is the same wherever it is installed."""
    return not (name.startswith(("../", "/")) or name.endswith(".pyc") or name.rpartition("/")[2] in NOTES)


if __name__ == "__main__":
    main()
