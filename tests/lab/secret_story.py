"""A story with secrets in it: what an ordinary user does with three hosts, tokens in the shell and in files nearby.

Everything goes wrong once: a rank is killed, a script fails, supervisor, host agent and controller are killed, gangline
itself has a bug. What every command printed is kept, to be searched for the secrets.
"""

import hashlib
import json
import os
import re
import time

from tests import hostile
from tests.lab import played_torch
from tests.lab.ordinary import User
from tests.lab.searched import search
from tests.lab.watched import Watch

TOKENS = {
    "HF_TOKEN": "hf_CanaryOfTheHub4f1d6b27c9e0a853",
    "HUGGING_FACE_HUB_TOKEN": "hf_CanaryOfTheOldName9b3e7d51f0",
    "WANDB_API_KEY": "canaryofweightsandbiases5e2d90c7b1f84a36",
}
"""In the user's shell: for the ranks, and for nobody else."""
NEARBY = {
    "netrc": "CanaryOfNetrc7c31e8d2a904",
    "dotenv": "CanaryOfDotenv0b86f5a1d7c3",
    "key comment": "CanaryOfTheKeyComment2ad970",
    "host": "sk-CanaryOfTheHost61f8e03b9d",
}
"""Where users have secrets; they stay there. The last one is in the login files of every host."""
SECRETS = {**TOKENS, **NEARBY}
NUM_WORDS = 1500
NUM_VALUES = 300
SCRIPT = """
import hashlib, json, os, sys, time
def digest(words):
    return hashlib.sha256(b"".join(os.fsencode(word) + b"\\n\\0" for word in words)).hexdigest()
names, num_values, mode = sys.argv[1].split(","), int(sys.argv[2]), sys.argv[3]
values = [os.environ[f"HOSTILE_{number}"] for number in range(num_values)]
said = {"tokens": digest(os.environ[name] for name in names), "words": digest(sys.argv[4:]), "values": digest(values)}
print("received " + json.dumps(said), flush=True)
if mode == "wait" and "--again" not in sys.argv:
    time.sleep(600)
if mode == "fail":
    secret = os.environ[names[0]]
    raise RuntimeError("this script is wrong")
"""
HOLDERS = """
import json, os, sys
words = [word.encode() for word in json.load(sys.stdin)]
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        environment = open(f"/proc/{pid}/environ", "rb").read()
        line = open(f"/proc/{pid}/cmdline", "rb").read().replace(b"\\0", b" ").decode(errors="replace")
    except OSError:
        continue
    if any(word in environment for word in words):
        print(json.dumps(line[:600]))
"""


LISTENER = re.compile(r"/proc/self/fd/\d+ listen$")
"""The command line of the agent's verb that lets other hosts try ports."""


def digest(words):
    """As the script says it of what it received."""
    return hashlib.sha256(b"".join(os.fsencode(word) + b"\n\0" for word in words)).hexdigest()


class Story:
    """One user, three hosts, and all that was said."""

    def __init__(self, lab):
        self.lab = lab
        self.user = User(lab)
        self.user.umask = "000"
        self.user.env = dict(TOKENS)
        self.since = time.time()
        self.watch = Watch(lab, SECRETS)
        self.said = []
        """(words, exit code, stdout and stderr) of every command."""
        self.words = [word for word in hostile.words(NUM_WORDS * 2, "canary", seed=21) if "\0" not in word][:NUM_WORDS]
        self.values = [word for word in hostile.words(NUM_VALUES * 9, "canary", seed=22) if is_yaml(word)][:NUM_VALUES]

    def types(self, *words, code=0, timeout_s=120):
        """`gangline WORDS`; what it printed on stdout."""
        done = self.user.run(["gangline", *words], timeout_s=timeout_s)
        shown = " ".join(word for word in words[:9] if word.isprintable())
        self.said.append((shown, done.returncode, done.stdout + done.stderr))
        assert done.returncode == code, (
            f"gangline {shown}: {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        )
        return done.stdout

    def plants(self):
        """The secrets that lie around, and login files that are as careless as can be."""
        user = self.user
        user.write(".netrc", f"machine huggingface.co login x password {NEARBY['netrc']}\n")
        user.write("project/.env", f"HF_TOKEN={NEARBY['dotenv']}\n")
        user.check(["ssh-keygen", "-q", "-c", "-C", NEARBY["key comment"], "-f", ".ssh/id_ed25519"])
        for host in self.lab.hosts:
            user.write(".bashrc", f"umask 000\nexport OPENAI_API_KEY={NEARBY['host']}\n", on=host)

    def writes(self):
        """What the user writes: a script, and a cluster file that knows the Python of the hosts."""
        python = played_torch.install(self.user, self.lab.hosts)
        self.user.write("project/train.py", SCRIPT)
        self.types("init", *(host.name for host in self.lab.hosts), "--yes")
        env = json.dumps({f"HOSTILE_{number}": value for number, value in enumerate(self.values)})
        text = self.user.read("cluster.yaml").replace("slots: 1", f"python: {python}\n    env: {env}\n    slots: 1")
        self.user.write("cluster.yaml", text)

    def program(self, mode):
        """The words behind `--`."""
        return ("train.py", ",".join(TOKENS), str(len(self.values)), mode, *self.words)

    def starts(self, mode, *options, code=0):
        """`gangline run --detach`; the id of the run."""
        words = ("run", "--detach", "--dir", "project", "--resume-flag=--again", *options, "--", *self.program(mode))
        return self.types(*words, code=code).strip()

    def awaits(self, run, host):
        """What the rank on a host says that it received."""
        path = f"gangline/runs/{run}/attempts/1/rank-{self.lab.hosts.index(host)}.log"
        deadline = time.monotonic() + 60
        while "received" not in (said := self.user.run(["cat", path], on=host).stdout):
            assert time.monotonic() < deadline, f"rank on {host.name}: {said}"
            time.sleep(0.2)
        return json.loads(said.split("received ", 1)[1].splitlines()[0])

    def holders(self, host):
        """Command lines on a host of the processes that have a token in their environment."""
        told = json.dumps(list(TOKENS.values()))
        return [
            json.loads(line) for line in host.check(["python3", "-c", HOLDERS], stdin=told, as_root=True).splitlines()
        ]

    def kills(self, host, pattern):
        """kill -9 of what the pattern of pgrep means on a machine."""
        host.check(["pkill", "-9", "-f", pattern], as_root=True)

    def tell(self):
        """All of it; what is seen on the way is kept."""
        self.plants()
        with self.watch:
            self.writes()
            self.types("check", "--json", code=3)  # the trainer is not installed
            self.types("run", "--dry-run", "--dir", "project", "--", *self.program("wait"))
            self.loses_a_rank()
            self.types("run", "--dir", "project", "--", *self.program("fail"), code=5)
            run = self.loses_who_looks_after_it()
            self.meets_a_bug(run)

    def loses_a_rank(self):
        """The run fails, and is resumed."""
        hosts = self.lab.hosts
        run = self.starts("wait")
        self.received = [self.awaits(run, host) for host in hosts]
        self.holding = [line for host in hosts for line in self.holders(host)]
        for words in ("ps", "ps --json", f"logs {run}", f"logs {run} --console"):
            self.types(*words.split())
        self.kills(hosts[-1], "train[.]py")
        self.types("attach", run, code=5)
        self.types("resume", run)

    def loses_who_looks_after_it(self):
        """Supervisor, host agent and controller are killed; then the run is stopped."""
        hosts = self.lab.hosts
        run = self.starts("wait")
        self.awaits(run, hosts[1])
        with self.user.popen(["gangline", "attach", run], stdout=-3, stderr=-3):
            self.kills(hosts[0], "[g]angline.supervise")
            self.kills(hosts[1], "[h]ost-agent")
            self.kills(self.lab.user, "[g]angline attach")
        self.left = self.found()
        self.types("ps")
        self.types("stop", run, "--now")
        self.processes = [line for host in hosts for line in host.processes()]
        return run

    def meets_a_bug(self, run):
        """A traceback, on the screen and in a file. The bug is planted by a module that every Python loads first."""
        self.user.write("bug/sitecustomize.py", "import gangline.control.supervision as it\nit.open_run = None\n")
        self.user.env["PYTHONPATH"] = f"{self.user.home}/bug"
        self.types("--debug", "attach", run, code=1)
        self.types("attach", run, code=1)

    def found(self):
        """Every place of every machine where a secret is and should not be."""
        machines, home = self.lab.machines, self.user.home
        places = {f"{each.name}: {place}" for each in machines for place in search(each, SECRETS, since=self.since)}
        planted = {f"desk: netrc in {home}/.netrc", f"desk: dotenv in {home}/project/.env"}
        planted |= {f"desk: key comment in {home}/.ssh/id_ed25519.pub"}
        planted |= {f"{host.name}: host in {home}/.bashrc" for host in self.lab.hosts}
        assert planted <= places, "the search does not find what was planted"
        return sorted(places - planted - {f"desk: key comment in {home}/.ssh/id_ed25519"})

    def printed(self):
        """(command, name of the secret) wherever a command has printed one."""
        return [(words, name) for words, _, text in self.said for name, secret in SECRETS.items() if secret in text]

    def doors(self):
        """Sockets that came to listen on the machines: those that `check` opens for a while, and all others."""
        doors = self.watch.of("may_replace")
        probes = [door for door in doors if any(LISTENER.search(owner) for owner in door["owners"])]
        return probes, [door for door in doors if door not in probes]


def is_yaml(word):
    """Whether a value can stand in a cluster file: text without control characters that YAML forbids."""
    return word.isprintable() and "\udc80" not in word
