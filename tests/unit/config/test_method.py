"""The section `method`: options of adapters that go together, and an adapter that is trained on."""

import json

import pytest

from gangline.config.load import load_job
from gangline.errors import SpecError
from gangline.strategies.base import METHOD_EXTRAS, Asked, violations
from gangline.strategies.table import STRATEGIES, plan_half

ADAPTER = {
    "peft_type": "LORA",
    "r": 8,
    "lora_alpha": 16,
    "target_modules": ["v_proj", "q_proj"],
    "use_dora": True,
    "rank_pattern": {"q_proj": 2},
    "layers_to_transform": [1, 2],
    "modules_to_save": None,
    "init_lora_weights": True,
    "bias": "none",
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "llama").mkdir()
    (tmp_path / "rows.jsonl").touch()
    (tmp_path / "adapter").mkdir()
    return tmp_path


def load(folder, method, more=""):
    text = f"model: ./llama\ndata: {{train: rows.jsonl}}\nbatch: 8\nmethod: {{{method}}}\n{more}"
    (folder / "job.yaml").write_text(text, encoding="utf-8")
    return load_job(folder / "job.yaml", [])


def refused(folder, method, more=""):
    with pytest.raises(SpecError) as caught:
        load(folder, method, more)
    return str(caught.value)


def write(folder, **changes):
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps({**ADAPTER, **changes}), encoding="utf-8")


def test_layers_are_numbers_and_ranges(folder):
    assert load(folder, "kind: lora, layers: [5, 0-2, 1]").method.layers == (0, 1, 2, 5)
    assert "the range 3-1" in refused(folder, "kind: lora, layers: 3-1")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "hsdp", "pipeline"])
def test_experts_are_quantised_where_a_rank_has_all_of_them(folder, strategy):
    words = ("kind: qlora, quantise_experts: true, target_parameters: a.b", "activation_checkpointing: true")
    more = f"{words[1]}\nstrategy: {strategy}"
    if strategy == "ddp":
        assert load(folder, words[0], more).method.quantise_experts
    else:
        assert "method.quantise_experts with strategy" in refused(folder, words[0], more)


def test_tensors_that_are_named_stand_alone_where_no_targets_are(folder):
    assert load(folder, "kind: lora, target_parameters: mlp.experts.down_proj").method.targets == ()
    both = load(folder, "kind: lora, targets: q_proj, target_parameters: mlp.experts.down_proj").method
    assert both.targets == ("q_proj",)


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("kind: lora, targets: ['regex:(a']", 'seen  "(a"; expected a regular expression; missing )'),
        ("kind: lora, targets: ['regex:a', b]", "regex: beside other targets"),
        ("kind: lora, exclude: ['regex:a', b]", "an expression beside other names"),
        ("kind: lora, targets: 'regex:a', layers: 1", "layers beside an expression for whole names"),
        ("kind: lora, rank_pattern: {'(': 2}", "method.rank_pattern.("),
        ("kind: lora, init: orthogonal, rank: 3", "orthogonal with rank 3; expected even ranks"),
        ("kind: lora, init: pizza", "expected default, gaussian, orthogonal, pissa, pissa_niter_N or olora"),
        ("kind: qlora, init: pissa", "method.init: pissa or olora with method: qlora"),
        ("kind: lora, init: olora, dora: true", "method.init: pissa or olora with method.dora"),
        ("kind: qlora, dora: true", "method.dora with method: qlora"),
        ("kind: lora, quantise_experts: true", "quantise_experts with kind: qlora only"),
        ("kind: full, quantise_experts: true", "true, but every weight is trained"),
        ("kind: qlora, quantise_experts: true", "without activation_checkpointing"),
        ("kind: qlora, target_parameters: a.b", "add `quantise_experts: true`"),
        ("kind: full, dora: true", "dora, but every weight is trained"),
        ("kind: lora, train_tokens: added", "added, but the job adds no tokens"),
        ("kind: lora, adapter: nowhere", "there is no"),
    ],
)
def test_options_that_do_not_go_together_are_refused(folder, method, said):
    assert said in refused(folder, method)


EXTRA = {
    "method.dora": "dora: true",
    "method.modules_to_save": "modules_to_save: lm_head",
    "method.train_tokens": "train_tokens: [3]",
    "method.target_parameters": "target_parameters: mlp.experts.down_proj",
    "method.init": "init: olora",
    "method.quantise_experts": "quantise_experts: true",
}


@pytest.mark.parametrize("method", ["lora", "qlora"])
@pytest.mark.parametrize("kind", [kind for kind in STRATEGIES.built_in if kind != "single"])
def test_a_strategy_trains_an_option_or_the_job_is_refused_before_a_host_is_asked(folder, kind, method):
    assert set(EXTRA) == set(METHOD_EXTRAS)
    for key, words in EXTRA.items():
        if (key, method) == ("method.quantise_experts", "lora"):
            continue  # of qlora alone
        asked = Asked(method=method, extras=(key,))
        expected = [each.seen for each in violations(plan_half(kind), asked)]
        job = f"kind: {method}, {words}", f"strategy: {kind}\nactivation_checkpointing: true\n"
        if not expected:
            assert load(folder, *job).method.kind == method
            continue
        said = refused(folder, *job)
        assert all(each in said for each in expected), (key, said)


def test_a_strategy_refuses_what_an_adapter_that_is_trained_on_brings(folder):
    write(folder, trainable_token_indices=[3])
    said = refused(folder, "kind: lora, adapter: adapter", "strategy: zero-3\n")
    assert said.count("method.adapter") == 2  # dora, too
    assert "method.train_tokens with strategy: zero-3" in said


def test_tokens_that_are_added_have_to_be_trained(folder):
    tokens = "tokens: [<a>, <b>]\n"
    assert "tokens whose rows nobody trains" in refused(folder, "kind: lora, adapter: adapter", tokens)
    write(folder, trainable_token_indices=[300, 301])
    assert load(folder, "kind: lora, adapter: adapter", tokens).method.train_tokens == (300, 301)
    assert "tokens whose rows nobody trains (method: lora)" in refused(folder, "kind: lora", tokens)
    assert load(folder, "kind: lora, train_tokens: added", tokens).tokens.add == ("<a>", "<b>")
    assert load(folder, "kind: full", tokens).tokens.add == ("<a>", "<b>")
    special = load(folder, "kind: lora", "tokens: {special: {pad_token: <pad>}}\n").tokens.special
    assert special == {"pad_token": "<pad>"}


def test_an_adapter_that_is_trained_on_says_what_it_is(folder):
    write(folder)
    method = load(folder, "kind: lora, adapter: adapter, dropout: 0.1").method
    assert (method.rank, method.alpha, method.dropout, method.dora) == (8, 16.0, 0.1, True)
    assert (method.targets, method.layers, method.rank_pattern) == (("q_proj", "v_proj"), (1, 2), {"q_proj": 2})
    assert method.adapter == str(folder / "adapter")
    write(folder, target_modules=".*_proj")
    assert load(folder, "kind: lora, adapter: adapter").method.targets == ("regex:.*_proj",)
    assert "rank beside an adapter" in refused(folder, "kind: lora, adapter: adapter, rank: 4")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"peft_type": "LOHA"}, "peft_type: LOHA"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4, which changed the base model"),
        ({"bias": "all"}, "bias: all"),
        ({"lora_bias": True}, "lora_bias: True"),
    ],
)
def test_an_adapter_of_another_kind_is_refused(folder, changes, said):
    write(folder, **changes)
    assert said in refused(folder, "kind: lora, adapter: adapter")
