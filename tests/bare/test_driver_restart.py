"""`gangline prepare driver` asks for the restart and waits for it, on a machine with a real systemd and a real sudo.

SIMULATED: the package managers, the card on the bus, and what `systemctl reboot` does: the lab kills process 1 and
starts it again on the same files.
"""

import sys
import threading

import pytest

from tests.lab.bare import BareKind
from tests.lab.hosts import lab_folders
from tests.lab.test_prepare_access import CANARY
from tests.lab.typist import Typist
from tests.lab.user import NewUser
from tests.process.prepare.test_driver import CARD, DEVICES, OPEN
from tests.waiting import wait_until

ASKED = "/run/asked-for-a-restart"
SYSTEMCTL = f"""#!/bin/sh
case "$*" in *reboot*) touch {ASKED};; *) exec /usr/bin/systemctl "$@";; esac
"""
SET_UP = f"""
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.process.prepare.simulated_packages import set_up
set_up(Path("/var/lib/simulated"), "ubuntu", devices={DEVICES!r})
for program in Path("/var/lib/simulated/bin").iterdir():
    if program.name != "systemctl":
        Path("/usr/local/bin", program.name).symlink_to(program)
"""


@pytest.mark.timeout(500)
def test_the_restart_is_asked_for_and_waited_for(bare, request):
    lab = bare({"pc1": BareKind(binds=lab_folders())})
    pc1 = lab["pc1"]
    pc1.check([sys.executable, "-c", SET_UP, str(request.config.rootpath)])
    pc1.write("/usr/local/bin/systemctl", SYSTEMCTL, 0o755)
    pc1.write("/usr/local/bin/find", f"#!/bin/sh\nprintf '%s' '{CARD}'\n", 0o755)
    lab.let_in_by_key()
    NewUser(lab.user).types("init", "pc1", "--yes")

    def restart():
        wait_until(lambda: pc1.run(["test", "-e", ASKED]).returncode == 0, "pc1 was asked to restart", timeout_s=300)
        pc1.reboot()

    lab_side = threading.Thread(target=restart)
    lab_side.start()
    with Typist(lab.user, [sys.executable, "-m", "gangline.cli.main", "prepare", "driver"]) as screen:
        for question, answer in (
            ("make 3 changes on 1 host?", "y"),
            ("for sudo:", pc1.password),
            ("restart pc1 now, and wait? It ends all that runs there [y/N]", "y"),
            ("pc1 is back after ", ""),
        ):
            screen.expect(question)
            screen.type(answer)
        assert screen.end() == 0, screen.text
    lab_side.join()
    assert "pc1: the driver is installed and not loaded: restart it" in screen.text
    assert f'["apt-mark", "hold", "{OPEN}"]' in pc1.check(["cat", "/var/lib/simulated/state/argv"])
    assert pc1.run(["test", "-e", ASKED]).returncode == 1
    assert pc1.password not in screen.text
    for machine in (pc1, lab.user):
        own = ("/etc", "/root", "/home", "/var/lib", "/var/log") if machine is pc1 else (str(machine.home),)
        found = machine.run(["python3", "-c", CANARY, pc1.password, "/tmp", *own])
        assert found.stdout == "", f"{machine.name}: {found.stdout}"
