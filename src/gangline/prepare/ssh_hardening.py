"""Step `sshd`: no logins by password any more. Only where it is named: it can lock out who relies on one."""

from __future__ import annotations

import re

from gangline.prepare.prepare_step import (
    REVERT_S,
    Asks,
    CommandChange,
    FileChange,
    HostReading,
    PrepareStep,
    StepPlan,
    StepView,
    activated,
)

MAIN = "/etc/ssh/sshd_config"
DROP_IN = "/etc/ssh/sshd_config.d/00-gangline.conf"
"""Of several values sshd takes the first: ours stands before what an installer wrote."""
SYSTEMD = "/run/systemd/system"
UNITS = ("ssh.service", "sshd.service")
BAD = {
    "PasswordAuthentication": (("yes",), "no"),
    "KbdInteractiveAuthentication": (("yes",), "no"),
    "PermitRootLogin": (("yes",), "prohibit-password"),
}
"""Option -> values that are changed, and to what. A stricter value stays."""
INCLUDE = re.compile(r"^\s*Include\s+\S*sshd_config\.d/\*\.conf", re.IGNORECASE)
MATCH = re.compile(r"^\s*Match\b", re.IGNORECASE)
ASKS = Asks(
    files=(MAIN, DROP_IN),
    folders=(SYSTEMD,),
    commands={unit: ("systemctl", "is-active", unit) for unit in UNITS},
    programs=("service",),
)
IN_FORCE = Asks(files=(MAIN, DROP_IN), commands={"in force": ("sshd", "-T")})


def root_asks(_reading: HostReading) -> Asks:
    """What sshd makes of all its files, which root alone may read."""
    return IN_FORCE


def plan(view: StepView) -> StepPlan:
    """A drop-in, which sshd checks before it takes it, and which goes again unless a new login works."""
    reading = view.reading
    said = dict(line.partition(" ")[::2] for line in reading.output("in force").lower().splitlines())
    if not said:
        return StepPlan(remains=("only root can see what sshd lets in: run this in a terminal, or log in as root",))
    lines = [f"{name} {good}" for name, (bad, good) in BAD.items() if said.get(name.lower()) in bad]
    before = reading.files[DROP_IN]
    if not lines:
        return StepPlan()
    reload = _reload(reading)
    if not _reads_drop_ins(reading.files[MAIN].text):
        return StepPlan(remains=(f"{MAIN} includes no sshd_config.d before its first Match: write {lines} into it",))
    if not reload:
        return StepPlan(remains=(f"nobody here can have sshd read {DROP_IN}: no systemd, and no `service`",))
    kept = [line for line in before.text.splitlines() if line not in lines]
    text = "".join(f"{line}\n" for line in (kept or ["# gangline prepare sshd"]) + lines)
    drop_in = FileChange(path=DROP_IN, before=before.content, content=text.encode(), mode=0o600)
    return StepPlan(
        changes=activated((drop_in, CommandChange(argv=("sshd", "-t"), undo=())), reload),
        reason="anybody on this network can try passwords",
        risk="whoever has no key there is locked out for good: other users of this host, too",
        revert_s=REVERT_S,
    )


def _reads_drop_ins(text: str) -> bool:
    for line in text.splitlines():
        if INCLUDE.match(line):
            return True
        if MATCH.match(line):
            return False
    return False


def _reload(reading: HostReading) -> tuple[str, ...]:
    if reading.folders[SYSTEMD] is not None:
        unit = next((each for each in UNITS if reading.output(each) == "active"), UNITS[0])
        return ("systemctl", "try-reload-or-restart", unit)
    return ("service", "ssh", "reload") if reading.has("service") else ()


SSHD = PrepareStep(
    name="sshd",
    summary="no logins by password; only where it is named",
    asks=ASKS,
    plan=plan,
    root_asks=root_asks,
    only_by_name=True,
)
