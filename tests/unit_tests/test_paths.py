"""Where a configured path lies."""

import os

import pytest

from blockgrow_titan.paths import resolve


def test_bundled_path_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    resolved = resolve("package:blockgrow_titan/documents/source.py")
    import blockgrow_titan.documents.source as module

    assert os.path.samefile(resolved, module.__file__)


def test_relative_absolute_and_home_paths(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("data", "./data", "~/data", str(tmp_path / "data")):
        assert resolve(path) == str(tmp_path / "data")


def test_absent_path_is_refused_with_the_resolved_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as error:
        resolve("data/missing", "teacher.path")
    assert 'teacher.path = "data/missing"' in str(error.value)
    assert str(tmp_path / "data" / "missing") in str(error.value)


def test_absent_bundled_path_is_refused_with_the_resolved_one():
    with pytest.raises(ValueError, match=r"blockgrow_titan/assets/missing;"):
        resolve("package:blockgrow_titan/assets/missing")


@pytest.mark.parametrize("path", ["package:no_such_package/x", "package:", "package:/x"])
def test_package_that_cannot_be_imported(path):
    with pytest.raises(ValueError, match="is not an importable package"):
        resolve(path, "teacher.path")


def test_empty_path():
    with pytest.raises(ValueError, match="model.hf_assets_path is empty"):
        resolve("", "model.hf_assets_path")
