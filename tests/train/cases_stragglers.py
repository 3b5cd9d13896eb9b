"""What ranks do in test_stragglers: look at links, train while one of them is slow, say what was found."""

from __future__ import annotations

import time
from dataclasses import replace

import torch.distributed as dist

from benchmarks.emulated import Rows, Setup, Shape, build
from gangline.worker import stragglers as pairs
from gangline.worker.step_statistics import Straggler
from gangline.worker.stragglers import Slow, blame, compute_words, data_words, network_words, pairings, probe
from tests.train.small import make_job, make_session, make_world, run_loop

MICRO_BATCH_S, SHARES = 0.04, (2, 2, 2)
SMALL = Shape(layers=2, hidden=64, rank=2)
FROM = 22


def rounds(*, num_hosts: int):
    """The pairs of hosts, by round."""
    return [list(pairing) for pairing in pairings(num_hosts)]


def blamed(*, num_hosts: int, slow: list[list[int]], rest: float = 1.3):
    """What is blamed where these pairs of hosts take three times as long as before, and the others `rest` times."""
    before = {(low, high): 0.01 + 0.001 * high for low in range(num_hosts) for high in range(low + 1, num_hosts)}
    now = {pair: seconds * (3.0 if list(pair) in slow else rest) for pair, seconds in before.items()}
    return [[list(each.hosts), round(each.factor, 3)] for each in blame(before, now, num_hosts=num_hosts)]


def looked(hosts):
    """Every pair of hosts with the seconds of a message, as this rank knows them."""
    world = make_world([1] * len(hosts), rank=dist.get_rank(), hosts=hosts)
    return [[*pair, seconds] for pair, seconds in probe(world).items()]


def words():
    """The sentences."""
    compute = Straggler(what="slow", cause="compute", rank=2, factor=1.6, before_s=0.42, now_s=0.672)
    data = Straggler(what="slow", cause="data", rank=0, factor=1.2, before_s=0.002, now_s=0.085)
    network = Straggler(what="suspected", cause="network", before_s=0.1, now_s=0.5)
    hosts = ["pc1", "pc2", "pc3"]
    links = [Slow(hosts=each, factor=3.1, before_s=0.018, now_s=0.0558) for each in ((1,), (0, 2), ())]
    return [
        compute_words(compute, "pc3", has_gpu=True),
        compute_words(compute, "pc3", has_gpu=False),
        data_words(data, "pc1"),
        *(network_words(each, network, hosts) for each in links),
    ]


def trained(*, cause: str, rank: int, steps: int = FROM + 20):
    """Train, where from step FROM on one rank takes twice as long, or the network does; events of stragglers.

    What a micro-batch takes is slept to absolute deadlines, so that other programs on the machine count little.
    """
    is_slow = dist.get_rank() == rank
    setup = Setup(micro_batch_s=MICRO_BATCH_S, shares=SHARES, batch=sum(SHARES), steps=steps, moving=False, shape=SMALL)
    rows = Rows(
        sum(SHARES) * steps, read_s=lambda _: MICRO_BATCH_S * (cause == "data" and is_slow and clock.step >= FROM)
    )

    def factor(step: int) -> float:
        return 1.0 + (cause == "compute" and is_slow and step >= FROM)

    def waited() -> float:
        exchange_s = MICRO_BATCH_S * (cause == "network" and clock.step >= FROM)
        time.sleep(exchange_s)
        return plain_wait() + exchange_s

    def probed(world):
        is_bad = cause == "network" and clock.step >= FROM
        return {pair: 0.02 if is_bad and rank in pair else 0.01 for pair in plain_probe(world)}

    session, _, clock = build(setup, dist.get_rank(), factor=factor, rows=rows)
    plain_wait, plain_probe = session.strategy.waited_s, pairs.probe
    session.strategy.waited_s, pairs.probe = waited, probed
    try:
        _, captured = run_loop(session)
    finally:
        pairs.probe = plain_probe
    return [event for event in captured.events if event["event"].startswith("straggler")]


def saved(shares):
    """Train with a save after every step: nothing is known of such a run, and nothing is said."""
    job = make_job(precision="fp32", steps=8, batch=sum(shares))
    job = replace(job, checkpoint=replace(job.checkpoint, every_steps=1))
    session = make_session(job, make_world(shares, rank=dist.get_rank()), num_evaluation=0)
    result, captured = run_loop(session)
    return [result, [event["event"] for event in captured.events if event["event"].startswith("straggler")]]
