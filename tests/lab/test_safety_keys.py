"""A host that shows another key is no longer that host: every command that would speak to it refuses (S1)."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from gangline.transport.hostkeys import fingerprint
from tests.lab import played_torch
from tests.lab.ordinary import User

SLEEPER = "import time\nprint('here I am', flush=True)\ntime.sleep(600)\n"
JOB = "model: {path: ./model, start: random}\ndata: {train: ./a.txt}\nbatch: 2\nsteps: 2\n"
VERBS = {
    "check": "check",
    "check, one family": "check --only network",
    "check, as data": "check --json",
    "plan": "plan job.yaml",
    "train": "train job.yaml",
    "train, dry": "train job.yaml --dry-run",
    "run": "run --dir project -- sleeper.py",
    "run, dry": "run --dry-run --dir project -- sleeper.py",
    "bench": "bench network",
    "ps": "ps",
    "ps, as data": "ps --json",
    "logs": "logs {run}",
    "logs of torchrun": "logs {run} --console",
    "logs, followed": "logs {run} --follow",
    "attach": "attach {run}",
    "stop": "stop {run}",
    "stop, now": "stop {run} --now",
    "stop, dry": "stop {run} --dry-run",
    "resume": "resume {run}",
    "resume, dry": "resume {run} --dry-run",
    "export": "export tame-vole-1",
    "chat": "chat tame-vole-1 --prompt hello",
    "init": "init h0 h1 --yes --force",
    "init, without --yes": "init --pin cluster.yaml",
}
"""All that speak to hosts. `logs --tensorboard` is as `logs`, `demo` knows this computer only."""
TRAINED = "cd .local/state/gangline/runs && cp -r $0 tame-vole-1 && rm tame-vole-1/command.json"
"""A run of the trainer on the same hosts, as far as the records here say."""


@pytest.fixture(scope="module")
def lab_user():
    from tests.lab.hosts import Lab

    with Lab(2, meshed=True) as lab:
        user = User(lab)
        python = played_torch.install(user, lab.hosts)
        user.check(["gangline", "init", "h0", "h1"])
        text = user.read("cluster.yaml").replace("slots: 1", f"python: {python}\n    slots: 1")
        user.write("cluster.yaml", text)
        user.write("project/sleeper.py", SLEEPER)
        user.write("job.yaml", JOB)
        user.write("a.txt", "one\n\ntwo\n")
        user.write("model/config.json", '{"model_type": "llama"}')
        yield user


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_another_key_stops_every_verb_and_both_fingerprints_are_named(lab_user):
    user, (h0, h1) = lab_user, lab_user.lab.hosts
    words = ["gangline", "run", "--detach", "--resume-flag=--again", "--dir", "project", "--", "sleeper.py"]
    run = user.check(words, timeout_s=100).strip()
    user.check(["sh", "-c", TRAINED, run])
    for swapped, verbs in ((h0, VERBS), (h1, [*VERBS][:9])):
        old, new = fingerprint(swapped.host_key), fingerprint(swapped.new_host_key())
        with ThreadPoolExecutor(max_workers=4) as pool:
            ask = lambda words: user.run(["gangline", *words.format(run=run).split()], timeout_s=100)  # noqa: E731
            said = dict(zip(verbs, pool.map(ask, [VERBS[verb] for verb in verbs]), strict=True))
        for verb, done in said.items():
            assert done.returncode == (2 if "--pin" in VERBS[verb] else 4), (verb, done.stdout, done.stderr)
            assert old in done.stderr, (verb, done.stderr)
            assert new in done.stderr, (verb, done.stderr)
            assert "/etc/ssh/ssh_host_ed25519_key.pub" in done.stderr, (verb, done.stderr)
        trust(user, run if swapped is h0 else None)
    assert '"phase": "running"' in user.check(["gangline", "ps", "--json"])
    assert user.check(["gangline", "stop", run, "--now"]) == f"{run} stopped\n"


def trust(user, run):
    """The user has looked at the console of the host, and says so: then everything works again."""
    done = user.run(["gangline", "init", "--pin", "cluster.yaml", "--yes"])
    assert done.returncode == 0, done.stderr
    if run:
        assert f"and in the records of 2 runs: {', '.join(sorted([run, 'tame-vole-1']))}" in done.stderr
        assert [run, "sleeper", "running"] in [line.split()[:3] for line in user.check(["gangline", "ps"]).splitlines()]
