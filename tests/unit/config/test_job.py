"""What job.yaml means: defaults, shorthands, paths, and every field of the resolved job within reach."""

import dataclasses
import json
import os
from pathlib import Path

import pytest

from gangline.chat_templates import CHAT_TEMPLATES
from gangline.config.load import load_job
from gangline.errors import SpecError
from gangline.runs.job import (
    ChatTemplateJob,
    DataJob,
    EarlyStoppingJob,
    FailureJob,
    Job,
    LearnJob,
    MethodJob,
    ModelJob,
    OptimizerJob,
    OuterJob,
    ScheduleJob,
    SliceJob,
    SourceJob,
    StrategyJob,
)

OPEN = ("micro_batch", "activation_checkpointing", "activation_offloading", "sequence_length")
"""What the plan decides on where a job says nothing of it."""
MINIMAL = "model: ./llama\ndata: {train: rows.jsonl}\nbatch: 8\n"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "llama").mkdir()
    for name in ("rows.jsonl", "more.jsonl", "test.jsonl"):
        (tmp_path / name).touch()
    return tmp_path


def load(folder, text, *overrides):
    (folder / "job.yaml").write_text(text, encoding="utf-8")
    return load_job(folder / "job.yaml", overrides)


def refused(folder, text, *overrides):
    with pytest.raises(SpecError) as caught:
        load(folder, text, *overrides)
    return str(caught.value)


def test_defaults_are_those_of_the_resolved_job(folder):
    expected = Job(
        name="job",
        model=ModelJob(path=str(folder / "llama")),
        data=DataJob(train=SourceJob(files=(str(folder / "rows.jsonl"),))),
        batch=8,
        micro_batch=1,
        draws="sample",
        kernels=("auto",),
        open=OPEN,
    )
    assert load(folder, MINIMAL) == expected


def test_a_run_of_before_keeps_dropout_by_micro_batch_and_the_operators_of_torch(folder):
    written = load(folder, MINIMAL).to_json()
    assert Job.from_json(written).draws == "sample"
    assert Job.from_json(written).kernels == ("auto",)
    del written["draws"], written["kernels"]
    assert Job.from_json(written).draws == "micro_batch"
    assert Job.from_json(written).kernels == ("torch",)


@pytest.mark.parametrize(
    ("word", "kernels"),
    [
        ("torch", ("torch",)),
        ("packed-attention", ("packed-attention",)),
        ("[packed-attention, packed-attention]", ("packed-attention",)),
    ],
)
def test_kernels_are_one_word_or_names(folder, word, kernels):
    assert load(folder, MINIMAL, f"kernels={word}").kernels == kernels


@pytest.mark.parametrize(
    ("words", "seen"),
    [
        (["kernels=packed-attention", "data.packing=false"], "packed-attention with data.packing: false"),
        (["kernels=lora", "method=full"], "lora with method: full"),
        (["kernels=lora", "method={kind: lora, dora: true}"], "lora with method.dora: true"),
    ],
)
def test_a_kernel_for_which_the_job_has_nothing_to_do_is_a_mistake(folder, words, seen):
    assert seen in refused(folder, MINIMAL, *words)


def test_auto_beside_the_name_of_a_kernel_is_a_mistake(folder):
    said = refused(folder, MINIMAL, "kernels=[packed-attention, auto]")
    assert "expected auto, torch, or names of kernels" in said
    assert '"auto" beside other words' in said


EVERYTHING = """\
name: tuned
model: {path: owner/name, revision: COMMIT, trust_remote_code: true, start: random, attention: eager}
method: {kind: lora, rank: 4, alpha: 8, dropout: 0.1, targets: [q_proj, v_proj], exclude: up_proj, layers: [0-3, 7],
  rank_pattern: {q_proj: 8}, alpha_pattern: {q_proj: 4}, rslora: true, dora: true, init: gaussian,
  modules_to_save: lm_head, train_tokens: added, target_parameters: mlp.experts.down_proj}
tokens: {add: [<tool>], special: {pad_token: <pad>}}
data:
  train: {hub: openai/gsm8k, config: main, split: "train[:9]", revision: v1, max_samples: 8, weight: 2, format: chat,
    fields: {completion: output}, roles: {bot: assistant}}
  eval: [test.jsonl]
  format: chat
  fields: {prompt: question, completion: answer}
  roles: {gpt: assistant}
  max_samples: 9
  shuffle: true
  deduplicate: true
  sequence_length: 256
  packing: false
  overlong: fail
  skip_bad_rows: true
  learn: {end_token: false}
batch: 32
micro_batch: 4
steps: 500
seed: 7
precision: {compute: fp32, parameters: compute}
activation_checkpointing: true
exchange: bf16
kernels: rms-norm
optimizer: {kind: adamw-8bit, learning_rate: 1e-4, betas: [0.8, 0.95], epsilon: 1e-6, weight_decay: 0.1, clip_norm: none}
schedule: {kind: linear, warmup_steps: 50, warmup_from_zero: true, final_ratio: 0.1}
evaluation: {every_steps: 20, at_start: false, max_samples: 100}
checkpoint: {every_steps: 10, every_minutes: none, keep_last: 5, keep_best: false, asynchronous: false, each_host: part,
  on_failure: continue}
failures: {restarts: 2, wait: 1.5 min, without: false, take_back: false, smaller_micro_batch: false}
report: {tensorboard: false, wandb: my-project}
early_stopping: {patience: 2, min_improvement: 0.01}
max_skipped_steps: 0
notify: {to: env:HOOK, events: failed}
""".replace("COMMIT", "0123abcdef" * 4)


def fields_left_at_default(value, default):
    if not dataclasses.is_dataclass(value):
        return []
    found = []
    for field in dataclasses.fields(value):
        mine = getattr(value, field.name)
        other = getattr(default, field.name, None)
        if dataclasses.is_dataclass(mine) and type(mine) is type(other):
            found += [f"{field.name}.{name}" for name in fields_left_at_default(mine, other)]
        elif mine == other:
            found.append(field.name)
    return found


def test_every_field_of_the_resolved_job_is_within_reach(folder):
    other = load(folder, MINIMAL)
    # `split`, `evaluation_fraction`, `every_epochs`, `warmup_ratio`, `bits`, `plugins`, `strategy` and what is learned
    # of conversations are reached by the next tests
    strategy = {f"strategy.{name}" for name in fields_left_at_default(other.strategy, other.strategy)}
    allowed = {
        "data.train.split",
        "data.train.mix",
        "data.evaluation_fraction",
        *(f"optimizer.{key}" for key in ("momentum", "nesterov", "scale")),
        *(f"schedule.{key}" for key in ("warmup_ratio", "decay_steps", "decay_ratio", "decay", "cycles", "power")),
        "schedule.timescale",
        "evaluation.every_epochs",
        "checkpoint.every_epochs",
        "data.chat_template",
        *(f"data.learn.{name}" for name in ("roles", "thinking", "weight_field")),
        "method.bits",
        "method.quantise_experts",  # of qlora, as `bits` is: test_method.py
        "method.adapter",
        "activation_offloading",
        "compile",  # not with dropout
        "pause_at",  # a sweep sets it: tests/unit/sweep/test_drive.py
        "callbacks",  # of plug-ins alone: tests/process/test_plugin_examples.py
        "plugins",
        "chosen",  # a plan sets it: tests/unit/decide/test_forecast.py
        "draws",  # old runs alone have another value
        "schema_version",
        *strategy,
    }
    assert set(fields_left_at_default(load(folder, EVERYTHING), other)) == allowed


@pytest.mark.parametrize(
    ("words", "seen", "fix"),
    [
        (["precision.compute=fp64", "precision.parameters=fp32"], "fp32 for trained weights", "`compute: fp32`"),
        (["precision.compute=fp16", "precision.parameters=compute"], "fp16 for trained weights", "`compute: bf16`"),
    ],
)
def test_formats_that_do_not_go_together_are_refused_beside_all_other_mistakes(folder, words, seen, fix):
    said = refused(folder, MINIMAL, *words, "strategy.replicas=2")
    assert said.startswith("2 mistakes")
    assert "precision.parameters" in said
    assert seen in said
    assert fix in said
    for parameters in ("auto", "compute"):
        assert load(folder, MINIMAL, "precision.compute=fp64", f"precision.parameters={parameters}")
    for parameters in ("auto", "fp32"):
        assert load(folder, MINIMAL, "precision.compute=fp16", f"precision.parameters={parameters}")
    assert load(folder, MINIMAL, "precision.parameters=compute").precision == "auto"  # the plan finds out what that is


def test_parts_of_the_run_and_of_an_epoch_stand_for_steps_and_not_beside_them(folder):
    parts = ["schedule.warmup_ratio=0.1", "evaluation.every_epochs=0.25", "checkpoint.every_epochs=2", "data.eval=0.1"]
    job = load(folder, MINIMAL, *parts)
    assert (job.schedule.warmup_ratio, job.evaluation.every_epochs, job.checkpoint.every_epochs) == (0.1, 0.25, 2)
    steps = ["schedule.warmup_steps=0", "evaluation.every_steps=9", "checkpoint.every_steps=9"]
    said = refused(folder, MINIMAL, *parts, *steps)
    assert said.startswith("3 mistakes")
    for first, second in (("every_steps", "every_epochs"), ("warmup_steps", "warmup_ratio")):
        assert f"both {first} and {second}" in said
    assert load(folder, MINIMAL, *parts, "evaluation.every_steps=none").evaluation.every_epochs == 0.25
    assert "data.eval beside it" in refused(folder, MINIMAL, "evaluation.every_epochs=1")


def test_every_kind_of_schedule_has_its_own_keys(folder):
    wsd = ["schedule.kind=wsd", "schedule.decay_steps=20", "schedule.decay=1-sqrt", "schedule.final_ratio=0.1"]
    assert load(folder, MINIMAL, *wsd).schedule == ScheduleJob(
        kind="wsd", decay_steps=20, decay="1-sqrt", final_ratio=0.1
    )
    for kind, key in (("cosine-restarts", "cycles=3"), ("polynomial", "power=2"), ("inverse-sqrt", "timescale=9")):
        assert load(folder, MINIMAL, f"schedule.kind={kind}", f"schedule.{key}").schedule.kind == kind
        said = refused(folder, MINIMAL, "schedule.kind=cosine", f"schedule.{key}")
        assert f"with kind: {kind} only" in said
    assert "both decay_steps and decay_ratio" in refused(folder, MINIMAL, *wsd, "schedule.decay_ratio=0.2")
    said = refused(folder, MINIMAL, *wsd, "steps=30", "schedule.warmup_steps=11")
    assert "a warm-up of 11 steps and a decay of 20 in 30" in said
    assert load(folder, MINIMAL, *wsd, "steps=31", "schedule.warmup_steps=11")


def test_every_optimizer_has_its_own_keys_and_defaults(folder):
    def numbers(*words):
        return load(folder, MINIMAL, *words).optimizer

    assert numbers("optimizer=adafactor") == OptimizerJob(kind="adafactor", epsilon=1e-30)
    assert numbers("optimizer=lion") == OptimizerJob(kind="lion", beta1=0.9, beta2=0.99)
    assert numbers("optimizer.kind=lion", "optimizer.betas=[0.95, 0.98]").beta2 == 0.98
    assert numbers("optimizer=muon") == OptimizerJob(kind="muon", momentum=0.95, nesterov=True)
    assert numbers("optimizer.kind=muon", "optimizer.nesterov=false", "optimizer.scale=original") == OptimizerJob(
        kind="muon", momentum=0.95, scale="original"
    )
    assert numbers("optimizer.kind=sgd", "optimizer.momentum=0.9", "optimizer.clip_norm=none") == OptimizerJob(
        kind="sgd", momentum=0.9, clip_norm=None
    )
    assert numbers("optimizer.beta2=0.95") == OptimizerJob(beta2=0.95)
    for kind, key in (("adamw", "momentum=0.9"), ("sgd", "betas=[0.9, 0.95]"), ("lion", "epsilon=1e-8")):
        said = refused(folder, MINIMAL, f"optimizer.kind={kind}", f"optimizer.{key}")
        assert f"optimizer.{key.partition('=')[0]}" in said
        assert f"with kind: {kind}" in said
    assert "nesterov without a momentum" in refused(folder, MINIMAL, "optimizer.kind=sgd", "optimizer.nesterov=true")


@pytest.mark.parametrize("strategy", ["fsdp", "hsdp", "tp", "zero-2", "local-sgd"])
def test_an_optimizer_that_a_strategy_does_not_do_exactly_is_refused_beside_it(folder, strategy):
    said = refused(folder, MINIMAL, f"strategy={strategy}", "optimizer=muon", "method=full")
    assert f"optimizer: muon with strategy: {strategy}" in said
    assert "write `kind: adamw`" in said


def test_early_stopping_needs_losses_to_compare(folder):
    words = ["data.eval=0.1", "evaluation.every_epochs=0.5", "early_stopping=3"]
    assert load(folder, MINIMAL, *words).early_stopping == EarlyStoppingJob(patience=3)
    assert load(folder, MINIMAL, *words[:2], "early_stopping=none").early_stopping is None
    assert "no rows to evaluate on" in refused(folder, MINIMAL, *words[1:])
    assert "at the end of the run only" in refused(folder, MINIMAL, words[0], words[2])
    assert "early_stopping.patience" in refused(folder, MINIMAL, *words[:2], "early_stopping.min_improvement=0.1")


@pytest.mark.parametrize("kind", ["fsdp", "hsdp"])
def test_every_weight_in_parts_has_no_fp16(folder, kind):
    assert load(folder, MINIMAL, f"strategy={kind}").strategy == StrategyJob(kind=kind)
    assert load(folder, MINIMAL, f"strategy={kind}", "precision=fp16", "method=lora").precision == "fp16"
    with pytest.raises(SpecError, match="gradients in parts have no loss scale"):
        load(folder, MINIMAL, f"strategy={kind}", "precision=fp16", "method=full")


def test_a_pipeline_trains_whatever_the_method_but_not_in_fp16(folder):
    for method in ("full", "lora", "qlora"):
        assert load(folder, MINIMAL, "strategy=pipeline", f"method={method}").strategy == StrategyJob(kind="pipeline")
        with pytest.raises(SpecError, match="gradients in parts have no loss scale"):
            load(folder, MINIMAL, "strategy=pipeline", "precision=fp16", f"method={method}")
    assert load(folder, MINIMAL, "strategy=pipeline", "method=lora", "method.dropout=0.1").method.dropout == 0.1
    with pytest.raises(SpecError, match="every adapter has one device, and its gradient stays"):
        load(folder, MINIMAL, "strategy.kind=pipeline", "strategy.replicas=1", "exchange=bf16", "method=lora")
    for replicas, kept in (("2", 2), ("auto", None)):
        job = load(folder, MINIMAL, "strategy.kind=pipeline", f"strategy.replicas={replicas}", "exchange=bf16")
        assert job.strategy == StrategyJob(kind="pipeline", replicas=kept)


def test_what_is_in_parts_and_layers_inputs_may_lie_in_the_machines_memory(folder):
    words = ("strategy.kind=hsdp", "strategy.offload=[optimizer, parameters]", "method=full")
    job = load(folder, MINIMAL, *words, "activation_checkpointing=true", "activation_offloading=true")
    assert (job.strategy.offload, job.activation_offloading) == (("optimizer", "parameters"), True)
    assert load(folder, MINIMAL, "strategy.kind=fsdp", "strategy.offload=parameters", "method=qlora")


@pytest.mark.parametrize(
    ("words", "key", "fix"),
    [
        (["strategy.kind=fsdp", "strategy.offload=parameters", "method=full"], "strategy.offload", "[optimizer, param"),
        (
            ["strategy.kind=hsdp", "strategy.offload=[optimizer, parameters]", "method=lora"],
            "strategy.offload",
            "lie together",
        ),
        (
            ["activation_offloading=true", "activation_checkpointing=false"],
            "activation_offloading",
            "write `activation_checkpointing: true`",
        ),
        (
            ["activation_offloading=true", "activation_checkpointing=true", "strategy=tp"],
            "activation_offloading",
            "fsdp",
        ),
    ],
)
def test_what_cannot_be_moved_is_refused_with_what_to_write(folder, words, key, fix):
    said = refused(folder, MINIMAL, *words)
    assert key in said
    assert fix in said


def test_frozen_weights_have_4_or_8_bits(folder):
    with pytest.raises(SpecError, match=r"expected one of 4, 8(.|\n)*take the quotes away: 8"):
        load(folder, MINIMAL, "method.kind=qlora", 'method.bits="8"')
    assert load(folder, MINIMAL, "method.kind=qlora", "method.bits=8").method.bits == 8


def test_layers_that_devices_compute_together_are_neither_in_fp16_nor_in_4_bits_nor_have_moments_of_8(folder):
    for method in ("full", "lora"):
        assert load(folder, MINIMAL, "strategy=tp", f"method={method}").strategy == StrategyJob(kind="tp")
        with pytest.raises(SpecError, match="precision: fp16 with strategy: tp; expected bf16"):
            load(folder, MINIMAL, "strategy=tp", "precision=fp16", f"method={method}")
        with pytest.raises(SpecError, match="optimizer: adamw-8bit with strategy: tp; expected adamw"):
            load(folder, MINIMAL, "strategy=tp", "optimizer=adamw-8bit", f"method={method}")
    with pytest.raises(SpecError, match="method: qlora with strategy: tp"):
        load(folder, MINIMAL, "strategy=tp", "method=qlora")


EIGHT_BITS = ["adamw-8bit", "paged-adamw-8bit"]


@pytest.mark.parametrize("kind", EIGHT_BITS)
@pytest.mark.parametrize("strategy", ["auto", "ddp", "fsdp", "hsdp"])
def test_moments_may_have_8_bits_where_weights_are_whole_and_gradients_are_exchanged(folder, kind, strategy):
    method = "full" if strategy in ("auto", "ddp") else "lora"
    job = load(folder, MINIMAL, f"optimizer={kind}", f"strategy={strategy}", f"method={method}", "precision=fp16")
    assert job.optimizer == OptimizerJob(kind=kind)


@pytest.mark.parametrize("kind", EIGHT_BITS)
@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("strategy=fsdp", "strategy: fsdp and method: full"),
        ("strategy=hsdp", "strategy: hsdp and method: full"),
        ("strategy=local-sgd", "hosts move apart by AdamW"),
        ("precision=fp64", "fp64 products pointless"),
    ],
)
def test_moments_of_8_bits_elsewhere_are_refused_with_what_to_write(folder, kind, words, told):
    said = refused(folder, MINIMAL, f"optimizer.kind={kind}", words)
    assert "optimizer.kind" in said
    assert kind in said
    assert told in said
    assert "write `kind: adamw`" in said
    load(folder, MINIMAL, "optimizer.kind=adamw", words)


def test_hosts_may_train_apart(folder):
    assert load(folder, MINIMAL, "strategy=local-sgd").strategy == StrategyJob(kind="local-sgd")
    words = "strategy: {kind: local-sgd, inner_steps: 20, payload: bf16, outer: {learning_rate: 0.5, momentum: 0}}\n"
    job = load(folder, MINIMAL + words)
    left = ["replicas", "offload", "offload_to", "deepspeed"]
    assert fields_left_at_default(job.strategy, StrategyJob()) == left
    assert job.strategy.outer == OuterJob(learning_rate=0.5, momentum=0.0)
    assert Job.from_json(json.loads(json.dumps(job.to_json()))) == job


FROM_TRANSFORMERS = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": "auto", "total_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "none"},
        "overlap_comm": True,
        "reduce_bucket_size": "auto",
    },
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}


def with_deepspeed(folder, **keys):
    (folder / "ds.json").write_text(json.dumps({**FROM_TRANSFORMERS, **keys}), encoding="utf-8")
    return MINIMAL + "strategy: {kind: zero-3, offload: optimizer, deepspeed: ds.json}\n"


def test_what_a_file_of_deepspeed_says_besides_the_job_is_passed_on(folder):
    job = load(folder, with_deepspeed(folder))
    assert (job.strategy.kind, job.strategy.offload) == ("zero-3", ("optimizer",))
    assert job.strategy.deepspeed == {
        "zero_optimization": {
            "offload_optimizer": {"pin_memory": True},
            "overlap_comm": True,
            "reduce_bucket_size": "auto",
        },
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
    }
    assert Job.from_json(json.loads(json.dumps(job.to_json()))) == job


def test_where_it_says_the_same_as_the_job_in_figures_it_is_as_good(folder):
    agreeing = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-4, "betas": [0.9, 0.999], "weight_decay": 0}},
        "communication_data_type": "fp32",
        "bf16": {"enabled": False},
    }
    one = "micro_batch=1"
    assert load(folder, with_deepspeed(folder, **agreeing), one) == load(folder, with_deepspeed(folder), one)


@pytest.mark.parametrize(
    ("keys", "name", "expected"),
    [
        ({"train_batch_size": 128}, "train_batch_size is 128", "8, as the job says (batch)"),
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps is 4", "it follows from batch"),
        ({"gradient_clipping": 0.5}, "gradient_clipping is 0.5", "optimizer.clip_norm"),
        ({"fp16": {"enabled": True}}, "fp16.enabled is true", "fp32 or bf16"),
        ({"bf16": {"enabled": True}}, "bf16.enabled is true", "(precision)"),
        ({"optimizer": {"type": "Lamb"}}, 'optimizer.type is "Lamb"', "AdamW"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1}}}, "optimizer.params.lr is 1", "optimizer.learning_rate"),
        ({"scheduler": {"type": "WarmupLR"}}, 'scheduler.type is "WarmupLR"', "schedule.kind: cosine"),
        ({"zero_optimization": {"stage": 2}}, "zero_optimization.stage is 2", "3, as the job says"),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, "offload_param.device", "add parameters"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "offload_optimizer.device", "`offload_to`"),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "offload_param.device", "are not done"),
        ({"aio": {"queue_depth": 16}}, "aio", "write `offload_to` in the job"),
        ({"zero_optimization": {"sub_group_size": "auto"}}, "sub_group_size", "the job says nothing of it"),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel", "delete it"),
        ({"amp": "auto"}, "amp", "precision: bf16"),
    ],
)
def test_where_it_says_something_else_it_is_refused_by_its_name(folder, keys, name, expected):
    said = refused(folder, with_deepspeed(folder, **keys))
    assert "strategy.deepspeed" in said
    assert name in said
    assert expected in said


def test_states_lie_on_a_disk_where_the_job_says_so_and_the_file_may_say_it_too(folder):
    lies = {"device": "nvme", "nvme_path": "/scratch", "buffer_count": 5}
    file = with_deepspeed(folder, zero_optimization={"offload_optimizer": lies}, aio={"queue_depth": 16})
    job = load(folder, file, "strategy.offload_to=/scratch")
    assert job.strategy.offload_to == "/scratch"
    kept = {"zero_optimization": {"offload_optimizer": {"buffer_count": 5}}, "aio": {"queue_depth": 16}}
    assert {key: job.strategy.deepspeed[key] for key in kept} == kept


@pytest.mark.parametrize(
    ("lies", "seen"),
    [
        ({"device": "nvme", "nvme_path": "/other"}, 'nvme_path is "/other"'),
        ({"device": "cpu"}, 'device is "cpu"'),
        ({"device": "nvme", "pipeline_write": True}, "pipeline_write is true"),
        ({"device": "nvme", "buffer_count": 3}, "buffer_count is 3"),
    ],
)
def test_where_the_file_has_them_elsewhere_or_otherwise_it_is_refused(folder, lies, seen):
    file = with_deepspeed(folder, zero_optimization={"offload_optimizer": lies})
    assert seen in refused(folder, file, "strategy.offload_to=/scratch")


def test_the_folder_of_a_disk_is_a_whole_path(folder):
    file = with_deepspeed(folder)
    assert "a folder that begins with /" in refused(folder, file, "strategy.offload_to=scratch")


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_a_file_of_deepspeed_that_is_none_is_told_of(folder, text):
    (folder / "ds.json").write_text(text)
    assert "strategy.deepspeed" in refused(folder, MINIMAL, "strategy.kind=zero-2", "strategy.deepspeed=ds.json")
    assert "there is no file" in refused(folder, MINIMAL, "strategy.kind=zero-2", "strategy.deepspeed=other.json")


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["strategy.kind=ddp", "strategy.offload=optimizer"], "strategy.offload"),
        (["strategy.kind=fsdp", "strategy.deepspeed=ds.json"], "strategy.deepspeed"),
        (["strategy.kind=zero-2", "strategy.offload=[optimizer, parameters]"], "strategy.offload"),
        (["strategy.kind=zero-3", "strategy.offload=parameters"], "strategy.offload"),
        (["strategy.kind=ddp", "strategy.offload_to=/scratch"], "strategy.offload_to"),
        (["strategy.kind=zero-2", "strategy.offload=optimizer", "strategy.offload_to=/scratch"], "strategy.offload_to"),
        (["strategy.kind=zero-1", "precision=fp16"], "precision"),
        (["strategy.kind=zero-1", "precision=fp64"], "precision"),
        (["strategy.kind=zero-2", "precision.compute=bf16", "precision.parameters=compute"], "precision.parameters"),
        (["strategy.kind=zero-2", "method=qlora"], "method"),
        (["strategy.kind=zero-2", "optimizer.kind=adamw-8bit"], "optimizer.kind"),
    ],
)
def test_what_deepspeed_does_not_do_is_refused(folder, words, key):
    said = refused(folder, MINIMAL, *words)
    assert key in said
    assert "zero-" in said


@pytest.mark.parametrize("key", ["inner_steps: 5", "payload: bf16", "outer: {momentum: 0}"])
def test_words_of_rounds_without_rounds_are_refused(folder, key):
    text = refused(folder, MINIMAL + f"strategy: {{{key}}}\n")
    assert f"strategy.{key.split(':')[0]}" in text
    assert "kind: local-sgd" in text


@pytest.mark.parametrize(
    ("exchange", "resolved", "left_open"), [("fp32", "fp32", ()), ("bf16", "bf16", ()), ("auto", "fp32", ("exchange",))]
)
def test_gradients_travel_as_asked(folder, exchange, resolved, left_open):
    job = load(folder, MINIMAL, f"exchange={exchange}")
    assert (job.exchange, job.open) == (resolved, (*OPEN, *left_open))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("precision: fp64\n", "fp64"),
        ("precision: {compute: bf16, parameters: compute}\n", "no wider"),
        ("precision: {parameters: compute}\n", "no wider"),
        ("strategy: local-sgd\n", "strategy.payload"),
    ],
)
def test_gradients_in_bf16_where_that_would_do_nothing_are_refused(folder, words, named):
    text = refused(folder, MINIMAL + words + "exchange: bf16\n")
    assert "exchange" in text
    assert named in text
    # the plan may still look, and find that there is nothing to gain
    assert load(folder, MINIMAL + words + "exchange: auto\n").open == (*OPEN, "exchange")


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_adapters_are_exchanged_in_every_step(folder, method):
    text = refused(folder, MINIMAL + "strategy: local-sgd\n", f"method={method}")
    assert f"method: {method} with strategy: local-sgd" in text
    assert "the product of two means is not the mean of products" in text


def test_data_that_nobody_will_read_may_be_elsewhere(folder):
    text = "model: ./llama\ndata: {train: [rows.jsonl, gone.jsonl, 'no/*.txt'], eval: away.jsonl}\nbatch: 8\n"
    assert "gone.jsonl" in refused(folder, text)
    job = load_job(folder / "job.yaml", needs_data=False)
    assert job.data.train.files == tuple(str(folder / name) for name in ("rows.jsonl", "gone.jsonl", "no/*.txt"))
    assert job.data.evaluation == SourceJob(files=(str(folder / "away.jsonl"),))
    (folder / "gone.jsonl").mkdir()
    with pytest.raises(SpecError, match="is a folder"):
        load_job(folder / "job.yaml", needs_data=False)


def test_a_fraction_of_the_training_rows_is_set_apart(folder):
    job = load(folder, MINIMAL, "data.eval=0.05")
    assert (job.data.evaluation, job.data.evaluation_fraction) == (None, 0.05)


def test_a_batch_is_a_number_or_about_one(folder):
    assert (load(folder, MINIMAL).batch, load(folder, MINIMAL).open) == (8, OPEN)
    assert load(folder, MINIMAL.replace("batch: 8", "batch: {exact: 8}")) == load(folder, MINIMAL)
    wished = load(folder, MINIMAL.replace("batch: 8", "batch: {about: 32}"), "micro_batch=5")
    assert (wished.batch, wished.micro_batch, wished.open) == (32, 5, ("batch", *OPEN[1:]))
    assert load(folder, MINIMAL, "batch={about: 30}", "micro_batch=auto").open == ("batch", *OPEN)


def test_on_the_command_line_a_batch_replaces_the_wish_and_a_wish_the_batch(folder):
    assert load(folder, MINIMAL, "batch.about=30").batch == 30
    assert load(folder, MINIMAL, "batch.about=30").open == ("batch", *OPEN)
    assert load(folder, MINIMAL.replace("batch: 8", "batch: {about: 32}"), "batch.exact=8").open == OPEN
    assert load(folder, MINIMAL.replace("batch: 8", "batch: {about: 32}"), "batch=8").batch == 8


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("{}", "neither exact nor about"),
        ("{exact: 8, about: 8}", "both exact and about"),
        ("{abuot: 8}", 'did you mean "about"?'),
        ("{about: 0}", "a whole number of at least 1"),
        ("{about: 32.0}", "write it as a whole number: 32"),
        ("{about: 2}", "micro-batches of 4"),
        ("{exact: 6}", "write batch: 4 or 8"),
        ("6", "write batch: 4 or 8"),
    ],
)
def test_a_batch_that_cannot_be_is_refused_with_one_mistake(folder, words, named):
    text = refused(folder, MINIMAL.replace("batch: 8", f"batch: {words}") + "micro_batch: 4\n")
    assert named in text
    assert text.count("  fix ") == 1


def test_what_the_plan_shall_decide_is_left_open(folder):
    job = load(folder, MINIMAL)
    assert load(folder, MINIMAL, "micro_batch=auto", "activation_checkpointing=auto") == job
    assert (job.micro_batch, job.activation_checkpointing, job.data.sequence_length) == (1, False, 1024)
    assert load(folder, MINIMAL, "micro_batch=2", "data.sequence_length=512").open == OPEN[1:3]
    assert load(folder, MINIMAL, "micro_batch=2", "activation_checkpointing=false").open == ("sequence_length",)
    offloading = load(folder, MINIMAL, "activation_offloading=true")
    assert (offloading.activation_checkpointing, offloading.open) == (True, ("micro_batch", "sequence_length"))
    refused = load(folder, MINIMAL, "activation_offloading=false")
    assert (refused.activation_offloading, refused.open) == (False, (*OPEN[:2], "sequence_length"))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("hub:squad", SourceJob(hub="squad")),
        ("hub:openai/gsm8k", SourceJob(hub="openai/gsm8k")),
        ("hub:openai/gsm8k/main", SourceJob(hub="openai/gsm8k", hub_config="main")),
        (
            "hub:openai/gsm8k/main@v1#test",
            SourceJob(hub="openai/gsm8k", hub_config="main", revision="v1", split="test"),
        ),
        ("{hub: openai/gsm8k, split: test}", SourceJob(hub="openai/gsm8k", split="test")),
        (
            "hub:openai/gsm8k#test[:1%]",
            SourceJob(hub="openai/gsm8k", split="test", rows=SliceJob(stop=1.0, percent=True)),
        ),
        ("{hub: a/b, split: 'train[-5:]'}", SourceJob(hub="a/b", rows=SliceJob(start=-5.0))),
        ("{files: hub:a/b, weight: 2}", SourceJob(hub="a/b", weight=2.0)),
        (
            "[hub:a/b, {hub: c/d, max_samples: 5, format: chat}]",
            SourceJob(mix=(SourceJob(hub="a/b"), SourceJob(hub="c/d", max_samples=5, format="chat"))),
        ),
    ],
)
def test_hub_data_sets(folder, words, expected):
    job = load(folder, MINIMAL, f"data.train={words}")
    assert job.data.train == expected
    assert Job.from_json(json.loads(json.dumps(job.to_json()))) == job


def trained_on(words):
    return MINIMAL.replace("{train: rows.jsonl}", f"{{train: {words}}}")


def test_files_and_sets_of_the_hub_in_one_list(folder):
    train = load(folder, trained_on("[rows.jsonl, hub:a/b, {files: test.jsonl, split: '[:2]'}]")).data.train
    assert [Path(file).name for file in train.all_files] == ["rows.jsonl", "test.jsonl"]
    assert [(part.hub, part.rows) for part in train.parts] == [(None, None), ("a/b", None), (None, SliceJob(stop=2.0))]
    moved = train.moved({file: f"/head{file}" for file in train.all_files})
    assert moved.all_files == tuple(f"/head{file}" for file in train.all_files)
    assert load(folder, trained_on("[rows.jsonl, test.jsonl]")).data.train.mix == ()


def test_an_address_is_for_the_head_to_read(folder):
    train = load(folder, trained_on("[rows.jsonl, 's3://kennel/*.jsonl']")).data.train
    assert train.files == (str(folder / "rows.jsonl"), "s3://kennel/*.jsonl")
    assert 'there is no file "file:///rows.jsonl"' in refused(folder, trained_on("file:///rows.jsonl"))


def test_a_file_of_a_host_stays_as_it_is_named_and_has_a_source_of_its_own(folder):
    train = load(folder, trained_on("['pc1:/data/*.jsonl', 'pc1:~/more.jsonl']")).data.train
    assert train.files == ("pc1:/data/*.jsonl", "pc1:~/more.jsonl")
    mixed = load(folder, trained_on("[rows.jsonl, {files: 'pc1:/a.jsonl', max_samples: 3}]")).data.train
    assert mixed.all_files == (str(folder / "rows.jsonl"), "pc1:/a.jsonl")
    for files in ("{files: [rows.jsonl, 'pc1:/a.jsonl']}", "['pc1:/a.jsonl', 'pc2:/a.jsonl']"):
        assert "the files of one source on one computer" in refused(folder, trained_on(files))
    here = folder / "pc1:" / "a.jsonl"
    here.parent.mkdir()
    here.write_text("{}\n")
    assert load(folder, trained_on("pc1:/a.jsonl")).data.train.files == (str(here),)


def test_a_source_reads_its_rows_as_the_data_unless_it_says_more(folder):
    sources = "[rows.jsonl, {files: test.jsonl, fields: {prompt: p}}, {files: test.jsonl, format: text}]"
    job = load(folder, trained_on(f"{sources}, format: completion, fields: {{prompt: q, completion: a}}"))
    assert [(each.format, each.fields) for each in map(job.data.of, job.data.train.parts)] == [
        ("completion", {"prompt": "q", "completion": "a"}),
        ("completion", {"prompt": "p"}),
        ("text", {}),
    ]
    assert job.data.formats == ("completion", "text")
    assert job.data.overlong == "split", "texts among the rows go on in the next sample"


def test_shorthands_mean_the_mapping(folder):
    short = "method: lora\nschedule: linear\nprecision: bf16\noptimizer: adamw-8bit\n"
    long = "method: {kind: lora}\nschedule: {kind: linear}\nprecision: {compute: bf16}\noptimizer: {kind: adamw-8bit}\n"
    assert load(folder, MINIMAL + short) == load(folder, MINIMAL + long)
    assert load(folder, MINIMAL + short).method == MethodJob(kind="lora")


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("stop", FailureJob(restarts=0)),
        ("3", FailureJob(restarts=3)),
        ("{restarts: stop}", FailureJob(restarts=0)),
        ("{wait: 0s}", FailureJob(wait_s=0.0)),
        ("{wait: 24h}", FailureJob(wait_s=86400.0)),
        ("{without: false}", FailureJob(without=False)),
    ],
)
def test_what_is_done_about_a_failure(folder, words, meant):
    assert load(folder, MINIMAL + f"failures: {words}\n").failures == meant
    assert load(folder, MINIMAL, f"failures={words}").failures == meant


def test_globs_and_lists_of_files_are_sorted_within_and_read_once(folder):
    text = "model: ./llama\ndata: {train: [test.jsonl, '*o*.jsonl', rows.jsonl]}\nbatch: 8\n"
    names = [Path(name).name for name in load(folder, text).data.train.files]
    assert names == ["test.jsonl", "more.jsonl", "rows.jsonl"]


def test_globs_reach_into_folders(folder):
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "b" / "deep.txt").touch()
    job = load(folder, MINIMAL, f"data.train={folder}/**/*.txt")
    assert job.data.train.files == (str(folder / "a" / "b" / "deep.txt"),)


def test_a_file_whose_name_looks_like_a_glob_is_itself(folder):
    (folder / "a[1].jsonl").touch()
    job = load(folder, "model: ./llama\ndata: {train: 'a[1].jsonl'}\nbatch: 8\n")
    assert job.data.train.files == (str(folder / "a[1].jsonl"),)


def test_paths_in_the_file_begin_at_its_folder_and_on_the_command_line_here(folder, tmp_path_factory, monkeypatch):
    here = tmp_path_factory.mktemp("here")
    (here / "rows.jsonl").touch()
    (here / "llama").mkdir()
    monkeypatch.chdir(here)
    assert load(folder, MINIMAL).data.train.files == (str(folder / "rows.jsonl"),)
    job = load(folder, MINIMAL, "data.train=rows.jsonl", "model=./llama")
    assert (job.data.train.files, job.model.path) == ((str(here / "rows.jsonl"),), str(here / "llama"))


def test_home_is_written_out(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    job = load(folder, "model: ~/llama\ndata: {train: ~/rows.jsonl}\nbatch: 8\n")
    assert (job.model.path, job.data.train.files) == (str(folder / "llama"), (str(folder / "rows.jsonl"),))


def test_a_model_that_is_no_folder_here_is_a_name_on_the_hub(folder):
    assert load(folder, MINIMAL, "model=owner/name").model.path == "owner/name"


@pytest.mark.parametrize(("format_", "expected"), [("text", "split"), ("chat", "truncate"), ("completion", "truncate")])
def test_overlong_rows_by_format(folder, format_, expected):
    assert load(folder, MINIMAL, f"data.format={format_}").data.overlong == expected


def test_what_is_learned_of_conversations(folder):
    words = "{roles: [assistant, tool], thinking: last, end_token: false, weight_field: train}"
    learn = load(folder, MINIMAL, "data.format=chat", f"data.learn={words}").data.learn
    assert learn == LearnJob(roles=("assistant", "tool"), thinking="last", end_token=False, weight_field="train")
    assert load(folder, MINIMAL, "data.format=chat", "data.learn.weight_field=none").data.learn.weight_field is None


def test_a_chat_template_by_name_or_file_becomes_a_part_of_the_job(folder):
    named = load(folder, MINIMAL, "data.format=chat", "data.chat_template=chatml").data.chat_template
    assert named == ChatTemplateJob(name="chatml", text=CHAT_TEMPLATES["chatml"])
    (folder / "mine.jinja").write_text("{{ messages }}")
    job = load(folder, MINIMAL.replace("data: {", "data: {format: chat, chat_template: mine.jinja, "))
    assert job.data.chat_template == ChatTemplateJob(name="mine.jinja", text="{{ messages }}")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data.format=chat", "data.chat_template=chatlm"], "chatml"),
        (["data.format=chat", "data.chat_template=./none.jinja"], "neither a file nor a known template"),
        (["data.chat_template=chatml"], "a chat template with format: text"),
        (["data.format=completion", "data.learn.thinking=none"], "thinking with format: completion"),
        (["data.format=completion", "data.learn.roles=user"], "roles with format: completion"),
        (["data.learn.end_token=false"], "end_token with format: text"),
        (["data.format=chat", "data.learn.thinking=some"], "data.learn.thinking"),
    ],
)
def test_a_template_or_a_rule_that_means_nothing_is_refused(folder, words, said):
    assert said in refused(folder, MINIMAL, *words)


@pytest.mark.parametrize("words", ["none", "null", "~"])
def test_none_switches_off(folder, words):
    job = load(folder, MINIMAL, f"optimizer.clip_norm={words}", f"data.eval={words}")
    assert (job.optimizer.clip_norm, job.data.evaluation) == (None, None)


def test_steps_on_the_command_line_replace_epochs_in_the_file(folder):
    job = load(folder, MINIMAL + "epochs: 3\n", "steps=10")
    assert (job.epochs, job.steps) == (None, 10)
    assert "both epochs and steps" in refused(folder, MINIMAL, "steps=10", "epochs=3")


def test_a_name_is_made_from_the_file_name(folder):
    (folder / "-my job!.yaml").write_text(MINIMAL)
    assert load_job(folder / "-my job!.yaml").name == "my-job"


def test_whole_numbers_become_floats_where_the_job_has_floats(folder):
    job = load(folder, MINIMAL + "optimizer: {learning_rate: 1}\nschedule: {kind: cosine, final_ratio: 1}\n")
    assert job.optimizer.learning_rate == 1.0
    assert isinstance(job.optimizer.learning_rate, float)
    assert job.schedule == ScheduleJob(kind="cosine", final_ratio=1.0)


@pytest.mark.parametrize("text", [MINIMAL, EVERYTHING])
def test_the_resolved_job_survives_json(folder, text):
    job = load(folder, text)
    assert Job.from_json(json.loads(json.dumps(job.to_json()))) == job


def test_a_json_file_is_a_job_file(folder):
    (folder / "job.json").write_text(
        json.dumps({"model": "./llama", "data": {"train": "rows.jsonl"}, "batch": 8}, indent=2)
    )
    assert load_job(folder / "job.json").batch == 8


@pytest.mark.parametrize("value", [".inf", ".nan", "-.inf", "0", "-1e-4"])
def test_a_learning_rate_is_a_positive_number(folder, value):
    assert "optimizer.learning_rate" in refused(folder, MINIMAL, f"optimizer.learning_rate={value}")


@pytest.mark.parametrize(("fraction", "is_good"), [("0", False), ("1", False), ("1.0", False), ("0.999", True)])
def test_an_evaluation_fraction_leaves_rows_on_both_sides(folder, fraction, is_good):
    if is_good:
        assert load(folder, MINIMAL, f"data.eval={fraction}").data.evaluation_fraction == float(fraction)
    else:
        assert "above 0 and below 1" in refused(folder, MINIMAL, f"data.eval={fraction}")


def test_missing_file(folder):
    with pytest.raises(SpecError) as caught:
        load_job(folder / "jbo.yaml")
    assert caught.value.exit_code == 2
    assert caught.value.what == str(folder / "jbo.yaml")
    assert "no such file" in caught.value.seen
    (folder / "job.yaml").touch()
    with pytest.raises(SpecError, match="did you mean"):
        load_job(folder / "jbo.yaml")


@pytest.mark.parametrize(
    ("data", "seen"),
    [(b"name: \xff\n", "0xff"), (b"a: \x00\n", "control character"), (b"#" * (5 << 20), "more than 4 MiB")],
)
def test_files_that_are_no_text(folder, data, seen):
    (folder / "job.yaml").write_bytes(data)
    with pytest.raises(SpecError, match=seen) as caught:
        load_job(folder / "job.yaml")
    assert caught.value.fix


def test_a_folder_in_place_of_a_file(folder):
    with pytest.raises(SpecError, match="a folder") as caught:
        load_job(folder)
    assert "rows.jsonl" in caught.value.fix


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_without_permission(folder):
    (folder / "job.yaml").touch(mode=0)
    with pytest.raises(SpecError, match="Permission denied"):
        load_job(folder / "job.yaml")


def test_a_commit_of_digits_only_keeps_its_zeros_in_the_advice(folder):
    text = refused(folder, MINIMAL, "model.revision=0012345")
    assert "the number 0012345" in text
    assert 'put it in quotes: "0012345"' in text


def test_what_is_wrong_by_type_is_not_judged_again_by_a_rule(folder):
    text = refused(folder, "model: ./llama\ndata: {train: rows.jsonl}\nbatch: 7\nmicro_batch: two\n")
    assert "micro-batches" not in text
    assert "mistakes" not in text


def test_layers_are_compiled_unless_they_drop_or_the_strategy_cannot(folder):
    assert load(folder, MINIMAL).compile is False
    for kind in ("auto", "ddp", "fsdp", "hsdp", "local-sgd"):
        assert load(folder, MINIMAL, "compile=true", f"strategy={kind}").compile
    for kind in ("zero-1", "zero-2", "zero-3", "tp", "pipeline"):
        with pytest.raises(SpecError, match=rf"compile with strategy: {kind}(.|\n)*write `strategy: ddp`"):
            load(folder, MINIMAL, "compile=true", f"strategy={kind}")
    with pytest.raises(SpecError, match=r"compile with method.dropout: 0.1(.|\n)*write `dropout: 0`"):
        load(folder, MINIMAL, "compile=true", "method.kind=lora", "method.dropout=0.1")
