"""What `bench scaling` measured, in lines for people."""

from __future__ import annotations

from gangline.bench.scaled import METHOD, HostSpeed, Scaling
from gangline.units import format_count
from gangline.watch.table import table


def scaling_lines(scaling: Scaling) -> list[str]:
    """A row for each host, then what all of them reach together, and how that was measured."""
    middle, total = scaling.middle, scaling.sum_tokens_per_s
    turns = f"worst of {len(scaling.together)}: {scaling.worst:.1%}" if len(scaling.together) > 1 else "one turn"
    exposed = middle.exposed_s / middle.step_s
    count, versions = scaling.num_micro_batches, ", ".join(f"{name} {it}" for name, it in scaling.versions.items())
    together = f"{_speed(scaling.ratio * total)} tokens/s: {scaling.ratio:.1%} of the sum ({turns})"
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
        f"job        {scaling.job}: {trained}; {batch}",
        f"method     {METHOD}",
        f"measured   {scaling.measured[:10]} with {versions}",
        *(f"note       {words}" for words in _notes(scaling)),
        *(f"warning    {words}" for words in scaling.doubts),
    ]


def _row(scaling: Scaling, host: HostSpeed) -> tuple[str, ...]:
    share = sum(scaling.middle.shares[rank] for rank in host.ranks)
    count = f"{len(host.ranks)} x " if len(host.ranks) > 1 else ""
    slow = f", slowed {host.slowdown:g} x (simulated)" if host.slowdown > 1 else ""
    return (
        host.host,
        f"{count}{host.device}{slow}",
        f"{_speed(host.tokens_per_s)} tokens/s",
        f"{share} of {scaling.num_micro_batches} ({share / scaling.num_micro_batches:.0%})",
    )


def _notes(scaling: Scaling) -> list[str]:
    notes = []
    if any(host.slowdown > 1 for host in scaling.hosts):
        notes.append("slowness of hosts is simulated by sleeping")
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
