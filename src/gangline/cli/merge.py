"""`gangline merge FOLDER:WEIGHT ... --to DIR`: make one adapter out of several over the same base model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from gangline.cli.options import argument, option
from gangline.cli.output import Terminal, print_data
from gangline.context import default_home
from gangline.control.model_card import write_merge_card
from gangline.errors import UsageError
from gangline.provision.ask import ask_worker
from gangline.provision.code import trainer_here
from gangline.report.commands import quoted
from gangline.transport.local import LocalTransport

METHODS = (
    "cat, svd, linear, ties, dare_linear, dare_ties, magnitude_prune, "
    "ties_svd, dare_linear_svd, dare_ties_svd, magnitude_prune_svd"
)


def command(
    adapters: Annotated[list[str], argument("FOLDER:WEIGHT...", "folders of exported adapters with their weights")],
    to: Annotated[Path, option("new folder to write", "DIR")],
    method: Annotated[str, option(f"one of peft's: {METHODS}", "METHOD")] = "cat",
    density: Annotated[float | None, option("part of the values that ties, dare and magnitude_prune keep")] = None,
    rank: Annotated[int | None, option("rank of the result, for svd and methods that end with it")] = None,
    seed: Annotated[int, option("for dare, which drops values at random")] = 0,
) -> None:
    """Make one adapter out of several over the same base model, load it again and compare. Prints its folder.

    cat is exact, with the sum of the ranks; svd has a rank that you choose; linear and the others are approximations.
    """
    if to.exists():
        raise UsageError(f"{to} exists", seen="expected a new folder", fix="remove it, or name another one: --to DIR")
    if method not in METHODS.split(", "):
        raise UsageError(f"--method {method}: peft has no such method", seen=f"expected {METHODS}", fix="--method cat")
    words = ["merge", "--to", str(to.absolute()), "--method", method, f"--seed={seed}"]
    for each in adapters:
        folder, weight = _parsed(each)
        words += ["--adapter", str(folder.absolute()), f"--weight={weight!r}"]
    words += [] if density is None else [f"--density={density!r}"]
    words += [] if rank is None else [f"--rank={rank}"]
    console, here = Terminal(), trainer_here(default_home())
    record = ask_worker(
        here, LocalTransport(here), words, on_progress=lambda each: console.progress(str(each.get("text", "")))
    )
    write_merge_card(Path(record["folder"]))
    console.clear()
    console.report(
        f"rank {record['rank']}; loaded again: logits differ by {record['max_logit_difference']:.2g} at the most"
    )
    print_data([record["folder"]])
    console.report(f"talk to it: gangline chat {quoted(record['folder'])}")


def _parsed(text: str) -> tuple[Path, float]:
    """A folder and its weight. Raises UsageError."""
    folder, _, weight = text.rpartition(":")
    try:
        number = float(weight)
    except ValueError:
        number = None
    if not folder or number is None:
        raise UsageError(
            f"{text}: the weight is missing",
            seen="expected FOLDER:WEIGHT",
            fix=f"{quoted(text)}:0.5 takes half of it; the adapter of a run: gangline export RUN",
        )
    if not Path(folder).is_dir():
        raise UsageError(
            f"{folder} is no folder",
            seen="expected one with an adapter",
            fix="the adapter of a run: gangline export RUN writes it and prints its folder",
        )
    return Path(folder), number
