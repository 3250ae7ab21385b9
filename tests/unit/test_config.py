"""Strict configuration: everything wrong is reported at once, with its place and the likely key."""

import math
import time
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.expect import calls_of, named, refused

from ingot.config import from_dict, to_dict, to_toml
from ingot.data.build.recipe import DataRecipe, load_recipe
from ingot.data.classify.train import ClassifierSettings
from ingot.planner.request.presets import ModelPreset
from ingot.planner.run.outlook import Assumptions
from ingot.schema.arch import Arch
from ingot.schema.cluster import Cluster
from ingot.schema.run import Data, Evaluate, RunConfig, Train
from ingot.theory.rules import load_run, run_from_dict
from ingot.toml import _LONG_KEY, MOST_BYTES

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


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40))
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


def test_durations_are_text_with_a_unit(run_file):
    for text, seconds in (("04:00:00", 14400), ("1-12:00:00", 129600), ("1d2h30m", 95400), ('"4h"', 14400)):
        launch = load_run(run_file, [f"launch.stop_after={text}"]).launch
        assert (launch.stop_after, launch.stop_after_limit) == (text.strip('"'), seconds)
    launch = load_run(run_file, ["launch.grace=300s"]).launch
    assert launch.grace_limit == 300 and math.isinf(launch.stop_after_limit)
    launch = load_run(run_file, ["launch.watchdog_save=10min"]).launch
    assert (launch.watchdog_save_limit, launch.watchdog_evaluate_limit) == (600, None)  # "auto"
    for wrong in ("'90'", "0s", "400d", "soon", "04:00"):
        for key in ("launch.grace", "launch.watchdog_evaluate"):
            with refused("E-CONFIG-SETTINGS", keys=[key]):
                load_run(run_file, [f"{key}={wrong}"])


def test_an_override_is_blamed_on_the_command_line(run_file):
    with refused("E-CONFIG-SETTINGS", keys=["optim.lrr"], meant={"optim.lrr": ["optim.lr"]}) as caught:
        load_run(run_file, ["optim.lrr=1e-3"])
    assert caught.value.facts["problems"][0].startswith("--set optim.lrr: ")


def test_an_override_is_named_once(run_file):
    """Compares sentences: a key is not repeated after the words that name it."""
    for override, rest in (
        ("schedule.options.a=1", "'cosine' has no settings; remove it"),
        ("train.step=1", "unknown key;"),
    ):
        with refused("E-CONFIG-SETTINGS") as caught:
            load_run(run_file, [override])
        assert caught.value.facts["problems"][0].startswith(f"--set {override.partition('=')[0]}: {rest}")


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
        ("schedule.final_fraction=1.5", ["1.5", 0, 1]),
        ("evaluate.max_tokens=0", ["0", 1]),
        ("launch.max_restarts=-1", ["-1", 0]),
        ("launch.timeout_seconds=0", ["0", "0.01"]),
        ("cost.usd_per_hour=-2", ["-2", 0]),
        ("checkpoint.keep=0", ["0", 1]),
        ("model.rope_theta=0", ["0"]),
    ],
)
def test_numbers_out_of_range_are_refused(run_file, override, shown):
    """shown: the value, and the nearest one that is allowed."""
    with refused("E-CONFIG-SETTINGS", keys=[override.partition("=")[0]]) as caught:
        load_run(run_file, [override])
    assert named(caught.value.facts["problems"], *shown)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("a = " + "1" * 5_000, "E-CONFIG-SYNTAX"),
        ("a = 0x" + "f" * 5_000, "E-CONFIG-NUMBER"),
        ("a = 9223372036854775808", "E-CONFIG-NUMBER"),
        ("a = " + "[" * 50_000, "E-CONFIG-NESTING"),
        ("a = " + "{a = " * 50_000, "E-CONFIG-NESTING"),
        ("a = " + "[" * 40 + "]" * 40, "E-CONFIG-NESTING"),
        (".".join("a" * 40) + " = 1", "E-CONFIG-NESTING"),
        (".".join("a" * 20_000) + " = 1", "E-CONFIG-NESTING"),
        ("[" + " . ".join(["'a'"] * 20_000) + "]", "E-CONFIG-NESTING"),
        ("#" * 5_000_000, "E-CONFIG-SIZE"),
        ("a = " + '"' * 100_000, "E-CONFIG-SYNTAX"),
    ],
    ids=lambda value: value if len(value) < 60 else value[:12],
)
def test_a_text_that_would_keep_the_parser_busy_is_refused(tmp_path, run_file, text, code):
    path = tmp_path / "large.toml"
    path.write_text(text)
    with refused(code):
        load_run(path)
    key, _, value = text.partition(" = ")
    if value and not value.startswith('"'):
        with refused(code if code != "E-CONFIG-SYNTAX" else "E-CONFIG-SETTINGS"):
            load_run(run_file, [f"{key}={value}"])


def test_a_file_is_measured_in_bytes_and_never_cut(tmp_path):
    path = tmp_path / "large.toml"
    path.write_text("# " + "é" * (MOST_BYTES // 2) + "\n[not, reached")  # half as many characters as bytes
    with refused("E-CONFIG-SIZE", place=str(path)):
        load_run(path)


@pytest.mark.parametrize("part", ["a", '"a b"', "'a b'", '"a.b"', r'"a\" b"', '""'])
def test_the_parser_is_not_called_for_a_key_of_thousands_of_parts(tmp_path, part):
    """tomllib and the lookup of lines need time with the square of the parts: a minute for 20,000."""
    path = tmp_path / "keys.toml"
    path.write_text(" . ".join([part] * 2_000) + " = 1")

    def read():
        with refused("E-CONFIG-NESTING"):
            load_run(path)

    assert calls_of(read) < 1_000


@pytest.mark.parametrize("unit", ['" ', r"\" ", "' ", '"a b".', "a b ", "'\" "])
def test_the_search_for_long_keys_takes_time_with_the_length_of_a_line(unit):
    text = unit * (100_000 // len(unit))
    started = time.process_time()
    _LONG_KEY.search(text)
    assert time.process_time() - started < 5  # the square would be minutes


def test_a_thousand_problems_are_counted_and_fifty_listed(run_file):
    run_file.write_text(run_file.read_text() + "".join(f"key{i} = {i}\n" for i in range(1_000)))
    with refused("E-CONFIG-SETTINGS") as caught:
        load_run(run_file)
    assert len(caught.value.facts["problems"]) == len(caught.value.facts["keys"]) == 50
    assert named([caught.value.found], 950)


@pytest.mark.parametrize(
    ("override", "least", "most"),
    [
        ("train.steps=1e24", 0, 0),  # a fraction: refused for its type
        ("train.steps=1000000000000000", 1, 10**9),
        ("launch.timeout_seconds=1e-30", 0.01, 30 * 86_400),
        ("model.num_layers=100000000", 1, 10_000),
        ("data.weights.web=1e300", 0, 1e12),
        ("parallel.unit_layers=-1", 0, 10_000),
        ("parallel.stage_layers=[1, 99999]", 0, 10_000),
        ("cost.usd_per_hour=1e9", 0, 1e6),
    ],
)
def test_an_absurd_value_is_refused_with_its_range(run_file, override, least, most):
    with refused("E-CONFIG-SETTINGS") as caught:
        load_run(run_file, [override])
    (named_key,) = caught.value.facts["keys"]
    assert named_key.startswith(override.partition("=")[0])
    assert caught.value.facts["ranges"] == ({named_key: [least, most]} if most else {})


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("train.steps=1e24", "must be a whole number from 1 to 1,000,000,000"),
        ("train.steps=1e3", "must be a whole number; write 1000"),
        ('train.steps="10T"', "must be a whole number from 1 to 1,000,000,000"),
        (f"optim.lr='{'9' * 400}'", "must be a number"),
    ],
)
def test_a_hint_is_a_value_that_would_be_taken(run_file, override, hint):
    with refused("E-CONFIG-SETTINGS") as caught:
        load_run(run_file, [override])
    assert caught.value.found.endswith(hint)


def test_a_number_of_more_than_64_bits_is_named_by_its_key(run_file):
    with refused("E-CONFIG-NUMBER", key="train.steps"):
        load_run(run_file, [f"train.steps={2**63}"])


def test_a_name_with_nul_is_refused(run_file):
    with refused("E-CONFIG-SETTINGS", keys=["data.tokens"]):
        load_run(run_file, ['data.tokens="a\\u0000b"'])


@pytest.mark.parametrize("kind", [RunConfig, Cluster, DataRecipe, Assumptions, ModelPreset, ClassifierSettings])
def test_every_number_in_a_file_has_a_range(kind):
    assert list(_numbers_without_range(kind)) == []


def _numbers_without_range(kind, prefix: str = ""):
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if get_origin(hint) is ClassVar:
            continue
        waiting = [hint]
        while waiting:
            part = waiting.pop()
            if part in (int, float):
                yield prefix + name
            elif is_dataclass(part):
                yield from _numbers_without_range(part, f"{prefix}{name}.")
            elif get_origin(part) not in (Annotated, Literal):
                waiting += get_args(part)


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("train.steps=10k", lambda run: run.train.steps == 10_000),
        ("train.seq_len=128", lambda run: run.train.seq_len == 128),
        ("evaluate.max_tokens=1M", lambda run: run.evaluate.max_tokens == 1_000_000),
        ("launch.timeout_seconds=20min", lambda run: run.launch.timeout_seconds == 1_200.0),
        ("name=10k", lambda run: run.name == "10k"),
    ],
)
def test_an_override_takes_units_where_a_number_is_needed(run_file, override, read):
    assert read(load_run(run_file, [override]))


def test_a_size_of_a_recipe_takes_units():
    assert load_recipe(overrides=["remote.max_bytes=64MiB"]).remote.max_bytes == 64 << 20
