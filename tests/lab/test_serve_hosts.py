"""A run of three hosts is served by real ssh: on one of them, then over all, until one hangs or is gone."""

import json
import os
import re
import subprocess
import sys
import time

import pytest

from tests.lab.hosts import lab_folders
from tests.lab.user import NewUser, make_model

pytest.importorskip("openai")
pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

pytestmark = pytest.mark.timeout(1800)

JOB = """
name: tiny
model: ./model
method: full
data: {train: ./fox.txt, sequence_length: 32}
batch: 6
micro_batch: 2
steps: 2
strategy: pipeline
"""
PROMPTS = [f"the {word} number {number}" for number in range(5) for word in ("tea", "cup", "otter", "sled")]
NUM_TOKENS = 64
ASK = """
import json, sys, openai
from concurrent.futures import ThreadPoolExecutor
url, key, prompts, num_tokens = json.loads(sys.stdin.read())
with openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=300) as client:
    def ask(prompt):
        try:
            answer = client.completions.create(model="m", prompt=prompt, temperature=0, max_tokens=num_tokens)
            return answer.choices[0].text
        except openai.APIStatusError as error:
            return f"{error.status_code} {error.message}"
    print("asking", flush=True)
    with ThreadPoolExecutor(len(prompts)) as pool:
        print(json.dumps(list(pool.map(ask, prompts))))
"""
PLAIN = """
import json, sys
from tests.train.cases_serving import plain_answers
folder, prompts, num_tokens = json.loads(sys.stdin.read())
print(json.dumps(plain_answers(folder, prompts=prompts, num_tokens=num_tokens)))
"""
KNOCK = """
import socket, sys
with socket.socket() as knocking:
    knocking.settimeout(5)
    print(knocking.connect_ex((sys.argv[1], int(sys.argv[2]))) == 0)
"""
LISTENERS = """
for name in ("tcp", "tcp6"):
    for line in open(f"/proc/net/{name}").read().splitlines()[1:]:
        row = line.split()
        if row[3] == "0A":
            print(row[1])
"""


def ask(user, access, prompts=("tea",), num_tokens=24):
    """Answers, or statuses with their messages, by the official client on the user's computer."""
    return answers(begin_to_ask(user, access, prompts, num_tokens))


def begin_to_ask(user, access, prompts=("tea",), num_tokens=24):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    client = user.desk.popen([sys.executable, "-c", ASK], **pipes)
    client.stdin.write(json.dumps([*access, list(prompts), num_tokens]))
    client.stdin.close()
    assert client.stdout.readline() == "asking\n", client.stderr.read()
    return client


def answers(client):
    with client:
        told = client.stdout.readline()
        assert client.wait(400) == 0, client.stderr.read()
    return json.loads(told)


def serve(user, run, *words):
    begun = user.types("serve", run, *words, "--name", "m", "--parallel", "4", "--detach", timeout_s=600)
    return [line.partition("=")[2] for line in begun.stdout.splitlines()], begun.stderr


def plain_answers(folder, host, served):
    """What plain transformers says with the model that lies on a host."""
    folder.mkdir()
    for name in host.check(["ls", served]).split():
        (folder / name).write_bytes(host.read(f"{served}/{name}"))
    asked, env = json.dumps([str(folder), PROMPTS, NUM_TOKENS]), {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PLAIN], input=asked, check=True, capture_output=True, text=True, env=env
    )
    return json.loads(done.stdout.splitlines()[-1])


def listeners(host):
    return set(host.run(["/usr/bin/python3", "-c", LISTENERS]).stdout.split())


def left(hosts, run):
    """Workers, and models that were brought to be served."""
    look = f"ps ax -o args | grep '[g]angline.worker'; ls -d gangline/runs/{run}/served"
    return [line for host in hosts for line in host.run(["sh", "-c", look]).stdout.splitlines()]


def ended(user):
    """Why the endpoint has ended, once it has."""
    deadline = time.monotonic() + 180
    while (state := json.loads(user.types("ps", "--json").stdout)["endpoints"][0])["phase"] == "serving":
        assert time.monotonic() < deadline
    assert state["phase"] == "failed"
    return user.types("ps").stderr


@pytest.fixture
def served_run(lab, tmp_path):
    """A lab of three hosts, its user, and a run that has finished there."""
    made = lab(3, binds=lab_folders(), disk="8g", shm="2g", ttl_s=1800)
    user = NewUser(made.user)
    user.brings(make_model(tmp_path / "model", num_hidden_layers=4), job=JOB)
    user.describes("h0", "h1", "h2")
    run = user.types("train", "job.yaml", "--detach", timeout_s=600).stdout.strip()
    user.awaits(run, lambda row: row["phase"] not in ("running", "starting"), "its end", patience_s=600)
    assert user.row(run)["phase"] == "finished", user.types("explain", run, code=None).stdout
    return made, user, run


def test_a_run_is_served_over_three_hosts_and_ends_with_any_of_them(served_run, tmp_path):
    made, user, run = served_run
    h0, h1, h2 = made.hosts
    before = [listeners(host) for host in made.hosts]

    access, _ = serve(user, run, "--on", "h1")
    [alone] = ask(user, access)
    opened = [listeners(host) - old for host, old in zip(made.hosts, before, strict=True)]
    assert [len(each) for each in opened] == [0, 1, 0]
    assert min(opened[1]).startswith("0100007F:")  # 127.0.0.1 of the host that was named, and no other address
    assert user.types("stop", "serve-m").stdout == "serve-m stopped\n"
    assert left([*made.hosts, made.user], run) == []

    access, said = serve(user, run, "--on", "h2", "--on", "all")
    layers = re.findall(r"stage    (h\d): layers (\d) to (\d)", said)
    assert [host for host, _, _ in layers] == ["h2", "h0", "h1"]
    assert (layers[0][1], layers[-1][2]) == ("0", "3")
    assert ask(user, access) == [alone]
    assert ask(user, access, PROMPTS, NUM_TOKENS) == plain_answers(
        tmp_path / "served", h0, f"gangline/runs/{run}/served/step-2"
    )
    [refused] = ask(user, (access[0], "not-its-key"))
    assert refused.startswith("401 ")
    opened = [listeners(host) - old for host, old in zip(made.hosts, before, strict=True)]
    assert [len(each) for each in opened] == [0, 0, 1]  # the stages have met, and listen no more
    port = int(min(opened[2]).rpartition(":")[2], 16)
    knocked = made.outsider.run(["/usr/bin/python3", "-c", KNOCK, h2.address, str(port)])
    assert knocked.stdout.split() == ["False"]
    assert "serving m at" in user.types("logs", "serve-m").stdout

    h0.check(["pkill", "-STOP", "-f", "gangline.worker stage"])
    [answer] = ask(user, access)
    assert re.match(r"500 .*h0 hangs, and with it its layers", answer)
    assert "h0 hangs" in ended(user)
    assert left([*made.hosts, made.user], run) == []

    access, _ = serve(user, run, "--on", "all")
    h2.check(["pkill", "-STOP", "-f", "gangline.worker stage"])  # so that its death is within the answer
    client = begin_to_ask(user, access)
    time.sleep(5)
    h2.kill()
    [answer] = answers(client)
    assert re.match(r"500 .*h2 has gone, and with it its layers", answer)
    assert "h2 has gone" in ended(user)
    assert left([h0, h1, made.user], run) == []
