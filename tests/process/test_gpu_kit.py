"""`python -m benchmarks.gpu`: goes on where it stopped, survives every case, and packs what a machine lacks."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import main
from benchmarks.gpu.cases import CASES, Case
from benchmarks.gpu.pack import LIST, PackError, pack, unpack
from benchmarks.gpu.runs import Results, probe

ROOT = Path(__file__).parents[2]
# A process of its own: what cases leave behind becomes its children, and it kills all of those.
DRIVER = """
import sys
from pathlib import Path
from benchmarks.gpu.cases import Case
from benchmarks.gpu.runs import Results, run_all
cases = [Case(name=name, argv=("{python}", "-c", code), expected_s=expected, limit_s=limit, shows="", num_gpus=gpus)
         for name, code, expected, limit, gpus in CASES]
run_all(cases, Results.read(Path(sys.argv[1])), minutes=MINUTES, device={"gpus": ["a card"]})
"""
GOOD = "print('fine')"
BAD = "print('the reason'); raise SystemExit(3)"
HANGS = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
CRASHES = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
LEAVES_A_PROCESS = """
import subprocess, sys
print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True).pid)
"""
KILLS_THE_KIT = "import os, signal; os.kill(os.getppid(), signal.SIGKILL)"


def drive(results, *cases, minutes=5.0):
    """Run cases (name, code, expected seconds, limit, GPUs); the lines that are printed."""
    rows = [(*case, *(1.0, 60.0, 1)[len(case) - 2 :]) for case in cases]
    text = DRIVER.replace("CASES", repr(rows)).replace("MINUTES", repr(minutes))
    told = subprocess.run([sys.executable, "-c", text, results], cwd=ROOT, capture_output=True, text=True, timeout=100)
    return told.stdout.splitlines()


def ends(results):
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    return {line["case"]: line for line in lines if line["event"] == "end"}


@pytest.fixture
def results(tmp_path):
    return tmp_path / "out" / "results.jsonl"


def test_a_failure_a_hang_and_a_crash_do_not_stop_the_others(results):
    told = drive(results, ("bad", BAD), ("hangs", HANGS, 1.0, 1.5), ("crashes", CRASHES), ("good", GOOD))
    found = ends(results)
    assert {name: line["result"] for name, line in found.items()} == {
        "bad": "failed",
        "hangs": "hung",
        "crashes": "crashed",
        "good": "passed",
    }
    assert (found["bad"]["code"], found["bad"]["tail"]) == (3, ["the reason"])
    assert found["crashes"]["signal"] == "SIGKILL"
    assert any("the reason" in line for line in told)
    assert Path(found["good"]["log"]).read_text() == "fine\n"


def test_what_is_done_is_not_done_again(results):
    drive(results, ("bad", BAD), ("good", GOOD))
    before = results.read_text()
    told = drive(results, ("bad", BAD), ("good", GOOD))
    assert results.read_text() == before
    assert told == ["done     bad: failed", "done     good: passed"]


def test_a_case_leaves_no_process_behind(results):
    drive(results, ("leaves", LEAVES_A_PROCESS))
    left = int(ends(results)["leaves"]["tail"][0])
    assert not Path(f"/proc/{left}").exists()


def test_a_case_that_takes_the_kit_with_it_is_tried_twice_and_the_others_are_done(results):
    cases = ("kills", KILLS_THE_KIT), ("good", GOOD)
    for _ in range(2):
        drive(results, *cases)
        assert not ends(results)
    told = drive(results, *cases)
    assert told[0] == "done     kills: crashed"
    assert ends(results)["good"]["result"] == "passed"


def test_a_case_that_does_not_fit_waits_and_a_shorter_one_is_run(results):
    told = drive(results, ("long", GOOD, 900.0, 1800.0), ("short", GOOD), minutes=1.0)
    assert told[0].startswith("left     long: it takes about 900 s; ")
    assert list(ends(results)) == ["short"]


def test_a_case_that_the_time_cuts_off_is_not_done(results):
    drive(results, ("long", HANGS, 0.5, 600.0), minutes=0.03)
    assert ends(results)["long"]["result"] == "cut off"
    assert Results.read(results).state(Case(name="long", argv=(), expected_s=1, limit_s=1, shows="")) == "to do"


def test_half_a_line_at_the_end_of_the_results_is_passed_over(results):
    drive(results, ("good", GOOD))
    with results.open("a") as stream:
        stream.write('{"event": "en')
    drive(results, ("good", GOOD), ("other", GOOD))
    assert [line for line in results.read_text().splitlines() if '"event": "end"' in line and '"other"' in line]
    assert results.read_text().count('"event": "begin"') == 2


DAEMON = """#!/bin/sh
sleep 600 > /dev/null 2>&1 &
echo "$@ $CUDA_MPS_PIPE_DIRECTORY $!" > {told}
exit {code}
"""


@pytest.mark.parametrize(("code", "shares"), [(0, True), (1, False), (None, False)])
def test_ranks_on_one_card_share_it_by_mps_where_its_daemon_starts_and_it_ends_with_them(
    results, tmp_path, code, shares
):
    path, told = tmp_path / "bin", tmp_path / "told"
    path.mkdir()
    if code is not None:
        (path / "nvidia-cuda-mps-control").write_text(DAEMON.format(told=told, code=code))
        (path / "nvidia-cuda-mps-control").chmod(0o700)
    seen = "import os; print(os.environ.get('CUDA_MPS_PIPE_DIRECTORY'))"
    text = DRIVER.replace("CASES", repr([("ranks", seen, 1.0, 60.0, 1)])).replace("MINUTES", "5.0")
    text = text.replace("num_gpus=gpus", "num_gpus=gpus, at_once=True")
    environment = {**os.environ, "PATH": f"{path}{os.pathsep}/usr/bin{os.pathsep}/bin"}
    subprocess.run([sys.executable, "-c", text, str(results)], cwd=ROOT, env=environment, check=True, timeout=60)
    line = ends(results)["ranks"]
    assert (line["result"], line["mps"]) == ("passed", shares)
    assert (line["tail"] != ["None"]) == shares
    if code is not None:
        words, pipe, daemon = told.read_text().split()
        assert words == "-d"
        assert [pipe] == line["tail"] or not shares
        assert not Path("/proc", daemon).exists()


def test_too_few_gpus_are_a_skip_with_a_reason_and_nothing_is_done(results):
    assert drive(results, ("two", GOOD, 1.0, 60.0, 2)) == ["skipped  two: it needs 2 GPUs; here: 1"]
    assert not results.exists()


def test_tests_that_were_all_skipped_are_no_success(results):
    drive(results, ("skipped", "print('7 skipped, 3 deselected in 1.0s')"), ("some", "print('1 passed, 7 skipped')"))
    assert {name: line["result"] for name, line in ends(results).items()} == {"skipped": "skipped", "some": "passed"}


def test_without_a_gpu_every_case_is_skipped_with_the_reason(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("benchmarks.gpu.__main__.probe", lambda: {"gpus": [], "why": "torch 2.13.0+cpu sees no GPU"})
    assert main(["--results", str(tmp_path / "results.jsonl")]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "GPUs: none (torch 2.13.0+cpu sees no GPU); every case is skipped"
    assert told[1:] == [f"skipped  {case.name}: torch 2.13.0+cpu sees no GPU" for case in CASES]


def test_the_list_shows_every_case_and_runs_none(tmp_path, capsys):
    assert main(["--list", "--results", str(tmp_path / "results.jsonl")]) == 0
    assert [line.split()[2] for line in capsys.readouterr().out.splitlines()] == [case.name for case in CASES]


def test_failed_cases_are_run_again_only_when_that_is_asked_for(results):
    drive(results, ("packed-weights", BAD), ("checkpoints", GOOD))
    main(["--again", "failed", "--list", "--results", str(results)])
    told = drive(results, ("packed-weights", GOOD), ("checkpoints", GOOD))
    assert told[0].startswith("passed   packed-weights")
    assert told[1] == "done     checkpoints: passed"


@pytest.mark.parametrize(
    ("code", "limit_s", "why"),
    [
        (
            "raise RuntimeError('the driver is on fire')",
            20,
            "torch cannot be asked: RuntimeError: the driver is on fire",
        ),
        ("import time; time.sleep(60)", 0.3, "torch did not answer within 0.3 s: does the driver hang?"),
    ],
)
def test_a_driver_that_fails_or_hangs_is_no_gpu(tmp_path, code, limit_s, why):
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\n{code}\n")
    python.chmod(0o700)
    assert probe(str(python), limit_s=limit_s) == {"gpus": [], "why": why}


def test_every_gpu_test_is_in_the_table():
    words = {word for case in CASES for word in case.argv}
    marked = [
        path
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"^@pytest\.mark\.gpu", path.read_text(), re.MULTILINE)
    ]
    assert marked
    assert [str(path.relative_to(ROOT)) for path in marked if str(path.relative_to(ROOT)) not in words] == []
    assert [word for word in words if word.startswith("tests/") and not (ROOT / word).exists()] == []


def test_names_differ_and_a_limit_leaves_room():
    assert len({case.name for case in CASES}) == len(CASES)
    assert all(case.limit_s >= 2 * case.expected_s for case in CASES)


# --- packing: wheels of one file each in a folder, and pip without any index ---


def wheel(folder, name, version, *requires, size=0):
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    rows = "".join(f"Requires-Dist: {row}\n" for row in requires)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}/__init__.py", f"VERSION = {version!r}\n")
        archive.writestr(f"{name}/data", os.urandom(size))
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{rows}")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")


HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """What pip finds: rocket needs fuel (new enough) and torch; there is fuel 1.0 on the machine."""
    folder = tmp_path / "index"
    wheel(
        folder, "rocket", "2.5", "fuel>=2", "torch", "paint ; extra == 'show'", "old ; python_version < '3'", size=5000
    )
    wheel(folder, "fuel", "2.1", "Tank")
    wheel(folder, "tank", "1.0")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    return folder


def test_where_packs_are_unpacked_nothing_but_python_and_pip_is_needed():
    told = subprocess.run([sys.executable, "-S", "-m", "benchmarks.gpu", "--list"], cwd=ROOT, capture_output=True)
    assert (told.returncode, told.stderr) == (0, b"")  # -S: no package is found


def test_a_package_without_a_wheel_is_built_if_it_fits_every_python(tmp_path, index):
    source = tmp_path / "rope-1.0"
    source.mkdir()
    backend = (
        "import zipfile\n"
        "def build_wheel(folder, *_):\n"
        "    name = 'rope-1.0-TAG.whl'\n"
        "    with zipfile.ZipFile(folder + '/' + name, 'w') as archive:\n"
        "        archive.writestr('rope.py', '')\n"
        "        archive.writestr('rope-1.0.dist-info/METADATA', 'Metadata-Version: 2.1\\nName: rope\\nVersion: 1.0\\n')\n"
        "        archive.writestr('rope-1.0.dist-info/WHEEL', 'Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: TAG\\n')\n"
        "        archive.writestr('rope-1.0.dist-info/RECORD', '')\n"
        "    return name\n"
    )
    (source / "pyproject.toml").write_text('[build-system]\nrequires = []\nbuild-backend = "b"\nbackend-path = ["."]\n')
    (source / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: rope\nVersion: 1.0\n")

    def offer(tag):
        (source / "b.py").write_text(backend.replace("TAG", tag))
        with tarfile.open(index / "rope-1.0.tar.gz", "w:gz") as archive:
            archive.add(source, arcname=source.name)

    offer("py3-none-any")
    assert packed(tmp_path, "rope")["wheels"] == ["rope-1.0-py3-none-any.whl"]
    shutil.rmtree(tmp_path / "pack")
    machine = f"cp{sys.version_info.major}{sys.version_info.minor}-none-linux_{os.uname().machine}"
    offer(machine)
    with pytest.raises(PackError, match=f"rope: no wheel for Python {HERE}; rope-1.0-{machine}.whl fits this computer"):
        packed(tmp_path, "rope")


def listed(tmp_path, **versions):
    path = tmp_path / "there.json"
    path.write_text(json.dumps([{"name": name, "version": version} for name, version in versions.items()]))
    return path


def packed(tmp_path, *wanted, piece_mib=60.0, cuda="", **versions):
    there = listed(tmp_path, **versions)
    words = {"there": there, "python": HERE, "piece_mib": piece_mib, "cuda": cuda}
    return pack(tmp_path / "pack", wanted=wanted, **words)


def test_only_what_is_missing_or_too_old_is_packed_and_never_torch(tmp_path, index):
    assert packed(tmp_path, "rocket>=2,<3", torch="2.11.0+cu130", fuel="1.0", tank="0.9")["wheels"] == [
        "fuel-2.1-py3-none-any.whl",
        "rocket-2.5-py3-none-any.whl",
    ]


def test_what_is_there_in_a_version_that_does_is_left_out(tmp_path, index):
    assert packed(tmp_path, "rocket>=2,<3", "fuel>=2", rocket="2.0", fuel="2.0.1")["wheels"] == []


def test_pieces_have_the_given_size_and_are_put_together_again(tmp_path, index):
    made = packed(tmp_path, "rocket", "torch>=2.10", piece_mib=4096 / (1 << 20), torch="2.11.0")
    sizes = [(tmp_path / "pack" / name).stat().st_size for name in made["pieces"]]
    assert len(sizes) > 2
    assert max(sizes) <= 4096
    unpack(tmp_path / "pack", into=tmp_path / "site")
    code = "import rocket, fuel, tank; print(rocket.VERSION, fuel.VERSION, tank.VERSION)"
    told = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path / "site")}, capture_output=True)
    assert told.stdout.decode().split() == ["2.5", "2.1", "1.0"]


def test_libraries_for_other_versions_of_cuda_and_for_other_cards_are_left_out(tmp_path, index):
    files = ["cpu", "cuda124", "cuda130", "rocm72", "xpu2025"]
    with zipfile.ZipFile(index / "tank-1.0-py3-none-any.whl", "a") as archive:
        for name in files:
            archive.writestr(f"tank/lib_{name}.so", os.urandom(5000))
    packed(tmp_path, "tank", cuda="13.0")
    unpack(tmp_path / "pack", into=tmp_path / "site")
    assert sorted(path.name for path in (tmp_path / "site" / "tank").glob("*.so")) == ["lib_cpu.so", "lib_cuda130.so"]


def test_a_piece_that_is_missing_or_damaged_is_named(tmp_path, index):
    made = packed(tmp_path, "rocket", piece_mib=4096 / (1 << 20))
    (tmp_path / "pack" / made["pieces"][0]).unlink()
    (tmp_path / "pack" / made["pieces"][1]).write_bytes(b"?")
    with pytest.raises(PackError, match=r"piece-001, piece-002 in .*: missing or damaged; copy them again"):
        unpack(tmp_path / "pack", into=tmp_path / "site")


def test_a_pack_for_another_python_is_refused(tmp_path, index):
    packed(tmp_path, "tank")
    path = tmp_path / "pack" / LIST
    path.write_text(path.read_text().replace(f'"python": "{HERE}"', '"python": "3.99"'))
    with pytest.raises(PackError, match=rf"packed for Python 3.99; this is {HERE}: pack again with --python {HERE}"):
        unpack(tmp_path / "pack", into=tmp_path / "site")


@pytest.mark.parametrize(
    ("wanted", "versions", "words"),
    [
        (["nothing-like-it"], {}, "pip download nothing-like-it failed"),
        (["rocket", "torch>=2.10"], {}, "does not list torch, which is never packed: install it there first"),
        (["fuel==2.1", "fuel<2"], {}, "pip download fuel<2 failed"),
    ],
)
def test_what_cannot_be_packed_is_told(tmp_path, index, wanted, versions, words):
    with pytest.raises(PackError, match=re.escape(words)):
        packed(tmp_path, *wanted, **versions)


def test_the_two_commands_of_packing(tmp_path, index, capsys, monkeypatch):
    there = listed(tmp_path, torch="2.11.0")
    assert main(["pack", "--to", str(tmp_path), "--there", str(there)]) == 2
    assert "is not empty: name another folder, or delete it" in capsys.readouterr().err
    there.write_text("{}")
    assert main(["pack", "--to", str(tmp_path / "new"), "--there", str(tmp_path / "no.json")]) == 2
    assert "is not what `pip list --format json` prints" in capsys.readouterr().err
    packed(tmp_path, "tank")
    assert main(["unpack", "--from", str(tmp_path / "pack"), "--into", str(tmp_path / "site")]) == 0
    assert (tmp_path / "site" / "tank" / "__init__.py").is_file()
    assert main(["unpack", "--from", str(tmp_path / "none")]) == 2
