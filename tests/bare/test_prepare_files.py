"""What `gangline prepare --commands` writes, on a machine with a firewall, by a user who becomes root by a password."""

import re
import sys
import time

import pytest

from tests.ansible_tools import ansible_env, ansible_folder
from tests.lab.bare import PASSWORD, BareKind, differences
from tests.lab.typist import Typist
from tests.lab.user import NewUser

GANGLINE = (sys.executable, "-m", "gangline.cli.main")
HOME = "/home/alice"
LEFT = r"/home/alice/(\.sudo_as_admin_successful|pc1\.sh|\.local(/.*)?)"
SECONDS = 8


def as_root(lab, host, *words):
    """`sudo bash pc1.sh WORDS` in a new login, with the password on stdin."""
    done = lab.log_in(host, [f"echo '{PASSWORD}' | sudo -S -p '' bash pc1.sh {' '.join(words)}"])
    return done.returncode, done.stdout + done.stderr


@pytest.mark.timeout(400)
def test_rules_of_a_script_go_back_by_themselves_unless_a_new_login_keeps_them(bare):
    lab = bare({"pc1": BareKind(firewall="nftables"), "pc2": BareKind()})
    pc1 = lab["pc1"]
    lab.let_in_by_key()
    NewUser(lab.user).types("init", "pc1", "pc2", "--yes")
    with Typist(lab.user, [*GANGLINE, "prepare", "firewall", "pc1", "--commands", "scripts"]) as screen:
        screen.expect("on pc1 for sudo:")
        screen.type(PASSWORD)
        assert screen.end() == 0, screen.text
    text = lab.user.read("scripts/pc1.sh").decode()
    assert PASSWORD not in text
    assert "firewall:root:4:60" in text
    pc1.write(f"{HOME}/pc1.sh", text.replace("firewall:root:4:60", f"firewall:root:4:{SECONDS}"))
    before = pc1.snapshot()

    code, said = as_root(lab, pc1)
    assert code == 0, said
    assert "Log in ANEW" in said
    changed = differences(before, pc1.snapshot(), ignore=LEFT)
    assert [line for line in changed if "29500" in line or "1024" in line], changed
    deadline = time.monotonic() + 6 * SECONDS
    while left := differences(before, pc1.snapshot(), ignore=LEFT):
        assert time.monotonic() < deadline, left
        time.sleep(0.5)

    assert as_root(lab, pc1)[0] == 0
    code, said = as_root(lab, pc1, "keep")
    assert (code, "firewall stays" in said) == (0, True), said
    time.sleep(SECONDS + 2)
    assert differences(before, pc1.snapshot(), ignore=LEFT) == changed
    assert "nothing to change" in as_root(lab, pc1)[1]
    assert as_root(lab, pc1, "undo")[0] == 0
    assert differences(before, pc1.snapshot(), ignore=LEFT) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_playbook_keeps_rules_over_a_new_connection(bare, request):
    tools = ansible_folder(request.config.cache)
    lab = bare({"pc1": BareKind(firewall="nftables"), "pc2": BareKind()})
    pc1 = lab["pc1"]
    lab.let_in_by_key()
    NewUser(lab.user).types("init", "pc1", "pc2", "--yes")
    with Typist(lab.user, [*GANGLINE, "prepare", "firewall", "pc1", "--ansible", "playbook"]) as screen:
        screen.expect("on pc1 for sudo:")
        screen.type(PASSWORD)
        assert screen.end() == 0, screen.text
    lab.user.write("password", PASSWORD, 0o600)
    before = pc1.snapshot()
    play = "cd playbook && exec ansible-playbook -i inventory.yml playbook.yml --become-password-file ../password"
    for changed in (r"changed=[1-9]", r"changed=0 "):
        done = lab.user.run(["sh", "-c", play], env=ansible_env(tools), timeout_s=200)
        assert done.returncode == 0, done.stdout + done.stderr
        assert re.search(changed, done.stdout), done.stdout
    assert not pc1.exists("/var/lib/gangline/prepare-script/firewall.waiting")
    assert pc1.exists("/var/lib/gangline/prepare-script/firewall.decided")
    new = differences(before, pc1.snapshot(), ignore=rf"{LEFT}|/home/alice/\.ansible(/.*)?")
    assert "/etc/nftables.conf: content" in new
    assert [line for line in new if not line.startswith(("/etc/nftables.conf", "firewall, new"))] == []
