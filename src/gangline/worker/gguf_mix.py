"""q4_k_m: a GGUF file in which most weights have 4 bits, made from one in f32 by llama.cpp's own arithmetic.

The wheel of the engine has llama.cpp's quantisation of rows (`ggml_quantize_chunk`), but not the function that walks
through a file. So this module walks: which tensor has how many bits is the rule of llama.cpp (`src/llama-quant.cpp`,
LLAMA_FTYPE_MOSTLY_Q4_K_M), for architectures without exceptions of their own. What was written is read again by the
decoder of llama.cpp's Python library, which has no code in common with what wrote it.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gangline.errors import ModelError, RunFailed

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3")
"""Whose mix has no exceptions; all of them without experts."""
FILE_TYPE = 15
"""LLAMA_FTYPE_MOSTLY_Q4_K_M."""
QUANTISATION_VERSION = 2
BLOCK = 256
"""Weights of a block of Q4_K, Q5_K and Q6_K; rows of another length fall back to blocks of 32."""
FALL_BACK = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
LARGEST_ERROR = {"Q4_K": 0.15, "Q5_K": 0.08, "Q6_K": 0.04, "Q8_0": 0.02, "Q5_0": 0.12, "Q5_1": 0.12}
"""Of the weights of a tensor, as root of the mean square over that of the weights: twice what weights of a normal
distribution lose."""


def uses_more_bits(layer: int, num_layers: int) -> bool:
    """The layers that keep more bits: the first and last eighth, and every third between them."""
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def type_of(name: str, shape: tuple[int, ...], *, num_layers: int, tied: bool, grouped: bool) -> str | None:
    """llama.cpp's name of the type of one tensor in a q4_k_m file; None for one that stays as it is.

    shape: rows first. tied: output and input words share their weights. grouped: several heads share keys and values.
    """
    if len(shape) < 2 or not name.endswith("weight") or name.endswith("norm.weight"):
        return None
    found = re.match(r"blk\.(\d+)\.(\w+)\.weight", name)
    more = found is not None and uses_more_bits(int(found[1]), num_layers)
    part = found[2] if found else name
    if part == "output.weight" or (tied and part == "token_embd.weight") or (part in {"attn_v", "ffn_down"} and more):
        kind = "Q6_K"
    elif part == "attn_qkv" or (part == "attn_v" and num_layers == 80 and grouped):
        kind = "Q5_K"
    else:
        kind = "Q4_K"
    return kind if shape[-1] % BLOCK == 0 else FALL_BACK[kind]


def quantise_file(source: Path, path: Path) -> None:
    """Write the file `source`, with weights in f32, as q4_k_m. One tensor is in memory at a time.

    Raises ModelError for an architecture that has a mix of its own, RunFailed where what was written is not the model.
    """
    import gguf  # type: ignore[import-not-found]

    reader = gguf.GGUFReader(source)
    values = {name: field.contents() for name, field in reader.fields.items()}
    architecture = _refuse_strange(values)
    names = {tensor.name for tensor in reader.tensors}
    how: dict[str, Any] = {
        "num_layers": int(values[f"{architecture}.block_count"]),
        "tied": "output.weight" not in names,
        "grouped": _of_heads(values, architecture),
    }
    kinds = {tensor.name: type_of(tensor.name, tensor.data.shape, **how) for tensor in reader.tensors}
    _refuse_lengths(reader, kinds)
    writer = gguf.GGUFWriter(path, architecture)
    try:
        _copy_values(reader, writer)
        for tensor in reader.tensors:
            kind = gguf.GGMLQuantizationType[kinds[tensor.name] or tensor.tensor_type.name]
            rows, length = int(np.prod(tensor.data.shape[:-1])), tensor.data.shape[-1]
            shape = tensor.data.shape if kinds[tensor.name] is None else (*tensor.data.shape[:-1], _bytes(kind, length))
            size = tensor.data.nbytes if kinds[tensor.name] is None else rows * _bytes(kind, length)
            dtype = tensor.data.dtype if kinds[tensor.name] is None else np.dtype(np.uint8)
            writer.add_tensor_info(tensor.name, shape, dtype, size, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in reader.tensors:
            found = kinds[tensor.name]
            writer.write_tensor_data(tensor.data if found is None else _compared(tensor, found))
    finally:
        writer.close()


def _bytes(kind: Any, length: int) -> int:
    """The bytes of a row."""
    import gguf

    weights, size = gguf.GGML_QUANT_SIZES[kind]
    return int(length // weights * size)


def quantised(weights: np.ndarray, kind: str) -> np.ndarray:
    """The bytes of rows of weights (rows, weights of a row), by llama.cpp: (rows, bytes of a row)."""
    import gguf
    import xllamacpp

    number = gguf.GGMLQuantizationType[kind]
    weights = np.ascontiguousarray(weights, dtype=np.float32)
    written = np.zeros((len(weights), _bytes(number, weights.shape[1])), dtype=np.uint8)
    call = ctypes.CDLL(xllamacpp.xllamacpp.__file__).ggml_quantize_chunk
    call.restype = ctypes.c_size_t
    call.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    size = call(int(number), weights.ctypes.data, written.ctypes.data, 0, *weights.shape, None)
    if size != written.nbytes:
        raise RunFailed(
            f"llama.cpp did not write {kind}", seen=f"expected {written.nbytes} bytes; seen {size}", fix="--gguf q8_0"
        )
    return written


def _compared(tensor: Any, kind: str) -> np.ndarray:
    """The bytes of a tensor, decoded again and compared. Raises RunFailed."""
    import gguf

    weights = tensor.data.reshape(-1, tensor.data.shape[-1])
    written = quantised(weights, kind)
    lost = relative_error(weights, gguf.quants.dequantize(written, gguf.GGMLQuantizationType[kind]))
    # written so that NaN fails, too
    if not lost <= LARGEST_ERROR[kind]:
        raise RunFailed(
            f"{tensor.name} in {kind} is not what it was made from",
            seen=f"expected to lose at most {LARGEST_ERROR[kind]:.0%} of the weights' size; seen {lost:.2g}",
            fix="look whether the model has weights that are not finite; or export with --gguf q8_0",
        )
    return written.reshape(*tensor.data.shape[:-1], -1)


def relative_error(weights: np.ndarray, others: np.ndarray) -> float:
    """Root of the mean square of the difference, over that of the weights; 0 for a tensor of zeros that stays one."""
    size, lost = float(np.square(weights).mean()), float(np.square(weights - others).mean())
    return (lost / size) ** 0.5 if size else lost**0.5


def _copy_values(reader: Any, writer: Any) -> None:
    """Every value of a file but those that say how weights are stored, and those that the writer has by itself."""
    import gguf

    own = {gguf.Keys.General.ARCHITECTURE, gguf.Keys.General.FILE_TYPE, gguf.Keys.General.QUANTIZATION_VERSION}
    for field in reader.fields.values():
        if field.name in own or field.name.startswith("GGUF."):
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)
    writer.add_file_type(FILE_TYPE)
    writer.add_quantization_version(QUANTISATION_VERSION)


def _refuse_strange(values: Mapping[str, Any]) -> str:
    """The architecture. Raises ModelError for one whose mix is not known here."""
    architecture = str(values.get("general.architecture"))
    if architecture not in ARCHITECTURES or values.get(f"{architecture}.expert_count"):
        raise ModelError(
            "this model is not written as q4_k_m here",
            seen=f"expected one of {', '.join(ARCHITECTURES)}, without experts; it is {architecture}",
            fix="export with --gguf f16, then use llama.cpp's own program: "
            "llama-quantize model-f16.gguf model-q4_k_m.gguf q4_k_m",
        )
    return architecture


def _refuse_lengths(reader: Any, kinds: Mapping[str, str | None]) -> None:
    """Raises ModelError for rows that are no whole number of the smallest blocks."""
    for tensor in reader.tensors:
        if kinds[tensor.name] is not None and tensor.data.shape[-1] % 32:
            raise ModelError(
                "this model is not written as q4_k_m here",
                seen=f"rows of {tensor.name} have {tensor.data.shape[-1]} weights; expected a multiple of 32",
                fix="export with --gguf f16",
            )


def _of_heads(values: Mapping[str, Any], architecture: str) -> bool:
    heads, shared = (values.get(f"{architecture}.attention.{name}") for name in ("head_count", "head_count_kv"))
    return shared is not None and heads != shared
