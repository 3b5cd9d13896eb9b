"""What only root can read: asked of sudo where a step needs it, and missing where nobody types a password."""

import json
from types import SimpleNamespace

import pytest

from gangline.prepare.host_side import NEEDS_PASSWORD, HostSide, Passwords
from gangline.prepare.prepare_step import Asks, PrepareStep, StepPlan
from gangline.transport.bootstrap import prepare_words


class Host:
    """A host whose sudo wants a password, and that has one file for root alone."""

    def __init__(self, password="secret"):
        self.password = password
        self.scopes = []

    def run(self, argv, *, stdin, timeout_s):
        request = json.loads(stdin[len(prepare_words()) :])
        self.scopes.append(request["scope"])
        if request["scope"] == "root" and request.get("password") != self.password:
            record = {"kind": "error", "what": NEEDS_PASSWORD, "seen": "", "fix": ""}
        else:
            user = "root" if request["scope"] == "root" else "alice"
            files = {name: {"kind": "file", "content": "eA==", "mode": 384} for name in request["files"]}
            record = {"kind": "read", "uid": 1, "user": user, "home": "/home/alice", "files": files}
            record |= {"folders": {}, "commands": {}, "programs": {}}
        return SimpleNamespace(stdout=json.dumps(record) + "\n", stderr="", returncode=0)


def step(*, root_asks):
    asks = Asks(files=("/etc/open",))
    return PrepareStep(name="x", summary="", asks=asks, plan=lambda view: StepPlan(), root_asks=root_asks)


def side(host, answer):
    return HostSide("pc1", host, user="alice", passwords=Passwords(lambda question: answer))


def test_a_step_that_needs_root_gets_both_answers_as_one():
    host = Host()
    found = side(host, "secret").read_for([step(root_asks=lambda reading: Asks(files=("/etc/secret",)))])
    assert (found.user, set(found.files)) == ("alice", {"/etc/open", "/etc/secret"})
    assert host.scopes == ["user", "root", "root"]


@pytest.mark.parametrize("root_asks", [None, lambda reading: Asks()])
def test_nobody_is_asked_for_a_password_that_is_not_needed(root_asks):
    host = Host()
    found = side(host, None).read_for([step(root_asks=root_asks)])
    assert set(found.files) == {"/etc/open"}
    assert host.scopes == ["user"]


def test_without_a_password_the_rest_is_there():
    found = side(Host(), None).read_for([step(root_asks=lambda reading: Asks(files=("/etc/secret",)))])
    assert set(found.files) == {"/etc/open"}
