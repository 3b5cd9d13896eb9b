"""The plan half of a strategy: what it can do, as data, and what it costs. Pure; importable without torch.

A strategy is a folder with two halves. `plan.py` has a subclass of `PlanHalf`, `train.py` one of
`worker.strategy.Strategy`. `strategies/table.py` finds both by the kind that a job names. Whatever decides before a
start asks the plan half, and knows no kind by name:

    spec        capabilities, keys            which jobs it trains
    planning    candidates, share, traffic, total_s, ...     memory, traffic and time of each way to run a job
    runs        layers, parts, groups         who holds and does what in a gang
    screens     meaning, title, reason        its words

The base is the plan half of one rank, or of ranks that exchange nothing: every rank holds the whole model. A plug-in
overrides what it does differently, and has `kind`, `train` and `meaning` at least.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from gangline.optimizers import EIGHT_BITS, OPTIMIZERS, WHOLE

if TYPE_CHECKING:
    from gangline.planner.architecture import Architecture
    from gangline.planner.candidate import Scenario
    from gangline.planner.memory import Instant, Step
    from gangline.planner.speed import ComputeModel, StepQuery
    from gangline.planner.states import Share, Term
    from gangline.planner.traffic import Exchange, TrafficQuery
    from gangline.planner.training import PlannedStrategy, Training
    from gangline.runs.job import MethodJob, StrategyJob

AUTO = "auto"
"""`strategy.kind` of a job that leaves the choice to the plan."""
METHODS = ("full", "lora", "qlora")
ADAPTERS = ("lora", "qlora")
PRECISIONS = ("bf16", "fp16", "fp32", "fp64")
FULL = (("method.kind", ("full",)),)
"""A condition of `Limit`: every weight is trained."""
METHOD_EXTRAS = (
    *("method.dora", "method.modules_to_save", "method.train_tokens", "method.target_parameters", "method.init"),
    "method.quantise_experts",
)
EXTRAS = (*METHOD_EXTRAS, "compile")
"""Keys of a job that a strategy may limit by whether they ask for anything: `Asked.extras`."""
VALUES: Mapping[str, tuple[Any, ...]] = {
    "method.kind": METHODS,
    "precision.compute": PRECISIONS,
    "precision.parameters": ("fp32", "compute"),
    "optimizer.kind": tuple(OPTIMIZERS),
    "exchange": ("fp32", "bf16"),
    "activation_offloading": (False, True),
    **dict.fromkeys(EXTRAS, (False, True)),
}
"""Keys of a job that a strategy may limit, with all values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Values of a key of the job that a strategy does not train."""

    key: str
    """Of `VALUES`."""
    refused: tuple[Any, ...]
    why: str
    """The reason, as the end of "expected ...: why"."""
    fix: str
    """What to write instead."""
    when: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    """It holds only where each of these keys has one of these values."""

    @property
    def allowed(self) -> tuple[Any, ...]:
        """The other values of the key."""
        return tuple(value for value in VALUES[self.key] if value not in self.refused)


NO_FP16 = Limit(
    key="precision.compute",
    refused=("fp16",),
    why="gradients in parts have no loss scale, without which fp16 loses small ones",
    fix="write `precision: bf16` or `precision: fp32`, or `strategy: ddp` if a device holds the model",
)
NO_EIGHT_BITS = Limit(
    key="optimizer.kind",
    refused=EIGHT_BITS,
    why="a block of 256 numbers with one scale would lie on two ranks",
    fix="write `kind: adamw`, or `strategy: ddp`",
)
NO_WHOLE_MATRICES = Limit(
    key="optimizer.kind",
    refused=WHOLE,
    why="it computes with whole matrices, of which every rank would have a part",
    fix="write `kind: adamw`, `kind: lion` or `kind: sgd`, or `strategy: ddp` or `strategy: pipeline`",
)
ADAMW_ONLY = Limit(
    key="optimizer.kind",
    refused=tuple(kind for kind in OPTIMIZERS if kind != "adamw"),
    why="",  # each strategy has its own
    fix="write `kind: adamw`, or `strategy: ddp`",
)
NO_ACTIVATION_OFFLOADING = Limit(
    key="activation_offloading",
    refused=(True,),
    why="only inputs of layers that a rank computes whole and one after the other are moved",
    fix="delete it, or write `strategy: fsdp`",
)
NO_QUANTISED_EXPERTS = Limit(
    key="method.quantise_experts",
    refused=(True,),
    why="experts of few bits are unpacked where a rank has all of them",
    fix="write `strategy: ddp`, or delete quantise_experts and write `kind: lora`",
)
NO_COMPILE = Limit(
    key="compile",
    refused=(True,),
    why="layers are compiled where a rank computes each of them whole, by a plain call",
    fix="delete it, or write `strategy: ddp` or `strategy: fsdp`",
)
EVERY: tuple[Limit, ...] = (
    Limit(
        key="optimizer.kind",
        refused=EIGHT_BITS,
        when=(("precision.compute", ("fp64",)),),
        why="moments of 8 bits make fp64 products pointless",
        fix="write `kind: adamw`, or `precision: fp32`",
    ),
    Limit(
        key="method.dora",
        refused=(True,),
        when=(("method.kind", ("qlora",)),),
        why="the lengths of rows of a quantised weight would be computed anew in every pass, from numbers of few bits",
        fix="write `kind: lora`, or delete dora",
    ),
    Limit(
        key="method.init",
        refused=(True,),
        when=(("method.kind", ("qlora",)),),
        why="pissa and olora split weights that are whole",
        fix="write `kind: lora`, or `init: default`",
    ),
    Limit(
        key="method.init",
        refused=(True,),
        when=(("method.dora", (True,)),),
        why="dora trains the lengths of rows, which pissa and olora change",
        fix="write `init: default`, or delete dora",
    ),
    Limit(
        key="method.target_parameters",
        refused=(True,),
        when=(("method.kind", ("qlora",)), ("method.quantise_experts", (False,))),
        why="weights that are no linear's are not quantised without quantise_experts",
        fix="add `quantise_experts: true`, write `kind: lora`, or delete target_parameters",
    ),
)
"""Limits of every strategy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a strategy can do. docs/strategies.md is made of it, and every refusal before a start."""

    limits: tuple[Limit, ...] = ()
    keys: tuple[str, ...] = ()
    """Keys of the section `strategy` that are for it, besides `kind`."""
    offload: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = ()
    """What can lie in the machine's memory, not on the card: (methods, parts that go together)."""
    min_ranks: int = 2
    """With fewer ranks there is nothing to divide."""
    min_ranks_on_host: int = 1
    """With fewer on each host it would be another strategy."""
    equal_hosts: bool = False
    """Whether every host needs equally many ranks."""
    own_gpu: bool = True
    """Whether every rank needs a GPU of its own, where there are any: ranks that share one have gloo, which does not do
    all collectives."""
    asked_only: str = "it is a plug-in's"
    """Why the plan takes it only where the job asks for it; "" where `strategy: auto` may take it."""
    yields_to: tuple[str, ...] = ()
    """Kinds that `strategy: auto` takes instead wherever one of them fits."""
    exact: bool = True
    """Whether it computes what one big machine would."""
    package: str = ""
    """The package, besides torch, that does it."""
    weights_by_module: bool = False
    """Whether a weight is there only while the module that it belongs to runs, so that no kernel can take it along."""

    def supports(self, key: str, *, value: Any, given: Mapping[str, Any]) -> bool:
        """Whether it trains that value of a key, beside the given values of other keys."""
        return not any(
            limit.key == key and value in limit.refused and _holds(limit, {**given, key: value})
            for limit in (*EVERY, *self.limits)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The part of a job that a strategy may limit. What is not known is left out, and breaks no limit."""

    method: str
    precision: str = AUTO
    parameters: Literal["fp32", "compute"] = "fp32"
    """compute: trained weights are not in fp32, but in the other format of the computation."""
    optimizer: str = "adamw"
    exchange: str = "fp32"
    activation_offloading: bool = False
    offload: tuple[str, ...] = ()
    replicas: int | None = None
    extras: tuple[str, ...] = ()
    """Those of `EXTRAS` that the job asks for."""

    def values(self) -> dict[str, Any]:
        """By key of the job."""
        return {
            "method.kind": self.method,
            "precision.compute": self.precision,
            "precision.parameters": self.parameters,
            "optimizer.kind": self.optimizer,
            "exchange": self.exchange,
            "activation_offloading": self.activation_offloading,
            "strategy.replicas": self.replicas,
            **{key: key in self.extras for key in EXTRAS},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """The ranks that a job is to run on, as far as a strategy may limit them."""

    ranks: Mapping[str, int]
    """Host -> how many."""
    sharing: tuple[str, ...] = ()
    """Hosts with more ranks than GPUs."""

    @property
    def num_ranks(self) -> int:
        """On all hosts."""
        return sum(self.ranks.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One thing that a strategy does not do."""

    key: str
    """The key of the job that asks for it."""
    what: str
    """In a few words, such as "tp with precision: fp16"."""
    seen: str
    expected: str
    fix: str
    reads: tuple[str, ...] = ()
    """Other keys that it depends on."""


def violations(half: PlanHalf | None, asked: Asked, machines: Machines | None = None) -> tuple[Violation, ...]:
    """Everything in a job that the strategy does not train, and everything of the machines that it cannot use.

    half: None for `strategy: auto`, where only the limits of every strategy count.
    """
    found = _of_job(half, asked)
    if half is None or machines is None:
        return found
    return (*found, *half.machine_violations(asked, machines))


@functools.lru_cache(maxsize=4096)
def _of_job(half: PlanHalf | None, asked: Asked) -> tuple[Violation, ...]:
    values = asked.values()
    limits = (*EVERY, *(half.capabilities.limits if half is not None else ()))
    broken = [limit for limit in limits if values[limit.key] in limit.refused and _holds(limit, values)]
    found = [_violation(half, limit, values) for limit in broken]
    if half is not None and asked.offload and (wrong := _offloads(half, asked)) is not None:
        found.append(wrong)
    return tuple(found)


def _holds(limit: Limit, values: Mapping[str, Any]) -> bool:
    return all(values.get(key) in accepted for key, accepted in limit.when)


def _violation(half: PlanHalf | None, limit: Limit, values: Mapping[str, Any]) -> Violation:
    own = _written(limit.key, values)
    kinds = [] if half is None or limit in EVERY else [f"strategy: {half.kind}"]
    conditions = [_written(key, values) for key, _ in limit.when]
    beside = " and ".join([*kinds, *conditions])
    name = own if half is None or limit in EVERY else f"{half.kind} with {own}"
    return Violation(
        key=limit.key,
        what=" and ".join([name, *conditions]),
        seen=f"{own} with {beside}",
        expected=f"{'none' if limit.key in EXTRAS else listed(_trained(half, limit, values))}: {limit.why}",
        fix=limit.fix,
        reads=(*(("strategy.kind",) if kinds else ()), *(key for key, _ in limit.when)),
    )


def _trained(half: PlanHalf | None, limit: Limit, values: Mapping[str, Any]) -> Sequence[Any]:
    """The other values of the key, without those that another limit refuses."""
    own = Capabilities() if half is None else half.capabilities
    return [each for each in limit.allowed if own.supports(limit.key, value=each, given=values)]


def _written(key: str, values: Mapping[str, Any]) -> str:
    """In the short form of the job file: precision: fp16; of what is asked for or not the key alone."""
    if key in EXTRAS:
        return f"{key}: pissa or olora" if key == "method.init" else key
    return f"{key.removesuffix('.kind').removesuffix('.compute')}: {shown(values[key])}"


def _offloads(half: PlanHalf, asked: Asked) -> Violation | None:
    ways = half.capabilities.offload
    if any(asked.method in methods and set(asked.offload) == set(parts) for methods, parts in ways):
        return None
    named = {parts: methods for methods, parts in ways if asked.method in methods}
    expected = listed([_parts(parts) for parts in named]) or "nothing"
    return Violation(
        key="strategy.offload",
        what=f"{half.kind} with strategy.offload: {_parts(asked.offload)}",
        seen=f"{_parts(asked.offload)} with strategy: {half.kind} and method: {asked.method}",
        expected=f"{expected}: these lie together on every device",
        fix=f"write `offload: {_parts(next(iter(named), ()))}`" if named else "delete offload",
        reads=("strategy.kind", "method.kind"),
    )


def _parts(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"[{', '.join(parts)}]"


def shown(value: Any) -> str:
    """A value as it is written in a job."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def listed(values: Sequence[Any]) -> str:
    """For instance: bf16, fp32 or fp64."""
    words = [shown(value) for value in values]
    return " or ".join([*([", ".join(words[:-1])] if len(words) > 1 else []), *words[-1:]])


class PlanHalf:
    """The plan half of a strategy. Traits are class attributes; the rest are pure functions of a way to run a job."""

    kind: str
    """`strategy: KIND` in a job."""
    train: str
    """The torch half: "module:Class" of a `worker.strategy.Strategy`."""
    meaning: str
    """How ranks share the work, in a line."""
    guide: str = ""
    """The same for somebody who chooses one: what it is for."""
    capabilities = Capabilities()
    runs_as: str = ""
    """The kind that the ranks get, where it is another one."""
    usual: bool = False
    """Whether a plan names it among those that it did not take, unasked."""

    # -- who holds and does what ----------------------------------------------------------------------------------

    layers: Literal["all", "sliced", "staged"] = "all"
    """What each rank computes: all layers whole; a part of every layer, together with the other ranks of its host; or
    some layers, in a pipeline of ranks."""
    parts: Literal["none", "states", "gradients", "weights"] = "none"
    """What lies in parts on ranks that compute all layers: nothing; the optimizer's states; also gradients; also
    weights."""
    sharded_by: Literal["", "fsdp2", "deepspeed"] = ""
    """The library that keeps these parts: memory depends on its ways."""
    shards_per_host: bool = False
    """Whether `Strategy.shard_size` is the ranks of a host, which hold one copy together."""
    lockstep: bool = False
    """Whether every rank takes part in the exchanges of every micro-batch: all wait for the slowest."""
    moves_shares: bool = True
    """Whether shares can follow the measured speeds while a run goes on."""
    rank_settings: Literal["", "recomputation", "all"] = ""
    """What every rank may have of its own: nothing; `activation_checkpointing`, of slices all ranks of a host the same;
    a micro-batch size as well. Where passes are exchanges, a rank with fewer of them joins the others by empty ones."""
    passes_state: bool = True
    """Whether a rank without a checkpoint can get the state from the others."""
    in_rounds: bool = False
    """Whether hosts train apart, and exchange what has changed every `inner_steps` steps."""
    narrows: bool = False
    """Whether a plan weighs sending gradients in bf16."""
    several: bool = False
    """Whether it can be several pipelines side by side (`strategy.replicas`)."""

    def machine_violations(self, asked: Asked, machines: Machines) -> Iterator[Violation]:
        """What of the machines it cannot use."""
        own = self.capabilities
        alone = max(machines.ranks.values()) < own.min_ranks_on_host  # it runs as another strategy
        if machines.sharing and own.own_gpu and not alone:
            yield Violation(
                key="strategy.kind",
                what=f"strategy: {self.kind} needs a GPU for every rank",
                seen=f"more ranks than GPUs on {', '.join(machines.sharing[:8])}; ranks that share one exchange only "
                "gradients",
                expected="one rank for each GPU",
                fix="set slots of every host to the number of its GPUs, or write strategy: ddp",
            )
        if own.equal_hosts and len(set(machines.ranks.values())) > 1:
            yield Violation(
                key="strategy.kind",
                what=f"strategy: {self.kind} needs equally many ranks on every host",
                seen=", ".join(f"{count} on {host}" for host, count in list(machines.ranks.items())[:8]),
                expected="the same number on every host",
                fix="set slots of every host to the same number, or write strategy: fsdp",
            )
        if asked.offload and machines.num_ranks == 1:
            yield Violation(
                key="strategy.offload",
                what="strategy.offload: one rank has no parts",
                seen=f"one rank, and strategy: {self.kind}, which moves the parts that several ranks have",
                expected="two ranks or more",
                fix="use two ranks or more; activation_offloading, method: qlora or a smaller micro_batch take less "
                "on one",
            )

    def model_violation(self, architecture: Architecture, strategy: PlannedStrategy) -> Violation | None:
        """Why it cannot train such a model; None where it can."""
        return None

    def layer_violation(self, num_layers: int | None, *, replicas: int | None, num_ranks: int) -> Violation | None:
        """Why so many ranks cannot have so many layers; None where they can. num_layers: None where not known."""
        return None

    # -- ways to run a job ----------------------------------------------------------------------------------------

    def candidates(self, scenario: Scenario) -> Iterator[PlannedStrategy]:
        """The ways to run a job that a plan weighs, on two ranks or more."""
        yield scenario.plain(self.kind)

    def more_candidates(self, scenario: Scenario) -> Iterator[PlannedStrategy]:
        """Further ways, weighed where this strategy would be taken, or nothing fits."""
        return iter(())

    def own_recomputation(
        self, plain: Scenario, again: Scenario, strategy: PlannedStrategy
    ) -> Iterator[tuple[PlannedStrategy, tuple[bool, ...]]]:
        """Ways like `strategy` in which some ranks compute activations again and others do not, where that is all
        that ranks may have of their own: with whether each does. plain, again: without and with it on all ranks.
        """
        return iter(())

    # -- memory ---------------------------------------------------------------------------------------------------

    def share(self, architecture: Architecture, strategy: PlannedStrategy, rank: int) -> Share | None:
        """The part of the model that a rank computes; None: all of it."""
        return None

    def shards(self, strategy: PlannedStrategy) -> int:
        """Ranks that hold one copy of what lies in parts."""
        if self.parts == "none":
            return 1
        return strategy.shard_size if self.shards_per_host else strategy.world_size

    def keeps_buckets(self, strategy: PlannedStrategy) -> bool:
        """Whether gradients are there all the time, as buckets that are exchanged."""
        return False

    def lasting_terms(self, step: Step) -> Iterable[Term]:
        """What is there all the time besides weights, gradients and states, on a rank without a GPU."""
        return ()

    def gathered(self, step: Step, num_bytes: int, source: str) -> tuple[int, str]:
        """Weights of other ranks that are here for a moment: (bytes, where they come from)."""
        return num_bytes, source

    def backward_terms(self, step: Step) -> Iterable[Term]:
        """What backward of a layer needs besides."""
        return ()

    def update_terms(self, step: Step) -> Iterable[Term]:
        """What the update needs besides."""
        return ()

    def further_instants(self, step: Step) -> Iterable[Instant]:
        """Moments that other strategies do not have."""
        return ()

    # -- traffic and time -----------------------------------------------------------------------------------------

    def traffic(self, ask: TrafficQuery) -> Iterator[Exchange]:
        """What ranks exchange in one optimizer step."""
        return iter(())

    def ring(self, strategy: PlannedStrategy) -> int:
        """Neighbours in rank order that belong together, for `Exchange.among`."""
        return strategy.shard_size if self.shards_per_host else strategy.world_size // strategy.replicas

    def compute_of(self, model: ComputeModel, strategy: PlannedStrategy) -> ComputeModel:
        """How fast a rank computes its part of a micro-batch. model: of a whole one."""
        return model

    def copy_s(self, exchange: Exchange, strategy: PlannedStrategy, *, bytes_per_s: float) -> float:
        """Seconds in which a rank's part comes to the card before an exchange, or leaves it after.

        bytes_per_s: between a card and its machine's memory.
        """
        return 0.0

    def in_buckets(self, ask: StepQuery) -> StepQuery:
        """With its gradients in as many buckets as the trainer chooses."""
        return ask

    def total_s(self, ask: StepQuery) -> float:
        """Seconds of an optimizer step without the update."""
        return ask.last_backward_s()

    # -- words ----------------------------------------------------------------------------------------------------

    def title(self, strategy: PlannedStrategy) -> str:
        """Its name with what belongs to it; of copies, their ranks and how many there are."""
        copies = (
            f" {strategy.shard_size} x {strategy.world_size // strategy.shard_size}" if self.shards_per_host else ""
        )
        return f"{strategy.kind}{copies}{strategy.moved}"

    def reason(self, job: StrategyJob, *, num_ranks: int, num_hosts: int, rows: Sequence[Sequence[int]]) -> str:
        """How these ranks share the work. rows: layers of the ranks of each pipeline."""
        return self.meaning

    @property
    def parts_of_tensors(self) -> bool:
        """Whether a host may have a part of the state that can be saved by itself: rows of tensors, or some layers.

        DeepSpeed's parts are no rows of tensors, and under tp every host has all of it.
        """
        return self.layers == "staged" or self.sharded_by == "fsdp2"

    @property
    def not_alone(self) -> str:
        """Why no host can do its part of a job alone, after "strategy: K, "; "" where each can."""
        divided = self.layers != "all" or self.parts != "none"
        return "in which the model lies in parts, and no host can do it alone" if divided else ""


def extras_of(method: MethodJob, *, compiles: bool) -> tuple[str, ...]:
    """The keys of `EXTRAS` by which a job asks for something, or the adapter that it goes on with does.

    compiles: the job's `compile`.
    """
    asked = {key for key in METHOD_EXTRAS if getattr(method, key.removeprefix("method."))}
    if not method.splits:  # other beginnings leave the weights alone
        asked.discard("method.init")
    found = tuple(key for key in METHOD_EXTRAS if method.kind != "full" and key in asked)
    return (*found, "compile") if compiles else found


def asked_of(training: Training) -> Asked:
    """What a plan's training asks of a strategy."""
    return Asked(
        method=training.method,
        precision=training.compute,
        parameters="fp32" if training.parameters == "fp32" else "compute",
        optimizer=training.optimizer,
        activation_offloading=training.offloading,
        extras=training.extras,
    )
