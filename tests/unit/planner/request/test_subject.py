"""What is planned: by name, by file, by size."""

import pytest

from ingot.config import to_toml
from ingot.errors import ConfigError, UsageError
from ingot.planner.request.presets import load_model
from ingot.planner.request.subject import by_size, find_subject
from ingot.theory.params import count_parameters


@pytest.mark.parametrize(
    ("parameters", "shape"),
    [(8e9, "llama3-8b"), (70e9, "llama3-70b"), (405e9, "llama3-405b"), (13e9, "usual proportions")],
)
def test_a_size_has_the_shape_of_a_preset_near_it_or_of_usual_proportions(parameters, shape):
    subject = by_size(round(parameters))
    assert subject.shape == shape and subject.parameters == parameters
    assert count_parameters(subject.arch) == pytest.approx(parameters, rel=0.05)
    assert not subject.arch.is_moe


def test_a_name_keeps_its_dots_and_a_file_loses_its_suffix(tmp_path):
    assert find_subject("qwen3-0.6b").name == "qwen3-0.6b"
    (tmp_path / "mine.toml").write_text(to_toml(load_model("tiny")))
    assert find_subject(str(tmp_path / "mine.toml")).name == "mine"


def test_one_of_them():
    with pytest.raises(UsageError, match="give one of"):
        find_subject("tiny", parameters=10**9)
    with pytest.raises(UsageError, match="give one of"):
        find_subject()
    with pytest.raises(ConfigError):
        by_size(5)  # no model has so few
