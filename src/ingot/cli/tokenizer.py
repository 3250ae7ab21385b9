"""`ingot tokenizer train` and `ingot tokenizer show`: train a byte-level BPE, and describe a tokenizer."""

import argparse
import itertools
from pathlib import Path

from ingot.cli.arguments import count, place
from ingot.cli.terminal import Terminal

EXAMPLES = (
    "ingot tokenizer train data/corpus --vocab-size 32768 --out tokenizer.json",
    "ingot tokenizer train notes.txt book.txt --vocab-size 4096 --out tokenizer.json",
    "ingot tokenizer show tokenizer.json --text 'Hello, world'",
)


def configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    train = verbs.add_parser("train", help="train a byte-level BPE on a corpus or on text files")
    train.add_argument(
        "inputs",
        nargs="+",
        type=place,
        metavar="CORPUS|FILE",
        help="folder that `data build --out` wrote, corpus folder, or UTF-8 text files",
    )
    train.add_argument(
        "--vocab-size",
        type=count("vocab-size", 1, 10**8),
        default=32_768,
        help="number of tokens, including the 256 bytes (default: 32768)",
    )
    train.add_argument("--out", type=place, default="tokenizer.json", help="file to write (default: tokenizer.json)")
    train.add_argument("--force", action="store_true", help="replace an existing file at --out (default: refuse)")
    show = verbs.add_parser("show", help="describe a tokenizer.json, and show how it splits text")
    show.add_argument("file", type=place, help="a tokenizer.json of any kind")
    show.add_argument("--text", default="", help="text to encode (default: a built-in sample)")
    show.add_argument("--eot", default="", help="end-of-text token (default: the first usual name that exists)")


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    from ingot.data.tokenizer import describe, train_on

    if args.action == "train":
        path = train_on([Path(name) for name in args.inputs], args.vocab_size, Path(args.out), force=args.force)
        description = describe(path)
        _print(description, terminal)
        if description.vocabulary < args.vocab_size:
            terminal.say(
                f"notice: the text gave only {description.vocabulary:,} of {args.vocab_size:,} tokens; "
                "give more text, or plan with the smaller vocabulary"
            )
        terminal.next(f"ingot data build FILES... --out data --tokenizer {path}", f"ingot tokenizer show {path}")
    else:
        _print(describe(Path(args.file), args.text, eot=args.eot), terminal, args.text)
    return 0


def _print(description, terminal: Terminal, text: str = "") -> None:
    facts = vars(description)
    rows = [(name.replace("_", " "), value) for name, value in facts.items() if name != "pieces" and value != ""]
    terminal.table([(name, f"{value:,}" if isinstance(value, int) else value) for name, value in rows])
    # A token that is only a part of a character cannot be shown as text.
    pieces = ("(part of a character)" if "\ufffd" in piece else repr(piece) for piece in description.pieces)
    shown = [
        f"{piece} x{count}" if (count := len(list(run))) > 1 else piece for piece, run in itertools.groupby(pieces)
    ]
    terminal.say(f"\ntokens of {'the text' if text else 'a sample'}: " + " ".join(shown))
    terminal.result(facts)
