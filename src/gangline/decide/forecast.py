"""What a job would need and take on the machines: the question put to `planning`, from files and facts."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gangline.catalog.models import known_model, suggest_models
from gangline.context import Context
from gangline.decide.hosts import SpeedTable
from gangline.errors import DoesNotFit, GanglineError, ModelError, UsageError
from gangline.inventory.facts import Inventory
from gangline.inventory.measured import keep
from gangline.kernel_table import FLASH_CAPABILITY, KERNELS, PACKED_ATTENTION
from gangline.planner.architecture import Architecture, Layer, Linear, place_adapters
from gangline.planner.candidate import MOST_OF_HOST, Candidate, PlanQuery, builds_method, lacking
from gangline.planner.config import UnknownArchitecture, read_architecture, unpackable
from gangline.planner.decision import Choice, decide
from gangline.planner.machines import Placement, PlannedCluster
from gangline.planner.report import fastest_of_fewer, slowness_cause, ways_lines
from gangline.planner.software import with_kernels
from gangline.planner.training import BYTES, GANGLINE, GANGLINE_CPU, Number, SoftwareStack, Training
from gangline.planner.ways_out import Suggestion, ways_out
from gangline.provision.code import trainer_here
from gangline.provision.hub import kept_or_fetched
from gangline.runs.files import read_json
from gangline.runs.gang import whole_count
from gangline.runs.job import REPLANNED, Job
from gangline.strategies.base import AUTO, Asked, Machines, PlanHalf, Violation, extras_of
from gangline.strategies.table import plan_half
from gangline.transport.local import LocalTransport
from gangline.units import format_bytes

# The shape of a job's model, read from its config.json; weights are not needed.


CONFIG_BYTES = 4 << 20
"""More is no config.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The contents of a model's config.json, and where they are from."""

    config: dict[str, Any] | None
    """None: nobody has it."""
    kind: Literal["folder", "cache", "catalogue", "hub", ""] = ""
    source: str = ""
    """In words; without a config, why the hub gave none."""


def find_shape(job: Job, variables: Mapping[str, str], home: Path | None = None) -> ModelShape:
    """A folder's own file; for a name of the hub what an earlier download left in its cache, else the catalogue, else
    the hub itself, whose answer is kept in `home` (None: it is not asked).

    Raises ModelError for a file that cannot be read.
    """
    folder = Path(job.model.path)
    if folder.is_absolute():
        return ModelShape(config=read_config(folder / "config.json"), kind="folder", source="config.json of its folder")
    if (path := cached_config(job, variables)) is not None:
        words = f"the hub's cache on this computer, revision {path.parent.name[:12]}"
        return ModelShape(config=read_config(path), kind="cache", source=words)
    if (known := known_model(job.model.path)) is not None:
        words = f"gangline's catalogue, which has it from {known.source}"
        return ModelShape(config=copy.deepcopy(known.config), kind="catalogue", source=words)
    if home is None:
        return ModelShape(config=None)
    answer = kept_or_fetched(job.model.path, job.model.revision, variables, home)
    if isinstance(answer, str):
        return ModelShape(config=None, source=answer)
    when = f"fetched {format_bytes(answer.num_bytes)} just now" if answer.fetched else "kept from an earlier command"
    words = f"config.json at {answer.endpoint}, revision {answer.revision[:12]}, {when}"
    return ModelShape(config=answer.config, kind="hub", source=words)


def shape_unknown(name: str, hub: str = "") -> str:
    """Why nothing is known of a model of the hub, and what to do. hub: why that gave nothing."""
    near = ", ".join(suggest_models(name))
    return (
        f"neither the hub's cache on this computer nor the catalogue has {name}{f' (near: {near})' if near else ''}; "
        f"{f'{hub}; ' if hub else ''}its config.json in a folder is enough: gangline plan --model FOLDER"
    )


def read_config(path: Path) -> dict[str, Any]:
    """A config.json as plain data; raises ModelError."""
    try:
        if path.stat().st_size > CONFIG_BYTES:
            raise ValueError(f"it has {path.stat().st_size} bytes")
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise TypeError(f"expected an object, found {type(data).__name__}")
    except (OSError, TypeError, ValueError) as error:
        raise ModelError(
            f"model.path: {path} cannot be read",
            seen=f"expected the model's config.json; {error}",
            fix="copy it again from the model's page",
        ) from error
    return data


def config_digest(config: Mapping[str, Any]) -> str:
    """A name for a configuration by its content: what was counted or measured of it is kept under that."""
    text = json.dumps(config, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def cached_config(job: Job, variables: Mapping[str, str]) -> Path | None:
    """The file of the hub's cache: of the revision that is meant; where the job names none, else the newest one."""
    home = Path(variables.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(variables.get("HF_HUB_CACHE") or home / "hub")
    folder = cache / f"models--{job.model.path.replace('/', '--')}"
    revision = job.model.revision or "main"
    try:
        meant = (folder / "refs" / revision).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        meant = revision
    exact = folder / "snapshots" / meant / "config.json"
    if exact.is_file() or job.model.revision is not None:
        return exact if exact.is_file() else None
    return max((folder / "snapshots").glob("*/config.json"), key=lambda path: path.stat().st_mtime, default=None)


# Whether there is what a job wants to move off its cards, and room for it in the machines' memory.


def require_cards(job: Job, world: PlannedCluster) -> None:
    """Raise UsageError where an offload would move nothing: there is no card (fsdp, hsdp)."""
    asked = bool(job.strategy.offload) and job.strategy.kind != AUTO
    parts = asked and plan_half(job.strategy.kind).sharded_by == "fsdp2"
    if not parts and not job.activation_offloading:
        return
    key = "strategy.offload" if parts else "activation_offloading"
    if all(placement.gpu is None for placement in world.placements):
        raise UsageError(
            f"{key}: nothing can be offloaded to host memory",
            seen="no rank has a GPU, so everything is in host memory already",
            fix=f"delete {key}",
        )


def require_ram(candidate: Candidate | None) -> None:
    """Raise UsageError where what is moved does not fit into the memory of a machine."""
    if candidate is None:
        return
    for host, (num_bytes, room) in candidate.host_memory.items():
        if num_bytes and room is not None and num_bytes > MOST_OF_HOST * room:
            raise UsageError(
                f"{host} has too little host memory for the offloading",
                seen=f"{format_bytes(num_bytes)} of weights, states and activations; {format_bytes(room)} available",
                fix="offload less (strategy.offload, activation_offloading), or let more hosts share the model",
            )


# Models that no closed form knows: built without weights by a worker process, and counted there.


LIMIT_S = 120.0
"""Building a model without weights takes seconds, a trace half a minute on a slow machine."""
_ATTENTION = ("q", "k", "v", "o", "qkv", "attn", "query", "key", "value", "wqkv", "out")
"""Beginnings of names of the matrices around attention."""


def ask_trace(order: Mapping[str, Any] | list[dict[str, Any]], *words: str, context: Context) -> Any:
    """What `python -m gangline.worker.trace` answers on this computer, where torch has to be.

    Raises ModelError where there is none, and the worker's own error.
    """
    host = trainer_here(context.home)
    argv = host.argv("-m", "gangline.worker.trace", *words)
    env = {**host.code_env, "OMP_NUM_THREADS": "1"}
    try:
        result = LocalTransport(host).run(argv, stdin=json.dumps(order).encode(), env=env, timeout_s=LIMIT_S)
    except TimeoutError as error:
        fix = "try again when this computer is less busy"
        raise ModelError("the model cannot be built in time", seen=str(error), fix=fix) from error
    try:
        answer = json.loads(result.stdout)
    except ValueError:
        raise ModelError(
            "the model cannot be built on this computer",
            seen=(result.stderr.strip().splitlines() or [f"exit code {result.returncode}"])[-1],
            fix="install the trainer's packages: gangline setup",
        ) from None
    first = answer if isinstance(answer, dict) else next((one for one in answer if one.get("kind") == "error"), {})
    if first.get("kind") == "error":
        raise GanglineError.from_json({**first, "kind": first.get("error_kind")})
    return answer


def count_architecture(config: Mapping[str, Any], context: Context) -> Architecture:
    """The shape of a model of any kind that transformers knows; kept by the content of its configuration.

    Raises ModelError where it cannot be built, or where its layers are not of one shape.
    """
    kept = context.home / "models" / f"{config_digest(config)}.json"
    try:
        record = read_json(kept)
    except (OSError, ValueError):
        context.console.progress("counting the model's parameters")
        try:
            record = ask_trace({"config": dict(config)}, "count", context=context)
        except ModelError:
            raise
        except GanglineError as error:  # of the worker's own: it would be the same the next time
            record = {**error.to_json(), "kind": "error"}
        keep(kept, record)
    if record.get("kind") == "error":
        raise ModelError(str(record.get("what", "")), seen=str(record.get("seen", "")), fix=str(record.get("fix", "")))
    try:
        return counted(config, record)
    except (KeyError, TypeError, ValueError) as error:
        missing = f"config.json has no {error}" if isinstance(error, KeyError) else str(error)
        raise ModelError(
            f"the planner has no formulas for models of type {config.get('model_type')}",
            seen=missing,
            fix="plan with a known model of the same size",
        ) from error


def counted(config: Mapping[str, Any], record: Mapping[str, Any]) -> Architecture:
    """The architecture that was counted; raises KeyError or ValueError where it does not say enough."""
    text = config.get("text_config") or config
    depth = int(record["layers"])
    linears = tuple(_linear(shape, depth) for shape in record["shapes"])
    hidden, heads = int(text["hidden_size"]), int(text["num_attention_heads"])
    head_dim = int(text.get("head_dim") or hidden // heads)
    inside = sum(linear.num_weights for linear in linears) * depth
    biases = sum(linear.num_biases for linear in linears) * depth
    experts = int(record["experts"])
    top_k = int(text.get("num_experts_per_tok") or 0)
    num_experts = int(text.get("num_local_experts") or text.get("num_experts") or text.get("n_routed_experts") or 0)
    if inside != record["linears"] or experts % depth:
        raise ValueError("matrices or experts do not divide by the number of layers")
    layer = Layer(
        count=depth,
        linears=linears,
        heads=heads,
        kv_heads=int(text.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        value_dim=head_dim,
        width=int(text.get("moe_intermediate_size") or text.get("intermediate_size") or 4 * hidden) * max(1, top_k),
        experts=num_experts,
        top_k=top_k,
        fused_weights=experts // depth,
        fused_active=experts // depth * top_k // num_experts if num_experts else experts // depth,
    )
    vocabulary = int(text["vocab_size"])
    return Architecture(
        model_type=str(config.get("model_type", "model")),
        hidden=hidden,
        vocabulary=vocabulary,
        tied=bool(record["tied"]),
        layers=(layer,),
        extra_embeddings=max(0, int(record["embeddings"]) - hidden * vocabulary),
        vectors=max(0, int(record["others"]) - biases),
        source="counted",
    )


def _linear(shape: Mapping[str, Any], depth: int) -> Linear:
    if int(shape["count"]) % depth:
        raise ValueError(f"{shape['count']} matrices called {shape['name']} in {depth} layers")
    name = str(shape["name"])
    return Linear(
        name=name,
        inputs=int(shape["columns"]),
        outputs=int(shape["rows"]),
        part="attention" if name.lower().split("_")[0] in _ATTENTION else "mlp",
        bias=bool(shape["bias"]),
        number=int(shape["count"]) // depth,
    )


GUESSED = 0.5
"""A link that may be so far from what is assumed is no ground to refuse a start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobForecast:
    """The forecast of a job, or why there is none."""

    choice: Choice | None = None
    shape: ModelShape | None = None
    """Of the model, and where it is from."""
    unknown: str = ""
    """Why there is no verdict, in words."""
    speeds: SpeedTable | None = None
    """What is known of how fast the machines compute."""
    error: ModelError | None = None
    """What is wrong with the model's configuration. A start goes on without a forecast: the trainer has the say."""
    num_ranks: int = 1
    """On how many it is to run."""

    @property
    def config(self) -> dict[str, Any] | None:
        """The model's config.json, where there is a verdict."""
        return None if self.shape is None else self.shape.config

    @property
    def runnable(self) -> Candidate | None:
        """What gangline's own trainer would do."""
        return None if self.choice is None else self.choice.runnable

    @property
    def divides(self) -> str:
        """Why this batch, or what is bad about it, in words; empty where there is nothing to say."""
        dividing = None if self.choice is None else self.choice.dividing
        return "" if dividing is None else dividing.words

    def dated(self, inventory: Inventory) -> list[str]:
        """What was measured under another driver or torch than hosts have now, of what the forecast rests on."""
        candidate = self.runnable or (None if self.choice is None else self.choice.best)
        if candidate is None or self.speeds is None:
            return []
        return self.speeds.dated([need.placement for need in candidate.needs], candidate.training, inventory)

    def settled(self, job: Job) -> Job:
        """The job with everything decided that it leaves open, and what of it `Job.reopened` opens again."""
        candidate = None if self.choice is None else self.choice.runnable or self.choice.best
        chosen = job.chosen
        if candidate is not None:  # one setting for all stays as it is: a run that is resumed has the same bits
            is_own = bool(candidate.scenario.settings)
            chosen = tuple(key for key in REPLANNED if is_own and key in (*job.open, *job.chosen))
        job = dataclasses.replace(self.with_batch(job), chosen=chosen)
        if candidate is None or not job.open:
            return dataclasses.replace(job, open=())
        return dataclasses.replace(
            job,
            micro_batch=candidate.training.micro_batch,
            activation_checkpointing=candidate.training.checkpointing,
            exchange="bf16" if candidate.training.exchange == "bf16" else "fp32",
            open=(),
        )

    def with_batch(self, job: Job) -> Job:
        """The job with the batch that was chosen; where there is no forecast, with the one that it wishes for."""
        if "batch" not in job.open:
            return job
        wished = job.micro_batch * whole_count(job.batch, job.micro_batch)
        batch = wished if self.choice is None else self.choice.query.batch
        return dataclasses.replace(job, batch=batch, open=tuple(key for key in job.open if key != "batch"))


def forecast_job(job: Job, world: PlannedCluster, context: Context, *, stack: SoftwareStack = GANGLINE) -> JobForecast:
    """Weigh every way to run the job on these machines.

    Raises UsageError for a pipeline of more ranks than layers, for pipelines of unlike numbers of ranks, for tp on
    hosts with unlike numbers of ranks, where ranks share a GPU for what wants one for each, for weights that would be
    trained in fp16, and as `require_cards` and `require_ram` do.
    """
    _require_formats(job, world)
    _require_ranks(job, world)
    require_cards(job, world)
    job_forecast = dataclasses.replace(_forecast(job, world, context, stack=stack), num_ranks=len(world.placements))
    require_ram(job_forecast.runnable)
    return job_forecast


def _forecast(job: Job, world: PlannedCluster, context: Context, *, stack: SoftwareStack) -> JobForecast:
    context.console.progress("reading the model's config.json")
    try:
        shape = find_shape(job, context.deps.variables, context.home)
    except ModelError as error:
        return _unknown(error)
    if (config := shape.config) is None:
        return JobForecast(unknown=f"memory and time are unknown: {shape_unknown(job.model.path, shape.source)}")
    try:
        num_added = len({*job.tokens.add, *job.tokens.special.values()})
        architecture = place_adapters(_architecture(config, context), job.method, num_added=num_added)
    except ModelError as error:
        return _unknown(error)
    _require_layers(job, architecture.num_layers, num_ranks=len(world.placements))
    speeds = SpeedTable(architecture=architecture, home=context.home)
    query = PlanQuery(
        architecture=architecture,
        training=training_of(job, world, stack=stack),
        batch=job.batch,
        compute=speeds.of,
        open=tuple(key for key in job.open if key != "sequence_length"),  # the rows decide on that
        strategy=job.strategy,
    )
    try:
        choice = decide(query, world)
    except ModelError as error:  # adapters that find no place, by the names that the closed form knows
        return _unknown(error)
    return JobForecast(choice=choice, shape=shape, speeds=speeds)


def _unknown(error: ModelError) -> JobForecast:
    return JobForecast(unknown=f"memory and time are unknown: {error.what}; {error.seen}", error=error)


def _require_formats(job: Job, world: PlannedCluster) -> None:
    """Only here it is known that `precision: auto` is fp16."""
    if job.parameters != "compute" or _compute(job, world) != "fp16":
        return
    cards = dict.fromkeys(
        placement.label for placement in world.placements if placement.spec is not None and not placement.spec.bf16
    )
    why = f"{', '.join(cards)} cannot compute in bf16, so all GPUs compute in fp16"
    raise UsageError(
        "precision.parameters: fp16 weights cannot be trained",
        seen=f"parameters: compute, and {why if job.precision == 'auto' else 'compute: fp16'}; updates smaller than "
        "6e-8 vanish",
        fix="delete precision.parameters to keep trained weights in fp32, or write precision.compute: fp32",
    )


def _require_ranks(job: Job, world: PlannedCluster) -> None:
    """The strategy that the job asks for can be done by these ranks."""
    half = _half_of(job)
    if half is None:
        return
    ranks = {host: len(world.placements_of(host)) for host in world.hosts}
    offload, replicas = job.strategy.offload, job.strategy.replicas
    asked = Asked(
        method=job.method.kind, offload=offload, replicas=replicas, extras=extras_of(job.method, compiles=job.compile)
    )
    _refuse(next(half.machine_violations(asked, Machines(ranks=ranks, sharing=world.crowded)), None))


def _require_layers(job: Job, num_layers: int | None, *, num_ranks: int, unknown: str = "") -> None:
    """There are layers for all ranks; unknown: why nobody knows how many there are."""
    half = _half_of(job)
    if half is not None:
        found = half.layer_violation(num_layers, replicas=job.strategy.replicas, num_ranks=num_ranks)
        _refuse(found, seen=unknown)


def _half_of(job: Job) -> PlanHalf | None:
    return None if job.strategy.kind == AUTO else plan_half(job.strategy.kind)


def _refuse(violation: Violation | None, *, seen: str = "") -> None:
    if violation is not None:
        raise UsageError(violation.what, seen=seen or violation.seen, fix=violation.fix)


def _architecture(config: dict[str, Any], context: Context) -> Architecture:
    try:
        return read_architecture(config)
    except UnknownArchitecture:
        return count_architecture(config, context)


def kernels_of(job: Job, world: PlannedCluster, *, compute: Number) -> tuple[str, ...]:
    """The kernels that ranks on these machines will take, as far as machines and formats decide; see `worker.kernels`.

    All ranks take the same ones: what needs a GPU where each has one, and attention of packed rows where all of these
    have flash attention.
    """
    if job.kernels == ("torch",):
        return ()
    names = tuple(KERNELS) if job.kernels == ("auto",) else job.kernels
    places = world.placements
    on_gpus = all(each.gpu is not None for each in places) and compute != "fp64"
    new = on_gpus and BYTES[compute] == 2 and all(_takes_packed_attention(each) for each in places)
    here = [name for name in names if on_gpus or not KERNELS[name].on_gpu]
    return tuple(name for name in here if name != PACKED_ATTENTION or new)


def _takes_packed_attention(placement: Placement) -> bool:
    spec = placement.spec
    if spec is None or spec.vendor != "NVIDIA" or not spec.compute_capability:
        return False
    return tuple(int(part) for part in spec.compute_capability.split(".")) >= FLASH_CAPABILITY


def training_of(job: Job, world: PlannedCluster, *, stack: SoftwareStack = GANGLINE) -> Training:
    """What a rank computes, as the job says."""
    compute = _compute(job, world)
    trained: Number = compute if compute == "fp64" or job.parameters == "compute" else "fp32"
    if stack == GANGLINE and any(placement.gpu is None for placement in world.placements):
        stack = GANGLINE_CPU
    if stack.name.startswith(GANGLINE.name):
        stack = with_kernels(stack, kernels_of(job, world, compute=compute), compute=compute)
    if stack.adapters is not None and job.method.kind != "full":
        trained = compute if stack.adapters == "compute" else stack.adapters
    attention = "eager" if job.model.attention == "eager" else stack.attention
    masks = "never" if job.model.attention == "flash_attention_2" else stack.masks
    return Training(
        method=job.method.kind,
        bits=job.method.bits,
        double_quant=stack.double_quant,
        micro_batch=job.micro_batch,
        sequence_length=job.data.sequence_length,
        compute=compute,
        parameters=trained,
        rank=job.method.rank,
        targets=job.method.targets,
        dropout=job.method.dropout,
        draws_by_sample=job.draws == "sample",
        dora=job.method.dora,
        splits=job.method.splits,
        extras=extras_of(job.method, compiles=job.compile),
        checkpointing=job.activation_checkpointing,
        offloading=job.activation_offloading,
        packed=job.data.packing,
        optimizer=job.optimizer.kind,
        momentum=job.optimizer.momentum > 0,
        exchange="bf16" if job.exchange == "bf16" and trained == "fp32" else None,
        stack=dataclasses.replace(stack, attention=attention, masks=masks),
    )


def _compute(job: Job, world: PlannedCluster) -> Number:
    """As the ranks will agree on: what the least able of them can do well."""
    if job.precision != "auto":
        return job.precision
    if any(placement.gpu is None for placement in world.placements):
        return "fp32"
    return "bf16" if all(placement.spec is None or placement.spec.bf16 for placement in world.placements) else "fp16"


def ways_of(job_forecast: JobForecast) -> list[Suggestion]:
    """What would make it fit; empty where it fits."""
    choice = job_forecast.choice
    if choice is None or choice.best is not None:
        return []
    return ways_out(choice.query, choice.world)


DEAR = 0.5
"""Of a step that waits for weights of other machines: more is taken only where the job asks for it."""


def require_startable(job: Job, job_forecast: JobForecast, *, force: bool = False) -> None:
    """Raise where gangline's own trainer cannot do the job, or has no room for it.

    UsageError for what is not built yet, DoesNotFit where memory is short, one machine alone is faster, or most of a
    step would be waiting for weights. force: start what is only slow.
    """
    choice = job_forecast.choice
    if choice is None:
        _require_layers(job, None, num_ranks=job_forecast.num_ranks, unknown=job_forecast.unknown)
        return
    _require_method(choice.query)
    _require_bf16(choice)
    if choice.runnable is None:
        _require_way(choice)
        _refuse_size(choice)
    if force:
        return
    if all(placement.weight is None for placement in choice.world.placements):
        _refuse_slowness(choice)
    if job.strategy.kind == AUTO:
        _refuse_price(choice)


def _require_way(choice: Choice) -> None:
    """The strategy that the job asks for goes with what else it asks for."""
    asked, candidate = choice.query.strategy.kind, next(iter(choice.by_kind), None)
    if asked == AUTO or candidate is None or any(each.is_built for each in choice.by_kind):
        return
    missing = lacking(candidate.strategy, candidate.training, candidate.architecture)
    assert missing is not None  # the job asks for it
    raise UsageError(f"strategy: gangline train cannot do {missing.what}", seen=missing.seen, fix=missing.fix)


def _require_method(query: PlanQuery) -> None:
    if builds_method(query.training, query.architecture):
        return
    experts, total = query.architecture.expert_weights, query.architecture.num_parameters
    model = "a mixture of experts" if experts else "this model"
    seen = f"its layers have {unpackable(query.architecture)} ({query.architecture.model_type})"
    if experts:
        seen = f"its experts are tensors of three dimensions, {100 * experts / total:.0f} % of its weights"
    raise UsageError(
        f"method: gangline train cannot do {query.training.method} with {model}",
        seen=f"{seen}, which would stay as they are",
        fix=("add quantise_experts: true below method:, or " if experts else "")
        + "write method: lora, with strategy: hsdp or fsdp if no device holds the model",
    )


def _require_bf16(choice: Choice) -> None:
    """A job that names bf16 gets no other format; of cards that the catalogue does not have ranks find it out."""
    placements = [
        placement for placement in choice.world.placements if placement.spec is not None and not placement.spec.bf16
    ]
    if choice.query.training.compute != "bf16" or not placements:
        return
    cards = dict.fromkeys(placement.label for placement in placements)
    hosts = list(dict.fromkeys(placement.host for placement in placements))
    raise UsageError(
        f"precision.compute: {', '.join(cards)} cannot compute in bf16",
        seen=f"compute: bf16, and such a card in {', '.join(hosts[:8])}",
        fix="write precision: auto (all cards then use fp16 with a loss scale) or fp32",
    )


def _refuse_size(choice: Choice) -> None:
    built = next((candidate for candidate in choice.by_kind if candidate.is_built), None)
    if built is None:
        return
    need = built.tightest
    cut = built.strategy.half.layers == "staged"  # for this memory: without an option nobody knows how
    if not cut and need.placement.gpu is None and need.memory.allocated_bytes <= (need.placement.free_bytes or 0):
        return  # what a process shares with others, and what may be swapped, is not known well enough
    better, best, optimizer = "", choice.best, choice.query.training.optimizer
    if best is not None and (package := best.strategy.half.capabilities.package):
        better = f"; strategy: {best.strategy.kind} would fit, by {package}"
    elif best is not None:
        better = f"; {best.strategy.kind} would fit, but gangline train does not support it"
        better += " yet" if optimizer == "adamw" else f" with optimizer.kind: {optimizer}"
    # each rank that shares a card has a part of its memory, and of what divides a model nothing is done there
    crowded = ", ".join(choice.world.crowded[:8])
    fewer_ranks = [f"set slots of {crowded} to the number of its GPUs"] if crowded else []
    raise DoesNotFit(
        f"the job does not fit on {need.placement.host}",
        seen=f"a rank needs about {need.memory.process.likely / 2**30:.1f} GiB and "
        f"{(need.placement.free_bytes or 0) / 2**30:.1f} GiB are free on it{better}",
        fix=_listed([*fewer_ranks, *_ways(choice)]),
    )


def _refuse_slowness(choice: Choice) -> None:
    """Only where the best case of all machines is worse than the worst case of fewer, on a network that is known."""
    whole, fewer = choice.runnable, fastest_of_fewer(choice, runnable=True)
    if whole is None or whole.time is None or fewer is None or fewer.time is None:
        return
    if choice.world.wire.spread >= GUESSED or fewer.time.high_s >= whole.time.low_s:
        return
    raise DoesNotFit(
        f"{', '.join(fewer.world.hosts)} alone would be faster than all hosts together",
        seen=f"{fewer.time.total_s:.3g} s a step against {whole.time.total_s:.3g} s; "
        f"{slowness_cause(choice, whole, fewer)[0]}",
        fix=f"leave all hosts but {', '.join(fewer.world.hosts)} out of the cluster file, or raise batch; "
        f"--force starts it as it is{_apart(choice, fewer)}",
    )


def _refuse_price(choice: Choice) -> None:
    """Weights that travel for every micro-batch may cost most of a step: whoever wants that has to say so."""
    candidate = choice.runnable
    if candidate is None or candidate.time is None or not candidate.strategy.half.lockstep:
        return
    waiting = candidate.time.exposed_s / candidate.time.total_s
    if waiting <= DEAR:
        return
    raise DoesNotFit(
        f"with the model in parts {100 * waiting:.0f} % of every step is time waiting for the network",
        seen=f"no device holds it whole; {candidate.strategy.kind} takes {candidate.time.total_s:.3g} s a step here, "
        f"of which {candidate.time.exposed_s:.3g} s are exchanges of weights that computation does not hide",
        fix=_listed([f"write strategy: {candidate.strategy.kind}; to start anyway, add --force", *_ways(choice)]),
    )


def _ways(choice: Choice) -> list[str]:
    return [line.removeprefix("instead").strip() for line in ways_lines(ways_out(choice.query, choice.world))]


def _listed(lines: list[str]) -> str:
    """One below the other, where an error says what to do."""
    return "\n        ".join(lines)


def _apart(choice: Choice, fewer: Candidate) -> str:
    """What all machines would do in rounds, where the job did not ask for them and that is faster."""
    for candidate in choice.by_kind:
        if (
            not candidate.is_exact
            and not candidate.is_built
            and candidate.may_fit
            and candidate.seconds < fewer.seconds
        ):
            return (
                f"; strategy: {candidate.strategy.kind} would take about {candidate.seconds:.3g} s a step on all of "
                "them, with other numbers than one big machine"
            )
    return ""
