"""What a job needs besides is known before anything is changed, and comes with the environment that gangline builds."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from gangline.context import Context, Dependencies
from gangline.decide.needs import Needs, find_needs, with_packages
from gangline.errors import UsageError
from gangline.provision.requirements import lock_of, own_lock
from gangline.runs.cluster import Cluster, Environment, Host
from gangline.runs.job import Job, MethodJob, ReportJob
from tests.fakes.transport import FakeTransport
from tests.unit.checks.machines import cluster, host, inventory, machine, pc
from tests.unit.decide.test_forecast import JOB, Silent

PAIR = cluster(host("pc1"), host("pc2"))
LOCKED = Environment(kind="locked")
WANDB = dataclasses.replace(JOB, report=ReportJob(exporters={"wandb": {"project": "p"}}))
KEY = {"WANDB_API_KEY": "secret"}


def needs(
    tmp_path: Path,
    job: Job = JOB,
    where: Cluster = PAIR,
    *,
    strategy: str = "fsdp",
    packages: dict[str, dict[str, str | None]] | None = None,
    variables: dict[str, str] | None = None,
    netrc: str | None = None,
    without_gpu: tuple[str, ...] = (),
) -> Needs:
    """packages: host -> what its Python has besides."""
    answers: dict[str, Any] = {name: machine(name) if name in without_gpu else pc(name) for name in ("pc1", "pc2")}
    nothing = {"deepspeed": None, "wandb": None, "flash-attn": None}
    for name, answer in answers.items():
        answer["packages"]["packages"] |= {**nothing, **(packages or {}).get(name, {})}
    head = FakeTransport("pc1")
    if netrc is not None:
        head.files[head.home() / ".netrc"] = netrc.encode()
    deps = Dependencies(variables=variables or {})
    context = Context(transports={"pc1": head}, home=tmp_path, console=Silent(), deps=deps)
    return find_needs(job, strategy, where, inventory(answers), context)


def refusal(found: Needs) -> str:
    with pytest.raises(UsageError) as caught:
        found.require()
    return str(caught.value)


def test_where_every_host_has_the_package_of_the_strategy_nothing_is_said(tmp_path: Path) -> None:
    there = {"deepspeed": "0.19.8"}
    found = needs(tmp_path, strategy="zero-2", packages={"pc1": there, "pc2": there})
    assert found == Needs()
    assert needs(tmp_path, strategy="fsdp") == Needs()


def test_the_host_that_lacks_a_package_is_named_with_what_to_install(tmp_path: Path) -> None:
    words = refusal(needs(tmp_path, strategy="zero-2", packages={"pc1": {"deepspeed": "0.19.8"}}))
    assert "strategy: zero-2 needs deepspeed, which pc2 would not have" in words
    assert "pip install 'gangline[deepspeed]'" in words


def test_all_that_is_missing_is_told_at_once(tmp_path: Path) -> None:
    model = dataclasses.replace(WANDB.model, attention="flash_attention_2")
    words = refusal(needs(tmp_path, dataclasses.replace(WANDB, model=model), strategy="zero-2"))
    assert "needs deepspeed, which pc1 pc2" in words
    assert "model.attention: flash_attention_2 needs flash-attn, which pc1 pc2" in words
    assert "report.wandb needs wandb, which pc1 would" in words  # rank 0 reports
    assert "report.wandb needs a key" in words


@pytest.mark.parametrize(
    ("name", "package", "extra"), [("mlflow", "mlflow-skinny", "mlflow"), ("trackio", "trackio", "trackio")]
)
def test_a_tracker_needs_its_package_on_the_head_alone(tmp_path: Path, name: str, package: str, extra: str) -> None:
    options = {"mlflow": {"uri": "http://pc9:5000"}, "trackio": {"project": "p"}}
    job = dataclasses.replace(JOB, report=ReportJob(exporters={name: options[name]}))
    words = refusal(needs(tmp_path, job, packages={"pc1": {package: None}, "pc2": {package: "1.0"}}))
    assert f"report.{name} needs {package}, which pc1 would not have" in words
    assert f"pip install 'gangline[{extra}]'" in words
    assert f"report.{name}: none" in words
    assert needs(tmp_path, job, packages={"pc1": {package: "1.0"}, "pc2": {package: None}}) == Needs()
    locked = with_packages(cluster(host("pc1", environment=LOCKED), host("pc2", environment=LOCKED)), job)
    assert [text.partition("==")[0] for text in locked.hosts[0].environment.packages] == [package]
    assert locked.hosts[1].environment.packages == ()


def test_quantised_weights_need_bitsandbytes_which_the_lock_has(tmp_path: Path) -> None:
    job = dataclasses.replace(JOB, method=MethodJob(kind="qlora"))
    without = {"bitsandbytes": None}
    assert "method: qlora needs bitsandbytes" in refusal(
        needs(tmp_path, job, packages={"pc1": without, "pc2": without})
    )
    locked = cluster(host("pc1", environment=LOCKED), host("pc2", environment=LOCKED))
    assert with_packages(locked, job) == locked
    assert needs(tmp_path, job, locked) == Needs()


def test_packages_come_with_the_environments_that_gangline_builds_from_its_own_lock(tmp_path: Path) -> None:
    strategy = dataclasses.replace(JOB.strategy, kind="zero-2")
    job = dataclasses.replace(WANDB, strategy=strategy)
    locked = with_packages(cluster(host("pc1", environment=LOCKED), host("pc2", environment=LOCKED)), job)
    first, second = (each.environment for each in locked.hosts)
    assert [text.partition("==")[0] for text in first.packages] == ["deepspeed", "wandb"]
    assert [text.partition("==")[0] for text in second.packages] == ["deepspeed"]
    assert {pin.name for pin in lock_of(first).pins} - {pin.name for pin in own_lock().pins} == {"deepspeed", "wandb"}
    assert len({lock_of(first).hash, lock_of(second).hash, own_lock().hash}) == 3
    found = needs(tmp_path, job, locked, strategy="zero-2", variables=KEY)
    assert found.missing == ()
    assert [line.split()[1] for line in found.lines] == ["deepspeed", "wandb"]
    assert "comes with the environment on pc1 pc2" in found.lines[0]


def test_a_lock_of_the_users_own_is_theirs_to_complete(tmp_path: Path) -> None:
    lock = tmp_path / "requirements.lock"
    lock.write_text("torch==2.13.0\n", encoding="utf-8")
    given = Environment(kind="locked", path=str(lock))
    where = cluster(host("pc1", environment=given), host("pc2", environment=given))
    assert with_packages(where, WANDB) == where
    assert "add wandb==" in refusal(needs(tmp_path, WANDB, where, variables=KEY))


def test_a_kernel_without_wheels_is_refused_with_another_way(tmp_path: Path) -> None:
    model = dataclasses.replace(JOB.model, attention="flash_attention_2")
    where = cluster(host("pc1", environment=LOCKED), host("pc2", environment=LOCKED))
    assert "model.attention: sdpa" in refusal(needs(tmp_path, dataclasses.replace(JOB, model=model), where))


def test_a_kernel_that_is_named_needs_triton_and_a_gpu_on_every_host(tmp_path: Path) -> None:
    job = dataclasses.replace(JOB, kernels=("rms-norm",))
    there: dict[str, dict[str, str | None]] = {name: {"triton": "3.9.0"} for name in ("pc1", "pc2")}
    assert needs(tmp_path, job, packages=there) == Needs()
    assert "kernels: rms-norm needs triton, which pc2 would not have" in refusal(
        needs(tmp_path, job, packages={**there, "pc2": {"triton": None}})
    )
    words = refusal(needs(tmp_path, job, packages=there, without_gpu=("pc2",)))
    assert "kernels: rms-norm needs a GPU, which pc2 would not have" in words
    assert "write kernels: auto" in words
    free = dataclasses.replace(JOB, kernels=("auto",))
    assert needs(tmp_path, free, packages={"pc1": {"triton": None}}, without_gpu=("pc1", "pc2")) == Needs()


def test_the_kernel_of_adapters_is_refused_where_the_plan_has_weights_by_module(tmp_path: Path) -> None:
    job = dataclasses.replace(JOB, method=MethodJob(kind="lora"), kernels=("lora",))
    there: dict[str, dict[str, str | None]] = {name: {"deepspeed": "0.19.8"} for name in ("pc1", "pc2")}
    words = refusal(needs(tmp_path, job, strategy="zero-3", packages=there))
    assert "kernels: lora does not work with strategy: zero-3" in words
    assert "write kernels: auto" in words
    assert needs(tmp_path, job, strategy="zero-2", packages=there) == Needs()
    auto = dataclasses.replace(job, kernels=("auto",))
    assert needs(tmp_path, auto, strategy="zero-3", packages=there) == Needs()


HAS_WANDB: dict[str, dict[str, str | None]] = {"pc1": {"wandb": "0.31.0"}}


def offline() -> Cluster:
    first: Host = host("pc1")
    return cluster(dataclasses.replace(first, env={"WANDB_MODE": "offline"}), host("pc2"))


def test_a_key_is_one_of_the_shell_or_of_the_heads_netrc_or_not_needed_offline(tmp_path: Path) -> None:
    words = refusal(needs(tmp_path, WANDB, packages=HAS_WANDB, netrc="machine github.com login x password y"))
    assert "WANDB_API_KEY is not set in this shell, nor api.wandb.ai in ~/.netrc of pc1" in words
    assert "password" not in words
    assert needs(tmp_path, WANDB, packages=HAS_WANDB, variables=KEY) == Needs()
    assert needs(tmp_path, WANDB, packages=HAS_WANDB, netrc="machine api.wandb.ai login user password y") == Needs()
    assert needs(tmp_path, WANDB, offline(), packages=HAS_WANDB) == Needs()


def test_a_python_that_did_not_answer_is_not_accused(tmp_path: Path) -> None:
    unknown = inventory({name: pc(name) for name in ("pc1", "pc2")})
    context = Context(transports={}, home=tmp_path, console=Silent(), deps=Dependencies(variables=KEY))
    assert find_needs(WANDB, "ddp", PAIR, unknown, context) == Needs()
