"""`ingot data build`."""

import argparse
import os
from pathlib import Path

from ingot.cli.terminal import Terminal

HELP = "crawl files and other sources -> corpus, tokenizer, token shards"
_INPUT = "a file, folder, glob, s3://.., https://.. or cc:NAME (WARC, WET, JSONL, Parquet, text, tar; gzip or zstd)"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("inputs", nargs="*", metavar="INPUT", help=f"{_INPUT}; its source is 'web'")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for corpus/ and tokens/")
    parser.add_argument(
        "--source",
        nargs="+",
        action="append",
        default=[],
        metavar=("NAME", "INPUT"),
        help="inputs of a source of its own, for weights and evaluation by source; among them format=F, and text=, "
        "url=, id=, language=COLUMN for JSONL and Parquet; repeatable (default: none)",
    )
    parser.add_argument("--preset", default="", metavar="NAME", help="quality rules: web, fineweb, gopher, c4, none")
    parser.add_argument("--recipe", metavar="FILE", help="data recipe as TOML (default: the preset 'web')")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change one value of the recipe; repeatable"
    )
    parser.add_argument("--tokenizer", metavar="FILE", help="tokenizer.json to use (default: train a byte-level BPE)")
    parser.add_argument("--eot", default="", metavar="TOKEN", help="its end-of-text token, if it has an unusual name")
    parser.add_argument("--vocab-size", type=int, default=32_768, help="tokens of a trained BPE (default: 32768)")
    parser.add_argument("--shard-size", default="1GB", metavar="SIZE", help="most bytes of a shard (default: 1GB)")
    parser.add_argument("--against", metavar="DIR", help="index of an earlier build: what is like its documents goes")
    parser.add_argument("--seed", type=int, default=1234, help="of the shuffle of documents (default: 1234)")
    group = parser.add_argument_group("who works; the result is the same")
    group.add_argument("--runner", choices=("local", "inline", "ray", "slurm"), default="local", help="default: local")
    group.add_argument(
        "--workers",
        type=int,
        help="local processes (default: one per core); with ray tasks, with slurm array elements at once "
        "(default: what the cluster has; 100)",
    )
    group.add_argument(
        "--memory", metavar="SIZE", help="that a worker process may have; inline has no limit (default: 1.5GiB)"
    )
    group.add_argument("--ray-address", default="", metavar="ADDRESS", help="of a running cluster (default: start one)")
    group.add_argument(
        "--slurm",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="for sbatch: partition, time, mem, cpus (of an element), or any other long option; repeatable",
    )


def run(args: argparse.Namespace, terminal: Terminal) -> None:
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
        terminal.say(f"{args.out} is finished and was made from these files and this recipe; nothing to do")
    from ingot.cli.data.funnel import print_funnel, print_warnings

    print_funnel(prepared.corpus.funnel, terminal)
    train, heldout = prepared.train, prepared.heldout
    terminal.say(
        f"\ntokens: {train.tokens:,} to train on, {heldout.tokens:,} held out "
        f"({train.dtype}, vocabulary {train.vocab_size:,}, encoded with {prepared.engine})"
    )
    print_warnings(prepared.warnings, terminal)
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
            raise UsageError(f"--source {name} names no inputs", fix=f"--source {name} FILE...")
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

    if args.workers is not None and args.workers < 1:
        raise UsageError(f"--workers {args.workers}", rule="at least 1")
    for option, given, runner in (("--ray-address", args.ray_address, "ray"), ("--slurm", args.slurm, "slurm")):
        if given and args.runner != runner:
            raise UsageError(f"{option} with --runner {args.runner}", fix=f"--runner {runner}")
    memory = parse_bytes(args.memory) if args.memory else MEMORY_BYTES
    if args.runner == "ray":
        from ingot.data.tasks.ray import Ray

        return Ray(args.ray_address or None, memory_bytes=memory, max_parallel=args.workers or 0)
    if args.runner == "slurm":
        return _slurm(args, memory)
    if args.runner == "inline":
        if args.memory or args.workers:
            raise UsageError("--workers or --memory with --runner inline", rule="it is one process without limits")
        return Inline()
    return Local(args.workers or os.cpu_count() or 1, memory_bytes=memory)


def _slurm(args: argparse.Namespace, memory_bytes: int):
    from ingot.data.tasks.slurm import Slurm
    from ingot.errors import UsageError

    options = {}
    for word in args.slurm:
        key, sign, value = word.removeprefix("--").partition("=")
        if not sign or not value or any(character.isspace() for character in word):
            raise UsageError(f"--slurm {word!r}", rule="an option of sbatch and its value, like partition=cpu")
        if key in ("array", "job-name", "nodes", "ntasks", "open-mode", "output"):
            raise UsageError(f"--slurm {word}", rule=f"{key} is what the runner finds its work by")
        options[key] = value
    known = {key: options.pop(key) for key in ("partition", "time", "mem") if key in options}
    cpus = options.pop("cpus", options.pop("cpus-per-task", "8"))
    if not cpus.isdecimal() or int(cpus) < 1:
        raise UsageError(f"--slurm cpus={cpus}", rule="a number of CPUs of each element, at least 1")
    lines = [f"--{key}={value}" for key, value in options.items()]
    parallel = {"max_parallel": args.workers} if args.workers else {}
    return Slurm(**known, cpus=int(cpus), lines=lines, memory_bytes=memory_bytes, **parallel)
