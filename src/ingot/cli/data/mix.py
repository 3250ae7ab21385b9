"""`ingot data mix`: set the weights of sources by hand or preset, find them by DSIR or DoReMi, or compare mixtures."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ingot.cli.arguments import LARGEST_SEED, MOST_STEPS, count, place
from ingot.cli.terminal import Terminal

if TYPE_CHECKING:
    from ingot.schema.run import RunConfig
    from ingot.schema.tokens import TokenManifest

_TRAINING_STEPS = 200


def configure_mix(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        type=place,
        metavar="DIR",
        help="output folder of `ingot data build`, or token folder (with --dsir: corpus folder)",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--weights", nargs="+", metavar="SOURCE=SHARE", help="shares in any unit (default: those of --preset natural)"
    )
    how.add_argument("--preset", metavar="NAME", help="preset weights: classic, natural, equal, or a plug-in's policy")
    how.add_argument(
        "--weights-from",
        type=place,
        metavar="FILE",
        help="weights from a run file, a TOML file, or the JSON of DSIR or DoReMi",
    )
    how.add_argument(
        "--dsir", nargs="+", type=place, metavar="FILE", help="choose documents that are similar to these texts"
    )
    how.add_argument("--doremi", action="store_true", help="tune the weights with a small proxy model")
    how.add_argument(
        "--ablate", nargs="+", metavar="MIXTURE", help="train on each of these presets or files, and compare them"
    )
    parser.add_argument(
        "--recipe",
        type=place,
        metavar="FILE",
        help="data recipe with the plug-ins of --preset and --ablate (default: none)",
    )
    parser.add_argument(
        "--tokens",
        type=count("tokens", 1),
        metavar="N",
        help="token budget, like 1B (default: with --write the run's tokens, else one pass)",
    )
    parser.add_argument(
        "--max-epochs",
        nargs="+",
        default=["4"],
        metavar="N",
        help="maximum passes over each source; SOURCE=N sets it for one source (default: 4)",
    )
    parser.add_argument("--write", type=place, metavar="RUN.toml", help="write the weights to this run file")
    parser.add_argument(
        "--out", type=place, metavar="PATH", help="output: a folder for --dsir and --ablate, a JSON file for --doremi"
    )
    parser.add_argument(
        "--keep", type=count("keep", 1), metavar="N", help="number of documents that --dsir chooses, like 10k"
    )
    parser.add_argument(
        "--text-field", default="text", metavar="NAME", help="JSONL field with the text, for --dsir (default: text)"
    )
    parser.add_argument(
        "--tokenizer",
        type=place,
        metavar="FILE",
        help="tokenizer for the documents that --dsir chose (default: do not tokenize)",
    )
    parser.add_argument(
        "--proxy",
        type=place,
        metavar="RUN.toml",
        help="model and training for --doremi and --ablate (default: a tiny model)",
    )
    parser.add_argument(
        "--steps",
        type=count("steps", 1, MOST_STEPS),
        metavar="N",
        help=f"steps of each training run (default: {_TRAINING_STEPS})",
    )
    parser.add_argument(
        "--seeds",
        type=count("seeds", 1, 1000),
        default=2,
        metavar="N",
        help="training runs per mixture, for --ablate (default: 2)",
    )
    parser.add_argument(
        "--seed",
        type=count("seed", -LARGEST_SEED, LARGEST_SEED),
        default=1234,
        metavar="N",
        help="seed of --dsir and --doremi, first seed of --ablate (default: 1234)",
    )


def run_mix(args: argparse.Namespace, terminal: Terminal) -> None:
    if args.dsir:
        _dsir(args, terminal)
    elif args.ablate:
        _ablate(args, terminal)
    elif args.doremi:
        _doremi(args, terminal)
    else:
        _by_hand(args, terminal)


def _by_hand(args: argparse.Namespace, terminal: Terminal) -> None:
    from ingot.data.mixture.shares import NATURAL, parse_weights, preset_weights, read_weights

    tables = _tables(args)
    tokens, available, _ = _tokens(args)
    notes: tuple[str, ...] = ()
    if args.weights:
        weights = parse_weights(args.weights)
    elif args.weights_from:
        weights = read_weights(Path(args.weights_from))
    else:
        weights, notes = preset_weights(args.preset or NATURAL, available, tables)
    _show(args, terminal, available, weights, notes, {"tokens_folder": str(tokens)})


def _tables(args: argparse.Namespace) -> dict[str, dict]:
    """Import the plug-ins of --recipe. Return the settings of their policies: name -> table."""
    if not args.recipe:
        return {}
    from ingot.data.build.recipe import load_recipe

    return load_recipe(Path(args.recipe)).mixture


def _show(
    args: argparse.Namespace,
    terminal: Terminal,
    available: dict[str, int],
    weights: dict[str, float],
    notes: tuple[str, ...],
    facts: dict,
) -> None:
    """Compute and print the mixture, and write its weights to the run file given with --write."""
    from ingot.config import to_dict
    from ingot.data.mixture.run_file import write_weights
    from ingot.data.mixture.shares import mix
    from ingot.theory.rules import load_run
    from ingot.units import format_count

    if args.tokens:
        budget = args.tokens
    elif args.write:
        config = load_run(Path(args.write))
        budget = config.train.steps * config.tokens_per_step
    else:
        budget = sum(available[source] for source in weights if source in available)
    mixture = mix(available, weights, budget, _max_epochs(args.max_epochs, weights))
    rows = [
        (
            one.source,
            f"{one.wanted:.1%}",
            f"{one.share:.1%}",
            format_count(one.tokens),
            format_count(one.available),
            f"{one.epochs:.3g}",
        )
        for one in mixture.sources
    ]
    header = ("source", "wanted", "share", "tokens", "of", "epochs")
    terminal.say(f"{format_count(mixture.tokens)} tokens:")
    terminal.table(rows, header, right=(1, 2, 3, 4, 5))
    for note in (*notes, *mixture.notes):
        terminal.say(f"note: {note}")
    for warning in mixture.warnings:
        terminal.say(f"warning: {warning}")
    replaced = None
    if args.write:
        replaced = write_weights(Path(args.write), mixture.weights)
        terminal.say(f"{args.write}: data.weights written" + (f", replacing {replaced}" if replaced else ""))
        terminal.next(f"ingot train {args.write}      (a run in progress needs --accept-change data.weights)")
    written = {"written": args.write, "replaced": replaced} if args.write else {}
    terminal.result(facts | {"mixture": to_dict(mixture), "weights": mixture.weights, "notes": notes} | written)


def _max_epochs(given: list[str], weights: dict[str, float]) -> dict[str, float]:
    """Return the maximum number of passes over each source, from arguments like ["4", "books=2"]."""
    from ingot.data.mixture.shares import parse_weights
    from ingot.errors import UsageError

    default = [one for one in given if "=" not in one]
    try:
        caps = dict.fromkeys(weights, float(default[-1]) if default else 4.0)
    except ValueError:
        raise UsageError(
            "E-EPOCHS-FORM",
            f"--max-epochs {default[-1]}: not a number",
            rule="--max-epochs takes a number, and SOURCE=N for single sources",
            fix="write, for example, --max-epochs 4 books=2",
            given=default[-1],
        ) from None
    return caps | parse_weights([one for one in given if "=" in one])


def _tokens(args: argparse.Namespace) -> tuple[Path, dict[str, int], "TokenManifest"]:
    """Return the token folder, the number of tokens of each source, and the manifest."""
    from ingot.schema.tokens import read_token_manifest, training_tokens

    tokens = training_tokens(Path(args.folder))
    manifest = read_token_manifest(tokens)
    available = {source: sum(s.tokens for s in manifest.shards if s.source == source) for source in manifest.sources}
    return tokens, available, manifest


def _proxy(args: argparse.Namespace, tokens: Path, manifest: "TokenManifest") -> "RunConfig":
    """Return the configuration of the small runs that --doremi and --ablate train on `tokens`."""
    from dataclasses import replace

    from ingot.theory.rules import load_run
    from ingot.trainer.experiments.proxy import proxy_run

    heldout, tokenizer = tokens.parent / "heldout", tokens.parent / "tokenizer.json"
    small = proxy_run(
        tokens,
        manifest,
        steps=args.steps or _TRAINING_STEPS,
        heldout=heldout if heldout.is_dir() else None,
        tokenizer=tokenizer if tokenizer.is_file() else None,
        seed=args.seed,
    )
    if not args.proxy:
        return small
    own = load_run(Path(args.proxy))
    train = replace(own.train, steps=args.steps or own.train.steps)
    return replace(own, train=train, data=replace(small.data, mask_documents=own.data.mask_documents))


def _doremi(args: argparse.Namespace, terminal: Terminal) -> None:
    from ingot.config import to_dict
    from ingot.errors import require

    require("torch", "train")
    from ingot.trainer.experiments.doremi import doremi
    from ingot.units import format_count

    tokens, available, manifest = _tokens(args)
    out = Path(args.out or "doremi.json")
    found = doremi(_proxy(args, tokens, manifest), out=out, progress=terminal.progress)
    terminal.say(
        f"DoReMi: {found.steps} steps of {format_count(found.tokens_per_step)} tokens, a proxy model with "
        f"{format_count(found.parameters)} parameters; the history is in {out}"
    )
    ranked = sorted(found.weights, key=lambda source: -found.weights[source])
    rows = [(source, f"{found.base[source]:.1%}", f"{found.weights[source]:.1%}") for source in ranked]
    terminal.table(rows, ("source", "reference", "tuned"), right=(1, 2))
    terminal.say()
    _show(args, terminal, available, found.weights, (), {"out": str(out), "doremi": to_dict(found)})


def _ablate(args: argparse.Namespace, terminal: Terminal) -> None:
    from ingot.config import to_dict
    from ingot.data.mixture.shares import named_weights
    from ingot.errors import UsageError, require

    require("torch", "train")
    from ingot.trainer.experiments.ablation import ablate
    from ingot.units import format_count

    tables = _tables(args)
    tokens, available, manifest = _tokens(args)
    mixtures: dict[str, dict[str, float]] = {}
    for spec in args.ablate:
        name, weights, notes = named_weights(spec, available, tables)
        if name in mixtures:
            raise UsageError(
                "E-MIXTURE-NAME",
                f"two mixtures have the name {name!r}",
                rule="mixtures need different names; a mixture from a file has the name of the file",
                fix="rename one of the files",
                name=name,
            )
        mixtures[name] = weights
        for note in notes:
            terminal.say(f"note: {name}: {note}")
    folder = Path(args.out or "ablation")
    seeds = range(args.seed, args.seed + args.seeds)
    config = _proxy(args, tokens, manifest)
    found = ablate(config, mixtures, folder, seeds=tuple(seeds), progress=terminal.progress)
    sources = sorted(found.mixtures[0].by_source)
    rows = [
        (
            one.name,
            f"{one.bpb:.4f}",
            f"+{one.behind:.4f}" if one.behind else "",  # words: ok
            "yes" if one.within_noise and one.behind else "",  # words: ok
            *(f"{one.by_source[source]:.4f}" for source in sources),
        )
        for one in found.mixtures
    ]
    terminal.say(f"held-out bits per byte after {format_count(found.tokens)} tokens, mean of {args.seeds} seeds:")
    header = ("mixture", "bpb", "difference", "within noise", *sources)
    terminal.table(rows, header, right=(1, 2, *range(4, 4 + len(sources))))
    terminal.say(f"{found.verdict}\nthe runs are in {folder}")
    terminal.result({"out": str(folder), "ablation": to_dict(found), "verdict": found.verdict})


def _dsir(args: argparse.Namespace, terminal: Terminal) -> None:
    from ingot.config import to_dict
    from ingot.data.build.shards import build_shards
    from ingot.data.lineage.inspect import corpus_folder
    from ingot.data.mixture.dsir import DsirRules, select
    from ingot.errors import UsageError
    from ingot.tokenizer.encoder import load_encoder

    if not args.keep or not args.out:
        raise UsageError(
            "E-DSIR-OPTIONS",
            "--dsir is given without --keep or --out",
            rule="--dsir needs --keep N and --out DIR",
            fix="write, for example, --dsir FILES --keep 10k --out chosen",
            missing=[option for option in ("keep", "out") if not getattr(args, option)],
        )
    chosen = select(
        corpus_folder(Path(args.folder)),
        [corpus_folder(Path(name)) for name in args.dsir],
        args.keep,
        Path(args.out),
        DsirRules(seed=args.seed),
        text_field=args.text_field,
        progress=terminal.progress,
    )
    terminal.say(f"{chosen.chosen:,} of {chosen.documents:,} documents chosen and written to {args.out}/corpus")
    rows = [
        (one.source, f"{one.chosen:,}", f"{one.documents:,}", f"{chosen.weights.get(one.source, 0):.1%}")
        for one in chosen.sources
    ]
    terminal.table(rows, ("source", "chosen", "of", "share of the text"), right=(1, 2, 3))
    facts: dict = {"out": args.out, "selection": to_dict(chosen)}
    if args.tokenizer:
        out, tokenizer = Path(args.out), Path(args.tokenizer)
        train, heldout = build_shards(out / "corpus", load_encoder(tokenizer), out / "tokens", tokenizer=tokenizer)
        terminal.say(f"tokens: {train.tokens:,} for training, {heldout.tokens:,} held out")
        terminal.next(f"ingot data mix {args.out}", f"ingot plan --model tiny --tokens {args.out} --out run.toml")
        facts |= {"train_tokens": train.tokens, "heldout_tokens": heldout.tokens}
    terminal.result(facts)
