"""DeepSpeed's ZeRO as an engine of our loop: optimizer states in parts (1), gradients too (2), and weights too (3).

DeepSpeed divides, exchanges and updates; everything else is as with other strategies: which micro-batches, what they
are divided by, the learning rate, when a step is skipped, what is saved. So a run goes on under any of them.

- The loss is already divided by the tokens of the whole step, and DeepSpeed averages: it is multiplied by the ranks.
- 2 and 3 exchange in every micro-batch, so ranks with less work send an empty one; 1 exchanges after the last one.
- Weights that compute in bf16 lie in bf16, and fp32 ones of each rank's part beside them: these are what is saved.
- Gradients are clipped by DeepSpeed, by the same arithmetic as ours. A step that is skipped is skipped by DeepSpeed,
  too: it is told of an infinite gradient, which is its own reason to skip one.
- The update is torch's AdamW, on the CPU where the states lie there: nothing has to be compiled.
"""

from __future__ import annotations

import logging
import os
import shutil
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gangline.errors import UsageError
from gangline.runs.job import Job
from gangline.units import format_bytes
from gangline.worker import compat
from gangline.worker.adapters import adapted_layers
from gangline.worker.batch import Batch
from gangline.worker.loss import CausalLoss
from gangline.worker.memory_watch import return_freed
from gangline.worker.model import base_of, trainable
from gangline.worker.optimizer import adamw, empty_state
from gangline.worker.precision import Precision
from gangline.worker.process_group import ProcessGroup
from gangline.worker.strategy import Strategy, StrategySetup
from gangline.worker.weights import FlatShard, is_placeholder, use_placeholders

# A DeepSpeed engine over our process group, on our device, with our numbers; nothing of it is read from elsewhere.
#
# The optimizer's states may lie on a disk of the host: its operator and the room are checked before a model is
# loaded.


BUCKET_NUMBERS = {1: 500_000_000, 2: 500_000_000, 3: 50_000_000}
"""Gradients that are exchanged at once, at the most, by stage: DeepSpeed's own choice, but where layers are cut."""


def load_deepspeed(device: torch.device) -> Any:
    """The package, told which device it is on. Raises UsageError where it is not installed."""
    os.environ["DS_ACCELERATOR"] = device.type
    os.environ["LOCAL_RANK"] = str(device.index or 0)  # it takes that for the number of its device
    try:
        import deepspeed
    except ImportError as error:
        raise UsageError(
            "strategy: zero-1, zero-2 and zero-3 are done by DeepSpeed, which is not installed",
            seen=f"{type(error).__name__}: {error}",
            fix="pip install 'gangline[deepspeed]' into the environment of every host, or write strategy: fsdp",
        ) from error
    # it calls collectives by names that torch 2.13 has others for, several times a step
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    # it would build an operator for CPUs of one host, for a minute; gloo does the same
    compat.OPERATORS.put(deepspeed.ops, defaultdict(bool))  # 0.19.0 asks for a row, later ones whether there is one
    logger = logging.getLogger("DeepSpeed")  # into this rank's log, not on its screen
    logger.handlers.clear()
    logger.propagate = True
    # our group, which has our time limits, and no second one
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False, dist_init_required=False)
    compat.WORLD_GROUP.put(deepspeed.utils.groups, dist.group.WORLD)
    return deepspeed


def takes_parts(job: Job, world: ProcessGroup) -> bool:
    """Whether ranks can read the parts of weights that they keep, and need no whole ones: not where these are packed
    as they are cut, or cut twice.
    """
    asked = job.strategy.deepspeed.get("zero_optimization", {})
    packed = any(asked.get(key) for key in ("zero_quantized_weights", "zero_quantized_nontrainable_weights"))
    return stage_of(world) == 3 and not packed and asked.get("zero_hpz_partition_size", 1) == 1


def divide(deepspeed: Any, loss: nn.Module, config: dict[str, Any], world: ProcessGroup) -> None:
    """Cut every weight into as many parts as there are ranks, one after another: no device has to hold all of them.

    Of one that takes no memory yet only the part will: what is in it is read later.
    """

    def divide_all(init: Any, param_list: Iterable[nn.Parameter]) -> None:
        for parameter in param_list:
            dtype = torch.bfloat16 if config["bf16"]["enabled"] else parameter.dtype
            if is_placeholder(parameter):  # nothing is written, so on the CPU it takes no memory now, either
                parameter.data = torch.empty(parameter.shape, dtype=dtype, device=init.local_device)
            else:
                parameter.data = parameter.data.to(init.local_device, dtype)
            divide_one(init, parameter)

    def divide_one(init: Any, parameter: nn.Parameter) -> None:
        # without its exchange: weights are equal already, as for `start`
        compat.MAKE_DIVISIBLE.of(init)(parameter)
        parameter.partition()  # type: ignore[attr-defined]

    one_by_one = compat.overriding(deepspeed.zero.Init, {compat.DIVIDE_ALL: divide_all, compat.DIVIDE_ONE: divide_one})
    one_by_one(module=loss, config_dict_or_path=config, mem_efficient_linear=False)
    for buffer in loss.buffers():
        buffer.data = buffer.data.to(world.device)


def gather_with_table(deepspeed: Any, loss: CausalLoss) -> None:
    """Have the adapter of an embedding table put together for it: it is no module, whose own weights would be."""
    for _, layer in adapted_layers(loss.model):
        for factors in (layer.lora_embedding_A, layer.lora_embedding_B):
            for factor in factors.values():
                deepspeed.zero.register_external_parameter(layer, factor)


def start(deepspeed: Any, loss: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any]) -> Any:
    """The engine; collective."""
    # weights are equal already (`agree_weights`); sending frozen ones would cost minutes on a slow link
    with compat.BROADCAST.replaced(deepspeed.runtime.engine.DeepSpeedEngine, lambda _engine: None):
        engine, *_ = deepspeed.initialize(model=loss, optimizer=optimizer, config=config, dist_init_required=False)
    return engine


def configuration(job: Job, precision: Precision, world: ProcessGroup, loss: CausalLoss) -> dict[str, Any]:
    """What DeepSpeed is told: what the job says of it, and over that what is gangline's."""
    asked = job.strategy.deepspeed
    return {
        "steps_per_print": None,
        **asked,
        "zero_optimization": _zero(job, world, loss),
        # ranks do unequally many micro-batches, and it is told which one is the last
        "train_micro_batch_size_per_gpu": job.micro_batch,
        "gradient_accumulation_steps": 1,
        "train_batch_size": job.micro_batch * world.size,
        "gradient_clipping": job.optimizer.clip_norm or 0.0,
        "bf16": {"enabled": precision.mixed, "check_grad_overflow": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": job.exchange,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def _zero(job: Job, world: ProcessGroup, loss: CausalLoss) -> dict[str, Any]:
    stage = stage_of(world)
    asked = dict(job.strategy.deepspeed.get("zero_optimization", {}))
    hidden = base_of(loss.model).config.get_text_config().hidden_size  # type: ignore[union-attr, operator]
    # as transformers fills them in
    filled = {
        "reduce_bucket_size": hidden * hidden,
        "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
        "stage3_param_persistence_threshold": 10 * hidden,
    }
    asked |= {key: filled[key] for key, value in asked.items() if value == "auto"}
    numbers = sum(parameter.numel() for parameter in trainable(loss.model).values())
    found = {"reduce_bucket_size": min(BUCKET_NUMBERS[stage], numbers), **asked, "stage": stage}
    found["memory_efficient_linear"] = False  # it would replace torch's for the whole process
    pinned = world.device.type == "cuda"
    for key, what in (("offload_optimizer", "optimizer"), ("offload_param", "parameters")):
        if what in job.strategy.offload:
            found[key] = {"pin_memory": pinned, **found.get(key, {}), "device": "cpu"}
    if disk := on_disk(job, world):
        found["offload_optimizer"] |= disk
        found.setdefault("sub_group_size", GROUP_NUMBERS)
    return found


def stage_of(world: ProcessGroup) -> int:
    """1, 2 or 3."""
    return int(world.gang.strategy.removeprefix("zero-"))


def require_valid(deepspeed: Any, config: dict[str, Any], job: Job) -> None:
    """Raise UsageError where DeepSpeed does not understand what it is told."""
    try:
        deepspeed.DeepSpeedConfig(config)
    except (ValueError, TypeError, AssertionError, KeyError) as error:
        raise UsageError(
            "strategy.deepspeed: DeepSpeed does not take its keys",
            seen=f"{type(error).__name__}: {str(error)[:500]}; passed on were {', '.join(_names(job))}",
            fix="put them right in the file, or delete them",
        ) from error


def _names(job: Job) -> list[str]:
    asked = job.strategy.deepspeed
    inside = [f"zero_optimization.{key}" for key in asked.get("zero_optimization", {})]
    return [*(key for key in asked if key != "zero_optimization"), *inside] or ["none"]


GROUP_NUMBERS = 100_000_000
"""Of what comes from the disk at once: four times as many numbers of fp32 are in memory."""
NUMBER_BYTES = 16
"""On the disk, of each number: fp32 weight, gradient, two moments."""


def on_disk(job: Job, world: ProcessGroup) -> dict[str, Any]:
    """What DeepSpeed is told of the disk; {} where there is none in the job."""
    folder = job.strategy.offload_to
    return {} if folder is None else {"device": "nvme", "nvme_path": str(_folder(folder, world))}


def require_operator(deepspeed: Any, job: Job) -> None:
    """Raise UsageError where states are to lie on a disk, and DeepSpeed's operator for it cannot be built or loaded."""
    if job.strategy.offload_to is None:
        return
    builder = deepspeed.ops.op_builder.AsyncIOBuilder()
    seen = "it does not fit this host: libaio and its headers are not found"
    try:
        if builder.is_compatible(verbose=False):
            builder.load(verbose=False)  # builds it where that was not done yet, for some minutes
            return
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        seen = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}"
    raise UsageError(
        "strategy.offload_to: DeepSpeed's operator async_io cannot be loaded",
        seen=seen,
        fix="install libaio-dev (libaio-devel), g++ and ninja on every host; or delete offload_to: states in memory",
    )


def require_room(job: Job, world: ProcessGroup, *, num_trained: int) -> None:
    """Raise UsageError where the folder is not there or cannot be written to, or the disk has no room; collective.

    What an attempt before this one has left there is deleted first.
    """
    if job.strategy.offload_to is None:
        return
    path = Path(job.strategy.offload_to)
    if not path.is_dir() or not os.access(path, os.W_OK):
        raise UsageError(
            "strategy.offload_to: nothing can be written there",
            seen=f"{path} on {world.host} is {'not writable' if path.exists() else 'not there'}",
            fix="make the folder on every host for the user of the run, or delete offload_to",
        )
    ours = _folder(job.strategy.offload_to, world)
    if world.is_first_of_host:
        shutil.rmtree(ours, ignore_errors=True)
    dist.barrier()
    ours.mkdir(parents=True, exist_ok=True)
    needed = NUMBER_BYTES * -(-num_trained // world.size) * world.gang.num_ranks(world.host)
    free = shutil.disk_usage(path).free
    if free < needed:
        raise UsageError(
            "strategy.offload_to: the disk has no room for the optimizer's states",
            seen=f"{format_bytes(free)} in {path} on {world.host}; expected {format_bytes(needed)} for its ranks",
            fix="name a folder on a larger disk, add hosts, or delete offload_to",
        )


def clear(job: Job, world: ProcessGroup) -> None:
    """Delete this rank's files at the end of a run, and the folders of it that are empty then."""
    if job.strategy.offload_to is None:
        return
    place = _folder(job.strategy.offload_to, world) / "zero_stage_3" / "optimizer" / f"rank{world.rank}"
    shutil.rmtree(place, ignore_errors=True)
    with suppress(OSError):  # other ranks have theirs there
        for parent in place.parents[:4]:
            parent.rmdir()


def _folder(folder: str, world: ProcessGroup) -> Path:
    """Of this run and host: several hosts may have one disk."""
    return Path(folder) / f"gangline-{world.gang.run_id}" / world.host


MOMENTS = ("exp_avg", "exp_avg_sq")
_NOTHING = torch.zeros(())
ROW = 4096
"""Numbers of a flat gradient whose squares are summed in fp32; rows are added in fp64."""


class Zero(Strategy):
    """One rank of a DeepSpeed engine. `optimizer` is what moves its weights."""

    layout = "sharded"
    replicated = False
    clips = True
    joins_by_empty_batch = True

    def __init__(self, setup: StrategySetup) -> None:
        """Raises UsageError where DeepSpeed, or its operator for disks, is not installed."""
        super().__init__(setup)
        self._deepspeed = load_deepspeed(setup.world.device)
        require_operator(self._deepspeed, setup.job)
        self.stage = stage_of(setup.world)
        self.lockstep = self.stage > 1
        self.shard_group = dist.group.WORLD
        self._trained: dict[str, nn.Parameter] = {}
        self.optimizer: ZeroOptimizer

    @property
    def meta_init(self) -> bool:
        """Under 3 ranks read the parts of weights that they keep, unless DeepSpeed packs these, or cuts them twice."""
        return takes_parts(self.job, self.world)

    def wrap(self, loss: CausalLoss) -> None:
        """Start the engine. Raises UsageError where a disk has no room, or DeepSpeed refuses its keys."""
        super().wrap(loss)
        job, world, precision, deepspeed = self.job, self.world, self.precision, self._deepspeed
        use_placeholders(loss)
        self._trained = trainable(loss.model)
        require_room(job, world, num_trained=sum(each.numel() for each in self._trained.values()))
        self._shapes = {name: parameter.shape for name, parameter in self._trained.items()}
        there = {name: parameter.data for name, parameter in self._trained.items() if not is_placeholder(parameter)}
        first = there if precision.mixed else {}
        inner = adamw(list(self._trained.values()), job.optimizer)
        config = configuration(job, precision, world, loss)
        require_valid(deepspeed, config, job)
        if self.stage == 3:
            divide(deepspeed, loss, config, world)
            gather_with_table(deepspeed, loss)
        self.engine = start(deepspeed, loss, inner, config)
        return_freed()  # parts have been moved into rows of them
        self._parts = Parts(deepspeed, self.engine, stage=self.stage, rank=world.rank)
        self.optimizer = ZeroOptimizer(self.engine, self._parts, next(iter(self._trained.values())))
        for name, weight in first.items():  # bf16 has rounded what the fp32 weights begin with
            self._parts.put(self._trained[name], "", weight.float())
        self._parts.spread()

    def read_targets(self) -> dict[str, FlatShard]:
        """This rank's part of every weight, under 3."""
        return {name: self._parts.flat_shard(each) for name, each in self.loss.model.named_parameters()}

    def loaded(self) -> None:
        """What is computed with follows from what has been read."""
        self._parts.spread()

    def make_optimizer(self) -> torch.optim.Optimizer:
        """DeepSpeed's, which has the weights, too."""
        return self.optimizer  # type: ignore[return-value]

    def forward_backward(self, batch: Batch, *, scale: float, last: bool) -> torch.Tensor:
        """Add one micro-batch; under 2 and 3 as every other rank does now, and `last` is the last of all of them."""
        self.engine.set_gradient_accumulation_boundary(last)
        with self.precision.autocast(self.world.device):
            loss: torch.Tensor = self.engine(*batch.tensors)
        self.engine.backward(loss * (scale * self.world.size), scale_wrt_gas=False)
        self.optimizer.holds_gradients = True
        return loss.detach()

    def gradients(self, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
        """This rank's part of each, in rows as `norm_of` sums them; it may be padded with zeros."""
        found: list[torch.Tensor] = []
        for parameter in parameters:
            flat = self._parts.gradient(parameter)
            if flat is not None:
                whole = len(flat) // ROW * ROW
                found += [flat[:whole].view(-1, ROW), flat[whole:]]
        return found

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Names, shapes and formats of what is saved; `full_state` and `state_loader` know where the numbers lie."""
        found: dict[str, torch.Tensor] = {}
        for name, shape in self._shapes.items():
            found[f"model.{name}"] = torch.empty(shape, device="meta")
            found[f"optimizer.{name}.step"] = torch.empty((), device="meta")
            for key in MOMENTS:
                found[f"optimizer.{name}.{key}"] = torch.empty(shape, device="meta")
        return found

    def full_state(self, tensors: Mapping[str, torch.Tensor], *, wanted: bool) -> dict[str, torch.Tensor]:
        """Put together what is in parts, tensor by tensor, in this machine's memory; collective."""
        found = {}
        for name in tensors:
            parameter, key = self._place(name)
            value = torch.tensor(self.optimizer.step_count) if key == "step" else self._parts.get(parameter, key)
            if wanted:
                found[name] = value.cpu()
        self._parts.put_back()
        return found

    def state_loader(self) -> Callable[[Mapping[str, torch.Tensor]], None]:
        """Takes this rank's part of whole tensors, by the names of `state_tensors`."""
        return self._fill

    def finish(self) -> None:
        """Delete what lies on a disk."""
        clear(self.job, self.world)

    def _fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            parameter, key = self._place(name)
            if key == "step":
                self.optimizer.step_count = float(tensor)
            else:
                self._parts.put(parameter, key, tensor)

    def _place(self, name: str) -> tuple[nn.Parameter, str]:
        kind, _, rest = name.partition(".")
        if kind == "model":
            return self._trained[rest], ""
        rest, _, key = rest.rpartition(".")
        return self._trained[rest], key


class Parts:
    """Where each rank's part of weights, moments and gradients lies inside DeepSpeed's optimizer."""

    def __init__(self, deepspeed: Any, engine: Any, *, stage: int, rank: int) -> None:
        self._api = deepspeed.utils
        self._optimizer = engine.optimizer
        self._device = engine.device
        self._stage = stage
        self._rank = rank
        self._there: int | None = None
        self._changed = False
        for number, part in enumerate(self.flat):
            self._bring(number, changes=True)
            self._optimizer.optimizer.state[part] = empty_state(part)
        self.put_back()
        if stage < 3:
            compat.LINK_STATES.of(self._optimizer)()

    @property
    def flat(self) -> list[torch.Tensor]:
        """This rank's weights in fp32, as the update sees them: one row of numbers per group of parameters, or more."""
        names = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
        found: list[torch.Tensor] = next(
            getattr(self._optimizer, name) for name in names if hasattr(self._optimizer, name)
        )
        return found

    def states(self) -> list[dict[str, torch.Tensor]]:
        """Of the update, by part."""
        return [self._optimizer.optimizer.state[part] for part in self.flat]

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """This rank's part, or of one on a disk its norm; None where it has none."""
        if self._on_disk(self._group(parameter)):  # no group of them has to come for it
            norms, place = self._optimizer.norm_for_param_grads, self._optimizer.get_param_id(parameter)
            norm: torch.Tensor = norms.get(place, _NOTHING)
            return norm.reshape(1).to(self._device)
        if self._stage == 3:
            return self._api.safe_get_local_grad(parameter)
        mapping = compat.FRAGMENT.of(parameter)
        if mapping is None:
            return None
        found = mapping.get_lp_grad_fragment(compat.FRAGMENT_INDEX.of(parameter)).reshape(-1)
        place = mapping.lp_fragment_address
        return found if len(found) == place.numel else found.narrow(0, place.start, place.numel)

    def poison(self, parameter: nn.Parameter) -> None:
        """Make a gradient infinite: DeepSpeed skips such a step, on all ranks."""
        if self._on_disk(self._group(parameter)):
            infinite = torch.tensor(torch.inf, device=self._device)
            self._optimizer.norm_for_param_grads[self._optimizer.get_param_id(parameter)] = infinite
            return
        if self._stage == 3:
            # where norms are summed, which is not where the part of an offloaded weight lies
            infinite = torch.full_like(parameter.ds_tensor, torch.inf, device=self._device)
            self._api.safe_set_local_grad(parameter, infinite)
            return
        if hasattr(self._optimizer, "fp32_groups_gradients"):
            # stage 1 in bf16: every rank has the whole gradient and takes its norm alone, so each has to see it; what
            # safe_set_full_grad sets is the part of this rank, which of one parameter most ranks have none of
            for group in self._optimizer.fp32_groups_gradients:
                for gradient in group:
                    gradient.fill_(torch.inf)
            return
        self._api.safe_set_full_grad(parameter, torch.full(parameter.shape, torch.inf, device=parameter.device))
        if getattr(self._optimizer, "cpu_offload", False):  # the norm of this one was taken before
            self._optimizer.norm_for_param_grads[self._optimizer.get_param_id(parameter)] = torch.tensor(torch.inf)

    def get(self, parameter: nn.Parameter, key: str) -> torch.Tensor:
        """A weight ("") or a moment of it, whole; collective. What lies on a disk stays in memory until `put_back`."""
        if self._on_disk(self._group(parameter)):
            gather = compat.GATHER_STATE.of(self._optimizer)
            return gather(parameter, self._from_disk(parameter, key, changes=False))
        if not key:
            return self._api.safe_get_full_fp32_param(parameter)
        return self._api.safe_get_full_optimizer_state(parameter, key)

    def put(self, parameter: nn.Parameter, key: str, value: torch.Tensor) -> None:
        """Take this rank's part of one that is whole."""
        if self._stage < 3:
            value = value.to(parameter.device)
            put = self._api.safe_set_full_optimizer_state if key else self._api.safe_set_full_fp32_param
            put(parameter, value, *([key] if key else []))
            return
        size = parameter.ds_tensor.numel()
        self._put_part(parameter, key, value.reshape(-1)[self._rank * size : (self._rank + 1) * size])

    def flat_shard(self, parameter: nn.Parameter) -> FlatShard:
        """Which numbers of a weight are this rank's, under 3, and what takes them."""
        kept: torch.Tensor = parameter.ds_tensor
        start = self._rank * kept.numel()
        size = max(0, min(kept.numel(), parameter.ds_numel - start))

        def put(mine: torch.Tensor) -> None:
            if parameter.requires_grad:
                self._put_part(parameter, "", mine)
            else:
                kept[:size].copy_(mine)

        return FlatShard(parameter.ds_shape, start, size, put)

    def _put_part(self, parameter: nn.Parameter, key: str, mine: torch.Tensor) -> None:
        part = torch.zeros(parameter.ds_tensor.numel(), dtype=torch.float32)  # padded at the end
        part[: len(mine)] = mine
        if self._on_disk(self._group(parameter)):
            self._from_disk(parameter, key, changes=True).copy_(part)
            return
        put = self._api.safe_set_local_optimizer_state if key else self._api.safe_set_local_fp32_param
        put(parameter, part, *([key] if key else []))

    def spread(self) -> None:
        """Let the weights that are computed with follow from those in fp32; collective."""
        if self._stage < 3:
            self._optimizer.update_lp_params()
            return
        compat.DIVIDE_AGAIN.of(self._optimizer)()
        for number in range(len(self.flat)):
            self._bring(number, changes=False)
            compat.SPREAD_GROUP.of(self._optimizer)(number)
        self.put_back()
        if kept := self._optimizer.persistent_parameters:
            kept[0].all_gather(kept)

    def put_back(self) -> None:
        """Let what has come from a disk go back there, if it was changed."""
        if self._there is None:
            return
        if self._changed:
            compat.SWAP_OUT.of(self._optimizer)(self._there)
        else:
            compat.RELEASE.of(self._optimizer)(self._there)
        self._there, self._changed = None, False

    def _group(self, parameter: nn.Parameter) -> int:
        """Of those that are updated one after another."""
        if self._stage < 3:
            return 0
        found: int = self._optimizer.grad_position[self._optimizer.get_param_id(parameter)][0]
        return found

    def _on_disk(self, number: int) -> bool:
        """Groups of less than a megabyte stay in memory."""
        return self._stage == 3 and bool(compat.IS_ON_DISK.of(self._optimizer)(number))

    def _bring(self, number: int, *, changes: bool) -> None:
        """Have a group of those on a disk in memory, and no other."""
        if not self._on_disk(number):
            return
        if self._there != number:
            self.put_back()
            compat.SWAP_IN.of(self._optimizer)(number)
            self._there = number
        self._changed = self._changed or changes

    def _from_disk(self, parameter: nn.Parameter, key: str, *, changes: bool) -> torch.Tensor:
        """This rank's part of a weight or a moment, where it lies in memory for now."""
        number, start, size = self._optimizer.grad_position[self._optimizer.get_param_id(parameter)]
        self._bring(number, changes=changes)
        part = self.flat[number]
        row = self._optimizer.optimizer.state[part][key] if key else part
        found: torch.Tensor = row.detach().narrow(0, start, size)
        return found


class ZeroOptimizer:
    """What the loop calls its optimizer: DeepSpeed's step, or none."""

    def __init__(self, engine: Any, parts: Parts, any_parameter: nn.Parameter) -> None:
        self._engine = engine
        self._parts = parts
        self._any = any_parameter
        self.state: dict[nn.Parameter, dict[str, torch.Tensor]] = defaultdict(dict)
        """Empty: `Zero.state_tensors` tells of it."""
        self.holds_gradients = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of AdamW."""
        groups: list[dict[str, Any]] = self._engine.optimizer.param_groups
        return groups

    @property
    def step_count(self) -> float:
        """Updates so far."""
        return float(self._parts.states()[0]["step"])

    @step_count.setter
    def step_count(self, count: float) -> None:
        """As a checkpoint says."""
        for state in self._parts.states():
            state["step"].fill_(count)

    def step(self) -> None:
        """Clip, update, and exchange the weights; collective."""
        self._engine.step()
        self.holds_gradients = False

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """Let go of gradients that no update has taken; collective then."""
        if self.holds_gradients:
            self._parts.poison(self._any)
            self.step()
