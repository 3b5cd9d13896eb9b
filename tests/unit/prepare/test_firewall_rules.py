"""Step `firewall`: which firewall is active, and the rules that let the other hosts in. Nothing else changes."""

import pytest

from gangline.prepare import firewall_rules
from gangline.prepare.firewall_rules import FIREWALL, active_firewalls
from gangline.prepare.prepare_step import CommandChange, FileChange, FileRead, HostReading, StepView
from gangline.runs.cluster import Cluster, Host

ADDRESSES = {"pc1": "192.168.1.10", "pc2": "192.168.1.11", "pc3": "192.168.1.12"}
UFW = {"files": {firewall_rules.UFW_CONF: "# comment\nENABLED=yes\nLOGLEVEL=low\n"}, "programs": ["ufw"]}
FIREWALLD = {"commands": {"firewalld": "active"}, "programs": ["firewall-cmd"]}
TABLE = """#!/usr/sbin/nft -f
flush ruleset
table inet filter {
\tchain input {
\t\ttype filter hook input priority filter; policy drop;
\t\ttcp dport 22 accept
\t}
}
"""
NFTABLES = {
    "commands": {"nftables": "active", "tables": "table inet filter"},
    "files": {firewall_rules.NFTABLES_CONF: TABLE},
}
"""As root sees it."""


def reading(*, files=(), commands=(), programs=(), unreadable=()):
    found = {path: FileRead() for path in firewall_rules.ASKS.files}
    found |= {path: FileRead(content=text.encode()) for path, text in dict(files).items()}
    found |= {path: FileRead(unreadable="permission denied") for path in unreadable}
    return HostReading(
        user="alice",
        uid=1000,
        home="/home/alice",
        files=found,
        folders={},
        commands=dict(commands),
        programs=dict.fromkeys(programs, "/usr/sbin/x"),
    )


def with_root(there, **more):
    """The same host, with what root reads."""
    return reading(
        files={**there.get("files", {}), **more.get("files", {})},
        commands={**there.get("commands", {}), **more.get("commands", {})},
        programs=there.get("programs", ()),
    )


def planned(found, *, addresses=ADDRESSES, ssh_port=None):
    hosts = tuple(
        Host(name=name, workdir="/w", python="", transport="ssh", address=address, ssh_port=ssh_port)
        for name, address in addresses.items()
    )
    cluster = Cluster(name="home", hosts=hosts)
    return FIREWALL.plan(StepView(host=hosts[0], cluster=cluster, reading=found, readings={"pc1": found}))


def applied(plan, text):
    """What a file is after the plan."""
    (change,) = [each for each in plan.changes if isinstance(each, FileChange)]
    assert change.before == (None if text is None else text.encode())
    return change.content.decode()


@pytest.mark.parametrize(
    ("there", "names"),
    [
        ({}, []),
        (UFW, ["ufw"]),
        ({**UFW, "files": {firewall_rules.UFW_CONF: "ENABLED=no\n"}}, []),
        ({**UFW, "programs": []}, []),
        (FIREWALLD, ["firewalld"]),
        (NFTABLES, ["nftables"]),
        ({**NFTABLES, "files": {firewall_rules.NFTABLES_CONF: TABLE.replace("drop", "accept")}}, []),
        ({**NFTABLES, "commands": {"nftables": "inactive"}}, []),
        ({"files": {"/etc/iptables/rules.v4": "*filter\n"}}, ["iptables"]),
        ({**UFW, "commands": {"firewalld": "active"}}, ["ufw", "firewalld"]),
    ],
)
def test_the_active_firewall_is_recognised(there, names):
    assert active_firewalls(reading(**there)) == names


def test_ufw_gets_a_rule_for_each_other_host_before_all_others():
    plan = planned(with_root(UFW, commands={"ufw": "Added user rules:\nufw allow 22/tcp"}))
    assert [change.argv for change in plan.changes] == [
        (
            "ufw",
            "prepend",
            "allow",
            "from",
            address,
            "to",
            "any",
            "port",
            "22,1024:65535",
            "proto",
            "tcp",
            "comment",
            "gangline",
        )
        for address in ("192.168.1.11", "192.168.1.12")
    ]
    assert plan.changes[0].undo == ("ufw", "delete", *plan.changes[0].argv[2:-2])
    assert plan.revert_s is not None


def test_rules_that_ufw_has_are_not_added_again():
    rule = "ufw allow from {} to any port 22,1024:65535 proto tcp comment 'gangline'"
    said = "\n".join(rule.format(address) for address in ("192.168.1.11", "192.168.1.12"))
    plan = planned(with_root(UFW, commands={"ufw": said}))
    assert (plan.changes, plan.remains, plan.revert_s) == ((), (), None)


@pytest.mark.parametrize(
    ("there", "unreadable"), [(UFW, ()), (FIREWALLD, (firewall_rules.FIREWALLD_POLICY,)), (FIREWALLD, ())]
)
def test_rules_that_only_root_can_read_are_asked_for_and_else_remain(there, unreadable):
    found = reading(**there, unreadable=unreadable)
    asks = FIREWALL.root_asks(found)
    assert asks.commands or asks.files == (firewall_rules.FIREWALLD_POLICY,)
    plan = planned(found)
    assert plan.changes == ()
    assert "only root can read" in plan.remains[0]


def test_nothing_is_read_as_root_where_no_firewall_is_active():
    for there in ({}, {**UFW, "commands": {"firewalld": "active"}}):
        asks = FIREWALL.root_asks(reading(**there))
        assert (asks.files, dict(asks.commands)) == ((), {})


def test_firewalld_gets_a_policy_of_its_own_file():
    found = with_root(FIREWALLD, files={})
    plan = planned(
        HostReading(**{**_fields(found), "files": {**found.files, firewall_rules.FIREWALLD_POLICY: FileRead()}})
    )
    text = applied(plan, None)
    assert 'target="CONTINUE"' in text
    assert text.count("<accept") == 4
    assert '<port port="1024-65535" protocol="tcp" />' in text
    assert [change.argv for change in plan.changes if isinstance(change, CommandChange)] == [
        (),
        ("firewall-cmd", "--quiet", "--check-config"),
        ("firewall-cmd", "--quiet", "--reload"),
    ]
    again = planned(with_root(FIREWALLD, files={firewall_rules.FIREWALLD_POLICY: text}))
    assert (again.changes, again.remains) == ((), ())


def _fields(found):
    return {name: getattr(found, name) for name in ("user", "uid", "home", "files", "folders", "commands", "programs")}


def test_nftables_gets_a_block_first_in_the_chain_that_sees_what_comes_in():
    text = applied(planned(reading(**NFTABLES)), TABLE)
    rows = text.splitlines()
    start = rows.index("# BEGIN gangline prepare firewall")
    assert rows[start - 1] == "\t\ttype filter hook input priority filter; policy drop;"
    assert rows[start + 1 : start + 4] == [
        "\t\tip saddr 192.168.1.11 tcp dport { 22, 1024-65535 } accept",
        "\t\tip saddr 192.168.1.12 tcp dport { 22, 1024-65535 } accept",
        "# END gangline prepare firewall",
    ]
    assert [row for row in rows if row not in rows[start : start + 4]] == TABLE.splitlines()
    again = planned(reading(**{**NFTABLES, "files": {firewall_rules.NFTABLES_CONF: text}}))
    assert again.changes == ()


def test_a_host_that_left_the_cluster_is_let_in_no_longer():
    text = applied(planned(reading(**NFTABLES)), TABLE)
    fewer = {name: ADDRESSES[name] for name in ("pc1", "pc2")}
    plan = planned(reading(**{**NFTABLES, "files": {firewall_rules.NFTABLES_CONF: text}}), addresses=fewer)
    after = applied(plan, text)
    assert "192.168.1.12" not in after
    assert after.count("192.168.1.11") == 1


def test_every_chain_gets_rules_of_its_own_family():
    both = TABLE + TABLE.partition("flush ruleset\n")[2].replace("inet filter", "ip6 filter")
    addresses = {**ADDRESSES, "pc3": "fd00::3"}
    there = {**NFTABLES, "commands": {"nftables": "active", "tables": "table inet filter\ntable ip6 filter"}}
    first = reading(**{**there, "files": {firewall_rules.NFTABLES_CONF: both}})
    text = applied(planned(first, addresses=addresses), both)
    inet, ip6 = text.split("table ip6 filter")
    assert (inet.count("ip saddr"), inet.count("ip6 saddr fd00::3")) == (1, 1)
    assert (ip6.count("ip saddr"), ip6.count("ip6 saddr fd00::3")) == (0, 1)
    again = planned(reading(**{**there, "files": {firewall_rules.NFTABLES_CONF: text}}), addresses=addresses)
    assert (again.changes, again.remains) == ((), ())


@pytest.mark.parametrize(
    ("there", "word"),
    [
        ({}, "no firewall is active"),
        ({**UFW, "commands": {"firewalld": "active"}}, "ufw and firewalld"),
        ({"files": {"/etc/iptables/rules.v4": "*filter\n"}}, "iptables: gangline does not write its rules"),
        (
            {
                **NFTABLES,
                "commands": {"nftables": "active", "tables": "table inet filter\ntable ip nat\ntable ip6 nat"},
            },
            "would flush tables that are not in it (ip nat, ip6 nat)",
        ),
        ({**NFTABLES, "commands": {"nftables": "active"}}, "only root can read the rules of nftables"),
        (
            {
                "commands": {"nftables": "active", "tables": ""},
                "files": {firewall_rules.NFTABLES_CONF: 'include "/etc/nftables.d/*.nft"\n'},
            },
            "no line of its own that begins a chain",
        ),
    ],
)
def test_what_it_does_not_write_is_said(there, word):
    plan = planned(reading(**there))
    assert plan.changes == ()
    assert word in plan.remains[0]


def test_a_host_without_an_address_is_named():
    plan = planned(reading(**NFTABLES), addresses={**ADDRESSES, "pc3": "pc3.lan"})
    assert "pc3: pc3.lan is no address" in plan.remains[0]
    assert "192.168.1.12" not in applied(plan, TABLE)


def test_another_port_of_sshd_within_the_ports_of_ranks_is_named_once():
    text = applied(planned(reading(**NFTABLES), ssh_port=2222), TABLE)
    assert "tcp dport { 1024-65535 } accept" in text


def test_no_plan_stops_a_firewall_or_opens_it_to_everybody():
    for there in (with_root(UFW, commands={"ufw": ""}), reading(**NFTABLES)):
        plan = planned(there)
        for line in [line for change in plan.changes for line in change.lines()]:
            assert "disable" not in line
            assert "stop" not in line.split()
            if "accept" in line or "allow" in line:
                assert "192.168.1." in line or "tcp dport 22 accept" in line
