"""Machines that announce themselves by mDNS: `gangline discover` finds them, and `prepare names` renames them. Real avahi-daemons."""

import json
import sys
import time

import pytest

from tests.lab.bare import BareKind
from tests.lab.typist import Typist
from tests.lab.user import NewUser

SERVICE = """\
<?xml version="1.0" standalone="no"?>
<!DOCTYPE service-group SYSTEM "avahi-service.dtd">
<service-group>
  <name replace-wildcards="yes">%h</name>
  <service><type>_ssh._tcp</type><port>22</port></service>
</service-group>
"""
GANGLINE = (sys.executable, "-m", "gangline.cli.main")
DISCOVER = [*GANGLINE, "discover", "--json"]


def hears(lab):
    """Have the desk listen for what machines announce."""
    lab.user.check(["mkdir", "-p", "/run/dbus"])
    lab.user.check(["dbus-daemon", "--system", "--fork", "--nopidfile"])
    lab.user.check(["avahi-daemon", "--daemonize", "--no-chroot"])


def test_a_machine_that_announces_its_sshd_is_found(bare):
    lab = bare({"pc1": BareKind(services=("avahi-daemon.service",), hostname="tower")})
    pc1, desk = lab["pc1"], lab.user
    pc1.write("/etc/avahi/services/ssh.service", SERVICE)
    hears(lab)
    deadline = time.monotonic() + 60
    while not (found := json.loads(desk.check(DISCOVER, timeout_s=90))["hosts"]):
        assert time.monotonic() < deadline, desk.run(["avahi-browse", "-tpra"]).stdout
    (host,) = found
    assert (host["names"], host["address"]) == (["tower"], pc1.address)
    assert "mDNS" in host["sources"]
    assert host["host_key"] == pc1.host_key


@pytest.mark.timeout(400)
def test_a_machine_that_gets_a_name_of_its_own_announces_it(bare):
    kind = BareKind(services=("avahi-daemon.service",), hostname="ubuntu")
    lab = bare({"pc1": kind, "pc2": kind})
    lab.let_in_by_key()
    NewUser(lab.user).types("init", "pc1", "pc2", "--yes")
    hears(lab)
    with Typist(lab.user, [*GANGLINE, "prepare", "names", "--yes"]) as screen:
        screen.expect("for sudo:")
        screen.type(lab["pc1"].password)
        screen.expect("the same as before")
        screen.type(lab["pc2"].password)
        assert screen.end() == 0, screen.text
    for name in ("pc1", "pc2"):
        assert lab.user.check(["avahi-resolve", "-4", "-n", f"{name}.local"]).split()[1] == lab[name].address
