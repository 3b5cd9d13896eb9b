"""Lets a rank of the user's own program say where it stands, should it hang or die; then gets out of its way.

rank_start.py puts the folder of this file, as `sitecustomize.py`, in front of Python's path. So Python runs it before
the program: it has the stacks of all threads written to the file $GANGLINE_STACKS on a signal that programs do not use,
when native code crashes, and on SIGTERM, with which torchrun ends ranks as soon as another one has failed. It takes
itself out of the environment, and runs the `sitecustomize` that is there otherwise. A program that takes these signals
for itself gets them as without us. After an exception of the program, the last collective that torch's flight recorder
has goes to a file beside the other one. Once the program imports torch's optimizers, the steps of the first one that
takes any are counted in a third file, so that a program that prints nothing of them is followed, too. Behind all other
folders of Python's path it puts the one with `gangline.hooks`.

A file of its own, because the environment that runs it need not know gangline.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing them costs every start of a rank some milliseconds
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any, Sequence

HERE = __file__.rpartition("/")[0]
MODULE = "sitecustomize"
DUMP_S = 5.0
OPTIMIZERS = "torch.optim.optimizer"
COUNT_S = 0.5
"""How often the number of steps is written."""


def listen(path: str) -> None:
    """Have the stacks written there on the signals. Nothing is changed where that is not possible."""
    number = signal.SIGRTMAX - 2
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(
                number, signal.SIG_IGN
            )  # what holds again once Python ends: it must not be ended by a question
            faulthandler.register(number, file=file)
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            faulthandler.register(signal.SIGTERM, file=file, chain=True)
        if not faulthandler.is_enabled():
            faulthandler.enable(file=file)
        os.register_at_fork(after_in_child=lambda: fall_silent(file))
        atexit.register(tell_collective, path.replace(".stacks", ".flight"), os.getpid())
    except (OSError, ValueError, RuntimeError):
        pass


def fall_silent(file: int) -> None:
    """In a child, as a process that loads data: the file is its parent's."""
    faulthandler.unregister(signal.SIGRTMAX - 2)
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        faulthandler.unregister(signal.SIGTERM)
    os.dup2(2, file)  # a crash is told in the log


def tell_collective(path: str, pid: int) -> None:
    """Write the last collective that was begun. The rank has raised: whatever this does, it ends soon, with code 1."""
    c10d = sys.modules.get("torch._C._distributed_c10d")
    # private, for torch has no public call; the older name is that of torch 2.8 and before
    dump = getattr(c10d, "_dump_fr_trace_json", None) or getattr(c10d, "_dump_nccl_trace_json", None)
    if dump is None or getattr(sys, "last_value", None) is None or os.getpid() != pid:
        return
    faulthandler.dump_traceback_later(DUMP_S, exit=True, file=os.open(os.devnull, os.O_WRONLY))
    try:
        import json

        last = json.loads(dump(includeCollectives=True, onlyActive=False))["entries"][-1]
        names = ("process_group", "collective_seq_id", "profiling_name", "input_sizes", "is_p2p")
        with open(path, "w") as stream:  # noqa: PTH123 - pathlib costs a start 5 ms
            json.dump({name: last[name] for name in names}, stream)
    except Exception:  # noqa: BLE001, S110 - no torch has to have it, and the program has an error of its own
        pass
    faulthandler.cancel_dump_traceback_later()


class StepCounter:
    """Counts the steps of an optimizer, from when torch's are imported.

    It stands in front of the finders of modules until then. path: where the number goes.
    """

    def __init__(self, path: str) -> None:
        self._path, self._steps, self._at = path, 0, 0.0
        self._pid = 0
        self._counted: int | None = None
        """The optimizer; one that averages weights, or that of a second model, is not counted."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's own spec, with what is to be done once it has run; None for all others."""
        if name != OPTIMIZERS:
            return None
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_count(module: ModuleType) -> None:
                run(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                # torch 2.0 and later; without it nothing is counted
                register = getattr(module, "register_optimizer_step_post_hook", None)

                def hook(optimizer: object, *_: object) -> None:
                    compiler: Any = getattr(module.torch, "compiler", None)
                    if not (hasattr(compiler, "is_compiling") and compiler.is_compiling()):
                        self.count(optimizer)

                if register is not None:
                    register(hook)
                    atexit.register(self.write_last)

            setattr(spec.loader, "exec_module", run_and_count)  # noqa: B010 - it is declared as a method
        return spec

    def count(self, optimizer: object) -> None:
        """One step is done. Of a compiled optimizer none is counted: that would cut its graph."""
        if self._counted is None:
            self._counted = id(optimizer)
        if id(optimizer) != self._counted:
            return
        self._steps += 1
        now = time.monotonic()
        if now - self._at >= COUNT_S:
            self._at, self._pid = now, os.getpid()
            self._write()

    def write_last(self) -> None:
        """The program ends: the number may be of some steps ago. A child that counts none leaves it alone."""
        if self._pid == os.getpid():
            self._write()

    def _write(self) -> None:
        try:
            with open(self._path, "w") as stream:  # noqa: PTH123 - as above
                stream.write(str(self._steps))
        except OSError:  # a full disk does not end the training
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
    stacks = os.environ.pop("GANGLINE_STACKS", os.devnull)
    listen(stacks)
    if stacks != os.devnull:
        sys.meta_path.insert(0, StepCounter(stacks[: -len(".stacks")] + ".count"))
    leave()
    sys.path.append(HERE.rpartition("/")[0] + "/hooks")
    run_next()
