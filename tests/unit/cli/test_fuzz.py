"""Any settings and any command line end in a result or in an error with a code: never in a traceback, never in a wait.

Verbs that would start ranks, workers, servers or downloads are followed up to the call that would start them.
`make test` runs a few examples; the marker `nightly` runs many, and also limits the CPU time and memory of each.
"""

import argparse
import json
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ingot.cli import main as cli
from ingot.config import to_dict, to_toml
from ingot.data.build.recipe import DataRecipe
from ingot.planner.request.clusters import load_cluster
from ingot.planner.request.presets import load_model
from ingot.schema.cluster import Cluster
from ingot.schema.run import Data, RunConfig, Train
from ingot.toml import toml_key, toml_value

EXIT_CODES = {0, 2, 3, 10, 11, 20, 21, 30, 93}
FEW, MANY = 12, 400
CPU_SECONDS, MEMORY_BYTES = 10.0, 2 << 30
RUN = RunConfig(
    name="demo",
    model=load_model("tiny").arch,
    data=Data(tokens="tokens"),
    train=Train(steps=100, seq_len=128, global_batch=16, micro_batch=8),
)


class Started(Exception):
    """Raised in place of a call that would start ranks, workers or a server."""


def start(*args, **kwargs):
    raise Started


STARTS = (
    "ingot.trainer.launch.train.supervise",
    "ingot.quickstart.run.QuickstartRun.execute",
    "ingot.data.build.prepare.prepare",
    "ingot.data.sources.input.expand",
    "ingot.data.tokenizer.train_on",
    "ingot.data.classify.make.make_classifier",
    "ingot.data.mixture.dsir.select",
    "ingot.planner.web.app.make_app",
    "ingot.watch.web.app.make_app",
    "socket.getaddrinfo",
    "subprocess.Popen.__init__",  # the class stays: a module that is imported now may name it in annotations
)


@pytest.fixture(autouse=True)
def followed_up_to_the_start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in STARTS:
        monkeypatch.setattr(name, start)
    monkeypatch.setitem(sys.modules, "torch", None)  # as if it were not installed: nothing trains
    Path("run.toml").write_text(to_toml(RUN))


def run_command(words: list[str], *, limited: bool) -> None:
    """Run one command line. limited: also compare its CPU time and the memory of this process with the limits."""
    began = time.process_time()
    try:
        code = cli.main(words)
    except Started:
        code = 0
    except SystemExit as stop:
        code = stop.code
    spent = time.process_time() - began
    assert code in EXIT_CODES, code
    if limited:
        assert spent < CPU_SECONDS, f"{spent:.1f} s"
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < MEMORY_BYTES


def fields_of(kind: type, prefix: str = "") -> list[tuple[str, list]]:
    """Return (dotted key, values at both ends of its range) of every field of a dataclass, sections included."""
    found = []
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if get_origin(hint) is ClassVar:
            continue
        found.append((prefix + name, list(_ends(hint))))
        if is_dataclass(hint):
            found += fields_of(hint, f"{prefix}{name}.")
    return found


def _ends(hint) -> Iterator:
    if get_origin(hint) is Annotated:
        limits = get_args(hint)[1]
        yield from (limits.low, limits.high, limits.high + 1, type(limits.low)(limits.high / 2))
    elif get_origin(hint) is Literal:
        yield from get_args(hint)
    else:
        for part in get_args(hint):
            yield from _ends(part) if part is not type(None) else ()


STRANGE = st.one_of(
    st.sampled_from([0, 1, -1, 2, 3, 7, 64, 2**31, 2**63 - 1, -(2**63), 2**63, 1e308, 5e-324, 1e24, True, False]),
    st.sampled_from(["", " ", "\x00", "a\\nb", "../..", "/dev/null", "\udce4", "x" * 5_000, "10k", "nan", "é" * 300]),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.lists(st.integers(-2, 10**12), max_size=4),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=3),
)
NESTED = st.recursive(
    STRANGE, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
)
TEXTS = st.one_of(
    st.text(max_size=60),
    st.text("[]{}=.,\"'\n0e+-_ax#\\", max_size=60),
    st.sampled_from(
        ["[", "{a=", "a.", "[a.", "1", '"', "'" * 3, "[[a]]\n", "a=1\n", "#", "\\u0000", "=", "0x"]
    ).flatmap(lambda unit: st.sampled_from([1, 2, 300, 5_000, 60_000]).map(lambda count: unit * count)),
)


@st.composite
def changes(draw, kind: type) -> dict:
    """Draw values of one to three fields: at the ends of their ranges, or strange."""
    known = fields_of(kind)
    drawn = {}
    for _ in range(draw(st.integers(1, 3))):
        key, ends = draw(st.sampled_from(known))
        drawn[key] = draw(st.sampled_from(ends) if ends and draw(st.booleans()) else NESTED)
    return drawn


def with_changes(values: dict, drawn: dict) -> dict:
    values = json.loads(json.dumps(values))
    for key, value in drawn.items():
        *sections, last = key.split(".")
        inner = values
        for name in sections:
            inner = inner.setdefault(name, {})
            if not isinstance(inner, dict):
                return values
        inner[last] = value
    return values


def toml_of(values: dict) -> str:
    return "".join(f"{toml_key(name)} = {toml_value(value)}\n" for name, value in values.items())


def write(path: str, text: str) -> None:
    Path(path).write_text(text, encoding="utf-8", errors="surrogatepass")


def run_file_is_settled(text: str, limited: bool) -> None:
    write("drawn.toml", text)
    run_command(["check", "drawn.toml", "--json"], limited=limited)
    run_command(["check", "drawn.toml", "--cluster", "8xh100"], limited=limited)
    run_command(["plan", "--run", "drawn.toml", "--explain", "all"], limited=limited)
    run_command(["train", "drawn.toml"], limited=limited)


def recipe_is_settled(text: str, limited: bool) -> None:
    write("drawn.toml", text)
    run_command(["data", "recipe", "--recipe", "drawn.toml"], limited=limited)
    run_command(["data", "build", "crawl", "--out", "data", "--recipe", "drawn.toml", "--json"], limited=limited)


def cluster_is_settled(text: str, limited: bool) -> None:
    write("drawn.json", text)
    run_command(["check", "run.toml", "--cluster", "drawn.json"], limited=limited)
    run_command(["plan", "--run", "run.toml", "--cluster", "drawn.json", "--json"], limited=limited)
    run_command(["plan", "--model", "tiny", "--tokens", "1M", "--cluster", "drawn.json"], limited=limited)


FILES = {
    "run": (
        run_file_is_settled,
        st.one_of(TEXTS, changes(RunConfig).map(lambda d: toml_of(with_changes(to_dict(RUN), d)))),
    ),
    "recipe": (recipe_is_settled, st.one_of(TEXTS, changes(DataRecipe).map(lambda d: toml_of(with_changes({}, d))))),
    "cluster": (
        cluster_is_settled,
        st.one_of(
            TEXTS,
            changes(Cluster).map(lambda d: json.dumps(with_changes(to_dict(load_cluster("8xh100")), d))),
        ),
    ),
}


def options_of(parser: argparse.ArgumentParser, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], list]]:
    """Yield (words of a verb and its actions, options and positional arguments) of a parser and its subparsers."""
    own = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, sub in action.choices.items():
                yield from options_of(sub, (*words, name))
        elif not isinstance(action, argparse._HelpAction):
            own.append(action)
    yield words, own


def commands() -> dict[str, list]:
    found = {}
    for verb in (*cli.VERBS, *cli._ACTIONS):
        parser, _ = cli._verb_parser(verb)
        found |= {" ".join((verb, *words)): actions for words, actions in options_of(parser) if actions}
    return found


COMMANDS = commands()
WORDS = st.one_of(
    st.sampled_from(["run.toml", ".", "absent", "", "0", "1", "-1", "10k", "8Ki", "1T", "1e308", "nan", "50%", "0.5"]),
    st.sampled_from(["tiny", "llama3-8b", "h100", "8xh100", "1000000xh100", "9" * 5_000, "$2M", "24h", "6e23flop"]),
    st.sampled_from(
        ["a=1", "train.steps=10", "=", "parallel=" + "[" * 2_000, ".".join("a" * 20_000) + "=1", "tp=0x" + "f" * 5_000]
    ),
    st.sampled_from(
        ["web=0.7", "cc:CC-MAIN-2025-05", "s3://a/b", "http://[", "/dev/null", "\udce4", "x" * 5_000, "(", "E-"]
    ),
    st.text(max_size=12),
    STRANGE.map(str),
)


@st.composite
def command_lines(draw) -> list[str]:
    command = draw(st.sampled_from(sorted(COMMANDS)))
    given = [action for action in COMMANDS[command] if not action.option_strings or action.required]
    optional = [action for action in COMMANDS[command] if action.option_strings and not action.required]
    given += draw(st.lists(st.sampled_from(optional), max_size=4)) if optional else []
    words = []
    for action in given:
        words += action.option_strings[-1:]
        if action.nargs != 0:
            known = st.sampled_from([str(choice) for choice in action.choices]) if action.choices else WORDS
            words += draw(
                st.lists(known if draw(st.integers(0, 9)) else WORDS, min_size=1, max_size=2 if action.nargs else 1)
            )
    return [*command.split(), *words]


def profile(examples: int):
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=examples, deadline=None, suppress_health_check=checks, database=None)


@pytest.mark.parametrize("kind", FILES)
def test_any_file_of_settings_is_settled(kind):
    settle, texts = FILES[kind]
    profile(FEW)(given(texts)(lambda text: settle(text, False)))()


def test_any_command_line_is_settled():
    profile(4 * FEW)(given(command_lines())(lambda words: run_command(words, limited=False)))()


@pytest.mark.nightly
@pytest.mark.parametrize("kind", FILES)
def test_many_files_of_settings_are_settled_in_little_time(kind):
    settle, texts = FILES[kind]
    profile(MANY)(given(texts)(lambda text: settle(text, True)))()


@pytest.mark.nightly
def test_many_command_lines_are_settled_in_little_time():
    profile(10 * MANY)(given(command_lines())(lambda words: run_command(words, limited=True)))()
