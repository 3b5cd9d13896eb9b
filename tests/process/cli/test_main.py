"""The command line: quick, quiet, and with an exit code for every kind of trouble."""

from __future__ import annotations

import errno
import io
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gangline.cli import main as cli
from gangline.cli.main import VERBS, command_of, help_text, main
from gangline.errors import CheckFailed, DoesNotFit, GanglineError, HostUnreachable, RunFailed, SpecError
from gangline.runs.cluster import Cluster, Host
from gangline.runs.files import write_atomic, write_json
from gangline.runs.layout import RunLayout
from gangline.runs.state import RunState, append_event

GOLDEN = Path(__file__).parent / "options.txt"

ALWAYS = {"gangline.cli.main", "gangline.cli.signals"}
TYPED = {"gangline.cli.options", "gangline.cli.usage"}
"""What every verb needs to be read."""
HEAVY = {"torch", "transformers", "numpy", "peft", "datasets", "textual", "tokenizers", "safetensors"}

PROBE = """
import sys
from gangline.cli.main import main
code = main(sys.argv[1:])
import json
sys.stderr.write("\\nMODULES " + json.dumps(sorted({name.split(".")[0] for name in sys.modules})))
sys.stderr.write("\\nVERBS " + json.dumps(sorted(name for name in sys.modules if name.startswith("gangline.cli."))))
sys.exit(code)
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GANGLINE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def probe(*words: str) -> tuple[int, set[str], set[str]]:
    """Exit code, top-level modules and verb modules of a fresh interpreter that ran these words."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *words], capture_output=True, text=True, timeout=60, check=False
    )
    found = {line.split(" ", 1)[0]: line.split(" ", 1)[1] for line in done.stderr.splitlines() if " [" in line}
    return done.returncode, set(json.loads(found["MODULES"])), set(json.loads(found["VERBS"]))


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_the_help_of_a_verb_imports_that_verb_only_and_nothing_heavy(verb: str) -> None:
    code, modules, verbs = probe(verb, "--help")
    assert code == 0
    assert not modules & (HEAVY | {"rich", "pydantic"})
    assert verbs - ALWAYS - TYPED == {"gangline.cli.output", VERBS[verb][0]} - (
        {"gangline.cli.output"} if verb == "chat" else set()
    )


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("ps",), 0),
        (("ps", "--json"), 0),
        (("schema", "cluster"), 0),
        (("plan", "nothing.yaml"), 2),
        (("train", "nothing.yaml"), 2),
        (("resume", "x"), 2),
        (("logs", "x"), 2),
        (("save", "x"), 2),
        (("profile", "x"), 2),
        (("stop", "x"), 2),
        (("attach", "x"), 2),
        (("export", "x"), 2),
        (("chat", "x"), 2),
        (("check", "nothing.yaml"), 2),
    ],
)
def test_no_verb_of_the_controller_imports_torch_or_its_world(words: tuple[str, ...], code: int) -> None:
    seen, modules, _ = probe(*words)
    assert seen == code
    assert not modules & HEAVY


USAGES = {
    "plan": "[OPTIONS] JOB [KEY=VALUE ...]",
    "run": "[OPTIONS] -- CMD ...",
    "ps": "[OPTIONS] [RUN]",
    "recipes": "[OPTIONS] [ls|cp] [RECIPE]",
    "convert": "[OPTIONS] FILE ...",
}


@pytest.mark.parametrize("verb", USAGES)
def test_help_is_written_for_people(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    usage, _, rest = capsys.readouterr().out.partition("\n")
    assert usage == f"Usage: gangline {verb} {USAGES[verb]}"
    arguments = rest.partition("Arguments:")[2].partition("Options:")[0]
    assert arguments
    assert "<" not in arguments  # typer's types of Python


def test_help_costs_less_than_150_ms() -> None:
    """CPU time of the child, the best of several tries; twice the bar, because the machine may be busy."""

    def cpu_s() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-m", "gangline.cli.main", "--help"], capture_output=True, timeout=60, check=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(cpu_s() for _ in range(5)) < 0.3


def test_help_needs_no_typer() -> None:
    _, modules, verbs = probe("--help")
    assert "typer" not in modules
    assert verbs == ALWAYS


def test_verbs_that_only_read_records_import_nothing_of_a_start() -> None:
    """Plans, checks and what is brought to hosts take 0.1 s to import."""
    verbs = ("ps", "attach", "logs", "stop", "export", "chat")
    program = f"import sys, {', '.join(f'gangline.cli.{verb}' for verb in verbs)}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    rooms = {".".join(name.split(".")[:2]) for name in done.stdout.split()}
    assert "gangline.report" in rooms
    assert not rooms & {"gangline.decide", "gangline.checks", "gangline.app"}
    assert not set(done.stdout.split()) & {"gangline.control.start", "gangline.provision.environment"}


def test_the_options_of_every_verb_are_the_agreed_ones() -> None:
    """A changed line here is a changed promise: update options.txt together with the docs."""
    assert options() == GOLDEN.read_text(encoding="utf-8")


def options() -> str:
    import typer

    rows = []
    for verb in VERBS:
        command = typer.main.get_command(command_of(verb))
        names = ["/".join(parameter.opts + parameter.secondary_opts) for parameter in command.params]
        rows.append(f"{verb}: {' '.join(names)}".rstrip())
    return "\n".join(rows) + "\n"


def test_the_list_of_verbs_is_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--help"], ["-h"]):
        assert main(words) == 0
        assert capsys.readouterr().out == help_text()
    assert all(f"  {verb} " in help_text() for verb in VERBS)
    assert max(map(len, help_text().splitlines())) <= 80


def test_importing_gangline_imports_nothing_else() -> None:
    code = "import sys, gangline; print([m for m in sys.modules if m.startswith(('gangline.', 'pydantic', 'typer'))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_an_unknown_verb_says_what_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert "did you mean gangline train?" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["ps", "--jsno"], ["train"], ["schema", "gang"], ["chat", "x", "--max-tokens", "0"]])
def test_a_wrong_option_is_a_usage_error(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err != ""


def raising(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_words: list[str]) -> int:
        raise error

    monkeypatch.setattr(cli, "_dispatch", fail)


@pytest.mark.parametrize(
    ("kind", "code"),
    [(GanglineError, 1), (SpecError, 2), (CheckFailed, 3), (HostUnreachable, 4), (RunFailed, 5), (DoesNotFit, 6)],
)
def test_every_error_has_three_parts_and_its_exit_code(
    kind: type[GanglineError], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raising(kind("pc1 is off", seen="no \x1b[31manswer", fix="switch it on"), monkeypatch)
    assert main([]) == code
    assert capsys.readouterr().err == "error: pc1 is off\n  seen  no answer\n  fix   switch it on\n"


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    raising(KeyboardInterrupt(), monkeypatch)
    assert main([]) == 130
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "words", "todo"),
    [
        (errno.ENOSPC, "its disk is full", "make room there"),
        (errno.EDQUOT, "your quota there is used up", "make room there"),
        (errno.EROFS, "its file system is read-only", "look at its disk"),
    ],
)
@pytest.mark.parametrize("host", ["", "h2: "])
def test_a_disk_that_takes_nothing_more_is_no_bug_and_is_named(
    number: int,
    words: str,
    todo: str,
    host: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    raising(OSError(number, f"{host}{os.strerror(number)}", "/w/runs/x/state.json"), monkeypatch)
    assert main(["ps"]) == RunFailed.exit_code
    what, seen, fix = capsys.readouterr().err.splitlines()
    assert what == f"error: {host or 'this computer: '}{os.strerror(number)}"
    assert seen == f"  seen  expected room for /w/runs/x/state.json; {words}"
    assert todo in fix
    assert ("`workdir` of that host" in fix, "GANGLINE_HOME" in fix) == (bool(host), not host)


def test_a_full_disk_that_does_not_say_where_still_has_three_parts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), monkeypatch)
    assert main(["ps"]) == RunFailed.exit_code
    assert "  seen  expected room for a file; its disk is full" in capsys.readouterr().err


def test_a_file_of_ours_on_a_full_disk_is_named(tmp_path: Path) -> None:
    """A write, unlike an open, does not say which file it was."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            write_atomic(tmp_path / "state.json", b"more than one byte")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, old)
    assert caught.value.filename == str(tmp_path / "state.json")
    assert list(tmp_path.iterdir()) == []


def test_another_error_of_the_system_stays_a_bug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raising(PermissionError(errno.EACCES, "Permission denied", "/w"), monkeypatch)
    assert main(["ps"]) == 1
    assert "this is a bug in gangline" in capsys.readouterr().err


def test_a_bug_is_one_message_that_says_where_the_traceback_is(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raising(ZeroDivisionError("by zero"), monkeypatch)
    assert main(["ps"]) == 1
    text = capsys.readouterr().err
    assert "Traceback" not in text
    assert str(home / "last-traceback.txt") in text
    assert "ZeroDivisionError" in (home / "last-traceback.txt").read_text(encoding="utf-8")
    assert main(["--debug", "ps"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_traceback_cannot_steer_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raising(ValueError("pc1 said \x1b[2J\x9b31mhello\x07"), monkeypatch)
    assert main(["--debug", "ps"]) == 1
    text = capsys.readouterr().err
    assert "pc1 said 31mhello" in text
    assert text.replace("\n", "").isprintable()


def test_what_a_command_writes_is_for_its_owner_whatever_the_umask_of_the_shell(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raising(ZeroDivisionError(), monkeypatch)
    before = os.umask(0o000)
    try:
        main(["ps"])
        assert os.umask(0o000) == 0o000
    finally:
        os.umask(before)
    assert (home.stat().st_mode & 0o777, (home / "last-traceback.txt").stat().st_mode & 0o777) == (0o700, 0o600)


def test_ps_lists_runs_as_a_table_and_as_json(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = RunLayout(home, "calm-otter-7")
    layout.folder.mkdir(parents=True)
    RunState(name="tiny", phase="stopped", attempt=2).save(layout)
    assert main(["ps"]) == 0
    header, row = capsys.readouterr().out.splitlines()
    assert header.split()[:4] == ["run", "job", "phase", "attempt"]
    assert row.split()[:4] == ["calm-otter-7", "tiny", "stopped", "2"]
    assert main(["ps", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema_version"] == 1
    assert document["runs"][0]["id"] == "calm-otter-7"


def test_ps_of_a_run_lists_its_attempts_as_a_table_and_as_json(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = RunLayout(home, "calm-otter-7")
    layout.folder.mkdir(parents=True)
    RunState(name="tiny", phase="stopped", attempt=2).save(layout)
    cluster = Cluster(name="home", hosts=(Host(name="local", workdir=str(home), python="python"),))
    write_json(layout.cluster, cluster.to_json())
    append_event(layout.events, "started", source="supervisor", attempt=1, hosts=["local"])
    append_event(layout.events, "restarting", source="supervisor", attempt=1, next=2, what="row 7", hosts=["local"])
    assert main(["ps", "calm"]) == 0
    header, first, second = capsys.readouterr().out.splitlines()
    assert header.split() == ["attempt", "began", "took", "hosts", "from", "to", "end"]
    assert (first.split()[0], first.split()[-2:]) == ("1", ["row", "7"])
    assert (second.split()[0], second.split()[-1]) == ("2", "stopped")
    assert main(["ps", "calm", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["run"], document["phase"]) == ("calm-otter-7", "stopped")
    assert [row["next"] for row in document["attempts"]] == [True, False]
    assert main(["ps", "wrong"]) == 2


def test_a_reader_that_leaves_early_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    raising(BrokenPipeError(), monkeypatch)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert main(["ps"]) == 0


WAITS = """
import sys
from gangline.cli import main as cli

def help_text():
    print("ready", flush=True)
    sys.stdin.read()
    return "help\\n"

cli.help_text = help_text
sys.exit(cli.main(["--help"]))
"""


def test_a_terminal_that_was_closed_is_no_bug(tmp_path):
    master, slave = os.openpty()
    environment = {**os.environ, "GANGLINE_HOME": str(tmp_path)}
    command = subprocess.Popen(
        [sys.executable, "-c", WAITS], stdin=subprocess.PIPE, stdout=slave, stderr=slave, env=environment
    )
    os.close(slave)
    assert os.read(master, 100).startswith(b"ready")
    os.close(master)
    command.communicate()
    assert command.returncode == 128 + signal.SIGHUP
    assert list(tmp_path.iterdir()) == []
