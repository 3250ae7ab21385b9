"""`ingot ckpt`: list checkpoints, compare bytes with hashes and samples with their order, repair a damaged ledger."""

import argparse
import time
from pathlib import Path

from ingot.cli.arguments import place
from ingot.cli.terminal import Terminal

EXAMPLES = (
    "ingot ckpt ls runs/demo",
    "ingot ckpt verify runs/demo",
    "ingot ckpt verify runs/demo/checkpoints/step-00000400",
    "ingot ckpt prove runs/demo",
    "ingot ckpt repair runs/demo",
)


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    ls = actions.add_parser("ls", help="list the checkpoints of a run from manifests and file sizes")
    ls.add_argument("run", type=place, metavar="RUN", help="run folder")
    verify = actions.add_parser("verify", help="read every byte and compare it with the hashes in the manifest")
    verify.add_argument(
        "path", type=place, metavar="RUN|CHECKPOINT", help="run folder (all its checkpoints), or a checkpoint folder"
    )
    prove = actions.add_parser(
        "prove", help="prove that a run consumed every sample of its order exactly once per epoch"
    )
    prove.add_argument(
        "run", type=place, metavar="RUN|CHECKPOINT", help="run folder (its newest checkpoint), or a checkpoint folder"
    )
    prove.add_argument("--hashes", action="store_true", help="read every byte of the token shards of the samples")
    repair = actions.add_parser(
        "repair", help="write damaged ledger files again, with the bits that the checkpoint has the hash of"
    )
    repair.add_argument("run", type=place, metavar="RUN", help="run folder")


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    if args.action in ("prove", "repair"):
        return (_prove if args.action == "prove" else _repair)(args, terminal)
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


def _prove(args: argparse.Namespace, terminal: Terminal) -> int:
    from ingot.report.lineage.prove import prove_run

    proof = prove_run(Path(args.run), hashes=args.hashes)
    done = f"{proof.samples:,} samples in {_segments(proof.segments)}"
    terminal.say(f"ledger    {proof.steps} of {proof.checkpoint} steps: {done}, each as in the order")
    for name, epochs in sorted(proof.epochs.items()):
        what, windows = name or "all sources", proof.windows[name]
        full = f"each of its {windows:,} windows once in every full epoch, none twice" if epochs >= 1 else "none twice"
        terminal.say(f"epochs    {what} {epochs:.3f}: {full} (counted, steps 1 to {proof.counted_steps})")
    for change in proof.changes:
        terminal.say(f"changed   step {change.step}: {change.key} {change.before} -> {change.after}")
    for change in proof.differences:
        terminal.say(f"note      {change.key} is {change.after} in the run file, {change.before} in the checkpoint")
    if proof.fault is None:
        how = "every byte has its recorded hash" if proof.hashed else "sizes and lists of block hashes are as recorded"
        terminal.say(f"shards    {proof.shards}: {how}")
        terminal.say(f"unchecked {'; '.join(proof.unchecked)}")
        terminal.say(f"proved    {proof.run} consumed exactly the samples of its order, seed {proof.seed}")
    else:
        terminal.say(f"FAULT     {proof.fault['code']}  {proof.fault['found']}")
        terminal.say(f"fix       {proof.fault['fix']}")
    terminal.result(proof.as_dict())
    return proof.exit_code


def _repair(args: argparse.Namespace, terminal: Terminal) -> int:
    from ingot.errors import EXIT_OK
    from ingot.report.lineage.repair import repair_ledger

    repair = repair_ledger(Path(args.run))
    for name in repair.written:
        terminal.say(f"written   ledger/{name}: computed from the order of samples, with the hash in the checkpoint")
    terminal.say(f"sound     the ledger of the checkpoints of steps {', '.join(map(str, sorted(repair.sound)))}")
    for step, why in sorted(repair.left.items()):
        terminal.say(f"left      step {step}: {why['code']}  {why['found']}")
    terminal.result(repair.as_dict())
    terminal.next(f"ingot ckpt verify {args.run}")
    return EXIT_OK


def _segments(number: int) -> str:
    return f"{number} segment{'s' if number != 1 else ''}"
