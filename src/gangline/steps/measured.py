"""What `bench` measured, in lines for people."""

from __future__ import annotations

from collections.abc import Callable

from gangline.bench.calibrate import RankSpeed, Speeds
from gangline.inventory.network import Link, Network
from gangline.units import format_bytes
from gangline.watch.table import table


def speeds_lines(speeds: Speeds) -> list[str]:
    """A row for each rank."""
    training = speeds.training
    head = ("rank", "device", "tokens/s", "micro-batch", "floor", "update", "spread")
    title = f"micro-batches of {training.micro_batch} x {training.sequence_length} tokens, the whole model"
    slow = [f"{each.host} x {each.slowdown:g}" for each in speeds.ranks if each.slowdown > 1]
    return [
        *([title, *table(head, [_speed_row(speeds, each) for each in speeds.ranks])] if speeds.ranks else []),
        *([f"note     slowness is simulated: {', '.join(slow)}"] if slow else []),
        *(f"skipped  {row.what}: {row.why}" for row in speeds.skipped),
    ]


def _speed_row(speeds: Speeds, rank: RankSpeed) -> tuple[str, ...]:
    model, tokens = rank.profile.compute, speeds.training.tokens
    took_s = rank.micro_batch_s(tokens, speeds.training.sequence_length)
    return (
        f"{rank.host}:{rank.rank}",
        rank.profile.key.gpu,
        f"{tokens / took_s:.0f}",
        f"{took_s * 1000:.0f} ms",
        f"{model.floor_s * 1000:.0f} ms" if model.floor_s else "-",
        f"{model.optimizer_s * 1000:.1f} ms",
        f"{model.spread:.0%}",
    )


def network_lines(network: Network) -> list[str]:
    """Tables of pairs, and of collectives."""
    speeds = _matrix(network, "Mbit/s", lambda link: _text(link.throughput_mbps, "{:.0f}"))
    latencies = _matrix(network, "ms", lambda link: _text(link.latency_s and link.latency_s * 1000, "{:.2f}"))
    rows = [
        (
            f"{one.operation} {format_bytes(one.num_bytes)}",
            f"{one.seconds * 1000:.2f} ms",
            f"{one.bus_gbps:.3g} Gbit/s bus",
            f"{one.world_size} ranks, {one.backend}",
        )
        for one in network.collectives
    ]
    return [
        *([*speeds, "", *latencies, ""] if network.links else []),
        *(table(("collective", "median", "speed", "of"), rows) if rows else []),
        *(f"note     {note}" for note in network.notes),
        *(f"skipped  {row.what}: {row.why}" for row in network.skipped),
    ]


def _matrix(network: Network, unit: str, words: Callable[[Link], str]) -> list[str]:
    names = [name for name in network.addresses if any(name in {link.source, link.target} for link in network.links)]
    cells = {(link.source, link.target): words(link) for link in network.links}
    rows = [(source, *(cells.get((source, target), "-") for target in names)) for source in names]
    return table((f"{unit}, from", *(f"to {name}" for name in names)), rows)


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
