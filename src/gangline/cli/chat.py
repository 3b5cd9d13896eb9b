"""`gangline chat RUN|FOLDER`: talk to a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gangline.cli.options import argument, option
from gangline.context import default_home
from gangline.control.supervision import open_run
from gangline.control.user_command import require_job
from gangline.serve.run_model import chat_with_folder, chat_with_saved, complete, find_saved, is_model_folder


def command(
    target: Annotated[str, argument("RUN|FOLDER", "a run, or a folder with a model or adapter")],
    prompt: Annotated[str | None, option("answer this prompt and exit")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="longest answer, in tokens")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 always picks the likeliest token")] = 0.7,
) -> None:
    """Talk to the newest checkpoint of a run, or to a model folder. Ctrl-C ends the answer, Ctrl-D the chat."""
    options = ["--max-tokens", str(max_tokens), "--temperature", str(temperature)]
    if prompt is not None:
        # one word, so that a prompt that begins with "-" is not an option
        options.append(f"--prompt={prompt}")
    code = _talk(target, options)
    if code != 0:
        raise typer.Exit(code)


def _talk(target: str, options: list[str]) -> int:
    if is_model_folder(Path(target)):
        return chat_with_folder(Path(target), options, home=default_home())
    with open_run(target, home=default_home()) as opened:
        require_job(opened.layout)
        saved = find_saved(opened.layout.run_id, opened.cluster, opened.transports)
        complete(saved, opened.layout.run_id)
        return chat_with_saved(saved, options)
