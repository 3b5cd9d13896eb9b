"""`python -m gangline.worker stand-by CONTROL train JOB GANG ROOT`: one process per rank that outlives attempts.

torchrun starts it in the place of a rank. It imports everything that a rank needs, starts no thread and touches no GPU,
and forks the rank. When that has ended it says with which code, and waits for the next seat (docs/decisions/0012).

    CONTROL/seat-<k>.json            its seat in its k-th attempt (`worker/seat.py`)
    CONTROL/hold                     a rank that ends well does not end it, either
    CONTROL/leave                    it ends
    <files>/rank-<r>.exit.json       {"pid": of the rank, "code": its exit code, or minus the number of a signal}
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

from gangline.runs.files import write_json
from gangline.worker.arrival import early
from gangline.worker.seat import Seat, first_seat, read_seat

LONGEST_REST_S = 3600.0
"""A guard ends what rests much sooner. This is for when there is none any more."""
_LOOK_S = 0.05
_PASSED_ON = (signal.SIGTERM, signal.SIGUSR2)
"""Orders to the rank that may reach this process instead: its pid stands where the rank has not come yet."""
_PR_SET_PDEATHSIG = 1


def stand_by_main(argv: list[str]) -> NoReturn:
    """Stand by until told to leave, and end with the exit code of the last rank."""
    from gangline.worker.imports import import_for, what_forbids_a_fork

    control, *words = argv
    seat = first_seat(Path(control), tuple(words))
    seat.take()
    early(list(seat.words[1:]))
    import_for(Path(seat.words[1]))
    obstacle = what_forbids_a_fork()
    if obstacle:
        with (seat.files / f"rank-{seat.rank}.log").open("a") as log:
            log.write(f"no process stands by for the next attempt: {obstacle}\n")
        _end(run_rank(list(seat.words)))
    # what lives for ever is kept out of every later collection, and its pages stay shared
    gc.collect()
    gc.freeze()
    _end(StandBy(Path(control), run=run_rank).serve(seat))


def run_rank(words: list[str]) -> int:
    """What `words` say; for a rank that trains it does not return."""
    from gangline.worker.train import train_main

    verb, *argv = words
    if verb != "train":
        raise ValueError(f"only `train` can be stood by for, not {verb}")
    train_main(argv)


class StandBy:
    """Forks one rank after the other. run: does what a rank does, in the child, and gives its exit code."""

    def __init__(self, control: Path, *, run: Callable[[list[str]], int]) -> None:
        self._control = control
        self._run = run
        self._parent = os.getppid()
        self._child: int | None = None
        """The rank, as long as nobody else can have its pid."""
        self._leaves = False

    def serve(self, seat: Seat) -> int:
        """Rank after rank, from this seat on; the exit code of the last, as of a shell."""
        # before the handlers: an order that came while nobody could take it must find a rank
        signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for number in _PASSED_ON:
            signal.signal(number, self._pass_on)
        following: Seat | None = seat
        while following is not None:
            seat = following
            code = self._one(seat)
            following = self._following(seat, code)
        return code if code >= 0 else 128 - code

    def _one(self, seat: Seat) -> int:
        """Fork the rank of a seat, and wait for its end."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
        own = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._be(seat, parent=own)
        self._child = pid
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
        _, status = os.waitpid(pid, 0)
        self._child = None
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
        code = os.waitstatus_to_exitcode(status)
        self._tell_end(seat, pid, code)
        return code

    def _be(self, seat: Seat, *, parent: int) -> NoReturn:
        """Be the rank. Nothing of it may ever return into the loop of its parent."""
        code = 1
        try:
            _die_with(parent)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for number in _PASSED_ON:
                signal.signal(number, signal.SIG_DFL)
            # not SIGUSR2: it waits until the rank can take it (`worker/cut.py`)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            # `random` seeds itself anew after a fork; torch has the seed of any fresh process
            seat.take()
            code = self._run(list(seat.words))
        except BaseException:  # noqa: BLE001 - see above
            traceback.print_exc()
        finally:
            _end(code)

    def _tell_end(self, seat: Seat, pid: int, code: int) -> None:
        try:
            write_json(seat.files / f"rank-{seat.rank}.exit.json", {"pid": pid, "code": code})
        except OSError as error:  # the guard sees that it is gone, too
            sys.stderr.write(f"rank {seat.rank} ended with {code}, which cannot be written: {error}\n")

    def _following(self, seat: Seat, code: int) -> Seat | None:
        """The next seat; None where there will be none."""
        if code == 0 and not (self._control / "hold").exists():
            # in this order: a guard gives the seat, and only then lets go
            return None if self._leaves else read_seat(self._control, seat.number + 1)
        return self._wait_for(seat.number + 1)

    def _wait_for(self, number: int) -> Seat | None:
        deadline = time.monotonic() + LONGEST_REST_S
        while not self._leaves and os.getppid() == self._parent and time.monotonic() < deadline:
            if (self._control / "leave").exists() or not self._control.is_dir():  # no guard: it was started by hand
                return None
            seat = read_seat(self._control, number)
            if seat is not None:
                return seat
            time.sleep(_LOOK_S)
        return None

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._leaves = self._leaves or number == signal.SIGTERM
        if self._child is not None:
            os.kill(self._child, number)


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, however that comes."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _end(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
