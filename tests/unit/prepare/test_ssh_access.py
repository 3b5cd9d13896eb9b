"""Step `access`: a line in authorized_keys, and a key pair of this computer. Facts in, changes out."""

import dataclasses

from gangline.prepare.prepare_step import CommandChange, FileChange, FileRead, HostReading, StepView
from gangline.prepare.ssh_access import ACCESS, AUTHORIZED, CONFIG, KEY, OWN_CONFIG, plan_here
from gangline.runs.cluster import Cluster, Host

OWN = "ssh-ed25519 AAAAown alice@desk"
HOSTS = (
    Host(name="pc1", workdir="/w", python="", transport="ssh", ssh="alice@192.168.1.10"),
    Host(name="pc2", workdir="/w", python="", transport="ssh", ssh="bob@pc2", ssh_port=2222),
)


def reading(**files):
    texts = {AUTHORIZED: None, CONFIG: None, OWN_CONFIG: None, f"{KEY}.pub": None, **files}
    return HostReading(
        user="alice",
        uid=1000,
        home="/home/alice",
        files={path: FileRead(content=None if text is None else text.encode()) for path, text in texts.items()},
        folders={},
        commands={},
        programs={},
    )


def planned(found, public_key=OWN):
    cluster = Cluster(name="home", hosts=HOSTS)
    return ACCESS.plan(
        StepView(host=HOSTS[0], cluster=cluster, reading=found, readings={"pc1": found}, public_key=public_key)
    )


def test_the_key_comes_behind_those_of_others():
    (change,) = planned(reading(**{AUTHORIZED: "ssh-rsa AAAAother bob"})).changes
    assert change.path == "/home/alice/.ssh/authorized_keys"
    assert change.content == f"ssh-rsa AAAAother bob\n{OWN}\n".encode()
    assert (change.mode, change.folder_mode, change.scope) == (0o600, 0o700, "user")


def test_a_host_that_takes_a_login_by_key_needs_nothing():
    assert planned(reading(), public_key="").changes == ()


def test_a_host_that_has_the_key_and_refuses_it_is_told_and_not_changed():
    plan = planned(reading(**{AUTHORIZED: f'from="10.77.0.1" {OWN}\n'}))
    assert plan.changes == ()
    assert "has your key and refuses it" in plan.remains[0]


def test_a_key_pair_of_this_computer_and_its_entries():
    plan = plan_here(reading(**{CONFIG: "Host *\n    User root\n"}), HOSTS)
    config, own, key = plan.changes
    assert config.content.decode() == (
        "# BEGIN gangline prepare access\n"
        "Include ~/.ssh/gangline.conf\n"
        "# END gangline prepare access\n"
        "Host *\n    User root\n"
    )
    assert own.content.decode() == (
        "# BEGIN gangline prepare access pc1\n"
        "Host pc1 192.168.1.10\n"
        "    HostName 192.168.1.10\n"
        "    User alice\n"
        "    IdentityFile ~/.ssh/gangline_ed25519\n"
        "# END gangline prepare access pc1\n"
        "# BEGIN gangline prepare access pc2\n"
        "Host pc2\n"
        "    User bob\n"
        "    Port 2222\n"
        "    IdentityFile ~/.ssh/gangline_ed25519\n"
        "# END gangline prepare access pc2\n"
    )
    assert isinstance(key, CommandChange)
    assert key.argv[-2:] == ("-f", "/home/alice/.ssh/gangline_ed25519")
    assert {change.scope for change in plan.changes} == {"user"}
    assert "no passphrase" in plan.risk


def test_a_second_key_pair_is_not_made():
    first = reading()
    files = {
        f"~{each.path.removeprefix('/home/alice')}": FileRead(content=each.content)
        for each in plan_here(first, HOSTS).changes
        if isinstance(each, FileChange)
    }
    key = {f"{KEY}.pub": FileRead(content=OWN.encode())}
    after = dataclasses.replace(first, files={**first.files, **files, **key})
    assert plan_here(after, HOSTS).changes == ()
