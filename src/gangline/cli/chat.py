"""`gangline chat RUN|FOLDER|URL`: talk to a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gangline.cli.options import argument, option
from gangline.context import default_home
from gangline.control.supervision import open_run
from gangline.control.user_command import require_job
from gangline.errors import UsageError
from gangline.serve.evaluation import BASE
from gangline.serve.run_model import (
    chat_with_endpoint,
    chat_with_folder,
    chat_with_saved,
    complete,
    find_saved,
    is_model_folder,
    refuse_killed,
)


def command(
    target: Annotated[str, argument("RUN|FOLDER|URL", "a run, a folder with a model or adapter, or an endpoint")],
    prompt: Annotated[str | None, option("answer this prompt and exit")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="longest answer, in tokens")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 always picks the likeliest token")] = 0.7,
    against: Annotated[
        str | None,
        option("who answers, too: `base`, the model before training; at an endpoint any model", "NAME"),
    ] = None,
    model: Annotated[str | None, option("name of the model at an endpoint; by default its first one")] = None,
) -> None:
    """Talk to the newest checkpoint of a run, to a model folder, or to an endpoint such as that of `gangline serve`.

    Ctrl-C ends the answer, Ctrl-D the chat, /save FILE writes it. The key of an endpoint is read from OPENAI_API_KEY.
    """
    options = ["--max-tokens", str(max_tokens), "--temperature", str(temperature)]
    if prompt is not None:
        # one word, so that a prompt that begins with "-" is not an option
        options.append(f"--prompt={prompt}")
    if target.startswith(("http://", "https://")):
        named = {"--model": model, "--against": against}
        options += [f"{word}={name}" for word, name in named.items() if name is not None]
        code = chat_with_endpoint(target, options)
    else:
        code = refuse_killed(_talk(target, [*options, *_of_models(against, model)]))
    if code != 0:
        raise typer.Exit(code)


def _of_models(against: str | None, model: str | None) -> list[str]:
    if model is not None:
        raise UsageError("--model is for an endpoint", seen="expected http://HOST:PORT/v1", fix="leave it out")
    if against not in {None, BASE}:
        raise UsageError(f"--against {against}", seen=f"expected {BASE}", fix=f"--against {BASE}")
    return ["--against-base"] if against else []


def _talk(target: str, options: list[str]) -> int:
    if is_model_folder(Path(target)):
        return chat_with_folder(Path(target), options, home=default_home())
    with open_run(target, home=default_home()) as opened:
        require_job(opened.layout)
        saved = find_saved(opened.layout.run_id, opened.cluster, opened.transports)
        complete(saved, opened.layout.run_id)
        return chat_with_saved(saved, options)
