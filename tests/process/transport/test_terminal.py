"""A command in this terminal, and a web page of a host."""

import os
import pty
import sys
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from gangline.errors import HostKeyRefused, HostUnreachable
from gangline.transport import terminal
from gangline.transport.terminal import forward, interactive
from tests import hostile
from tests.process.transport.sshd import Sshd


@pytest.fixture
def sshd(tmp_path):
    return Sshd(tmp_path)


def in_terminal(program):
    """What a function prints, and reads "hello" from, in a terminal of its own; and its exit code."""
    pid, descriptor = pty.fork()
    if pid == 0:
        code = 99
        try:
            code = program()
        finally:
            os._exit(code)
    os.write(descriptor, b"hello\n")
    said = b""
    while True:
        try:
            piece = os.read(descriptor, 4096)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        said += piece
    os.close(descriptor)
    return said, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_the_terminal_belongs_to_the_command_there(sshd):
    program = "import sys; print(sys.stdin.isatty(), sys.stdout.isatty()); print('got', input()); sys.exit(7)"
    said, code = in_terminal(lambda: interactive(sshd.host(), [sys.executable, "-c", program], ssh_config=sshd.config))
    assert b"True True" in said
    assert b"got hello" in said
    assert code == 7


def test_without_a_terminal_it_is_a_pipe(sshd, capfd):
    words = hostile.words(200, sshd.folder / "canary", seed=9)
    program = "import os, sys; print([os.fsencode(word) for word in sys.argv[1:]], sys.stdin.isatty())"
    code = interactive(sshd.host(), [sys.executable, "-c", program, *words], ssh_config=sshd.config)
    assert (code, capfd.readouterr().out) == (0, f"{[os.fsencode(word) for word in words]} False\n")
    assert not (sshd.folder / "canary").exists()


def test_no_terminal_for_a_host_that_nobody_knows(sshd):
    with pytest.raises(HostKeyRefused, match="no host key is pinned"):
        interactive(sshd.host(host_key=None), ["true"], ssh_config=sshd.config)
    other = sshd.host(host_key=sshd.new_key("other"))
    assert interactive(other, ["true"], ssh_config=sshd.config) == 255


class Page(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"tensorboard")

    def log_message(self, *_):
        pass


@pytest.fixture
def page():
    server = HTTPServer(("127.0.0.1", 0), Page)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def fetch(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10) as answer:
        return answer.read()


def test_a_page_of_a_host_is_seen_here_and_only_here(sshd, page):
    """Forwardings of the user's ssh_config are not opened."""
    sshd.config.write_text(
        f"{sshd.config.read_text()}    LocalForward 127.0.0.1:{page} 127.0.0.1:1\n    ExitOnForwardFailure yes\n"
    )
    with forward(sshd.host(), page, ssh_config=sshd.config) as port:
        assert port != page
        assert fetch(port) == b"tensorboard"
        listeners = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
        assert [line.split()[1] for line in listeners.splitlines() if f":{port:04X} " in line and " 0A " in line] == [
            f"0100007F:{port:04X}"
        ]
    with pytest.raises(OSError):
        fetch(port)


def test_a_page_of_this_computer_needs_no_way(sshd, page):
    with forward(sshd.host(transport="local"), page) as port:
        assert fetch(port) == b"tensorboard"


def test_a_port_that_somebody_took_meanwhile_is_not_the_end(sshd, page, monkeypatch):
    free = terminal._free_port
    ports = iter([page, page])
    monkeypatch.setattr(terminal, "_free_port", lambda: next(ports, None) or free())
    with forward(sshd.host(), page, ssh_config=sshd.config) as port:
        assert fetch(port) == b"tensorboard"
    monkeypatch.setattr(terminal, "_free_port", lambda: page)
    with (
        pytest.raises(HostUnreachable, match=f"pc1: port {page} cannot be brought here"),
        forward(sshd.host(), page, ssh_config=sshd.config),
    ):
        pass
