"""Commands to read and to paste: they mean what is started, and neither secrets nor escape sequences are in them."""

import pytest

from gangline.agent.host_facts.system import SECRET as WITHHELD
from gangline.config.fields import SECRET as REFUSED
from gangline.launch.backend import HostRequest, LaunchRequest
from gangline.report.commands import SECRET as HIDDEN
from gangline.report.commands import printed


def names(text):
    return text.split()


SECRETS = names(
    "HF_TOKEN HUGGING_FACE_HUB_TOKEN WANDB_API_KEY OPENAI_API_KEY ANTHROPIC_API_KEY COMET_API_KEY NGC_API_KEY "
    "NEPTUNE_API_TOKEN GITHUB_TOKEN GH_TOKEN AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN AZURE_CLIENT_SECRET API_KEY "
    "MLFLOW_TRACKING_PASSWORD MLFLOW_TRACKING_TOKEN DB_PASSWD GOOGLE_APPLICATION_CREDENTIALS TOKEN SECRET PASSWORD "
    "hf_token my_secret_value"
)
ALSO_HIDDEN = names(
    "OPENAI_APIKEY AUTHTOKEN AWS_ACCESS_KEY_ID AZURE_STORAGE_KEY MYSQL_PWD PGPASSWORD SSHPASS REDIS_PASS"
)
PLAIN = names(
    "TOKENIZERS_PARALLELISM CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER NCCL_SOCKET_IFNAME NCCL_DEBUG OMP_NUM_THREADS "
    "OMP_WAIT_POLICY GLOO_SOCKET_IFNAME PYTHONPATH PYTHONUNBUFFERED HF_HOME HF_HUB_OFFLINE GANGLINE_HOST MASTER_ADDR PWD "
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE TRANSFORMERS_CACHE LD_LIBRARY_PATH"
)


@pytest.mark.parametrize("name", SECRETS)
def test_every_place_that_knows_secrets_by_their_names_knows_this_one(name):
    """Refused in a cluster file, hidden in what is printed, withheld by the agent's facts."""
    assert REFUSED.search(name)
    assert HIDDEN.search(name)
    assert WITHHELD.search(name)


@pytest.mark.parametrize("name", ALSO_HIDDEN)
def test_values_are_hidden_rather_too_often(name):
    assert HIDDEN.search(name)
    assert WITHHELD.search(name) or name == "MYSQL_PWD"


@pytest.mark.parametrize("name", PLAIN)
def test_what_people_need_to_see_is_shown(name):
    assert not HIDDEN.search(name)
    assert not REFUSED.search(name)


def test_no_secret_is_in_a_printed_command():
    env = {name: f"canary {name}" for name in [*SECRETS, *ALSO_HIDDEN]}
    part = HostRequest(host="pc1", folder="/f", rank_files="/f", argv=("python",), env=env)
    text = "\n".join(printed(LaunchRequest(run_id="r", attempt=1, hosts=(part,))))
    assert "canary" not in text
    assert text.count("=***") == len(env)
