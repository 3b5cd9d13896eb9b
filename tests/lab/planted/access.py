"""Hosts that cannot be reached, or have no Python for the agent."""

from tests.lab.planted import environments
from tests.lab.planted.scenes import planted

NO_PYTHON = ("python3", "python3.11", "python3.9", "python3.10", "python3.12", "python3.13", "python")


@planted("A01")
def the_host_is_off(scene):
    scene["h1"].power_off()


@planted("A02")
def sshd_is_not_running(scene):
    scene.shell(scene["h1"], "kill $(cat /run/sshd.pid)")


@planted("A03")
def the_host_was_installed_anew(scene):
    script = "cd /etc/ssh && rm ssh_host_* && ssh-keygen -q -t ed25519 -N '' -f ssh_host_ed25519_key"
    scene.shell(scene["h1"], f"{script} && kill -HUP $(cat /run/sshd.pid)")


@planted("A04")
def the_key_of_the_user_is_not_accepted(scene):
    scene.shell(scene["h1"], f"printf '' > {scene['h1'].home}/.ssh/authorized_keys")


@planted("A05")
def the_ssh_name_is_known_to_nobody(scene):
    # Without this the lab, which has no name server, says "try again later" where a real one says that there is none.
    scene.shell(
        scene.desk, "sed 's/^hosts:.*/hosts: files/' /etc/nsswitch.conf > /tmp/n && cat /tmp/n > /etc/nsswitch.conf"
    )
    scene.entry("h1")["ssh"] = "pc-in-the-attic"


@planted("A06", packages=None, special={"h1": {"hide": NO_PYTHON}})
def one_host_has_no_python_at_all(scene):
    environments.make(scene["h0"], environments.CPU)


@planted(
    "A07", packages=None, special={"h1": {"python": "3.7", "hide": tuple(f"/usr/bin/{name}" for name in NO_PYTHON)}}
)
def one_host_has_only_python_37(scene):
    environments.make(scene["h0"], environments.CPU)
    environments.make(scene["h1"], environments.CPU)


@planted("A08")
def one_host_has_no_pinned_key(scene):
    del scene.entry("h1")["host_key"]
