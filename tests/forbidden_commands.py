"""What nothing that `gangline prepare` generates may contain, and a fixture that looks at all that a test generates.

Every change that a test makes or has a step plan is looked at as it is, with its reverse, and in the script and the
playbook that `--commands` and `--ansible` would write of it. Of files only lines count that come: others' lines stay.
"""

import re

import pytest

from gangline.prepare.ansible_playbook import playbook_files
from gangline.prepare.host_scripts import host_script
from gangline.prepare.prepare_step import CommandChange, FileChange, HostReading, StepPlan
from gangline.runs.cluster import Host

FORBIDDEN = {
    "a host key that nobody checks": r"StrictHostKeyChecking[\s=]+(no|off|accept-new)|KnownHostsFile[\s=]+/dev/null",
    "a firewall stopped or emptied": r"\bufw\s+(--force\s+)?(disable|reset)|iptables\s+(-F|--flush|-P\s+INPUT\s+ACCEPT)"
    r"|systemctl\s+(--now\s+)?(stop|disable|mask)\s+(--now\s+)?(ufw|firewalld|nftables|iptables)"
    r"|\bflush\s+ruleset|setenforce\s+0|SELINUX=(disabled|permissive)",
    "an export to everybody, or of root's rights": "no_root" + r"_squash|\s\*\(|^/\S+\s+\*",
    "a port for everybody": r"\b0\.0\.0\.0(?![/\d])|\ballow\s+from\s+any\b",
    "a program from the network into a shell": r"(curl|wget)\b.*\|\s*(sudo\s+)?(ba|da)?sh\b|\.run\b",
    "a package that nobody signed": r"--allow-unauthenticated|--force-yes|--nogpgcheck|--no-gpg-checks|trusted=yes",
    "rights for everybody": r"chmod\s+(-R\s+)?(0?[0-7]?777|a\+rwx|o\+w)|NOPASSWD|PermitEmptyPasswords\s+yes",
    "a clock that is set": r"\bdate\s+(-s|--set)|timedatectl\s+set-time|\bhwclock\b|\bntpdate\b|makestep|\bchronyd\s.*-q",
    "processes by a name": r"\b(pkill|killall)\b",
    "a password in words": r"\bchpasswd\b|passwd\s+--stdin|sshpass|usermod\s.*-p\s",
    "a folder of the system removed": r"\brm(?=.*\s(-\w*r|--recursive))(\s+-\S+)+\s+/([\s'\"]|$|etc/|(etc|home|usr|var|root)/?(\s|$))"
    r"|userdel\s.*(-r|--remove)",
    "weights that run code": r"weights_only\s*=\s*False|trust_remote_code",
}
READING = HostReading(user="alice", uid=1000, home="/home/alice", files={}, folders={}, commands={}, programs={})
HOST = Host(name="pc1", workdir="/w", python="", transport="ssh", ssh="alice@192.0.2.1", host_key="ssh-ed25519 AA")


def found_in(text):
    """What of it stands in a text."""
    return [what for what, pattern in FORBIDDEN.items() if re.search(pattern, text, re.MULTILINE | re.IGNORECASE)]


def texts_of(change):
    """The words of a command and its reverse, or the lines that come into a file."""
    if isinstance(change, CommandChange):
        return [" ".join(words) for words in (change.argv, change.undo, change.probe)]
    before = (change.before or b"").decode("utf-8", "replace").splitlines()
    lines = (change.content or b"").decode("utf-8", "replace").splitlines()
    return ["\n".join(line for line in lines if line not in before)]


def exported(changes):
    """The texts of a script and of a playbook that make these changes."""
    plans = {"step": StepPlan(changes=tuple(changes))}
    files = playbook_files({"pc1": plans}, (HOST,), {"pc1": READING})
    changed = {path: text for path, text in files.items() if path.endswith((".yml", "known_hosts"))}
    return [host_script("pc1", plans, READING) or "", *(str(text) for text in changed.values())]


def without_remarks(text):
    """A script without its comments: they show differences with their neighbours, which are others' lines."""
    return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))


@pytest.fixture(autouse=True)
def nothing_forbidden(monkeypatch):
    """Looks at every change that the test makes."""
    made = []
    for kind in (CommandChange, FileChange):
        first = kind.__init__

        def watched(self, *args, _first=first, **options):
            _first(self, *args, **options)
            made.append(self)

        monkeypatch.setattr(kind, "__init__", watched)
    yield made
    monkeypatch.undo()
    for change in made:
        for text in texts_of(change):
            assert found_in(text) == [], text
    for text in exported(made[:200]) if made else []:
        assert found_in(without_remarks(text)) == [], text
