"""Environments that differ, lack something, or cannot drive the cards."""

from tests.lab import gpus
from tests.lab.planted.environments import CPU, CUDA
from tests.lab.planted.scenes import planted


def with_cards(scene, card: gpus.Gpu = gpus.RTX_3090, **options: object) -> None:
    """One card in every host."""
    for host in scene.hosts:
        scene.cards(host.name, [card], **options)


@planted("S01")
def one_environment_lacks_transformers(scene):
    scene.packages("h1", {name: version for name, version in CPU.items() if name != "transformers"})


@planted("S02")
def an_old_torch_on_one_host(scene):
    scene.packages("h1", {**CPU, "torch": "2.6.0+cpu"})


@planted("S03", packages={**CPU, "transformers": "5.1.0"})
def an_old_transformers_everywhere(scene):
    pass


@planted("S04")
def two_versions_of_torch(scene):
    scene.packages("h1", {**CPU, "torch": "2.12.1+cpu"})


@planted("S05", num_hosts=3, special={"h2": {"python": "3.13"}})
def another_python_on_one_host(scene):
    pass


@planted(
    "S06",
    packages={**CUDA, "torch": "2.6.0+cu124", "nvidia-nccl-cu12": "2.21.5", "nvidia-cuda-runtime-cu12": "12.4.127"},
)
def a_torch_that_is_too_old_for_the_card(scene):
    """As the forum has it: an RTX 5070 Ti, and the newest torch there was for CUDA 12.4."""
    scene.cards("h0", [gpus.RTX_3090])
    scene.cards("h1", [gpus.RTX_5070_TI])


@planted("S07", packages=CUDA)
def a_driver_that_is_too_old_for_torch(scene):
    scene.cards("h0", [gpus.RTX_3090])
    scene.cards("h1", [gpus.RTX_3090], driver="525.147.05", cuda="12.0")


@planted("S08", packages=CUDA)
def two_versions_of_nccl(scene):
    with_cards(scene)
    scene.packages("h1", {**CUDA, "nvidia-nccl-cu12": "2.21.5"})


@planted("S09", packages=CUDA)
def cards_but_a_torch_without_cuda(scene):
    with_cards(scene)
    scene.packages("h1", CPU)
