"""`ingot data build`, and `ingot data recipe`, which prints the recipe of a build."""

import argparse
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
    from ingot.api.building import WEB, build_data, build_facts, find_inputs
    from ingot.data.build.recipe import load_recipe

    recipe = load_recipe(Path(args.recipe) if args.recipe else None, args.set, args.preset)
    sources = [(WEB, args.inputs), *((name, words) for name, *words in args.source)]
    warnings: list[str] = []
    prepared = build_data(
        find_inputs(sources, Path(args.out), recipe),
        args.out,
        recipe=recipe,
        tokenizer=args.tokenizer,
        eot=args.eot,
        vocab_size=args.vocab_size,
        shard_size=args.shard_size,
        against=args.against,
        seed=args.seed,
        runner=args.runner,
        workers=args.workers,
        memory=args.memory,
        ray_address=args.ray_address,
        slurm=args.slurm,
        say=warnings.append,
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
    for warning in warnings:
        terminal.say(warning)
    terminal.say(f"fingerprint: {train.fingerprint()}")
    terminal.result(build_facts(prepared))
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


def configure_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--preset", default="", metavar="NAME", help="quality rules: web, fineweb, gopher, c4 or none (default: web)"
    )
    parser.add_argument("--recipe", type=place, metavar="FILE", help="data recipe as TOML (default: the preset web)")
    _add_recipe_setting(parser)


def run_recipe(args: argparse.Namespace, terminal: Terminal) -> None:
    from dataclasses import replace

    from ingot.config import to_dict, to_toml
    from ingot.data.build.recipe import load_recipe

    recipe = load_recipe(Path(args.recipe) if args.recipe else None, args.set, args.preset)
    recipe = replace(recipe, plugins=replace(recipe.plugins, code={}))  # ingot writes the code, and never reads it
    terminal.say(to_toml(recipe, whole=True))
    terminal.result(to_dict(recipe))
