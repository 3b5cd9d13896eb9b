"""One thing that is done to a run, and what becomes of the run (faults.py)."""

from __future__ import annotations

import subprocess
import threading
import time
from contextlib import suppress
from typing import Any

from benchmarks.faults_causes import CAUSES, FIXES, TOLD, is_named, is_told, misnamed
from benchmarks.faults_plug import FATAL, Plug
from benchmarks.faults_world import MOMENT_S, NotBack, Seen, World

CUT_S = 60.0
WATCHED_S, RIGHT_S = 20.0, 5.0
"""So long it is watched after the clock of a host was put forward or back by an hour; and once it is right."""
STAGES_S = 10.0
EVERY = 20
"""Steps between two checkpoints (faults_world.JOB)."""
CUT = {"partition", "one-way"}
"""The host is lost, and takes part again once it can be reached."""
MAY_END = {"disk-stop"}
"""The run may stop, by its own policy; then with the right cause, and `resume` goes on from what was saved before."""
ACCUSING = {"failing", "hanging", "suspected", "unreachable", "doubted"}
"""Events that a clock which jumps is no reason for."""
Line = dict[str, Any]


class Fault:
    """One thing that is done to a run."""

    def __init__(self, world: World, kind: str) -> None:
        self.world = world
        self.kind = kind
        # a head that keeps the run and is cut off says, rightly, that it does not hear the others
        spared = world.keep == "head" and kind in FATAL | CUT
        self.victim = world.chance.choice(world.living[1:] if spared else world.living)
        self._plug = Plug(world, self.victim)
        self._wrong: list[str] = []
        self._extra: Line = {}

    def play(self) -> Line:
        """Do it, and see what becomes of the run. Raises what the lab raises."""
        world = self.world
        self._await_whole()
        self._num_events = len(world.events())
        self._told_before = world.told()
        time.sleep(world.chance.uniform(0.0, MOMENT_S))
        before = world.seen()
        self._attempt = before.attempt
        begun = time.monotonic()
        if self.kind == "supervisor":
            world.keeper.check(["kill", "-9", str(world.state()["supervisor"]["pid"])])
        else:
            self._plug.pull(self.kind)
        healing = threading.Timer(CUT_S, self._plug.heal, [self.kind])
        healing.start()
        line: Line = {"victim": self.victim.name, "back_s": None, "step": before.step}
        try:
            after = world.until(lambda seen: self._is_back(seen, before), "it goes on")
            line |= {"back_s": round(time.monotonic() - begun, 1), "attempts": after.attempt - before.attempt}
        except NotBack as error:
            self._ended(error)
        finally:
            healing.cancel()
            healing.join()
            if self.kind != "clock":
                self._plug.heal(self.kind)
        if line["back_s"] is not None:
            self._follow(before)
            self._await_stages()
        return line | self._judged() | self._extra | {"wrong": self._wrong}

    def _await_whole(self) -> None:
        """Until every host takes part and it trains."""
        names = {host.name for host in self.world.living}
        self.world.until(lambda _seen: names == set(self.world.hosts()), f"{len(names)} hosts take part")
        before = self.world.seen()
        self.world.until(lambda seen: seen.step > before.step + 3, "it trains")
        self._epoch = self.world.state()["epoch"]

    def _is_back(self, seen: Seen, before: Seen) -> bool:
        """It trains: where another attempt is needed, in that; where it has to be told, after that; else further on."""
        if self.kind in CAUSES and self.kind != "flap":
            return seen.trained > before.attempt
        return seen.step > before.step + 2 and (self.kind not in TOLD or self._has_told(seen))

    def _has_told(self, seen: Seen) -> bool:
        """Whether rank 0 has told of it, and it is over."""
        said = [event for event in self.world.told() if event not in self._told_before]
        steps = [event["step"] for event in said if is_told(self.kind, self.victim.name, event)]
        if not steps:
            return False
        if self.kind == "disk":  # a later checkpoint is whole on all hosts
            return any(event["step"] > max(steps) for event in self._events() if event["event"] == "committed")
        return seen.step > max(steps)

    def _events(self) -> list[dict[str, Any]]:
        """What the supervisor wrote since."""
        return self.world.events()[self._num_events :]

    def _ended(self, error: NotBack) -> None:
        """It did not go on by itself."""
        seen = self.world.seen()
        if self.kind not in MAY_END or seen.phase != "failed":
            self._wrong.append(str(error))
            return
        self._extra["stopped"] = seen.error
        if not is_named(self.kind, self.victim.name, seen.error):
            self._wrong.append(f"{self.kind} on {self.victim.name} is not what is named: {seen.error}")
        self._plug.heal(self.kind)
        begun = time.monotonic()
        try:
            self.world.user.types("resume", self.world.run_id, "--detach")
            self.world.until(lambda now: now.step > seen.step and now.attempt > seen.attempt, "it resumes")
            self._extra["resumed_s"] = round(time.monotonic() - begun, 1)
        except AssertionError as problem:
            self._wrong.append(f"resume: {problem}")

    def _follow(self, before: Seen) -> None:
        """What else has to be seen once it trains."""
        begun, world = time.monotonic(), self.world
        if self.kind == "supervisor":
            world.until(lambda _seen: world.state()["epoch"] > self._epoch, "there is another supervisor")
            self._extra["supervisor_s"] = round(time.monotonic() - begun, 1)
        elif self.kind in CUT:
            names = {host.name for host in world.living}
            with suppress(NotBack):
                world.until(lambda _seen: names == set(world.hosts()), "the host takes part again")
                self._extra["whole_s"] = round(time.monotonic() - begun, 1)
            if "whole_s" not in self._extra:
                self._wrong.append(f"{self.victim.name} can be reached again, and takes no part")
        elif self.kind == "clock":
            self._watch_clock(before)

    def _await_stages(self) -> None:
        """The supervisor writes how long the way back took, once it has seen a step."""
        deadline = time.monotonic() + STAGES_S
        while time.monotonic() < deadline:
            names = [event["event"] for event in self._events()]
            if names.count("returned") >= names.count("restarting"):
                return
            time.sleep(0.5)

    def _watch_clock(self, before: Seen) -> None:
        time.sleep(WATCHED_S)
        shown_s = self.world.clock(self.victim) - time.time()
        self._plug.heal("clock")
        time.sleep(RIGHT_S)
        self._extra |= {"ahead_s": self._plug.ahead_s, "shown_s": round(shown_s)}
        if abs(shown_s - self._plug.ahead_s) > WATCHED_S:
            self._wrong.append(f"its rank saw a clock that was off by {shown_s:.0f} s, not {self._plug.ahead_s} s")
        now = self.world.seen()
        if now.attempt > before.attempt or now.phase != "running":
            self._wrong.append(f"it stands at {now}, and stood at {before}")
        self._wrong += [str(event) for event in self._events() if event["event"] in ACCUSING]

    def _judged(self) -> Line:
        """Which causes were named, and how much was lost."""
        events = self._events()
        restarts = [event for event in events if event["event"] == "restarting"]
        whats = [event["what"] for event in restarts]
        lost = max((event["lost_steps"] or 0 for event in restarts), default=0)
        if lost > EVERY + 1:
            self._wrong.append(f"{lost} steps were lost")
        self._wrong += misnamed(self.kind, self.victim.name, whats)
        if whats and self.kind in CAUSES:
            self._require_explained()
        told = [event for event in self.world.told() if event not in self._told_before]
        return {
            "lost_steps": lost,
            "what": whats,
            "told": [
                f"{event['event']}: {str(event.get('what', ''))[:120]}"
                for event in told
                if event["event"] not in {"saving", "exchange", "shares", "resumed"}
            ],
            "returned": [event.get("stages") for event in events if event["event"] == "returned"],
        }

    def _require_explained(self) -> None:
        """`gangline explain` names it, too."""
        try:
            attempts = self.world.explained()["attempts"]
        except (AssertionError, ValueError, subprocess.SubprocessError) as error:
            self._wrong.append(f"explain: {error}")
            return
        said = [each["cause"] or {} for each in attempts if each["attempt"] >= self._attempt]
        named = [error for error in said if is_named(self.kind, self.victim.name, str(error.get("what")))]
        if not named:
            self._wrong.append(f"explain does not name it: {[error.get('what') for error in said][-2:]}")
        elif (fix := FIXES.get(self.kind, "")) not in (words := str(named[-1].get("fix"))):
            self._wrong.append(f"the fix says nothing of {fix}: {words}")
        else:
            self._extra["fix"] = words
