"""From nothing but a login and some Python to an agent that answers."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from io import BytesIO
from pathlib import Path

import pytest

from gangline.errors import HostUnreachable
from gangline.runs.cluster import Host
from gangline.transport import bootstrap
from gangline.transport.bootstrap import (
    BOOTSTRAP,
    PREPARE_ARGV,
    PREPARE_NEEDS,
    START,
    START_BYTES,
    _sources,
    agent_zipapp,
    compiled_agent_zipapp,
    first_words,
    prepare_words,
    prepare_zipapp,
    remote_command,
)
from gangline.transport.channel import MAGIC
from gangline.transport.local import LocalTransport
from gangline.transport.transport import AGENT
from tests.lab import pythons
from tests.process.transport.sshd import Sshd
from tests.process.transport.test_hostile import shells


def folder_with(tmp_path, **programs):
    """A folder for PATH: a shell, and links to programs; a text is the program itself."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "sh").symlink_to(shutil.which("sh"))
    for name, program in programs.items():
        path = folder / name.replace("_", ".")
        if program.startswith("#!"):
            path.write_text(program)
            path.chmod(0o755)
        else:
            path.symlink_to(program)
    return folder


def boot(path, shell="sh"):
    return subprocess.run(
        [shutil.which(shell), "-c", BOOTSTRAP], input=first_words(), capture_output=True, env={"PATH": str(path)}
    )


@pytest.mark.parametrize("shell", shells())
def test_any_login_shell_starts_the_agent(shell):
    done = boot(os.environ["PATH"], shell)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(MAGIC)


def test_the_command_is_one_line_that_no_shell_reads_in_its_own_way():
    for command in (BOOTSTRAP, remote_command(["true"])):
        assert not set(command) & set("\n\\!`")
        assert command.count("'") == 2
    assert len(START.encode()) <= START_BYTES


@pytest.mark.parametrize("version", ["3.8", "3.9", "3.13"])
def test_the_agent_answers_under_other_pythons(tmp_path, version):
    """As `python3` there, and as the only Python there is."""
    if not pythons.has(version):
        pytest.skip(f"no Python {version} on this machine")
    path = folder_with(tmp_path, **{f"python{version.replace('.', '_')}": pythons.find(version).executable})
    sshd = Sshd(tmp_path)
    sshd.answer_with(path=path)
    transport = sshd.transport()
    assert transport._link.connection().hello.python.startswith(f"{version}.")
    assert transport.run([sys.executable, "-c", "print('hello')"], stdin=b"x", env={"A": "b"}).stdout == "hello\n"
    transport.write(tmp_path / "a" / "b", b"text")
    assert (transport.read(tmp_path / "a" / "b"), transport.names(tmp_path / "a")) == (b"text", ["b"])
    transport.push(tmp_path / "a", tmp_path / "copy")
    transport.pull(tmp_path / "copy", tmp_path / "back")
    assert (tmp_path / "back" / "b").read_bytes() == b"text"
    with pytest.raises(TimeoutError):
        transport.run([sys.executable, "-c", "import time; time.sleep(600)"], timeout_s=0.3)
    transport.close()


@pytest.mark.parametrize("code", [97, 126, 127])
def test_a_python3_of_no_use_is_passed_over_for_another(tmp_path, code):
    path = folder_with(tmp_path, python3=f"#!/bin/sh\nexit {code}\n", python3_11=sys.executable)
    assert boot(path).stdout.startswith(MAGIC)


@pytest.mark.parametrize("zipapp", [agent_zipapp, compiled_agent_zipapp, prepare_zipapp])
@pytest.mark.parametrize("version", ["3.8", "3.13"])
def test_every_program_of_the_agent_can_be_loaded_by_other_pythons(tmp_path, version, zipapp):
    if not pythons.has(version):
        pytest.skip(f"no Python {version} on this machine")
    (tmp_path / "agent.pyz").write_bytes(zipapp())
    program = """
import importlib, sys, warnings, zipfile
warnings.simplefilter("error")
sys.path.insert(0, sys.argv[1])
for name in zipfile.ZipFile(sys.argv[1]).namelist():
    if name.startswith("gangline/agent/") and name.endswith(".py") and not name.endswith("__.py"):
        importlib.import_module(name[:-3].replace("/", "."))
"""
    argv = [pythons.find(version).executable, "-I", "-c", program, tmp_path / "agent.pyz"]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert (done.stderr, done.returncode) == ("", 0)


def test_an_old_python_leaves_before_it_reads_anything(tmp_path):
    found = [name for name in ("3.7", "3.6") if pythons.has(name)]
    if not found:
        pytest.skip("no Python older than 3.8 on this machine")
    old = pythons.find(found[0]).executable
    assert boot(folder_with(tmp_path, python3=old)).returncode == 97
    (tmp_path / "bin" / "python3.12").symlink_to(sys.executable)
    assert boot(tmp_path / "bin").stdout.startswith(MAGIC)


@pytest.mark.parametrize("programs", [{}, {"python3": "#!/bin/sh\nexit 97\n"}])
def test_a_host_without_a_python_of_use_is_told_so(tmp_path, programs):
    sshd = Sshd(tmp_path)
    sshd.answer_with(path=folder_with(tmp_path, **programs))
    with pytest.raises(HostUnreachable, match=r"pc1 has no Python 3\.8 or newer"):
        sshd.transport().home()


def test_without_files_in_memory_the_agent_runs_from_one_that_has_no_name(monkeypatch, tmp_path):
    start = START.replace("os.memfd_create", "os.no_such_thing")
    monkeypatch.setattr(bootstrap, "START", start)
    before = set(Path("/tmp").iterdir())
    assert boot(os.environ["PATH"]).stdout.startswith(MAGIC)
    assert not [path for path in set(Path("/tmp").iterdir()) - before if path.name.startswith("gangline-agent")]


def test_the_same_files_make_the_same_agent():
    build = agent_zipapp.__wrapped__
    assert build() == build()
    assert build() is not build()


def test_this_python_runs_the_byte_code_and_compiles_nothing(tmp_path):
    """The archive has a source that cannot be compiled: only the byte code beside it is read."""
    path = tmp_path / "agent.pyz"
    with zipfile.ZipFile(BytesIO(compiled_agent_zipapp())) as whole, zipfile.ZipFile(path, "w") as broken:
        for name in whole.namelist():
            is_source = name.startswith("gangline/agent/") and name.endswith(".py")
            broken.writestr(name, "no Python" if is_source else whole.read(name))
    done = subprocess.run([sys.executable, "-I", path, "trees", "measure", path], capture_output=True, text=True)
    assert f'"bytes": {path.stat().st_size}' in done.stdout


SUB_ROOMS = {f"gangline/agent/{name}" for name in ("host_facts", "netprobe", "provision", "rpc", "supervise")}


def test_the_agent_holds_its_own_files_only():
    names = zipfile.ZipFile(BytesIO(agent_zipapp())).namelist()
    assert {name.rpartition("/")[0] for name in names} == {"", "gangline", "gangline/agent", *SUB_ROOMS}
    assert "gangline/agent/rpc/server.py" in names
    assert len(first_words()) < 140_000  # sent to each host at each connection: 0.112 s at 10 Mbit/s


def test_the_host_half_of_prepare_is_a_program_of_its_own():
    names = zipfile.ZipFile(BytesIO(prepare_zipapp())).namelist()
    assert {name.rpartition("/")[0] for name in names} == {"", "gangline", "gangline/agent", "gangline/agent/prepare"}
    assert set(names) & set(zipfile.ZipFile(BytesIO(agent_zipapp())).namelist()) == {
        "__main__.py",
        "gangline/__init__.py",
        *PREPARE_NEEDS,
    }
    transport = LocalTransport(Host(name="here", workdir="", python=""))
    request = {"do": "read", "scope": "user", "files": ["/etc/hostname"]}
    done = transport.run((AGENT, *PREPARE_ARGV), stdin=prepare_words() + json.dumps(request).encode())
    assert (json.loads(done.stdout)["kind"], done.stderr) == ("read", "")


@pytest.mark.parametrize("how", ["file", "module"])
def test_verbs_run_from_the_file_and_from_the_package(tmp_path, how):
    program = tmp_path / "agent.pyz"
    program.write_bytes(agent_zipapp())
    words = [program] if how == "file" else ["-m", "gangline.agent"]
    done = subprocess.run([sys.executable, *words, "trees", "measure", program], capture_output=True, text=True)
    assert f'"bytes": {len(agent_zipapp())}' in done.stdout
    unknown = subprocess.run([sys.executable, *words, "dance"], capture_output=True, text=True)
    assert unknown.returncode == 2
    assert "channel, " in unknown.stderr


def test_the_agent_is_found_where_gangline_is_a_plain_folder(tmp_path):
    """On PYTHONPATH, as on a head that got our source."""
    source = Path(bootstrap.__file__).parents[2]
    (tmp_path / "code").mkdir()
    shutil.copytree(source / "gangline", tmp_path / "code" / "gangline", ignore=shutil.ignore_patterns("__pycache__"))
    program = "import sys; from gangline.transport.bootstrap import agent_zipapp as a; sys.stdout.buffer.write(a())"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, env={"PYTHONPATH": str(tmp_path / "code")}, cwd="/"
    )
    assert done.stdout == agent_zipapp()


def test_what_another_user_has_compiled_beside_it_is_not_even_looked_into(tmp_path):
    (tmp_path / "leases.py").write_text("pass")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "leases.py").write_text("not of the agent")
    assert dict(_sources(tmp_path, "gangline/agent")) == {"gangline/agent/leases.py": b"pass"}
