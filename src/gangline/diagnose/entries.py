"""What each finding of the checks means and what to do, as docs/errors.md has it: its rows, word by word."""

# ruff: noqa: E501 - rows of a table

from __future__ import annotations

import difflib
from collections.abc import Collection
from dataclasses import dataclass

from gangline.errors import UsageError

ROWS = """
| E-ACC-01 | fail, exit code 4 | the host does not answer, so nothing can be started there | check that it is on and reachable, or take it out of the cluster file |
| E-ACC-02 | fail | it answers and cannot say its facts: no Python 3.8 or newer there, or a login that prints or asks something | install Python (`sudo apt install python3`); nothing else has to be installed |
| E-ACC-03 | fail, exit code 4 | it shows another host key than the pinned one: installed anew, or somebody is in between; nothing was sent to it | compare the fingerprint on its own console; only if it is the new one: `gangline init` |
| E-ACC-04 | fail, exit code 4 | no host key is pinned for it, so nothing tells who answers | `gangline init` shows the key and writes it down |
| E-ACC-05 | fail, exit code 4 | it refuses your ssh key | `ssh-copy-id`; a key with a passphrase has to be in your agent (`ssh-add`) |
| E-ACC-06 | fail, exit code 4 | nobody knows its ssh name | put it into `~/.ssh/config`, or write its address into the cluster file |
| E-ACC-07 | fail, exit code 4 | it refuses the connection: the machine is there, no ssh server listens | there: `sudo systemctl start ssh` (or sshd); or set `port` |
| E-NAME-01 | fail | hosts share a work folder, on one machine or on a file server: their files would overwrite each other | a `workdir` for each, or one host with more `slots` |
| E-NAME-02 | warn | several hosts have one hostname: libraries take them for one machine, logs cannot be told apart | `sudo hostnamectl set-hostname NAME` |
| E-NAME-03 | warn | a host's own name means loopback there (Debian and Ubuntu write 127.0.1.1): programs that look it up tell the others 127.x. gangline gives its own ranks their interface instead | in its `/etc/hosts`, the address of the network beside its name |
| E-NAME-04 | fail | one machine is listed twice: ranks of both would take the same GPUs | keep one, with more `slots` |
| E-NAME-05 | warn | the name of a host leads to a wrong address on another: programs that use it talk to another machine. gangline itself uses addresses | correct it in `/etc/hosts` there, or in your DNS |
| E-NAME-06 | fail | no interface of the host has the `address` of the cluster file, or it is loopback: its ranks cannot be reached | write an address of that host (`ip addr`) |
| E-CLOCK-01 | warn; fail from 5 minutes on | clocks differ: what failed first cannot be told; certificates and signed downloads are refused | `sudo timedatectl set-ntp true` |
| E-SW-01 | fail | a package that ranks import is missing | `pip install 'gangline[train]'` in that environment |
| E-SW-02 | fail | torch below 2.10: can run code hidden in a checkpoint even with weights_only (CVE-2026-24747) | `pip install -U 'torch>=2.10'` |
| E-SW-03 | fail | transformers below 5.3.0: can run code named in a model's config even without trust_remote_code (CVE-2026-4372) | `pip install -U 'transformers>=5.3.0'` |
| E-SW-04 | fail | gangline, torch, transformers, peft, safetensors or numpy differ between hosts: ranks may disagree on numbers or messages | one version on all hosts |
| E-SW-05 | warn | hosts have different versions of Python: one lock file gives other packages there | `python` of one version |
| E-SW-06 | fail | torch has no kernels for a card: sm_120 (RTX 50) needs a build for CUDA 12.8 or newer | such a torch, on all hosts |
| E-SW-07 | fail; warn | the driver is too old for torch's CUDA, or so old that it runs with limits only | a newer driver there, or a torch for an older CUDA on all hosts |
| E-SW-08 | fail | NCCL differs between hosts with GPUs: it refuses to start | one torch on all hosts: NCCL comes with it |
| E-SW-09 | warn | torch is built for different versions of CUDA: ranks round differently | one build of torch |
| E-SW-10 | fail; warn without other GPUs | a torch without CUDA beside a GPU: its ranks run on the CPU | install torch from PyTorch's index for CUDA |
| E-SW-11 | fail | the environment's Python is older than 3.10: gangline's trainer does not run | a newer `python`, or an `environment` that gangline builds |
| E-SW-12 | warn | hosts have different kinds of processors: other packages, other rounding | hosts of one kind |
| E-SW-13 | fail | the Python of the environment does not run | correct `python` or `environment` of the host |
| E-SW-14 | fail | `environment: locked`, and the host has no Python that it can be built with: CPython 3.10 to 3.14 | install Python 3.12 there; or an environment of your own |
| E-SW-15 | warn | torch, transformers or another package is older or newer than the versions that gangline is tested with: it may run as well | a tested version: the finding has the command; or a short run first |
| E-GPU-01 | fail; warn | a host without GPU among hosts with GPUs; or more `slots` than GPUs: ranks share a card, and only ddp and local-sgd run | take it out, or get its GPU to work; `slots` as many as GPUs |
| E-GPU-02 | warn | another program holds memory of a GPU (more than 2 GiB and a tenth of it) | end it, or wait for it |
| E-GPU-03 | warn | a GPU is slowed down by heat, or by its power supply | cooling, cables; `nvidia-smi -q -d PERFORMANCE` |
| E-GPU-04 | warn | uncorrectable memory errors since the driver was loaded | restart the host; if they come again, have the card replaced |
| E-GPU-05 | fail | driver and library do not match after an upgrade under the running system: no program can use the GPUs | restart; hold the driver's packages back |
| E-GPU-06 | fail | a GPU is lost: it does not answer on the bus any more | restart; check power cables and slot |
| E-GPU-07 | info | cards without bf16 beside cards with it: `precision: auto` takes fp16 for all | nothing; or leave the older cards out |
| E-GPU-08 | warn | a GPU has 4 or fewer of its PCIe lanes, or a link that stays slow under load | another slot, seat it anew, exchange its riser |
| E-GPU-09 | warn | a card that cannot be used: no driver, not loaded, no permission | install or load the driver: `nvidia-smi` has to list the card |
| E-GPU-10 | warn | a GPU is cut into instances (MIG): a rank sees one of them | `sudo nvidia-smi -mig 0` |
| E-TOPO-01 | info | GPUs that are joined through both processors only | nothing; NVLink, or one socket |
| E-TOPO-02 | info | the network adapter is on another socket than the GPUs | nothing; another slot |
| E-TOPO-03 | warn | NCCL_TOPO_FILE describes another machine, or cannot be read | take it away, or write it anew there |
| E-NET-01 | fail | no port of a host answers the others: the ranks cannot meet | let the hosts of the cluster in; the finding has the commands for ufw and firewalld |
| E-NET-02 | fail | the port where the ranks meet is closed, others are open | let the hosts of the cluster in, or set `ports` of the cluster file to a range that is open |
| E-NET-03 | fail | the ports of the data are closed (gloo and NCCL take any): the ranks would meet and then hang | let the hosts of the cluster in; the finding has the commands for ufw and firewalld |
| E-NET-04 | fail | another machine answers at a host's address | the host's own `address`, or end the other use of it |
| E-NET-05 | fail | two hosts reach each other in one direction only: it may work today and hang tomorrow | let the hosts of the cluster in |
| E-NET-06 | fail; warn | large packets vanish on the way, or interfaces have different MTU: connections open, and hang once data flows | one MTU on all interfaces and switches |
| E-NET-07 | warn; info | a link that is slow, or slower than others: every step waits for it | cable and port: 100 Mbit/s is a cable with four wires |
| E-NET-08 | fail | the host has no `interface` of the name in the cluster file | correct it, or delete the line |
| E-NET-09 | fail; warn | the `interface` has no address, or another than the host's, or the others do not reach it | delete the line, or make `address` and `interface` fit |
| E-NET-10 | fail | IPv4 and IPv6 addresses in one cluster: ranks do not meet | addresses of one kind |
| E-NET-11 | warn | a host is far away: every exchange waits for it | all hosts on one switch |
| E-NET-12 | warn; fail | packets are lost | cable, port, Wi-Fi signal: `ip -s link` |
| E-NET-13 | warn | a host is on Wi-Fi | a cable |
| E-NET-14 | warn | a host's address is on a bridge inside it (docker), or behind a tunnel | the address of its real network |
| E-NET-15 | warn | a half duplex link | let both ends negotiate; exchange the cable |
| E-NET-16 | fail; warn | several hosts have one address, or one hardware address | one of its own for each |
| E-PORT-01 | fail | no port of the range is free where the ranks would meet | end what listens there, or set `ports` |
| E-PORT-02 | warn | the kernel may give the port of the ranks to any program | set `ports` to a range outside, or reserve it by sysctl |
| E-PORT-03 | warn | few ports for connections | `net.ipv4.ip_local_port_range` |
| E-IB-01 | warn | an InfiniBand or RoCE port is down | cable, switch port, subnet manager |
| E-IB-02 | warn; info for RoCE | some hosts have no active InfiniBand: NCCL uses TCP on all, because all ranks go the same way | bring it up, or train on the others only |
| E-IB-03 | warn | GPUs and InfiniBand without nvidia_peermem or NVIDIA's open kernel module: everything is copied through the CPU's memory | `sudo modprobe nvidia_peermem` |
| E-IB-04 | warn | ports of different kind or speed | one kind; cables and switch ports of the slower hosts |
| E-IB-05 | fail | this user may not open /dev/infiniband: NCCL ends | its group; in a container `--device=/dev/infiniband` |
| E-SEC-04 | warn | ports of the training can be reached from outside the cluster: while a run lasts, who reaches them can run code as you | a firewall that lets the hosts of the cluster in, or a network of their own |
| E-DISK-01 | fail | less than 200 MiB free in the work folder | free some space, or set `workdir` to a larger disk |
| E-DISK-02 | warn | less than 2 GiB free: a save may fail once the disk is full | free some space, or set `workdir` to a larger disk |
| E-DISK-03 | fail | the work folder cannot be written: read-only, no rights, a quota | a `workdir` that you may write |
| E-DISK-04 | warn | fewer than 10,000 inodes free: no new files, whatever room there is | delete small files |
| E-DISK-05 | fail | a shared folder is another one on some host: what one writes, the other does not see | mount the same file system at the same path |
| E-DISK-06 | fail | the shared folder cannot be written there | is it mounted, not read-only, owned by this user? |
| E-DISK-07 | warn | a rename on another host is not seen within 3 s: a complete checkpoint seems not to be there | a shorter attribute cache: `actimeo=1` |
| E-DISK-08 | warn | the work folder is in memory: it takes memory from the ranks and is gone after a restart | a folder on a disk |
| E-DISK-09 | fail | a folder does not answer within 5 s: its file server is gone, programs that touch it hang | bring the server back, or `sudo umount -l` |
| E-DISK-10 | warn | writing 1 MiB takes more than 3 s | a local disk; `dmesg` tells of one that fails |
| E-DISK-11 | fail | the work folder belongs to somebody else, everybody may write to it, or a link of somebody else leads there: who owns it decides what the ranks read and run | a folder of your own, where not everybody may write |
| E-DISK-12 | warn | somebody else may put another folder in its place: a folder above it belongs to another user, or everybody may write there | `chmod o-w` or `chmod +t` on that folder, or a folder in your home |
| E-DISK-13 | fail | `environment: locked`, it is not built yet, and not even torch finds room: 0.9 GB without a GPU, 5 GB with one (on this computer less, where no wheels are brought) | free some space, or set `workdir` to a larger disk |
| E-MEM-01 | warn | less than 1 GiB of memory available: the kernel may end a rank while it loads the model | end other programs, or give the host fewer `slots` |
| E-MEM-02 | warn | a control group allows less than 8 GiB and half of the memory: a rank is killed although `free` shows room | a higher limit of the container or service |
| E-LIM-01 | warn | fewer than 1024 open files allowed | `nofile` in `/etc/security/limits.conf` |
| E-LIM-02 | warn | less than 1 GiB may be locked beside active RDMA: NCCL cannot register buffers | `memlock` unlimited; in a container `--ulimit memlock=-1` |
| E-LIM-03 | warn | /dev/shm has less than 1 GiB: bus errors in NCCL and data loaders | in a container `--shm-size=8g` |
| E-LIM-04 | warn | fewer than 1024 processes allowed | `nproc` in `/etc/security/limits.conf` |
| E-LIM-05 | warn | systemd ends a user's processes at logout: the run would end with the connection | `loginctl enable-linger` |
| E-ENV-01 | warn | a variable that no program reads (NCCL_TIMEOUT and others) | delete the line; collectives wait as long as the job says |
| E-ENV-02 | fail in the cluster file; warn | NCCL_SOCKET_IFNAME fits no interface there | delete it: gangline sets the exact one for every host |
| E-ENV-03 | fail in the cluster file; warn | GLOO_SOCKET_IFNAME names no interface there, or one of them is loopback | delete it: gangline sets the exact one for every host |
| E-ENV-04 | warn | MASTER_ADDR, RANK or their like are set by hand | delete the lines: gangline sets them for each rank |
| E-ENV-05 | warn | NCCL_IB_DISABLE=1 although InfiniBand or RoCE is active | delete the line, unless on purpose |
| E-ENV-06 | warn | NCCL_IB_GID_INDEX is written down: it changes with addresses and firmware | delete the line |
| E-ENV-07 | warn | CUDA_VISIBLE_DEVICES leaves fewer GPUs than `slots` | delete the line, or fewer `slots` |
| E-DATA-01 | info | the model or the data is not on all hosts | nothing: `gangline train` brings it |
| E-DATA-02 | fail | the model or the data is not the same on all hosts: nothing would say so while training | decide which is right, and delete the others |
| E-DATA-03 | fail | the model or the data is on no host, or cannot be read | correct its path in the job, or its rights |
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingEntry:
    """One finding."""

    id: str
    severity: str
    meaning: str
    fix: str

    def lines(self) -> list[str]:
        """For people."""
        return [f"{self.id}  {self.severity}", f"  means  {self.meaning}", f"  fix    {self.fix}"]


def entries() -> dict[str, FindingEntry]:
    """All findings by id, in the order of the page."""
    rows = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in ROWS.strip().splitlines()]
    return {
        name: FindingEntry(id=name, severity=severity, meaning=meaning, fix=fix)
        for name, severity, meaning, fix in rows
    }


def find_entry(name: str) -> FindingEntry:
    """The finding of that id, in any case of letters; raises UsageError with the nearest ids."""
    known = entries()
    if (entry := known.get(name.upper())) is not None:
        return entry
    near = _nearest(name.upper(), known)
    raise UsageError(
        f"no finding is called {name}",
        seen=f"the nearest are {', '.join(near[:6])}" if near else "ids look like E-NET-07",
        fix="docs/errors.md lists all of them",
    )


def _nearest(name: str, known: Collection[str]) -> list[str]:
    """Nearest first: alike ids of its family, alike ids of others, then the rest of its family."""
    if members := [each for each in known if each.startswith(f"{name}-")]:
        return members  # it names a family
    family = name.rpartition("-")[0]
    alike = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    members = [each for each in known if each.rpartition("-")[0] == family]
    ordered = [*(each for each in alike if each in members), *alike, *members]
    return list(dict.fromkeys(ordered))
