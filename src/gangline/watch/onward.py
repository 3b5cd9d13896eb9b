"""What to type so that a run goes on, or why nothing has to be typed."""

from __future__ import annotations

from dataclasses import dataclass

from gangline.watch.story import Attempt, Story


@dataclass(frozen=True, slots=True, kw_only=True)
class Onward:
    """A command, and what it does; or no command, and why none is needed."""

    command: str | None
    why: str


def onward(story: Story, *, is_job: bool, can_resume: bool) -> Onward:
    """How the run goes on from where it stands.

    is_job: it is no command of the user's own. can_resume: it can be started again.
    """
    run_id, phase = story.id, story.run.phase
    if phase in {"stopped", "failed"}:
        return _again(story, is_job=is_job, can_resume=can_resume)
    if phase == "lost":
        return Onward(
            command=f"gangline stop {run_id} && gangline resume {run_id}",
            why="the first saves and ends what is left of it",
        )
    if phase == "running" and len(story.attempts) > 1:
        return Onward(command=None, why=f"nothing to do: it runs; {_went_on(story.attempts[-1])}")
    return Onward(command=None, why=_waiting(run_id).get(phase, "its state.json cannot be read; gangline ps lists all"))


def _waiting(run_id: str) -> dict[str, str]:
    return {
        "preparing": "nothing yet: a command on this computer prepares an attempt",
        "running": f"nothing to do: it runs; gangline attach {run_id} follows it",
        "stopping": "wait until it has ended: its ranks save and leave",
        "restarting": "nothing to do: the next attempt begins by itself",
        "finished": "nothing to do: it has finished",
    }


def _went_on(last: Attempt) -> str:
    event = last.begun_by
    if event is None:
        return f"attempt {last.number} was begun by gangline resume"
    step = event.get("step")
    return f"attempt {last.number} went on {f'from step {step}' if step else 'from the beginning'} by itself"


def _again(story: Story, *, is_job: bool, can_resume: bool) -> Onward:
    if not can_resume:
        return Onward(
            command=None,
            why="start it anew with gangline run: without --resume-flag nothing says how your command goes on",
        )
    steps = [attempt.committed for attempt in story.attempts if attempt.committed is not None]
    if not is_job:
        why = "starts your command again, with the words of --resume-flag"
    elif steps:
        why = f"from the newest checkpoint that is whole; step {steps[-1]} was committed last"
    else:
        why = "from the beginning: no checkpoint was committed"
    return Onward(command=f"gangline resume {story.id}", why=why)
