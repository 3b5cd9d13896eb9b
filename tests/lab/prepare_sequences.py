"""Random sequences on real hosts: steps of `gangline prepare`, undos, kills of gangline and of its agent, changes by others.

    with PrepareSequence(seed=3, num_hosts=2) as sequence:
        sequence.play(8)                # AssertionError with all that was done before
        sequence.end()                  # all is taken back, then what the others wrote, and the hosts are as they were

After each act a new login has to work on every host (within 90 s; each further try is counted), what others wrote has
to be there, and the journal has to be true: what it has as done is there, what it has as taken back is not, and only
what it has as begun may be either. `prepare --status`, which takes back what was half-done, has to name what is there
and nothing else: at the end, and after half of the kills.

gangline is loaded once in each sequence, and forked for each command: half of its processor time is its start, during
which a kill would show nothing.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.lab.hosts import ROOT, Lab
from tests.lab.namespaces import HERE, end

STEPS = ("limits", "sshd")
STEPS_OF_TWO = ("names", "between")
"""With one host there is nothing to do."""
KINDS = (
    "do",
    "do",
    "do",
    "undo",
    "undo all",
    "killed",
    "killed",
    "killed undo",
    "agent killed",
    "other",
    "other",
    "mode",
)
MAIN = "/etc/ssh/sshd_config"
INSTALLER = "/etc/ssh/sshd_config.d/50-installer.conf"
OURS = ("/etc/security/limits.d/60-gangline.conf", "/etc/ssh/sshd_config.d/00-gangline.conf")
FILES = ("/etc/hosts", INSTALLER, "/etc/motd.d/lab", *OURS)
"""Where others write: a file that prepare changes, those beside what it makes, and those that it makes."""
RELOAD = ("service", "ssh", "reload")
LEFT = r".*/\.local(/.*)?|/etc/motd\.d"
"""The user's journal, and a folder of the others."""
REFUSALS = ("somebody changed", "has been taken back", "nobody confirmed within")
"""What others, a kill, or a machine too slow for the 60 s, have left is told, and the user looks again."""
TOO_BUSY = "does not answer"
TYPICAL_S = 4.0
PATIENCE_S = 240.0
TRUE_WITHIN_S = 90.0
"""A change that is on trial goes back after 60 s."""
BACK_WITHIN_S = 90.0

LOOK = r"""
import json, os, stat, subprocess, sys
def read(path):
    try:
        with open(path) as stream:
            return stream.read()
    except OSError:
        return None
home = os.path.expanduser("~")
paths = json.loads(sys.argv[1])
journals = [read("/var/lib/gangline/prepare/journal.jsonl"), read(home + "/.local/state/gangline/prepare/journal.jsonl")]
print(json.dumps({
    "journal": [line for text in journals for line in (text or "").splitlines()],
    "hostname": os.uname().nodename,
    "files": {path: read(path) for path in paths},
    "modes": {path: oct(stat.S_IMODE(os.stat(path).st_mode)) for path in paths if os.path.exists(path)},
    "name": read("/etc/hostname"),
    "keys": read(home + "/.ssh/authorized_keys") or "",
    "own_key": os.path.exists(home + "/.ssh/gangline_between"),
}))
"""
AGENTS = r"""
import os, signal, time
end, hit = time.monotonic() + 5.0, 0
while not hit and time.monotonic() < end:
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if open("/proc/%s/comm" % pid).read().strip() == "gangline-agent":
                os.kill(int(pid), signal.SIGKILL)
                hit += 1
        except OSError:
            pass
    time.sleep(0.01)
print(hit)
"""
SNAPSHOT = """
import hashlib, json, os, stat, sys
found = {}
for top in sys.argv[1:]:
    for folder, _, names in os.walk(top):
        for path in [folder, *(os.path.join(folder, name) for name in names)]:
            state = os.lstat(path)
            data = os.readlink(path) if stat.S_ISLNK(state.st_mode) else ""
            if stat.S_ISREG(state.st_mode):
                with open(path, "rb") as stream:
                    data = hashlib.sha256(stream.read()).hexdigest()
            xattrs = {name: os.getxattr(path, name, follow_symlinks=False).hex()
                      for name in os.listxattr(path, follow_symlinks=False) if not name.startswith("trusted.")}
            found[path] = [data, stat.filemode(state.st_mode), state.st_uid, state.st_gid, xattrs]
print(json.dumps(found))
"""


class PrepareSequence:
    """One or two hosts as an installer leaves them, and what has to be true of them after each act."""

    def __init__(self, seed: object, *, num_hosts: int, ttl_s: int = 2400) -> None:
        self.dice = random.Random(f"prepare {seed}")
        self.names = [f"pc{number}" for number in range(1, num_hosts + 1)]
        self.lab = Lab(num_hosts, names=self.names, ttl_s=ttl_s)
        self.steps = (*STEPS, *(STEPS_OF_TWO if num_hosts > 1 else ()))
        self.said: list[str] = []
        self.counts: Counter[str] = Counter()
        self._number = 0
        self._typical_s = TYPICAL_S
        self.lines: list[tuple[str, str, str]] = []
        """Of others: host, file, line."""
        self._modes: dict[tuple[str, str], str] = {}
        self._desk: subprocess.Popen
        self._before: dict[str, Mapping[str, object]] = {}

    def __enter__(self) -> "PrepareSequence":
        self.lab.__enter__()
        try:
            self._desk = self.lab.user.popen(
                [sys.executable, "-m", "tests.lab.prepare_sequences"],
                env={"PYTHONPATH": f"{ROOT / 'src'}:{HERE.parents[1]}"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for host in self.lab.hosts:
                self._install(host)
            self.lab.user.write("cluster.yaml", "hosts:\n" + "".join(map(_row, self.lab.hosts)))
            self._before = {host.name: self._snapshot(host) for host in self.lab.hosts}
        except BaseException:
            self.lab.close()
            raise
        return self

    def __exit__(self, *problem: object) -> None:
        end(self._desk)
        self.lab.close()

    def play(self, num_acts: int) -> None:
        """So many random acts, and a look after each. Raises AssertionError."""
        for _ in range(num_acts):
            kind = self.dice.choice(KINDS)
            self._act(kind)
            self.check(ask="killed" in kind and self.dice.random() < 0.5)

    def end(self) -> None:
        """Take back all of ours, then all of the others, and compare with the hosts of the beginning."""
        undone = self.types("prepare", "--undo", "all", "--yes")
        self.check(ask=True)
        if undone["code"]:
            self.counts["refused"] += 1
            self._require(self._is_refusal(undone), f"the undo failed: {undone}")
        self._others_go()
        if undone["code"]:
            self.types("prepare", "--undo", "all", "--yes", code=0)
        self._require(self._standing() == {name: [] for name in self.names}, "changes stand after the undo of all")
        for host in self.lab.hosts:
            now, old = self._snapshot(host), self._before[host.name]
            paths = sorted(path for path in now.keys() | old.keys() if now.get(path) != old.get(path))
            left = [
                path for path in paths if not re.fullmatch(LEFT, path) and not path.startswith(f"{host.home}/gangline")
            ]
            self._require(not left, f"{host.name} is not as before: {left[:5]}")

    # What happens.

    def _act(self, kind: str) -> None:
        if kind in {"other", "mode"}:
            (self.other if kind == "other" else self.mode)(self.dice.choice(self.lab.hosts))
            self.counts["others"] += 1
            return
        step = self.dice.choice(self.steps)
        words = {"undo": ("--undo", step), "killed undo": ("--undo", "all"), "undo all": ("--undo", "all")}.get(
            kind, (step,)
        )
        if kind == "agent killed" and self.dice.random() < 0.3:
            words = ("--undo", step)
        if len(self.names) > 1 and self.dice.random() < 0.3:
            words = (*words, self.dice.choice(self.names))
        at = self.dice.random()
        self.said.append(f"{kind} {' '.join(words)}" + (f" at {at:.2f}" if "killed" in kind else ""))
        argv = ("prepare", *words, "--yes")
        if kind.startswith("killed"):
            how = self.dice.choice(("alone", "with its ssh"))
            done = self.types(*argv, kill={"after_s": at * self._typical_s, "all": how != "alone"})
            self.counts["killed" if done["code"] < 0 else "ended before the kill"] += 1
        elif kind == "agent killed":
            self._tell(argv)
            time.sleep(at * self._typical_s)
            hit = int(self.dice.choice(self.lab.hosts).check(["/usr/bin/python3", "-c", AGENTS], as_root=True))
            self.counts["agents killed"] += bool(hit)
            self._answer()
        else:
            begun = time.monotonic()
            done = self.types(*argv)
            self._typical_s = time.monotonic() - begun
            self._require(done["code"] == 0 or self._is_refusal(done) or TOO_BUSY in done["err"], f"{words}: {done}")
            self.counts["undos" if words[0] == "--undo" else "steps"] += 1
            self.counts["refused"] += bool(done["code"])

    @staticmethod
    def _is_refusal(done: Mapping) -> bool:
        return any(words in done["out"] + done["err"] for words in REFUSALS)

    def other(self, host) -> None:
        """Somebody else writes a line, before or behind what is there."""
        self._number += 1
        path, line = self.dice.choice(FILES), f"# theirs {self._number}"
        first = self.dice.random() < 0.5
        self.said.append(f"other: {host.name} {path} {'first' if first else 'last'}")
        script = 'mkdir -p "$(dirname "$1")"; touch "$1"; new=$(mktemp)\n'
        script += '(echo "$2"; cat "$1") > "$new"; cat "$new" > "$1"; rm "$new"' if first else 'echo "$2" >> "$1"'
        host.check(["sh", "-euc", script, "other", path, line], as_root=True)
        self.lines.append((host.name, path, line))

    def mode(self, host) -> None:
        """Somebody else changes rights of a file."""
        path, mode = "/etc/hosts", self.dice.choice(("0644", "0640", "0600"))
        self.said.append(f"other: {host.name} chmod {mode} {path}")
        host.check(["chmod", mode, path], as_root=True)
        self._modes[host.name, path] = oct(int(mode, 8))

    def _others_go(self) -> None:
        """They take back what they did; a file of theirs alone goes with its last line."""
        for name, path, line in self.lines:
            script = 'sed -i "/^$2\\$/d" "$1"; [ -s "$1" ] || [ "$3" = old ] || rm "$1"'
            kept = "old" if path in self._before[name] else "new"
            self.lab[name].check(["sh", "-euc", script, "other", path, line, kept], as_root=True)
        for name, path in self._modes:
            self.lab[name].check(["chmod", "0664", path], as_root=True)
        self.lines.clear()
        self._modes.clear()

    # What has to be true.

    def check(self, *, ask: bool) -> None:
        """See above. ask: by `prepare --status`, too."""
        seen = {name: self._log_in(name) for name in self.names}
        for name, path, line in self.lines:
            text = seen[name]["files"][path] or ""
            self._require(text.splitlines().count(line) == 1, f"{name} {path} lost {line!r}, or has it twice: {text!r}")
        for (name, path), mode in self._modes.items():
            self._require(
                seen[name]["modes"][path] == mode, f"{name} {path}: {seen[name]['modes'][path]}, theirs {mode}"
            )
        if not ask and not [problem for name in self.names for problem in _lies(name, seen[name])]:
            return
        deadline = time.monotonic() + TRUE_WITHIN_S
        while problems := self._untrue():
            # an agent whose client was killed may be at work, and a change may be on trial
            self._require(time.monotonic() < deadline, f"the journal is not true: {problems}")
            time.sleep(3.0)

    def _untrue(self) -> list[str]:
        """Where what the status names, what the journal says, and what is there, are not the same."""
        self.counts["asked"] += 1
        standing = self._standing()
        found = []
        for name in self.names:
            seen = self._log_in(name)
            told = {what: what in standing[name] for what in _there(name, seen)}
            found += _lies(name, seen) + _unlike(name, told, _there(name, seen))
        return found

    def _standing(self) -> dict[str, list[str]]:
        done = self.types("prepare", "--status", "--json")
        if TOO_BUSY in done["err"]:  # the login before shows that this machine is too busy
            self.counts["asked in vain"] += 1
            done = self.types("prepare", "--status", "--json")
        self._require(done["code"] == 0, f"status: {done}")
        rows = json.loads(done["out"])["hosts"]
        return {name: [_short(row["what"]) for row in rows[name]] for name in self.names}

    def _log_in(self, name: str) -> dict:
        """By a new connection, with the user's key; what is there."""
        self.counts["logins"] += 1
        words = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=20", "-o", "ControlPath=none", name]
        argv = ["ssh", *words, "/usr/bin/python3", "-", f"'{json.dumps(FILES)}'"]
        done = self.lab.user.run(argv, stdin=LOOK, timeout_s=PATIENCE_S)
        deadline = time.monotonic() + BACK_WITHIN_S
        while done.returncode and time.monotonic() < deadline:
            self.counts["logins again"] += 1
            time.sleep(1.0)
            done = self.lab.user.run(argv, stdin=LOOK, timeout_s=PATIENCE_S)
        self._require(done.returncode == 0, f"{name} does not let in: {done.stderr}")
        return json.loads(done.stdout)

    def _require(self, is_so: bool, what: str) -> None:
        assert is_so, f"{what}; done before: {self.said}"

    def _install(self, host) -> None:
        """As an installer leaves it: a name of many, its own address by it, and logins by password."""
        host.check(["hostname", "debian"], as_root=True)
        host.write("/etc/hostname", "debian\n")
        host.write("/etc/hosts", "127.0.0.1 localhost\n127.0.1.1 debian.lan debian\n", 0o664)
        text = host.read(MAIN).decode().replace("PasswordAuthentication no", "")
        host.write(MAIN, f"Include {Path(INSTALLER).parent}/*.conf\n{text}")
        host.write(INSTALLER, "PasswordAuthentication yes\n")
        host.check(RELOAD, as_root=True)

    def _snapshot(self, host) -> Mapping[str, object]:
        argv = ["/usr/bin/python3", "-c", SNAPSHOT, "/etc", str(host.home), "/home"]
        return {**json.loads(host.check(argv, as_root=True)), "hostname": host.check(["uname", "-n"])}

    # gangline on the desk.

    def types(self, *words: str, code: int | None = None, kill: Mapping[str, object] | None = None) -> dict:
        self._tell(words, kill)
        done = self._answer()
        self._require(code is None or done["code"] == code, f"{words}: {done}")
        return done

    def _tell(self, words: Sequence[str], kill: Mapping[str, object] | None = None) -> None:
        assert self._desk.stdin
        self._desk.stdin.write(json.dumps({"words": words, "kill": kill}) + "\n")
        self._desk.stdin.flush()

    def _answer(self) -> dict:
        assert self._desk.stdout
        line = self._desk.stdout.readline()
        self._require(bool(line), "the desk has ended")
        done = json.loads(line)
        self._require("a bug of gangline" not in done["err"] and "Traceback" not in done["err"], f"{done['err']}")
        return done


def _row(host) -> str:
    return f"- name: {host.name}\n  address: {host.address}\n  host_key: {host.host_key}\n"


def _short(what: str) -> str:
    """The thing that a row of the status means, without the home folder before it."""
    return "own key" if what.startswith("ssh-keygen") else re.sub(r"^/.*/\.ssh/", "~/.ssh/", what)


def _lies(name: str, seen: Mapping) -> list[str]:
    """Where the journal of a host says that something stands, or was taken back, and it is not so."""
    states: dict[tuple[str, int], str] = {}
    names, undoing = {}, set()
    for record in map(json.loads, seen["journal"]):
        key = (record["txn"], record.get("seq"))
        if record["kind"] == "intent":
            change = record["change"]
            names[key] = _short(change["path"] if change["kind"] == "file" else " ".join(change["argv"]))
        if record["kind"] in {"intent", "done", "void", "undone"}:
            states[key] = record["kind"]
        elif record["kind"] == "undoing":
            undoing.add(record["txn"])
    begun = {
        names[key] for key, state in states.items() if state == "intent" or (state == "done" and key[0] in undoing)
    }
    done = {names[key] for key, state in states.items() if state == "done"}
    there = {what: is_there for what, is_there in _there(name, seen).items() if what not in begun}
    return _unlike(name, {what: what in done for what in there}, there)


def _unlike(name: str, said: Mapping[str, bool], there: Mapping[str, bool]) -> list[str]:
    return [f"{name}: {what}: said {said[what]}, there {there[what]}" for what in there if said[what] != there[what]]


def _there(name: str, seen: Mapping) -> dict[str, bool]:
    """By what the status calls it: whether it is there."""
    files = seen["files"]
    return {
        "/etc/hostname": seen["name"] == f"{name}\n",
        f"hostname {name}": seen["hostname"] == name,
        "/etc/hosts": "gangline prepare names" in (files["/etc/hosts"] or ""),
        **{path: any(not line.startswith("# theirs") for line in (files[path] or "").splitlines()) for path in OURS},
        "~/.ssh/authorized_keys": "gangline_gate" in seen["keys"],
        "own key": seen["own_key"],
    }


# On the desk: gangline, loaded once, and forked for each command.


def _serve() -> None:
    import gangline.cli.prepare
    import gangline.decide.inspect
    import gangline.prepare.prepare_hosts
    import gangline.provision.environment  # noqa: F401  (loaded before the forks)
    from gangline.cli.main import main

    for line in sys.stdin:
        asked = json.loads(line)
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            child = os.fork()
            if child == 0:
                os.setsid()
                with Path(os.devnull).open() as nothing:
                    os.dup2(nothing.fileno(), 0)
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                code = main(asked["words"])
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
            code = _wait(child, asked["kill"])
            texts = []
            for stream in (out, err):
                stream.seek(0)
                texts.append(stream.read())
        sys.stdout.write(json.dumps({"code": code, "out": texts[0], "err": texts[1]}) + "\n")
        sys.stdout.flush()


def _wait(child: int, kill: Mapping | None) -> int:
    """Its exit code, or minus the signal that ended it; it is killed after `after_s`, alone or with what it started."""
    deadline = time.monotonic() + (kill["after_s"] if kill else PATIENCE_S)
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    (os.killpg if kill and kill["all"] else os.kill)(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    _serve()
