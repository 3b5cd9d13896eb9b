"""Which private names of other libraries does gangline take? Each stands here once, and nowhere else in the source.

A private name may be gone after any release. Then the first use ends with an error that names the library with its
version, the name, the purpose, and the versions to install. A test refuses private names in every other file, and
another one finds each of these in the installed libraries; `make versions` runs it at both ends of the tested ranges.

Before a row is added here, look for a public name that does it. These are used in place of private ones:
`torch.nn.utils.get_total_norm` for norms on a GPU; `setattr` and `named_parameters(recurse=False)` for the tensors of
a module; `requires_grad_` while DDP is made, for parameters that it must leave alone; the arithmetic of `torch.chunk`
for the place of a shard. DCP's own reader of `.metadata` stays unused: it unpickles whatever the file names.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from gangline.errors import UsageError
from gangline.tested import BY_NAME


@dataclass(frozen=True, slots=True, kw_only=True)
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


_TORCH = "2.13.0"
_TRANSFORMERS = "5.3.0 to 5.23.0"
_DEEPSPEED = "0.19.8"

PROCESS_GROUPS = Private(
    place="torch.distributed.distributed_c10d:_world",
    purpose="the list of all process groups, of which NCCL's are aborted",
    seen=_TORCH,
)
DEFAULT_STORE = Private(
    place="torch.distributed.distributed_c10d:_get_default_store",
    purpose="the store in which ranks say how many rounds they have come to",
    seen=_TORCH,
)
APPLY = Private(
    place="torch.nn:Module._apply",
    purpose="giving memory to the shards of FSDP, on one device for shards and another one for the rest",
    seen=_TORCH,
)
MEMORY_FORMATS = Private(
    place="torch.distributed.checkpoint.metadata:_MEM_FORMAT_ENCODING",
    purpose="reading the index of a checkpoint, which may name nothing else",
    seen=_TORCH,
)
STORAGE_INFO = Private(
    place="torch.distributed.checkpoint.filesystem:_StorageInfo",
    purpose="reading the index of a checkpoint, which may name nothing else",
    seen=_TORCH,
)
GET_LAYOUT = Private(
    place="torch.serialization:_get_layout",
    purpose="reading the index of a checkpoint, which may name nothing else",
    seen=_TORCH,
)
FAKE_TENSOR_MODE = Private(
    place="torch._subclasses.fake_tensor:FakeTensorMode", purpose="running a step without numbers", seen=_TORCH
)
FAKE_TENSOR = Private(
    place="torch._subclasses.fake_tensor:FakeTensor", purpose="running a step without numbers", seen=_TORCH
)
UNSET_FAKE = Private(
    place="torch._subclasses.fake_tensor:unset_fake_temporarily",
    purpose="computing masks for real in a step without numbers",
    seen=_TORCH,
)
DISPATCH_MODE = Private(
    place="torch.utils._python_dispatch:TorchDispatchMode", purpose="counting what a step allocates", seen=_TORCH
)
TO_COPY = Private(place="torch:ops.aten._to_copy.default", purpose="comparing the operations of two heads", seen=_TORCH)
READ_SCALAR = Private(
    place="torch:ops.aten._local_scalar_dense.default",
    purpose="answering for a number that is read from a tensor without numbers",
    seen=_TORCH,
)
GROUPED_PRODUCT = Private(
    place="torch:ops.aten._grouped_mm.default", purpose="the shapes of experts in a step without numbers", seen=_TORCH
)

TP_PLAN = Private(
    place="transformers:PreTrainedModel._tp_plan",
    purpose="the list of a model's linears that tensor parallelism cuts",
    seen=_TRANSFORMERS,
)
KEEP_IN_FP32 = Private(
    place="transformers:PreTrainedModel._keep_in_fp32_modules",
    purpose="loading the weights that a model wants to be wider than the others",
    seen=_TRANSFORMERS,
)
KEEP_IN_FP32_STRICT = Private(
    place="transformers:PreTrainedModel._keep_in_fp32_modules_strict",
    purpose="loading the weights that a model wants to be wider than the others",
    seen=_TRANSFORMERS,
)
ATTENTION = Private(
    place="transformers:PretrainedConfig._attn_implementation",
    purpose="naming the attention kernels of a measurement",
    seen=_TRANSFORMERS,
)
RECOMPUTE = Private(
    place="transformers:GradientCheckpointingLayer._gradient_checkpointing_func",
    purpose="activation_offloading, which keeps the inputs of recomputed layers in the machine's memory",
    seen=_TRANSFORMERS,
    on_instances=True,
)

OPERATORS = Private(
    place="deepspeed.ops:__compatible_ops__",
    purpose="keeping DeepSpeed from compiling an operator that gloo replaces",
    seen=_DEEPSPEED,
)
WORLD_GROUP = Private(
    place="deepspeed.utils.groups:_WORLD_GROUP",
    purpose="giving DeepSpeed the process group that is there, with its time limits",
    seen=_DEEPSPEED,
)
BROADCAST = Private(
    place="deepspeed.runtime.engine:DeepSpeedEngine._broadcast_model",
    purpose="not sending weights that are equal already",
    seen=_DEEPSPEED,
)
DIVIDE_ALL = Private(
    place="deepspeed.runtime.zero.partition_parameters:Init._convert_to_zero_parameters",
    purpose="dividing weights one after another under zero-3",
    seen=_DEEPSPEED,
)
DIVIDE_ONE = Private(
    place="deepspeed.runtime.zero.partition_parameters:Init._zero_init_param",
    purpose="dividing weights one after another under zero-3",
    seen=_DEEPSPEED,
)
MAKE_DIVISIBLE = Private(
    place="deepspeed.runtime.zero.partition_parameters:Init._convert_to_deepspeed_param",
    purpose="dividing weights one after another under zero-3",
    seen=_DEEPSPEED,
)
LINK_STATES = Private(
    place="deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer._lazy_init_hp_params_optimizer_state",
    purpose="finding the moments of a weight under zero-1 and zero-2",
    seen=_DEEPSPEED,
)
FRAGMENT = Private(
    place="deepspeed:Parameter._hp_mapping",
    purpose="finding this rank's part of a gradient under zero-1 and zero-2",
    seen=_DEEPSPEED,
    on_instances=True,
)
FRAGMENT_INDEX = Private(
    place="deepspeed:Parameter._index_in_param_group",
    purpose="finding this rank's part of a gradient under zero-1 and zero-2",
    seen=_DEEPSPEED,
    on_instances=True,
)
_STAGE_3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3."
GATHER_STATE = Private(
    place=f"{_STAGE_3}_fp32_state_allgather", purpose="saving states that lie on a disk", seen=_DEEPSPEED
)
DIVIDE_AGAIN = Private(
    place=f"{_STAGE_3}_partition_all_parameters", purpose="loading weights under zero-3", seen=_DEEPSPEED
)
SPREAD_GROUP = Private(
    place=f"{_STAGE_3}_reassign_or_swap_out_partitioned_parameters",
    purpose="loading weights under zero-3",
    seen=_DEEPSPEED,
)
IS_ON_DISK = Private(
    place=f"{_STAGE_3}_swappable_optimizer_subgroup", purpose="finding states that lie on a disk", seen=_DEEPSPEED
)
SWAP_IN = Private(
    place=f"{_STAGE_3}_optimizer_states_and_gradient_swap_in",
    purpose="reading states that lie on a disk",
    seen=_DEEPSPEED,
)
SWAP_OUT = Private(
    place=f"{_STAGE_3}_optimizer_states_and_gradient_swap_out",
    purpose="writing states that lie on a disk",
    seen=_DEEPSPEED,
)
RELEASE = Private(
    place=f"{_STAGE_3}_release_swap_buffers", purpose="letting go of states that lie on a disk", seen=_DEEPSPEED
)

ROWS = tuple(each for each in list(globals().values()) if isinstance(each, Private))
"""All of them."""
