"""Which Pythons a host has, before any of them is run."""

from gangline.agent.host_facts.packages import pythons


def test_of_pyenv_the_pythons_are_found_and_not_the_shims_before_them(tmp_path, monkeypatch):
    shims, versions, others = tmp_path / "shims", tmp_path / "versions", tmp_path / "bin"
    real = [versions / "3.11.7" / "bin" / "python3.11", versions / "3.12.1" / "bin" / "python3.12"]
    for path in (shims / "python3.11", shims / "python3.12", others / "python3.10", *real):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
        path.chmod(0o700)
    monkeypatch.setenv("PATH", f"{shims}:{others}")
    found = [path for path in pythons() if path.startswith(str(tmp_path))]
    assert found == sorted(map(str, [*real, others / "python3.10"]))
