"""`ingot eval`: bits per byte of a checkpoint on held-out text, by source, with a unigram baseline; and tasks."""

import argparse
from typing import Any

from ingot.cli.arguments import count, path
from ingot.cli.options import add_checkpoint
from ingot.cli.terminal import Terminal

EXAMPLES = (
    "ingot eval runs/demo",
    "ingot eval runs/demo/checkpoints/step-00000400",
    "ingot eval runs/demo --tokens other-tokens/heldout --json",
    "ingot eval runs/demo --tasks arc_easy,hellaswag --task-examples 200",
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
    parser.add_argument(
        "--tasks",
        type=lambda text: [name.strip() for name in text.split(",") if name.strip()],
        default=[],
        metavar="NAME,...",
        help="score these tasks of lm-eval (pip install 'ingot[eval]'), and held-out text only with --tokens",
    )
    parser.add_argument(
        "--task-folder",
        type=path,
        metavar="DIR",
        help="a folder of task files (YAML), for --tasks that lm-eval does not have",
    )
    parser.add_argument(
        "--task-examples",
        type=count("task-examples", 1),
        default=0,
        metavar="N",
        help="score at most N examples of each task (default: all)",
    )


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    from ingot.api.model import evaluate, load_model
    from ingot.trainer.mesh.start import spin_briefly

    spin_briefly()
    model = load_model(args.run, args.device)
    terminal.say(f"{model.config.name}, step {model.step:,}, {model.config.train.precision} on {model.device}")
    facts: dict[str, Any] = {"step": model.step}
    if not args.tasks or args.tokens:
        found = evaluate(model, tokens=args.tokens, max_tokens=args.max_tokens)
        rows = [
            (name, f"{s.bpb:.4f}", f"{s.unigram_bpb:.4f}", f"{s.loss:.4f}", f"{s.tokens:,}")
            for name, s in [*found.by_source.items(), ("all", found.total)]
        ]
        terminal.table(rows, ("source", "bits/byte", "unigram", "nats/token", "tokens"), right=(1, 2, 3, 4))
        facts |= found.facts()
    if args.tasks:
        scored = model.score_tasks(args.tasks, folder=args.task_folder, examples=args.task_examples)
        rows = [
            (task, metric, f"{value:.4f}", f"{scored.examples.get(task, 0):,}")
            for task, scores in scored.scores.items()
            for metric, value in scores.items()
        ]
        terminal.table(rows, ("task", "metric", "value", "examples"), right=(2, 3))
        facts |= {"tasks": scored.facts()}
    terminal.result(facts)
    terminal.next(f"ingot sample {args.run} --prompt 'The'")
    return 0
