"""What a process does in test_checkpoint_crash: the campaign of kills, small."""

import sys

from benchmarks import kill_saves


def kill(folder: str, out: str, *, times: int) -> int:
    """So many kills at every point; the exit status of benchmarks/kill_saves.py."""
    sys.argv = ["kill_saves.py", "--times", str(times), "--out", out, "--folder", folder]
    return kill_saves.main()
