"""Step `address`: a host keeps the address that it has, by the network service that the host uses. Only by name.

A lease that the router reserves is better, and is what the user is told first.
"""

from __future__ import annotations

import configparser
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from gangline.prepare.prepare_step import (
    REVERT_S,
    Asks,
    Change,
    FileChange,
    HostReading,
    PrepareStep,
    StepPlan,
    StepView,
    activated,
)
from gangline.units import is_address

NETPLAN = "/etc/netplan"
RESOLVERS = ("/run/systemd/resolve/resolv.conf", "/etc/resolv.conf")
"""The first one that is there has the name servers of the lease."""
PROFILES = "/etc/NetworkManager/system-connections/"
MARK = "# gangline prepare address\n"
ASKS = Asks(
    files=RESOLVERS,
    folders=(NETPLAN,),
    commands={
        "links": ("ip", "-j", "addr", "show"),
        "default routes": ("ip", "-j", "route", "show", "default"),
        "networkd": ("systemctl", "is-active", "systemd-networkd.service"),
        "NetworkManager": ("systemctl", "is-active", "NetworkManager.service"),
        "networkd files": ("grep", "-rH", "^NETWORK_FILE=", "/run/systemd/netif/links"),
        "profiles": ("nmcli", "-g", "DEVICE,UUID,FILENAME", "connection", "show", "--active"),
    },
    programs=("netplan", "nmcli", "networkctl"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterInterface:
    """The interface of a host that has the host's address in the cluster, as the kernel says."""

    name: str
    index: int
    mac: str
    mtu: int
    address: str
    """With the length of its prefix: 192.168.1.11/24."""
    is_lease: bool
    """Whether it ends: a lease that nobody renews is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressSettings:
    """What a network service is told. Empty address: the address stays as it is, `mtu` alone changes."""

    address: str = ""
    gateway: str = ""
    name_servers: tuple[str, ...] = ()
    search: tuple[str, ...] = ()
    mtu: int | None = None


def link_of(reading: HostReading, address: str) -> ClusterInterface | None:
    """The interface with the address; for a name in its place, the one of the default route."""
    rows = _rows(reading.output("links"))
    device = None if is_address(address) else _default_route(reading).get("dev")
    for row in rows:
        for each in row.get("addr_info", ()):
            is_it = each["local"] == address or (row["ifname"] == device and each["family"] == "inet")
            if is_it and row["ifname"] != "lo":
                return ClusterInterface(
                    name=row["ifname"],
                    index=row["ifindex"],
                    mac=row.get("address", ""),
                    mtu=row["mtu"],
                    address=f"{each['local']}/{each['prefixlen']}",
                    is_lease=bool(each.get("dynamic")),
                )
    return None


def links_of(reading: HostReading) -> list[ClusterInterface]:
    """Every interface with an address, once for each."""
    addresses = [each["local"] for row in _rows(reading.output("links")) for each in row.get("addr_info", ())]
    return [link for address in addresses if (link := link_of(reading, address)) is not None]


def _rows(text: str) -> list[dict[str, Any]]:
    try:
        rows = json.loads(text or "[]")
    except ValueError:
        return []
    return [row for row in rows if row]  # an old ip prints {} for what was filtered out


def _default_route(reading: HostReading) -> dict[str, Any]:
    return next(iter(_rows(reading.output("default routes"))), {})


def _wanted(view: StepView, link: ClusterInterface) -> AddressSettings | None:
    """What has to be different; None: nothing."""
    mtu = _smaller_mtu(view, link)
    if not link.is_lease:
        return None if mtu is None else AddressSettings(mtu=mtu)
    route = _default_route(view.reading)
    texts = (view.reading.files[path].text for path in RESOLVERS)
    lines = [line.split() for line in next((text for text in texts if text), "").splitlines()]
    servers = [words[1] for words in lines if words[:1] == ["nameserver"] and len(words) > 1]
    return AddressSettings(
        address=link.address,
        gateway=str(route.get("gateway", "")) if route.get("dev") == link.name else "",
        name_servers=tuple(server for server in servers if not server.startswith("127.")),
        search=tuple(word for words in lines if words[:1] == ["search"] for word in words[1:] if word != "."),
        mtu=mtu,
    )


def _smaller_mtu(view: StepView, link: ClusterInterface) -> int | None:
    """The MTU that every other host takes, too, where ours is larger."""
    others = [
        link_of(reading, host.address)
        for host in view.cluster.hosts
        if (reading := view.readings.get(host.name)) is not None
    ]
    smallest = min((other.mtu for other in others if other is not None), default=link.mtu)
    return smallest if smallest < link.mtu else None


# The services, each with the files that it reads and the commands that put them into force.


def _netplan(reading: HostReading, link: ClusterInterface, wanted: AddressSettings) -> tuple[Change, ...] | str:
    path = _netplan_path(reading)
    defined = reading.output(f"netplan {link.name}")
    if not defined or defined == "null":
        return f"netplan has no ethernets.{link.name}: write the address where it defines that interface"
    rows = ["dhcp4: false", f"addresses: {json.dumps([wanted.address])}"] if wanted.address else []
    rows += [f"routes: {json.dumps([{'to': 'default', 'via': wanted.gateway}])}"] if wanted.gateway else []
    if wanted.name_servers:
        servers = {"addresses": wanted.name_servers, "search": wanted.search}
        rows.append(f"nameservers: {json.dumps({name: value for name, value in servers.items() if value})}")
    rows += [f"mtu: {wanted.mtu}"] if wanted.mtu else []
    head = f"{MARK}network:\n  version: 2\n  ethernets:\n    {link.name}:\n"
    text = head + "".join(f"      {row}\n" for row in rows)
    before = reading.files[path]
    return activated(
        (FileChange(path=path, before=before.content, content=text.encode(), mode=0o600),), ("netplan", "apply")
    )


def _netplan_path(reading: HostReading) -> str:
    """Of several files netplan believes the last one."""
    names = [name for name in reading.folders[NETPLAN] or () if name.endswith(".yaml") and "gangline" not in name]
    return f"{NETPLAN}/{'99' if max(names, default='') < '99-gangline' else 'zz'}-gangline.yaml"


def _networkd(reading: HostReading, link: ClusterInterface, wanted: AddressSettings) -> tuple[Change, ...] | str:
    path = _drop_in(reading, link)
    if not path:
        return f"networkd reads no file for {link.name}: networkctl status {link.name}"
    rows = ["[Network]", "DHCP=no", f"Address={wanted.address}"] if wanted.address else []
    rows += [f"Gateway={wanted.gateway}"] if wanted.gateway else []
    rows += [f"DNS={server}" for server in wanted.name_servers]
    rows += [f"Domains={' '.join(wanted.search)}"] if wanted.search else []
    rows += ["[Link]", f"MTUBytes={wanted.mtu}"] if wanted.mtu else []
    text = MARK + "".join(f"{row}\n" for row in rows)
    change = FileChange(path=path, before=reading.files[path].content, content=text.encode())
    return activated(activated((change,), ("networkctl", "reload")), ("networkctl", "reconfigure", link.name))


def _drop_in(reading: HostReading, link: ClusterInterface) -> str:
    """Where a drop-in of the file lies by which networkd knows the interface; "" where there is none."""
    for row in reading.output("networkd files").splitlines():
        place, _, file = row.partition(":NETWORK_FILE=")
        if PurePosixPath(place).name == str(link.index) and file:
            return f"/etc/systemd/network/{PurePosixPath(file).name}.d/60-gangline.conf"
    return ""


def _network_manager(reading: HostReading, link: ClusterInterface, wanted: AddressSettings) -> tuple[Change, ...] | str:
    uuid, path = _profile(reading, link)
    if not path.startswith(PROFILES):
        return (
            f"NetworkManager has no profile of {link.name} on its disk yet: "
            f"sudo nmcli connection modify {uuid or link.name} connection.autoconnect yes; then again"
        )
    before = reading.files[path]
    if before.content is None:
        return f"only root can read {path}: run this in a terminal, or log in as root"
    text = _keyfile(before.text, wanted)
    if text is None:
        return f"{path} cannot be understood: write the address into it by nmcli connection modify {uuid}"
    change = FileChange(path=path, before=before.content, content=text.encode("utf-8", "surrogateescape"))
    return activated(
        activated((change,), ("nmcli", "connection", "load", path)), ("nmcli", "device", "reapply", link.name)
    )


def _profile(reading: HostReading, link: ClusterInterface) -> tuple[str, str]:
    """The UUID and the file of the profile that is active on the interface."""
    for row in reading.output("profiles").splitlines():
        device, _, rest = row.partition(":")
        uuid, _, path = rest.partition(":")
        if device == link.name:
            return uuid, path.replace("\\:", ":")
    return "", ""


def _keyfile(text: str, wanted: AddressSettings) -> str | None:
    """The profile with the address; None for a text that is none."""
    profile = configparser.RawConfigParser(delimiters=("=",), comment_prefixes=("#",), strict=False)
    profile.optionxform = str  # type: ignore[assignment, method-assign]  # names of keys are not made small
    try:
        profile.read_string(text)
    except configparser.Error:
        return None
    if wanted.address:
        kept = profile["ipv4"] if profile.has_section("ipv4") else {}
        rows = {
            key: value for key, value in kept.items() if not key.startswith(("address", "gateway", "method", "dns"))
        }
        rows |= {"method": "manual", "address1": ",".join(filter(None, (wanted.address, wanted.gateway)))}
        rows |= {"dns": "".join(f"{server};" for server in wanted.name_servers)} if wanted.name_servers else {}
        rows |= {"dns-search": "".join(f"{name};" for name in wanted.search)} if wanted.search else {}
        profile["ipv4"] = rows
    if wanted.mtu:
        if not profile.has_section("ethernet"):
            profile.add_section("ethernet")
        profile.set("ethernet", "mtu", str(wanted.mtu))
    stream = io.StringIO()
    profile.write(stream, space_around_delimiters=False)
    return MARK + stream.getvalue()


Service = Callable[[HostReading, ClusterInterface, AddressSettings], tuple[Change, ...] | str]


def _service(reading: HostReading, link: ClusterInterface) -> Service | None:
    """The service that gives this host its addresses; netplan writes files for the other two, and stands above them."""
    if reading.has("netplan") and any(name.endswith(".yaml") for name in reading.folders[NETPLAN] or ()):
        return _netplan
    if reading.output("NetworkManager") == "active" and _profile(reading, link)[0]:
        return _network_manager
    return _networkd if reading.output("networkd") == "active" else None


def root_asks(reading: HostReading) -> Asks:
    """Files for root alone, and our own: their names are known by now."""
    files: dict[str, None] = {}
    commands = {}
    for link in links_of(reading):
        service = _service(reading, link)
        if service is _netplan:
            files[_netplan_path(reading)] = None
            commands[f"netplan {link.name}"] = ("netplan", "get", f"ethernets.{link.name}")
        else:
            path = _profile(reading, link)[1] if service is _network_manager else _drop_in(reading, link)
            files |= {path: None} if path else {}
    return Asks(files=tuple(files), commands=commands)


def plan(view: StepView) -> StepPlan:
    """The address that a lease gave, written down; and packets no larger than the other hosts take."""
    link = link_of(view.reading, view.host.address)
    if link is None:
        return StepPlan(remains=(f"no interface here has {view.host.address}: correct cluster.yaml (gangline init)",))
    wanted = _wanted(view, link)
    if wanted is None:
        return StepPlan()
    address = link.address.partition("/")[0]
    better = f"better than a change here: have the router reserve {address} for {link.mac}; then leave this step out"
    service = _service(view.reading, link)
    if service is None:
        return StepPlan(remains=(better, f"neither netplan, NetworkManager nor networkd looks after {link.name} here"))
    changes = service(view.reading, link, wanted)
    if isinstance(changes, str):
        return StepPlan(remains=(better, changes))
    reasons = [f"{address} is a lease: the router may give another one"] if wanted.address else []
    reasons += [f"{link.name} sends up to {link.mtu} bytes, another host takes {wanted.mtu}"] if wanted.mtu else []
    return StepPlan(
        changes=changes,
        reason="; ".join(reasons),
        risk="the router may lend the address to another machine: take it out of the range that it lends; time servers "
        "and routes that come with a lease stop; an undo asks for a lease again, which may be another address"
        if wanted.address
        else "a smaller MTU slows large transfers a little",
        remains=(better,) if wanted.address else (),
        revert_s=REVERT_S,
    )


ADDRESS = PrepareStep(
    name="address",
    summary="the address that it has, for good; only where it is named",
    asks=ASKS,
    plan=plan,
    root_asks=root_asks,
    only_by_name=True,
)
