"""Images of podman and docker: the recorded commands; a real podman has tests/lab/test_containers.py."""

from pathlib import Path

import pytest

from gangline.errors import CheckFailed, RunFailed
from gangline.provision import images
from gangline.provision.console import SILENT
from gangline.provision.environment import Ground, seeing
from gangline.runs.cluster import Environment, Host
from tests.fakes.transport import FakeTransport, Scripted

ID = "6d9543aed81dcc3891d92e1c69d8514787a9570c281a9ad706e6cabfbfbae1ce"
OTHER = ID[::-1]
UNKNOWN = Scripted(returncode=125, stderr="Error: no such image localhost/train:1")


def host(name: str, engine: str = "podman", python: str | None = None) -> Host:
    environment = Environment(kind=engine, path="localhost/train:1", python=python)
    return Host(name=name, workdir="/home/me/gangline", python="", transport="ssh", environment=environment)


def ground(*, gpu: bool = False, shared: tuple[str, ...] = (), **answers: Scripted) -> Ground:
    """Hosts that answer the first question so, and everything after it by exit code 127."""
    transports = {}
    for name, answer in answers.items():
        asked = []

        def says(call, answer=answer, asked=asked):
            asked.append(call)
            return (
                answer if len(asked) == 1 else Scripted(returncode=127, stderr=f"{call.argv[0]} is played no further")
            )

        transports[name] = FakeTransport(name, answer=says)
    return Ground(transports=transports, gpus=dict.fromkeys(answers, gpu), home=Path(), shared=shared)


@pytest.mark.parametrize(
    ("engine", "gpu"), [("podman", ("--device", "nvidia.com/gpu=all")), ("docker", ("--gpus", "all"))]
)
def test_ranks_run_in_the_image_by_its_id_with_what_they_need_of_the_host(engine, gpu):
    around = ground(gpu=True, shared=("/mnt/nas",), pc1=Scripted(stdout=f"sha256:{ID}\n"))
    (found,) = images.ContainerImage().place([host("pc1", engine)], around, console=SILENT)
    assert found.argv("-m", "x") == (
        *("sh", "-c", images.START, "gangline-image", "/home/me/gangline", engine),
        *("--volume", "/home/me/gangline:/home/me/gangline", "--volume", "/mnt/nas:/mnt/nas"),
        *("--rm", "--interactive", "--pull=never", "--entrypoint=", "--network=host", "--pid=host", "--ipc=host"),
        "--pids-limit=-1",
        *("--security-opt", "label=disable", *gpu),
        *(ID, "python3", "-m", "x"),
    )
    (call,) = around.transports["pc1"].calls
    assert call.argv[-3:] == (engine, "localhost/train:1", f"{engine}-gpu")
    sees = seeing(found, ["/data/m", "/mnt/nas", "/home/me/gangline/models/m"])
    assert sees.prefix[6:8] == ("--volume", "/data/m:/data/m")
    assert sees.prefix[8:] == found.prefix[6:]


def test_a_preview_says_the_name_of_an_image_that_is_not_there_yet_and_the_python_that_was_named():
    around = ground(pc1=UNKNOWN)
    (found,) = images.ContainerImage().preview([host("pc1", python="/opt/venv/bin/python")], around)
    assert found.argv()[-2:] == ("localhost/train:1", "/opt/venv/bin/python")
    assert len(around.transports["pc1"].calls) == 1


@pytest.mark.parametrize(
    ("code", "said", "fix"),
    [
        (images.NO_ENGINE, r"pc2: podman is not installed", "install podman there"),
        (images.NO_CDI, r"pc2: containers of podman would not see its GPUs", "gangline prepare"),
        (125, r"pc2: podman cannot say whether it has the image localhost/train:1", "podman image inspect"),
    ],
)
def test_what_is_missing_is_named_before_anything_is_changed(code, said, fix):
    around = ground(pc1=Scripted(stdout=ID), pc2=Scripted(returncode=code, stderr="Error: database is locked\n"))
    with pytest.raises(CheckFailed, match=said) as caught:
        images.ContainerImage().place([host("pc1"), host("pc2")], around, console=SILENT)
    assert fix in caught.value.fix
    assert len(around.transports["pc1"].calls) == 1


def test_two_images_of_one_name_are_refused():
    around = ground(pc1=Scripted(stdout=ID), pc2=Scripted(stdout=OTHER))
    with pytest.raises(CheckFailed, match=r"not the same on all hosts") as caught:
        images.ContainerImage().place([host("pc1"), host("pc2")], around, console=SILENT)
    assert caught.value.seen == f"{ID[:12]} on pc1; {OTHER[:12]} on pc2"


def test_an_image_that_nobody_has_is_pulled_by_one_host_or_refused_with_its_words():
    around = ground(pc1=UNKNOWN, pc2=UNKNOWN)
    with pytest.raises(CheckFailed, match=r"no host has the image localhost/train:1, and pc1 cannot pull it") as caught:
        images.ContainerImage().place([host("pc1"), host("pc2")], around, console=SILENT)
    assert caught.value.seen == "podman is played no further"
    assert around.transports["pc1"].calls[-1].argv == ("podman", "pull", "localhost/train:1")
    assert len(around.transports["pc2"].calls) == 1


@pytest.mark.parametrize("goes", [False, True])
def test_a_host_that_cannot_save_its_image_is_named_and_nothing_stays_on_those_that_answer(goes):
    around = ground(pc1=Scripted(stdout=ID), pc2=UNKNOWN)
    source, folder = around.transports["pc1"], f"/home/me/gangline/images/{ID[:12]}"
    says = source.answer

    def answers(call):
        source.reachable = not (goes and call.argv[0] == "mkdir")
        return says(call)

    source.answer = answers
    with pytest.raises(RunFailed, match=r"pc1: the image localhost/train:1 cannot be saved"):
        images.ContainerImage().place([host("pc1"), host("pc2")], around, console=SILENT)
    clears = ("rm", "-rf", "--", folder)
    # what an earlier start has left goes first: podman writes over no file
    made = [clears, ("mkdir", "-p", "-m", "700", "--", folder), *([] if goes else [clears])]
    assert [call.argv for call in source.calls[1:]] == made
    assert around.transports["pc2"].calls[-1].argv == clears
