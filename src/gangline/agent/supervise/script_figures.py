"""Step, loss and tokens per second of the user's own script, read from what rank 0 prints.

Trainers print figures in a few shapes: a progress bar of tqdm, a dictionary (transformers, TRL, Axolotl,
LLaMA-Factory), or a line with names and numbers (torchtitan, nanoGPT, DeepSpeed, Megatron, Lightning). Figures go into
metrics.jsonl, where `gangline.hooks` puts them, too; a script that uses it is not read. A line counts as a step only if
it has a number for the step and a loss; a bar counts if it is that of the training. Where no step is printed, the steps
of the optimizer are those that rank_stacks.py counts.

Standard library only, Python >= 3.8.
"""

from __future__ import annotations

import json
import math
import re
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from gangline.agent.supervise.script_hooks import METRICS

ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
SPACES = re.compile(r"\s+")
NUMBER = r"[-+]?(?:\d[\d,]{0,14}(?:\.\d{0,20})?(?:[eE][-+]?\d{1,3})?|\.\d{1,20}|nan|inf)"
"""Lengths are bounded here and below, so that no line takes long."""
BETWEEN = r"[\"']?\s*[:=]?\s*[\"']?"
BAR = re.compile(
    r"(?:(?P<words>[^|\r\n]{0,80}?)[:\s]\s*)?(?:\d{1,3}%)\s?\|[^|]*\|\s*(?P<step>\d+)/(?P<steps>\d+)\s\[(?P<rest>.*)"
)
"""One state of a bar of tqdm: `Epoch 1:  12%|#2   | 3/25 [00:03<00:21,  1.02it/s, loss=2.31]`."""
STEP = re.compile(
    r"(?<![\w-])(?:global[_ ]step|steps?|iteration|iter|batch_idx)[\"']?\s*[:=#|]?\s*\[?\s*"
    r"(\d+)(?!\d|\.\d)(?:\s*/\s*(\d+))?",
    re.IGNORECASE,
)
LOSS = re.compile(
    rf"(?P<of>[A-Za-z]{{1,12}})?[ _/]?(?<![A-Za-z])loss(?:[/ ]train)?{BETWEEN}(?P<loss>{NUMBER})(?![\w.])",
    re.IGNORECASE,
)
TRAINING = {"train", "training", "lm", "batch", "step", "avg", "mean", "running", "current", "the", "total"}
"""Words before `loss` that leave it the loss of a step of training."""
RATE = re.compile(rf"(?<![\w])(?:lr|learning[_ ]rate){BETWEEN}(?P<rate>{NUMBER})", re.IGNORECASE)
SPEED = re.compile(
    rf"(?:\b(?:tps|throughput|(?:train_)?tok(?:en)?s?(?:/s(?:ec)?|_per_sec(?:ond)?)){BETWEEN}(?P<after>{NUMBER}))"
    rf"|(?<![\d,.])(?:(?P<before>{NUMBER})\s?(?:tok(?:en)?s?/s|tps\b)(?!\s?[:=]))",
    re.IGNORECASE,
)
TOKENS = re.compile(rf"\bnum(?:_input)?_tokens(?:_seen)?{BETWEEN}({NUMBER})")
"""Tokens of all ranks so far, as TRL prints."""
EPOCH = re.compile(r"\bepoch\s*(\d+)(\s*/\s*\d+)?", re.IGNORECASE)
"""Epochs count from 0, as Lightning's do, but `1/3` and so on from 1."""
HELD_OUT = re.compile(
    r"(?<![\w./-])(?:val|valid|validation|validating|eval|evaluation|evaluating|test|testing)(?![\w./-])", re.IGNORECASE
)
"""A word before a loss that makes it one of other data than that of the training."""
NAMED = re.compile(r"\W*(?:r\d+ )?(?:epochs?|steps?|iter|iterations?|train|training|loss)\b", re.IGNORECASE)
"""How the name of a bar of the training begins, if it has one; others load, tokenise, evaluate."""
ROWS_READ = "examples/s"
"""The rate of bars of datasets."""
RATE_S = 1.0
"""The shortest time from which a rate is made."""
PIECE_BYTES = 1 << 18
LAST_PIECES = 64
LINE_BYTES = 1 << 11
"""Of a longer line, its end."""
FIGURES = ("step", "steps", "loss", "learning_rate", "tokens_per_s")


class ScriptFigures:
    """Reads a log as it grows and appends the figures in it to a file of the run."""

    def __init__(self, log: Path, metrics: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._metrics, self._clock = log, metrics, clock
        self._offset = 0
        self._rest = b""
        self._reader = LineReader()
        self._told: Optional[Tuple[int, float]] = None
        """The last step of which there is a line, and when it was read."""

    def look(self) -> None:
        """Read what has come since, and note the last figures of it."""
        if self._log.with_suffix(".step").exists():  # it uses gangline.hooks
            return
        try:
            with self._log.open("rb") as stream:
                stream.seek(self._offset)
                piece = stream.read(PIECE_BYTES)
        except OSError:
            return
        self._offset += len(piece)
        *lines, self._rest = re.split(rb"[\r\n]+", self._rest + piece)
        if not piece and self._rest.endswith(b"]"):  # a bar has no end of line until its next state
            lines, self._rest = [self._rest], b""
        self._rest = self._rest[-LINE_BYTES:]
        texts = (
            line[-LINE_BYTES:].decode("utf-8", "replace") for line in lines if b"oss" in line.lower() or b"%|" in line
        )
        found = [dict(self._reader.figures) for text in texts if self._reader.read(text)]
        # Many states of a bar may come in a second; one is enough.
        kept = [each for each, after in zip(found, [*found[1:], None]) if after is None or _differs(each, after)]
        self._note(kept or self._counted())

    def look_last(self) -> None:
        """The script has ended: read to the end, a last line without an end, too."""
        for _ in range(LAST_PIECES):
            before = self._offset
            self.look()
            if self._offset == before:
                break
        text, self._rest = self._rest.decode("utf-8", "replace"), b""
        self._note([dict(self._reader.figures)] if text and self._reader.read(text) else [])

    def _counted(self) -> List[Dict[str, Any]]:
        """The steps that the optimizer has done, where the script prints none."""
        if self._reader.figures["step"] is not None:
            return []
        try:
            steps = int(self._log.with_suffix(".count").read_text())
        except (OSError, ValueError):
            return []
        if self._told is not None and steps <= self._told[0]:
            return []
        return [dict(self._reader.figures, step=steps, source="optimizer")]

    def _note(self, found: List[Dict[str, Any]]) -> None:
        """Write lines of metrics.jsonl; the last has the time of a step since the last one of before."""
        text, now = "", self._clock()
        for figures in found:
            step_s = None
            if figures is found[-1]:
                done = figures["step"] - self._told[0] if self._told is not None else 0
                step_s = (now - self._told[1]) / done if self._told is not None and done > 0 else None
                self._told = self._told if done == 0 and self._told is not None else (figures["step"], now)
            line = {"kind": "step", "time": datetime.now(timezone.utc).isoformat(), "source": "output", **figures}
            text += json.dumps(dict(line, step_s=step_s)) + "\n"
        if not text:
            return
        try:
            with self._metrics.open("a", encoding="utf-8") as stream:
                stream.write(text)
        except OSError:  # a full disk does not end the run
            pass


def _differs(figures: Dict[str, Any], after: Dict[str, Any]) -> bool:
    """Whether the later ones do not make these needless: another loss, which these have been the first to have."""
    return bool(figures["step"] != after["step"] and figures["loss"] != after["loss"])


class LineReader:
    """Takes the lines of a log, or the states of its bars, one after the other."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.figures: Dict[str, Any] = dict.fromkeys(FIGURES)
        """What was read last; only with a step are they of use."""
        self._clock = clock
        self._bar_steps: Optional[int] = None
        """The length of the bar of the training: of the first bar that may be one."""
        self._epochs_from_0 = False
        self._tokens: List[float] = []
        """Tokens so far, and when that was read."""

    def read(self, line: str) -> bool:
        """Take one line; whether there is something new and a step is known."""
        line = SPACES.sub(" ", ESCAPES.sub("", line))
        bar = BAR.search(line) if "%" in line else None
        if bar is not None:
            return self._bar(bar)
        losses = [found for found in LOSS.finditer(line) if (found["of"] or "train").lower() in TRAINING]
        if not losses or (losses[0]["of"] and "train_runtime" in line):  # the second: a summary at the end
            return False
        is_of_training = (losses[0]["of"] or "").lower().startswith("train")
        if not is_of_training and HELD_OUT.search(line, 0, losses[0].start()):
            return False
        step = STEP.search(line)
        if step is None and self._bar_steps is None and self.figures["step"] is not None:
            return False  # of an epoch, for example
        if step is not None:
            self.figures["step"] = int(step[1])
            self.figures["steps"] = int(step[2]) if step[2] else self.figures["steps"]
        self._numbers(line, losses[0]["loss"])
        return self.figures["step"] is not None

    def _bar(self, bar: Any) -> bool:
        words, step, steps = bar["words"] or "", int(bar["step"]), int(bar["steps"])
        is_other = (words.strip() and not NAMED.match(words)) or HELD_OUT.search(words) or ROWS_READ in bar["rest"]
        if is_other or (self._bar_steps or steps) != steps:
            return False
        self._bar_steps = steps
        epoch = EPOCH.search(words)
        if epoch is not None:
            self._epochs_from_0 = self._epochs_from_0 or epoch[2] is None or int(epoch[1]) == 0
            step = (int(epoch[1]) - (not self._epochs_from_0)) * steps + step
        loss = next((each for each in LOSS.finditer(bar["rest"]) if (each["of"] or "train").lower() in TRAINING), None)
        same = step == self.figures["step"] and loss is None
        self.figures.update(step=step, steps=steps if epoch is None else None)  # of how many epochs is not said
        if loss is not None:
            self._numbers(bar["rest"], loss["loss"])
        return step > 0 and not same

    def _numbers(self, line: str, loss: str) -> None:
        self.figures["loss"] = _number(loss)
        rate, speed, tokens = RATE.search(line), SPEED.search(line), TOKENS.search(line)
        if rate is not None:
            self.figures["learning_rate"] = _number(rate["rate"])
        if speed is not None:
            self.figures["tokens_per_s"] = _number(speed["after"] or speed["before"])
        elif tokens is not None:
            self._count(_number(tokens[1]) or 0.0)

    def _count(self, tokens: float) -> None:
        now = self._clock()
        if self._tokens and now - self._tokens[1] < RATE_S:  # lines that came together
            return
        if self._tokens and tokens > self._tokens[0]:
            self.figures["tokens_per_s"] = (tokens - self._tokens[0]) / (now - self._tokens[1])
        self._tokens = [tokens, now]


def _number(text: str) -> Optional[float]:
    """The number; None for one that is none, which JSON does not have."""
    value = float(text.replace(",", ""))
    return value if math.isfinite(value) else None


def figures_of(request: Mapping[str, Any]) -> Optional[ScriptFigures]:
    """What reads the log of rank 0, on its host; None elsewhere, and for our own worker, which tells its steps."""
    if request.get("program") != "command" or 0 not in request.get("ranks", ()):
        return None
    folder = Path(request["rank_files"])
    return ScriptFigures(folder / "rank-0.log", folder.parents[1] / METRICS)
