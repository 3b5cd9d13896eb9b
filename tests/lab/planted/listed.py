"""Sixty planted misconfigurations, written down before the rules that have to find them.

Each row: name, id of the finding that must be shown (severity fail or warn), how it is planted, and what is wrong in the words of a user.
real: in a lab host. stub: with the simulated GPUs of the lab. recorded: in the facts of a host, where the lab cannot have the thing itself.

35 of the 60 are held out: who writes a rule may try it on the rows for which `held_out` is false; the others are planted by
somebody else, who has not read the rules, and are run once the rules stand. The split is drawn by a checksum of the name.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Planted:
    """One misconfiguration."""

    name: str
    finding: str
    how: Literal["real", "stub", "recorded"]
    words: str

    @property
    def held_out(self) -> bool:
        """Whether the authors of the rules may not try it."""
        return zlib.crc32(f"held out {self.name}".encode()) % 2 == 1


PLANTED = (
    Planted("A01", "E-ACC-01", "real", "the host is off: its sshd and the whole machine do not answer"),
    Planted("A02", "E-ACC-07", "real", "sshd is not running: port 22 refuses"),
    Planted("A03", "E-ACC-03", "real", "the host was installed anew and shows another host key"),
    Planted("A04", "E-ACC-05", "real", "the user's key is not in authorized_keys of one host"),
    Planted("A05", "E-ACC-06", "real", "the ssh name in the cluster file is not known to anybody"),
    Planted("A06", "E-ACC-02", "real", "one host has no Python at all"),
    Planted("A07", "E-ACC-02", "real", "one host has only Python 3.7"),
    Planted("A08", "E-ACC-04", "real", "one host has no pinned host key in the cluster file"),
    Planted("N01", "E-NAME-02", "real", "two hosts both call themselves localhost"),
    Planted("N02", "E-NAME-03", "real", "the host's own name resolves to 127.0.1.1, as Debian and Ubuntu write it"),
    Planted("N03", "E-NAME-04", "real", "one machine is listed twice under two names"),
    Planted("N04", "E-NAME-06", "real", "the address in the cluster file belongs to no interface of that host"),
    Planted("N05", "E-NAME-05", "real", "a host's hosts file sends the name of another host to a wrong address"),
    Planted("C01", "E-CLOCK-01", "recorded", "one clock is 90 seconds ahead"),
    Planted("C02", "E-CLOCK-01", "recorded", "one clock is a day behind"),
    Planted("S01", "E-SW-01", "real", "the environment of one host lacks transformers"),
    Planted("S02", "E-SW-02", "recorded", "torch 2.6 on one host"),
    Planted("S03", "E-SW-03", "recorded", "transformers 5.1 everywhere"),
    Planted("S04", "E-SW-04", "recorded", "torch 2.13.0 here and 2.12.1 there"),
    Planted("S05", "E-SW-05", "real", "Python 3.13 on one host, 3.11 on the others"),
    Planted(
        "S06",
        "E-SW-06",
        "stub",
        "an RTX 5070 Ti (sm_120) with a torch built for CUDA 12.4, which has no kernels for it",
    ),
    Planted("S07", "E-SW-07", "stub", "a driver of series 525 with a torch built for CUDA 12.8"),
    Planted("S08", "E-SW-08", "recorded", "NCCL 2.27 here and 2.21 there"),
    Planted("S09", "E-SW-10", "stub", "a host with GPUs whose torch is the CPU build"),
    Planted("G01", "E-GPU-01", "stub", "slots: 2 on a host with one GPU"),
    Planted("G02", "E-GPU-02", "stub", "another program holds 9 of 12 GiB of a card"),
    Planted("G03", "E-GPU-03", "stub", "a card is slowed down by its temperature"),
    Planted("G04", "E-GPU-04", "stub", "a card counts uncorrectable ECC errors"),
    Planted("G05", "E-GPU-05", "stub", "an unattended upgrade: NVML driver/library version mismatch"),
    Planted("G06", "E-GPU-06", "stub", "a card has fallen off the bus (GPU is lost)"),
    Planted("G07", "E-GPU-01", "stub", "one host of three has no GPU at all"),
    Planted("G08", "E-GPU-08", "stub", "a card runs on 1 PCIe lane of 16"),
    Planted("W01", "E-NET-01", "real", "a firewall drops everything but ssh between two hosts"),
    Planted("W02", "E-NET-03", "real", "only the rendezvous port is open; ephemeral ports are dropped"),
    Planted("W03", "E-NET-02", "real", "the rendezvous range is rejected on the head, other ports are open"),
    Planted("W04", "E-NET-05", "real", "pc1 reaches pc3, pc3 does not reach pc1"),
    Planted("W05", "E-NET-04", "real", "the address of one host is answered by another machine"),
    Planted("W06", "E-NET-06", "real", "an MTU black hole: large packets vanish on the way"),
    Planted("W07", "E-NET-06", "real", "one NIC has MTU 9000, the others 1500"),
    Planted("W08", "E-NET-07", "real", "one link runs at 100 Mbit/s, the others at 1 Gbit/s"),
    Planted("W09", "E-NET-08", "real", "the cluster file names an interface that the host does not have"),
    Planted("W10", "E-NET-09", "real", "the cluster file names the second NIC, whose network the others cannot reach"),
    Planted("W11", "E-NET-12", "real", "5 % of the packets to one host are lost"),
    Planted("W12", "E-NET-13", "recorded", "one host is on Wi-Fi"),
    Planted("W13", "E-NET-14", "recorded", "the address of one host is that of a docker bridge"),
    Planted("W14", "E-NET-10", "real", "one host has an IPv6 address in the cluster file, the others IPv4"),
    Planted("B01", "E-IB-01", "recorded", "an InfiniBand port is down on one host"),
    Planted("B02", "E-IB-02", "recorded", "InfiniBand on two hosts of three"),
    Planted("B03", "E-IB-03", "recorded", "GPUs and InfiniBand without nvidia_peermem"),
    Planted("X01", "E-SEC-04", "real", "the training ports are reachable from a machine outside the cluster"),
    Planted("D01", "E-DISK-01", "real", "the disk with the work folder is full"),
    Planted("D02", "E-DISK-03", "real", "the work folder is on a read-only mount"),
    Planted("D03", "E-DISK-05", "real", "the shared folder is another one on one host"),
    Planted("D04", "E-DISK-06", "real", "the shared folder cannot be written on one host"),
    Planted("L01", "E-LIM-03", "real", "/dev/shm has 32 MiB"),
    Planted("L02", "E-LIM-01", "real", "only 256 open files are allowed"),
    Planted("V01", "E-ENV-01", "real", "NCCL_TIMEOUT=1800 is exported in .bashrc"),
    Planted("V02", "E-ENV-02", "real", "NCCL_SOCKET_IFNAME names an interface that the host does not have"),
    Planted("V03", "E-ENV-04", "real", "MASTER_ADDR and RANK are exported in .profile on every host"),
    Planted("M01", "E-DATA-02", "real", "one file of the model differs by a byte on one host"),
)
