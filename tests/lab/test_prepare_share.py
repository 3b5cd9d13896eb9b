"""What `gangline prepare share` exports, served by a real NFS server in user space and read over the wire.

The kernel here has no NFS: nfs-ganesha stands for nfsd, with the addresses and options of our line in its own words, and
libnfs for a mount.
"""

import re
import shutil

import pytest

from gangline.prepare.nfs_share import OWN_EXPORTS
from gangline.runs.cluster import Host
from tests.unit.prepare.test_nfs_share import planned, texts
from tests.waiting import wait_until

FOLDER = "/srv/models"
SERVER = """
NFS_CORE_PARAM {{ Protocols = 4; Enable_NLM = false; Enable_RQUOTA = false; }}
NFSV4 {{ Graceless = true; RecoveryBackend = fs; }}
EXPORT {{
    Export_Id = 1; Path = {folder}; Pseudo = {folder}; Protocols = 4; SecType = sys; Access_Type = NONE;
    {clients}
    FSAL {{ Name = VFS; }}
}}
"""
CLIENT = "CLIENT {{ Clients = {address}; Access_Type = {access}; Squash = {squash}; }}"
ROOT, ALICE = 0, 1000


def in_the_words_of_ganesha(line):
    """Our line of exports(5) as a block of nfs-ganesha."""
    folder, *guests = line.split()
    clients = []
    for guest in guests:
        address, options = re.fullmatch(r"(\S+)\((.*)\)", guest).groups()
        access = "RW" if "rw" in options.split(",") else "RO"
        squash = "Root_Squash" if "root_squash" in options.split(",") else "No_Root_Squash"
        clients.append(CLIENT.format(address=address, access=access, squash=squash))
    return SERVER.format(folder=folder, clients="\n    ".join(clients))


def reads(machine, head, name, uid):
    """What a user of a machine reads of a file there; None where it is refused."""
    url = f"nfs://{head.address}{FOLDER}/{name}?version=4&uid={uid}&gid={uid}"
    done = machine.run(["timeout", "20", "nfs-cat", url])
    return done.stdout if done.returncode == 0 and done.stdout else None


@pytest.mark.slow
@pytest.mark.lab("root")
@pytest.mark.timeout(200)
def test_the_other_hosts_read_and_write_and_neither_their_root_nor_anybody_else_does(lab):
    if not (shutil.which("ganesha.nfsd") and shutil.which("nfs-cat")):
        pytest.skip("nfs-ganesha-vfs and libnfs-utils are not installed")
    machines = lab(2, names=("pc1", "pc2"))
    pc1, pc2 = machines.hosts
    hosts = tuple(
        Host(name=each.name, workdir="/w", python="", transport="ssh", address=each.address) for each in machines.hosts
    )
    line = texts(planned(1, shared=(FOLDER,), hosts=hosts))[OWN_EXPORTS].splitlines()[1]
    pc1.check(["mkdir", "-p", FOLDER, "/run/ganesha", "/var/lib/nfs/ganesha"])
    pc1.check(["mount", "-t", "tmpfs", "share", FOLDER])
    script = f"chmod 755 {FOLDER}; cd {FOLDER}; echo ours > a; echo hers > b; chown {ALICE} a; chmod 600 a b"
    pc1.check(["sh", "-ec", script])
    pc1.write("/etc/ganesha/ganesha.conf", in_the_words_of_ganesha(line))
    log = f"{pc1.home}/ganesha.log"
    pc1.popen(["ganesha.nfsd", "-F", "-L", log, "-f", "/etc/ganesha/ganesha.conf"])
    wait_until(lambda: reads(pc2, pc1, "a", ALICE) == "ours\n", "pc2 reads a file", timeout_s=25)
    assert reads(pc2, pc1, "b", ROOT) is None, "root of pc2 is nobody there"
    assert reads(machines.outsider, pc1, "a", ALICE) is None, "an outsider is refused"
    assert reads(pc2, pc1, "a", ALICE) == "ours\n"
