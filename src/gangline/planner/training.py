"""What a rank computes, with which software, and how ranks work together: the questions that a plan is made of."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from gangline.optimizers import OptimizerKind
from gangline.strategies.base import PlanHalf
from gangline.strategies.table import plan_half

Number = Literal["bf16", "fp16", "fp32", "fp64"]
BYTES: dict[Number, int] = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
Method = Literal["full", "lora", "qlora"]
Bits = Literal[4, 8]
Payload = Literal["int8", "bf16", "fp32"]
FusedPart = Literal["norm", "rope", "mlp", "gated-mlp", "activation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftwareStack:
    """The software as far as bytes depend on it."""

    name: str
    about: str = ""
    """The software and how it is set up, in a few words."""
    known: Literal["measured", "reasoned"] = "measured"
    """measured: compared with published peaks; reasoned: put together from its source and documentation."""
    sources: tuple[str, ...] = ()
    """Where its facts are from."""
    loss: Literal["fused", "chunked", "plain", "inplace"] = "fused"
    """fused: logits exist a chunk at a time, with the head's and the hidden states' gradient computed at once;
    chunked: all logits of a chunk of tokens at a time, again in backward; plain: all logits at once, in fp32 for the
    loss; inplace: all logits at once, and their gradient written over them by the loss's own kernel."""
    chunk_numbers: int = 1 << 27
    """Logits held at once by a fused or chunked loss."""
    chunk_positions: int | None = None
    """The same as positions of every sample, where that is what the software counts."""
    chunk_bytes: int | None = None
    """Bytes per logit of a chunk of a fused loss; None: fp32, and the width of products."""
    logit_bytes: int = 12
    """Bytes per logit at the highest point of a plain or inplace loss. plain: log-softmax and two gradients, 12, or in
    transformers 4.46 to 4.48 in forward logits, fp32 logits, shifted ones and log-softmax, 14; inplace: 4 less."""
    kept_logits_bytes: int = 0
    """Bytes per logit that the caller holds during backward, beside `logit_bytes` (plain)."""
    pooled_logit_bytes: int = 0
    """Bytes per logit that the allocator holds at the loss for tensors that are gone, and that fit no later one
    (plain): logits in 16 bits beside those in fp32, and those shifted by a token, which are a little smaller."""
    kept_softmax_bytes: int = 0
    """Bytes per logit of what the loss of each chunk keeps for backward (chunked); 0: a chunk is computed again."""
    upcasts: bool = False
    """Whether what is not quantised is turned into fp32, and the residual stream with it (peft's k-bit preparation)."""
    upcast_norms: bool = False
    """Whether norms alone are (TRL turns embedding and head back). Neither is done to what fsdp has in parts."""
    attention: Literal["flash", "efficient", "math", "eager"] = "flash"
    """efficient: sdpa's memory-efficient kernel, keys and values repeated for all heads; math and eager keep matrices
    of attention weights, whose bytes grow with the square of the length."""
    on_cpu: bool = False
    """Whether kernels are those of torch for processors: flash attention takes any width and mask, but no dropout,
    which keeps numbers where a GPU keeps bytes."""
    native_attention: bool = False
    """Whether flash attention uses the matrix instructions that each generation has of its own (FlashAttention 3,
    cuDNN), and not Ampere's everywhere (FlashAttention 2)."""
    masks: Literal["always", "windows", "never"] = "always"
    """Where documents that share a sample are kept apart by a mask of length x length, which flash kernels do not take:
    windows: where layers see less than a document. Else each is attended to by itself, which costs nothing."""
    joins_documents: bool = False
    """Whether the results of documents that are attended to by themselves are put together, which copies them."""
    repeats_heads: tuple[str, ...] = ()
    """Model types whose keys and values are repeated for all heads even where the kernel would not need it (flash);
    "*": every one."""
    joins_qkv: bool = False
    """Whether queries, keys and values of every model come from one matrix."""
    holds_inputs: bool = False
    """Whether each layer's input and its gradient are held until backward is over (FSDP1's hooks on frozen weights,
    with reentrant checkpointing)."""
    fused: tuple[FusedPart, ...] = ()
    """Parts of a layer that are one kernel, which keeps its input only. mlp: act(gate) * up, of experts, too,
    and adapters as Unsloth has them; gated-mlp: that product alone, where there are no experts."""
    adds_adapters: bool = False
    """Whether an adapter's output is added within its second product, and its input multiplied as it is; else peft
    widens that to the adapter's format first, and autocast narrows it again, for each matrix anew."""
    keeps_quantised_inputs: bool = False
    """Whether the 4-bit product holds its input (bitsandbytes up to 0.42)."""
    unpacked_copies: int = 1
    """Of a 4-bit weight while it is multiplied: 2 if it was quantised in another half precision than the product's."""
    doubles_embedding: bool = False
    """Whether the embedding table is there twice beside quantised weights."""
    unties: bool = False
    """Whether a head that is the embedding table gets a copy of its own."""
    quantises_head: bool = False
    """Whether the output head is quantised as well."""
    double_quant: bool = True
    """Whether scales of 4-bit weights are quantised again, as its recipes have it."""
    adapters: Literal["fp32", "compute"] | None = None
    """Width of adapters' weights, whatever the job says of trained ones; None: as the job says."""
    num_adapters: int = 1
    """Adapters side by side over every matrix, one of which is trained at a time."""
    grouped_adapters: bool = False
    """Whether adapters of experts are products of their own; else they are added to the experts' weights (peft)."""
    weighs_in_fp32: bool = False
    """Whether experts' results are multiplied with their weights in fp32."""
    frozen: Number | None = None
    """Width in which weights that are not trained lie there (lora); None: that of products."""
    adapter_share: float = 1.0
    """Part of a matrix's outputs that its adapter reaches; the others get zeros, at the price of one more copy of what
    the adapter computed (queries and values, where one matrix makes queries, keys and values)."""
    widens_norms: bool = True
    """Whether autocast computes layer norms in fp32 (CUDA's list of operations; that of CPUs leaves them)."""
    whole_adapters: bool = False
    """Whether every rank has all adapters where the frozen weights are in parts (fsdp, hsdp)."""
    divides_scales: bool = False
    """Whether the scales of quantised weights are in parts where these are (fsdp, hsdp)."""
    chooses_reshard: bool = False
    """Whether a layer may be kept between forward and backward where there is room (fsdp); else it is given up."""
    always_sharded: bool = False
    """Whether a rank by itself has its weights in parts, too: one part, and copies in the width of products."""
    gathers_adapters: bool = False
    """Whether adapters are put together in the width of products, as the weights around them are (fsdp)."""
    reduces: Number = "fp32"
    """In which width sharded gradients are summed over ranks."""
    bucket_numbers: int | None = None
    """Numbers of each buffer in which DeepSpeed sums gradients, however few are trained; None: no more than these."""
    foreach: bool = False
    """Whether the optimizer makes a copy of all trained weights for a moment (AdamW's foreach path)."""
    expert_modules: bool = False
    """Whether experts are modules of their own (transformers 4), which are quantised like other linears."""
    autocast: bool = True
    """Whether products of weights in another width run under autocast."""
    autocasts_lora: bool = True
    """The same, where weights are not quantised."""
    caches_casts: bool = True
    """Whether autocast holds the copies that it makes until forward ends."""


GANGLINE = SoftwareStack(
    name="gangline",
    about="gangline's own trainer: cross-entropy fused with the head, fused AdamW, sdpa",
    sources=("gangline's traces of its trainer: tests/train/test_closed_form.py, benchmarks/trace.py",),
    caches_casts=False,
    whole_adapters=True,
    divides_scales=True,
    chooses_reshard=True,
    masks="windows",
    joins_documents=True,
    native_attention=True,  # sdpa takes cuDNN's on capability 9 and 10 (torch, native/transformers/cuda/sdp_utils.cpp)
)
"""Our own trainer."""
GANGLINE_CPU = replace(
    GANGLINE,
    name="gangline-cpu",
    about="the same on ranks without a GPU: chunks that stay in a CPU's caches",
    chunk_numbers=1 << 20,
    widens_norms=False,
    on_cpu=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One forward-backward of one rank, and the update that follows."""

    method: Method
    micro_batch: int
    """Samples at once."""
    sequence_length: int
    """Tokens of a sample at the most: what memory has to be there for."""
    compute: Number = "bf16"
    parameters: Number = "fp32"
    """Of trained weights, their gradients and the optimizer's states."""
    rank: int = 16
    """Of the adapters (lora, qlora)."""
    targets: tuple[str, ...] = ("all-linear",)
    """Names of linears with adapters; ("all-linear",): all inside layers."""
    dropout: float = 0.0
    draws_by_sample: bool = False
    """Whether dropout masks belong to samples (`Job.draws`), so that any number of them may share a pass."""
    dora: bool = False
    """Whether the length of each row of an adapted matrix is trained by itself."""
    splits: bool = False
    """Whether what adapters began with is kept, and subtracted (`MethodJob.splits`)."""
    extras: tuple[str, ...] = ()
    """See `strategies.base.Asked`."""
    checkpointing: bool = False
    offloading: bool = False
    """Whether what checkpointing keeps of each layer lies in the machine's memory."""
    packed: bool = False
    """Whether several documents share a sample: attention then gets a mask, which flash kernels do not take."""
    accumulation: int = 1
    """Micro-batches per optimizer step: from the second on, gradients are there from the start."""
    bits: Bits = 4
    """Of the linears' frozen weights (qlora)."""
    double_quant: bool = True
    """Whether scales of 4-bit weights are quantised again (qlora)."""
    optimizer: OptimizerKind = "adamw"
    momentum: bool = False
    """Whether there is any (sgd)."""
    exchange: Number | None = None
    """What gradients travel as between ranks (ddp); None: as they are."""
    stack: SoftwareStack = GANGLINE

    @property
    def tokens(self) -> int:
        """Of a micro-batch."""
        return self.micro_batch * self.sequence_length


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStrategy:
    """How ranks share the work."""

    kind: str
    """A row of `strategies.table.STRATEGIES`."""
    world_size: int
    shard_size: int = 1
    """Ranks that hold one copy of the sharded state together: the world for fsdp and zero, a part of it for hsdp and
    tp, whose ranks of a host do the same micro-batches."""
    stages: tuple[int, ...] = ()
    """pipeline: layers of each rank; those of each pipeline sum to the model's depth."""
    replicas: int = 1
    """pipeline: how many there are, of as many ranks each, one after the other."""
    inner_steps: int = 1
    """local-sgd: optimizer steps between two exchanges of hosts. There, `shard_size` is the ranks of a host, which
    exchange gradients in every step; 1 where hosts have unlike numbers of them, and each rank then counts as one."""
    payload: Payload = "fp32"
    """local-sgd: what changes of weights are rounded to on the wire."""
    asked: bool = False
    """Whether the job asks for it: some are taken for no other reason (`Capabilities.asked_only`)."""
    offload: tuple[Literal["optimizer", "parameters"], ...] = ()
    """zero, fsdp, hsdp: what of it lies in the machine's memory, not on the card."""
    on_disk: bool = False
    """zero-3: the optimizer's states lie on a disk, not in the machine's memory."""
    reshard: bool = True
    """fsdp: whether a layer's weights are given up after forward and gathered again for backward."""
    eager: bool = False
    """pipeline: see `runs.schedule.ahead`."""

    @property
    def half(self) -> PlanHalf:
        """The plan half of its kind."""
        return plan_half(self.kind)

    @property
    def rows(self) -> tuple[tuple[int, ...], ...]:
        """Layers of the ranks of each pipeline."""
        size = len(self.stages) // self.replicas
        return tuple(self.stages[begin : begin + size] for begin in range(0, len(self.stages), size))

    def place(self, rank: int) -> tuple[tuple[int, ...], int]:
        """Layers of the ranks of a rank's pipeline, and which of them it is."""
        size = len(self.stages) // self.replicas
        begin = rank - rank % size
        return self.stages[begin : begin + size], rank - begin

    @property
    def moved(self) -> str:
        """What lies elsewhere than on the card, as it is told beside the strategy's name."""
        where = "on disk" if self.on_disk else "in RAM"
        return f", {' and '.join(self.offload)} {where}" if self.offload else ""
