"""Ray on a host: a node of a cluster that is ours, and the program on the head that puts an actor on every host.

    ray node JSON     {"ip", "address", "folder", "scratch"}: become `ray start --block`. address None: the first node,
                      which writes its address into FOLDER/address.json
    ray drive JSON    {"address", "node", "hosts": [{"host", "address", "folder", "ranks", "gpus"}]}: an actor on every
                      host starts the process `foreground below FOLDER` there, and lives as long as that. address None:
                      as the first node writes it into NODE/address.json.
                      An actor takes a CPU for each rank, or the GPUs where its node has any

Run with a Python that has Ray; everything else is the standard library's. What goes wrong is one record of an error on
stdout, the loss of an actor one line: gangline.launch.ray reads both.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from gangline.agent.host_files import read_record, write_record
from gangline.agent.verbs import VerbFailed, write_line

ADDRESS = "address.json"
JOIN_S, THERE_S = 50.0, 20.0
"""How long nodes that are started with us may take to be there, and the actors; and those that were there before."""
TICK_S = 0.2
STORE_BYTES = 80_000_000
"""Ray's least for its store of objects, of which we put in none."""
LOST = "lost the actor on "


def main(argv: List[str]) -> int:
    """Entry point."""
    asked = json.loads(argv[1])
    try:
        if argv[0] == "node":
            _be_node(asked)
        _drive(asked)
    except VerbFailed as failed:
        write_line(failed.record)
        return 1
    return 0


def _ray(name: str = "ray") -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise VerbFailed(
            f"Ray is not installed in {sys.executable}",
            f"{type(error).__name__}: {error}",
            "install it there (pip install ray) on every host, or write `backend: direct` in cluster.yaml",
        ) from error


def _be_node(asked: Dict[str, Any]) -> None:
    """Never returns, unless it raises VerbFailed."""
    ip = asked["ip"] or _ray("ray.util").get_node_ip_address()
    words = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    words += ["--node-ip-address", ip, "--num-cpus", "0", "--num-gpus", "0"]
    words += ["--object-store-memory", str(STORE_BYTES), "--include-log-monitor", "false"]
    if asked["address"] is None:
        with socket.socket() as probe:
            probe.bind((ip, 0))
            port = probe.getsockname()[1]
        write_record(Path(asked["folder"]) / ADDRESS, {"address": f"{ip}:{port}"})
        words += ["--head", "--port", str(port), "--include-dashboard", "false", "--temp-dir", asked["scratch"]]
    else:
        words += ["--address", asked["address"]]
    _ray()
    try:
        os.mkdir(asked["scratch"], 0o700)  # noqa: PTH102  (nobody else may have made it)
    except OSError as error:
        raise VerbFailed(
            "Ray cannot have a folder of its own", str(error), "remove that folder, start again"
        ) from error
    os.execv(words[0], words)  # noqa: S606


def _drive(asked: Dict[str, Any]) -> None:
    """Put the actors on the hosts, and wait for their end."""
    ray, deadline = _ray(), time.monotonic() + (JOIN_S if asked["node"] else THERE_S)
    address = asked["address"] or _written(Path(asked["node"]) / ADDRESS, deadline)
    if not asked["node"]:
        _require_entry(ray, address)
    _connect(ray, address, deadline if asked["node"] else time.monotonic())
    nodes = _nodes(ray, address, asked["hosts"], deadline)
    actors = {part["host"]: _actor(ray, part, nodes[part["host"]]) for part in asked["hosts"]}
    _require_room(ray, address, actors, deadline)
    running = {actors[part["host"]].run.remote(part["folder"]): part["host"] for part in asked["hosts"]}
    while running:
        done, _ = ray.wait(list(running), timeout=TICK_S)
        for each in done:
            host = running.pop(each)
            try:
                ray.get(each)
            except ray.exceptions.RayError as error:
                _say(f"{LOST}{host}: {_first_line(error)}")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _written(path: Path, deadline: float) -> str:
    while True:
        record = read_record(path)
        if record:
            return str(record["address"])
        if time.monotonic() > deadline:
            raise VerbFailed("the first node of Ray did not start", f"no {path}", "its log is beside that file")
        time.sleep(TICK_S)


def _require_entry(ray: Any, address: str) -> None:
    """Raise VerbFailed where nobody listens, or our token is not the cluster's: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host:
        return  # "auto"
    token = os.environ.get("RAY_AUTH_TOKEN_PATH")
    if token and not Path(token).is_file():  # Ray would end this process
        raise _explained(address, FileNotFoundError(f"no token in {token}"), ray.__version__)
    try:
        socket.create_connection((host, int(port)), timeout=5.0).close()
    except OSError as error:
        raise _explained(address, error, ray.__version__) from error
    try:
        _ray("ray._raylet").GcsClient(address=address).get_all_node_info()
    except ray.exceptions.AuthenticationError as error:
        raise _explained(address, error, ray.__version__) from error
    except Exception as error:  # noqa: BLE001  (no public part of Ray asks this: what it is called may change)
        _say(f"not asked beforehand: {_first_line(error)}")


def _connect(ray: Any, address: str, deadline: float) -> None:
    """Join the cluster as a driver, again and again until the deadline; raises VerbFailed."""
    while True:
        try:
            ray.init(address=address, namespace="gangline", log_to_driver=False, logging_level="error")
            return
        except Exception as error:  # noqa: BLE001  (Ray raises RuntimeError, ConnectionError, ValueError and its own)
            problem = error
        if "Version mismatch" in str(problem) or "token" in str(problem).lower() or time.monotonic() > deadline:
            raise _explained(address, problem, ray.__version__) from problem
        time.sleep(TICK_S)


def _explained(address: str, error: Exception, version: str) -> VerbFailed:
    """The error of a failed connection in our words."""
    said, line = str(error), _first_line(error)
    if "Version mismatch" in said:
        return VerbFailed(
            f"the cluster of Ray at {address} is of another version than this one",
            f"expected Ray {version} and Python {'.'.join(map(str, sys.version_info[:3]))}; {' '.join(said.split())}",
            "let `python` in cluster.yaml be the Python with which the cluster was started",
        )
    if "token" in said.lower() or "authenticat" in said.lower():
        return VerbFailed(
            f"the cluster of Ray at {address} does not let us in: it wants another token",
            line,
            "put its token into ~/.ray/auth_token on the head, or name its file at the head in cluster.yaml: "
            "`env: {RAY_AUTH_MODE: token, RAY_AUTH_TOKEN_PATH: FILE}`",
        )
    return VerbFailed(
        f"there is no cluster of Ray at {address}, or the head is no node of it",
        line,
        "`ray status` on the head has to work with that RAY_ADDRESS; without RAY_ADDRESS in cluster.yaml gangline "
        "starts a cluster of its own",
    )


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:3])[:600]}"


def _nodes(ray: Any, address: str, hosts: List[Dict[str, Any]], deadline: float) -> Dict[str, Dict[str, Any]]:
    """The node of each host, as Ray has it; raises VerbFailed where some are no nodes."""
    while True:
        alive = [each for each in ray.nodes() if each["Alive"]]
        by_address = {each["NodeManagerAddress"]: each for each in alive}
        own = {each["NodeID"]: each for each in alive}.get(ray.get_runtime_context().get_node_id())
        found = {part["host"]: by_address.get(_ip(part["address"])) if part["address"] else own for part in hosts}
        missing = [part for part in hosts if found[part["host"]] is None]
        if not missing:
            return {name: node for name, node in found.items() if node}
        if time.monotonic() > deadline:
            names = ", ".join(f"{part['host']} ({part['address']})" for part in missing)
            raise VerbFailed(
                f"no nodes of the cluster of Ray at {address}: {names}",
                f"its nodes are {', '.join(sorted(by_address))}",
                f"`ray start --address={address} --node-ip-address=ADDRESS` on them, or write the addresses of its "
                "nodes into cluster.yaml",
            )
        time.sleep(TICK_S)


def _ip(address: str) -> str:
    try:
        return socket.gethostbyname(address)
    except OSError:
        return address


def _actor(ray: Any, part: Dict[str, Any], node: Dict[str, Any]) -> Any:
    """The actor of a host, asked for."""

    class Place:  # local, so that it travels by value: hosts have no gangline
        """Holds the place of a host agent in Ray."""

        def ready(self) -> None:
            """Answers once the actor is there."""

        def run(self, folder: str) -> None:
            """Start the process that the host agent is below, with the variables of Ray's node, and wait for it."""
            import os
            import subprocess
            from pathlib import Path

            lines = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
            rows = [row.partition(b"=") for row in lines if row]
            own = (b"RAY_", b"GANGLINE_")
            env = {os.fsdecode(name): os.fsdecode(value) for name, _, value in rows if not name.startswith(own)}
            words = ["python3", f"{folder}/agent.pyz", "foreground", "below", folder]
            subprocess.run(words, check=False, env=env, cwd="/", stdin=subprocess.DEVNULL)

    gpus = part["gpus"] if node["Resources"].get("GPU") else 0
    strategies = _ray("ray.util.scheduling_strategies")
    return (
        ray.remote(Place)
        .options(
            num_cpus=0 if gpus else part["ranks"],
            num_gpus=gpus,
            max_restarts=0,
            max_concurrency=2,
            scheduling_strategy=strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        )
        .remote()
    )


def _require_room(ray: Any, address: str, actors: Dict[str, Any], deadline: float) -> None:
    """Wait until all actors are there; raises VerbFailed."""
    asked = {actor.ready.remote(): host for host, actor in actors.items()}
    done, late = ray.wait(list(asked), num_returns=len(asked), timeout=max(1.0, deadline - time.monotonic()))
    problems: List[Tuple[str, Optional[Exception]]] = [(asked[each], None) for each in late]
    for each in done:
        try:
            ray.get(each)
        except ray.exceptions.RayError as error:
            problems.append((asked[each], error))
    if problems:
        raise VerbFailed(
            f"the cluster of Ray at {address} has no room on {', '.join(host for host, _ in problems)}",
            "; ".join(f"{host}: {_first_line(error) if error else 'its actor waits'}" for host, error in problems),
            "`ray status` there says what is free; every slot of a host takes a CPU or a GPU of its node",
        )
