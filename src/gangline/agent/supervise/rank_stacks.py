"""Lets a rank of the user's own program say where it stands, should it hang; then gets out of its way.

rank_start.py puts the folder of this file, as `sitecustomize.py`, in front of Python's path. So Python runs it before
the program: it has the stacks of all threads written to the file $GANGLINE_STACKS on a signal that programs do not use,
takes itself out of the environment, and runs the `sitecustomize` that is there otherwise. Behind all other folders of
Python's path it puts the one with `gangline.hooks`.

A file of its own, because the environment that runs it need not know gangline.
"""

import faulthandler
import os
import signal
import sys

HERE = __file__.rpartition("/")[0]
MODULE = "sitecustomize"


def listen(path: str) -> None:
    """Have the stacks written there on the signal. Nothing is changed where that is not possible."""
    number = signal.SIGRTMAX - 2
    try:
        if signal.getsignal(number) == signal.SIG_DFL:
            faulthandler.register(number, file=os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
    except (OSError, ValueError, RuntimeError):
        pass


def leave() -> None:
    """Take this folder out of Python's path, of this process and of those that it starts."""
    sys.path[:] = [folder for folder in sys.path if folder != HERE]
    before = os.environ.pop("PYTHONPATH", "").split(os.pathsep)
    rest = os.pathsep.join(folder for folder in before if folder != HERE)
    if rest:
        os.environ["PYTHONPATH"] = rest
    sys.path_importer_cache.pop(HERE, None)


def run_next() -> None:
    """Run the module of this name that Python would have run."""
    mine = sys.modules.pop(MODULE)
    try:
        __import__(MODULE)
    except ImportError as error:
        if error.name != MODULE:
            raise
    finally:
        sys.modules.setdefault(MODULE, mine)


if __name__ == MODULE:
    listen(os.environ.pop("GANGLINE_STACKS", os.devnull))
    leave()
    sys.path.append(HERE.rpartition("/")[0] + "/hooks")
    run_next()
