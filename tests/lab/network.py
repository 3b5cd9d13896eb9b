"""The network of a lab: a switch without a name, cables to the hosts, and what can go wrong with them.

Addresses: host number i has 10.77.0.(10+i), and 10.78.0.(10+i) on its second network card. The user's computer
is 10.77.0.2, the outsider 10.77.0.3. Nothing leads out of these networks.
"""

import contextlib
import subprocess

from tests.lab.namespaces import PATH, LabFailed, Mode, Space

DESK_NUMBER = 2
OUTSIDER_NUMBER = 3
FIRST_NUMBER = 10


def address(number: int, nic: int = 0) -> str:
    """The address of the machine with that number, on that network card."""
    return f"10.{77 + nic}.0.{number}"


class Network:
    """The switch: one bridge per network card, one port per host and card."""

    def __init__(self, mode: Mode, *, num_nics: int, env: dict[str, str]) -> None:
        bridges = [f"link add br{nic} type bridge\nlink set br{nic} up" for nic in range(num_nics)]
        self.mode = mode
        self.num_nics = num_nics
        self.space = Space("switch", mode.switch_argv(), {**env, "NETWORK": "\n".join(["link set lo up", *bridges])})
        try:
            self.space.await_pid()
        except LabFailed:
            self.space.close()
            self.space.forget()
            raise

    def plug(self, cables: list[tuple[int, int]]) -> None:
        """Give each process of the (pid, number) pairs its network cards."""
        lines = [
            line
            for pid, number in cables
            for nic in range(self.num_nics)
            for line in (
                f"link add {port(number, nic)} type veth peer name eth{nic} netns {pid}",
                f"link set {port(number, nic)} master br{nic} up",
            )
        ]
        self.run(["ip", "-batch", "-"], "\n".join(lines) + "\n")

    def pull(self, number: int) -> None:
        """Remove the cables of a host that has ended; the kernel does that, too, but later."""
        for nic in range(self.num_nics):
            with contextlib.suppress(LabFailed):
                self.run(["ip", "link", "delete", port(number, nic)])

    def run(self, argv: list[str], text: str = "") -> str:
        """Run a command in the switch."""
        return run_in(self.mode, self.space.pid, argv, text)


def port(number: int, nic: int = 0) -> str:
    """The name of a host's port in the switch."""
    return f"s{number}e{nic}"


def run_in(mode: Mode, pid: int, argv: list[str], text: str = "") -> str:
    """Run a command of this machine in the network namespace of `pid`, as its administrator."""
    done = subprocess.run(
        [*mode.enter_argv(pid, only_network=True), *argv],
        input=text,
        env={"PATH": PATH},
        capture_output=True,
        text=True,
        timeout=30,
    )
    if done.returncode:
        raise LabFailed(f"{argv}: {done.stderr.strip()}\n{text}")
    return done.stdout


class Faults:
    """What is wrong with one host's network. Everything is undone by `heal`."""

    def __init__(self, network: Network, space: Space, number: int) -> None:
        self._network = network
        self._space = space
        self._number = number

    def rate(self, speed: str | None) -> None:
        """Links of that speed ("100mbit"), in both directions; None: as fast as the machine."""
        for nic in range(self._network.num_nics):
            self._host(_shape(f"eth{nic}", speed))
            self._network.run(_shape(port(self._number, nic), speed))

    def delay(self, delay_ms: float) -> None:
        """Everything that it sends arrives later. Needs netem."""
        self._host(["tc", "qdisc", "replace", "dev", "eth0", "root", "netem", "delay", f"{delay_ms}ms"])

    def loss(self, percent: float) -> None:
        """Packets to it are lost at random."""
        self._rule("in", f'iifname "eth*" numgen random mod 10000 < {round(percent * 100)} drop')

    def drop(self, *, port: int | str | None = None, peer: str | None = None, protocol: str = "tcp") -> None:
        """Its firewall drops silently what others begin: on a port ("1024-65535"; None: on all), from one peer's address.

        What it begins itself works, as with every firewall. `cut` is for a broken path.
        """
        self._rule("in", f"{_beginning(port, peer, protocol)} drop")

    def reject(self, *, port: int | str | None = None, peer: str | None = None) -> None:
        """As `drop`, for TCP, but the other side is told at once: connection refused."""
        self._rule("in", f"{_beginning(port, peer, 'tcp')} reject with tcp reset")

    def cut(self, peer: str) -> None:
        """Nothing goes between it and the peer with that address, in either direction."""
        self.deafen(peer)
        self._rule("out", f"ip daddr {peer} drop")

    def deafen(self, peer: str) -> None:
        """Nothing from the peer with that address reaches it, not even answers; what it sends goes there."""
        self._rule("in", f"ip saddr {peer} drop")

    def unplug(self, nic: int | None = None) -> None:
        """The cable is out, of one card or all: nothing comes, nothing goes, nobody is told."""
        self._switch_ports("down", nic)

    def black_hole(self, mtu: int = 1000, nic: int = 0) -> None:
        """Large packets to and from it vanish without a word, as with a tunnel or jumbo frames on one side only."""
        self._rule("in", f"iifname eth{nic} meta length > {mtu} drop")
        self._rule("out", f"oifname eth{nic} meta length > {mtu} drop")

    def mtu(self, size: int, nic: int = 0) -> None:
        """The size of packets on its own card."""
        self._host(["ip", "link", "set", f"eth{nic}", "mtu", str(size)])

    def sysctl(self, name: str, value: int | str) -> None:
        """A setting of its network: sysctl("net.ipv4.tcp_retries2", 3) notices dead peers after 6.5 s."""
        assert name.startswith("net."), "the other settings are of the whole machine"
        self._host(["sysctl", "-q", "-w", f"{name}={value}"])

    def heal(self) -> None:
        """Undo all faults."""
        self._host(["nft", "-f", "-"], "add table inet lab\ndelete table inet lab\n")
        self._switch_ports("up", None)
        self.rate(None)
        for nic in range(self._network.num_nics):
            self.mtu(1500, nic)

    def _rule(self, chain: str, rule: str) -> None:
        hook = {"in": "input", "out": "output"}[chain]
        text = (
            "add table inet lab\n"
            f"add chain inet lab {chain} {{ type filter hook {hook} priority 0; policy accept; }}\n"
            f"add rule inet lab {chain} {rule}\n"
        )
        self._host(["nft", "-f", "-"], text)

    def _switch_ports(self, state: str, nic: int | None) -> None:
        for each in range(self._network.num_nics) if nic is None else [nic]:
            self._network.run(["ip", "link", "set", port(self._number, each), state])

    def _host(self, argv: list[str], text: str = "") -> str:
        return run_in(self._network.mode, self._space.pid, argv, text)


def _beginning(port: int | str | None, peer: str | None, protocol: str) -> str:
    words = ['iifname "eth*" ct state new', f"meta l4proto {protocol}"]
    words += [f"ip saddr {peer}"] if peer else []
    words += [f"{protocol} dport {port}"] if port is not None else []
    return " ".join(words)


def _shape(device: str, speed: str | None) -> list[str]:
    if speed is None:
        # "noqueue" is what a veth has from birth; replacing by it is how to delete without an error.
        return ["tc", "qdisc", "replace", "dev", device, "root", "noqueue"]
    return [
        *("tc", "qdisc", "replace", "dev", device, "root"),
        *("tbf", "rate", speed, "burst", "128kb", "latency", "30ms"),
    ]
