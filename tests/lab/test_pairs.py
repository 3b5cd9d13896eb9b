"""The network between real hosts, tried over ssh from the user's computer: planted faults have their name, healthy hosts none."""

import contextlib
import json
import subprocess
import sys
import textwrap

import pytest

from tests.lab.hosts import ROOT, Lab

OUTSIDE = "E-SEC-04"
"""The user's computer of a lab is no host of the cluster and on the same switch: it reaches all ports, and is told so."""


@pytest.fixture(scope="module")
def three():
    with Lab(3, ttl_s=1800) as lab:
        yield lab


@pytest.fixture
def healed(three):
    yield three
    for host in three.hosts:
        host.faults.heal()


def entries(lab, **changes):
    """The hosts of a cluster file; `changes` by name."""
    known = [
        {"name": host.name, "address": host.address, "host_key": host.host_key, "ssh_port": host.ssh_port}
        for host in lab.hosts
    ]
    return [{**entry, **changes.get(entry["name"], {})} for entry in known]


def look(lab, hosts=None, **options):
    return lab.user.call("tests.lab.cases_pairs:look", hosts=hosts or entries(lab), **options)


def brief(said):
    return [(one["id"], one["severity"], one["hosts"]) for one in said["findings"] if one["id"] != OUTSIDE]


def evidence(said, number):
    return next(one["evidence"] for one in said["findings"] if one["id"] == number)


def test_healthy_hosts_have_no_findings(three):
    said = look(three)
    assert brief(said) == []
    assert len(said["pairs"]["pairs"]) == 6
    assert {pair["interface"] for pair in said["pairs"]["pairs"]} == {"eth0"}
    assert {pair["largest_packet"] for pair in said["pairs"]["pairs"]} == {1500}
    assert all(abs(clock["ahead_s"]) < 0.5 and clock["method"] == "network" for clock in said["pairs"]["clocks"])
    assert said["pairs"]["skipped"] == []
    assert said["seconds"] < 15


def test_nothing_is_left_on_the_hosts(three):
    look(three)
    assert [host.processes() for host in three.hosts] == [[], [], []]
    assert [host.check(["ss", "-Hltn"]).count("\n") for host in three.hosts] == [2, 2, 2]  # sshd, IPv4 and IPv6


@pytest.mark.parametrize("mtu", [1280, 9000])
def test_hosts_with_another_mtu_on_all_cards_are_healthy(healed, mtu):
    for number in range(3):
        healed._network.run(["ip", "link", "set", f"s{10 + number}e0", "mtu", str(mtu)])
        healed.hosts[number].faults.mtu(mtu)
    said = look(healed)
    assert brief(said) == []
    assert {pair["largest_packet"] for pair in said["pairs"]["pairs"]} == {mtu}
    for number in range(3):
        healed._network.run(["ip", "link", "set", f"s{10 + number}e0", "mtu", "1500"])


def test_hosts_that_forbid_udp_are_healthy(healed):
    for host in healed.hosts:
        host.faults.drop(protocol="udp")
    said = look(healed)
    assert brief(said) == []
    assert {pair["largest_packet"] for pair in said["pairs"]["pairs"]} == {None}


def test_slower_links_that_are_all_the_same_are_healthy(healed):
    for host in healed.hosts:
        host.faults.rate("1gbit")
    assert brief(look(healed)) == []


# --- planted: the rows that are not held out


def test_w01_a_firewall_drops_everything_but_ssh_between_two_hosts(healed):
    h0, h1, _ = healed.hosts
    h0.faults.drop(peer=h1.address)
    h1.faults.drop(peer=h0.address)
    said = look(healed)
    assert brief(said) == [("E-NET-01", "fail", ["h0", "h1"])]
    assert "h0 -> h1 10.77.0.11:29500" in evidence(said, "E-NET-01")
    assert "timed out after" in evidence(said, "E-NET-01")
    assert said["seconds"] < 15


def test_w02_only_the_port_where_ranks_meet_is_open(healed):
    for host in healed.hosts:
        for ports in ("1-21", "23-29499", "29501-65535"):
            host.faults.drop(port=ports)
    said = look(healed)
    assert brief(said) == [("E-NET-03", "fail", ["h0", "h1", "h2"])]
    assert "10.77.0.11:29500 answered" in evidence(said, "E-NET-03")


def test_w03_the_range_where_ranks_meet_is_rejected_on_the_head(healed):
    healed.hosts[0].faults.reject(port="29500-29999")
    said = look(healed)
    assert brief(said) == [("E-NET-02", "fail", ["h0"])]
    assert "h1 -> h0 10.77.0.10:29500 refused, 2 times" in evidence(said, "E-NET-02")


@pytest.mark.parametrize("tier", ["quick", pytest.param("full", marks=pytest.mark.slow)])
def test_w08_one_link_at_100_mbit_others_at_1_gbit(healed, tier):
    for host in healed.hosts:
        host.faults.rate("1gbit")
    healed.hosts[2].faults.rate("100mbit")
    said = look(healed, tier=tier)
    assert brief(said) == [("E-NET-07", "warn", ["h2"])]


def test_w14_one_host_has_an_ipv6_address(three):
    said = look(three, entries(three, h2={"address": "fd00::12"}))
    assert ("E-NET-10", "fail", ["h2"]) in brief(said)


# --- more that goes wrong at home


SERVER = textwrap.dedent("""
    import json, socket, sys
    doors = [socket.create_server(("", port), backlog=100) for port in json.loads(sys.argv[1])]
    print("ready", flush=True)
    sys.stdin.read()
""")


@contextlib.contextmanager
def serving(hosts, ports):
    """Servers of somebody else on the hosts."""
    argv = ["python3", "-c", SERVER, json.dumps(ports)]
    servers = [host.popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for host in hosts]
    try:
        assert [server.stdout.readline() for server in servers] == [b"ready\n"] * len(servers)
        yield
    finally:
        for server in servers:
            server.communicate()  # closes its stdin


def test_a_port_that_is_taken_on_the_head_is_passed_over(three):
    with serving(three.hosts[:1], [29500]):
        said = look(three)
        assert brief(said) == []
        assert [listener["rendezvous_port"] for listener in said["pairs"]["listeners"]] == [29501, 29500, 29500]
        said = look(three, ports=[29500, 29500])
        assert brief(said) == [("E-PORT-01", "fail", ["h0"])]


def test_ports_that_any_program_may_be_given(healed):
    healed.hosts[0].faults.sysctl("net.ipv4.ip_local_port_range", "20000 20200")
    try:
        said = look(healed, ports=[20100, 20110])
    finally:
        healed.hosts[0].faults.sysctl("net.ipv4.ip_local_port_range", "32768 60999")
    assert brief(said) == [("E-PORT-02", "warn", ["h0"]), ("E-PORT-03", "warn", ["h0"])]


@pytest.mark.lab("python3.8", "python3.13")
def test_hosts_with_an_old_and_a_new_python_are_healthy(lab):
    said = look(lab(3, special={"h1": {"python": "3.8"}, "h2": {"python": "3.13"}}))
    assert brief(said) == []
    assert len(said["pairs"]["pairs"]) == 6


def test_eight_hosts_of_which_one_is_dead(lab):
    lab = lab(8)
    lab.hosts[3].power_off()
    said = look(lab)
    assert brief(said) == []
    assert len(said["pairs"]["pairs"]) == 7 * 6
    assert [skip["what"] for skip in said["pairs"]["skipped"]] == ["h3"]
    assert said["seconds"] < 15


# --- who outside reaches the ports (S7)

MEETING, DATA = "29500-29999", "32768-60999"
TRY = textwrap.dedent("""
    import concurrent.futures, json, socket, sys
    def reached(place):
        try:
            socket.create_connection(place, timeout=1).close()
        except OSError:
            return False
        return True
    places = [(address, port) for address in json.loads(sys.argv[1]) for port in (29500, 45000)]
    with concurrent.futures.ThreadPoolExecutor(len(places)) as pool:
        seen = list(pool.map(reached, places))
        # a second on a busy machine may be too short for all of them
        print(json.dumps(seen if any(seen) else list(pool.map(reached, places))))
""")


def shut(lab, name, ports, mode):
    """Let nobody but the hosts of the cluster in on these ports of a host."""
    members = ", ".join(host.address for host in lab.hosts)
    what = "drop" if mode == "drop" else "reject with tcp reset"
    rule = f'iifname "eth0" ip saddr != {{ {members} }} tcp dport {{ {ports} }} ct state new {what}'
    chain = "add chain inet lab in { type filter hook input priority 0; policy accept; }"
    lab[name].faults._host(["nft", "-f", "-"], f"add table inet lab\n{chain}\nadd rule inet lab in {rule}\n")


def topologies():
    """20 networks: who is shut to the outside, on which ports, how."""
    everybody, both = ("h0", "h1", "h2"), f"{MEETING}, {DATA}"
    yield "open", ()
    for mode in ("drop", "reject"):
        for shut in (everybody, ("h0",), ("h1", "h2")):
            for ports in (both, MEETING, DATA):
                yield f"{mode} {ports} on {' '.join(shut)}", tuple((name, ports, mode) for name in shut)
    yield "each differently", (("h0", MEETING, "drop"), ("h1", DATA, "reject"), ("h2", both, "drop"))


TOPOLOGIES = list(topologies())


def test_there_are_20_topologies():
    assert len(TOPOLOGIES) == 20


@pytest.fixture(scope="module")
def served(three):
    with serving(three.hosts, [29500, 45000]):
        yield three


@pytest.fixture(scope="module")
def watching(served):
    """A process of gangline at the desk that looks as often as it is asked to, and tells what it found."""
    argv = [sys.executable, "-c", "from tests.lab.cases_pairs import watch_outside; watch_outside()"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with served.user.popen(argv, cwd=ROOT, **pipes) as process:

        def ask(words):
            process.stdin.write(f"{words}\n")
            process.stdin.flush()

        def answer():
            ask("look")
            return json.loads(process.stdout.readline())

        ask(json.dumps(entries(served)))
        yield answer


@pytest.mark.parametrize("rules", [rules for _, rules in TOPOLOGIES], ids=[name for name, _ in TOPOLOGIES])
def test_s7_what_a_stranger_reaches_is_what_is_reported(served, watching, healed, rules):
    for rule in rules:
        shut(served, *rule)
    addresses = [host.address for host in served.hosts]
    argv = ["python3", "-c", TRY, json.dumps(addresses)]
    with served.outsider.popen(argv, stdout=subprocess.PIPE) as stranger:
        told = watching()
        seen = json.load(stranger.stdout)
    truth = {host.name: seen[2 * index : 2 * index + 2] for index, host in enumerate(served.hosts)}
    assert told["reached"] == truth
    assert told["hosts"] == [name for name, reached in truth.items() if any(reached)]
    closed = {
        (name, kind) for name, ports, _ in rules for kind, its in (("meeting", MEETING), ("data", DATA)) if its in ports
    }
    assert truth == {
        host.name: [(host.name, kind) not in closed for kind in ("meeting", "data")] for host in served.hosts
    }
