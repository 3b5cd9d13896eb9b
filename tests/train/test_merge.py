"""Several adapters become one: its numbers are those of a computation by hand, and plain peft loads it."""

import pytest

from tests.train import cases_merge
from tests.train.tolerances import LOGITS

pytestmark = pytest.mark.rotating


@pytest.fixture
def run(pool, tmp_path):
    return lambda case, **arguments: pool(1).run(case, folder=str(tmp_path), **arguments)[0]


@pytest.mark.parametrize("weights", [(0.7, 0.3), (1.0, -0.5)])
def test_cat_is_the_weighted_sum_of_the_changes_whatever_the_ranks(run, weights):
    unlike = {"rank": 2, "alpha": 5.0, "targets": ["q_proj", "v_proj"]}
    done = run(cases_merge.merged, method="cat", weights=weights, second=unlike)
    assert done["by_hand"] <= LOGITS
    assert done["from_base"] > 0.05
    assert done["rank"] == 6
    assert done["files"] == ["adapter_config.json", "adapter_model.safetensors", "gangline.json"]


@pytest.mark.parametrize("weights", [(0.7, 0.3), (1.0, -0.5)])
def test_linear_adds_the_matrices_a_and_the_matrices_b(run, weights):
    done = run(cases_merge.merged, method="linear", weights=weights, second={"alpha": 3.0})
    assert done["by_hand"] <= LOGITS
    assert done["from_base"] > 0.05
    assert done["rank"] == 4


@pytest.mark.parametrize("method", ["cat", "linear"])
def test_scales_by_the_root_of_the_rank_count_once(run, method):
    rooted = {"use_rslora": True}
    done = run(cases_merge.merged, method=method, first=rooted, second=rooted)
    assert done["by_hand"] <= LOGITS


def test_svd_of_enough_rank_is_the_sum(run):
    assert run(cases_merge.merged, method="svd", options=["--rank", "8"])["by_hand"] <= LOGITS


@pytest.mark.parametrize(
    "method", ["ties", "dare_linear", "dare_ties", "magnitude_prune", "ties_svd", "dare_linear_svd"]
)
def test_methods_that_prune_write_what_peft_loads(run, method):
    done = run(cases_merge.merged, method=method, options=["--density", "0.5"])
    assert done["max_logit_difference"] <= LOGITS
    assert done["from_base"] > 0.01
    how = done["note"]["merge"]
    assert (how["method"], how["density"]) == (method, 0.5)


@pytest.mark.parametrize("method", ["linear", "ties"])
def test_unlike_ranks_are_refused_where_matrices_are_added(run, method):
    options = ["--density", "0.5"] if method == "ties" else []
    done = run(cases_merge.merged, method=method, second={"rank": 2}, options=options)
    assert done["error"]["what"] == f"--method {method} combines adapters of one rank"
    assert "cat or svd" in done["error"]["fix"]
    assert not done["there"]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("bases", "the adapters lie over different base models"),
        ("layers", "the adapters choose their layers differently"),
        ("excluded", "the adapters choose their layers differently"),
        ("dora", "cannot be merged with another adapter"),
        ("weight", "an adapter has the weight nan"),
        ("no-weights", "holds no adapter"),
        ("alone", "there is nothing to merge"),
        ("density", "--method ties needs a density"),
        ("much", "--density 0.5 does not fit --method cat"),
        ("rank", "--rank 2 does not fit --method cat"),
    ],
)
def test_what_cannot_be_merged_is_refused_before_anything_is_loaded(run, what, words):
    done = run(cases_merge.refused, what=what)
    assert words in done["error"]["what"]
    assert done["error"]["seen"]
    assert done["error"]["fix"]
    assert (done["lines"], done["there"]) == ([], False)
