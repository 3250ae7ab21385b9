"""`ingot data build`, and `ingot data recipe`, which prints the recipe of a build."""

import argparse
import os
from pathlib import Path

from ingot.cli.arguments import LARGEST_SEED, count, place
from ingot.cli.data.folder import show_funnel
from ingot.cli.terminal import Terminal

_INPUT = "a file, folder, glob, s3://.., https://.. or cc:NAME (WARC, WET, JSONL, Parquet, text, tar; gzip or zstd)"


def configure_build(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "inputs", nargs="*", type=place, metavar="INPUT", help=f"{_INPUT} (these inputs get the source name 'web')"
    )
    parser.add_argument("--out", type=place, required=True, metavar="DIR", help="folder for corpus/ and tokens/")
    parser.add_argument(
        "--source",
        nargs="+",
        type=place,
        action="append",
        default=[],
        metavar=("NAME", "INPUT"),
        help="inputs of a named source, for weights and evaluation by source; options: format=F; for JSONL and Parquet "
        "also text=COLUMN, url=COLUMN, id=COLUMN, language=COLUMN; repeatable",
    )
    parser.add_argument(
        "--preset", default="", metavar="NAME", help="quality rules: web, fineweb, gopher, c4 or none (default: web)"
    )
    parser.add_argument("--recipe", type=place, metavar="FILE", help="data recipe as TOML (default: the preset web)")
    _add_recipe_setting(parser)
    parser.add_argument(
        "--tokenizer", type=place, metavar="FILE", help="tokenizer.json to use (default: train a byte-level BPE)"
    )
    parser.add_argument(
        "--eot",
        default="",
        metavar="TOKEN",
        help="end-of-text token of --tokenizer (default: searched for by its usual names)",
    )
    parser.add_argument(
        "--vocab-size",
        type=count("vocab-size", 1, 10**8),
        default=32_768,
        metavar="N",
        help="vocabulary of a trained BPE (default: 32768)",
    )
    parser.add_argument("--shard-size", default="1GB", metavar="SIZE", help="maximum size of a shard (default: 1GB)")
    parser.add_argument(
        "--against",
        type=place,
        metavar="DIR",
        help="drop near-duplicates of documents in this index of an earlier build",
    )
    parser.add_argument(
        "--seed",
        type=count("seed", -LARGEST_SEED, LARGEST_SEED),
        default=1234,
        metavar="N",
        help="seed of the document shuffle (default: 1234)",
    )
    group = parser.add_argument_group("runner (does not affect the result)")
    group.add_argument(
        "--runner",
        choices=("local", "inline", "ray", "slurm"),
        default="local",
        help="where tasks run (default: local)",
    )
    group.add_argument(
        "--workers",
        type=count("workers", 1, 10_000),
        help="local: processes (default: one per core); ray: tasks at once (default: as many as the cluster can run); "
        "slurm: array elements at once (default: 100)",
    )
    group.add_argument(
        "--memory", metavar="SIZE", help="memory limit per worker process; not for --runner inline (default: 1.5GiB)"
    )
    group.add_argument(
        "--ray-address", default="", metavar="ADDRESS", help="address of a running Ray cluster (default: start one)"
    )
    group.add_argument(
        "--slurm",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="option of sbatch: partition, time, mem, cpus (per array element), or another long option; repeatable",
    )


def run_build(args: argparse.Namespace, terminal: Terminal) -> None:
    from ingot.config import to_dict
    from ingot.data.build.prepare import prepare
    from ingot.data.build.recipe import load_recipe
    from ingot.units import parse_bytes

    recipe = load_recipe(Path(args.recipe) if args.recipe else None, args.set, args.preset)
    prepared = prepare(
        _inputs(args, recipe),
        Path(args.out),
        recipe,
        vocab_size=args.vocab_size,
        tokenizer=Path(args.tokenizer) if args.tokenizer else None,
        eot=args.eot,
        runner=_runner(args),
        seed=args.seed,
        against=Path(args.against) if args.against else None,
        shard_bytes=parse_bytes(args.shard_size),
        progress=terminal.progress,
    )
    if not prepared.fresh:
        terminal.say(f"{args.out} is complete and was made from these files with this recipe; nothing to do")
    show_funnel(prepared.corpus.funnel, terminal)
    train, heldout = prepared.train, prepared.heldout
    terminal.say(
        f"\ntokens: {train.tokens:,} for training, {heldout.tokens:,} held out "
        f"({train.dtype}, vocabulary {train.vocab_size:,}, encoded with {prepared.engine})"
    )
    for warning in prepared.warnings:
        terminal.say(f"warning: {warning}")
    if prepared.notice:
        terminal.say(f"notice: {prepared.notice}")
    terminal.say(f"fingerprint: {train.fingerprint()}")
    terminal.result(
        {
            "fresh": prepared.fresh,
            "corpus": to_dict(prepared.corpus),
            "train_tokens": train.tokens,
            "heldout_tokens": heldout.tokens,
            "vocab_size": train.vocab_size,
            "tokenizer": str(prepared.tokenizer),
            "fingerprint": train.fingerprint(),
            "warnings": list(prepared.warnings),
        }
    )
    terminal.next(
        f"ingot data inspect {args.out}", f"ingot plan --model tiny --tokens {args.out}/tokens/train --out run.toml"
    )


def _add_recipe_setting(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change one setting of the recipe, like quality.gopher.symbol_ratio=0.15; repeatable",
    )


def _inputs(args: argparse.Namespace, recipe) -> list:
    from ingot.data.sources.input import expand
    from ingot.data.sources.text import Fields
    from ingot.errors import UsageError

    out = Path(args.out).absolute()
    sources = [("web", args.inputs), *((name, words) for name, *words in args.source)]
    found = []
    for number, (name, words) in enumerate(sources):
        options = dict(word.split("=", 1) for word in words if _is_option(word))
        places = [word for word in words if not _is_option(word)]
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


def _is_option(word: str) -> bool:
    return word.partition("=")[0] in ("format", "text", "url", "id", "language") and "=" in word


def _runner(args: argparse.Namespace):
    from ingot.data.tasks.local import MEMORY_BYTES, Local
    from ingot.data.tasks.run import Inline
    from ingot.errors import UsageError
    from ingot.units import parse_bytes

    for option, given, runner in (("--ray-address", args.ray_address, "ray"), ("--slurm", args.slurm, "slurm")):
        if given and args.runner != runner:
            raise UsageError(
                "E-RUNNER-OPTION",
                f"{option} is given with --runner {args.runner}",
                rule=f"{option} is an option of --runner {runner}",
                fix=f"use --runner {runner}, or leave {option} out",
                option=option,
                runner=args.runner,
            )
    memory = parse_bytes(args.memory) if args.memory else MEMORY_BYTES
    if args.runner == "ray":
        from ingot.data.tasks.ray import Ray

        return Ray(args.ray_address or None, memory_bytes=memory, max_parallel=args.workers or 0)
    if args.runner == "slurm":
        return _slurm(args, memory)
    if args.runner == "inline":
        if args.memory or args.workers:
            raise UsageError(
                "E-RUNNER-OPTION",
                "--workers or --memory is given with --runner inline",
                rule="--runner inline uses one process without a memory limit",
                fix="use --runner local, or leave --workers and --memory out",
                option="--memory" if args.memory else "--workers",
                runner="inline",
            )
        return Inline()
    return Local(args.workers or os.cpu_count() or 1, memory_bytes=memory)


def _slurm(args: argparse.Namespace, memory_bytes: int):
    from ingot.data.tasks.slurm import Slurm
    from ingot.errors import UsageError

    options = {}
    for word in args.slurm:
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
    known = {key: options.pop(key) for key in ("partition", "time", "mem") if key in options}
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
    lines = [f"--{key}={value}" for key, value in options.items()]
    parallel = {"max_parallel": args.workers} if args.workers else {}
    return Slurm(**known, cpus=int(cpus), lines=lines, memory_bytes=memory_bytes, **parallel)


def configure_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--preset", default="", metavar="NAME", help="quality rules: web, fineweb, gopher, c4 or none (default: web)"
    )
    parser.add_argument("--recipe", type=place, metavar="FILE", help="data recipe as TOML (default: the preset web)")
    _add_recipe_setting(parser)


def run_recipe(args: argparse.Namespace, terminal: Terminal) -> None:
    from ingot.config import to_dict, to_toml
    from ingot.data.build.recipe import load_recipe

    recipe = load_recipe(Path(args.recipe) if args.recipe else None, args.set, args.preset)
    terminal.say(to_toml(recipe, whole=True))
    terminal.result(to_dict(recipe))
