import pytest
from tests.expect import refused

from ingot.data.mixture.run_file import with_weights, write_weights
from ingot.errors import ConfigError
from ingot.theory.rules import load_run

RUN = """# my run
name = "demo"

[model]
vocab_size = 300
d_model = 32
num_layers = 2
num_heads = 2
num_kv_heads = 1
head_dim = 16
d_ffn = 48
max_seq_len = 64

[data]
tokens = "tokens"  # of last week
{inside}
[train]  # short
steps = 10
seq_len = 16
global_batch = 4
micro_batch = 1
{after}"""


@pytest.mark.parametrize(
    ("inside", "after", "before"),
    [
        ("", "", {}),
        ("weights = { web = 1.0 }  # old", "", {"web": 1.0}),
        ("weights.web = 2.0\nweights.code = 1.0", "", {"web": 2.0, "code": 1.0}),
        ('\n[data.weights]\n# by hand\nweb = 0.5\n"my source" = 0.5\n', "", {"web": 0.5, "my source": 0.5}),
        ("mask_documents = true\n", "\n[ data . weights ]\nweb = 1.0", {"web": 1.0}),
    ],
)
def test_only_the_weights_change(tmp_path, inside, after, before):
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(inside=inside, after=after))
    old = load_run(path)
    assert write_weights(path, {"web": 0.7, "a b": 0.3}) == before
    new = load_run(path)
    assert new.data.weights == {"web": 0.7, "a b": 0.3}
    assert new.train == old.train and new.data.mask_documents == old.data.mask_documents
    text = path.read_text()
    assert text.startswith("# my run\n") and "# of last week" in text and "[train]  # short" in text
    assert write_weights(path, {"web": 1.0}) == {"web": 0.7, "a b": 0.3}
    assert text.count("[data.weights]") == 1


def test_a_form_that_is_not_understood_is_left_alone(tmp_path):
    path = tmp_path / "run.toml"
    text = 'data = { tokens = "tokens", weights = { web = 1.0 } }\n' + RUN.format(inside="", after="").replace(
        '[data]\ntokens = "tokens"  # of last week\n', ""
    )
    path.write_text(text)
    with refused("E-WEIGHTS-FORM", path=str(path)):
        write_weights(path, {"web": 0.5})
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("inside", "weights"),
    [
        ("", {"web": -1.0}),
        ('heldout = """\n[data.weights]\n"""', {"web": 1.0}),  # a text that looks like a section
    ],
)
def test_a_file_that_would_not_be_sound_is_left_alone(tmp_path, inside, weights):
    path = tmp_path / "run.toml"
    path.write_text(text := RUN.format(inside=inside, after=""))
    with pytest.raises(ConfigError):
        write_weights(path, weights)
    assert path.read_text() == text


def test_the_section_comes_behind_data():
    lines = with_weights(RUN.format(inside="", after=""), {"web": 1.0}).splitlines()
    assert lines.index("[data.weights]") - lines.index("[data]") == 3
