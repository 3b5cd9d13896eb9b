"""How far two computations of the same numbers may be apart, and why. All are relative, but for LOGITS.

A test that compares runs says with one of these what differs between them. The unit roundoff u is 1e-16 in fp64, 6e-8
in fp32 and 4e-3 in bf16.
"""

SAME_SUMS = 1e-12
"""fp64, one pass over the same weights: only the order within products differs. It allows ten thousand u."""

FP64 = 1e-9
"""fp64, sums in another order: over ranks, stages or parts, for many steps. AdamW divides by the root of the second
moment, so rounding of a gradient near 0 can change a step by much more than u: hence a thousand times SAME_SUMS."""

FP64_OVER_FP32 = 1e-7
"""fp64 in which numbers go through fp32 once, as on the wire between hosts: about two u of fp32."""

FP32_SUM = 1e-6
"""fp32, one figure from the same weights, summed in another order: some twenty u."""

FP32_GRADIENT = 1e-5
"""fp32, one pass, the norm of the difference of gradients over their norm, or a loss by other kernels: some hundred u,
for backward adds up many products per weight in another order."""

EIGHT_BITS = 5e-6
"""fp32 with moments of 8 bits, few steps: other sums change a moment by one of its 256 levels at most in some places.
A test shows that moments of 32 bits are farther away than that."""

FP32 = 1e-4
"""fp32, losses of many steps: the rounding of each step as in FP32_GRADIENT, amplified by AdamW as in FP64."""

LOGITS = 1e-4
"""fp32, largest difference of logits, absolute: a merged adapter computes (W + B A) x in place of W x + B A x. It is
the tolerance that export itself has in fp32."""

BF16 = 5e-3
"""bf16, losses of few steps: a little over one u. A loss is a mean over many tokens, which rounds less than each."""

BF16_MEAN = 1e-3
"""fp32 where only the gradients are rounded to bf16 on their way: the promise of the option, under a thousandth."""

HALF_ON_A_GPU = 1e-2
"""bf16 or fp16 on a GPU against a processor: as BF16, twice, for its products are summed in other tiles."""

NORM = 10
"""Norms of gradients may be apart by so many times as much as losses: they depend on differences of activations."""

TRACED = 0.005
"""Bytes of two traces, or of a trace and a step with the same kernels: tokens, and the kernels' own small buffers."""

MEASURED = 0.01
"""Bytes of a formula or a trace against a real step: the promise is 2 %, and kernels take 0.7 % in bf16 products."""

OTHER_FORMULAS = 0.03
"""Bytes by formula for other architectures and settings than a plain dense model: the promise of these tests' names."""
