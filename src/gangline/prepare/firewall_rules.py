"""Step `firewall`: the hosts of the cluster reach each other; everybody else is let in as before.

The firewall that is active gets rules by its own means: ufw by its command, firewalld by a policy of its own file,
nftables by a block in its file. No rule of anybody else changes, and no firewall is started or stopped.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

from gangline.prepare.prepare_step import (
    BEGIN,
    REVERT_S,
    Asks,
    Change,
    CommandChange,
    FileChange,
    HostReading,
    PrepareStep,
    StepPlan,
    StepView,
    activated,
    with_block,
)

UFW_CONF = "/etc/ufw/ufw.conf"
NFTABLES_CONF = "/etc/nftables.conf"
FIREWALLD_POLICY = "/etc/firewalld/policies/gangline.xml"
RESTORED = ("/etc/iptables/rules.v4", "/etc/sysconfig/iptables")
"""Rules of iptables that are restored at boot; nobody else has to know of them."""
RANK_PORTS = "1024-65535"
"""gloo and NCCL listen on any free port, and torchrun where `ports` of the cluster file says."""
SSH_PORT = 22
COMMENT = "gangline"
ASKS = Asks(
    files=(UFW_CONF, NFTABLES_CONF, *RESTORED),
    commands={
        "firewalld": ("systemctl", "is-active", "firewalld.service"),
        "nftables": ("systemctl", "is-active", "nftables.service"),
    },
    programs=("ufw",),
)
UFW_RULES = Asks(commands={"ufw": ("ufw", "show", "added")})
NFT_TABLES = Asks(commands={"tables": ("nft", "list", "tables")})
FIREWALLD_FILE = Asks(files=(FIREWALLD_POLICY,))
INPUT_CHAIN = re.compile(r"^\s*type\s+filter\s+hook\s+input\b[^#]*;")
UFW_ENABLED = re.compile(r"^ENABLED=[\"']?yes\b", re.MULTILINE | re.IGNORECASE)
STOPS_SOMEBODY = re.compile(r"^[^#]*\b(?:drop|reject|include)\b", re.MULTILINE)
TABLE = re.compile(r"^\s*table\s+(?:(inet|ip|ip6|arp|bridge|netdev)\s+)?\S+")


# Which firewall is active, and who has to get through it.


def active_firewalls(reading: HostReading) -> list[str]:
    """ufw, firewalld, nftables, or iptables: those that are in force, as far as their own settings tell."""
    found = []
    if reading.has("ufw") and UFW_ENABLED.search(reading.files[UFW_CONF].text):
        found.append("ufw")
    found += [name for name in ("firewalld", "nftables") if reading.output(name) == "active"]
    if "nftables" in found and not STOPS_SOMEBODY.search(reading.files[NFTABLES_CONF].text):
        found.remove("nftables")
    if not found and any(reading.files[path].content for path in RESTORED):
        found.append("iptables")
    return found


def root_asks(reading: HostReading) -> Asks:
    """What only root can read of the active firewall."""
    active = active_firewalls(reading)
    if len(active) != 1:
        return Asks()
    return {"ufw": UFW_RULES, "firewalld": FIREWALLD_FILE, "nftables": NFT_TABLES}.get(active[0], Asks())


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRules:
    """Who is let in, and where."""

    peers: tuple[str, ...]
    """Addresses of the other hosts."""
    ssh_port: int

    @property
    def ports(self) -> tuple[str, ...]:
        """Of sshd and of ranks, without overlap."""
        return (str(self.ssh_port), RANK_PORTS) if self.ssh_port < 1024 else (RANK_PORTS,)

    @property
    def words(self) -> str:
        """As people say it."""
        return f"TCP ports {' and '.join(self.ports)} for {', '.join(self.peers)}"


def plan(view: StepView) -> StepPlan:
    """Rules for every other host of the cluster, in the firewall that is active here."""
    if len(view.cluster.hosts) < 2 or view.cluster.is_one_machine:
        return StepPlan(remains=("a cluster of one machine needs no rules",))
    active = active_firewalls(view.reading)
    others = [host for host in view.cluster.hosts if host.name != view.host.name]
    rules = PeerRules(
        peers=tuple(dict.fromkeys(host.address for host in others if _is_usable(host.address))),
        ssh_port=view.host.ssh_port or SSH_PORT,
    )
    unnamed = tuple(
        f"{host.name}: {host.address} is no address, so that no rule can name it; set `address`"
        for host in others
        if not _is_usable(host.address)
    )
    if not active:
        return StepPlan(remains=(NONE_ACTIVE,))
    if len(active) > 1 or active[0] not in WRITERS:
        return StepPlan(remains=(f"{' and '.join(active)}: {_BY_HAND.format(rules.words)}", *unnamed))
    if not rules.peers:
        return StepPlan(remains=unnamed)
    changes, remains = WRITERS[active[0]](view.reading, rules)
    return StepPlan(
        changes=changes,
        reason=f"{active[0]} is active: the ranks of the other hosts need {rules.words}" if changes else "",
        risk=_RISKS[active[0]] if changes else "",
        remains=(*remains, *unnamed),
        revert_s=REVERT_S if changes else None,
    )


NONE_ACTIVE = (
    "no firewall is active here: everybody in this network reaches the ports of the ranks during a run; "
    "gangline check (E-SEC-04) says who"
)
_BY_HAND = "gangline does not write its rules; let them in by hand: {}"
_AS_ROOT = "only root can read the rules of {}: run gangline prepare firewall in a terminal, for sudo's password"
_REACH = "the hosts named here reach every program that listens on these ports"
_RISKS = {
    "ufw": f"these rules come before yours; {_REACH}",
    "firewalld": f"firewalld is reloaded: rules that were added without --permanent are gone afterwards; {_REACH}",
    "nftables": f"nftables.conf is loaded again: rules that are not in that file are gone afterwards; {_REACH}",
}


def _is_usable(text: str) -> bool:
    try:
        ip = ipaddress.ip_address(text)
    except ValueError:
        return False
    return not ip.is_loopback and not ip.is_unspecified


def _version(address: str) -> int:
    return ipaddress.ip_address(address).version


# ufw: a command for each host.


Written = tuple[tuple[Change, ...], tuple[str, ...]]
"""Changes, and what remains."""


def ufw_changes(reading: HostReading, rules: PeerRules) -> Written:
    """A rule before all others, for each host that has none."""
    if "ufw" not in reading.commands:
        return (), (_AS_ROOT.format("ufw"),)
    added = {" ".join(line.split()) for line in reading.output("ufw").splitlines()}
    ports = ",".join(port.replace("-", ":") for port in rules.ports)
    changes = []
    for peer in rules.peers:
        rule = ("allow", "from", peer, "to", "any", "port", ports, "proto", "tcp", "comment", COMMENT)
        if f"ufw {' '.join(rule[:-1])} '{COMMENT}'" not in added:
            changes.append(CommandChange(argv=("ufw", "prepend", *rule), undo=("ufw", "delete", *rule[:-2])))
    return tuple(changes), ()


# firewalld: a policy of our own, before all zones; it goes on to them where it does not match.


def firewalld_changes(reading: HostReading, rules: PeerRules) -> Written:
    """The file of the policy, and a reload."""
    file = reading.files.get(FIREWALLD_POLICY)
    if file is None or file.unreadable:
        return (), (_AS_ROOT.format("firewalld"),)
    text = policy_text(rules)
    if file.text == text:
        return (), ()
    change = FileChange(path=FIREWALLD_POLICY, before=file.content, content=text.encode(), mode=0o644)
    checked = CommandChange(argv=("firewall-cmd", "--quiet", "--check-config"), undo=())
    return activated((change, checked), ("firewall-cmd", "--quiet", "--reload")), ()


def policy_text(rules: PeerRules) -> str:
    """A policy of firewalld (0.9 and newer) for what comes to this host from anywhere."""
    policy = ElementTree.Element("policy", priority="-100", target="CONTINUE")
    ElementTree.SubElement(policy, "short").text = COMMENT
    ElementTree.SubElement(policy, "description").text = "The other hosts of the cluster, by gangline prepare firewall."
    ElementTree.SubElement(policy, "ingress-zone", name="ANY")
    ElementTree.SubElement(policy, "egress-zone", name="HOST")
    for peer in rules.peers:
        for port in rules.ports:
            rule = ElementTree.SubElement(policy, "rule", family=f"ipv{_version(peer)}")
            ElementTree.SubElement(rule, "source", address=peer)
            ElementTree.SubElement(rule, "port", port=port, protocol="tcp")
            ElementTree.SubElement(rule, "accept")
    ElementTree.indent(policy)
    body = ElementTree.tostring(policy, encoding="unicode")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{body}\n'


# nftables: a block in every chain of nftables.conf that sees what comes in. An accept elsewhere would not count.


def nftables_changes(reading: HostReading, rules: PeerRules) -> Written:
    """The file with the block, checked, and loaded again."""
    if "tables" not in reading.commands:
        return (), (_AS_ROOT.format("nftables"),)
    file = reading.files[NFTABLES_CONF]
    live = [_table_name(row) for row in reading.output("tables").splitlines()]
    if strange := [name for name in live if name not in _tables(file.text)]:
        why = f"a reload of nftables.conf would flush tables that are not in it ({', '.join(strange)})"
        return (), (f"{why}: {_BY_HAND.format(rules.words)}",)
    if not _input_chains(file.text):
        why = "nftables.conf has no line of its own that begins a chain for what comes in"
        return (), (f"{why}: {_BY_HAND.format(rules.words)}",)
    text = with_rules(file.text, rules)
    if text == file.text:
        return (), ()
    change = FileChange(path=NFTABLES_CONF, before=file.content, content=text.encode("utf-8", "surrogateescape"))
    checked = CommandChange(argv=("nft", "--check", "--file", NFTABLES_CONF), undo=())
    load = ("systemctl", "reload", "nftables.service")
    return activated((change, checked), load), ()


def with_rules(text: str, rules: PeerRules) -> str:
    """nftables.conf with our block first in each chain for what comes in, in place of the one that is there."""
    while (bare := with_block(text, "firewall", [])) != text and BEGIN.format("firewall") in text:
        text = bare
    return "".join(f"{row}\n" for row in _with_blocks(text.splitlines(), rules))


def _with_blocks(rows: Sequence[str], rules: PeerRules) -> list[str]:
    chains = dict(_input_chains("\n".join(rows)))
    result: list[str] = []
    for number, row in enumerate(rows):
        result.append(row)
        if number in chains:
            result += with_block("", "firewall", _nft_rules(chains[number], rules)).splitlines()
    return result


def _input_chains(text: str) -> list[tuple[int, str]]:
    """Lines that begin a chain for what comes in, each with the family of its table."""
    family, found = "ip", []
    for number, row in enumerate(text.splitlines()):
        if (table := TABLE.match(row)) is not None:
            family = table.group(1) or "ip"
        if INPUT_CHAIN.match(row) and family in {"inet", "ip", "ip6"}:
            found.append((number, family))
    return found


def _tables(text: str) -> set[str]:
    """The tables of nftables.conf: "inet filter"."""
    return {_table_name(row) for row in text.splitlines() if TABLE.match(row)}


def _table_name(row: str) -> str:
    words = row.partition("{")[0].split()[1:]
    return " ".join(words if len(words) == 2 else ["ip", *words])


def _nft_rules(family: str, rules: PeerRules) -> list[str]:
    """Rules for the peers that a table of this family sees."""
    versions = {"inet": {4, 6}, "ip": {4}, "ip6": {6}}[family]
    ports = f"{{ {', '.join(rules.ports)} }}"
    return [
        f"\t\t{'ip' if _version(peer) == 4 else 'ip6'} saddr {peer} tcp dport {ports} accept"
        for peer in rules.peers
        if _version(peer) in versions
    ]


WRITERS: Mapping[str, Callable[[HostReading, PeerRules], Written]] = {
    "ufw": ufw_changes,
    "firewalld": firewalld_changes,
    "nftables": nftables_changes,
}
"""Firewall -> what lets the peers through it."""

FIREWALL = PrepareStep(
    name="firewall",
    summary="rules for the other hosts of the cluster, in the firewall that is active",
    asks=ASKS,
    root_asks=root_asks,
    plan=plan,
)
