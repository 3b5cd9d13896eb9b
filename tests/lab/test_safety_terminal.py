"""Hosts whose every word is an attempt to steer the user's terminal: nothing of it gets through (S17)."""

import json
import os
import re
import socket
import threading

import pytest

from tests.lab import played_torch
from tests.lab.hosts import Lab
from tests.lab.ordinary import User

STEER = "\x1b[2J\x1b]0;owned\x07\x1b]52;c;b3duZWQ=\x1b\\\x1b[31m\b\b\x9b31m\u202e\u200b"
"""Clears the screen, sets the title and the clipboard, colours, writes over text, in 7 and in 8 bits; turns text round."""
LOGIN = r"""
printf '\033[2J\033]0;owned\007hello\n' >&2
printf '\033[2J\033]0;owned\007hello\n'
export NCCL_SOCKET_IFNAME=$'eth9\033[31m\033]0;owned\007'
export NCCL_TIMEOUT=$'1\xc2\x9b31m\033[2J'
"""
CARDS = r"""#!/bin/sh
case $1 in
    --query*) printf '0, RTX\033[2J\033]0;owned\007 4090, GPU-0, 24000, 23000, 8.9, 0:1:0.0, 4, 4, 16, 16, 40, 20, 400, 0, [N/A], [N/A], 550\033[31m.1\n' ;;
    *) printf '\033[2J\033]0;owned\007 no such thing\n'; exit 9 ;;
esac
"""
SCRIPT = f"""
import os, sys, time
STEER = {STEER!r}
print("step 1" + STEER, flush=True)
print("step 2" + STEER, file=sys.stderr, flush=True)
if os.environ["RANK"] == "1":
    os.write(os.open(f"/proc/{{os.getppid()}}/fd/1", os.O_WRONLY | os.O_APPEND), ("console" + STEER + "\\n").encode())
    time.sleep(float(sys.argv[1]))
    raise RuntimeError("it failed" + STEER)
time.sleep(600)
"""
PLANT = """
import json, pathlib, sys
told = json.load(sys.stdin)
run = next(pathlib.Path("gangline/runs").glob(told["run"]))
steer, step = told["steer"], {"kind": "step", "step": 3, "steps": 9, "loss": 1.0, "step_s": 0.1}
for file, record in (
    ("events.jsonl", {"event": "boo" + steer, "what": "look" + steer, "host": steer, "step": steer, "source": steer}),
    ("metrics.jsonl", {**step, "step": "3" + steer}),
    ("metrics.jsonl", {**step, "steps": "9" + steer}),
    ("metrics.jsonl", {"kind": "evaluation", "step": "3" + steer, "loss": 1.0}),
    ("metrics.jsonl", step),
):
    with (run / file).open("a") as stream:
        stream.write(json.dumps({"time": "2026-01-01T00:00:00Z", **record}) + "\\n")
state = json.loads((run / "state.json").read_text())
(run / "state.json").write_text(json.dumps({**state, "name": "evil" + steer, **told["state"]}))
"""
MODEL = {"a\x1b[2J\x9b31m\u202eb": "{name}", "config.json": "{name}"}
"""Name -> content, another on each host."""
OURS = re.compile(r"\r\x1b\[K")
RAW = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069]")
"""What a text of ours has no use for: controls in 7 and 8 bits, and marks that hide or turn text round."""


@pytest.fixture(scope="module")
def user():
    with Lab(2, meshed=True, sshd=("Banner /etc/banner",)) as lab:
        user = User(lab)
        python = played_torch.install(user, lab.hosts)
        for host in lab.hosts:
            host.write("/etc/banner", f"banner{STEER}\n")
            user.write(".bashrc", LOGIN, on=host)
            argv = ["python3", "-c", f"import socket; socket.sethostname({'x' + STEER[:20]!r}.encode())"]
            host.check(argv, as_root=True)
            for name, text in MODEL.items():
                user.write(f"model/{name}", text.format(name=host.name), on=host)
        lab.hosts[1].write("/usr/local/bin/nvidia-smi", CARDS, 0o755)
        user.write("project/script.py", SCRIPT)
        user.python = python
        yield user


def screen(user, *words, timeout_s=100):
    """What a terminal gets to see: (exit code, text). Its program believes to be watched."""
    near, far = os.openpty()
    pieces = []

    def read():
        try:
            while piece := os.read(near, 1 << 16):
                pieces.append(piece)
        except OSError:  # nobody holds the other end any more
            pass

    reader = threading.Thread(target=read)
    with user.popen(["gangline", *words], stdin=far, stdout=far, stderr=far, env={"TERM": "xterm"}) as process:
        os.close(far)
        reader.start()
        code = process.wait(timeout_s)
        reader.join(5)
    os.close(near)
    return code, b"".join(pieces).decode("utf-8", "replace")


def harmless(user, *words, code=0):
    found, text = screen(user, *words)
    assert found == code, (words, text)
    steering = [text[max(0, match.start() - 60) : match.end() + 20] for match in RAW.finditer(OURS.sub("", text))]
    assert steering == [], words
    return text


def test_nothing_that_hosts_say_of_themselves_steers_the_terminal(user):
    text = harmless(user, "init", "h0", "h1")
    assert "RTX" in text
    text = harmless(user, "check", code=3)
    assert "RTX" in text
    assert "NCCL_TIMEOUT" in text
    assert "NCCL_SOCKET_IFNAME" in text
    text = harmless(user, "check", "--only", "data", "--same", str(user.home / "model"), code=3)
    assert "E-DATA" in text
    json.loads(user.run(["gangline", "check", "--json"], timeout_s=60).stdout)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_nothing_that_a_run_says_steers_the_terminal(user):
    user.lab.hosts[1].check(["rm", "/usr/local/bin/nvidia-smi"], as_root=True)
    for host in user.lab.hosts:
        user.write(".bashrc", LOGIN.partition("export")[0], on=host)
    user.check(["gangline", "init", "h0", "h1", "--force"])
    user.write("cluster.yaml", user.read("cluster.yaml").replace("slots: 1", f"python: {user.python}\n    slots: 1"))
    text = harmless(user, "run", "--dir", "project", "--", "script.py", "3", code=5)
    assert "it failed" in text
    (failed,) = json.loads(user.check(["gangline", "ps", "--json"]))["runs"]
    assert "step 1" in harmless(user, "logs", failed["id"])
    assert "console" in harmless(user, "logs", failed["id"], "--console")
    harmless(user, "attach", failed["id"], code=5)
    harmless(user, "ps")
    harmless(user, "resume", failed["id"], code=2)
    text = harmless(user, "run", "--detach", "--dir", "project", "--", "script.py", "600")
    run = text.splitlines()[-1]
    head = user.lab.hosts[0]
    user.check(["python3", "-c", PLANT], on=head, stdin=json.dumps({"run": run, "steer": STEER, "state": {}}))
    assert "evil" in harmless(user, "ps")
    user.lab.hosts[1].check(["pkill", "-9", "-f", "script[.]py"], as_root=True)
    text = harmless(user, "attach", run, code=5)
    assert "evil" in harmless(user, "ps")
    lie = {"phase": "failed", "error": {"kind": STEER, "what": STEER, "seen": STEER + "\n" + STEER, "fix": STEER}}
    user.check(["python3", "-c", PLANT], on=head, stdin=json.dumps({"run": run, "steer": STEER, "state": lie}))
    harmless(user, "attach", run, code=5)
    harmless(user, "stop", run)


def test_a_host_that_is_refused_says_nothing_either(user):
    """Its banner comes before its key is accepted, and its last words with the error."""
    host = user.lab.hosts[1]
    user.write("denied.yaml", f"hosts: [{{name: h1, ssh: nobody@{host.address}, host_key: {host.host_key}}}]\n")
    assert "refuses your ssh key" in harmless(user, "check", "denied.yaml", code=4)


def test_the_names_are_as_bad_as_they_look():
    assert socket.gethostname().isprintable()
    assert RAW.search(STEER)
    assert len(RAW.findall(STEER)) > 8
