"""Which tensors of a q4_k_m file have how many bits, and when a tensor is not what it was made from.

The arithmetic itself is llama.cpp's: benchmarks/gguf_files.py, which downloads it, compares whole files.
"""

import numpy as np
import pytest

from gangline.worker.gguf_mix import LARGEST_ERROR, relative_error, type_of, uses_more_bits


def kind(name, shape=(512, 256), *, num_layers=8, tied=False, grouped=True):
    return type_of(name, shape, num_layers=num_layers, tied=tied, grouped=grouped)


def test_the_first_and_last_eighth_and_every_third_layer_between_keep_more_bits():
    assert [layer for layer in range(8) if uses_more_bits(layer, 8)] == [0, 3, 6, 7]
    assert [layer for layer in range(32) if uses_more_bits(layer, 32)] == [
        *(0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31)
    ]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("blk.0.attn_v.weight", "Q6_K"),
        ("blk.1.attn_v.weight", "Q4_K"),
        ("blk.3.ffn_down.weight", "Q6_K"),
        ("blk.2.ffn_down.weight", "Q4_K"),
        ("blk.0.ffn_up.weight", "Q4_K"),
        ("blk.0.attn_qkv.weight", "Q5_K"),
        ("token_embd.weight", "Q4_K"),
        ("output.weight", "Q6_K"),
        ("blk.0.attn_q_norm.weight", None),
        ("blk.0.attn_q.bias", None),
    ],
)
def test_a_tensor_has_the_bits_of_its_part(name, expected):
    assert kind(name) == expected


def test_what_changes_the_bits_of_a_part():
    assert kind("token_embd.weight", tied=True) == "Q6_K"
    assert kind("blk.20.attn_v.weight", num_layers=80) == "Q5_K"
    assert kind("blk.20.attn_v.weight", num_layers=80, grouped=False) == "Q4_K"
    assert kind("output_norm.weight", (256,)) is None
    assert [kind(f"blk.0.{part}.weight", (64, 96)) for part in ("attn_q", "attn_v", "attn_qkv")] == [
        *("Q5_0", "Q8_0", "Q5_1")
    ]


def test_a_tensor_that_is_another_one_is_too_far_and_so_is_one_that_is_not_finite():
    weights = np.random.default_rng(0).normal(size=(4, 256)).astype(np.float32)
    assert relative_error(weights, weights) == 0
    assert relative_error(weights, weights * 1.5) == pytest.approx(0.5)
    assert relative_error(weights, weights[::-1]) > max(LARGEST_ERROR.values())
    assert not relative_error(weights * np.nan, weights) <= max(LARGEST_ERROR.values())
    assert relative_error(np.zeros((1, 256)), np.zeros((1, 256))) == 0
