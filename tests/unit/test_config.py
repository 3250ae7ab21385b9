"""Strict configuration: everything wrong is reported at once, with its place and the likely key."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.expect import named, refused

from ingot.config import from_dict, to_dict, to_toml
from ingot.schema.arch import Arch
from ingot.schema.run import Data, Evaluate, RunConfig, Train
from ingot.theory.rules import load_run, run_from_dict

RUN = RunConfig(
    name="demo",
    model=Arch(vocab_size=4096, d_model=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32, d_ffn=344),
    data=Data(tokens="tokens/train", weights={"guide": 0.75, "web": 0.25}),
    train=Train(steps=100, seq_len=128, global_batch=16, micro_batch=8),
)


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(to_toml(RUN))
    return path


def test_a_run_file_reads_back_as_it_was_written(run_file):
    assert load_run(run_file) == RUN


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_any_string_survives_toml(text):
    import tomllib

    config = replace(RUN, evaluate=Evaluate(prompts=(text,)), data=replace(RUN.data, weights={text: 0.5}))
    read = run_from_dict(tomllib.loads(to_toml(config)))
    assert read == config


def test_all_problems_are_reported_at_once_with_file_and_line(run_file):
    text = run_file.read_text()
    broken = (
        text.replace("weight_decay", "weigth_decay")
        .replace('"bf16"', '"bf61"')
        .replace("num_heads = 4", "num_heads = 4.5")
    )
    run_file.write_text(broken)
    keys = {"optim.weigth_decay": "weigth_decay", "train.precision": "bf61", "model.num_heads": "num_heads = 4.5"}
    meant = {"optim.weigth_decay": ["optim.weight_decay"], "train.precision": ["bf16"]}
    with refused("E-CONFIG-SETTINGS", meant=meant) as caught:
        load_run(run_file)
    problems = dict(zip(caught.value.facts["keys"], caught.value.facts["problems"], strict=True))
    assert problems.keys() == keys.keys()
    for key, needle in keys.items():
        line = next(i for i, row in enumerate(broken.splitlines(), 1) if needle in row)
        assert problems[key].startswith(f"{run_file}:{line}: ")


def test_rules_between_keys_name_the_way_out(run_file):
    with refused("E-CONFIG-SETTINGS", keys=["model.num_kv_heads"]) as caught:
        load_run(run_file, ["model.num_kv_heads=3"])
    assert named(caught.value.facts["problems"], 3, "num_heads=4", "[1, 2, 4]")
    with refused("E-CONFIG-SETTINGS", keys=["train.global_batch"]) as caught:
        load_run(run_file, ["train.global_batch=12"])
    assert named(caught.value.facts["problems"], 12, "8 or 16")


def test_overrides_take_toml_values_and_bare_words(run_file):
    read = load_run(run_file, ["train.steps=7", "schedule.kind=wsd", "schedule.decay_steps=3", "data.weights.web=0.5"])
    assert (read.train.steps, read.schedule.kind, read.data.weights["web"]) == (7, "wsd", 0.5)


def test_an_override_is_blamed_on_the_command_line(run_file):
    with refused("E-CONFIG-SETTINGS", keys=["optim.lrr"], meant={"optim.lrr": ["optim.lr"]}) as caught:
        load_run(run_file, ["optim.lrr=1e-3"])
    assert caught.value.facts["problems"][0].startswith("--set optim.lrr: ")


@pytest.mark.parametrize("value", ["true", '"8"', "[8]", "8.0"])
def test_an_integer_is_an_integer(run_file, value):
    with refused("E-CONFIG-SETTINGS", keys=["train.micro_batch"]):
        load_run(run_file, [f"train.micro_batch={value}"])


def test_missing_and_unreadable_files_say_what_to_do(tmp_path):
    with refused("E-CONFIG-MISSING"):
        load_run(tmp_path / "absent.toml")
    (tmp_path / "bad.toml").write_text("a = = 1")
    with refused("E-CONFIG-SYNTAX", line=1):
        load_run(tmp_path / "bad.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with refused("E-CONFIG-ENCODING"):
        load_run(tmp_path / "binary.toml")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps=many", "is text, must be a whole number"),
        ("train=3", "is a whole number, must be a section of keys and values"),
        ("evaluate.prompts=3", 'must be a list like ["text", ...]'),
        ("data.mask_documents=no", "must be true or false"),
    ],
)
def test_types_are_named_in_words_and_not_in_python(run_file, override, message):
    """Compares sentences: the words are what is tested."""
    with refused("E-CONFIG-SETTINGS", keys=[override.partition("=")[0]]) as caught:
        load_run(run_file, [override])
    assert message in str(caught.value)


def test_a_pair_says_how_it_is_written():
    @dataclass(frozen=True, kw_only=True)
    class Rule:
        word_count: tuple[int, int] = (30, 100_000)

    with refused("E-CONFIG-SETTINGS", keys=["word_count"]) as caught:
        from_dict(Rule, {"word_count": 3})
    assert named(caught.value.facts["problems"], "[30, 30]")


def test_a_missing_section_is_called_one_and_a_list_is_indented():
    """Compares a sentence: the layout of the message is what is tested."""
    with refused("E-CONFIG-SETTINGS", keys=["model", "data", "train"]) as caught:
        run_from_dict({"name": "demo"})
    first, *more = str(caught.value).splitlines()
    assert "missing section [model]" in first
    assert all(line.startswith("  ") for line in more)


def test_a_line_that_is_no_toml_is_shown(run_file):
    run_file.write_text("seed = 1\nname = demo\n")
    with refused("E-CONFIG-SYNTAX", line=2) as caught:
        load_run(run_file)
    assert caught.value.fix


def test_missing_keys_are_named():
    values = to_dict(RUN)
    del values["model"]["d_ffn"], values["train"]["steps"]
    with refused("E-CONFIG-SETTINGS", keys=["model.d_ffn", "train.steps"]):
        run_from_dict(values)


@pytest.mark.parametrize(
    ("override", "shown"),
    [
        ("optim.lr=nan", ["nan"]),
        ("optim.clip_norm=inf", ["inf"]),
        ("data.weights.web=nan", ["nan"]),
        ("optim.eps=0.0", ["0.0"]),
        ("optim.weight_decay=-0.1", ["-0.1", 0]),
        ("schedule.warmup_steps=-1", ["-1", 0]),
        ("schedule.final_fraction=1.5", ["1.5", "[0, 1]"]),
        ("evaluate.max_tokens=0", ["0", 1]),
        ("launch.max_restarts=-1", ["-1", 0]),
        ("launch.timeout_seconds=0", ["0.0"]),
        ("cost.usd_per_hour=-2", ["-2.0", 0]),
        ("checkpoint.keep=0", ["0", 1]),
        ("model.rope_theta=0", ["0.0"]),
    ],
)
def test_numbers_out_of_range_are_refused(run_file, override, shown):
    """shown: the value, and the nearest one that is allowed."""
    with refused("E-CONFIG-SETTINGS", keys=[override.partition("=")[0]]) as caught:
        load_run(run_file, [override])
    assert named(caught.value.facts["problems"], *shown)
