"""Fifteen healthy variants: unusual, and right. Nothing may be reported as a failure."""

from tests.lab import network
from tests.lab.gpus import H100, RTX_4070, RTX_5070_TI, like
from tests.lab.planted import environments
from tests.lab.planted.cards import DRIVER, PEER_MEMORY, add_class, infiniband
from tests.lab.planted.environments import CPU, CUDA
from tests.lab.planted.scenes import healthy


@healthy("H01", num_hosts=3)
def plain_hosts(scene):
    """Three hosts as they come."""


@healthy("H02", special={"h1": {"python": "3.11"}})
def another_patch_level_of_python(scene):
    """3.11.2 from the distribution here, 3.11.7 built by hand there."""


@healthy("H03", nics=2)
def the_ranks_have_a_network_of_their_own(scene):
    """Two cards; the ranks use the second, ssh the first. Docker's bridge is on both hosts."""
    for host in scene.hosts:
        scene.entry(host.name).update(address=network.address(host.number, 1), interface="eth1")
    scene.everywhere("ip link add docker0 type bridge; ip addr add 172.17.0.1/16 dev docker0; ip link set docker0 up")


@healthy("H04")
def jumbo_frames_everywhere(scene):
    """MTU 9000 on all cards and in the switch."""
    for host in scene.hosts:
        scene.lab._network.run(["ip", "link", "set", network.port(host.number), "mtu", "9000"])
        host.faults.mtu(9000)


@healthy("H05", hosts_file="own")
def no_names_at_all(scene):
    """No host knows another, or itself, by name; no 127.0.1.1 either."""


@healthy("H06")
def ipv6_only(scene):
    """All addresses in the cluster file are IPv6."""
    for host in scene.hosts:
        address = f"fd77::{host.number:x}"
        scene.shell(host, f"ip -6 addr add {address}/64 dev eth0 nodad")
        scene.entry(host.name)["address"] = address


@healthy("H07", num_hosts=3)
def a_firewall_that_lets_peers_in(scene):
    """ssh from everywhere, everything from the other hosts, nothing else."""
    peers = ", ".join(host.address for host in scene.hosts)
    for host in scene.hosts:
        scene.firewall(host, "tcp dport 22 accept", f"ip saddr {{ {peers} }} accept", "drop")


@healthy("H08", special={"h1": {"hide": ("rsync", "ensurepip")}})
def no_rsync_on_one_host(scene):
    """Nor ensurepip."""


@healthy("H09", packages={**CPU, "accelerate": "1.12.0"})
def several_ranks_without_cards(scene):
    """CPU only, two ranks on each host, shares given."""
    for entry, share in zip(scene.file["hosts"], (3, 1), strict=True):
        entry.update(slots=2, share=share)


@healthy("H10", packages=CUDA)
def four_cards_here_and_one_there(scene):
    """Simulated cards, slots accordingly; the one that drives the screen has some memory in use."""
    scene.cards("h0", [RTX_4070] * 4)
    scene.cards("h1", [like(RTX_5070_TI, used_mb=700)])


@healthy("H11", names=("gpu-box-1", "node-02.lan"))
def names_with_dashes_and_dots(scene):
    """They are what the hosts call themselves."""


@healthy("H12")
def sshd_on_another_port(scene):
    """2222, and another port on each host: 2200."""
    for host, port in zip(scene.hosts, (2222, 2200), strict=True):
        scene.shell(host, f"sed -i 's/^Port .*/Port {port}/' /etc/ssh/sshd_config; kill -HUP $(cat /run/sshd.pid)")
        scene.entry(host.name).update(ssh=f"{host.login}@{host.address}", port=port)
    script = 'until ssh-keyscan -p 2222 10.77.0.10 2>/dev/null | grep -q . ; do :; done; cd "$HOME"/.ssh; echo "IdentityFile ~/.ssh/id_ed25519" | cat - config > new; mv new config'
    scene.shell(scene.desk, script)


@healthy("H13")
def an_ordinary_user_with_another_home(scene):
    """alice lives on the data disk, has her own environment there, and is no administrator."""
    for host in scene.hosts:
        home = "/data/people/alice"
        scene.shell(
            host,
            f"mkdir -p /data/people; useradd -m -d {home} -s /bin/bash -p '*' alice; mkdir -m 700 {home}/.ssh; "
            f"cp {host.home}/.ssh/authorized_keys {home}/.ssh/; chown -R alice: {home}/.ssh",
        )
        environments.make(host, CPU, f"{home}/env")
        scene.entry(host.name).update(ssh=f"alice@{host.address}")
    scene.file["environment"] = {"python": "~/env/bin/python"}
    script = 'cd "$HOME"/.ssh; echo "IdentityFile ~/.ssh/id_ed25519" | cat - config > new; mv new config'
    scene.shell(scene.desk, script)


@healthy("H14", packages=None, disk="40g", shared={"/data": "one"}, python="3.12")
def conda_environment_and_shared_folder(scene):
    """Conda's layout: a whole Python with a folder conda-meta. A shared folder that is right; disks of 40 GiB."""
    folder = "/opt/conda/envs/train"
    for host in scene.hosts:
        prefix = scene.shell(host, "python3 -c 'import sys; print(sys.base_prefix)'").strip()
        scene.shell(
            host,
            f"mkdir -p {folder} /opt/.layers; mount -t tmpfs layers /opt/.layers; mkdir /opt/.layers/u /opt/.layers/w; "
            f"mount -t overlay overlay -o lowerdir={prefix},upperdir=/opt/.layers/u,workdir=/opt/.layers/w {folder}; "
            f"mkdir -p {folder}/conda-meta; echo '==> 2026-11-01 10:00:00 <==' > {folder}/conda-meta/history",
        )
        environments.fill(host, CPU, folder)
    scene.file["environment"] = {"conda": folder}
    scene.file["shared"] = ["/data"]
    scene.words += ["--tier", "full"]


@healthy("H15", num_hosts=3, packages=CUDA, rate="1gbit")
def servers_with_infiniband(scene):
    """Two H100 in each host, InfiniBand with everything it needs; one link of 2.5 Gbit/s among those of 1 Gbit/s."""
    for host in scene.hosts:
        scene.cards(host.name, [H100, H100])
        add_class(scene, host.name, infiniband() | DRIVER | PEER_MEMORY)
    scene["h1"].faults.rate("2.5gbit")
    scene.words += ["--tier", "full"]
