"""Step `access`: a host that knows the user by a password takes the user's key from then on.

On the host a line in authorized_keys. On this computer, only where the user has no key that ssh can use: a key pair for
the cluster, named by an ssh_config file of its own that the user's one includes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gangline.prepare.prepare_step import (
    Asks,
    Change,
    CommandChange,
    FileChange,
    HostReading,
    PrepareStep,
    StepPlan,
    StepView,
    with_block,
)
from gangline.runs.cluster import Host

AUTHORIZED = "~/.ssh/authorized_keys"
CONFIG, OWN_CONFIG = "~/.ssh/config", "~/.ssh/gangline.conf"
KEY = "~/.ssh/gangline_ed25519"
HERE_ASKS = Asks(files=(CONFIG, OWN_CONFIG, f"{KEY}.pub"), programs=("ssh-keygen",))


def plan(view: StepView) -> StepPlan:
    """The user's public key in authorized_keys, where a login by key is refused."""
    if not view.public_key:
        return StepPlan()
    before = view.reading.files[AUTHORIZED]
    words = [line.split() for line in before.text.splitlines()]
    if any(view.public_key.split()[1] in each for each in words):
        fix = f"chmod go-w ~ ~/.ssh ~/.ssh/authorized_keys on {view.host.name}; sshd says more: journalctl -u ssh"
        return StepPlan(remains=(f"{view.host.name} has your key and refuses it: {fix}",))
    text = before.text if before.text.endswith("\n") or not before.text else before.text + "\n"
    change = FileChange(
        path=f"{view.reading.home}/.ssh/authorized_keys",
        before=before.content,
        content=f"{text}{view.public_key}\n".encode("utf-8", "surrogateescape"),
        mode=0o600,
        folder_mode=0o700,
        scope="user",
    )
    return StepPlan(
        changes=(change,),
        reason="it knows you by a password only, and nobody types one while a run goes on",
        risk="whoever has this private key can log in there as you; after an undo only the password opens it again",
    )


def plan_here(reading: HostReading, hosts: Sequence[Host]) -> StepPlan:
    """A key pair on this computer, and its name for these hosts in ssh's configuration."""
    key = KEY.replace("~", reading.home, 1)
    files = {CONFIG: with_include(reading.files[CONFIG].text), OWN_CONFIG: own_config(reading, hosts)}
    changes = own_files(reading, files)
    if reading.files[f"{KEY}.pub"].content is None:
        changes.append(new_key(key, comment="gangline"))
    return StepPlan(
        changes=tuple(changes),
        reason="you have no ssh key",
        risk="the key has no passphrase: whoever can read the file can log in as you. To give it one: ssh-keygen -p "
        f"-f {KEY}, then ssh-add {KEY} in each session. An undo removes the key",
    )


def own_files(reading: HostReading, texts: Mapping[str, str]) -> list[Change]:
    """Changes of the user's own files, named as they were asked for; those that have this text already are left out."""
    return [
        FileChange(
            path=path.replace("~", reading.home, 1),
            before=reading.files[path].content,
            content=text.encode("utf-8", "surrogateescape"),
            mode=0o600 if reading.files[path].content is None else None,
            folder_mode=0o700,
            scope="user",
        )
        for path, text in texts.items()
        if text != reading.files[path].text
    ]


def new_key(path: str, *, comment: str) -> CommandChange:
    """A key pair without a passphrase."""
    return CommandChange(
        argv=("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", path),
        undo=("rm", "-f", path, f"{path}.pub"),
        probe=("ssh-keygen", "-l", "-f", f"{path}.pub"),
        scope="user",
    )


def with_include(text: str) -> str:
    """The user's ssh_config with our file included before the first `Host`: what stands behind one is of that host."""
    block = with_block("", "access", [f"Include {OWN_CONFIG}"])
    return text if block in text else block + text


def own_config(reading: HostReading, hosts: Sequence[Host]) -> str:
    """Our own file with entries of these hosts; those of others stay."""
    text = reading.files[OWN_CONFIG].text
    for host in hosts:
        text = with_block(text, f"access {host.name}", _entry(host))
    return text


def _entry(host: Host) -> list[str]:
    user, _, place = (host.ssh or host.name).rpartition("@")
    names = list(dict.fromkeys((host.name, place)))
    return [
        f"Host {' '.join(names)}",
        *([f"    HostName {place}"] if place != host.name else []),
        *([f"    User {user}"] if user else []),
        *([f"    Port {host.ssh_port}"] if host.ssh_port else []),
        f"    IdentityFile {KEY}",
    ]


ACCESS = PrepareStep(
    name="access",
    summary="your public key on hosts that know you by a password; a key pair if you have none",
    asks=Asks(files=(AUTHORIZED,)),
    plan=plan,
    on_witness=True,
)
