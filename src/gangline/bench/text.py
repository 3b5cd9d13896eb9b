"""What `bench` measured, in lines for people."""

from __future__ import annotations

from collections.abc import Callable

from gangline.bench.compute import MeasuredSpeeds, RankSpeed
from gangline.bench.scaling import METHOD, HostSpeed, Scaling
from gangline.inventory.measured import Link, Network
from gangline.report.text_table import table
from gangline.units import format_bytes, format_count


def speeds_lines(speeds: MeasuredSpeeds) -> list[str]:
    """A row for each rank."""
    training = speeds.training
    head = ("rank", "device", "tokens/s", "micro-batch", "floor", "update", "spread")
    title = f"micro-batches of {training.micro_batch} x {training.sequence_length} tokens, the whole model"
    return [
        *([title, *table(head, [_speed_row(speeds, each) for each in speeds.ranks])] if speeds.ranks else []),
        *(f"skipped  {row.what}: {row.why}" for row in speeds.skipped),
    ]


def _speed_row(speeds: MeasuredSpeeds, rank: RankSpeed) -> tuple[str, ...]:
    model, tokens = rank.profile.compute, speeds.training.tokens
    took_s = model.micro_batch_s(tokens, speeds.training.sequence_length)
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


# What `bench scaling` measured, in lines for people.


def scaling_lines(scaling: Scaling) -> list[str]:
    """A row for each host, then what all of them reach together, and how that was measured."""
    middle, total = scaling.middle, scaling.sum_tokens_per_s
    turns = f"worst of {len(scaling.together)}: {scaling.worst:.1%}" if len(scaling.together) > 1 else "one turn"
    whole, exposed, rest = scaling.missing
    count, versions = scaling.num_micro_batches, ", ".join(f"{name} {it}" for name, it in scaling.versions.items())
    together = f"{_speed(scaling.ratio * total)} tokens/s: {scaling.ratio:.1%} of the sum ({turns})"
    missing = f"{1 - scaling.ratio:.1%}: {whole:.1%} whole micro-batches, {exposed:.1%} exposed, {rest:.1%} the rest"
    step = f"a step of {middle.step_s:.3g} s ({exposed:.1%})"
    batch = f"batch {scaling.batch} = {count} x {scaling.micro_batch}, {scaling.sequence_length} tokens each"
    trained = f"{scaling.method}, {format_count(scaling.trained_numbers)} trained weights, {scaling.dtype}"
    return [
        *table(("host", "computes on", "alone", "share"), [_row(scaling, host) for host in scaling.hosts]),
        f"sum        {_speed(total)} tokens/s: what all of them do alone, added up",
        f"together   {together}",
        f"even split {_speed(scaling.even_ratio * total)} tokens/s: {scaling.even_ratio:.1%} of the sum",
        f"exposed    {middle.exposed_s * 1000:.3g} ms of {step}: exchange that no computing hides",
        f"ceiling    {scaling.ceiling:.1%}: what {count} whole micro-batches allow at these speeds",
        f"missing    {missing}",
        f"job        {scaling.job}: {trained}; {batch}",
        f"method     {METHOD}",
        f"measured   {scaling.measured[:10]} with {versions}",
        *(f"note       {words}" for words in _notes(scaling)),
        *(f"warning    {words}" for words in scaling.doubts),
    ]


def _row(scaling: Scaling, host: HostSpeed) -> tuple[str, ...]:
    share = sum(scaling.middle.shares[rank] for rank in host.ranks)
    count = f"{len(host.ranks)} x " if len(host.ranks) > 1 else ""
    return (
        host.host,
        f"{count}{host.device}",
        f"{_speed(host.tokens_per_s)} tokens/s",
        f"{share} of {scaling.num_micro_batches} ({share / scaling.num_micro_batches:.0%})",
    )


def _notes(scaling: Scaling) -> list[str]:
    notes = []
    if scaling.one_machine:
        notes.append("all hosts are this one computer: alone means without exchange, but beside the others")
    if not scaling.moving:
        notes.append("the cluster file says who does how much (share); shares did not follow the speeds")
    short = [host for host in scaling.hosts if host.alone_micro_batches < scaling.num_micro_batches]
    if short:
        names = ", ".join(f"{host.host} {host.alone_micro_batches}" for host in short)
        notes.append(
            f"micro-batches of a step alone, to save time: {names}; reckoned up to {scaling.num_micro_batches}, "
            "with one update"
        )
    return notes


def _speed(tokens_per_s: float) -> str:
    if tokens_per_s < 100:
        return f"{tokens_per_s:.1f}"
    return f"{tokens_per_s:,.0f}".replace(",", " ")
