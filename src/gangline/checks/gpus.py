"""Are the cards there, free and well?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import combinations

from gangline.catalog.cuda import has_bf16
from gangline.checks.rules import Evidence, Rule, Seen, adders, pairs
from gangline.inventory.facts import Gpu, HostFacts, Inventory
from gangline.inventory.rank_interface import choose_nic
from gangline.runs.cluster import Cluster, Host
from gangline.units import format_bytes

HELD_BYTES = 2 << 30
"""What a desktop with a browser holds is less."""
HELD_FRACTION = 0.1
BUSY_PERCENT = 50
"""A card that does nothing lowers its link."""
SMALL_LINK = 4
"""Lanes: 8 of 16 is what two cards in one home PC get, and costs training little."""


RULES: list[Rule] = []
each_host, whole_cluster = adders(RULES)


@each_host.warn(
    "E-GPU-01",
    title="more slots than GPUs",
    meaning="ranks share a card: each is slower, all of them have to fit into its memory, and NCCL does not do it; "
    "only ddp and local-sgd run so",
    fix="set `slots` of this host to {count}",
)
def _fewer_than_slots(facts: HostFacts, host: Host) -> Iterator[Evidence]:
    """Slots on a host whose torch cannot use the card anyway are CPU slots."""
    on_cpu = facts.torch is not None and facts.torch.cuda is None
    if 0 < len(facts.gpus) < host.slots and not on_cpu:
        count = len(facts.gpus)
        cards = "1 GPU" if count == 1 else f"{count} GPUs"
        yield f"{host.slots} slots, {cards}: {', '.join(gpu.name for gpu in facts.gpus)}", {"count": str(count)}


@whole_cluster.fail(
    "E-GPU-01",
    title="has no GPU, and other hosts have",
    meaning="its ranks would run on the CPU; they cannot talk with those on GPUs, and would hold them up",
    fix="take it out of the cluster file, or get its GPU to work: nvidia-smi shows it there",
)
def _none_at_all(inventory: Inventory, cluster: Cluster) -> Iterator[Seen]:
    """Of a broken card or driver, other rules tell."""
    others = [facts.host for facts in inventory.hosts if facts.gpus]
    for facts, _ in pairs(inventory, cluster):
        broken = facts.gpu_driver.trouble in {"mismatch", "lost"} or facts.gpu_driver.faults
        if others and not facts.gpus and not broken and not facts.foreign_cards:
            yield Seen(hosts=(facts.host,), evidence=f"{facts.gpu_reason}; {', '.join(others[:4])} has GPUs")


@each_host.warn(
    "E-GPU-02",
    title="another program holds memory of a GPU",
    meaning="that memory is missing for training, which may end with `out of memory`",
    fix="end that program, or wait for it: nvidia-smi shows it there",
)
def _held(facts: HostFacts, _host: Host) -> Iterator[str]:
    for gpu in facts.gpus:
        held = gpu.memory_total_bytes - gpu.memory_free_bytes
        if not gpu.unified_memory and held > max(HELD_BYTES, HELD_FRACTION * gpu.memory_total_bytes):
            by = ", ".join(f"{row.name or '?'} (pid {row.pid})" for row in gpu.processes[:4])
            total = format_bytes(gpu.memory_total_bytes)
            yield f"{_named(gpu)}: {format_bytes(held)} of {total} held" + (f" by {by}" if by else "")


@each_host.warn(
    "E-GPU-03",
    title="a GPU is slowed down",
    meaning="every step waits for the slowest rank",
    fix="check its cooling and its power supply; nvidia-smi -q -d PERFORMANCE shows the reason",
)
def _slowed(facts: HostFacts, _host: Host) -> Iterator[str]:
    for gpu in facts.gpus:
        reasons = [reason for reason in gpu.throttle if reason != "power cap"]
        if reasons:
            heat = f" at {gpu.temperature_c} degrees" if gpu.temperature_c is not None else ""
            yield f"{_named(gpu)}: {', '.join(reasons)}{heat}"


@each_host.warn(
    "E-GPU-04",
    title="memory errors on a GPU",
    meaning="an uncorrectable error ends the program that meets it; a card that has some often gets more",
    fix="restart the host; if they come again, have the card replaced",
)
def _memory_errors(facts: HostFacts, _host: Host) -> Iterator[str]:
    for gpu in facts.gpus:
        if gpu.ecc_uncorrected:
            yield f"{_named(gpu)}: {gpu.ecc_uncorrected} uncorrectable since the driver was loaded"


@each_host.fail(
    "E-GPU-05",
    title="driver and library do not match",
    meaning="the driver was upgraded under the running system: no program can use the GPUs",
    fix="restart the host; then hold the driver's packages back, so that they are not upgraded unattended",
)
def _mismatch(facts: HostFacts, _host: Host) -> Iterator[str]:
    driver = facts.gpu_driver
    if driver.trouble == "mismatch":
        yield f"{facts.gpu_reason}" + (f"; the kernel runs {driver.module}" if driver.module else "")


@each_host.fail(
    "E-GPU-06",
    title="a GPU is lost",
    meaning="the card does not answer on the bus any more: heat, power, a loose riser or a broken card",
    fix="restart the host; if it comes again, check its power cables and its slot",
)
def _lost(facts: HostFacts, _host: Host) -> Iterator[str]:
    for fault in facts.gpu_driver.faults:
        if fault.kind == "lost":
            yield f"GPU {fault.index}: {fault.text}"
    if facts.gpu_driver.trouble == "lost":
        yield facts.gpu_reason or "a GPU is lost"


@whole_cluster.info(
    "E-GPU-07",
    title="cards without bf16 beside cards with it",
    meaning="one compute type serves the whole run: `precision: auto` takes fp16",
    fix="nothing; or leave the older cards out to train in bf16",
)
def _without_bf16(inventory: Inventory, _cluster: Cluster) -> Iterator[Seen]:
    cards = [(facts.host, gpu) for facts in inventory.hosts for gpu in facts.gpus if gpu.compute_capability]
    lacking = [(host, gpu) for host, gpu in cards if not has_bf16(gpu.compute_capability or "")]
    if 0 < len(lacking) < len(cards):
        names = dict.fromkeys(f"{gpu.name} on {host}" for host, gpu in lacking)
        yield Seen(hosts=tuple(dict.fromkeys(host for host, _ in lacking)), evidence=", ".join(names))


@each_host.warn(
    "E-GPU-08",
    title="a GPU has few PCIe lanes",
    meaning="everything that goes to and from that card is slow: gradients, weights, offloading",
    fix="put the card into a slot with more lanes, seat it anew, or exchange its riser",
)
def _narrow(facts: HostFacts, _host: Host) -> Iterator[str]:
    for gpu in facts.gpus:
        width, best = gpu.pcie_width, gpu.pcie_width_max
        if width and best and width <= SMALL_LINK and width < best:
            yield f"{_named(gpu)}: {width} of {best} lanes"


@each_host.warn(
    "E-GPU-08",
    title="a GPU's PCIe link is slower than it could be",
    meaning="everything that goes to and from that card is slow: gradients, weights, offloading",
    fix="set the slot's generation in the BIOS, seat the card anew, or exchange its riser",
)
def _slow_link(facts: HostFacts, _host: Host) -> Iterator[str]:
    for gpu in facts.gpus:
        now, best = gpu.pcie_generation, gpu.pcie_generation_max
        if now and best and now < best and (gpu.utilization_percent or 0) >= BUSY_PERCENT:
            yield f"{_named(gpu)}: PCIe {now}.0 instead of {best}.0 while it computes"


@each_host.warn(
    "E-GPU-09",
    title="a GPU that cannot be used",
    meaning="its ranks would run on the CPU",
    fix="install the NVIDIA driver there, or load it: sudo modprobe nvidia; then nvidia-smi has to list the card",
)
def _unusable(facts: HostFacts, _host: Host) -> Iterator[str]:
    """A container sees every card of its machine on the bus, whichever it was given."""
    driver = facts.gpu_driver
    if driver.trouble in {"driver-not-loaded", "no-permission", "other"}:
        yield facts.gpu_reason or driver.trouble
    elif driver.on_the_bus and driver.trouble == "no-library" and not facts.system.container:
        count = driver.on_the_bus
        yield f"{count} NVIDIA {'card' if count == 1 else 'cards'} on the bus, and no driver is installed"
    for fault in driver.faults:
        if fault.kind != "lost":
            yield f"GPU {fault.index}: {fault.text}"


@each_host.warn(
    "E-GPU-10",
    title="a GPU is cut into instances",
    meaning="a rank sees one instance only, with its part of the memory, and NCCL does not join instances",
    fix="switch it off there: sudo nvidia-smi -mig 0",
)
def _in_instances(facts: HostFacts, _host: Host) -> Iterator[str]:
    for gpu in facts.gpus:
        if gpu.mig:
            yield f"{_named(gpu)}: MIG is on"


@each_host.warn(
    "E-GPU-12",
    title="a GPU is in use by another user",
    meaning="a start that takes this card is refused until that run has ended",
    fix="wait for it, or ask that user; or take other cards: CUDA_VISIBLE_DEVICES in `env` of this host",
)
def _of_another_user(facts: HostFacts, _host: Host) -> Iterator[str]:
    """A name of a lease has `_` where a UUID could have what is no letter, figure or hyphen."""
    named = {"gpu-" + re.sub(r"[^A-Za-z0-9-]", "_", gpu.uuid): _named(gpu) for gpu in facts.gpus}
    for lease in facts.leases:
        if lease.slot.startswith("gpu-") and facts.gpus:
            yield f"{named.get(lease.slot, lease.what)} by {lease.words}"


TRAINER: list[Rule] = []
"""Rules for gangline's own trainer; the user's own command may train on what it likes."""
for_trainer, _ = adders(TRAINER)


@for_trainer.fail(
    "E-GPU-11",
    title="a GPU that gangline cannot train on yet",
    meaning="only NVIDIA GPUs train; the processor would compute instead, many times slower",
    fix="take this host out; or write `gpu: none` at it in cluster.yaml, if its processor is meant to train",
)
def _of_another_maker(facts: HostFacts, _host: Host) -> Iterator[str]:
    """The graphics of a processor are no fault, and beside an NVIDIA GPU no other is one."""
    for gpu in facts.foreign_cards:
        memory = f", {format_bytes(gpu.memory_bytes)}" if gpu.memory_bytes else ""
        yield f"{gpu.name} ({gpu.maker}{memory})"


def _named(gpu: Gpu) -> str:
    return f"GPU {gpu.index} ({gpu.name})"


# How are the GPUs of a host joined, and does the topology file that NCCL is given fit?


BUS_ID = re.compile(r"<pci\b[^>]*\bbusid=\"([0-9A-Fa-f:.]+)\"[^>]*\bclass=\"0x03", re.DOTALL)
"""Display adapters of NCCL's topology file. Read as text: an XML parser would follow what the file tells it to."""
GPU_MARK = re.compile(r"<gpu\b")


@each_host.info(
    "E-TOPO-01",
    title="GPUs that are joined through both processors only",
    meaning="they exchange gradients over the link between the sockets, the slowest way inside a machine",
    fix="nothing, or put the cards on one socket, or join them by NVLink",
)
def _far_apart(facts: HostFacts, _host: Host) -> Iterator[str]:
    topology = facts.topology
    if topology is None:
        return
    ways = {(one, other): topology.joint(one, other) for one, other in combinations(topology.gpus, 2)}
    far = [f"{one}-{other}" for (one, other), kind in ways.items() if kind == "SYS"]
    if far:
        yield f"SYS between {', '.join(far[:4])}" + (f" and {len(far) - 4} more" if len(far) > 4 else "")


@each_host.info(
    "E-TOPO-02",
    title="the network adapter is far from the GPUs",
    meaning="traffic to other hosts crosses the link between the sockets",
    fix="nothing, or put the adapter into a slot of the GPUs' socket",
)
def _adapter_far(facts: HostFacts, host: Host) -> Iterator[str]:
    topology = facts.topology
    active = {port.device for port in facts.rdma.active}
    if topology is not None and active:
        adapters = tuple(name for name in topology.adapters if name in active)
        far = [gpu for gpu in topology.gpus if adapters and topology.nearest(gpu, adapters) == "SYS"]
        if far:
            yield f"{', '.join(far)} to {', '.join(adapters[:4])}: SYS"
        return
    nic, _ = choose_nic(host, facts)
    nodes = {gpu.numa_node for gpu in facts.gpus if gpu.numa_node is not None and gpu.numa_node >= 0}
    if nic is not None and nic.numa_node is not None and nic.numa_node >= 0 and nodes and nic.numa_node not in nodes:
        yield f"{nic.name} is on NUMA node {nic.numa_node}, the GPUs on {', '.join(map(str, sorted(nodes)))}"


@each_host.warn(
    "E-TOPO-03",
    title="the topology file describes another machine",
    meaning="NCCL plans its rings by it: it ends, or is slow",
    fix="take NCCL_TOPO_FILE away, or write the file anew on this host: NCCL_TOPO_DUMP_FILE",
)
def _other_machine(facts: HostFacts, _host: Host) -> Iterator[str]:
    for file in facts.files:
        if "topo" not in file.path.lower() and file.text is not None and not GPU_MARK.search(file.text):
            continue
        if file.error is not None:
            yield f"{file.path}: {file.error}"
            continue
        named = {_short(text) for text in BUS_ID.findall(file.text or "")}
        held = {_short(gpu.pci) for gpu in facts.gpus if gpu.pci}
        if held and named and not held <= named:
            missing = ", ".join(sorted(held - named)[:4])
            yield f"{file.path} has {', '.join(sorted(named)[:4])}; the GPUs of this host are at {missing}"


def _short(bus_id: str) -> str:
    """NVML writes the domain with eight digits, NCCL with four."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain[-4:]}:{rest}"
