"""Plug-ins by entry points: found without an import, loaded when asked for, named when they are broken."""

import subprocess
import sys

import pytest

from gangline.errors import DataError, PluginError, UsageError
from gangline.plugins import GROUPS, Table, find_plugins, instance_of, timed_load
from tests.packages import installed, make_package

GROUP = "gangline.formats"


@pytest.fixture
def table():
    return Table(GROUP, {"text": "the text"}, read=instance_of(str))


@pytest.fixture
def install(tmp_path):
    """install(text of module, name=..., ...) -> the folder, with one package whose module is named like it."""
    count = iter(range(100))

    def make(text="ROW = 'a row'", *, entry="mine", package=None, value=None, group=GROUP):
        module = f"plugged_{next(count)}"
        package = package or module.replace("_", "-")
        modules = {f"{module}.py": text}
        return make_package(tmp_path, package, modules=modules, entry_points={group: {entry: value or f"{module}:ROW"}})

    return make


def test_a_plugin_is_a_row_like_any_other_and_is_imported_only_when_asked_for(table, install):
    with installed(install()):
        assert list(table) == ["text", "mine"]
        assert "mine" in table
        assert "yours" not in table
        assert "plugged_0" not in sys.modules
        assert table["mine"] == "a row"
        assert "plugged_0" in sys.modules
        assert table.plugin("mine").package == "plugged-0"
        assert table.plugin("text") is None


def test_a_built_in_row_does_not_even_read_the_metadata(table, monkeypatch):
    monkeypatch.setattr("gangline.plugins.find_plugins", lambda: pytest.fail("metadata were read"))
    assert table["text"] == "the text"
    assert "text" in table
    assert table.plugin("text") is None
    with table.guard("text"):
        pass


def test_an_unknown_name_is_answered_with_the_nearest_one(table, install):
    with installed(install(entry="dialogue")), pytest.raises(UsageError, match="no data format 'dialog'") as caught:
        table["dialog"]
    assert caught.value.fix == "did you mean 'dialogue'?"


@pytest.mark.parametrize(
    ("text", "value", "cause"),
    [
        ("import nowhere_at_all", None, "ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("def broken(:", None, "SyntaxError: "),
        ("raise SystemExit(3)", None, "SystemExit: 3"),
        ("1 / 0", None, "ZeroDivisionError: division by zero"),
        ("OTHER = 1", None, "AttributeError: module 'plugged_0' has no attribute 'ROW'"),
        ("ROW = 5", None, "expected an object of builtins.str, found a int"),
        ("ROW = ''", "plugged 0", "does not say module:object"),
    ],
)
def test_a_broken_plugin_is_named_with_package_version_entry_point_and_cause(table, install, text, value, cause):
    with installed(install(text, value=value)):
        assert list(table) == ["text", "mine"]
        with pytest.raises(PluginError) as caught:
            table["mine"]
        assert caught.value.what == "the data format 'mine' of the package plugged-0 0.1 cannot be used"
        assert caught.value.seen.startswith(f"entry point {GROUP}: mine = {value or 'plugged_0:ROW'}; ")
        assert cause in caught.value.seen
        assert "pip uninstall plugged-0" in caught.value.fix
        rows, (error,) = table.load_all()
        assert rows == {}
        assert cause in str(error)
        assert table["text"] == "the text"


def test_a_built_in_row_wins_over_a_plugin_of_its_name(table, install):
    with installed(install("ROW = 'theirs'", entry="text")):
        assert table["text"] == "the text"
        assert list(table) == ["text"]
        _, (error,) = table.load_all()
        assert "gangline itself has a data format 'text'" in error.seen
        assert "plugged_0" not in sys.modules


def test_of_two_plugins_with_one_name_none_is_used(table, install):
    install()
    with installed(install()), pytest.raises(PluginError) as caught:
        table["mine"]
    assert {"plugged-0", "plugged-1"} == {name for name in ("plugged-0", "plugged-1") if name in str(caught.value)}
    assert "remove one" in caught.value.seen


def test_the_package_that_comes_first_on_the_path_counts(table, tmp_path):
    rows = {GROUP: {"mine": "twice:ROW"}}
    for version in ("1.0", "2.0"):
        text = {"twice.py": f"ROW = 'of {version}'"}
        make_package(tmp_path / version, "twice", version=version, modules=text, entry_points=rows)
    with installed(tmp_path / "1.0"), installed(tmp_path / "2.0"):
        assert table.plugin("mine").version == "2.0"
        assert table["mine"] == "of 2.0"


def test_what_a_function_of_a_plugin_raises_is_named_and_errors_of_gangline_pass(table, install):
    with installed(install()):
        with pytest.raises(PluginError, match="'mine' of the package plugged-0") as caught, table.guard("mine"):
            raise KeyError("oops")
        assert "KeyError: 'oops'" in caught.value.seen
        with pytest.raises(DataError), table.guard("mine"):
            raise DataError("a row")
    with pytest.raises(KeyError), table.guard("text"):
        raise KeyError("ours")


def test_a_file_of_entry_points_that_is_garbage_harms_no_other_package(table, install, tmp_path):
    install()
    garbage = tmp_path / "garbage-1.dist-info"
    garbage.mkdir()
    garbage.joinpath("entry_points.txt").write_bytes(b"[gangline.formats]\n\xff\xfe = = \n")
    half = tmp_path / "half-1.dist-info"
    half.mkdir()
    half.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: half\nVersion: 1\n")
    half.joinpath("entry_points.txt").write_text("[gangline.formats]\njust words\n= nothing:here\n")
    with installed(tmp_path):
        assert table["mine"] == "a row"
        faults = [plugin.fault for plugin in find_plugins() if plugin.package == "half"]
        assert len(faults) == 2
        assert all(faults)


def test_how_long_an_import_takes_is_measured(table, install):
    with installed(install("import time; time.sleep(0.2); ROW = ''")):
        seconds, fault = timed_load(table, table.plugin("mine"))
        assert seconds >= 0.2
        assert fault == ""
    with installed(install("1/0", entry="other")):
        assert timed_load(table, table.plugin("other"))[1] == "ZeroDivisionError: division by zero"


def test_groups_that_gangline_does_not_have_are_passed_over(install):
    with installed(install(group="gangline.nothing")):
        assert all(plugin.group in GROUPS for plugin in find_plugins())
        assert not any(plugin.package == "plugged-0" for plugin in find_plugins())


@pytest.mark.parametrize("verb", [["--help"], ["ps"], ["plan", "--help"]])
def test_verbs_that_need_no_plugin_import_none(install, verb, tmp_path):
    folder = install("raise SystemExit('imported')", group="gangline.strategies")
    for number, group in enumerate(GROUPS):
        make_package(
            folder,
            f"slow-{number}",
            modules={f"slow_{number}.py": "import time; time.sleep(60)"},
            entry_points={group: {f"slow{number}": f"slow_{number}:ROW"}},
        )
    code = (
        "import sys; from gangline.cli.main import main; code = main(sys.argv[1:]);"
        "bad = [name for name in sys.modules if name.startswith(('slow_', 'plugged_')) or name == 'importlib.metadata'];"
        "bad = [name for name in bad if name != 'importlib.metadata' or 'typer' not in sys.modules];"
        "sys.exit(f'imported: {bad}' if bad else code)"
    )
    environment = {"PYTHONPATH": str(folder), "GANGLINE_HOME": str(tmp_path / "home"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code, *verb], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
