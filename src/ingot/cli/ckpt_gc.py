"""The output of `ingot ckpt gc`: what belonged to no checkpoint, and how much room it took."""

import argparse
from pathlib import Path

from ingot.cli.terminal import Terminal


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    from ingot.errors import EXIT_OK
    from ingot.trainer.launch.garbage import collect_garbage
    from ingot.units import format_bytes

    found = collect_garbage(Path(args.run), dry_run=args.dry_run, say=terminal.say)
    rows = [
        ("disk" if one.place == "disk" else "store", format_bytes(one.bytes), one.name, one.what)
        for one in found.garbage
    ]
    terminal.table(rows, header=("where", "size", "name", "left by") if rows else (), right=(1,))
    done = "would go" if args.dry_run else "removed"
    terminal.say(f"{done:<9} {len(rows)} files and folders, {format_bytes(found.bytes)}")
    if found.store and not found.store.startswith("file://"):
        terminal.say(
            "note      parts of uploads that were killed are not listed: a lifecycle rule of the bucket removes them"
        )
    terminal.result(found.as_dict())
    return EXIT_OK
