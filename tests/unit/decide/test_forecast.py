"""What a start does with the forecast: what is open is decided, what cannot be is refused before anything is made."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from gangline.context import REAL, Context
from gangline.decide import forecast
from gangline.decide.forecast import JobForecast, counted, forecast_job, require_startable, training_of, ways_of
from gangline.decide.what_if import WhatIf, changed
from gangline.errors import DoesNotFit, ModelError, UsageError
from gangline.planner.machines import Placement, PlannedCluster, link
from gangline.planner.speed import ComputeModel
from gangline.planner.training import GANGLINE
from gangline.runs.job import REPLANNED, DataJob, Job, MethodJob, ModelJob, OptimizerJob, SourceJob, StrategyJob
from tests.unit.planner.published import PUBLISHED
from tests.unit.planner.worlds import crowded, with_memory, world

JOB = Job(
    name="j",
    model=ModelJob(path="meta-llama/Llama-3.2-1B"),
    data=DataJob(train=SourceJob(), sequence_length=1024),
    method=MethodJob(kind="lora"),
    batch=24,
    micro_batch=1,
)


class Silent:
    def report(self, line: str) -> None:
        """Nobody listens."""

    def progress(self, line: str) -> None:
        """Nobody watches."""


@pytest.fixture
def context(tmp_path: Path) -> Context:
    deps = dataclasses.replace(REAL, variables={"HF_HOME": str(tmp_path)})
    return Context(transports={}, home=tmp_path, console=Silent(), deps=deps)


def cpu_world(*free_gib: float) -> PlannedCluster:
    placements = tuple(
        Placement(host=f"h{number}", free_bytes=int(gib * 2**30), memory_from="measured")
        for number, gib in enumerate(free_gib, 1)
    )
    return PlannedCluster(placements=placements, wire=link("1gbit"), inside=link("pcie4-x16"))


@pytest.mark.parametrize(
    ("kind", "machines", "said"),
    [
        ("fsdp", cpu_world(64, 64), "no rank has a GPU, so everything is in host memory already"),
        ("hsdp", world("rtx4090"), "one rank has no parts"),
        ("zero-3", world("rtx4090"), "one rank, and strategy: zero-3"),
        ("ddp", cpu_world(64, 64), "activation_offloading: nothing can be offloaded"),
    ],
)
def test_where_an_offload_would_move_nothing_it_is_refused(
    context: Context, kind: str, machines: PlannedCluster, said: str
) -> None:
    strategy = StrategyJob(kind=kind, offload=("parameters",) if kind != "ddp" else ())  # type: ignore[arg-type]
    job = dataclasses.replace(
        JOB, strategy=strategy, activation_checkpointing=True, activation_offloading=kind == "ddp"
    )
    with pytest.raises(UsageError) as caught:
        forecast_job(job, machines, context)
    assert said in str(caught.value)


def test_what_is_moved_off_cards_has_to_fit_into_their_machine(context: Context) -> None:
    """16 bytes a weight, on one host with both cards."""
    job = dataclasses.replace(
        JOB, method=MethodJob(), strategy=StrategyJob(kind="fsdp", offload=("optimizer", "parameters")), batch=8
    )
    both = world("2xrtx4090")
    for gib, fits in ((12, False), (40, True)):
        placements = tuple(dataclasses.replace(placement, ram_bytes=gib * 2**30) for placement in both.placements)
        machines = dataclasses.replace(both, placements=placements)
        if fits:
            assert forecast_job(job, machines, context).runnable is not None
            continue
        with pytest.raises(UsageError) as caught:
            forecast_job(job, machines, context)
        assert "host1 has too little host memory for the offloading" in str(caught.value)


def test_what_the_job_leaves_open_is_decided_and_written_into_it(context: Context) -> None:
    job = dataclasses.replace(JOB, open=("micro_batch", "activation_checkpointing"))
    job_forecast = forecast_job(job, world("rtx4090,rtx4090"), context)
    settled = job_forecast.settled(job)
    assert settled.open == ()
    assert settled.micro_batch > 1
    assert job.batch % settled.micro_batch == 0
    require_startable(settled, job_forecast)


def test_a_run_that_is_resumed_is_planned_again_with_settings_of_each_ranks_own(context: Context) -> None:
    """Its job has the unit in which shares count, which is no rank's micro-batch."""
    job = dataclasses.replace(JOB, batch=32, strategy=StrategyJob(kind="ddp"), draws="sample")
    job = dataclasses.replace(job, open=(*REPLANNED, "exchange"))
    cards = world("pc1=rtx4090,pc2=rtx3060")
    first = forecast_job(job, cards, context)
    assert first.runnable is not None
    settings = first.runnable.scenario.settings
    assert max(own.training.micro_batch for own in settings) > 1
    written = Job.from_json(first.settled(job).to_json())
    assert (written.open, written.micro_batch) == ((), 1)
    assert written.reopened().open == REPLANNED
    again = forecast_job(written.reopened(), cards, context)
    assert again.runnable is not None
    assert again.runnable.scenario.settings == settings
    assert again.settled(written.reopened()) == written


def test_one_setting_for_all_and_what_old_runs_have_stays_as_it_is(context: Context) -> None:
    job = dataclasses.replace(JOB, micro_batch=2, open=("activation_checkpointing",))
    written = forecast_job(job, world("rtx4090"), context).settled(job)
    assert written.reopened().open == ()
    old = {key: value for key, value in written.to_json().items() if key != "chosen"}
    assert Job.from_json(old).reopened().open == ()


@pytest.mark.parametrize(("wire", "exchange"), [("100mbit", "bf16"), ("100gbe", "fp32")])
def test_gradients_are_rounded_where_the_job_leaves_that_open_and_the_network_is_slow(
    context: Context, wire: str, exchange: str
) -> None:
    short = dataclasses.replace(JOB.data, sequence_length=512)
    job = dataclasses.replace(JOB, open=("exchange",), batch=2, data=short, strategy=StrategyJob(kind="ddp"))
    job_forecast = forecast_job(job, world("rtx4090,rtx4090", wire=wire), context)
    settled = job_forecast.settled(job)
    assert (settled.exchange, settled.open) == (exchange, ())
    assert job_forecast.settled(dataclasses.replace(job, open=(), exchange="bf16")).exchange == "bf16"


def test_the_optimizer_of_the_job_is_the_one_that_is_planned(context: Context) -> None:
    job = dataclasses.replace(JOB, method=MethodJob(), optimizer=OptimizerJob(kind="adamw-8bit"))
    cards = world("rtx4090,rtx4090", wire="100gbe")
    job_forecast = forecast_job(job, cards, context)
    require_startable(job, job_forecast)
    plain = forecast_job(dataclasses.replace(job, optimizer=OptimizerJob()), cards, context)
    assert job_forecast.runnable is not None
    assert job_forecast.runnable.training.optimizer == "adamw-8bit"
    assert _states(job_forecast) == pytest.approx(_states(plain) * 2.03125 / 8, rel=1e-3)


def _states(job_forecast: JobForecast) -> int:
    """Bytes of the optimizer's under ddp."""
    assert job_forecast.choice is not None
    ddp = next(candidate for candidate in job_forecast.choice.by_kind if candidate.strategy.kind == "ddp")
    return next(term.num_bytes for term in ddp.tightest.memory.persistent if term.name == "optimizer")


def test_weights_in_parts_have_no_moments_of_8_bits_and_the_way_out_is_said(context: Context) -> None:
    model = ModelJob(path="meta-llama/Llama-3.2-3B")
    job = dataclasses.replace(JOB, model=model, method=MethodJob(), optimizer=OptimizerJob(kind="adamw-8bit"))
    cards = with_memory(world(",".join(["rtx4090"] * 20), wire="100gbe"), *[11.5] * 20)  # short for ends of a pipeline
    job_forecast = forecast_job(job, cards, context)
    with pytest.raises(DoesNotFit, match="does not fit on") as caught:
        require_startable(job, job_forecast)
    assert "but gangline train does not support it with optimizer.kind: adamw-8bit" in caught.value.seen
    assert "optimizer.kind: adamw" in caught.value.fix


def test_what_is_not_open_stays_as_it_was_written(context: Context) -> None:
    job_forecast = forecast_job(dataclasses.replace(JOB, micro_batch=3), world("rtx4090"), context)
    assert job_forecast.settled(dataclasses.replace(JOB, micro_batch=3)).micro_batch == 3


def test_a_batch_near_the_wish_is_written_into_the_job(context: Context, monkeypatch) -> None:
    monkeypatch.setattr(forecast.SpeedTable, "of", unlike)
    job = dataclasses.replace(JOB, batch=32, open=("batch",), precision="fp32")
    job_forecast = forecast_job(job, cpu_world(32, 32, 32), context)
    settled = job_forecast.settled(job)
    assert (settled.batch, settled.micro_batch, settled.open) == (40, 1, ())
    assert job_forecast.divides.startswith("batch 40, about 32 as the job says: shares 20/11/9")
    exact = forecast_job(dataclasses.replace(settled, batch=24), cpu_world(32, 32, 32), context)
    assert exact.settled(dataclasses.replace(settled, batch=24)).batch == 24
    assert exact.divides.startswith("badly: batch 24 reaches 94.3 %")


def unlike(_self: object, placement: Placement, _training: object) -> ComputeModel:
    speed = {"h1": 1.0, "h2": 0.55, "h3": 0.45}[placement.host]
    return ComputeModel(per_token_s=1e-2 / speed, source="measured", spread=0.03)


def test_a_job_that_fits_nowhere_is_refused_with_what_would_fit(context: Context) -> None:
    job = dataclasses.replace(JOB, method=MethodJob(), model=ModelJob(path="meta-llama/Llama-2-7b-hf"))
    job_forecast = forecast_job(job, world("rtx3060,rtx3060"), context)
    with pytest.raises(DoesNotFit, match="does not fit on") as caught:
        require_startable(job, job_forecast)
    assert "GiB are free" in caught.value.seen
    assert "fits with" in caught.value.fix
    assert caught.value.exit_code == 6


def test_4_bits_of_experts_are_refused_by_train_with_their_part_and_planned_by_plan(context: Context) -> None:
    dense = dataclasses.replace(JOB, method=MethodJob(kind="qlora"))
    require_startable(dense, forecast_job(dense, world("rtx4090"), context))
    method = MethodJob(kind="qlora", targets=("q_proj", "v_proj"))
    job = dataclasses.replace(dense, model=ModelJob(path="zai-org/GLM-4.5-Air"), method=method)
    job_forecast = forecast_job(job, world("8xa100-80gb"), context)
    assert job_forecast.choice is not None
    assert job_forecast.choice.best is not None
    assert job_forecast.runnable is None
    with pytest.raises(UsageError, match="cannot do qlora with a mixture of experts") as caught:
        require_startable(job, job_forecast)
    assert "93 % of its weights" in caught.value.seen


def test_further_machines_that_only_slow_the_first_down_are_refused(context: Context, monkeypatch) -> None:
    def measured(_self: object, placement: Placement, _training: object) -> ComputeModel:
        return ComputeModel(per_token_s=1e-7 if placement.host == "h1" else 1e-3, source="measured", spread=0.03)

    monkeypatch.setattr(forecast.SpeedTable, "of", measured)
    job = dataclasses.replace(JOB, method=MethodJob(), model=ModelJob(path="EleutherAI/pythia-70m"), precision="fp32")
    job_forecast = forecast_job(job, cpu_world(32, 32), context)
    with pytest.raises(DoesNotFit, match="h1 alone") as caught:
        require_startable(job, job_forecast)
    assert "--force starts it" in caught.value.fix
    require_startable(job, job_forecast, force=True)
    weighted = cpu_world(32, 32)
    placements = tuple(dataclasses.replace(placement, weight=1.0) for placement in weighted.placements)
    require_startable(job, forecast_job(job, dataclasses.replace(weighted, placements=placements), context))


def test_weights_that_travel_over_a_slow_network_are_not_taken_unasked(context: Context) -> None:
    job = dataclasses.replace(JOB, model=ModelJob(path="meta-llama/Llama-2-13b-hf"), activation_checkpointing=True)
    at_home = with_memory(world("rtx4090,rtx4090,rtx4090", wire="1gbit"), 16, 16, 16)
    taken = forecast_job(job, at_home, context)
    require_startable(job, taken)
    assert taken.runnable is not None
    assert taken.runnable.strategy.kind == "pipeline"
    job = dataclasses.replace(job, precision="fp16")  # which no pipeline does
    with pytest.raises(DoesNotFit, match="of every step is time waiting for the network") as caught:
        require_startable(job, forecast_job(job, at_home, context))
    assert "write strategy: fsdp; to start anyway, add --force" in caught.value.fix
    require_startable(job, forecast_job(job, at_home, context), force=True)
    asked = dataclasses.replace(job, strategy=StrategyJob(kind="fsdp"))
    require_startable(asked, forecast_job(asked, at_home, context))
    together = with_memory(world("2xa100-80gb", inside="nvlink-a100"), 20, 20)
    require_startable(job, forecast_job(job, together, context))


def piped(job: Job, **more: object) -> Job:
    return dataclasses.replace(job, strategy=StrategyJob(kind="pipeline"), **more)  # type: ignore[arg-type]


def test_a_pipeline_is_cut_by_what_is_known_of_its_layers(context: Context) -> None:
    job, two = piped(JOB), world("rtx4090,rtx4090")
    job_forecast = forecast_job(job, two, context)
    require_startable(job, job_forecast)
    assert job_forecast.runnable is not None
    assert sum(job_forecast.runnable.strategy.stages) == 16
    many = world(",".join(["8xa100-80gb"] * 3))
    one = dataclasses.replace(job, strategy=StrategyJob(kind="pipeline", replicas=1))
    with pytest.raises(UsageError, match="needs a layer for every rank") as caught:
        forecast_job(one, many, context)
    assert "24 ranks, and a model of 16 layers" in caught.value.seen
    job_forecast = forecast_job(job, many, context)
    assert job_forecast.runnable is not None
    assert job_forecast.runnable.strategy.replicas > 1
    unknown = piped(JOB, model=ModelJob(path="some/model"))
    require_startable(unknown, forecast_job(unknown, world("rtx4090"), context))  # one rank has all of them
    with pytest.raises(UsageError, match="needs to know the layers") as caught:
        require_startable(unknown, forecast_job(unknown, two, context))
    assert "unknown" in caught.value.seen
    assert "config.json" in caught.value.fix


@pytest.mark.parametrize(
    ("hosts", "replicas", "fix"),
    [
        ("5xa100-80gb", 2, "write replicas: 1 (or auto)"),
        ("4xa100-80gb", 4, "write replicas: 1 or 2"),
        ("rtx4090", 2, "write replicas: 1 (or auto)"),
    ],
)
def test_ranks_that_do_not_make_so_many_pipelines_are_refused(
    context: Context, hosts: str, replicas: int, fix: str
) -> None:
    job = dataclasses.replace(JOB, strategy=StrategyJob(kind="pipeline", replicas=replicas))
    with pytest.raises(UsageError, match=f"ranks do not make {replicas} pipelines") as caught:
        forecast_job(job, world(hosts), context)
    assert "as many ranks in each, 2 or more" in caught.value.seen
    assert fix in caught.value.fix


def test_what_a_pipeline_cannot_do_is_refused_with_what_can(context: Context) -> None:
    two = with_memory(world("a100-80gb,a100-80gb"), 79, 79)
    full = piped(JOB, method=MethodJob())
    assert forecast_job(full, two, context).runnable is not None  # its head is its embedding table
    for method in ("lora", "qlora"):
        half = piped(JOB, precision="fp16", method=MethodJob(kind=method))
        with pytest.raises(UsageError, match="cannot do pipeline with precision: fp16") as caught:
            require_startable(half, forecast_job(half, two, context))
        assert "precision: fp32" in caught.value.fix
    parts = dataclasses.replace(full, strategy=StrategyJob(kind="fsdp"), precision="fp16")
    with pytest.raises(UsageError, match="cannot do fsdp with precision: fp16 and method: full"):
        require_startable(parts, forecast_job(parts, two, context))


def test_a_pipeline_without_room_is_not_started_without_its_layers(context: Context) -> None:
    job = piped(JOB, model=ModelJob(path="meta-llama/Llama-2-7b-hf"), precision="fp32")
    tiny, roomy = (forecast_job(job, cpu_world(gib, gib), context) for gib in (4, 32))
    assert tiny.runnable is None
    assert roomy.choice is not None
    unsure = dataclasses.replace(roomy, choice=dataclasses.replace(roomy.choice, runnable=None))
    for job_forecast in (tiny, unsure):
        with pytest.raises(DoesNotFit, match="does not fit on"):
            require_startable(job, job_forecast)


def in_folder(folder: Path, name: str, **more: object) -> ModelJob:
    """A published model's configuration."""
    (folder / "config.json").write_text(json.dumps({**PUBLISHED[name][0], **more}), encoding="utf-8")
    return ModelJob(path=str(folder))


@pytest.mark.parametrize(
    ("name", "more", "why"),
    [
        ("GPT-2 XL", {}, "the family gpt2, whose decoder cannot be entered between layers"),
        ("Granite-3.0-8B", {}, "the family granite, whose"),
        ("StarCoder2-3B", {"embedding_dropout": 0.1}, "embeddings (embedding_dropout in config.json)"),
        ("StarCoder2-3B", {"embedding_dropout": 0.0}, ""),
    ],
)
def test_a_model_that_no_rank_can_begin_in_the_middle_of_is_refused_as_a_pipeline(
    context: Context, tmp_path: Path, name: str, more: dict[str, object], why: str
) -> None:
    two = with_memory(world("a100-80gb,a100-80gb"), 79, 79)
    job = piped(JOB, model=in_folder(tmp_path, name, **more))
    job_forecast = forecast_job(job, two, context)
    if not why:
        require_startable(job, job_forecast)
        return
    with pytest.raises(UsageError, match="cannot do pipeline with a model") as caught:
        require_startable(job, job_forecast)
    assert why in caught.value.what
    assert "in place of embeddings" in caught.value.seen
    assert "write strategy: fsdp" in caught.value.fix
    auto = dataclasses.replace(job, strategy=StrategyJob())
    require_startable(auto, forecast_job(auto, two, context))


def test_adapters_in_the_first_layers_alone_are_refused_as_a_pipeline(context: Context) -> None:
    two = with_memory(world("a100-80gb,a100-80gb"), 79, 79)
    for layers, saved, is_refused in (((0, 1), (), True), ((0, 1), ("lm_head",), False), ((0, 15), (), False)):
        method = MethodJob(kind="lora", layers=layers, modules_to_save=saved)
        job = piped(JOB, method=method)
        job_forecast = forecast_job(job, two, context)
        if not is_refused:
            require_startable(job, job_forecast)
            continue
        with pytest.raises(UsageError, match="cannot do pipeline with nothing to train on rank 1") as caught:
            require_startable(job, job_forecast)
        assert "write strategy: fsdp" in caught.value.fix
        auto = dataclasses.replace(job, strategy=StrategyJob())
        require_startable(auto, forecast_job(auto, two, context))


def test_few_bits_are_for_linears_and_a_model_of_other_matrices_is_refused(context: Context, tmp_path: Path) -> None:
    for name, is_refused in (("GPT-2 XL", True), ("Falcon-7B", False), ("BLOOM-7B1", False)):
        job = dataclasses.replace(JOB, method=MethodJob(kind="qlora"), model=in_folder(tmp_path, name))
        job_forecast = forecast_job(job, world("a100-80gb"), context)
        if not is_refused:
            require_startable(job, job_forecast)
            continue
        with pytest.raises(UsageError, match="cannot do qlora with this model") as caught:
            require_startable(job, job_forecast)
        assert "no nn.Linear (gpt2)" in caught.value.seen
        assert "method: lora" in caught.value.fix


@pytest.mark.parametrize("kind", ["fsdp", "hsdp", "zero-1", "zero-2", "zero-3", "tp", "pipeline"])
@pytest.mark.parametrize("model", [JOB.model.path, "some/model"])
def test_where_ranks_share_a_gpu_what_wants_one_for_each_is_refused(context: Context, kind: str, model: str) -> None:
    asked = StrategyJob(kind=kind)  # type: ignore[arg-type]
    job = dataclasses.replace(JOB, strategy=asked, model=ModelJob(path=model))
    with pytest.raises(UsageError, match=f"strategy: {kind} needs a GPU for every rank") as caught:
        forecast_job(job, crowded(world("4xa100-80gb,2xa100-80gb"), "host2"), context)
    assert "more ranks than GPUs on host2;" in caught.value.seen
    assert "set slots of every host to the number of its GPUs" in caught.value.fix


def test_where_ranks_share_a_gpu_the_others_go_on_and_want_of_room_names_the_slots(context: Context) -> None:
    shared = crowded(world("2xa100-80gb,2xa100-80gb"), "host1", "host2")
    for kind in ("auto", "ddp", "local-sgd"):
        method = MethodJob() if kind == "local-sgd" else JOB.method
        job = dataclasses.replace(JOB, method=method, strategy=StrategyJob(kind=kind))  # type: ignore[arg-type]
        job_forecast = forecast_job(job, shared, context)
        require_startable(job, job_forecast)
        assert job_forecast.runnable is not None
        assert job_forecast.runnable.strategy.kind == ("local-sgd" if kind == "local-sgd" else "ddp")
    alone = crowded(world("a100-80gb,a100-80gb"), "host1", "host2")  # hosts of one computer: each has whole layers
    sliced = dataclasses.replace(JOB, strategy=StrategyJob(kind="tp"))
    require_startable(sliced, forecast_job(sliced, alone, context))
    large = dataclasses.replace(JOB, model=ModelJob(path="meta-llama/Llama-2-7b-hf"))
    short = with_memory(shared, 8, 8, 8, 8)
    with pytest.raises(DoesNotFit, match="does not fit on") as caught:
        require_startable(large, forecast_job(large, short, context))
    assert caught.value.fix.startswith("set slots of host1, host2 to the number of its GPUs")
    require_startable(
        large, forecast_job(large, with_memory(world("2xa100-80gb,2xa100-80gb"), 16, 16, 16, 16), context)
    )


@pytest.mark.parametrize("model", [JOB.model.path, "some/model"])
def test_weights_in_the_format_of_products_are_refused_where_a_card_makes_that_fp16(
    context: Context, model: str
) -> None:
    job = dataclasses.replace(JOB, parameters="compute", model=ModelJob(path=model))
    with pytest.raises(UsageError, match=r"precision\.parameters: fp16 weights cannot be trained") as caught:
        forecast_job(job, world("rtx4090,rtx2080ti"), context)
    assert "RTX 2080 Ti cannot compute in bf16, so all GPUs compute in fp16" in caught.value.seen
    assert "precision.compute: fp32" in caught.value.fix
    for machines in (world("rtx4090,rtx3090"), cpu_world(32, 32)):
        require_startable(job, forecast_job(job, machines, context))
    for more in ({"parameters": "auto"}, {"precision": "fp32"}):
        forecast_job(dataclasses.replace(job, **more), world("rtx4090,rtx2080ti"), context)  # type: ignore[arg-type]


def test_bf16_that_the_job_names_is_refused_where_a_card_has_none(context: Context) -> None:
    job = dataclasses.replace(JOB, precision="bf16")
    with pytest.raises(UsageError, match=r"precision\.compute: RTX 2080 Ti cannot compute in bf16") as caught:
        require_startable(job, forecast_job(job, world("rtx4090,rtx2080ti"), context))
    assert "such a card in host2" in caught.value.seen
    require_startable(job, forecast_job(job, world("rtx4090,rtx3090"), context))


def test_layers_that_ranks_cannot_have_between_them_are_refused(context: Context) -> None:
    asked = StrategyJob(kind="tp")
    job = dataclasses.replace(JOB, strategy=asked, batch=24)
    job_forecast = forecast_job(job, world("4xa100-80gb,4xa100-80gb"), context)
    require_startable(job, job_forecast)
    assert job_forecast.runnable is not None
    assert (job_forecast.runnable.strategy.kind, job_forecast.runnable.strategy.shard_size) == ("tp", 4)
    with pytest.raises(UsageError, match="needs equally many ranks on every host") as caught:
        forecast_job(job, world("2xa100-80gb,a100-80gb"), context)
    assert caught.value.seen.startswith("2 on ")
    with pytest.raises(
        UsageError, match="32 attention heads, 8 key-value heads, 8,192 of the feed-forward width, which 3 ranks"
    ) as caught:
        require_startable(job, forecast_job(job, world("3xa100-80gb"), context))
    assert "set slots of every host to another number" in caught.value.fix


def test_where_the_network_is_too_slow_for_gradients_rounds_are_offered_and_taken_only_when_asked_for(
    context: Context, monkeypatch
) -> None:
    def measured(_self: object, _placement: Placement, _training: object) -> ComputeModel:
        return ComputeModel(per_token_s=1e-5, source="measured", spread=0.03)

    monkeypatch.setattr(forecast.SpeedTable, "of", measured)
    job = dataclasses.replace(JOB, method=MethodJob(), model=ModelJob(path="EleutherAI/pythia-70m"), precision="fp32")
    with pytest.raises(DoesNotFit, match="alone would be faster") as caught:
        require_startable(job, forecast_job(job, cpu_world(32, 32), context))
    assert "strategy: local-sgd would take about" in caught.value.fix
    asked = dataclasses.replace(job, strategy=StrategyJob(kind="local-sgd", inner_steps=20))
    job_forecast = forecast_job(asked, cpu_world(32, 32), context)
    require_startable(asked, job_forecast)
    assert job_forecast.runnable is not None
    assert (job_forecast.runnable.strategy.kind, job_forecast.runnable.strategy.inner_steps) == ("local-sgd", 20)


def test_a_model_of_which_nothing_is_known_is_started_all_the_same(context: Context) -> None:
    job = dataclasses.replace(JOB, model=ModelJob(path="some/model"), open=("micro_batch",))
    job_forecast = forecast_job(job, world("rtx4090"), context)
    assert job_forecast.choice is None
    assert "unknown" in job_forecast.unknown
    require_startable(job, job_forecast)
    assert job_forecast.settled(job).open == ()
    wished = dataclasses.replace(job, batch=30, micro_batch=4, open=("batch",))
    assert (job_forecast.settled(wished).batch, job_forecast.settled(wished).open) == (28, ())
    assert job_forecast.divides == ""
    assert ways_of(job_forecast) == []


def test_a_broken_configuration_is_told_and_left_to_the_trainer(context: Context, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    job_forecast = forecast_job(dataclasses.replace(JOB, model=ModelJob(path=str(tmp_path))), world("rtx4090"), context)
    assert isinstance(job_forecast.error, ModelError)
    assert job_forecast.choice is None


@pytest.mark.parametrize(
    ("machines", "asked", "expected"),
    [
        ("rtx4090", "auto", "bf16"),
        ("rtx4090,t4", "auto", "fp16"),
        ("rtx4090", "fp32", "fp32"),
    ],
)
def test_the_number_format_is_what_the_least_able_card_can_do(machines: str, asked: str, expected: str) -> None:
    job = dataclasses.replace(JOB, precision=asked)
    assert training_of(job, world(machines)).compute == expected
    assert training_of(job, cpu_world(8)).compute == ("fp32" if asked == "auto" else expected)


def test_eager_attention_keeps_its_matrix() -> None:
    job = dataclasses.replace(JOB, model=dataclasses.replace(JOB.model, attention="eager"))
    assert training_of(job, world("rtx4090")).stack.attention != GANGLINE.attention


def test_what_if_adds_takes_away_and_rewires() -> None:
    before = with_memory(world("a=rtx4090,b=rtx3090"), 20, 20)
    after = changed(before, WhatIf(add=("c=rtx5090",), without=("b",), link="10gbit"))
    assert after.hosts == ("a", "c")
    assert after.wire.bytes_per_s > before.wire.bytes_per_s
    assert after.placements[0].free_bytes == before.placements[0].free_bytes


def test_a_counted_model_has_the_numbers_that_were_counted() -> None:
    shapes = [
        {"name": "q_proj", "rows": 64, "columns": 64, "bias": True, "count": 2},
        {"name": "up_proj", "rows": 128, "columns": 64, "bias": False, "count": 2},
    ]
    linears = 2 * (64 * 64 + 128 * 64)
    record = {"layers": 2, "shapes": shapes, "linears": linears, "experts": 0, "tied": True, "embeddings": 64 * 512}
    record |= {"others": 2 * 64 + 300}
    config = {"model_type": "new", "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 512}
    shape = counted(config, record)
    assert shape.num_parameters == linears + 64 * 512 + 428
    assert [linear.part for linear in shape.layers[0].linears] == ["attention", "mlp"]
    with pytest.raises(ValueError, match="layers"):
        counted(config, {**record, "layers": 3})
