"""How much of a GPU's peak training reaches before anything was measured on it: an honest guess with its interval."""

from __future__ import annotations

from typing import Literal

from gangline.catalog.gpu_specs import GpuSpec

Method = Literal["full", "lora", "qlora"]

FLOOR_S_PER_LAYER: dict[Method, float] = {"full": 4.7e-3, "lora": 4.7e-3, "qlora": 12e-3}
"""A micro-step takes at least this long per layer, however short it is: Python and kernel launches of eager Hugging
Face code. QLoRA: 12 ms on an A100 (Qwen-7B, 0.375 s) and on an RTX 4080 (1.5B, 0.34 s) alike; LoRA in bf16: 4.7 ms on
an A100 (Qwen's table). No measurement of full fine-tuning was found: it has LoRA's, though it launches fewer kernels;
and none of frozen weights of 8 bits, which have the figures of 4.
"""
UNCERTAINTY = 0.35
"""Either way, of the likely figure. Published HFU of one recipe spans more than that over models and cards."""

_TUNED = 0.55
_EAGER: dict[Method, float] = {"full": 0.35, "lora": 0.35, "qlora": 0.30}
_EAGER_SERVER: dict[Method, float] = {"full": 0.45, "lora": 0.45, "qlora": 0.42}
_SMALL = 0.20
_SMALL_PARAMETERS, _LARGE_PARAMETERS = 2e9, 3e9
_EMULATED_BF16 = 0.8
_LAPTOP_HEAT = 0.9
_TGP_EXPONENT = 0.47
_TGP_SHARES = (0.57, 0.75, 1.0)
_A100_MATMUL_SHARE = 0.86
_A100_FLOP_PER_BYTE = 312e12 / 1555e9


def default_efficiency(
    spec: GpuSpec,
    *,
    method: Method,
    num_parameters: float,
    tuned: bool = False,
    power_limit_w: float | None = None,
) -> tuple[float, float, float]:
    """Low, likely and high share of `spec.tflops` that executed FLOP reach, between 0 and 1.

    Executed FLOP: with frozen weights forward and dX only, and the forward once more under activation checkpointing.
    It is the slope, for micro-batches long enough; short ones are bound by `FLOOR_S_PER_LAYER`.

    Where the likely figure comes from (published measurements, all of one GPU unless said):

    - GeForce, eager Hugging Face code: LoRA 0.35 and QLoRA 0.30 from 3B on (RTX 4080 QLoRA: 7B 0.40, 3B 0.25), 0.20
      below 2B (RTX 4080 1.5B 0.23, RTX 4060 1.5B 0.19), a straight line between. Full fine-tuning: LoRA's, unmeasured.
    - Server and workstation cards: 0.45, QLoRA 0.42 (A100: 0.44 to 0.54, Qwen's LoRA and QLoRA tables), times how
      much harder it is to keep the card busy than an A100, see `_against_an_a100`.
    - tuned (fused kernels such as Liger or Unsloth, or compiled): 0.55 (RTX 4090, torchtune QLoRA 0.66; A100
      pre-training 0.55 to 0.64); smaller models lose as much of it as eager ones do.
    - fp16 instead of bf16 (Turing and older): x 0.8.
    - Laptops: x 0.9 for heat, and x (limit / highest TGP)^0.47 for power: a 4070 Laptop GPU of 115 W does 40.1 TFLOPS,
      29.9 at 60 W and 22.7 at 35 W. Without a known limit: 0.57, 0.75 and 1, so the interval is wider.

    Args:
        spec: the card.
        method: how the model is trained.
        num_parameters: of the model, frozen ones counted.
        tuned: see above.
        power_limit_w: what NVML reports as the enforced limit; used for laptop GPUs only.

    """
    full_size = _by_size(spec, method, num_parameters, tuned=tuned) * _of_the_card(spec)
    lowest, likely, highest = _of_the_power(spec, power_limit_w)
    return (
        full_size * lowest * (1 - UNCERTAINTY),
        full_size * likely,
        min(1.0, full_size * highest * (1 + UNCERTAINTY)),
    )


def _by_size(spec: GpuSpec, method: Method, num_parameters: float, *, tuned: bool) -> float:
    large = (_EAGER if _is_geforce(spec) else _EAGER_SERVER)[method]
    place = (num_parameters - _SMALL_PARAMETERS) / (_LARGE_PARAMETERS - _SMALL_PARAMETERS)
    share = _SMALL + (large - _SMALL) * min(1.0, max(0.0, place))
    return share * _TUNED / large if tuned else share


def _is_geforce(spec: GpuSpec) -> bool:
    return spec.name.startswith("GeForce ")


def _of_the_card(spec: GpuSpec) -> float:
    fast = 1.0 if _is_geforce(spec) else _against_an_a100(spec)
    return fast if spec.bf16 else fast * _EMULATED_BF16


def _against_an_a100(spec: GpuSpec) -> float:
    """The share that a card reaches where an A100 reaches all of its usual one.

    A step is matmul and the rest. The matmul of an A100 runs at 0.86 of its peak, that of the card at what was
    measured. The rest waits for memory: the more FLOP a card can do for each byte it can move, the more of its peak is
    lost. That puts an H100 SXM at 0.80 (published pre-training MFU: 0.36 to 0.46 where A100s have 0.55 to 0.64) and an
    L40S at 0.6. Our own model; only the H100 was held against published runs.
    """
    usual = _EAGER_SERVER["lora"]
    rest = 1 / usual - 1 / _A100_MATMUL_SHARE
    matmul_share = spec.measured_tflops / spec.tflops if spec.measured_tflops else _A100_MATMUL_SHARE
    flop_per_byte = spec.tflops * 1e12 / (spec.bandwidth_gb_s * 1e9)
    time = 1 / min(1.0, matmul_share) + rest * max(1.0, flop_per_byte / _A100_FLOP_PER_BYTE)
    return min(1.0, 1 / (usual * time))


def _of_the_power(spec: GpuSpec, limit_w: float | None) -> tuple[float, float, float]:
    if not spec.laptop:
        return 1.0, 1.0, 1.0
    if limit_w is None:
        lowest, likely, highest = _TGP_SHARES
    else:
        lowest = likely = highest = min(1.0, (limit_w / spec.power_w) ** _TGP_EXPONENT)
    return lowest * _LAPTOP_HEAT, likely * _LAPTOP_HEAT, highest * _LAPTOP_HEAT
