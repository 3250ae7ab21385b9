"""`ingot sample`: generate text from a checkpoint."""

import argparse

from ingot.cli.arguments import LARGEST_SEED, count, fraction
from ingot.cli.options import add_checkpoint
from ingot.cli.terminal import Terminal

EXAMPLES = (
    "ingot sample runs/demo --prompt 'The function returns'",
    "ingot sample runs/demo --prompt 'A list is' --temperature 0 --max-tokens 100",
    "ingot sample runs/demo --prompt 'One' --prompt 'Two' --seed 7 --json",
)


def configure(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser)
    parser.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="text to continue; repeatable (default: evaluate.prompts of the run file, else the empty text)",
    )
    parser.add_argument(
        "--max-tokens",
        type=count("max-tokens", 1, 10**9),
        default=64,
        metavar="N",
        help="largest number of tokens to generate (default: 64)",
    )
    parser.add_argument(
        "--temperature",
        type=fraction("temperature", 0.0, 1e6),
        default=0.8,
        metavar="X",
        help="0 always takes the most likely token, 1 samples from the model's distribution (default: 0.8)",
    )
    parser.add_argument(
        "--top-k",
        type=count("top-k", 0, 10**9),
        default=50,
        metavar="K",
        help="sample from the K most likely tokens; 0: from all tokens (default: 50)",
    )
    parser.add_argument(
        "--seed",
        type=count("seed", -LARGEST_SEED, LARGEST_SEED),
        default=0,
        help="seed of the sampling; the same seed gives the same text (default: 0)",
    )


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    from ingot.api.model import load_model
    from ingot.trainer.mesh.start import spin_briefly

    spin_briefly()
    model = load_model(args.run, args.device)
    prompts = args.prompt or list(model.config.evaluate.prompts) or [""]
    texts = model.generate(
        prompts,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        seed=args.seed,
    )
    for prompt, text in zip(prompts, texts, strict=True):
        terminal.say(terminal.style(prompt, "bold") + text)
    samples = [{"prompt": prompt, "text": text} for prompt, text in zip(prompts, texts, strict=True)]
    terminal.result({"step": model.step, "samples": samples})
    return 0
