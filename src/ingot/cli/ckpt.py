"""`ingot ckpt ls` and `ingot ckpt verify`: list checkpoints, and compare bytes with the manifest's hashes."""

import argparse
import time
from pathlib import Path

from ingot.cli.arguments import place
from ingot.cli.terminal import Terminal

EXAMPLES = (
    "ingot ckpt ls runs/demo",
    "ingot ckpt verify runs/demo",
    "ingot ckpt verify runs/demo/checkpoints/step-00000400",
)


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    ls = actions.add_parser("ls", help="list the checkpoints of a run from manifests and file sizes")
    ls.add_argument("run", type=place, metavar="RUN", help="run folder")
    verify = actions.add_parser("verify", help="read every byte and compare it with the hashes in the manifest")
    verify.add_argument(
        "path", type=place, metavar="RUN|CHECKPOINT", help="run folder (all its checkpoints), or a checkpoint folder"
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
