"""One verdict for every key: nothing that changes numbers is lost in silence, and nothing is guessed."""

import pytest

from gangline.convert.axolotl import AXOLOTL_TOOL
from gangline.convert.draft import draft, fit
from gangline.convert.hugging_face import TRL_TOOL
from gangline.convert.llama_factory import LLAMA_FACTORY_TOOL, TEMPLATES, template_text
from gangline.convert.move import require_whole, write
from gangline.convert.outcomes import Default, Foreign, Tool, flatten, judge, number_to, to
from gangline.errors import UsageError
from tests.unit.convert.conftest import Answers


def test_quantised_experts_are_ours_where_layers_are_computed_again(tmp_path):
    loaded = {"adapter": "qlora", "load_in_4bit": True, "quantize_moe_experts": True}
    again = {**loaded, "gradient_checkpointing": True}
    eight = {"adapter": "lora", "load_in_8bit": True, "gradient_checkpointing": True}
    cases = ((loaded, "refused"), (again, "same"), (eight, "equivalent"), ({"adapter": "lora"}, "refused"))
    for values, verdict in cases:
        assert judge(AXOLOTL_TOOL, "quantize_moe_experts", True, Foreign(values=values)).verdict == verdict
    found = judge(AXOLOTL_TOOL, "quantize_moe_experts", True, Foreign(values=again))
    assert found.job == {"method.quantise_experts": True}


BASE = (
    "base_model: acme/small-1b\nlearning_rate: 1e-4\nwarmup_steps: 5\ndatasets:\n  - {path: acme/rows, type: alpaca}\n"
)

PLANTED = {
    "Axolotl": [
        "neftune_noise_alpha: 5", "optimizer: ademamix", "optimizer: muon", "optim_args: {a: 1}", "lr_scheduler: rex",
        "lr_quadratic_warmup: true", "cosine_constant_lr_ratio: 0.2", "loraplus_lr_ratio: 16", "embedding_lr: 1e-5",
        "train_on_inputs: true", "curriculum_sampling: true", "group_by_length: true", "relora: true",
        "lisa_n_layers: 4", "unfrozen_parameters: ['model.layers.1.*']", "model_config: {output_router_logits: true}",
        "rope_scaling: {factor: 2}", "chat_template_kwargs: {enable_thinking: false}", "use_eaft: true",
        "qat: {weight_dtype: int4}", "use_pose: true", "max_packed_sequence_len: 2048", "rl: dpo",
        "fix_untrained_tokens: 1", "default_system_message: Be brief.", "some_new_switch: 3",
    ],
    "LLaMA-Factory": [
        "use_galore: true", "use_dft_loss: true", "mask_history: true", "packing: true", "train_on_prompt: true",
        "moe_aux_loss_coef: 0.01", "freeze_trainable_layers: 2\nfinetuning_type: freeze", "label_smoothing_factor: 0.1",
        "interleave_probs: '0.5,0.5'", "lr_scheduler_kwargs: {power: 2}",
    ],
    "TRL": [
        "assistant_only_loss: false", "completion_only_loss: false", "packing: true\npacking_strategy: wrapped",
        "truncation_mode: keep_end", "loss_type: dft", "router_aux_loss_coef: 0.01",
        "average_tokens_across_devices: false", "optim: schedule_free_adamw", "train_sampling_strategy: sequential",
    ],
}  # fmt: skip
"""Keys that change numbers and have no counterpart: none may pass."""
STEMS = {
    "Axolotl": BASE,
    "LLaMA-Factory": "model_name_or_path: acme/small-1b\nstage: sft\ndo_train: true\ndataset: rows\n",
    "TRL": "model_name_or_path: acme/small-1b\ndataset_name: acme/rows\n",
}


def test_forty_keys_are_planted():
    assert sum(map(len, PLANTED.values())) >= 40


@pytest.mark.parametrize(("tool", "text"), [(tool, text) for tool, texts in PLANTED.items() for text in texts])
def test_a_key_that_changes_numbers_is_found(verdicts, tool, text):
    found = verdicts(STEMS[tool] + text + "\n")
    key = text.partition(":")[0]
    verdict = [outcome.verdict for name, outcome in found.items() if name.split(".")[0] == key]
    refused = {name for name, outcome in found.items() if outcome.verdict == "refused"}
    about = {"freeze_trainable_layers": "finetuning_type", "packing": "packing"}.get(key, key)
    assert verdict, "every key has a verdict"
    assert any(name.split(".")[0] in {about, "packing_strategy"} for name in refused)


@pytest.mark.parametrize("tool", [AXOLOTL_TOOL, LLAMA_FACTORY_TOOL, TRL_TOOL], ids=lambda tool: tool.name)
def test_every_rule_gives_a_verdict_for_any_value(tool):
    values = [True, False, 0, 1, 0.5, -3, "text", "no", "1e-5", [], ["a", "b"], [1], {}, None]
    for key in tool.keys:
        name = key.replace("*", "0")
        for value in values:
            outcome = judge(tool, name, value, Foreign(values={name: value}))
            assert outcome.verdict in {"same", "equivalent", "dropped", "refused"}, (key, value)
            assert outcome.job or outcome.reason, (key, value)


def test_a_key_that_nobody_knows_is_refused(verdicts):
    found = verdicts(BASE + "zeta_schedule: 0.3\n")
    assert found["zeta_schedule"].verdict == "refused"
    assert "may change numbers" in found["zeta_schedule"].reason


def test_a_key_without_a_value_means_the_default(verdicts):
    assert verdicts(BASE + "wandb_watch:\n")["wandb_watch"].verdict == "dropped"


def test_null_for_the_clip_norm_of_transformers_means_none(loaded):
    text = "per_device_train_batch_size: 2\nmax_grad_norm: null\n"
    assert loaded(text, "model=acme/small-1b", "data.train=rows.jsonl").optimizer.clip_norm is None


def test_two_keys_that_say_different_things_are_a_contradiction(verdicts):
    found = verdicts(BASE + "bf16: true\nfloat32: true\n")
    assert "contradiction" in found["float32"].reason


@pytest.mark.parametrize(
    ("words", "batch"),
    [
        ("micro_batch_size: 2\ngradient_accumulation_steps: 4", 2 * 4 * 8),
        ("micro_batch_size: 2\nbatch_size: 8", 8 * 8),
        ("micro_batch_size: 3", 3 * 8),
        ("micro_batch_size: 2\ntensor_parallel_size: 4", 2 * 2),
        ("micro_batch_size: 1\ncontext_parallel_size: 2\ntensor_parallel_size: 2", 2),
        ("gradient_accumulation_steps: 4", 4 * 8),
    ],
)
def test_the_batch_stays_that_of_all_processes(loaded, words, batch):
    assert loaded(f"{BASE}{words}\n", world_size=8).batch == batch


def test_the_world_size_is_asked(convert):
    console = Answers(answers=["4"])
    moved, _ = convert(BASE, world_size=None, console=console)
    assert "How many GPUs" in console.questions[0]
    assert moved.made.job["batch"] == 4


@pytest.mark.parametrize("answers", [[], ["many"], ["0"]])
def test_without_an_answer_the_flag_is_named(convert, answers):
    with pytest.raises(UsageError, match="on how many GPUs") as caught:
        convert(BASE, world_size=None, console=Answers(answers=answers))
    assert "--world-size" in caught.value.fix


def test_ray_says_the_world_size_itself(convert):
    moved, _ = convert(BASE + "use_ray: true\nray_num_workers: 3\n", world_size=None)
    assert moved.made.job["batch"] == 3


def test_nothing_is_written_where_a_key_is_refused(convert, tmp_path):
    moved, asked = convert(BASE + "neftune_noise_alpha: 5\n")
    with pytest.raises(UsageError, match="1 of its keys") as caught:
        write(moved, asked, force=True)
    assert not (tmp_path / "job.yaml").exists()
    assert "--leave-out neftune_noise_alpha" in caught.value.fix


def test_a_key_can_be_given_up_by_name(convert):
    moved, asked = convert(BASE + "neftune_noise_alpha: 5\n", leave_out=("neftune_noise_alpha",))
    require_whole(moved, asked)
    given_up = next(each for each in moved.made.verdicts if each.key == "neftune_noise_alpha")
    assert "numbers change" in given_up.outcome.reason


def test_what_the_file_leaves_open_can_be_said_on_the_command_line(convert, loaded):
    text = BASE.replace("type: alpaca", "type: jeopardy")
    moved, _ = convert(text)
    assert [each.key for each in moved.made.refused] == ["datasets.0.type"]
    assert loaded(text, "data.format=completion").data.format == "completion"


def test_an_own_file_is_never_replaced_without_force(convert, tmp_path):
    (tmp_path / "job.yaml").write_text("mine")
    moved, asked = convert(BASE)
    with pytest.raises(UsageError, match="is there already"):
        write(moved, asked, force=False)
    assert (tmp_path / "job.yaml").read_text() == "mine"


def test_what_the_job_has_no_words_for_is_refused_and_taken_out():
    tool = Tool(name="Else", keys={"rate": number_to("optimizer.learning_rate"), "wish": to("data.wishes")})
    made = draft(tool, Foreign(values={"rate": 1e-4, "wish": 3}))

    class Odd:
        key, contrast = "data.wishes", "there is no such key"

    fitted = fit(made, lambda job: [Odd()] if "data.wishes" in job else [])
    assert [(each.key, each.verdict) for each in fitted.verdicts] == [("rate", "same"), ("wish", "refused")]
    assert fitted.job == {"optimizer.learning_rate": 1e-4}
    assert fitted.refused[0].outcome.reason.startswith("not supported yet: data.wishes")


def test_a_default_is_stated_unless_something_says_it():
    warm = Default(job="schedule.warmup_steps", value=lambda _foreign: 7, reason="7 there")
    keys = {"ratio": to("schedule.warmup_ratio"), "other": to("seed")}
    tool = Tool(name="Else", keys=keys, defaults=(warm,))
    assert draft(tool, Foreign(values={"other": 1})).job == {"seed": 1, "schedule.warmup_steps": 7}
    assert draft(tool, Foreign(values={"ratio": 0.1})).job == {"schedule.warmup_ratio": 0.1}
    assert draft(tool, Foreign(values={}), given=["schedule.warmup_steps"]).job == {}


def test_lists_of_mappings_are_told_key_by_key():
    values = {"datasets": [{"path": "a", "kind": {"x": 1}}, {"path": "b"}], "list": [1, 2], "empty": {}}
    assert dict(flatten(values)) == {
        "datasets.0.path": "a", "datasets.0.kind.x": 1, "datasets.1.path": "b", "list": [1, 2], "empty": {},
    }  # fmt: skip


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_templates_of_llama_factory_render_a_talk(name):
    jinja2 = pytest.importorskip("jinja2")
    text = template_text(name)
    talk = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    words = {"bos_token": "<s>", "eos_token": "</s>"}
    template = jinja2.Environment().from_string(text)
    whole = template.render(messages=talk, **words)
    begun = template.render(messages=talk[:1], add_generation_prompt=True, **words)
    assert whole.startswith(begun)
    assert whole.removeprefix(begun).startswith(f"{TEMPLATES[name]['thought']}4")
    thinking = template.render(messages=[*talk[:1], {"role": "assistant", "content": "<think>2 2s</think>4"}], **words)
    assert thinking.count("<think>") == 1
    assert (
        template.render(messages=[{"role": "system", "content": "Be brief."}, *talk], **words).count("Be brief.") == 1
    )
