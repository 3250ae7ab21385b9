"""A folder appears complete or not at all."""

import pytest
from tests.expect import refused, reported, uninterrupted

from ingot.cli.main import main
from ingot.trainer.convert.new_folder import new_folder


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("exists", [False, True])
def test_it_has_its_name_when_it_is_complete(tmp_path, exists):
    out = tmp_path / "deep" / "out"
    if exists:
        out.mkdir(parents=True)
    with new_folder(out) as temporary:
        (temporary / "a").write_text("x")
        assert not out.exists() or not names(out)
    assert names(out) == ["a"] and names(tmp_path / "deep") == ["out"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_nothing_is_left_after_an_error(tmp_path, error):
    with uninterrupted(), pytest.raises((ValueError, KeyboardInterrupt)), new_folder(tmp_path / "out") as temporary:
        (temporary / "a").write_text("x")
        raise error
    assert names(tmp_path) == []


@pytest.mark.parametrize("name", ["file", "full", "..", ""])
def test_what_exists_is_never_replaced(tmp_path, name):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    with refused("E-CONVERT-FOLDER"), new_folder(tmp_path / name):
        pass
    assert names(tmp_path) == ["file", "full"] and names(tmp_path / "full") == ["mine"]


def test_the_commands_refuse_what_exists_before_they_read_anything(tmp_path, capsys):
    """The cheap errors of an import come first, too: the folder, then the model."""
    taken, nothing = tmp_path / "taken", tmp_path / "nothing"
    taken.mkdir()
    (taken / "model.safetensors").write_text("weights")
    for command in (["convert", nothing, taken], ["import", nothing, taken, "--model", "none"]):
        assert main(["ckpt", *map(str, command), "--json"]) == 2
        reported(capsys.readouterr().out, "E-CONVERT-FOLDER", path=str(taken))
    assert main(["ckpt", "import", str(nothing), str(tmp_path / "out"), "--model", "none", "--json"]) == 21
    assert "no such folder" in reported(capsys.readouterr().out, "E-DCP-READ", path=str(nothing))["found"]
    assert names(taken) == ["model.safetensors"]
