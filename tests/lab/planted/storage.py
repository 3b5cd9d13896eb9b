"""Disks, shared folders, limits of processes, variables in the dotfiles, and the model on disk."""

import random

from tests.lab.planted.scenes import planted

BASHRC = """\
# ~/.bashrc: executed by bash(1) for non-login shells.

# Note: PS1 and umask are already set in /etc/profile.
# export LS_OPTIONS='--color=auto'
# alias ls='ls $LS_OPTIONS'
"""
"""What Debian gives to root, but for one line."""
PROFILE = """\
# ~/.profile: executed by Bourne-compatible login shells.

if [ "$BASH" ]; then
  if [ -f ~/.bashrc ]; then
    . ~/.bashrc
  fi
fi

mesg n 2> /dev/null || true
"""


@planted("D01", special={"h1": {"disk": "300m"}})
def the_disk_is_full(scene):
    scene["h1"].fill_disk()


@planted("D02")
def the_disk_is_read_only(scene):
    """The kernel found an error on the data disk and mounted it again, read-only."""
    scene.everywhere("mkdir -p /data; mount -t tmpfs -o size=1g data /data; mkdir /data/gangline")
    for host in scene.hosts:
        scene.entry(host.name)["workdir"] = "/data/gangline"
    scene.shell(scene["h1"], "mount -o remount,ro /data")


@planted("D03", num_hosts=3, shared={"/data": "one"}, special={"h2": {"shared": {"/data": "other"}}})
def the_shared_folder_is_another_one(scene):
    """On h2 nothing is mounted there, or another server."""
    scene.file["shared"] = ["/data"]


@planted("D04", num_hosts=3, shared={"/data": "one"})
def the_shared_folder_cannot_be_written(scene):
    scene.file["shared"] = ["/data"]
    scene.shell(scene["h1"], "mount -o remount,bind,ro /data")


@planted("L01", special={"h1": {"shm": "32m"}})
def little_shared_memory(scene):
    """Nothing to do."""


@planted("L02")
def few_open_files(scene):
    """As LimitNOFILE=256 in a drop-in of sshd's unit: every session inherits it."""
    scene.shell(scene["h1"], "prlimit --pid $(cat /run/sshd.pid) --nofile=256:256")


@planted("V01")
def a_variable_that_nobody_reads(scene):
    scene["h1"].write(".bashrc", f"{BASHRC}\nexport NCCL_TIMEOUT=1800\n")


@planted("V02")
def a_variable_with_a_wrong_interface(scene):
    scene["h1"].write(".bashrc", f"{BASHRC}\nexport NCCL_SOCKET_IFNAME=enp6s0\n")


@planted("V03")
def variables_of_the_last_tutorial(scene):
    for rank, host in enumerate(scene.hosts):
        host.write(
            ".profile", f"{PROFILE}\nexport MASTER_ADDR=10.77.0.10\nexport MASTER_PORT=29500\nexport RANK={rank}\n"
        )


@planted("M01")
def one_byte_of_the_model_differs(scene):
    weights = random.Random(1).randbytes(3 << 20)
    files = {"config.json": b'{"model_type": "llama", "hidden_size": 64}\n', "tokenizer.json": b"{}\n"}
    for host in scene.hosts:
        other = bytes([weights[70000] ^ 1]) if host.name == "h1" else weights[70000:70001]
        parts = {**files, "model.safetensors": weights[:70000] + other + weights[70001:]}
        for name, data in parts.items():
            host.write(f"/models/tiny/{name}", data)
    scene.words += ["--same", "/models/tiny"]
