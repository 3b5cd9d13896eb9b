"""The addresses of a run's messages: read where the job says, and laid beside its supervisor for this user alone."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from gangline.context import Context, load_settings
from gangline.control.user_command import CommandRecord
from gangline.errors import GanglineError, HostKeyRefused, HostUnreachable, RunFailed, UsageError
from gangline.provision.trees import host_layout
from gangline.runs.cluster import Host
from gangline.runs.job import Job, NotifyJob
from gangline.runs.layout import RunLayout
from gangline.runs.record_versions import encode_record, load_if_there
from gangline.supervise.sinks import SinkAddresses, is_web
from gangline.transport.transport import AGENT

MOST_CHARS = 4096
IMPORT_S = 60.0


def settled(
    notify: NotifyJob | None, context: Context, *, waits_in_queue: bool = False, is_trial: bool = False
) -> NotifyJob | None:
    """Who gets the messages of a new run: who its request says, else who the user's settings say.

    waits_in_queue: it waits for Slurm, which has messages of its own. is_trial: it is one run of a sweep. Settings hold
    for neither. Raises UsageError unless every address can be read here, SpecError for mistakes in the settings.
    """
    if notify is None and not is_trial:
        notify = load_settings(context.home)
        if notify is not None and notify.has_receiver and waits_in_queue:
            context.console.report(
                "no messages by your settings: Slurm has its own, by slurm.options: [--mail-type=...]"
            )
            return None
    require_addresses(notify, context.deps.variables, waits_in_queue=waits_in_queue)
    return notify


def notify_of(layout: RunLayout) -> NotifyJob | None:
    """Who gets the messages of a run."""
    if (command := CommandRecord.of(layout)) is not None:
        return command.notify
    job = load_if_there(layout.job, Job)
    return None if job is None else job.notify


def require_addresses(notify: NotifyJob | None, variables: Mapping[str, str], *, waits_in_queue: bool = False) -> None:
    """Raise UsageError unless every address can be read here, before anything is changed."""
    if notify is None or not notify.has_receiver:
        return
    if waits_in_queue:
        raise UsageError(
            "notify is not available for a run that waits in the queue of Slurm",
            seen="its supervisor starts on a node, which has none of this shell's variables",
            fix="leave notify out and use Slurm's own: cluster.yaml, slurm.options: [--mail-type=END,FAIL]",
        )
    _addresses(notify, variables)


def place_addresses(
    layout: RunLayout, attempt: int, context: Context, *, there: tuple[Host, RunLayout] | None = None
) -> None:
    """Lay the addresses beside the supervisor of an attempt. there: its host and folder; None: this computer.

    Raises UsageError, RunFailed where apprise is not installed there.
    """
    notify = notify_of(layout)
    if notify is None or not notify.has_receiver:
        return
    addresses = SinkAddresses(
        urls=_addresses(notify, context.deps.variables),
        command=notify.command,
        events=notify.events,
        since=attempt,
    )
    needs_apprise = not all(map(is_web, addresses.urls))
    if there is None:
        if needs_apprise and importlib.util.find_spec("apprise") is None:
            raise _no_apprise("this computer")
        addresses.save(layout.sinks)
        return
    head, folder = there
    remote = context.transports[head.name]
    if needs_apprise and remote.run((AGENT, "python", "-c", "import apprise"), timeout_s=IMPORT_S).returncode:
        raise _no_apprise(head.name)
    remote.write(folder.sinks, encode_record(addresses.to_json(), folder.sinks))


@contextlib.contextmanager
def addresses_on(layout: RunLayout, attempt: int, context: Context, hosts: Sequence[Host]) -> Iterator[None]:
    """Lay the addresses on these hosts, for a supervisor that is started meanwhile; they are taken away where none is.

    Raises as `place_addresses` does.
    """
    is_placed = False
    try:
        for host in hosts:
            place_addresses(layout, attempt, context, there=(host, host_layout(host, layout.run_id)))
        is_placed = True
        yield
    except GanglineError as error:
        is_silent = isinstance(error, HostUnreachable) and not isinstance(error, HostKeyRefused)
        if not (is_placed and is_silent):  # otherwise it may have started
            _take_away(layout, context, hosts)
        raise


def _take_away(layout: RunLayout, context: Context, hosts: Sequence[Host]) -> None:
    notify = notify_of(layout)
    for host in hosts if notify is not None and notify.has_receiver else ():
        with contextlib.suppress(GanglineError, OSError):
            context.transports[host.name].run(("rm", "-f", str(host_layout(host, layout.run_id).sinks)))


def _no_apprise(where: str) -> RunFailed:
    return RunFailed(
        f"messages cannot be sent from {where}",
        seen="an address in notify is one of apprise, which is not installed there",
        fix="pip install 'gangline[notify]' for the Python of the supervisor, or name an https address or a command",
    )


def _addresses(notify: NotifyJob, variables: Mapping[str, str]) -> tuple[str, ...]:
    """What the places hold; raises UsageError."""
    return tuple(_address(place, variables) for place in notify.to)


def _address(place: str, variables: Mapping[str, str]) -> str:
    kind, _, name = place.partition(":")
    if kind == "env":
        text = variables.get(name, "")
        seen, fix = f"the variable {name} is not set", f"export {name}=ADDRESS before the start"
    else:
        text, seen, fix = _first_line(Path(name))
    text = text.strip()
    if not text or "://" not in text or len(text) > MOST_CHARS or not text.isprintable():
        raise UsageError(
            f"notify: no address in {place}",
            seen=seen if not text else "what stands there is no address such as https://... or mailto://...",
            fix=fix,
        )
    return text


def _first_line(path: Path) -> tuple[str, str, str]:
    """The address in a file; what is wrong where there is none, and what to do."""
    fix = f"write the address into it, for you alone: chmod 600 {path}"
    try:
        if path.stat().st_mode & 0o077:
            return "", "other users of this computer can read the file", f"chmod 600 {path}"
        with path.open(encoding="utf-8") as stream:
            return stream.readline(MOST_CHARS + 1), "the file is empty", fix
    except (OSError, ValueError) as error:
        return "", str(getattr(error, "strerror", None) or error), fix
