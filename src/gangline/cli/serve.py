"""`gangline serve RUN|FOLDER`: a model as an endpoint for OpenAI's clients."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gangline.cli.options import argument, option
from gangline.cli.output import Terminal, print_data
from gangline.context import default_home
from gangline.control.supervision import open_run
from gangline.control.user_command import require_job
from gangline.errors import UsageError
from gangline.serve.run_model import complete, find_saved, is_model_folder
from gangline.serve.served_model import Endpoint, serve_folder, serve_saved


def command(  # noqa: PLR0913  (options of a command line)
    target: Annotated[str, argument("RUN|FOLDER", "a run, or a folder with a model or adapter")],
    name: Annotated[str | None, option("name of the model; by default that of the run or folder")] = None,
    adapter: Annotated[
        list[str] | None, option("serve this adapter too, over the same base; more than once", "NAME=FOLDER")
    ] = None,
    port: Annotated[int, option("port on 127.0.0.1; by default one that is free")] = 0,
    parallel: Annotated[int, typer.Option(min=1, help="answers that are made at the same time")] = 4,
    context: Annotated[
        int | None,
        option("tokens of prompt and answer for each; by default as many as model and memory have", "TOKENS"),
    ] = None,
    waiting: Annotated[int, typer.Option(min=0, help="requests that may wait beyond those")] = 256,
) -> None:
    """Serve the newest checkpoint of a run, or a model folder, in OpenAI's form, until Ctrl-C.

    It answers on 127.0.0.1 only and takes only requests with the key that it prints. The checkpoint of another host is
    served there, and ssh brings the port here.
    """
    console = Terminal()
    options = [*_limits(port, parallel, context, waiting), *_adapters(adapter or [])]

    def ready(endpoint: Endpoint) -> None:
        console.clear()
        for line in endpoint.told():
            console.report(line)
        print_data([f"OPENAI_BASE_URL={endpoint.url}", f"OPENAI_API_KEY={endpoint.token}"])
        console.report(f"serving {', '.join(endpoint.models)} for programs with this key; Ctrl-C ends it")

    if is_model_folder(Path(target)):
        folder = Path(target).resolve()
        console.progress("loading the model")
        serve_folder(folder, [*options, f"--name={name or folder.name}"], home=default_home(), on_ready=ready)
        return
    with open_run(target, home=default_home()) as opened:
        require_job(opened.layout)
        console.progress("verifying the checkpoint")
        saved = find_saved(opened.layout.run_id, opened.cluster, opened.transports)
        if adapter and saved.place.host.transport != "local":
            raise UsageError(
                "--adapter is for a model on this computer",
                seen=f"the checkpoint lies on {saved.place.host.name}",
                fix="gangline export writes it here; serve that folder",
            )
        complete(saved, opened.layout.run_id, console=console)
        console.progress("loading the model")
        serve_saved(saved, [*options, f"--name={name or opened.layout.run_id}"], on_ready=ready)


def _limits(port: int, parallel: int, context: int | None, waiting: int) -> list[str]:
    if not 0 <= port <= 65535:
        raise UsageError(f"--port {port}", seen="expected 0 to 65535", fix="leave it out for a port that is free")
    if context is not None and context < 2:
        raise UsageError(
            f"--context {context}", seen="expected 2 or more tokens", fix="leave it out for the model's own"
        )
    limits = [f"--port={port}", f"--parallel={parallel}", f"--waiting={waiting}"]
    return limits if context is None else [*limits, f"--context={context}"]


def _adapters(given: list[str]) -> list[str]:
    found = []
    for each in given:
        name, _, folder = each.partition("=")
        if not name or not (Path(folder) / "adapter_config.json").is_file():
            raise UsageError(
                f"--adapter {each}",
                seen="expected NAME=FOLDER, with adapter_config.json in the folder",
                fix="gangline export RUN writes such a folder",
            )
        found.append(f"--adapter={name}={Path(folder).absolute()}")
    return found
