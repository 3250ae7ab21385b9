"""`ingot eval`: bits per byte of a checkpoint on held-out text, by source, with a unigram baseline."""

import argparse

from ingot.cli.arguments import count, path
from ingot.cli.options import add_checkpoint
from ingot.cli.terminal import Terminal

EXAMPLES = (
    "ingot eval runs/demo",
    "ingot eval runs/demo/checkpoints/step-00000400",
    "ingot eval runs/demo --tokens other-tokens/heldout --json",
)


def configure(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser)
    parser.add_argument(
        "--tokens", type=path, metavar="DIR", help="token folder to evaluate (default: data.heldout of the run file)"
    )
    parser.add_argument(
        "--max-tokens",
        type=count("max-tokens", 1),
        metavar="N",
        help="evaluate about N tokens, the same number per source (default: evaluate.max_tokens of the run file)",
    )


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    from ingot.api.model import evaluate, load_model
    from ingot.trainer.mesh.start import spin_briefly

    spin_briefly()
    model = load_model(args.run, args.device)
    found = evaluate(model, tokens=args.tokens, max_tokens=args.max_tokens)
    rows = [
        (name, f"{s.bpb:.4f}", f"{s.unigram_bpb:.4f}", f"{s.loss:.4f}", f"{s.tokens:,}")
        for name, s in [*found.by_source.items(), ("all", found.total)]
    ]
    terminal.say(f"{model.config.name}, step {model.step:,}, {model.config.train.precision} on {model.device}")
    terminal.table(rows, ("source", "bits/byte", "unigram", "nats/token", "tokens"), right=(1, 2, 3, 4))
    terminal.result({"step": model.step} | found.facts())
    terminal.next(f"ingot sample {args.run} --prompt 'The'")
    return 0
