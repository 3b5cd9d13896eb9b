"""Addresses of messages: read before anything is changed, from a variable or a private file, and nowhere else."""

from __future__ import annotations

from pathlib import Path, PurePath

import pytest

from gangline.config.load import load_job
from gangline.context import REAL, Context, Dependencies
from gangline.control.notify import addresses_on, require_addresses, settled
from gangline.errors import GanglineError, HostKeyRefused, HostUnreachable, RunFailed, UsageError
from gangline.runs.cluster import Host
from gangline.runs.job import MESSAGE_KINDS, Job, NotifyJob
from gangline.runs.layout import RunLayout
from tests.fakes.transport import Call, FakeTransport, Scripted


class Screen:
    """What is reported."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def report(self, line: str) -> None:
        self.lines.append(line)

    def progress(self, line: str) -> None:
        """Nothing that stays."""


def job(tmp_path: Path, notify: str) -> Job:
    path = tmp_path / "job.yaml"
    path.write_text(f"model: some/model\ndata: {{train: rows.jsonl}}\nbatch: 8\nnotify: {notify}\n", encoding="utf-8")
    (tmp_path / "rows.jsonl").write_text("{}\n", encoding="utf-8")
    return load_job(path)


def test_a_place_alone_is_where_the_address_stands(tmp_path: Path) -> None:
    assert job(tmp_path, "env:NTFY").notify == NotifyJob(to=("env:NTFY",), events=MESSAGE_KINDS)
    assert job(tmp_path, "{to: file:ntfy, events: failed}").notify == NotifyJob(
        to=(f"file:{tmp_path / 'ntfy'}",), events=("failed",)
    )


@pytest.mark.parametrize("notify", ["https://ntfy.example/secret", "{events: failed}", "{to: env:A, events: party}"])
def test_an_address_in_the_job_nobody_to_tell_and_unknown_kinds_are_refused(tmp_path: Path, notify: str) -> None:
    with pytest.raises(GanglineError, match=r"notify"):
        job(tmp_path, notify)


def test_what_can_be_read_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "ntfy").write_text("ntfys://topic\n", encoding="utf-8")
    (tmp_path / "ntfy").chmod(0o600)
    require_addresses(job(tmp_path, "[env:HOOK, file:ntfy]").notify, {"HOOK": "https://example.org/hook"})


@pytest.mark.parametrize(
    ("place", "variables", "text", "mode", "seen"),
    [
        ("env:HOOK", {}, "", 0o600, "the variable HOOK is not set"),
        ("env:HOOK", {"HOOK": "of-nobody-9"}, "", 0o600, "no address such as"),
        ("file:none", {}, "", 0o600, "No such file"),
        ("file:ntfy", {}, "", 0o600, "the file is empty"),
        ("file:ntfy", {}, "ntfys://topic", 0o644, "other users of this computer can read the file"),
    ],
)
def test_what_cannot_be_used_is_refused_and_not_quoted(
    tmp_path: Path, place: str, variables: dict[str, str], text: str, mode: int, seen: str
) -> None:
    (tmp_path / "ntfy").write_text(text, encoding="utf-8")
    (tmp_path / "ntfy").chmod(mode)
    with pytest.raises(UsageError, match=r"no address in") as refused:
        require_addresses(job(tmp_path, place).notify, variables)
    assert seen in str(refused.value)
    assert "of-nobody-9" not in str(refused.value)


def test_a_run_in_the_queue_of_slurm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"queue of Slurm"):
        require_addresses(job(tmp_path, "env:HOOK").notify, {"HOOK": "https://example.org"}, waits_in_queue=True)


@pytest.mark.parametrize(("text", "told"), [("notify: none\n", False), ("notify: env:HOOK\n", True)])
def test_settings_that_do_not_hold_in_the_queue_of_slurm_are_told_where_they_name_somebody(
    tmp_path: Path, text: str, told: bool
) -> None:
    (tmp_path / "settings.yaml").write_text(text, encoding="utf-8")
    screen = Screen()
    context = Context(transports={}, home=tmp_path, console=screen, deps=REAL)
    assert not (found := settled(None, context, waits_in_queue=True)) or not found.has_receiver
    assert any("Slurm has its own" in line for line in screen.lines) == told


def test_without_notify_nothing_is_asked(tmp_path: Path) -> None:
    said_nobody = job(tmp_path, "none").notify
    assert said_nobody == NotifyJob()
    require_addresses(said_nobody, {}, waits_in_queue=True)
    require_addresses(None, {})


HOSTS = tuple(Host(name=name, workdir=f"/home/{name}", python="python3", transport="ssh") for name in ("pc1", "pc2"))


@pytest.mark.parametrize(
    ("error", "left"),
    [(RunFailed("no supervisor came up"), 0), (HostKeyRefused("pc1 has another key"), 0), (HostUnreachable("?"), 2)],
)
def test_addresses_lie_on_no_host_where_no_supervisor_has_started(
    tmp_path: Path, error: GanglineError, left: int
) -> None:
    def answer(call: Call) -> Scripted:
        transports[call.argv[-1].split("/")[2]].files.pop(PurePath(call.argv[-1]))
        return Scripted()

    transports = {host.name: FakeTransport(host.name, answer=answer) for host in HOSTS}
    layout = RunLayout(tmp_path, "calm-otter-7")
    layout.folder.mkdir(parents=True)
    job(tmp_path, "env:HOOK").save(layout.job)
    deps = Dependencies(variables={"HOOK": "https://example.org/hook"})
    context = Context(transports=transports, home=tmp_path, console=Screen(), deps=deps)

    def start() -> None:
        with addresses_on(layout, 1, context, HOSTS):
            assert [list(each.files) for each in transports.values()] == [
                [PurePath(f"/home/{host.name}/runs/calm-otter-7/notify.secret")] for host in HOSTS
            ]
            raise error

    with pytest.raises(type(error)):
        start()
    assert sum(len(each.files) for each in transports.values()) == left
