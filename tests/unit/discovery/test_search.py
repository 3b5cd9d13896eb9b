"""What becomes of the hints: who is asked, who is not, and what is said of those that answer."""

import ipaddress
from dataclasses import dataclass, field

import pytest

from gangline.discovery.search import DiscoveryDependencies, discover, remarks, row, scan_ranges
from gangline.discovery.sources import HostHint, LocalNetworks, OwnNetwork
from gangline.errors import HostUnreachable, UsageError
from gangline.runs.cluster import Cluster, Host
from gangline.transport.hostkeys import Key
from tests.unit.init.world import Talk, fingerprint, key

OPENSSH = "SSH-2.0-OpenSSH_9.2p1"


def network(text, interface="eno1"):
    return OwnNetwork(interface=interface, address=ipaddress.IPv4Interface(text))


def local(*networks, gateways=("192.168.1.1",)):
    return LocalNetworks(
        networks=tuple(network(each) for each in networks or ("192.168.1.7/24",)),
        gateways=frozenset(gateways),
        own=frozenset(each.partition("/")[0] for each in networks or ("192.168.1.7/24",)),
    )


@dataclass
class Lan:
    """A network, and what this computer knows of it."""

    sshd: set = field(default_factory=set)
    """(address, port) that answer."""
    networks: LocalNetworks | None = field(default_factory=local)
    neighbours: list | None = field(default_factory=list)
    announced: list | None = field(default_factory=list)
    names: dict = field(default_factory=dict)
    """Name -> address."""
    aliases: dict = field(default_factory=dict)
    """Alias of ssh_config -> (host name, port)."""
    keys: dict = field(default_factory=dict)
    """Destination -> the seed of another key than its own."""
    known: dict = field(default_factory=dict)
    """Destination -> fingerprints that the user's ssh has."""
    asked: list = field(default_factory=list)

    def deps(self, folder, known_hosts=""):
        (folder / "config").write_text("".join(f"Host {each}\n" for each in self.aliases))
        (folder / "known_hosts").write_text(known_hosts)
        return DiscoveryDependencies(
            networks=lambda: self.networks,
            neighbours=lambda: self.neighbours,
            announced=lambda: self.announced,
            configured=self._configured,
            software=self._software,
            address_of=self.names.get,
            name_of=lambda address: "",
            key=self._key,
            known=lambda destination, line, port: self.known.get(destination, ()),
            ssh_config=folder / "config",
            known_hosts=folder / "known_hosts",
        )

    def _configured(self, alias):
        address, port = self.aliases[alias]
        return HostHint(source="ssh_config", name=alias, address=address, port=port)

    def _software(self, address, port, timeout_s):
        self.asked.append(address)
        return OPENSSH if (address, port) in self.sshd else ""

    def _key(self, destination, port):
        seed = self.keys.get(destination, destination)
        if seed is None:
            raise HostUnreachable("no kind of key in common", seen="ssh-dss")
        return Key(line=key(seed), fingerprint=fingerprint(key(seed)))


def found(lan, tmp_path, *, scan=False, cluster=None, known_hosts=""):
    return discover(scan=scan, cluster=cluster, console=Talk(), deps=lan.deps(tmp_path, known_hosts))


def neighbour(address):
    return HostHint(source="neighbours", address=address, hardware="02:00:00:00:00:01")


def test_every_source_adds_to_one_row(tmp_path):
    lan = Lan(
        sshd={("192.168.1.10", 22)},
        neighbours=[neighbour("192.168.1.10")],
        announced=[HostHint(source="mDNS", name="tower.local", address="192.168.1.10")],
        aliases={"pc1": ("192.168.1.10", 22)},
        known={"pc1": (fingerprint(key("pc1")),)},
    )
    (host,) = found(lan, tmp_path, known_hosts=f"192.168.1.10 {key('pc1')}\n").hosts
    assert (host.name, host.destination, host.names) == ("pc1", "pc1", ("pc1", "tower"))
    assert set(host.sources) == {"ssh_config", "known_hosts", "neighbours", "mDNS"}
    assert (host.software, host.known, host.fingerprint) == (OPENSSH, "known", fingerprint(key("pc1")))


def test_only_this_computers_networks_are_asked(tmp_path):
    lan = Lan(
        aliases={"far": ("203.0.113.5", 22), "named": ("gpu.example.org", 22), "tunnel": ("10.9.0.5", 22)},
        announced=[HostHint(source="mDNS", name="liar.local", address="203.0.113.9")],
    )
    result = found(lan, tmp_path, known_hosts=f"198.51.100.1 {key('x')}\ngithub.com {key('y')}\n")
    assert lan.asked == []
    assert result.elsewhere == ("far", "named", "tunnel")
    assert any("far, named and tunnel" in line for line in remarks(result))


def test_places_without_sshd_are_no_hosts(tmp_path):
    lan = Lan(neighbours=[neighbour("192.168.1.20"), neighbour("192.168.1.21")], sshd={("192.168.1.21", 22)})
    assert [host.address for host in found(lan, tmp_path).hosts] == ["192.168.1.21"]


def test_this_computer_is_not_found(tmp_path):
    lan = Lan(aliases={"me": ("192.168.1.7", 22)}, sshd={("192.168.1.7", 22)})
    assert found(lan, tmp_path).hosts == ()


def test_nothing_is_scanned_unless_asked_for(tmp_path):
    lan = Lan(sshd={("192.168.1.33", 22)})
    result = found(lan, tmp_path)
    assert (lan.asked, result.hosts) == ([], ())
    assert [str(each) for each in result.unscanned] == ["192.168.1.0/24"]
    result = found(lan, tmp_path, scan=True)
    assert [(host.address, host.sources) for host in result.hosts] == [("192.168.1.33", ("scan",))]
    assert len(set(lan.asked)) == 253
    assert "192.168.1.7" not in lan.asked


@pytest.mark.parametrize(
    ("networks", "ranges"),
    [
        (["10.1.2.3/8"], ["10.1.0.0/22"]),
        (["10.1.2.3/22"], ["10.1.0.0/22"]),
        (["192.168.1.7/24", "192.168.2.7/24"], ["192.168.1.0/24", "192.168.2.0/24"]),
        (["10.1.2.3/8", "192.168.1.7/24"], ["10.1.0.0/22"]),
        (["8.8.4.7/24"], []),
        (["192.168.1.7/24", "192.168.1.8/24"], ["192.168.1.0/24"]),
    ],
)
def test_a_scan_is_bounded(networks, ranges):
    chosen = scan_ranges(local(*networks))
    assert [str(each) for each in chosen] == ranges
    assert sum(each.num_addresses - 2 for each in chosen) <= 1022


def test_a_scan_without_known_networks_is_refused(tmp_path):
    lan = Lan(networks=None, neighbours=[neighbour("192.168.1.10")], sshd={("192.168.1.10", 22)})
    assert [host.address for host in found(lan, tmp_path).hosts] == ["192.168.1.10"]
    with pytest.raises(UsageError, match=r"nothing bounds a scan"):
        found(lan, tmp_path, scan=True)


def test_a_name_is_told_only_if_it_leads_there(tmp_path):
    lan = Lan(
        announced=[
            HostHint(source="mDNS", name="pc1.local", address="192.168.1.10"),
            HostHint(source="mDNS", name="pc2.local", address="192.168.1.11"),
        ],
        names={"pc1.local": "192.168.1.10", "pc2.local": "192.168.1.99"},
        sshd={("192.168.1.10", 22), ("192.168.1.11", 22)},
    )
    assert [host.destination for host in found(lan, tmp_path).hosts] == ["pc1.local", "192.168.1.11"]


def test_a_key_that_ssh_knows_otherwise_is_named(tmp_path):
    lan = Lan(
        neighbours=[neighbour("192.168.1.10")], sshd={("192.168.1.10", 22)}, known={"192.168.1.10": ("SHA256:old",)}
    )
    (host,) = found(lan, tmp_path).hosts
    assert host.known == "changed"
    assert "NOT the key that your ssh knows" in row(host)


def test_hosts_of_the_cluster_file_are_recognised_by_key_or_by_place(tmp_path):
    places = ("192.168.1.10", "192.168.1.11", "192.168.1.12")
    lan = Lan(neighbours=[neighbour(each) for each in places], sshd={(each, 22) for each in places})
    cluster = Cluster(
        name="home",
        hosts=(
            Host(
                name="pc1",
                ssh="alice@10.0.0.1",
                transport="ssh",
                workdir="/w",
                python="",
                address="10.0.0.1",
                host_key=key(places[0]),
            ),
            Host(
                name="pc2",
                ssh=f"alice@{places[1]}",
                transport="ssh",
                workdir="/w",
                python="",
                address=places[1],
                host_key=key("old"),
            ),
        ),
    )
    hosts = found(lan, tmp_path, cluster=cluster).hosts
    assert [(host.in_cluster, host.cluster_key) for host in hosts] == [("pc1", "pinned"), ("pc2", "other"), ("", "")]
    assert [row(host)[-1] for host in hosts] == ["pc1", "pc2, with ANOTHER KEY", "-"]


def test_routers_and_hosts_without_a_key_are_shown_and_not_offered(tmp_path):
    places = ("192.168.1.1", "192.168.1.10", "192.168.1.11")
    lan = Lan(
        neighbours=[neighbour(each) for each in places],
        sshd={(each, 22) for each in places},
        keys={"192.168.1.10": None},
    )
    result = found(lan, tmp_path)
    assert [host.is_router for host in result.hosts] == [True, False, False]
    assert "no kind of key in common; ssh-dss" in row(result.hosts[1])[3]
    assert [host.address for host in result.offered] == ["192.168.1.11"]


def test_two_addresses_with_one_key_are_remarked(tmp_path):
    places = ("192.168.1.10", "192.168.1.11")
    lan = Lan(
        neighbours=[neighbour(each) for each in places],
        sshd={(each, 22) for each in places},
        keys=dict.fromkeys(places, "copy"),
    )
    result = found(lan, tmp_path)
    assert any(line.startswith("192.168.1.10 and 192.168.1.11 show one key") for line in remarks(result))


def test_sources_that_cannot_be_read_are_named(tmp_path):
    lan = Lan(neighbours=None, announced=None)
    gaps = found(lan, tmp_path, known_hosts="|1|a|b ssh-ed25519 AAAA\n").gaps
    assert [gap.partition(":")[0] for gap in gaps] == ["known_hosts", "neighbour table", "mDNS"]


def test_the_document_has_what_a_program_needs(tmp_path):
    lan = Lan(aliases={"pc1": ("192.168.1.10", 2222)}, sshd={("192.168.1.10", 2222)})
    document = found(lan, tmp_path).to_json()
    assert document["networks"] == [{"interface": "eno1", "network": "192.168.1.0/24"}]
    assert document["hosts"] == [
        {
            "name": "pc1",
            "destination": "pc1",
            "address": "192.168.1.10",
            "port": 2222,
            "names": ["pc1"],
            "sources": ["ssh_config"],
            "software": OPENSSH,
            "host_key": key("pc1"),
            "fingerprint": fingerprint(key("pc1")),
            "known": "new",
            "in_cluster": None,
            "cluster_key": None,
            "router": False,
            "problem": None,
        }
    ]
