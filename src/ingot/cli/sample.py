"""`ingot sample`: what a checkpoint writes."""

import argparse
from pathlib import Path

from ingot.cli.terminal import Terminal

HELP = "generate text from a checkpoint"
EXAMPLES = (
    "ingot sample runs/demo --prompt 'The function returns'",
    "ingot sample runs/demo --prompt 'A list is' --temperature 0 --max-tokens 100",
    "ingot sample runs/demo --prompt 'One' --prompt 'Two' --seed 7 --json",
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="run folder (its newest checkpoint is taken) or one checkpoint folder")
    parser.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="text to continue; may be given several times (default: evaluate.prompts of the run file, else nothing)",
    )
    parser.add_argument(
        "--max-tokens", type=int, default=64, metavar="N", help="stop after N tokens at the latest (default: 64)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="X",
        help="0 always takes the likeliest token, 1 draws as the model believes (default: 0.8)",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=50,
        metavar="K",
        help="draw among the K likeliest tokens; 0 means all (default: 50)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the draws: the same seed gives the same text (default: 0)"
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to compute (default: a GPU if any)"
    )


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    from ingot.trainer.trained import load_trained, sample_trained

    trained = load_trained(args.run, args.device)
    prompts = args.prompt or list(trained.config.evaluate.prompts) or [""]
    texts = sample_trained(
        trained,
        prompts,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        seed=args.seed,
    )
    for prompt, text in zip(prompts, texts, strict=True):
        terminal.say(terminal.style(prompt, "bold") + text)
    samples = [{"prompt": prompt, "text": text} for prompt, text in zip(prompts, texts, strict=True)]
    terminal.result({"step": trained.step, "samples": samples})
    return 0
