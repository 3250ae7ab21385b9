"""The build of a corpus and its token shards: `ingot.build_data`, which `ingot data build` prints."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ingot.config import to_dict
from ingot.data.build.plugin_code import import_plugins
from ingot.data.build.prepare import Prepared, prepare
from ingot.data.build.recipe import DataRecipe, load_recipe
from ingot.data.sources.input import Input, expand
from ingot.data.sources.text import Fields
from ingot.data.tasks.run import Inline, Runner
from ingot.errors import UsageError
from ingot.units import parse_bytes

RunnerName = Literal["local", "inline", "ray", "slurm"]
Inputs = str | Path | Sequence[str | Path | Input] | Mapping[str, str | Path | Sequence[str | Path]]
_OPTIONS = ("format", "text", "url", "id", "language")  # of a source
WEB = "web"  # the source of inputs that are given without the name of a source


def build_data(
    inputs: Inputs,
    out: str | Path,
    *,
    preset: str = "",
    recipe: str | Path | DataRecipe | None = None,
    overrides: Sequence[str] = (),
    tokenizer: str | Path | None = None,
    eot: str = "",
    vocab_size: int = 32_768,
    shard_size: str | int = "1GB",
    against: str | Path | None = None,
    seed: int = 1234,
    runner: RunnerName | Runner = "local",
    workers: int | None = None,
    memory: str | int | None = None,
    ray_address: str = "",
    slurm: Sequence[str] = (),
    say: Callable[[str], None] = lambda text: None,
    progress: Callable[[float, str], None] = lambda fraction, text: None,
) -> Prepared:
    """Build a corpus, a tokenizer and token shards from crawl files: OUT/corpus and OUT/tokens.

    inputs: a path, glob, folder, s3://, https:// or cc:NAME, a sequence of these, or source name -> these; a source
    may have the options that `ingot data build --source` has, like "format=parquet" and "text=COLUMN". preset: quality
    rules: web, fineweb, gopher, c4 or none. recipe: a TOML file, or a DataRecipe, which is used as it is. overrides:
    changes like "quality.gopher.symbol_ratio=0.15". tokenizer: a tokenizer.json (default: a byte-level BPE of
    `vocab_size` tokens is trained). eot: its end-of-text token, if that has an unusual name. shard_size: the largest
    size of a shard. against: an index of an earlier build, whose near-duplicates are dropped. seed: of the document
    shuffle. runner, workers, memory, ray_address, slurm: where tasks run, which does not affect the result. say: called
    with each warning. progress: called with the fraction done and a text.

    A finished folder is kept, and an interrupted build continues. Raises UsageError or ConfigError for wrong arguments,
    DataError for inputs that cannot be read, RunBusyError if another process builds there.

        built = ingot.build_data({"web": "CC-MAIN-*.warc.gz", "law": ["law.jsonl", "text=body"]}, "data")
        built.train.tokens, built.corpus.funnel
    """
    if not isinstance(recipe, DataRecipe):
        recipe = load_recipe(Path(recipe) if recipe else None, overrides, preset)
    recipe = import_plugins(recipe)  # before inputs are found: their formats can be those of plug-ins
    prepared = prepare(
        _found(inputs, Path(out), recipe),
        Path(out),
        recipe,
        vocab_size=vocab_size,
        tokenizer=Path(tokenizer) if tokenizer else None,
        eot=eot,
        runner=find_runner(runner, workers, memory, ray_address, slurm) if isinstance(runner, str) else runner,
        seed=seed,
        against=Path(against) if against else None,
        shard_bytes=parse_bytes(shard_size),
        progress=progress,
    )
    for warning in prepared.warnings:
        say(f"warning: {warning}")
    if prepared.notice:
        say(f"notice: {prepared.notice}")
    return prepared


def build_facts(prepared: Prepared) -> dict:
    """Return a finished build as plain values: the JSON object of `ingot data build --json`."""
    train = prepared.train
    return {
        "fresh": prepared.fresh,
        "corpus": to_dict(prepared.corpus),
        "train_tokens": train.tokens,
        "heldout_tokens": prepared.heldout.tokens,
        "vocab_size": train.vocab_size,
        "tokenizer": str(prepared.tokenizer),
        "fingerprint": train.fingerprint(),
        "warnings": list(prepared.warnings),
    }


def _found(inputs: Inputs, out: Path, recipe: DataRecipe) -> list[Input]:
    if isinstance(inputs, Mapping):
        return find_inputs([(name, _words(given)) for name, given in inputs.items()], out, recipe)
    given = [inputs] if isinstance(inputs, str | Path) else inputs
    ready = [one for one in given if isinstance(one, Input)]
    words = [one for one in given if not isinstance(one, Input)]
    return ready + find_inputs([(WEB, words)], out, recipe) if words or not ready else ready


def _words(given: str | Path | Sequence[str | Path]) -> Sequence[str | Path]:
    return [given] if isinstance(given, str | Path) else list(given)


def find_inputs(sources: Iterable[tuple[str, Sequence[str | Path]]], out: Path, recipe: DataRecipe) -> list[Input]:
    """Return the inputs of pairs (source name, words). A word is a place, or an option like "format=jsonl" of all
    places of its pair; a Path, or a str that is an existing path, is a place. out: the folder of the build, next to
    which downloaded lists are kept.

    Raises UsageError for a source without a place, except the first, and the errors of `expand`.
    """
    out, found = out.absolute(), []
    for number, (name, words) in enumerate(sources):
        options = dict(str(word).split("=", 1) for word in words if _is_option(word))
        places = [str(word) for word in words if not _is_option(word)]
        if number and not places:
            raise UsageError(
                "E-SOURCE-INPUTS",
                f"--source {name} has no inputs",
                rule="--source takes a name and at least one input",
                fix=f"add inputs: --source {name} FILE...",
                source=name,
            )
        format, cache = options.pop("format", "auto"), out.with_name(f".{out.name}.lists")
        found += expand(places, name, cache=cache, format=format, fields=Fields(**options), rules=recipe.remote)
    return found


def _is_option(word: str | Path) -> bool:
    """Return whether a word is an option. The path `language=en/part.parquet` of a partitioned table is none."""
    if isinstance(word, Path) or "=" not in word or word.partition("=")[0] not in _OPTIONS:
        return False
    return not Path(word).exists()


def find_runner(
    name: RunnerName, workers: int | None, memory: str | int | None, ray_address: str, slurm: Sequence[str]
) -> Runner:
    """Return the runner of these options. Raises UsageError for an option of another runner."""
    from ingot.data.tasks.local import MEMORY_BYTES, Local

    for option, given, runner in (("--ray-address", ray_address, "ray"), ("--slurm", slurm, "slurm")):
        if given and name != runner:
            raise UsageError(
                "E-RUNNER-OPTION",
                f"{option} is given with --runner {name}",
                rule=f"{option} is an option of --runner {runner}",
                fix=f"use --runner {runner}, or leave {option} out",
                option=option,
                runner=name,
            )
    limit = parse_bytes(memory) if memory else MEMORY_BYTES
    if name == "ray":
        from ingot.data.tasks.ray import Ray

        return Ray(ray_address or None, memory_bytes=limit, max_parallel=workers or 0)
    if name == "slurm":
        return _slurm(slurm, workers, limit)
    if name == "inline":
        if memory or workers:
            raise UsageError(
                "E-RUNNER-OPTION",
                "--workers or --memory is given with --runner inline",
                rule="--runner inline uses one process without a memory limit",
                fix="use --runner local, or leave --workers and --memory out",
                option="--memory" if memory else "--workers",
                runner="inline",
            )
        return Inline()
    return Local(workers or os.cpu_count() or 1, memory_bytes=limit)


def _slurm(words: Sequence[str], workers: int | None, memory_bytes: int) -> Runner:
    from ingot.data.tasks.slurm import Slurm

    options = {}
    for word in words:
        key, sign, value = word.removeprefix("--").partition("=")
        if not sign or not value or any(character.isspace() for character in word):
            raise UsageError(
                "E-SLURM-FORM",
                f"--slurm {word!r} is not KEY=VALUE without spaces",
                rule="--slurm takes an option of sbatch with its value, without spaces",
                fix="write, for example, --slurm partition=cpu",
                given=word,
            )
        if key in ("array", "job-name", "nodes", "ntasks", "open-mode", "output"):
            raise UsageError(
                "E-SLURM-RESERVED",
                f"--slurm {word} sets an option that ingot reserves",
                rule=f"ingot sets {key} itself, to find its tasks",
                fix=f"leave --slurm {key} out",
                key=key,
            )
        options[key] = value
    known: dict[str, Any] = {key: options.pop(key) for key in ("partition", "time", "mem") if key in options}
    cpus = options.pop("cpus", options.pop("cpus-per-task", "8"))
    if not cpus.isdecimal() or int(cpus) < 1:
        raise UsageError(
            "E-OPTION-RANGE",
            f"--slurm cpus={cpus}: not a positive whole number",
            rule="cpus is the number of CPUs of each array element, at least 1",
            fix="use, for example, --slurm cpus=8",
            option="slurm cpus",
            value=cpus,
        )
    if workers:
        known["max_parallel"] = workers
    lines = [f"--{key}={value}" for key, value in options.items()]
    return Slurm(**known, cpus=int(cpus), lines=lines, memory_bytes=memory_bytes)
