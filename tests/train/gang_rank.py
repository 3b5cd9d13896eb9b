"""A rank that only adds numbers, until it is ended: started by torchrun in tests/train/test_gang.py."""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    pid_file = folder / f"rank-{rank}.pid"
    pid_file.with_suffix(".part").write_text(json.dumps({"pid": os.getpid(), "start_ticks": ticks}))
    pid_file.with_suffix(".part").rename(pid_file)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    try:
        while True:
            total = torch.tensor([float(rank)])
            dist.all_reduce(total)
            (folder / f"sum-{rank}").write_text(str(total.item()))
            time.sleep(0.02)
    except RuntimeError as error:
        record = {"kind": "RunFailed", "what": "the step failed", "seen": str(error), "fix": "", "exit_code": 5}
        (folder / f"rank-{rank}.error.json").write_text(json.dumps(record))
        sys.exit(5)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
