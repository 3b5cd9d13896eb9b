"""What ranks do in test_adapters: every option of adapters, over ranks, alone, and by peft in a plain loop of torch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, get_scheduler

from gangline.errors import GanglineError
from gangline.optimizers import OPTIMIZERS
from gangline.planner.config import read_architecture
from gangline.planner.states import quantised_bytes, whole_share
from gangline.planner.training import Training
from gangline.runs.job import Job, MethodJob, ModelJob, OptimizerJob, ScheduleJob, TokensJob
from gangline.worker.adapters import lora_config, round_saved
from gangline.worker.export import export
from gangline.worker.model import base_of, load_model, saved_weights
from gangline.worker.progress import restore
from gangline.worker.quantised import PACKED, QuantisedExperts, QuantisedLinear
from tests.train import cases_contract, tiny
from tests.train.cases_export import logits, relative, stranger
from tests.train.small import (
    MemorySet,
    make_job,
    make_session,
    make_world,
    mixture_folder,
    model_folder,
    norms_in_own_dtype,
    run_loop,
)

STEPS = 20
SEED = 7


def stored_model(folder: str, *, tied: bool, experts: bool = False, layers: int = 2, width: int = 32) -> str:
    """A folder with weights in this one, made by the first rank; collective."""
    from transformers import AutoConfig

    path = Path(folder) / f"{'experts' if experts else 'tied' if tied else 'untied'}-{layers}-{width}"
    if dist.get_rank() == 0 and not path.is_dir():
        torch.manual_seed(1)
        plain = model_folder(hidden_size=width, tie_word_embeddings=tied, initializer_range=0.2)
        config = AutoConfig.from_pretrained(mixture_folder() if experts else plain, num_hidden_layers=layers)
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
    dist.barrier()
    return str(path)


def job_of(
    options: dict,
    *,
    folder: str,
    tied: bool = False,
    precision: str = "fp64",
    steps: int = STEPS,
    layers: int = 2,
    width: int = 32,
    **changes,
) -> Job:
    """A job with these options of its method, over stored weights; AdamW without anything around it."""
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    shape = {"experts": bool({"target_parameters", "quantise_experts"} & {*options}), "layers": layers, "width": width}
    return replace(
        make_job(precision=precision, steps=steps, **changes),
        model=ModelJob(path=stored_model(folder, tied=tied, **shape)),
        method=replace(MethodJob(kind="lora", rank=4, alpha=8.0), **options),
        optimizer=OptimizerJob(learning_rate=3e-3, clip_norm=None),
        schedule=ScheduleJob(kind="constant"),
    )


def by_peft(job: Job, config: LoraConfig, *, num_tokens: int = 0, scheduler=None) -> list[float]:
    """Losses of a plain loop over the same samples. num_tokens: as many have to have a row, the mean of the others.

    scheduler: its name in transformers, and its words; None: a constant rate.
    """
    norms_in_own_dtype()
    compute = torch.float32 if job.precision == "fp32" else torch.float64
    dtype = torch.float32 if job.method.splits else compute  # peft splits no weight in fp64
    model = AutoModelForCausalLM.from_pretrained(job.model.path, dtype=dtype)
    table = model.get_input_embeddings().weight
    if num_tokens > len(table):
        means = [part.weight.detach().mean(0) for part in (model.get_input_embeddings(), model.get_output_embeddings())]
        rows = len(table)
        model.resize_token_embeddings(num_tokens, mean_resizing=False)
        parts = (model.get_input_embeddings(), model.get_output_embeddings())
        for part, mean in zip(parts, means, strict=True):
            part.weight.data[rows:] = mean
    torch.manual_seed(SEED)
    model = get_peft_model(model, config, autocast_adapter_dtype=False).to(compute).train()
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3, weight_decay=0.0)
    name, words = scheduler or ("constant", {})
    lengths = {"num_warmup_steps": job.schedule.warmup_steps, "num_training_steps": job.steps}
    rates = get_scheduler(name, optimizer, **lengths, scheduler_specific_kwargs=words)
    session = make_session(job, make_world([10], rank=0, strategy="single"), num_evaluation=0)
    rows, losses = MemorySet(64), []
    for step in range(job.steps):
        samples = [rows.sample(int(index)) for index in session.order.samples(step)]
        count = sum(int((each.targets != -100).sum()) for each in samples)
        optimizer.zero_grad()
        total = 0.0
        for each in samples:
            logits = model(torch.tensor(each.input_ids)[None]).logits[0]
            loss = F.cross_entropy(logits, torch.tensor(each.targets), ignore_index=-100, reduction="sum") / count
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        rates.step()
        losses.append(total)
    return losses


def by_peft_too(config: dict, scheduler=None, **words):
    """Losses of one process, and by peft with the configuration that means the same. words: of `option_job`."""
    job = option_job(batch=4, **words)
    session = make_session(job, make_world([10], rank=0, strategy="single"), num_evaluation=0)
    _, alone = run_loop(session)
    config = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **config}
    num_tokens = 258 + len(words["add"]) if words.get("add") else 0
    theirs = by_peft(job, LoraConfig(**config), num_tokens=num_tokens, scheduler=scheduler)
    rows = base_of(session.model).get_input_embeddings().weight.shape[0]
    return {"alone": [loss for _, loss, _ in alone.steps], "peft": theirs, "rows": rows}


def over_what_few_bits_stand_for(folder: str, options: dict, config: dict):
    """Losses of one process over quantised experts, and by peft over a plain model of the unpacked weights.

    Further: bytes of frozen weights, those that a plan counts, numbers left in the tensors of experts after a step, and
    how far weights are from what they were before they were quantised.
    """
    job = replace(job_of(options, folder=folder, precision="fp32", batch=4), activation_checkpointing=True)
    session = make_session(job, make_world([10], rank=0, strategy="single"), num_evaluation=0)
    core = base_of(session.model)
    plain = AutoModelForCausalLM.from_pretrained(job.model.path, dtype=torch.float32)
    weights, rounded = dict(plain.named_parameters()), []
    for name, part in core.named_modules():
        if isinstance(part, QuantisedLinear):
            place = name.replace(".base_layer", "").replace(PACKED, "")
            weight = weights[place if isinstance(part, QuantisedExperts) else f"{place}.weight"]
            made = part.unpack(part.weight, part.scales)
            rounded.append(
                (isinstance(part, QuantisedExperts), float(((made - weight).norm() / weight.norm()).detach()))
            )
            weight.data.copy_(made)
    other = Path(folder) / f"unpacked-{job.method.bits}-{len(options)}"
    plain.save_pretrained(other)
    frozen = [each for name, each in core.named_parameters() if ".lora_" not in name]
    held = sum(
        each.nbytes
        for each in (*frozen, *(each for name, each in core.named_buffers() if name.endswith("outer_scales")))
    )
    _, alone = run_loop(session)
    left = sum(each.numel() for name, each in core.named_parameters() if name.endswith(("gate_up_proj", "down_proj")))
    words = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", **config}
    by_hand = by_peft(replace(job, model=ModelJob(path=str(other))), LoraConfig(**words))
    return {
        "alone": [loss for _, loss, _ in alone.steps],
        "peft": by_hand,
        "rounded": rounded,
        "held": held,
        "planned": planned_bytes(job),
        "left": left,
    }


def planned_bytes(job: Job) -> int:
    """Frozen weights of a rank that has all of them, as a plan counts them."""
    architecture = read_architecture(json.loads((Path(job.model.path) / "config.json").read_text(encoding="utf-8")))
    extras = ("method.quantise_experts",)
    training = Training(
        method="qlora", bits=job.method.bits, micro_batch=1, sequence_length=8, compute="fp32", extras=extras
    )
    return sum(quantised_bytes(whole_share(architecture), training))


def divided(folder: str, options: dict, gang: dict, tied: bool = False, steps: int = 4, **how):
    """Of rank 0: losses of some steps over ranks and alone."""
    job = job_of(options, folder=folder, tied=tied, steps=steps, **how)
    _, split = run_loop(make_session(job, make_world(rank=dist.get_rank(), **gang), num_evaluation=0))
    if dist.get_rank() > 0:
        return None
    _, alone = run_loop(make_session(job, make_world([10], rank=0, strategy="single"), num_evaluation=0))
    return {"split": [loss for _, loss, _ in split.steps], "alone": [loss for _, loss, _ in alone.steps]}


def saved_by(folder: str, gang: dict, **words):
    """The first two of four steps, and a checkpoint of them."""
    job = option_job(folder, steps=4, **words)
    cases_contract.save_steps(make_world(rank=dist.get_rank(), **gang), job, Path(folder) / "checkpoints", step=2)


def gone_on_by(folder: str, gang: dict, **words):
    """Losses of the last two, from that checkpoint."""
    world = make_world(rank=dist.get_rank(), resume_step=2, **gang)
    session = make_session(option_job(folder, steps=4, **words), world, num_evaluation=0)
    _, captured = run_loop(session, progress=restore(session, Path(folder) / "checkpoints"))
    return [loss for _, loss, _ in captured.steps]


def refused(folder: str, options: dict, tied: bool = False):
    """The error of a session with these options."""
    try:
        make_session(
            job_of(options, folder=folder, tied=tied, precision="fp32"), make_world([10], rank=0, strategy="single")
        )
    except GanglineError as error:
        return error.to_json()
    return None


def exported(folder: str, options: dict, merged: bool = False, dtype: str = "float32", **model):
    """Export a checkpoint with these options, and how far a stranger's logits are from the trained model's."""
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    base = Path(folder) / "base"
    tiny.write_model(base, dtype=getattr(torch, dtype), **model)
    tiny.write_tokenizer(base)
    job = tiny.make_job(base)
    job = replace(job, method=replace(job.method, **options))
    run, part, tensors = tiny.write_run(Path(folder) / "root", job)
    done = export(run, part, Path(folder) / "out", merged=merged)
    trained = load_model(job, compute=getattr(torch, dtype))
    with torch.no_grad():
        for name, parameter in saved_weights(trained).items():
            parameter.copy_(tensors[name])
    round_saved(trained, getattr(torch, dtype))
    seen, expected = logits(stranger(base, Path(done.folder))), logits(trained)
    return {
        "difference": relative(seen, expected),
        "from_base": relative(seen, logits(AutoModelForCausalLM.from_pretrained(base))),
        "tolerance": done.tolerance,
        "files": done.files,
    }


def token_job(folder: str, options: dict, add: tuple = (), *, tied: bool = False, **changes) -> Job:
    """A job over a model of 300 rows, whose tokenizer has 258 tokens; collective."""
    base = Path(folder) / f"tokens-{tied}-{changes.get('layers', 2)}"
    if dist.get_rank() == 0 and not base.is_dir():
        tiny.write_model(base, tie_word_embeddings=tied, num_hidden_layers=changes.get("layers", 2))
        tiny.write_tokenizer(base)
    dist.barrier()
    job = job_of(options, folder=folder, tied=tied, **changes)
    return replace(job, model=ModelJob(path=str(base)), tokens=TokensJob(add=tuple(add)))


def option_job(
    folder: str, options: dict, *, add=(), begun: str = "", optimizer: dict | None = None, schedule=None, **words
) -> Job:
    """A job of any options, optimizer and schedule. begun: the name of an adapter, written here, that it goes on with."""
    named = add or any(isinstance(each, str) for each in options.get("train_tokens", ()))
    job = token_job(folder, options, add, **words) if named else job_of(options, folder=folder, **words)
    if begun:
        place = Path(folder) / begun
        if dist.get_rank() == 0 and not place.is_dir():
            write_adapter(job, place)
        dist.barrier()
        job = replace(job, method=replace(job.method, adapter=str(place)))
    if optimizer is not None:
        job = replace(job, optimizer=OptimizerJob(**{**OPTIMIZERS[optimizer["kind"]].keys, **optimizer}))
    return replace(job, schedule=ScheduleJob(**schedule)) if schedule is not None else job


def write_adapter(job: Job, place: Path):
    """An adapter by peft itself, with every number stirred; the model that it is for."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_pretrained(job.model.path)
    theirs = get_peft_model(model, lora_config(model, job.method))
    for parameter in theirs.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn_like(parameter)
    theirs.save_pretrained(place)
    return theirs


def losses_of(gang: dict | None, micro_batch: int = 1, **words):
    """Losses and norms of a whole run; gang: None for one process."""
    world = make_world(rank=dist.get_rank(), **gang) if gang else make_world([10], rank=0, strategy="single")
    try:
        job = replace(option_job(**words), micro_batch=micro_batch)
        _, captured = run_loop(make_session(job, world, num_evaluation=0))
    except GanglineError as error:
        return {"refused": error.to_json()}
    return {"losses": [loss for _, loss, _ in captured.steps], "norms": [norm for _, _, norm in captured.steps]}


def continued(folder: str, gang: dict):
    """Of rank 0: steps over ranks and alone that begin with an adapter of peft, and how far its first logits are."""
    place = str(Path(folder) / "adapter")
    job = job_of({"dora": True, "rank_pattern": {"q_proj": 2}, "adapter": place}, folder=folder, steps=4)
    theirs = write_adapter(job, Path(place)) if dist.get_rank() == 0 else None
    dist.barrier()
    _, split = run_loop(make_session(job, make_world(rank=dist.get_rank(), **gang), num_evaluation=0))
    if dist.get_rank() > 0:
        return None
    session = make_session(job, make_world([10], rank=0, strategy="single"), num_evaluation=0)
    tokens = torch.arange(20)[None]
    models = (session.model, theirs.double())
    ours, theirs = (each.eval()(input_ids=tokens, use_cache=False).logits.detach() for each in models)
    session.model.train()
    _, alone = run_loop(session)
    return {
        "split": [loss for _, loss, _ in split.steps],
        "alone": [loss for _, loss, _ in alone.steps],
        "difference": relative(ours.detach(), theirs.detach()),
    }
