"""Step `between`: the head logs in to the other hosts by a key of its own, so that it can look after a run.

The key is made on the head and never leaves it. On each other host it counts from the head's address only, and opens
no terminal and no forwarding. What it may run is not limited: who starts ranks runs programs.
"""

from __future__ import annotations

from gangline.config.host_file import is_ip
from gangline.prepare.prepare_step import (
    Asks,
    FileChange,
    PrepareStep,
    StepPlan,
    StepView,
    with_block,
)
from gangline.prepare.ssh_access import AUTHORIZED, CONFIG, OWN_CONFIG, new_key, own_files, with_include
from gangline.runs.cluster import Host

KEY = "~/.ssh/gangline_between"
FOLDER = "~/.ssh"
DEFAULTS = ("id_rsa", "id_ecdsa", "id_ecdsa_sk", "id_ed25519", "id_ed25519_sk")
"""Which keys ssh tries by itself, ssh_config(5); it tries none of them where a block names another one."""
LIMITS = 'restrict,from="{address}"'


def plan(view: StepView) -> StepPlan:
    """On the head the key pair and its use; on the others its line in authorized_keys."""
    head = view.cluster.head
    if head.transport == "local":
        return StepPlan()
    if not is_ip(head.address):
        remains = f"write `address` of {head.name} in the cluster file in numbers: sshd looks no name up"
        return StepPlan(remains=(remains,))
    return _on_head(view) if view.host.name == head.name else _on_other(view, head)


def _on_head(view: StepView) -> StepPlan:
    home, files = view.reading.home, view.reading.files
    others = [host.address for host in view.cluster.hosts[1:]]
    if not others:
        return StepPlan()
    texts = {
        CONFIG: with_include(files[CONFIG].text),
        OWN_CONFIG: with_block(files[OWN_CONFIG].text, "between", _entry(view, others)),
    }
    key = KEY.replace("~", home, 1)
    made = [new_key(key, comment=f"gangline-{view.host.name}")] if files[f"{KEY}.pub"].content is None else []
    return StepPlan(
        changes=(*made, *own_files(view.reading, texts)),
        reason="it can look after runs once it reaches the other hosts without you; then your computer may be off",
        risk=f"the key has no passphrase: whoever can read {KEY} on {view.host.name} can log in to the other hosts as "
        "you, from there",
    )


def _entry(view: StepView, addresses: list[str]) -> list[str]:
    """The new key first, then those that ssh tried there before."""
    own = [f"{FOLDER}/{name}" for name in DEFAULTS if name in (view.reading.folders[FOLDER] or ())]
    return [f"Host {' '.join(addresses)}", *(f"    IdentityFile {path}" for path in (KEY, *own))]


def _on_other(view: StepView, head: Host) -> StepPlan:
    of_head = view.readings.get(head.name)
    words = of_head.files[f"{KEY}.pub"].text.split() if of_head else []
    if len(words) < 2:
        return StepPlan(remains=(f"its line follows once {head.name} has its key",))
    file = view.reading.files[AUTHORIZED]
    line = f"{LIMITS.format(address=head.address)} {words[0]} {words[1]} gangline-{head.name}"
    rows = file.text.splitlines()
    if line in rows:
        return StepPlan()
    rows = [row for row in rows if words[1] not in row.split()]
    change = FileChange(
        path=AUTHORIZED.replace("~", view.reading.home, 1),
        before=file.content,
        content="".join(f"{row}\n" for row in [*rows, line]).encode("utf-8", "surrogateescape"),
        mode=0o600,
        folder_mode=0o700,
        scope="user",
    )
    return StepPlan(
        changes=(change,),
        reason=f"{head.name} can look after runs once it reaches this host without you",
        risk=f"whoever is you, or root, on {head.name} can log in here as you, from {head.address}; without a terminal "
        "and without forwarding",
    )


BETWEEN = PrepareStep(
    name="between",
    summary="a key of the head's own for the other hosts; only where it is named",
    asks=Asks(files=(AUTHORIZED, CONFIG, OWN_CONFIG, f"{KEY}.pub"), folders=(FOLDER,)),
    plan=plan,
    only_by_name=True,
    head_first=True,
)
