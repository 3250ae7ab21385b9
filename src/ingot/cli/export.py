"""`ingot export`: write a checkpoint as a Hugging Face model folder, and compare the logits of both."""

import argparse
import shlex

from ingot.cli.arguments import path
from ingot.cli.options import add_checkpoint
from ingot.cli.progress import ByteBar
from ingot.cli.terminal import Terminal

EXAMPLES = (
    "ingot export runs/demo --out demo-hf",
    "ingot export runs/demo/checkpoints/step-00000400 --out demo-400 --dtype bfloat16",
)


def configure(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser, device=False)
    parser.add_argument(
        "--out", type=path, required=True, metavar="DIR", help="folder to write; an earlier export in it is replaced"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="dtype of the stored weights; bfloat16 rounds them and halves the size (default: float32)",
    )


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    from ingot.errors import require
    from ingot.units import format_bytes

    require("torch", "train")
    from ingot.trainer.export.huggingface import export_run
    from ingot.trainer.mesh.start import spin_briefly

    spin_briefly()
    exported = export_run(args.run, args.out, dtype=args.dtype, meter=ByteBar(terminal))
    size_bytes = sum(exported.files.values())
    terminal.say(f"exported step {exported.step:,} to {exported.path} ({format_bytes(size_bytes)}, {args.dtype})")
    terminal.say(f"read back: largest logit difference {exported.max_logit_difference:.3g} (limit 1e-05)")
    if args.dtype != "float32":
        terminal.say(f"rounding to {args.dtype} changes logits by up to {exported.rounding_logit_difference:.3g}")
    terminal.result(exported.facts())
    terminal.say(f"load it with: transformers.AutoModelForCausalLM.from_pretrained({str(exported.path)!r})")
    terminal.next(f"ingot report {shlex.quote(str(args.run))}")
    return 0
