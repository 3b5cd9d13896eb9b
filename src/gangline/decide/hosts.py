"""The machines of a cluster as a plan sees them: placements with their free memory, links as they were measured."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gangline.catalog.gpu_specs import find_gpu, own_gpu
from gangline.catalog.link_rates import LinkSpec, find_link, nvlink_of
from gangline.checks.names import NETWORK_FILESYSTEMS
from gangline.inventory.facts import Gpu, HostFacts, Inventory
from gangline.inventory.measured import Network, find_profile, load_network, load_profiles, save_profile
from gangline.inventory.rank_interface import choose_nic, rank_network
from gangline.planner.architecture import Architecture
from gangline.planner.calibration import Profile, ProfileKey, architecture_digest, kernel_words, method_words
from gangline.planner.estimate import uncalibrated
from gangline.planner.machines import ASSUMED_LINK, Placement, PlannedCluster, link
from gangline.planner.outcome import Comparison, fold
from gangline.planner.plan import devices_of
from gangline.planner.saves import DISK, Rate
from gangline.planner.shares import rank_hosts
from gangline.planner.speed import ComputeModel, copies_s, flops_per_token
from gangline.planner.traffic import HOST_LINK_BYTES_PER_S, LinkModel, fit_all_reduce, slowest_of_ring
from gangline.planner.training import GANGLINE, Training
from gangline.provision.console import Console
from gangline.runs.cluster import Cluster, Host
from gangline.runs.layout import RunLayout
from gangline.runs.record_versions import load_record
from gangline.runs.registry import run_ids
from gangline.transport.ssh_options import NONSENSE

MEMORY_BYTES_PER_S = 2e9
"""Between ranks of one host without GPUs: what gloo moved over loopback on a machine with two cores."""
LOOPBACK_S = 50e-6
RDMA_HOP_S, RDMA_PAYLOAD_SHARE = 14e-6, 0.96
"""As the catalogue's rows of InfiniBand: 24 GB/s of 200 Gbit/s."""
GUESSED_SPREAD = 1.0
"""Of a link that nobody measured and whose interface does not tell its speed, or not all that decides about it."""


def world_of(cluster: Cluster, inventory: Inventory, home: Path) -> PlannedCluster:
    """Placements and links of a cluster that was looked at."""
    gpus = {facts.host: [gpu.name for gpu in facts.gpus] for facts in inventory.hosts}
    devices = devices_of(cluster, gpus)
    hosts = rank_hosts(cluster)
    places = [(host.address, device) for host, device in zip(hosts, devices, strict=True)]
    placements = tuple(
        _placement(host, inventory.of(host.name), device, num_sharing=places.count((host.address, device)))
        for host, device in zip(hosts, devices, strict=True)
    )
    network = load_network(home, cluster)
    inside = _inside(inventory)
    wire = inside if cluster.is_one_machine else _wire(cluster, inventory, network)
    return PlannedCluster(placements=placements, wire=wire, inside=inside)


def _placement(host: Host, facts: HostFacts | None, device: int, *, num_sharing: int) -> Placement:
    weight = None if host.share is None else host.share / host.slots
    ram, gpu = _free_memory(facts), facts.gpus[device] if facts is not None and facts.gpus else None
    free = ram if gpu is None else gpu.memory_free_bytes
    placement = Placement(
        host=host.name,
        free_bytes=None if free is None else free // max(1, num_sharing),
        ram_bytes=ram,
        memory_from="unknown" if free is None else "measured",
        weight=weight,
    )
    if gpu is None:
        return placement
    return dataclasses.replace(
        placement,
        device=device,
        gpu=gpu.name,
        bus="" if gpu.pcie_generation_max is None else _pcie([gpu]),
        spec=own_gpu(**host.gpu) if host.gpu else find_gpu(gpu.name, total_bytes=gpu.memory_total_bytes),
        power_limit_w=gpu.power_limit_w,
        num_sharing=num_sharing,
    )


def _free_memory(facts: HostFacts | None) -> int | None:
    """What programs can get of a machine's memory, within the limit of its control group."""
    if facts is None or facts.memory_available_bytes is None:
        return None
    limit = facts.system.memory_limit_bytes
    return facts.memory_available_bytes if limit is None else min(limit, facts.memory_available_bytes)


def disk_rate(world: PlannedCluster, inventory: Inventory | None) -> Rate:
    """How fast a host writes a checkpoint: a folder on a file server is no faster than the way there.

    Hosts write at the same time; at worst one server, with a link like theirs, has to take it all.
    """
    folders = [] if inventory is None else [facts.work_folder for facts in inventory.hosts]
    kinds = [(folder.filesystem or "") for folder in folders if folder is not None]
    away = [kind for kind in kinds if kind.startswith(NETWORK_FILESYSTEMS)]
    if not away:
        return DISK
    most = world.wire.bytes_per_s
    return Rate(
        low=min(DISK.low, most / len(away)),
        likely=min(DISK.likely, most / len(away)),
        high=min(DISK.high, most),
        source=f"work folders on a file server ({', '.join(sorted(set(away)))}), as fast as the network at the most",
    )


def _wire(cluster: Cluster, inventory: Inventory, network: Network | None) -> LinkModel:
    """Between hosts: as `bench network` measured it, else as fast as the slowest interface says that it is.

    A ring passes every host, and every way of it carries the same bytes. Of an interface that says nothing the usual
    speed is assumed, unless another is slower than that.
    """
    if network is not None and (measured := _measured(cluster, network)) is not None:
        return measured
    if (fabric := _rdma(cluster, inventory)) is not None:
        return fabric
    known = {host.name: way for host in cluster.hosts if (way := _way(host, inventory.of(host.name))) is not None}
    silent = [host.name for host in cluster.hosts if host.name not in known]
    slowest = min(known, key=lambda name: known[name].payload_bytes_per_s, default=None)
    assumed = link(ASSUMED_LINK)
    if slowest is None or (silent and known[slowest].payload_bytes_per_s > assumed.bytes_per_s):
        source = f"assumed to be {ASSUMED_LINK}; measure it: gangline bench network"
        return dataclasses.replace(assumed, source=source, spread=GUESSED_SPREAD)
    way = known[slowest]
    speed = f"{way.line_gbps * 1000:.0f} Mbit/s" if not way.warning else "Wi-Fi" if way.source == "wifi" else way.name
    return LinkModel(
        latency_s=way.latency_s,
        bytes_per_s=way.payload_bytes_per_s,
        source=f"assumed from the {speed} of {slowest}'s interface, the slowest one; measure it: gangline bench "
        "network",
        spread=GUESSED_SPREAD if silent or way.warning else 0.15,
        warning=way.warning,
    )


def _rdma(cluster: Cluster, inventory: Inventory) -> LinkModel | None:
    """InfiniBand or RoCE, where NCCL will take it, whatever interface has the hosts' addresses; None where not.

    A host sends through all of its ports at once, as long as each has a card beside it.
    """
    choices = rank_network(cluster, inventory)
    rates: dict[str, float] = {}
    for host in cluster.hosts:
        facts = inventory.of(host.name)
        off = {**(choices[host.name].env if host.name in choices else {}), **host.env}.get("NCCL_IB_DISABLE") == "1"
        if facts is None or off or not facts.gpus or facts.rdma.may_open is False:
            return None
        ports = sorted((port.rate_gbps or 0.0 for port in facts.rdma.active), reverse=True)
        rates[host.name] = sum(ports[: len(facts.gpus)])
    slowest = min(rates, key=lambda name: rates[name])
    if not rates[slowest]:
        return None
    return LinkModel(
        latency_s=RDMA_HOP_S,
        bytes_per_s=rates[slowest] / 8 * 1e9 * RDMA_PAYLOAD_SHARE,
        source=f"assumed from the {rates[slowest]:g} Gbit/s of {slowest}'s InfiniBand or RoCE ports, no host has less; "
        "measure it: gangline bench network",
        spread=GUESSED_SPREAD,
    )


def _measured(cluster: Cluster, network: Network) -> LinkModel | None:
    reduced = [each for each in network.collectives if each.operation == "all_reduce" and each.world_size > 1]
    slots = [host.slots for host in cluster.hosts]
    when = network.measured[:10]
    if reduced and reduced[0].world_size == sum(slots):
        points = [(float(each.num_bytes), each.seconds) for each in reduced]
        fitted = fit_all_reduce(points, reduced[0].world_size, source=f"measured {when}")
        if fitted is not None:
            return fitted
    rates = {
        (way.source, way.target): way.throughput_mbps * 125e3
        for way in network.links
        if way.throughput_mbps is not None
    }
    latencies = [way.latency_s for way in network.links if way.latency_s is not None]
    latency_s = max(latencies, default=2e-4) / 2  # a round trip is two ways
    return slowest_of_ring(
        rates, [host.name for host in cluster.hosts], latency_s=latency_s, source=f"measured {when}, pair by pair"
    )


def _way(host: Host, facts: HostFacts | None) -> LinkSpec | None:
    """What the catalogue expects of the interface through which a host's ranks talk; None where it says no speed."""
    nic = None if facts is None else choose_nic(host, facts)[0]
    if nic is not None and nic.kind == "wifi":
        return find_link("wifi")
    if nic is not None and (nic.driver or "").replace("_", "-") == "thunderbolt-net":
        return find_link("thunderbolt")
    return None if nic is None or not nic.speed_mbps else find_link(f"{nic.speed_mbps}mbit")


def _inside(inventory: Inventory) -> LinkModel:
    """Between cards of a host: NVLink where the table of the host shows it, else the bus."""
    known = [facts for facts in inventory.hosts if len(facts.gpus) > 1]
    if not known:
        return LinkModel(
            latency_s=LOOPBACK_S,
            bytes_per_s=MEMORY_BYTES_PER_S,
            source="this machine's own memory, assumed",
            spread=1.0,
        )
    return min((link(_bus(facts)) for facts in known), key=lambda model: model.bytes_per_s)


def _bus(facts: HostFacts) -> str:
    """The catalogue's name of what joins a host's cards."""
    if _all_nvlink(facts) and (found := nvlink_of(facts.gpus[0].name)) is not None:
        return found
    return _pcie(facts.gpus)


def _pcie(gpus: Sequence[Gpu]) -> str:
    """The catalogue's name of the narrowest slot."""
    generations = [gpu.pcie_generation_max or 3 for gpu in gpus]
    widths = [gpu.pcie_width_max or 16 for gpu in gpus]
    generation, width = max(3, min(5, *generations)), 16 if min(widths) >= 16 else 8
    return f"pcie{generation}-x{width}"


def _all_nvlink(facts: HostFacts) -> bool:
    topology = facts.topology
    if topology is None:
        return False
    cards = topology.gpus
    pairs: Sequence[tuple[str, str]] = [(one, other) for one in cards for other in cards if one < other]
    return bool(pairs) and all((topology.joint(*pair) or "").startswith("NV") for pair in pairs)


# How fast a placement computes: as it was measured, else as the catalogue lets expect.


MAKER = "NVIDIA "
"""What NVML says before the names that the catalogue has."""
DERIVED_SPREAD = 0.15
"""What is added where recomputation was not measured but reckoned from FLOPs."""


@dataclass(slots=True, kw_only=True)
class SpeedTable:
    """The speeds that are known for one model; each is looked up once."""

    architecture: Architecture
    home: Path
    _profiles: list[Profile] | None = None
    _known: dict[object, ComputeModel | None] = field(default_factory=dict)

    def of(self, placement: Placement, training: Training) -> ComputeModel | None:
        """Of a placement; None where nobody measured it and the catalogue does not have it."""
        # neither the size of micro-batches nor their number changes what a token takes
        training = dataclasses.replace(training, micro_batch=1, accumulation=1)
        key = (placement.host, placement.gpu, placement.spec, placement.power_limit_w, placement.bus, training)
        if key not in self._known:
            model = self._measured(placement, training) or self._expected(placement, training)
            self._known[key] = None if model is None else self._by_bus(model, placement, training)
        return self._known[key]

    def _by_bus(self, model: ComputeModel, placement: Placement, training: Training) -> ComputeModel:
        """With copies as fast as the card's slot, where nobody measured them."""
        if model.profile is not None or placement.gpu is None:
            return model
        usual_s, own_s = (
            copies_s(self.architecture, training, host_bytes_per_s=each)
            for each in (HOST_LINK_BYTES_PER_S, placement.host_bytes_per_s)
        )
        return dataclasses.replace(model, per_token_s=model.per_token_s + own_s - usual_s)

    def profile_of(self, placement: Placement, training: Training) -> Profile | None:
        """The measurement that the speed of a placement rests on; None where nobody measured it."""
        plain = dataclasses.replace(training, offloading=False)
        other = dataclasses.replace(plain, checkpointing=not plain.checkpointing)
        return self._profile(placement, training) or self._profile(placement, plain) or self._profile(placement, other)

    def dated(self, placements: Sequence[Placement], training: Training, inventory: Inventory) -> list[str]:
        """A sentence for every measurement that was made under another driver or torch than its host has now.

        The measurement is used all the same: it is nearer to the truth than a data sheet.
        """
        found: dict[str, None] = {}
        for placement in placements:
            facts, profile = inventory.of(placement.host), self.profile_of(placement, training)
            changes = [] if facts is None or profile is None else _changes(profile.key, facts, placement.device)
            if profile is not None and changes:
                whose = "" if profile.host == placement.host else f" on {profile.host}"
                text = (
                    f"{placement.host}: speed measured {profile.measured[:10]}{whose} with {' and '.join(changes)} now"
                )
                found[f"{text}; measure it again: gangline bench compute JOB"] = None
        return list(found)

    def _measured(self, placement: Placement, training: Training) -> ComputeModel | None:
        """From a profile of the very method, or of one that differs in recomputation or in where activations lie."""
        if (profile := self._profile(placement, training)) is not None:
            return profile.corrected
        if training.offloading:
            plain = self._measured(placement, dataclasses.replace(training, offloading=False))
            copied_s = 0.0 if placement.gpu is None else copies_s(self.architecture, training)
            if plain is None:
                return None
            return dataclasses.replace(plain, per_token_s=plain.per_token_s + copied_s, profile=None)
        other = dataclasses.replace(training, checkpointing=not training.checkpointing)
        if (profile := self._profile(placement, other)) is None:
            return None
        length = training.sequence_length
        totals = [flops_per_token(self.architecture, each, length=length).total for each in (training, other)]
        model = profile.corrected.scaled(totals[0] / totals[1])
        # what a run of it takes is no word on the measurement
        return dataclasses.replace(model, spread=model.spread + DERIVED_SPREAD, profile=None)

    def _profile(self, placement: Placement, training: Training) -> Profile | None:
        """Of our own trainer only: another's kernels are as fast as they are."""
        if not training.stack.name.startswith(GANGLINE.name):
            return None
        if self._profiles is None:
            self._profiles = load_profiles(self.home)
        wanted = ProfileKey(
            gpu="cpu"
            if placement.gpu is None
            else placement.gpu
            if placement.gpu.startswith(MAKER)
            else MAKER + placement.gpu,
            driver="",
            torch="",
            kernels=kernel_words(training, attention="eager" if training.stack.attention == "eager" else "sdpa"),
            method=method_words(training),
            dtype=training.compute,
            architecture=architecture_digest(self.architecture),
        )
        return find_profile(self._profiles, wanted, host=placement.host)

    def _expected(self, placement: Placement, training: Training) -> ComputeModel | None:
        if placement.spec is None:
            return None
        return uncalibrated(placement.spec, self.architecture, training, power_limit_w=placement.power_limit_w)


def _changes(key: ProfileKey, facts: HostFacts, device: int) -> list[str]:
    """Which of driver and torch the host has in another version than the measurement; what is not known, is not."""
    driver = facts.gpus[device].driver if device < len(facts.gpus) else ""
    pairs = (("driver", key.driver, driver), ("torch", key.torch, facts.packages.get("torch") or ""))
    known = [(what, then, now) for what, then, now in pairs if not {then, now} & {"", "?"}]
    return [f"{what} {then}, {now}" for what, then, now in known if not _same_version(then, now)]


def _same_version(one: str, other: str) -> bool:
    """Whether two versions are one; 2.13.0 says less than 2.13.0+cu128, and nothing else."""
    (base, _, build), (other_base, _, other_build) = one.partition("+"), other.partition("+")
    return base == other_base and (build == other_build or not build or not other_build)


# Measured speeds, corrected by the runs that have ended since: each attempt of a run counts once.


FOLDED_FILE = "folded"
"""In the folder of an attempt: what it taught is in the profiles."""


def refit_profiles(home: Path, console: Console) -> None:
    """Correct the profiles that are kept by what runs have taken, and say so. Where there is none, nothing is read."""
    before = {profile.name: profile for profile in load_profiles(home)}
    fresh = [comparison for comparison in _unfolded(home, set(before)) if _claim(home, comparison)]
    folded = fold(before.values(), fresh)
    for name, profile in folded.profiles.items():
        if profile != before[name]:
            save_profile(home, profile)
    for line in folded.lines:
        console.report(f"refitted   {line}")


def _unfolded(home: Path, known: set[str]) -> Iterator[Comparison]:
    """Comparisons that say something of a known profile, and have not been taken account of."""
    for layout in (RunLayout(home, run_id) for run_id in (run_ids(home) if known else ())):
        try:
            comparison = load_record(layout.comparison, Comparison)
        except (OSError, *NONSENSE):
            continue
        if comparison.run != layout.run_id or not known & {rank.profile for rank in comparison.ranks}:
            continue
        if not (layout.attempt(comparison.attempt) / FOLDED_FILE).exists():
            yield comparison


def _claim(home: Path, comparison: Comparison) -> bool:
    """Whether it is for us to fold it: another command may do so right now. What is lost if we die then is one run."""
    path = RunLayout(home, comparison.run).attempt(comparison.attempt) / FOLDED_FILE
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
    except OSError:
        return False
    return True
