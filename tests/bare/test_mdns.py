"""`gangline discover` finds a machine that announces itself by mDNS, and that nothing else knows of: real avahi-daemons."""

import json
import sys
import time

from tests.lab.bare import BareKind

SERVICE = """\
<?xml version="1.0" standalone="no"?>
<!DOCTYPE service-group SYSTEM "avahi-service.dtd">
<service-group>
  <name replace-wildcards="yes">%h</name>
  <service><type>_ssh._tcp</type><port>22</port></service>
</service-group>
"""
DISCOVER = [sys.executable, "-m", "gangline.cli.main", "discover", "--json"]


def test_a_machine_that_announces_its_sshd_is_found(bare):
    lab = bare({"pc1": BareKind(services=("avahi-daemon.service",), hostname="tower")})
    pc1, desk = lab["pc1"], lab.user
    pc1.write("/etc/avahi/services/ssh.service", SERVICE)
    desk.check(["mkdir", "-p", "/run/dbus"])
    desk.check(["dbus-daemon", "--system", "--fork", "--nopidfile"])
    desk.check(["avahi-daemon", "--daemonize", "--no-chroot"])
    deadline = time.monotonic() + 60
    while not (found := json.loads(desk.check(DISCOVER, timeout_s=90))["hosts"]):
        assert time.monotonic() < deadline, desk.run(["avahi-browse", "-tpra"]).stdout
    (host,) = found
    assert (host["names"], host["address"]) == (["tower"], pc1.address)
    assert "mDNS" in host["sources"]
    assert host["host_key"] == pc1.host_key
