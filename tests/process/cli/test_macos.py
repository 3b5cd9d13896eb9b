"""The client on macOS, as far as Linux can show it: what only Linux has is taken away, and planning works still."""

import pytest

from tests.bare_python import bare_python, run_verbs

pytestmark = pytest.mark.timeout(300)

WITHOUT_LINUX = """
import os, select, signal, socket, sys, sysconfig
sysconfig.get_config_vars()
sys.platform = "darwin"
os.uname = lambda: os.uname_result(("Darwin", "mac", "24.0.0", "Darwin Kernel Version 24.0.0", "arm64"))
absent = {
    os: ["pidfd_open", "memfd_create", "eventfd", "timerfd_create", "splice", "copy_file_range", "sched_getaffinity",
         "sched_setaffinity", "unshare", "setns", "getrandom", "posix_fallocate", "posix_fadvise", "O_PATH",
         "O_TMPFILE", "O_DIRECT", "O_RSYNC", "listxattr", "getxattr", "setxattr", "pipe2", "accept4"],
    select: ["epoll", "EPOLLIN", "EPOLLRDHUP"],
    signal: ["pidfd_send_signal", "sigwaitinfo", "sigtimedwait", "SIGRTMIN", "SIGSTKFLT", "SIGPWR", "SIGPOLL"],
    socket: ["AF_NETLINK", "AF_VSOCK", "AF_ALG", "SO_PEERCRED", "SO_BINDTODEVICE", "SO_PASSCRED", "TCP_USER_TIMEOUT"],
}
for module, names in absent.items():
    for name in names:
        module.__dict__.pop(name, None)
class NoLinux:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"spwd", "ossaudiodev"}:
            raise ImportError(f"{name}: not on this platform")
def refuse(event, arguments):
    if event == "open" and str(arguments[0]).startswith(("/proc", "/sys")):
        raise FileNotFoundError(2, "no such file", str(arguments[0]))
if "NoLinux" not in {type(each).__name__ for each in sys.meta_path}:
    sys.meta_path.insert(0, NoLinux())
    sys.addaudithook(refuse)
"""
HOSTS = ["--hosts", "pc1=rtx4090,pc2=2xrtx3090", "--link", "1gbit"]
VERBS = {
    "plan": ["plan", "job.yaml", *HOSTS],
    "plan as JSON": ["plan", "job.yaml", *HOSTS, "--json"],
    "plan with reasons": ["plan", "job.yaml", *HOSTS, "--why", "strategy=pipeline"],
    "ps": ["ps"],
    "schema": ["schema", "cluster"],
    "explain": ["explain", "E-NET-01"],
    "help of train": ["train", "--help"],
    "help of init": ["init", "--help"],
    "completion": ["completion", "zsh"],
    "plugins": ["plugins"],
}
JOB = "model: meta-llama/Llama-2-7b-hf\nmethod: qlora\ndata: {train: rows.jsonl, sequence_length: 512}\nbatch: 8\n"


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    return bare_python(tmp_path_factory.mktemp("bare") / "venv")


def test_planning_imports_and_opens_nothing_of_linux(python, tmp_path):
    tmp_path.joinpath("job.yaml").write_text(JOB)
    tmp_path.joinpath("rows.jsonl").write_text('{"text": "a"}\n')
    answers, rest = run_verbs(
        python, list(VERBS.values()), folder=tmp_path, home=tmp_path / "home", before=WITHOUT_LINUX
    )
    assert {name: answer for name, answer in zip(VERBS, answers, strict=True) if answer[0] != 0} == {}
    assert "Traceback" not in rest
    assert "pipeline" in answers[0][1]


def test_what_linux_alone_has_is_really_gone(python, tmp_path):
    probe = "import select; select.epoll"
    with pytest.raises(AssertionError, match="has no attribute 'epoll'"):
        run_verbs(python, [["ps"]], folder=tmp_path, home=tmp_path / "home", before=WITHOUT_LINUX + probe)
