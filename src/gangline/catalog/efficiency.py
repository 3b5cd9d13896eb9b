"""The rates that a card keeps up in training: what its power, its generation and its memory leave of its data sheet.

Nothing here knows a card by its name.
"""

from __future__ import annotations

from dataclasses import dataclass

from gangline.catalog.gpu_specs import ARCHITECTURES, GpuSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What chips of one architecture reach in a long product, read off the column `measured` of gpus.json."""

    watts: float
    """Per TFLOP/s of the data sheet: with less power than this, the clock falls (`POWER_EXPONENT`)."""
    share: float
    """Of the data sheet's rate with enough power. GeForce chips clock above their boost, HBM ones below it."""


GENERATIONS: dict[str, Generation] = {
    "pascal-p100": Generation(watts=13, share=0.9),
    "pascal": Generation(watts=13, share=0.9),
    "turing-gtx": Generation(watts=20, share=0.95),
    "volta": Generation(watts=2.4, share=0.76),
    "turing": Generation(watts=5.3, share=1.0),
    "turing-pro": Generation(watts=2.7, share=1.0),
    "ampere-a100": Generation(watts=0.9, share=0.85),
    "ampere": Generation(watts=4.7, share=1.03),
    "ampere-pro": Generation(watts=3.5, share=1.03),
    "ada": Generation(watts=2.0, share=1.03),
    "ada-pro": Generation(watts=1.6, share=1.03),
    "hopper": Generation(watts=0.71, share=0.82),
    "blackwell-b200": Generation(watts=0.45, share=0.78),
    "blackwell-b300": Generation(watts=0.45, share=0.78),
    "blackwell": Generation(watts=2.4, share=1.03),
    "blackwell-pro": Generation(watts=1.6, share=1.03),
    "blackwell-gb10": Generation(watts=1.6, share=0.95),
    "apple-m3": Generation(watts=0.0, share=0.7),
}
"""By architecture. Watts and share together give the measured rates of cards of one chip with unlike limits: an A5000
(230 W) and an A6000 (300 W), an L4 (72 W), an RTX 6000 Ada (300 W) and an L40S (350 W), an H100 of 350 and of 700 W."""
UNKNOWN = Generation(watts=0.0, share=0.8)
"""A card of no architecture of the table: of other makers, of which no measured product was found, or the user's."""
POWER_EXPONENT = 0.47
"""Speed by power: a 4070 Laptop GPU does 40.1 TFLOPS with 115 W, 29.9 with 60 W, 22.7 with 35 W (voltage falls with the
clock). The same exponent explains the measured rates of server cards with low limits."""
LAPTOP_HEAT = 0.9
"""Of its rate, what a laptop keeps up for hours."""
TGP_SHARES = (0.57, 0.75, 1.0)
"""Lowest, likely and highest part of its rate where nobody knows what power a laptop gives its card."""
BANDWIDTH_SHARE = 0.85
"""Of the data sheet's memory bandwidth, which kernels without reuse reach."""
SYNCHRONOUS_FLOP = 2048
"""Of one SM in one clock, at the most, with the matrix instructions that Ampere has (mma.sync). FlashAttention 2 knows
no others, so that an H100 and a B200 reach no more with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SustainedRates:
    """What one card keeps up."""

    product_flops: float
    """FLOP/s of long products in 16 bits."""
    attention_flops: float
    """The same with the instructions of FlashAttention 2."""
    bytes_per_s: float
    """Of memory."""
    low: float
    """Part of these rates that may be all there is, where the power is not known; else 1."""
    high: float
    """How many times these rates there may be."""


def sustained_rates(spec: GpuSpec, *, power_limit_w: float | None = None) -> SustainedRates:
    """The rates of a card. power_limit_w: what NVML reports as the enforced limit; used for laptop GPUs only."""
    kind = GENERATIONS.get(spec.architecture, UNKNOWN)
    lowest, likely, highest = _of_the_laptop(spec, power_limit_w)
    enough_w = kind.watts * spec.tflops
    powered = 1.0 if spec.laptop or spec.power_w >= enough_w else (spec.power_w / enough_w) ** POWER_EXPONENT
    product_flops = spec.tflops * 1e12 * kind.share * powered * likely
    chip = ARCHITECTURES.get(spec.architecture)
    synchronous = min(1.0, SYNCHRONOUS_FLOP / chip.flop_per_sm_clock) if chip else 1.0
    return SustainedRates(
        product_flops=product_flops,
        attention_flops=product_flops * synchronous,
        bytes_per_s=spec.bandwidth_gb_s * 1e9 * BANDWIDTH_SHARE,
        low=lowest / likely,
        high=highest / likely,
    )


def _of_the_laptop(spec: GpuSpec, limit_w: float | None) -> tuple[float, float, float]:
    if not spec.laptop:
        return 1.0, 1.0, 1.0
    if limit_w is None:
        lowest, likely, highest = TGP_SHARES
    else:
        lowest = likely = highest = min(1.0, (limit_w / spec.power_w) ** POWER_EXPONENT)
    return lowest * LAPTOP_HEAT, likely * LAPTOP_HEAT, highest * LAPTOP_HEAT
