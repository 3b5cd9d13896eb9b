"""Anonymous memory that something takes at its peak: files that are mapped do not count."""

import ctypes
import gc
import threading
from pathlib import Path


class Peak:
    """Looks every millisecond, while it is open."""

    num_bytes = 0
    """More than there was before."""

    def __enter__(self):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # else what was freed before would hide a part of it
        self._before, self._ended = _anonymous(), threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_error):
        self._ended.set()
        self._thread.join()

    def _look(self):
        while not self._ended.wait(0.001):
            self.num_bytes = max(self.num_bytes, _anonymous() - self._before)


def _anonymous() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
