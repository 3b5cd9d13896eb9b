"""Waiting for something without a fixed time."""

import time

DEADLINE_S = 60.0


def wait_until(condition, what, *, timeout_s=DEADLINE_S):
    """Look until `condition()` is true, and return its value; fails with `what` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"waited {timeout_s} s in vain: {what}"
        time.sleep(0.02)
