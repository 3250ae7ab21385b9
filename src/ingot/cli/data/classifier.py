"""`ingot data classifier train`, `score` and `show`: text classifiers in fastText's format."""

import argparse
from pathlib import Path

from ingot.cli.arguments import count, fraction, place
from ingot.cli.terminal import Terminal


def configure_classifier(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="classifier_action", required=True, metavar="ACTION")
    train = verbs.add_parser("train", help="train on labeled texts, or on positive and negative texts")
    train.add_argument("files", nargs="*", metavar="FILE", help="labeled texts: lines '__label__NAME text', or JSONL")
    for name, what in (("positive", "like the texts to find"), ("negative", "unlike the texts to find")):
        train.add_argument(
            f"--{name}",
            nargs="+",
            default=[],
            metavar="FILE",
            help=f"texts {what} (label '{name}'): JSONL, a file with one text per line, or a corpus folder",
        )
    train.add_argument("--out", type=place, required=True, metavar="FILE", help="model to write; its card is FILE.json")
    train.add_argument("--licence", required=True, metavar="TEXT", help="license of the examples")
    train.add_argument("--text-field", default="text", metavar="NAME", help="JSONL field with the text (default: text)")
    train.add_argument(
        "--label-field", default="label", metavar="NAME", help="JSONL field with the label (default: label)"
    )
    train.add_argument(
        "--heldout",
        type=fraction("heldout", 0.0, 1.0),
        default=0.1,
        metavar="SHARE",
        help="share of the texts to hold out for measuring (default: 0.1)",
    )
    train.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="one setting: dim, ngrams, buckets, epochs, min_count, characters, batch, rate, loss or seed; repeatable",
    )
    train.add_argument("--force", action="store_true", help="replace an existing model at --out (default: stop)")
    score = verbs.add_parser("score", help="print the scores that a model gives to texts")
    score.add_argument("model", type=place, metavar="MODEL", help="fastText model, .bin or .ftz")
    score.add_argument(
        "files", nargs="+", metavar="FILE", help="JSONL, a file with one text per line, or a corpus folder"
    )
    score.add_argument(
        "-n",
        "--count",
        type=count("count", 0, 10**9),
        default=10,
        metavar="N",
        help="texts to show; 0: all (default: 10)",
    )
    score.add_argument(
        "--characters",
        type=count("characters", 0, 10**9),
        default=5000,
        metavar="N",
        help="characters scored from the start of a text; 0: all (default: 5000)",
    )
    score.add_argument("--text-field", default="text", metavar="NAME", help="JSONL field with the text (default: text)")
    show = verbs.add_parser("show", help="show the card of a model: data, license, accuracy on held-out texts")
    show.add_argument("model", type=place, metavar="MODEL", help="fastText model, .bin or .ftz")


def run_classifier(args: argparse.Namespace, terminal: Terminal) -> None:
    {"train": _train, "score": _score, "show": _show}[args.classifier_action](args, terminal)


def _train(args: argparse.Namespace, terminal: Terminal) -> None:
    from ingot.config import load
    from ingot.data.classify.make import NEGATIVE, POSITIVE, Source, load_card, make_classifier
    from ingot.data.classify.train import ClassifierSettings
    from ingot.errors import UsageError

    groups = ((args.files, ""), (args.positive, POSITIVE), (args.negative, NEGATIVE))
    sources = [Source(Path(name), label) for names, label in groups for name in names]
    if not sources or bool(args.positive) != bool(args.negative):
        raise UsageError(
            "E-CLASSIFIER-EXAMPLES",
            "only one of --positive and --negative is given" if sources else "no examples are given",
            rule="a classifier is trained on labeled files, or on both positive and negative texts",
            fix="ingot data classifier train --positive FILES --negative FILES ...",
        )
    make_classifier(
        sources,
        Path(args.out),
        licence=args.licence,
        settings=load(ClassifierSettings, None, args.set),
        heldout=args.heldout,
        text_field=args.text_field,
        label_field=args.label_field,
        force=args.force,
        progress=terminal.progress,
    )
    _print(args.out, load_card(Path(args.out)), terminal)
    terminal.next(f"ingot data classifier score {args.out} TEXTS", f"ingot data classifier show {args.out}")


def _show(args: argparse.Namespace, terminal: Terminal) -> None:
    from ingot.data.classify.make import load_card

    _print(args.model, load_card(Path(args.model)), terminal)


def _print(model: str, card: dict, terminal: Terminal) -> None:
    terminal.say(f"{model}  sha256 {card['model_sha256'][:12]}  license of the examples: {card['licence']}")
    for name, sha256 in card["files"].items():
        terminal.say(f"  trained on {name} ({sha256[:12]})")
    terminal.say(
        f"{card['trained']:,} texts for training, {card['heldout']:,} held out: {card['accuracy']:.2%} correct"
    )
    for metrics in card["metrics"]:
        terminal.say(f"\n{metrics['label']}: {metrics['examples']:,} of the held-out texts, AUC {metrics['auc']:.4f}")
        rows = [
            (
                f"{one['threshold']:g}",
                f"{one['taken']:.1%}",
                f"{one['precision']:.1%}" if "precision" in one else "-",
                f"{one['recall']:.1%}",
            )
            for one in metrics["thresholds"]
        ]
        terminal.table(rows, ("threshold", "taken", "precision", "recall"), right=(0, 1, 2, 3))
    terminal.result(card)


def _score(args: argparse.Namespace, terminal: Terminal) -> None:
    import itertools

    from ingot.data.classify.make import read_texts
    from ingot.data.classify.model import Scorer

    scorer = Scorer(Path(args.model))
    texts = (text for name in args.files for text in read_texts(Path(name), args.text_field))
    rows = []
    for text in itertools.islice(texts, args.count or None):
        scores = scorer.scores(text[: args.characters] if args.characters else text)
        best = sorted(scores.items(), key=lambda item: -item[1])[:3]
        rows.append({"scores": dict(best), "text": " ".join(text[:120].split())})
    shown = [
        (", ".join(f"{label} {p:.3f}" for label, p in row["scores"].items()) or "-", row["text"][:80]) for row in rows
    ]
    terminal.table(shown, ("scores", "text"))
    terminal.result({"model": args.model, "sha256": scorer.sha256, "texts": rows})
