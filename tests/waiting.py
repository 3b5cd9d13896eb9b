"""Waiting for something without a fixed time, and for several things at once."""

import threading
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


def at_once(number, do):
    """What `do(index)` gives for each index below a number, all in threads of their own: a result, or its exception."""
    found = [None] * number

    def work(index):
        try:
            found[index] = do(index)
        except Exception as error:  # noqa: BLE001  (the test says which it expects)
            found[index] = error

    threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    return found
