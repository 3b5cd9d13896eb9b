"""A file of each trainer becomes a job that gangline's own loader accepts, with that trainer's defaults written out."""

import pytest

AXOLOTL = """\
base_model: acme/small-1b
load_in_4bit: true
adapter: qlora
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
datasets:
  - path: acme/instructions
    type: alpaca
val_set_size: 0.1
sequence_len: 4096
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 3
optimizer: paged_adamw_8bit
lr_scheduler: cosine
learning_rate: 0.0003
warmup_steps: 10
save_steps: 200
bf16: auto
gradient_checkpointing: true
attn_implementation: flash_attention_2
plugins:
  - axolotl.integrations.liger.LigerPlugin
wandb_entity:
special_tokens:
  pad_token: <pad>
"""
LLAMA_FACTORY = """\
model_name_or_path: acme/small-1b
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_target: all
dataset: poems, tales
template: llama3
cutoff_len: 1024
output_dir: saves/small
logging_steps: 10
save_steps: 500
plot_loss: true
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
lr_scheduler_type: cosine
bf16: true
report_to: none
"""
DATASET_INFO = """\
{"poems": {"file_name": "poems.json"},
 "tales": {"file_name": "tales.json"},
 "talks": {"hf_hub_url": "acme/talks", "formatting": "sharegpt"},
 "photos": {"file_name": "photos.json", "columns": {"images": "images"}},
 "pairs": {"file_name": "pairs.json", "ranking": true}}
"""
TRL = """\
model_name_or_path: acme/small-1b
dataset_name: acme/talks
assistant_only_loss: true
use_peft: true
lora_target_modules: all-linear
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
num_train_epochs: 1
max_length: 2048
packing: true
eval_strategy: steps
eval_steps: 50
dataset_test_split: test
"""
TRAINER = '{"output_dir": "out", "per_device_train_batch_size": 4, "num_train_epochs": 2, "bf16": true}'
TORCHTUNE = """\
model:
  _component_: torchtune.models.llama3_1.lora_llama3_1_8b
  lora_attn_modules: [q_proj, v_proj, output_proj]
  apply_lora_to_mlp: True
  lora_rank: 8
  lora_alpha: 16
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  max_seq_len: 2048
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: acme/small-1b
dataset:
  _component_: torchtune.datasets.chat_dataset
  source: acme/talks
batch_size: 2
gradient_accumulation_steps: 8
optimizer:
  _component_: torch.optim.AdamW
  lr: 3e-4
epochs: 1
dtype: bf16
"""
BESIDE = {"beside": [("data/dataset_info.json", DATASET_INFO)], "named": False}


def test_axolotl(loaded):
    job = loaded(AXOLOTL)
    assert (job.batch, job.micro_batch, job.epochs) == (2 * 4 * 2, 2, 3)
    assert (job.method.kind, job.method.bits, job.method.rank, job.method.alpha) == ("qlora", 4, 32, 16)
    assert (job.data.format, job.data.overlong, job.data.sequence_length) == ("alpaca", "drop", 4096)
    assert (job.data.train.hub, job.data.evaluation_fraction) == ("acme/instructions", 0.1)
    assert (job.optimizer.kind, job.optimizer.weight_decay, job.optimizer.clip_norm) == ("paged-adamw-8bit", 0.0, 1.0)
    assert (job.schedule.kind, job.schedule.warmup_steps, job.seed) == ("cosine", 10, 42)


def test_llama_factory(loaded):
    job = loaded(LLAMA_FACTORY, "data.train=rows.jsonl", "data.format=chat", leave_out=("template",))
    assert (job.batch, job.micro_batch, job.epochs) == (1 * 8 * 2, 1, 3.0)
    assert (job.method.kind, job.method.rank, job.method.alpha, job.method.dropout) == ("lora", 8, 16, 0.0)
    assert (job.optimizer.learning_rate, job.schedule.kind, job.seed) == (1e-4, "cosine", 42)
    assert (job.data.packing, job.data.overlong, job.activation_checkpointing) == (False, "truncate", True)


def test_trl(loaded):
    job = loaded(TRL)
    assert (job.batch, job.data.format, job.data.packing) == (4 * 2 * 2, "chat", True)
    assert (job.method.kind, job.method.rank, job.method.alpha, job.method.dropout) == ("lora", 16, 32, 0.05)
    assert (job.optimizer.learning_rate, job.schedule.kind, job.precision) == (2e-5, "linear", "bf16")
    assert (
        job.data.evaluation.hub_split if hasattr(job.data.evaluation, "hub_split") else job.data.evaluation.split
    ) == "test"


def test_transformers_trainer(loaded):
    rest = ("model=acme/small-1b", "data.train=rows.jsonl")
    job = loaded(TRAINER, *rest, name="training_args.json")
    assert (job.batch, job.epochs, job.optimizer.learning_rate) == (4 * 2, 2, 5e-5)
    assert (job.schedule.kind, job.optimizer.beta2, job.seed) == ("linear", 0.999, 42)


def test_torchtune(loaded):
    job = loaded(TORCHTUNE)
    assert (job.batch, job.data.format) == (2 * 8 * 2, "chat")
    assert set(job.method.targets) == {"q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert (job.optimizer.weight_decay, job.optimizer.clip_norm, job.schedule.kind) == (0.01, None, "constant")


def test_deepspeed_alone_is_a_strategy(loaded):
    text = (
        '{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": true},'
        ' "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5}'
    )
    job = loaded(text, "model=acme/small-1b", "data.train=rows.jsonl", name="ds.json", world_size=3)
    assert (job.strategy.kind, job.strategy.offload) == ("zero-3", ("optimizer",))
    assert (job.batch, job.optimizer.clip_norm, job.precision) == (4 * 2 * 3, 0.5, "bf16")


def test_accelerate_gives_the_world_size(convert):
    text = "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_processes: 6\nmixed_precision: bf16\n"
    moved, _ = convert(AXOLOTL, world_size=None, beside=[("accelerate.yaml", text)])
    assert moved.made.job["batch"] == 2 * 4 * 6
    assert moved.made.refused == []


def test_deepspeed_that_the_trainer_names_is_read_too(verdicts):
    inside = '{"zero_optimization": {"stage": 2}, "optimizer": {"type": "Lamb", "params": {"lr": "auto"}}}'
    found = verdicts(AXOLOTL + "deepspeed: ds/zero2.json\n", beside=[("ds/zero2.json", inside)], named=False)
    assert found["deepspeed.zero_optimization.stage"].verdict == "dropped"
    assert found["deepspeed.optimizer.type"].verdict == "refused"


def test_deepspeed_that_is_not_here_may_change_numbers(verdicts):
    assert verdicts(AXOLOTL + "deepspeed: ds/nowhere.json\n")["deepspeed"].verdict == "refused"


@pytest.mark.parametrize(("name", "missing"), [("photos", "images"), ("pairs", "preference"), ("letters", "not here")])
def test_a_data_set_that_cannot_be_one_is_named(verdicts, name, missing):
    found = verdicts(LLAMA_FACTORY.replace("poems, tales", name), **BESIDE)
    assert found["dataset"].verdict == "refused"
    assert missing in found["dataset"].reason


def test_sharegpt_gets_its_columns_and_roles(convert):
    moved, _ = convert(LLAMA_FACTORY.replace("poems, tales", "talks"), "data.chat_template=chatml", **BESIDE)
    written = {job: value for each in moved.made.verdicts for job, value in each.outcome.job.items()}
    dataset = next(each for each in moved.made.verdicts if each.key == "dataset")
    assert dataset.verdict in {"same", "refused"}  # data.roles may have no words yet
    assert "dataset" in {each.key for each in moved.made.verdicts}
    assert written["data.sequence_length"] == 1024
