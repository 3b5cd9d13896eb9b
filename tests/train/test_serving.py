"""A served model, asked by OpenAI's own client."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from random import Random

import pytest

from gangline.worker.serving.engine import ENGINES
from gangline.worker.talk import without_controls
from tests.train import cases_serving
from tests.waiting import at_once

openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

TOKEN = "served-to-friends-only"
HELLO = [{"role": "user", "content": "tea?"}]


@pytest.fixture(scope="module")
def models(_session_zygote, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return _session_zygote.pool(1).run(cases_serving.make, folder=str(folder), template=True)[0]


@pytest.fixture(scope="module")
def worker(models):
    base, adapter = models
    argv = [sys.executable, "-m", "gangline.worker", "serve", base, "--name", "tiny", "--adapter", f"tuned={adapter}"]
    argv += ["--parallel", "8", "--context", "120"]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    process.stdin.write(json.dumps({"token": TOKEN}) + "\n")
    process.stdin.flush()
    yield process, json.loads(process.stdout.readline())
    process.stdin.close()
    process.stdout.close()
    assert process.wait(90) == 0


@pytest.fixture
def client(worker):
    _, said = worker
    with openai.OpenAI(base_url=f"http://127.0.0.1:{said['port']}/v1", api_key=TOKEN, max_retries=0) as found:
        yield found


def complete(client, prompt, *, model="tiny", **changes):
    return client.completions.create(model=model, prompt=prompt, **{"temperature": 0, "max_tokens": 16, **changes})


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_keeps_the_contract(engine, pool, tmp_path):
    assert pool(1).run(cases_serving.contract, folder=str(tmp_path), engine=engine)[0] == {
        "models": ["m"],
        "begins without text": True,
        "the same again": True,
        "counted": True,
        "too long": "UsageError",
        "no prompt": "UsageError",
        "full": "QueueFull",
        "goes on after a cancelled answer": True,
        "a cancelled answer ends": True,
        "closing ends answers": ["RunFailed", "RunFailed"],
        "closed": "RunFailed",
    }


@pytest.mark.parametrize("kind", ["window", "some windows", "mixture", "learned positions"])
def test_rows_that_join_and_leave_have_the_tokens_of_plain_passes_and_each_token_passes_once(kind, pool):
    seen = pool(1).run(cases_serving.passes_of, kind=kind)[0]
    assert seen == {"together": True, "alone for": "", "same": True, "each token once": True}


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("positions in the scores", "a batch was tried"),
        ("long rope", "longrope"),
        ("ropes", "dynamic"),
        ("chunks", "by chunks"),
        ("states", "keep more than keys and values"),
    ],
)
def test_a_model_whose_batches_differ_answers_one_at_a_time_with_the_reason(kind, reason, pool):
    seen = pool(1).run(cases_serving.passes_of, kind=kind)[0]
    assert reason in seen.pop("alone for")
    assert seen == {"together": False, "same": True, "each token once": True}


def test_a_long_prompt_is_taken_in_parts_between_which_others_get_tokens(pool, tmp_path):
    seen = pool(1).run(cases_serving.beside_a_long_prompt, folder=str(tmp_path))[0]
    assert seen["between"] >= 12  # parts of 8 of 100 tokens
    assert seen["same"]


def test_an_answer_without_numbers_leaves_nothing_in_its_row(pool):
    seen = pool(1).run(cases_serving.after_an_answer_without_numbers)[0]
    assert seen == {"was NaN": True, "same": True, "all are numbers": True}


def test_an_error_that_a_device_tells_late_ends_its_answer_and_no_other(pool, tmp_path):
    assert pool(1).run(cases_serving.after_a_device_error, folder=str(tmp_path))[0] == ["RunFailed", "length"]


def test_an_adapter_is_not_hidden_by_the_model_below_it(pool, tmp_path):
    assert "cannot be served as base" in pool(1).run(cases_serving.adapter_as_base, folder=str(tmp_path))[0]


def test_the_cache_is_planned_within_the_free_memory_and_refused_beyond(pool, tmp_path):
    seen = pool(1).run(cases_serving.cache_plans, folder=str(tmp_path))[0]
    assert (seen["fits"], seen["asked"]) == (4000, 500)
    assert 1000 < seen["shortened"] < 1300  # half of what is free, for two answers
    assert "--context 5000 is longer than this model takes" in seen["too long"]
    assert "the cache of 2 answers of 4000 tokens does not fit; --context 2" in seen["asked and too large"]
    assert "fewer answers at a time" in seen["no room"]
    assert seen["unknown size"] is None
    assert seen["of the model"] == 2 * 2 * 8 * 4  # keys and values, 2 heads of 8 numbers of 4 bytes


def test_the_memory_of_control_groups_of_both_versions_bounds_what_is_free(pool, tmp_path):
    seen = pool(1).run(cases_serving.rooms_of_groups, folder=str(tmp_path))[0]
    assert seen == [[70.0, 50.0], [70.0, 50.0], []]


def test_the_endpoint_says_what_it_planned(worker):
    plan = worker[1]["plan"]
    assert (plan["context"], plan["num_parallel"], plan["alone_for"]) == (120, 8, "")
    assert plan["cache_bytes"] == 2 * (2 * 2 * 8 * 4) * 121 * 8  # of two layers
    assert plan["weight_bytes"] > 0


def test_answers_that_join_at_random_moments_have_the_tokens_of_plain_transformers(client, models, pool):
    random = Random(11)
    prompts = [f"{number} " + "tea " * random.randrange(12) for number in range(20)]
    expected = pool(1).run(cases_serving.plain_answers, folder=models[0], prompts=prompts, num_tokens=64)[0]

    def ask(index):
        threading.Event().wait(random.random())
        return complete(client, prompts[index], max_tokens=64).choices[0].text

    assert at_once(20, ask) == expected


def test_the_tokens_are_those_of_plain_transformers(client, models, pool):
    prompts = [f"the {word} number {number}" for number in range(5) for word in ("tea", "cup", "otter", "sled")]
    arguments = {"folder": models[0], "prompts": prompts, "num_tokens": 64}
    expected = pool(1).run(cases_serving.plain_answers, **arguments)[0]
    assert len(set(expected)) == 20
    assert [complete(client, prompt, max_tokens=64).choices[0].text for prompt in prompts] == expected


def test_adapters_answer_by_name_over_one_base_at_the_same_time(client, models, pool):
    assert [model.id for model in client.models.list()] == ["tiny", "tuned"]
    apart = {name: complete(client, "tea?", model=name, max_tokens=40).choices[0].text for name in ("tiny", "tuned")}
    assert apart["tiny"] != apart["tuned"]
    assert (
        apart["tiny"]
        == pool(1).run(cases_serving.plain_answers, folder=models[0], prompts=["tea?"], num_tokens=40)[0][0]
    )
    assert (
        apart["tuned"]
        == pool(1).run(cases_serving.plain_answers, folder=models[1], prompts=["tea?"], num_tokens=40)[0][0]
    )
    names = ["tiny", "tuned"] * 4
    together = at_once(len(names), lambda i: complete(client, "tea?", model=names[i], max_tokens=40).choices[0].text)
    assert together == [apart[name] for name in names]


def test_a_model_is_found_by_its_name(client):
    assert client.models.retrieve("tuned") in list(client.models.list())
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("nobody")
    assert caught.value.code == "model_not_found"


def test_200_requests_at_once_are_all_answered_as_one_alone_is(client):
    expected = complete(client, "tea").choices[0].text
    assert at_once(200, lambda _: complete(client, "tea").choices[0].text) == [expected] * 200


def test_a_stream_has_the_text_of_the_whole_answer(client):
    asked = {"model": "tiny", "messages": HELLO, "temperature": 0, "max_tokens": 20}
    whole = client.chat.completions.create(**asked)
    stream = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    parts = list(stream)
    assert (
        "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
        == whole.choices[0].message.content
    )
    assert parts[-1].usage == whole.usage
    assert whole.usage.completion_tokens == 20


def test_a_seed_repeats_an_answer(client):
    first, again, other = (complete(client, "tea", temperature=1, seed=seed).choices[0].text for seed in (3, 3, 4))
    assert first == again != other


@pytest.mark.parametrize("temperature", [5e-324, 1e-38, 1e-6])
def test_a_temperature_near_0_is_0(client, temperature):
    assert complete(client, "tea", temperature=temperature).choices[0].text == complete(client, "tea").choices[0].text


def test_a_stop_text_ends_the_answer(client):
    whole = complete(client, "tea", max_tokens=30).choices[0].text
    stop = whole[5:7]
    choice = complete(client, "tea", max_tokens=30, stop=[stop]).choices[0]
    assert choice.text == whole[: whole.index(stop)]
    assert choice.finish_reason == "stop"


def test_clients_that_leave_make_place_for_others(client):
    def leave(_):
        stream = complete(client, "a", max_tokens=100, stream=True)
        next(iter(stream))
        stream.close()

    assert at_once(8, leave) == [None] * 8

    def hang_up(_):
        with pytest.raises(openai.APITimeoutError):
            complete(client.with_options(timeout=0.02), "a", max_tokens=100)

    assert at_once(8, hang_up) == [None] * 8
    assert complete(client, "tea", max_tokens=4).usage.completion_tokens == 4


@pytest.mark.parametrize(
    ("changes", "error", "code"),
    [
        ({"model": "nobody"}, openai.NotFoundError, "model_not_found"),
        ({"messages": [{"role": "user", "content": "x" * 300}]}, openai.BadRequestError, "context_length_exceeded"),
        ({"n": 2}, openai.BadRequestError, None),
        ({"tools": [{"type": "function", "function": {"name": "brew"}}]}, openai.BadRequestError, None),
    ],
)
def test_what_cannot_be_answered_is_refused(client, changes, error, code):
    with pytest.raises(error) as caught:
        client.chat.completions.create(**{"model": "tiny", "messages": HELLO, "max_tokens": 4, **changes})
    assert caught.value.code == code


@pytest.mark.parametrize("key", ["served-to-friends-onlx", "x", "ü"])
def test_a_wrong_token_sees_nothing(client, key):
    ask = client.with_options(api_key="x", default_headers={"Authorization": f"Bearer {key}".encode()})
    for call in (ask.models.list, lambda: complete(ask, "tea")):
        with pytest.raises(openai.AuthenticationError) as caught:
            call()
        assert TOKEN not in str(caught.value)


def test_only_this_computer_reaches_it(worker):
    _, said = worker
    rows = [line.split() for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()]
    mine = [row[1] for row in rows if row[3] == "0A" and row[1].endswith(f":{said['port']:04X}")]
    assert mine == [f"0100007F:{said['port']:04X}"]  # 127.0.0.1 and no other address
    with socket.socket() as outsider:
        outsider.settimeout(5)
        assert outsider.connect_ex(("127.0.0.2", said["port"])) != 0


def test_the_token_is_in_no_word_of_a_command_and_in_no_environment(worker):
    process, _ = worker
    for name in ("cmdline", "environ"):
        assert TOKEN.encode() not in Path(f"/proc/{process.pid}/{name}").read_bytes()


def test_an_endpoint_ends_with_whoever_started_it_and_tells_open_streams(models):
    argv = [sys.executable, "-m", "gangline.worker", "serve", models[0], "--name", "tiny"]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    process.stdin.write(json.dumps({"token": TOKEN}) + "\n")
    process.stdin.flush()
    port = json.loads(process.stdout.readline())["port"]
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=TOKEN, max_retries=0) as client:
        stream = complete(client, "tea", max_tokens=100, stream=True)
        next(iter(stream))
        process.stdin.close()
        process.stdout.close()
        try:
            said = [part.choices[0].finish_reason for part in stream]
        except openai.APIError as error:
            said = [str(error)]
    assert "the endpoint is closing" in said[-1] or said[-1] == "length"
    assert process.wait(30) == 0


def talk(worker, *words, key=TOKEN, source=None):
    url = f"http://127.0.0.1:{worker[1]['port']}"
    return subprocess.run(
        [
            str(Path(sys.executable).with_name("gangline")),
            "chat",
            url,
            "--temperature",
            "0",
            "--max-tokens",
            "12",
            *words,
        ],
        capture_output=True,
        text=True,
        input=source,
        timeout=120,
        env={**os.environ, "OPENAI_API_KEY": key},
    )


def test_gangline_chat_says_what_the_client_of_openai_gets(client, worker):
    asked = {"messages": HELLO, "temperature": 0, "max_tokens": 12}
    said = [
        client.chat.completions.create(model=name, **asked).choices[0].message.content for name in ("tiny", "tuned")
    ]
    tiny, tuned = map(without_controls, said)
    assert talk(worker, "--prompt", "tea?").stdout == f"{tiny}\n"
    both = talk(worker, "--model", "tuned", "--against", "tiny", source="tea?\n")
    assert both.stdout == f"[tuned] {tuned}\n[tiny] {tiny}\n"


def test_gangline_chat_tells_a_wrong_key_and_a_model_that_is_not_there(worker):
    wrong = talk(worker, "--prompt", "tea?", key="not-the-key-of-this-one")
    assert wrong.returncode == 2
    assert "the token is missing or wrong" in wrong.stderr
    assert "Traceback" not in wrong.stderr
    stranger = talk(worker, "--model", "nobody", "--prompt", "tea?")
    assert (stranger.returncode, "it has tiny, tuned" in stranger.stderr) == (2, True)


@pytest.fixture
def looked_after(models, tmp_path):
    """`gangline` with a home of its own, that trains with this Python; what it serves is stopped at the end."""
    env = {**os.environ, "GANGLINE_HOME": str(tmp_path / "home"), "COLUMNS": "200"}

    def gangline(*words):
        argv = [str(Path(sys.executable).with_name("gangline")), *words]
        return subprocess.run(argv, capture_output=True, text=True, timeout=300, env=env, cwd=tmp_path)

    gangline.model = str(models[0])
    gangline.folder = tmp_path / "home" / "endpoints" / "serve-tiny"
    gangline.begun = gangline("serve", models[0], "--name", "tiny", "--parallel", "2", "--detach")
    yield gangline
    gangline("stop", "serve-tiny")


def workers(gangline):
    """Processes here that serve its model as it asked for."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if {b"gangline.worker", b"--parallel=2", gangline.model.encode()} <= set(words):
                found.append(int(path.parent.name))
    return found


def state_of(gangline):
    [found] = json.loads(gangline("ps", "--json").stdout)["endpoints"]
    return found


def until(condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.1)


@pytest.mark.timeout(600)
def test_an_endpoint_in_the_background_is_listed_has_a_log_and_is_stopped(looked_after):
    assert looked_after.begun.returncode == 0, looked_after.begun.stderr
    assert "cache    " in looked_after.begun.stderr
    url, key = (line.partition("=")[2] for line in looked_after.begun.stdout.splitlines())
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
        assert complete(client, "tea", max_tokens=3).usage.completion_tokens == 3
    assert (looked_after.folder / "key.secret").stat().st_mode & 0o077 == 0
    assert not any(key in path.read_text() for path in looked_after.folder.iterdir() if path.name != "key.secret")
    state = state_of(looked_after)
    assert (state["phase"], state["url"], state["models"]) == ("serving", url, ["tiny"])
    assert "serve-tiny  serving" in looked_after("ps").stdout
    assert f"serving tiny at {url}" in looked_after("logs", "serve-tiny").stdout
    again = looked_after("serve", state["target"], "--name", "tiny", "--detach")
    assert (again.returncode, "serve-tiny is serving already" in again.stderr) == (2, True)
    assert looked_after("stop", "serve-tiny").stdout == "serve-tiny stopped\n"
    assert workers(looked_after) == []
    assert not (looked_after.folder / "key.secret").exists()
    failed = looked_after("serve", state["target"], "--name", "tiny", "--context", "100000", "--detach")
    assert (failed.returncode, "--context 100000 is longer than this model takes" in failed.stderr) == (2, True)
    assert state_of(looked_after)["phase"] == "failed"
    assert "off the list" in looked_after("stop", "serve-tiny").stdout
    assert not looked_after.folder.exists()


@pytest.mark.timeout(600)
def test_the_death_of_an_endpoint_is_told_with_its_cause(looked_after):
    [worker] = workers(looked_after)
    os.kill(worker, signal.SIGKILL)
    until(lambda: state_of(looked_after)["phase"] == "failed")
    listed = looked_after("ps").stderr
    assert "SIGKILL: mostly the memory of its computer was used up" in listed


@pytest.mark.timeout(600)
def test_an_endpoint_whose_process_was_killed_leaves_no_worker(looked_after):
    state = json.loads((looked_after.folder / "state.json").read_text())
    os.kill(state["process"]["pid"], signal.SIGKILL)
    until(lambda: not workers(looked_after))
    assert state_of(looked_after)["phase"] == "lost"
    assert "was killed, or this computer was off" in looked_after("ps").stderr
