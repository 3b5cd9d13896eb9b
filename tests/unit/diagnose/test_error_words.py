"""Errors whose words have a known form: which object, value and numbers are told, and the user's own call."""

from __future__ import annotations

import re
from importlib import resources

import pytest
import tomli

from gangline.diagnose.error_words import OwnCall, own_call, words_told
from gangline.diagnose.log_search import LogSearch, Sighting
from tests.unit.diagnose.test_corpus import HARMFUL, UNBOUNDED

FORMS = {
    "TypeError: Net.forward() got an unexpected keyword argument 'mask'": "Net.forward() is given mask",
    "TypeError: __init__() got an unexpected keyword argument 'lrr'. Did you mean 'lr'?": "(lr may be meant)",
    "TypeError: save() missing 1 required positional argument: 'step'": "save() is called without 'step'",
    "AttributeError: 'NoneType' object has no attribute 'group'": "the group of None is asked for",
    "AttributeError: module 'numpy' has no attribute 'float_'": "numpy has no float_",
    "NameError: name 'tokeniser' is not defined": "the name tokeniser",
    "UnboundLocalError: cannot access local variable 'loss' where it is not associated with a value": "loss is used",
    "UnboundLocalError: local variable 'loss' referenced before assignment": "loss is used",
    "ValueError: invalid literal for int() with base 10: '4,'": "'4,' is not a whole number",
    "ValueError: could not convert string to float: '1e-4x'": "'1e-4x' is not a number",
    "ValueError: not enough values to unpack (expected 3, got 2)": "3 values are expected there, and 2 come",
    "ValueError: too many values to unpack (expected 2)": "more than 2 values come",
    "RuntimeError: mat1 and mat2 shapes cannot be multiplied (32x768 and 1024x256)": "takes 1024 numbers for each row",
    "IndexError: Target 7 is out of bounds.": "a label is 7",
    "RuntimeError: expected scalar type Long but found Float": "numbers of type Float where Long is wanted",
    "RuntimeError: Parent directory out/step-10 does not exist.": "the folder out/step-10",
    "ValueError: Tried to step 21 times. The specified number of total steps is 20": "was made for 20 steps",
    "zipfile.BadZipFile: File is not a zip file": "no zip archive",
    "gzip.BadGzipFile: Not a gzipped file (b'{\"')": "is not compressed",
    "sqlite3.OperationalError: database is locked": "the same SQLite file",
    "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)": "empty, or no JSON",
    "json.decoder.JSONDecodeError: Extra data: line 2 column 1 (char 14)": "goes on in line 2",
    "json.decoder.JSONDecodeError: Expecting ',' delimiter: line 3 column 5 (char 40)": "line 3, column 5: a comma",
    "tomllib.TOMLDecodeError: Illegal character '\\n' (at line 3, column 13)": "line 3, column 13",
    'yaml.scanner.ScannerError: mapping values are not allowed here, in "a.yaml", line 4, column 7': "a.yaml is not",
    "ValueError: Unknown split \"valid\". Should be one of ['train', 'validation'].": "validation is nearest to it",
    "error: argument --mode: invalid choice: 'fast' (choose from 'slow', 'steady')": "'fast' is none of those",
    "ValueError: Invalid task type: 'A_LM'. Must be one of the following task types: B_LM, SEQ.": "there: B_LM, SEQ",
    "t.py: error: argument --lr: invalid float value: 'x'": "the option --lr got 'x'",
    "sbatch: unrecognized option '--gpu-per-node=1'": "no option --gpu-per-node",
    "rsync: --delete-excludedd: unknown option": "no option --delete-excludedd",
    "run.sh: line 4: MASTER_ADDR: unbound variable": "MASTER_ADDR is not set, and run.sh, line 4",
    "run.sh: line 9: syntax error: unexpected end of file": "a shell script at line 9",
    "a.c:2:10: fatal error: nccl.h: No such file or directory": "the header nccl.h, which a.c includes",
    "a.c:2:10: error: expected ';' before 'return'": "a.c, line 2, does not compile",
    "/usr/bin/ld: cannot find -lnccl: No such file or directory": "libnccl",
    "Makefile:3: *** missing separator.  Stop.": "line 3 of Makefile",
    "ValueError: the batch size (7) needs to be a round multiple of x": "",
    "ValueError: batch_size (7) must be divisible by num_generations (2).": "batch_size 7 is no multiple of num_gen",
    "git: 'lfs' is not a git command. See 'git --help'.": "git knows no command lfs",
    "config: line 3: Bad configuration option: identitifile": "config, line 3, is refused",
    "huggingface_hub.errors.HFValidationError: Repo id must use alphanumeric chars: './base'": "no folder ./base is there",
    "HFValidationError: Repo id must be in the form 'repo_name' or 'a/b': '/m/x'. Use `repo_type`.": "no folder /m/x is",
    "ValueError: Invalid key 'x' in config, values are ignored.": "",
    "ValueError: Invalid value 'x'. Available options are ['a', 'b']": "none of those that are there: a, b",
    "FileNotFoundError: [Errno 2] No such file or directory: '/o/tmp-9' -> '/o/step-9'": "/o/tmp-9 is not there",
    "OSError: [Errno 39] Directory not empty: '/o/tmp-9' -> '/o/step-9'": "/o/step-9 is not empty",
    "./run.sh: line 12: torchrun: command not found": "the program torchrun is not",
    "/usr/bin/bash: torchrun: command not found": "the program torchrun is not",
    "/usr/bin/env: python3: No such file or directory": "python3 is not there",
    "tar: /data/x.tar: Cannot open: No such file or directory": "/data/x.tar is not there",
    "cat: data: Is a directory": "data is a folder",
    "train.sh: Permission denied": "no right to use train.sh",
    "bind: Permission denied": "",  # a call, and no file
    "FileNotFoundError: [Errno 2] No such file or directory: 'a/b'": "a/b is not there",
    "FileNotFoundError: No such file or directory: /m/w.safetensors": "/m/w.safetensors is not there",
    "OSError: [Errno 18] Invalid cross-device link: '/tmp/a' -> '/data/b'": "/data/b cannot be moved",
    "IsADirectoryError: [Errno 21] Is a directory: 'ckpt'": "ckpt is a folder",
    'rsync: [Receiver] mkdir "/home/a/b" failed: No such file or directory (2)': "/home/a/b is not there",
    "_pickle.PicklingError: Can't pickle <function <lambda> at 0x7fad>: attribute lookup failed": "given <lambda>,",
    "AttributeError: Can't pickle local object 'main.<locals>.<lambda>'": "given main.<locals>.<lambda>,",
    "ImportError: attempted relative import with no known parent package": "started as a script",
    "a.c:(.text+0x1): undefined reference to `cosx'": "the linker does not find cosx",
    "make: *** No rule to make target 'tain'.  Stop.": "make has no rule for tain",
    "gzip: stdin: not in gzip format": "no archive of that kind",
    "cat: 'my file': Permission denied": "no right to use my file",
    "job.sh: line 3: ./venv/bin/torchrun: cannot execute: required file not found": "./venv/bin/torchrun names",
    "bash: line 1: torchrun: command not found": "the program torchrun",
    "trainer.service: Command python is not executable: No such file or directory": "",
    "RuntimeError: something of its own": "",
}


@pytest.mark.parametrize("text", FORMS)
def test_the_words_of_an_error_tell_what_is_wrong(text: str) -> None:
    told = words_told(text)
    assert (told is not None) == bool(FORMS[text])
    assert told is None or (FORMS[text] in told.means and told.fix)


@pytest.mark.parametrize(
    ("text", "code", "means"),
    [
        ("KeyError: 'DATA'", "root = os.environ['DATA']", "the environment variable DATA is not set"),
        (
            "ValueError: invalid literal for int() with base 10: 'a'",
            'int(os.environ["N"])',
            "variable N is not a whole",
        ),
        ("ZeroDivisionError: division by zero", "warm = 100 / steps", "steps is 0, and the code divides by it"),
        ("ZeroDivisionError: division by zero", "", "a number that is 0"),
        ("AttributeError: 'NoneType' object has no attribute 'group'", "m = match.group(1)", "match is None where its"),
        ("json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)", 'open("a.json")', "JSON (a.json)"),
    ],
)
def test_the_line_of_code_adds_the_name(text: str, code: str, means: str) -> None:
    told = words_told(text, code)
    assert told is not None
    assert means in told.means


def test_a_key_that_no_environment_is_asked_for_has_no_form() -> None:
    assert words_told("KeyError: 'DATA'", "row['DATA']") is None


def test_braces_and_long_values_do_no_harm() -> None:
    told = words_told("TypeError: f() got an unexpected keyword argument '{0}{x}'")
    assert told is not None
    assert "{0}{x}" in told.means
    long = words_told(f"FileNotFoundError: [Errno 2] No such file or directory: '{'a' * 399}'")
    assert long is not None
    assert len(long.means) < 300


def test_every_form_is_bounded_and_gives_no_harmful_advice() -> None:
    forms = tomli.loads(resources.files("gangline.diagnose").joinpath("error_forms.toml").read_text(encoding="utf-8"))
    assert [row["pattern"] for row in forms["form"] if UNBOUNDED.search(row["pattern"])] == []
    texts = [text for row in (*forms["form"], *forms["system"].values()) for text in (row.get("means"), row.get("fix"))]
    assert [text for text in texts if text and any(re.search(each, text) for each in HARMFUL)] == []


TRACEBACK = """\
Traceback (most recent call last):
  File "/home/ada/llm/train.py", line 41, in <module>
    main()
  File "/home/ada/llm/train.py", line 12, in main
    loader = DataLoader(rows)
  File "/home/ada/env/lib/python3.11/site-packages/torch/utils/data/dataloader.py", line 380, in __init__
    raise ValueError("no room for Connection refused")
"""


def found_in(text: str) -> list[Sighting]:
    search = LogSearch()
    search.feed(text.encode())
    return search.finish()


def test_the_last_call_in_the_users_own_code_is_found() -> None:
    assert own_call(TRACEBACK.splitlines()) == OwnCall(
        "llm/train.py, line 12", "main", "loader = DataLoader(rows)", False
    )
    assert own_call(TRACEBACK.splitlines()[:5]) == OwnCall(
        "llm/train.py, line 12", "main", "loader = DataLoader(rows)", True
    )
    assert own_call(TRACEBACK.splitlines()[5:]) is None
    assert own_call([*TRACEBACK.splitlines(), "Traceback (most recent call last):"]) is None


def test_an_error_of_a_library_is_told_with_the_users_line() -> None:
    (found,) = found_in(TRACEBACK + "ValueError: batch_size (7) must be divisible by ranks (2)\n")
    assert found.means.startswith("batch_size 7 is no multiple of ranks 2: ValueError: ")
    assert "raised in torch/utils/data/dataloader.py, line 380" in found.means
    assert found.means.endswith("called from llm/train.py, line 12, in main(): loader = DataLoader(rows)")


def test_words_in_the_code_of_a_traceback_were_not_said() -> None:
    assert [each.id for each in found_in(TRACEBACK + "ValueError: too few rows\n")] == ["error-of-program"]
    assert "reset" in [each.id for each in found_in("ValueError: no room for Connection refused\n")]


def test_the_line_above_the_last_words_of_a_program_is_the_reason() -> None:
    last = "rsync error: syntax or usage error (code 1) at main.c(1886)\n"
    (found,) = found_in(f"rsync: --delet: unknown option\n{last}")
    assert (found.number, found.means.split(":")[0]) == (1, "the command knows no option --delet")
    (found,) = found_in(f"sending file list\n{last}")
    assert found.number == 2


def test_an_error_goes_on_with_its_file_and_line() -> None:
    (found,) = found_in('yaml.scanner.ScannerError: a tab was found\n  in "job.yaml", line 4, column 1\n\n')
    assert found.means.startswith("job.yaml is not valid in line 4: a tab was found")
    (found,) = found_in('yaml.scanner.ScannerError: while scanning\nfound a tab\n  in "job.yaml", line 3, column 1\n\n')
    assert found.means.startswith("job.yaml is not valid in line 3: while scanning, found a tab")


def test_a_line_of_a_shell_at_the_end_of_a_log_is_told() -> None:
    (found,) = found_in("starting\nrun.sh: line 4: MASTER_ADDR: unbound variable\n")
    assert found.means.startswith("MASTER_ADDR is not set, and run.sh, line 4, uses it")


def test_what_a_program_went_on_without_is_no_error() -> None:
    found = found_in(
        "ERROR: Ignored the following yanked versions: 0.3.3\nERROR: No matching distribution found for a==9\n"
    )
    assert all(each.number == 2 for each in found)


def test_a_frame_of_native_code_is_no_error() -> None:
    assert found_in("frame #0: c10::Error::Error(c10::SourceLocation, char) + 0x9d (0x7fcb in libc10.so)\n") == []


def test_of_two_rows_in_one_line_the_one_that_explains_the_other_counts() -> None:
    text = "huggingface_hub.errors.LocalEntryNotFoundError: Got: ConnectError: [Errno -3] Temporary failure in name resolution\n"
    assert [each.id for each in found_in(text)] == ["hub-offline"]


def test_a_name_that_no_hub_has_is_no_refusal_of_a_server() -> None:
    text = "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/m/base'. Use `repo_type`.\n"
    (found,) = found_in(text)
    assert found.id != "error-http"
    assert "/m/base" in found.means
