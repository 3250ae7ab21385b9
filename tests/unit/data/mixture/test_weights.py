import json

import pytest

from ingot.data.mixture.weights import named_weights, parse_weights, read_weights
from ingot.errors import ConfigError, UsageError


def test_weights_on_a_command_line():
    assert parse_weights(["web=.7", "a=b=2"]) == {"web": 0.7, "a=b": 2.0}
    for wrong in ("web", "web=", "=3", "web=x"):
        with pytest.raises(UsageError, match="no weight"):
            parse_weights([wrong])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("run.toml", 'name = "x"\n[data]\ntokens = "t"\n[data.weights]\nweb = 0.7\ncode = 1\n'),
        ("mix.toml", "[weights]\nweb = 0.7\ncode = 1\n"),
        ("mix.toml", "web = 0.7\ncode = 1\n"),
        ("doremi.json", json.dumps({"weights": {"web": 0.7, "code": 1}, "history": []})),
    ],
)
def test_weights_out_of_files(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    assert read_weights(tmp_path / name) == {"web": 0.7, "code": 1.0}


@pytest.mark.parametrize(
    "content", ["", 'web = "much"', "[weights]\n", "web = true", "[[", 'name = "run"\n[data]\na=1']
)
def test_files_without_weights_are_refused(tmp_path, content):
    (tmp_path / "x.toml").write_text(content)
    with pytest.raises(ConfigError):
        read_weights(tmp_path / "x.toml")


def test_a_mixture_by_name_or_file(tmp_path):
    (tmp_path / "mine.toml").write_text("web = 1.0")
    assert named_weights(str(tmp_path / "mine.toml"), {"web": 5}) == ("mine", {"web": 1.0}, ())
    assert named_weights("natural", {"web": 5}) == ("natural", {"web": 5.0}, ())
    with pytest.raises(UsageError, match="classic, natural, equal"):
        named_weights("clasic", {"web": 5})
