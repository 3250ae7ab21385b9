"""`ingot ckpt`: what is saved, and whether every byte of it is what was written."""

import argparse
import time
from pathlib import Path

from ingot.cli.terminal import Terminal

HELP = "list and verify checkpoints"
EXAMPLES = (
    "ingot ckpt ls runs/demo",
    "ingot ckpt verify runs/demo",
    "ingot ckpt verify runs/demo/checkpoints/step-00000400",
)


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    ls = actions.add_parser("ls", help="the checkpoints of a run; reads manifests and file sizes only")
    ls.add_argument("run", metavar="RUN", help="folder of the run")
    verify = actions.add_parser("verify", help="read every byte and compare it with the hashes in the manifest")
    verify.add_argument(
        "path", metavar="RUN|CHECKPOINT", help="folder of a run (all its checkpoints), or of one checkpoint"
    )


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    from ingot.trainer.launch.inspect import inspect_checkpoints

    verify = args.action == "verify"
    inspected = inspect_checkpoints(Path(args.path if verify else args.run), hash_files=verify)
    terminal.table(
        [
            (c.step, time.strftime("%Y-%m-%d %H:%M", time.localtime(c.saved_at)), c.size, c.state, c.note)
            for c in inspected.checkpoints
        ],
        header=("step", "when", "size", "verified" if verify else "whole", "note"),
        right=(0, 2),
    )
    terminal.result(inspected.as_dict())
    return inspected.exit_code
