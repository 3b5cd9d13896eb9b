"""Architectures that tests of traffic and time speak of, written out by hand."""

from gangline.planner.architecture import Architecture, Layer, Linear


def dense(hidden, width, depth, vocabulary, *, kv=None, tied=False, heads=32):
    """A llama: q, k, v, o, gate, up, down."""
    kv = kv or hidden
    linears = (
        Linear(name="q_proj", inputs=hidden, outputs=hidden, part="attention"),
        Linear(name="k_proj", inputs=hidden, outputs=kv, part="attention"),
        Linear(name="v_proj", inputs=hidden, outputs=kv, part="attention"),
        Linear(name="o_proj", inputs=hidden, outputs=hidden, part="attention"),
        Linear(name="gate_proj", inputs=hidden, outputs=width, part="mlp"),
        Linear(name="up_proj", inputs=hidden, outputs=width, part="mlp"),
        Linear(name="down_proj", inputs=width, outputs=hidden, part="mlp"),
    )
    size = hidden // heads
    layer = Layer(
        count=depth,
        linears=linears,
        heads=heads,
        kv_heads=kv // size,
        head_dim=size,
        value_dim=size,
        width=width,
        vectors=2 * hidden,
    )
    return Architecture(
        model_type="llama", hidden=hidden, vocabulary=vocabulary, tied=tied, layers=(layer,), vectors=hidden
    )


LLAMA_2_7B = dense(4096, 11008, 32, 32000)
LLAMA_3_8B = dense(4096, 14336, 32, 128256, kv=1024)
LLAMA_32_1B = dense(2048, 8192, 16, 128256, kv=512, tied=True)
SMALL = dense(256, 704, 4, 1000, heads=4)
