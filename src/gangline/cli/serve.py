"""`gangline serve RUN|FOLDER`: a model as an endpoint for OpenAI's clients."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gangline.cli.options import argument, option
from gangline.cli.output import Terminal, print_data
from gangline.context import default_home
from gangline.control.served_endpoints import (
    ServeRequest,
    begin_endpoint,
    endpoint_log,
    read_endpoint,
    serve_model,
)
from gangline.errors import UsageError
from gangline.runs.registry import find_run
from gangline.serve.push import is_adapter_folder
from gangline.serve.run_model import is_model_folder
from gangline.serve.served_model import Endpoint


def command(  # noqa: PLR0913  (options of a command line)
    target: Annotated[str, argument("RUN|FOLDER", "a run, or a folder with a model or adapter")],
    on: Annotated[
        list[str] | None,
        option("serve a run on this host of it; more than once, or `all`: each has some of the layers", "HOST"),
    ] = None,
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
    detach: Annotated[bool, typer.Option("--detach", help="return once it answers; gangline stop ends it")] = False,
) -> None:
    """Serve the newest checkpoint of a run, or a model folder, in OpenAI's form, until Ctrl-C or `gangline stop`.

    It answers on 127.0.0.1 only and takes only requests with the key that it prints. The checkpoint of another host is
    served there, or where --on says, and ssh brings the port here. Over several hosts a model may be larger than any
    of them. With --detach it is listed by `gangline ps` as serve-NAME.
    """
    console, home = Terminal(), default_home()
    _refuse_gguf(Path(target))
    is_folder = is_model_folder(Path(target))
    if is_folder and on:
        raise UsageError(
            "--on is for a run, whose hosts are known",
            seen=f"{target} is a folder of this computer",
            fix="leave --on out, or name the run",
        )
    if not is_folder:
        target = find_run(home, target).run_id
    asked = ServeRequest(
        target=str(Path(target).resolve()) if is_folder else target,
        name=name,
        options=(*_limits(port, parallel, context, waiting), *_adapters(adapter or [])),
        has_adapters=bool(adapter),
        hosts=tuple(on or ()),
    )

    def ready(endpoint: Endpoint) -> None:
        console.clear()
        for line in endpoint.told():
            console.report(line)
        _print_access(endpoint.url, endpoint.token)
        console.report(f"serving {', '.join(endpoint.models)} for programs with this key; Ctrl-C ends it")

    if not detach:
        serve_model(asked, home=home, console=console, on_ready=ready)
    layout, key = begin_endpoint(asked, name or Path(asked.target).name, home=home, console=console)
    console.clear()
    for line in endpoint_log(layout, follow=False):
        console.report(line)
    state = read_endpoint(layout)
    _print_access(str(state.url if state else None), key)
    console.report(f"gangline logs {layout.endpoint_id}; gangline stop {layout.endpoint_id}; its key: {layout.key}")


def _refuse_gguf(path: Path) -> None:
    """llama.cpp reads these files; no engine here does."""
    if is_model_folder(path) or not (path.is_file() if path.suffix == ".gguf" else any(path.glob("*.gguf"))):
        return
    raise UsageError(
        f"{path}: GGUF files are not served here",
        seen="expected a run, or a folder with config.json and safetensors files",
        fix="serve the run or the folder that it was made from; or take llama.cpp's own server: "
        "llama-server -m FILE --host 127.0.0.1 --api-key KEY",
    )


def _print_access(url: str, key: str) -> None:
    print_data([f"OPENAI_BASE_URL={url}", f"OPENAI_API_KEY={key}"])


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
        if not name or not is_adapter_folder(Path(folder)):
            raise UsageError(
                f"--adapter {each}",
                seen="expected NAME=FOLDER, with adapter_config.json in the folder",
                fix="gangline export RUN writes such a folder",
            )
        found.append(f"--adapter={name}={Path(folder).absolute()}")
    return found
