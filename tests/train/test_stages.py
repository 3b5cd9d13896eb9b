"""A model served in stages: its layers lie in several processes, and hidden states travel between them."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.recorded import install
from tests.train import cases_serving, cases_stages
from tests.waiting import at_once

openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

pytestmark = pytest.mark.timeout(600)  # several processes import torch

TOKEN = "served-to-friends-only"


@pytest.fixture(scope="module")
def deep(_session_zygote, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return _session_zygote.pool(1).run(cases_stages.make_deep, folder=str(folder))[0]


def worker(*words):
    argv = [sys.executable, "-m", "gangline.worker", *words]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
    process.stdin.write(json.dumps({"token": TOKEN, "stage_key": cases_serving.KEY}) + "\n")
    process.stdin.flush()
    return process


class Crew:
    """Three processes: the endpoint with the first stage, and the stages behind it."""

    def __init__(self, folder, *words):
        self.stages = [worker("stage", folder, "--address", "127.0.0.1") for _ in range(2)]
        self.ports = [json.loads(stage.stdout.readline())["port"] for stage in self.stages]
        behind = [f"--stage=h{number}=127.0.0.1:{port}" for number, port in enumerate(self.ports, 1)]
        self.first = worker("serve", folder, "--name", "deep", "--engine", "stages", "--host", "h0", *behind, *words)
        self.said = json.loads(self.first.stdout.readline())

    def client(self):
        url = f"http://127.0.0.1:{self.said['port']}/v1"
        return openai.OpenAI(base_url=url, api_key=TOKEN, max_retries=0)

    def ends(self):
        """The exit codes of all, once they have ended by themselves."""
        return [process.wait(60) for process in (self.first, *self.stages)]

    def close(self):
        for process in (self.first, *self.stages):
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        try:
            return self.ends()
        finally:
            for process in (self.first, *self.stages):
                process.kill()
                process.wait()
                process.stdout.close()


@pytest.fixture(scope="module")
def crew(deep):
    found = Crew(deep, "--parallel", "8", "--context", "120")
    yield found
    assert found.close() == [0, 0, 0]


def complete(client, prompt, **changes):
    asked = {"model": "deep", "temperature": 0, "max_tokens": 16, **changes}
    return client.completions.create(prompt=prompt, **asked)


def test_three_processes_say_what_plain_transformers_says_one_after_the_other_and_at_once(crew, deep, pool):
    prompts = [f"the {word} number {number}" for number in range(5) for word in ("tea", "cup", "otter", "sled")]
    arguments = {"folder": deep, "prompts": prompts, "num_tokens": 64}
    expected = pool(1).run(cases_serving.plain_answers, **arguments)[0]
    assert len(set(expected)) == 20
    with crew.client() as client:
        alone = [complete(client, prompt, max_tokens=64).choices[0].text for prompt in prompts[:4]]
        together = at_once(20, lambda number: complete(client, prompts[number], max_tokens=64).choices[0].text)
    assert alone == expected[:4]
    assert together == expected


def test_each_process_has_its_layers_and_no_others(crew):
    stages = crew.said["plan"]["stages"]
    assert [stage["host"] for stage in stages] == ["h0", "h1", "h2"]
    spans = [range(stage["first_layer"], stage["last_layer"] + 1) for stage in stages]
    assert [number for span in spans for number in span] == list(range(5))
    per_layer = {stage["cache_bytes"] / len(span) for stage, span in zip(stages, spans, strict=True)}
    assert per_layer == {2 * 2 * 8 * 4 * 121 * 8}  # keys and values of two heads of eight numbers, eight answers


def test_a_stranger_who_calls_a_stage_gets_nothing_and_holds_nobody_up(deep):
    stage = worker("stage", deep, "--address", "127.0.0.1")
    try:
        port = json.loads(stage.stdout.readline())["port"]
        for said in (b"", b"x" * 64):
            with socket.create_connection(("127.0.0.1", port), timeout=20) as stranger:
                stranger.sendall(said)
                stranger.shutdown(socket.SHUT_WR)
                heard = b""
                with contextlib.suppress(ConnectionResetError):
                    while piece := stranger.recv(4096):
                        heard += piece
                assert len(heard) <= 32  # a number that was drawn, and no proof
        first = worker(
            "serve", deep, "--name", "deep", "--engine", "stages", "--parallel", "1", f"--stage=h1=127.0.0.1:{port}"
        )
        assert json.loads(first.stdout.readline())["kind"] == "serving"
        first.stdin.close()
        first.stdout.close()
        assert first.wait(60) == 0
        assert stage.wait(60) == 0
    finally:
        stage.kill()
        stage.wait()
        stage.stdin.close()
        stage.stdout.close()


def test_a_stage_that_is_killed_within_an_answer_ends_it_with_the_reason_and_leaves_nothing(deep):
    crew = Crew(deep, "--parallel", "2", "--context", "120")
    try:
        with crew.client() as client:
            stream = complete(client, "tea", max_tokens=100, stream=True)
            next(iter(stream))
            os.kill(crew.stages[1].pid, signal.SIGSTOP)  # so that the answer is not over before it is killed
            time.sleep(0.1)
            crew.stages[1].kill()
            with pytest.raises(openai.APIError, match=r"h2 has gone"):
                list(stream)
        first, middle, last = crew.ends()
        assert (first, middle, last) == (crew.first.returncode, 0, -signal.SIGKILL)
        assert first not in {0, None}
        told = json.loads(crew.first.stdout.readlines()[-1])
        assert (told["kind"], "has gone, and with it its layers" in told["what"]) == ("error", True)
    finally:
        crew.close()


def test_a_stage_whose_pass_does_not_end_hangs_and_is_named(pool, tmp_path):
    seen = pool(1).run(cases_stages.stage_that_hangs, folder=str(tmp_path))[0]
    assert seen["what"] == "h1 hangs, and with it its layers of the model"
    assert seen["broken"] == seen["what"]


def test_a_stage_that_another_one_misses_is_named_and_not_the_one_that_says_so(pool, tmp_path):
    assert pool(1).run(cases_stages.stage_missed_by_another, folder=str(tmp_path))[0].startswith("h0 hangs")


@pytest.mark.parametrize("kind", ["window", "some windows", "mixture", "long rope", "states", "learned positions"])
def test_kinds_of_models_in_stages_have_the_answers_of_one_process_or_are_refused(kind, pool, tmp_path):
    seen = pool(1).run(cases_stages.kinds_in_stages, folder=str(tmp_path), kind=kind)[0]
    if kind in {"long rope", "states", "learned positions"}:
        assert seen["refused"]
    else:
        assert seen == {"same": True, "each token once": True}


def test_an_error_in_a_later_stage_ends_its_answers_and_no_others(pool, tmp_path):
    seen = pool(1).run(cases_stages.stages_with_errors, folder=str(tmp_path))[0]
    assert seen == ["RunFailed", "h0: a pass failed in its layers", "length"]


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_strangers_who_say_nothing_hold_nobody_up_over_ipv4_and_ipv6(address, pool):
    try:
        socket.create_server((address, 0), family=socket.getaddrinfo(address, 0)[0][0]).close()
    except OSError as error:
        pytest.skip(f"no {address} here: {error}")
    assert pool(1).run(cases_stages.met, address=address)[0] == {"do": "open"}


def test_a_tensor_that_finds_no_memory_ends_the_connection_and_not_the_thread_that_reads(pool):
    assert "RuntimeError" in pool(1).run(cases_stages.without_memory)[0]


def test_as_many_passes_are_on_their_way_as_there_are_stages(pool, tmp_path):
    assert pool(1).run(cases_stages.in_flight, folder=str(tmp_path))[0] == 3


def test_layers_follow_speed_as_far_as_memory_allows(pool):
    def divided(*facts, **words):
        return pool(1).run(cases_stages.divided, facts=facts, **words)[0]

    assert divided((9000, 1.0), (9000, 2.0)) == [7, 3]
    assert divided((600, 1.0), (9000, 2.0)) == [4, 6]  # (0.9 * 600 - 50) MiB has room for four
    assert "do not fit" in divided((400, 1.0), (400, 1.0)) or "does not fit" in divided((400, 1.0), (400, 1.0))
    assert "cannot be divided among 11 hosts" in divided(*[(9000, 1.0)] * 11)


def test_the_weights_of_all_stages_are_those_of_the_model_and_the_tied_table_once_more(pool, tmp_path):
    seen = pool(1).run(cases_stages.stage_bytes, folder=str(tmp_path))[0]
    assert max(seen["stages"]) < 0.8 * seen["whole"]  # three of five layers and the table, where a host is that fast
    assert seen["whole"] + seen["table"] <= sum(seen["stages"]) < seen["whole"] + seen["table"] + 4096


@pytest.fixture
def served_run(tmp_path):
    """`gangline` with a home that has a run of two hosts, both this computer; what it serves is stopped at the end."""
    home = tmp_path / "home"
    run = install("pipeline-finished", home)
    env = {**os.environ, "GANGLINE_HOME": str(home), "COLUMNS": "200", "OMP_NUM_THREADS": "1"}

    def gangline(*words):
        argv = [str(Path(sys.executable).with_name("gangline")), *words]
        return subprocess.run(argv, capture_output=True, text=True, timeout=500, env=env, cwd=tmp_path)

    gangline.run = run
    yield gangline
    for name in ("serve-both", "serve-one"):
        gangline("stop", name)
    assert list(home.parent.rglob("served")) == []  # models that were brought are gone with their endpoints


def first_words(begun):
    assert begun.returncode == 0, begun.stderr
    url, key = (line.partition("=")[2] for line in begun.stdout.splitlines())
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
        [model] = [each.id for each in client.models.list()]
        return complete(client, "tea", model=model).choices[0].text


def stage_workers():
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if b"gangline.worker" in words and b"stage" in words and any(b"hosts/pc2" in word for word in words):
                found.append(int(path.parent.name))
    return found


def test_a_run_is_served_over_its_hosts_or_on_one_of_them_with_the_same_answers(served_run):
    asked = ("--parallel", "2", "--detach")
    together = served_run("serve", served_run.run, "--on", "pc1", "--on", "all", "--name", "both", *asked)
    said = first_words(together)
    assert "stage    pc1: layers 0 to 0" in together.stderr
    assert "stage    pc2: layers 1 to 1" in together.stderr
    alone = served_run("serve", served_run.run, "--on", "pc2", "--name", "one", *asked)
    assert first_words(alone) == said
    assert served_run("stop", "serve-one").stdout == "serve-one stopped\n"
    [stage] = stage_workers()
    os.kill(stage, signal.SIGKILL)
    deadline = time.monotonic() + 240
    while (state := endpoints(served_run)["serve-both"])["phase"] == "serving":
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert (state["phase"], "pc2 has gone" in served_run("ps").stderr) == ("failed", True)
    assert stage_workers() == []


def endpoints(gangline):
    return {each["id"]: each for each in json.loads(gangline("ps", "--json").stdout)["endpoints"]}


def test_hosts_that_are_not_of_the_run_and_folders_on_hosts_are_refused(served_run, tmp_path):
    stranger = served_run("serve", served_run.run, "--on", "pc1", "--on", "pc9")
    assert (stranger.returncode, "its hosts: pc1, pc2" in stranger.stderr) == (2, True)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    folder = served_run("serve", str(tmp_path / "model"), "--on", "pc1")
    assert (folder.returncode, "--on is for a run" in folder.stderr) == (2, True)
