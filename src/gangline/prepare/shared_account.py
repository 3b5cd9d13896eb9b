"""Step `user`: one account on all hosts, where you log in by unlike names, or as root. Only where it is named."""

from __future__ import annotations

from collections import Counter

from gangline.prepare.prepare_step import Asks, CommandChange, PrepareStep, StepPlan, StepView

AUTHORIZED = "~/.ssh/authorized_keys"
GROUPS = ("render", "video")
"""Whose members may use a GPU on some distributions."""
ASKS = Asks(
    files=(AUTHORIZED,),
    commands={"accounts": ("getent", "passwd"), "groups": ("getent", "group", *GROUPS)},
    programs=("useradd",),
)
RISK = (
    "whoever has a key that opens {login} here can log in as {name}, too, from then on. An undo removes the account, "
    "and leaves its home folder with all that is in it"
)


def plan(view: StepView) -> StepPlan:
    """The account that most hosts are reached by, made where it is missing; your keys open it."""
    name = _account(view)
    reading = view.reading
    if name is None:
        return StepPlan(remains=("every host is reached as root: name one as you@host in the cluster file first",))
    accounts = _accounts(view)
    login = reading.user
    remains = (f"then write `ssh: {name}@...` for {view.host.name} into the cluster file",) if login != name else ()
    if name in accounts:
        return StepPlan(remains=remains)
    if not reading.has("useradd"):
        return StepPlan(remains=(f"there is no useradd here: make the account {name} by this system's own means",))
    keys = reading.files[AUTHORIZED]
    if not keys.content:
        return StepPlan(remains=(f"{login} has no authorized_keys here, so that no key would open {name}",))
    return StepPlan(
        changes=_made(view, name, accounts),
        reason=f"the other hosts know you as {name}: one account means the same folders, and the same owner of files",
        risk=RISK.format(login=login, name=name),
        remains=(f"{name} has no password, and no sudo", *remains),
    )


def _account(view: StepView) -> str | None:
    """The user by whom most hosts are reached; of two alike, the one who comes first in the alphabet."""
    counted = Counter(each.user for each in view.readings.values() if each.uid != 0)
    return min(counted, key=lambda name: (-counted[name], name), default=None)


def _accounts(view: StepView) -> dict[str, str]:
    """Name -> uid of every account of the host."""
    rows = (line.split(":") for line in view.reading.output("accounts").splitlines())
    return {row[0]: row[2] for row in rows if len(row) >= 3}


def _made(view: StepView, name: str, accounts: dict[str, str]) -> tuple[CommandChange, ...]:
    """The account, with the uid that it has elsewhere if that is free, and the keys."""
    uids = {str(each.uid) for each in view.readings.values() if each.user == name}
    uid = ("--uid", *uids) if len(uids) == 1 and not uids & set(accounts.values()) else ()
    here = [line.partition(":")[0] for line in view.reading.output("groups").splitlines()]
    groups = ("--groups", ",".join(here)) if here else ()
    home = f"/home/{name}"
    owner = ("--owner", name, "--group", name)
    folder, file = f"{home}/.ssh", f"{home}/.ssh/authorized_keys"
    source = AUTHORIZED.replace("~", view.reading.home, 1)
    return (
        CommandChange(
            argv=(
                "useradd",
                "--create-home",
                "--home-dir",
                home,
                "--user-group",
                "--shell",
                "/bin/bash",
                *uid,
                *groups,
                name,
            ),
            undo=("userdel", name),
            probe=("getent", "passwd", name),
        ),
        CommandChange(
            argv=("install", "--directory", "--mode", "700", *owner, folder),
            undo=(),
        ),
        CommandChange(
            argv=("install", "--mode", "600", *owner, source, file),
            undo=("rm", "--force", file),
        ),
    )


USER_STEP = PrepareStep(
    name="user",
    summary="one account on all hosts; only where it is named",
    asks=ASKS,
    plan=plan,
    only_by_name=True,
)
