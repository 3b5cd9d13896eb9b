"""`gangline save`: a run saves after its next step, and goes on.

The order is a file in the folder of the attempt on the head. Rank 0 of our own trainer looks for it after every step,
that of a user's own script in `gangline.hooks.save_now`, and takes it away. So it needs neither the supervisor nor the
host agents, and an attempt that ends before takes the order with it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from gangline.control.supervision import RunHandle
from gangline.control.user_command import CommandRecord
from gangline.errors import HostUnreachable, RunFailed, UsageError
from gangline.report.follow import View, raise_failure
from gangline.report.tail import JsonTail
from gangline.runs.registry import RunRecord
from gangline.runs.state import now_iso


@dataclass(slots=True, kw_only=True)
class OrderedSave:
    """An order to save that was given, and what has become of it."""

    run: RunHandle
    view: View
    """Of the attempt that has the order."""
    attempt: int
    is_script: bool
    """The user's own script: where and when it saves, nobody else can see."""
    tails: list[JsonTail]
    step: int | None = None
    """The step that is saved in answer; None: not known yet."""
    _committed: set[int] = field(default_factory=set)

    def look(self, record: RunRecord) -> str | None:
        """What the run did in answer, in a few words; None as long as it has done nothing. record: its state now.

        Raises RunFailed where the save failed, or the attempt ended without one; HostUnreachable.
        """
        if self.is_script:
            if self.view.head_layout.save_order(self.attempt).name not in self._names():
                return "was told to save"
        else:
            for tail in self.tails:
                for event in tail.objects():
                    self._take(event)
            if self.step is not None and self.step in self._committed:
                return f"saved step {self.step}"
        state = record.state
        if record.ended or state is None or state.attempt != self.attempt or record.phase == "restarting":
            raise self._missed(record)
        return None

    def _names(self) -> list[str]:
        return self.view.head.names(self.view.head_layout.attempt(self.attempt))

    def _take(self, event: dict[str, object]) -> None:
        name, step = event.get("event"), event.get("step")
        if type(step) is not int:
            return
        if name == "saving" and event.get("ordered") is True:
            self.step = step
        elif name == "committed":
            self._committed.add(step)
        elif name == "save-failed" and self.step is not None:
            raise RunFailed(
                f"{self.run.layout.run_id} could not save step {self.step}",
                seen=str(event.get("what")),
                fix=f"gangline logs {self.run.layout.run_id} has more; what was saved before is untouched",
            )

    def _missed(self, record: RunRecord) -> RunFailed:
        name = self.run.layout.run_id
        seen = f"the run is {record.phase}" if record.ended else f"attempt {self.attempt} has ended"
        return RunFailed(
            f"{name} ended before it was seen to save",
            seen=seen,
            fix=f"gangline ps {name} shows what it has saved"
            + ("" if record.ended else f"; once it trains again: gangline save {name}"),
        )


def order_save(run: RunHandle) -> OrderedSave:
    """Order a run to save after its next step, and return at once.

    Raises UsageError for a run that has no ranks now and for a script that takes no such order, HostUnreachable where
    the run cannot be asked, RunFailed where it is lost.
    """
    record = run.record()
    record.require_state()
    attempt = _require_running(run, record)
    view = run.view().at(attempt)
    is_script = CommandRecord.of(run.layout) is not None
    folder = view.head_layout.attempt(attempt)
    if is_script and view.head_layout.script_saves(attempt).name not in view.head.names(folder):
        raise UsageError(
            f"the script of {run.layout.run_id} takes no orders to save",
            seen="expected a call of gangline.hooks.save_now() in it, and rank 0 has not made one in this attempt",
            fix="if it is about to, repeat the command; else `gangline stop` ends the run in order, and whether it "
            "saves then is up to the script",
        )
    # what was written before is no answer
    tails = [] if is_script else [JsonTail(view.head, view.head_layout.events), *view.tails_here()]
    for tail in tails:
        while tail.objects():
            pass
    view.head.write(view.head_layout.save_order(attempt), json.dumps({"asked": now_iso()}).encode())
    return OrderedSave(run=run, view=view, attempt=attempt, is_script=is_script, tails=tails)


def _require_running(run: RunHandle, record: RunRecord) -> int:
    """The attempt whose ranks can be told."""
    name = run.layout.run_id
    if record.silent is not None:
        raise HostUnreachable(f"{name} cannot be reached, so it was not told to save", seen=record.silent)
    if record.phase == "lost":
        raise_failure(record)
    if record.phase == "running" and record.state is not None:
        return record.state.attempt
    words, fix = _NO_RANKS.get(record.phase, ("has ended", "gangline ps {} shows how, and what it has saved"))
    raise UsageError(
        f"{name} {words}",
        seen=f"expected a run whose ranks train, found one that is {record.phase}",
        fix=fix.format(name),
    )


_NO_RANKS = {
    "queued": ("has not begun", "gangline attach {} follows it through the queue"),
    "preparing": ("has not begun", "repeat the command once it trains: gangline attach {}"),
    "restarting": ("is between two attempts", "repeat the command once it trains again: gangline attach {}"),
    "stopping": ("is ending, and saves before it does", "gangline ps {} shows what it has saved"),
}
"""Phase without ranks to be told -> what to say, and what to do."""
