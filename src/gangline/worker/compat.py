"""Which private names of other libraries does gangline take? Each stands here once, and nowhere else in the source.

A private name may be gone after any release. Then the first use ends with an error that names the library with its
version, the name, the purpose, and the versions to install. A test refuses private names in every other file, and
another one finds each of these in the installed libraries; `make versions` runs it at both ends of the tested ranges.

Before a row is added here, look for a public name that does it. These are used in place of private ones:
`torch.nn.utils.get_total_norm` for norms on a GPU; `setattr` and `named_parameters(recurse=False)` for the tensors of
a module; `requires_grad_` while DDP is made, for parameters that it must leave alone; `__create_chunk_list__`, which
DCP asks of every tensor, for the place of a shard. DCP's own reader of `.metadata` stays unused: it unpickles whatever
the file names.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any

from gangline.errors import UsageError
from gangline.tested import BY_NAME


@dataclass(frozen=True, slots=True)
class Private:
    """A private name of a library, looked up at its first use: nothing is imported before."""

    place: str
    """Module, colon, and the name there, such as "torch.nn:Module._apply"."""
    purpose: str
    seen: str
    """The versions of the library in which it was found."""
    on_instances: bool = False
    """Objects get it while they are made, so that the class does not have it."""

    @property
    def library(self) -> str:
        """The package, such as "torch"."""
        return self.place.partition(":")[0].partition(".")[0]

    @property
    def name(self) -> str:
        """The last word of its place."""
        return self.place.partition(":")[2].rpartition(".")[2]

    def get(self) -> Any:
        """The object of that name. Raises UsageError where it is gone."""
        try:
            return pkgutil.resolve_name(self.place)
        except (ImportError, AttributeError) as error:
            raise self._gone() from error

    def of(self, owner: object) -> Any:
        """The value that an object or a class has under that name. Raises UsageError where it has none."""
        try:
            return getattr(owner, self.name)
        except AttributeError as error:
            raise self._gone() from error

    def is_in(self, owner: object) -> bool:
        """Whether this very object has it, not only its class."""
        return self.name in vars(owner)

    def put(self, owner: object, value: object) -> None:
        """Give an object another value of that name. Raises UsageError where it has none: nobody would read it."""
        self.of(owner)
        setattr(owner, self.name, value)

    @contextmanager
    def replaced(self, owner: object, value: object) -> Iterator[None]:
        """Another value inside, and the old one again afterwards."""
        own = self.of(owner)
        setattr(owner, self.name, value)
        try:
            yield
        finally:
            setattr(owner, self.name, own)

    def _gone(self) -> UsageError:
        tested = BY_NAME[self.library]
        try:
            version = metadata.version(self.library)
        except metadata.PackageNotFoundError:
            version = "(of an unknown version)"
        return UsageError(
            f"{self.library} {version} has no {self.place.replace(':', '.')}, which gangline needs for {self.purpose}",
            seen=f"it is a private name; gangline found it in {self.library} {self.seen}",
            fix=f"in the environment of every host: pip install '{self.library}>={tested.lowest},<={tested.newest}'",
        )


def overriding(base: type, methods: Mapping[Private, Callable[..., Any]]) -> Any:
    """A class like `base` with other methods of these names. Raises UsageError where it has none to override."""
    for method in methods:
        method.of(base)
    return type(base.__name__, (base,), {method.name: function for method, function in methods.items()})


_torch = partial(Private, seen="2.13.0")
_transformers = partial(Private, seen="5.3.0 to 5.23.0")
_deepspeed = partial(Private, seen="0.19.8")
_READ_INDEX = "reading the index of a checkpoint, which may name nothing else"
_WIDER = "loading the weights that a model wants to be wider than the others"
_DIVIDE = "dividing weights one after another under zero-3"
_OWN_GRADIENT = "finding this rank's part of a gradient under zero-1 and zero-2"
_INIT = "deepspeed.runtime.zero.partition_parameters:Init."
_STAGE_3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3."

SCALE_ALL = _torch("torch:_foreach_mul_", "scaling all gradients in one call, in place of hundreds of small ones")
PROCESS_GROUPS = _torch(
    "torch.distributed.distributed_c10d:_world", "the list of all process groups, of which NCCL's are aborted"
)
BACKEND = _torch(
    "torch.distributed:ProcessGroup._get_backend", "asking NCCL whether it has let go of a rank in this step"
)
DEFAULT_STORE = _torch(
    "torch.distributed.distributed_c10d:_get_default_store",
    "the store in which ranks say how many rounds they have come to",
)
_OWN_SOCKET = "having torchrun's store listen on the loopback address where all hosts are one computer"
STATIC_STORE = _torch("torch.distributed.elastic.rendezvous.static_tcp_rendezvous:TCPStore", _OWN_SOCKET)
DYNAMIC_STORE = _torch("torch.distributed.elastic.rendezvous.c10d_rendezvous_backend:TCPStore", _OWN_SOCKET)
APPLY = _torch(
    "torch.nn:Module._apply",
    "giving memory to the shards of FSDP, on one device for shards and another one for the rest",
)
MEMORY_FORMATS = _torch("torch.distributed.checkpoint.metadata:_MEM_FORMAT_ENCODING", _READ_INDEX)
STORAGE_INFO = _torch("torch.distributed.checkpoint.filesystem:_StorageInfo", _READ_INDEX)
GET_LAYOUT = _torch("torch.serialization:_get_layout", _READ_INDEX)
FAKE_TENSOR_MODE = _torch("torch._subclasses.fake_tensor:FakeTensorMode", "running a step without numbers")
FAKE_TENSOR = _torch("torch._subclasses.fake_tensor:FakeTensor", "running a step without numbers")
UNSET_FAKE = _torch(
    "torch._subclasses.fake_tensor:unset_fake_temporarily", "computing masks for real in a step without numbers"
)
DISPATCH_MODE = _torch("torch.utils._python_dispatch:TorchDispatchMode", "counting what a step allocates")
TO_COPY = _torch("torch:ops.aten._to_copy.default", "comparing the operations of two heads")
READ_SCALAR = _torch(
    "torch:ops.aten._local_scalar_dense.default", "answering for a number that is read from a tensor without numbers"
)
DYNAMO = _torch("torch:_dynamo.config", "compiling the layers of a model inside of DDP without cuts at its buckets")
COMPILE_COUNTERS = _torch(
    "torch._dynamo.utils:counters", "saying how much was compiled, and how much was found compiled"
)
COMPILE_ERROR = _torch("torch._dynamo.exc:TorchDynamoException", "telling what cannot be compiled from other failures")
COMPILER = _torch("torch._inductor.compile_fx:compile_fx", "importing the compiler before ranks are forked")
GROUPED_PRODUCT = _torch("torch:ops.aten._grouped_mm.default", "the shapes of experts in a step without numbers")

TP_PLAN = _transformers(
    "transformers:PreTrainedModel._tp_plan", "the list of a model's linears that tensor parallelism cuts"
)
KEEP_IN_FP32 = _transformers("transformers:PreTrainedModel._keep_in_fp32_modules", _WIDER)
KEEP_IN_FP32_STRICT = _transformers("transformers:PreTrainedModel._keep_in_fp32_modules_strict", _WIDER)
ATTENTION = _transformers(
    "transformers:PretrainedConfig._attn_implementation", "naming the attention kernels of a measurement"
)
RECOMPUTE = _transformers(
    "transformers:GradientCheckpointingLayer._gradient_checkpointing_func",
    "activation_offloading, which keeps the inputs of recomputed layers in the machine's memory",
    on_instances=True,
)

OPERATORS = _deepspeed(
    "deepspeed.ops:__compatible_ops__", "keeping DeepSpeed from compiling an operator that gloo replaces"
)
WORLD_GROUP = _deepspeed(
    "deepspeed.utils.groups:_WORLD_GROUP", "giving DeepSpeed the process group that is there, with its time limits"
)
BROADCAST = _deepspeed(
    "deepspeed.runtime.engine:DeepSpeedEngine._broadcast_model", "not sending weights that are equal already"
)
DIVIDE_ALL = _deepspeed(f"{_INIT}_convert_to_zero_parameters", _DIVIDE)
DIVIDE_ONE = _deepspeed(f"{_INIT}_zero_init_param", _DIVIDE)
MAKE_DIVISIBLE = _deepspeed(f"{_INIT}_convert_to_deepspeed_param", _DIVIDE)
LINK_STATES = _deepspeed(
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer._lazy_init_hp_params_optimizer_state",
    "finding the moments of a weight under zero-1 and zero-2",
)
FRAGMENT = _deepspeed("deepspeed:Parameter._hp_mapping", _OWN_GRADIENT, on_instances=True)
FRAGMENT_INDEX = _deepspeed("deepspeed:Parameter._index_in_param_group", _OWN_GRADIENT, on_instances=True)
GATHER_STATE = _deepspeed(f"{_STAGE_3}_fp32_state_allgather", "saving states that lie on a disk")
DIVIDE_AGAIN = _deepspeed(f"{_STAGE_3}_partition_all_parameters", "loading weights under zero-3")
SPREAD_GROUP = _deepspeed(f"{_STAGE_3}_reassign_or_swap_out_partitioned_parameters", "loading weights under zero-3")
IS_ON_DISK = _deepspeed(f"{_STAGE_3}_swappable_optimizer_subgroup", "finding states that lie on a disk")
SWAP_IN = _deepspeed(f"{_STAGE_3}_optimizer_states_and_gradient_swap_in", "reading states that lie on a disk")
SWAP_OUT = _deepspeed(f"{_STAGE_3}_optimizer_states_and_gradient_swap_out", "writing states that lie on a disk")
RELEASE = _deepspeed(f"{_STAGE_3}_release_swap_buffers", "letting go of states that lie on a disk")

ROWS = tuple(each for each in list(globals().values()) if isinstance(each, Private))
"""All of them."""
