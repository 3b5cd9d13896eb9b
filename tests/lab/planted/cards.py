"""What can be wrong with cards, all simulated, and with InfiniBand, whose files are made."""

import subprocess

from tests.lab import gpus
from tests.lab.gpus import H100, RTX_4070, RTX_5070_TI, like
from tests.lab.planted.environments import CUDA
from tests.lab.planted.scenes import planted

ADAPTER = "mlx5_0"


@planted("G01", packages=CUDA)
def more_slots_than_cards(scene):
    scene.cards("h0", [RTX_5070_TI])
    scene.cards("h1", [RTX_5070_TI])
    scene.entry("h1")["slots"] = 2


@planted("G02", packages=CUDA)
def another_program_holds_the_memory(scene):
    scene.cards("h0", [RTX_4070])
    holder = scene["h1"].popen(["sh", "-c", "echo $$; exec sleep 600"], stdout=subprocess.PIPE, text=True)
    pid = int(holder.stdout.readline())
    scene.cards("h1", [like(RTX_4070, used_mb=9330, processes={pid: 9216}, utilization=97, power_w=180)])


@planted("G03", packages=CUDA)
def a_hot_card(scene):
    scene.cards("h0", [RTX_5070_TI])
    hot = {"temperature_c": 91, "utilization": 100, "power_w": 140, "throttle": gpus.HOT_HARDWARE | gpus.SLOWDOWN}
    scene.cards("h1", [like(RTX_5070_TI, **hot)])


@planted("G04", packages=CUDA)
def a_card_with_uncorrectable_errors(scene):
    scene.cards("h0", [H100, H100])
    scene.cards("h1", [H100, like(H100, ecc_uncorrected=3)])


@planted("G05", packages=CUDA)
def an_unattended_upgrade(scene):
    scene.cards("h0", [RTX_4070])
    scene.cards("h1", [RTX_4070], problem="mismatch")


@planted("G06", packages=CUDA)
def a_card_that_fell_off_the_bus(scene):
    scene.cards("h0", [RTX_4070, RTX_4070])
    scene.cards("h1", [RTX_4070, like(RTX_4070, is_lost=True)])


@planted("G07", packages=CUDA, num_hosts=3)
def one_host_has_no_card(scene):
    scene.cards("h0", [RTX_4070])
    scene.cards("h1", [RTX_4070])


@planted("G08", packages=CUDA)
def a_card_on_one_lane(scene):
    scene.cards("h0", [RTX_5070_TI])
    scene.cards("h1", [like(RTX_5070_TI, pcie_width=1)])


def add_class(scene, name: str, files: dict[str, str]) -> None:
    """Let a host's /sys have more files below /sys/class, or /sys/module where a path begins so.

    The lab's kernel has no such device: copies of the two folders of links are mounted over the real ones.
    """
    scene.shell(
        scene[name],
        "mkdir -p /var/lib/sys && cp -a /sys/class /var/lib/sys/class 2>/dev/null || true; mkdir -p /var/lib/sys/module; "
        "for each in /sys/module/*; do mkdir -p /var/lib/sys/module/${each##*/}; done",
    )
    for path, text in files.items():
        scene[name].write(f"/var/lib/sys/{path}", f"{text}\n", 0o444)
    scene.shell(scene[name], "for each in class module; do mount --bind /var/lib/sys/$each /sys/$each; done")


def infiniband(state: str = "4: ACTIVE", phys: str = "5: LinkUp", rate: str = "400 Gb/sec (4X NDR)") -> dict[str, str]:
    """The files of one adapter."""
    adapter = {
        "node_type": "1: CA",
        "node_desc": f"{ADAPTER}",
        "node_guid": "b8ce:f603:00a1:5c10",
        "sys_image_guid": "b8ce:f603:00a1:5c10",
        "fw_ver": "28.39.1002",
        "hca_type": "MT4129",
        "board_id": "MT_0000000838",
        "device/vendor": "0x15b3",
        "device/numa_node": "0",
        "ports/1/state": state,
        "ports/1/phys_state": phys,
        "ports/1/rate": rate,
        "ports/1/link_layer": "InfiniBand",
        "ports/1/lid": "0x12" if state.startswith("4") else "0x0",
        "ports/1/sm_lid": "0x1" if state.startswith("4") else "0x0",
        "ports/1/gids/0": "fe80:0000:0000:0000:b8ce:f603:00a1:5c10",
        "ports/1/counters/link_downed": "0",
        "ports/1/counters/symbol_error": "0",
    }
    modules = ("ib_core", "ib_uverbs", "mlx5_core", "mlx5_ib")
    return {f"class/infiniband/{ADAPTER}/{path}": text for path, text in adapter.items()} | {
        f"module/{module}/refcnt": "1" for module in modules
    }


DRIVER = {f"module/{module}/refcnt": "1" for module in ("nvidia", "nvidia_uvm", "nvidia_modeset")}
PEER_MEMORY = {"module/nvidia_peermem/refcnt": "0"}


@planted("B01", packages=CUDA)
def a_port_is_down(scene):
    for name in ("h0", "h1"):
        scene.cards(name, [H100])
    add_class(scene, "h0", infiniband() | DRIVER | PEER_MEMORY)
    add_class(scene, "h1", infiniband("1: DOWN", "3: Disabled", "10 Gb/sec (4X SDR)") | DRIVER | PEER_MEMORY)


@planted("B02", packages=CUDA, num_hosts=3)
def infiniband_on_two_hosts_of_three(scene):
    for name in ("h0", "h1", "h2"):
        scene.cards(name, [H100])
    add_class(scene, "h0", infiniband() | DRIVER | PEER_MEMORY)
    add_class(scene, "h1", infiniband() | DRIVER | PEER_MEMORY)
    add_class(scene, "h2", DRIVER)


@planted("B03", packages=CUDA, spared=("h0",))
def no_way_from_card_to_card(scene):
    """A fresh installation of the driver on h1: nobody has loaded nvidia_peermem."""
    for name in ("h0", "h1"):
        scene.cards(name, [H100])
    add_class(scene, "h0", infiniband() | DRIVER | PEER_MEMORY)
    add_class(scene, "h1", infiniband() | DRIVER)
