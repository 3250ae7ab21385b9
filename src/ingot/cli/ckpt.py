"""`ingot ckpt`: list checkpoints, compare bytes with hashes and samples with their order, repair a damaged ledger, move
checkpoints to the store of a run and back."""

import argparse
from pathlib import Path

from ingot.cli import ckpt_convert, ckpt_diff, ckpt_gc, ckpt_ls
from ingot.cli.arguments import place
from ingot.cli.ckpt_help import ABOUT
from ingot.cli.progress import ByteBar
from ingot.cli.terminal import Terminal
from ingot.units import counted

EXAMPLES = (
    "ingot ckpt ls runs/demo",
    "ingot ckpt verify runs/demo",
    "ingot ckpt verify runs/demo/checkpoints/step-00000400 --deep",
    "ingot ckpt verify runs/demo --store",
    "ingot ckpt diff runs/demo/checkpoints/step-00000200 runs/demo",
    "ingot ckpt prove runs/demo",
    "ingot ckpt repair runs/demo",
    "ingot ckpt push runs/demo",
    "ingot ckpt fetch runs/demo --step 400",
    "ingot ckpt pin runs/demo 400",
    "ingot ckpt unpin runs/demo 400",
    "ingot ckpt rewind runs/demo --to 400",
    "ingot ckpt prune runs/demo --dry-run",
    "ingot ckpt gc runs/demo --dry-run",
    *ckpt_convert.EXAMPLES,
)

_NOTE_WIDTH = 28  # characters that a table of 80 has for the note of `verify`; names in a broken one cannot be searched


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    ls = actions.add_parser("ls", help="list the checkpoints of a run and its store, from manifests and file sizes")
    ls.add_argument("run", type=place, metavar="RUN", help="run folder")
    verify = actions.add_parser("verify", help="read every byte and compare it with the hashes in the manifest")
    verify.add_argument(
        "path", type=place, metavar="RUN|CHECKPOINT", help="run folder (all its checkpoints), or a checkpoint folder"
    )
    verify.add_argument("--deep", action="store_true", help="also load each one, as training that continues does")
    verify.add_argument("--store", action="store_true", help="also read every byte of the saves in the store")
    diff = actions.add_parser(
        "diff", help="compare two checkpoints: settings, layout, and the parameters that changed most"
    )
    for name, which in (("a", "A"), ("b", "B")):
        diff.add_argument(name, type=place, metavar=which, help="checkpoint folder, or run folder (its newest save)")
    diff.add_argument("--all", action="store_true", help="show all parameters, not the ten that changed most")
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
    push = actions.add_parser("push", help="verify a checkpoint and upload it to the run's store")
    fetch = actions.add_parser(
        "fetch", help="fetch a checkpoint from the run's store, verified, in place of a local one"
    )
    for one in (push, fetch):
        one.add_argument("run", type=place, metavar="RUN", help="run folder")
        one.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step (default: the newest)")
        one.add_argument("--weights", action="store_true", help="a save of the weights alone, not a checkpoint")
    for name, what in (
        ("pin", "keep a checkpoint for ever, on the disk and in the run's store"),
        ("unpin", "remove the pin of a checkpoint"),
    ):
        action = actions.add_parser(name, help=what)
        action.add_argument("run", type=place, metavar="RUN", help="run folder")
        action.add_argument("step", type=int, metavar="STEP", help="the step of the checkpoint")
    rewind = actions.add_parser("rewind", help="continue from an older checkpoint: newer ones are set aside")
    rewind.add_argument("run", type=place, metavar="RUN", help="run folder")
    rewind.add_argument("--to", type=int, metavar="STEP", required=True, help="the step of the checkpoint")
    prune = actions.add_parser("prune", help="remove the checkpoints that the rules of the run file do not keep")
    prune.add_argument("run", type=place, metavar="RUN", help="run folder")
    prune.add_argument("--dry-run", action="store_true", help="show what stays and what goes, and remove nothing")
    gc = actions.add_parser("gc", help="remove what killed saves and uploads left, and samples of no checkpoint")
    gc.add_argument("run", type=place, metavar="RUN", help="run folder")
    gc.add_argument("--dry-run", action="store_true", help="show what goes, and remove nothing")
    ckpt_convert.configure(actions)
    for name, action in actions.choices.items():
        action.description = ABOUT[name]


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    if args.action in ckpt_convert.ACTIONS:
        return ckpt_convert.run(args, terminal)
    if args.action in ("prove", "repair"):
        return (_prove if args.action == "prove" else _repair)(args, terminal)
    if args.action in ("push", "fetch"):
        return _move(args, terminal)
    if args.action == "rewind":
        return _rewind(args, terminal)
    if args.action in ("pin", "unpin", "prune"):
        return (_prune if args.action == "prune" else _pin)(args, terminal)
    if shows := {"ls": ckpt_ls.run, "diff": ckpt_diff.run, "gc": ckpt_gc.run}.get(args.action):
        return shows(args, terminal)
    return _verify(args, terminal)


def _verify(args: argparse.Namespace, terminal: Terminal) -> int:
    from ingot.trainer.launch.inspect import IN_STORE, WEIGHTS_ALONE

    path, bar = Path(args.path), ByteBar(terminal)
    if args.deep:
        from ingot.trainer.launch.deep import inspect_deep  # only this imports torch

        inspected = inspect_deep(path, bar, stored=args.store)
    else:
        from ingot.trainer.launch.inspect import inspect_checkpoints

        inspected = inspect_checkpoints(path, hash_files=True, meter=bar, stored=args.store)
    header = ("step", "when", "size", "where", "loads" if args.deep else "verified", "note")
    rows, below = [], []
    for c in inspected.checkpoints:
        where = "store" if inspected.store and c.path.startswith(f"{inspected.store}/") else "disk"
        note = c.note.removeprefix(f"{IN_STORE}: ").removeprefix(IN_STORE).replace(WEIGHTS_ALONE, "the weights alone")
        if len(note) > _NOTE_WIDTH:
            below.append(f"step {c.step}, {where}: {note}")
            note = "see below"
        rows.append((c.step, ckpt_ls.time_text(c.saved_at), c.size, where, c.state, note))
    terminal.table(rows, header=header, right=(0, 2))
    for line in below:
        terminal.say(line)
    if unchecked := sum(c.unchecked for c in inspected.checkpoints):
        verb = "is" if unchecked == 1 else "are"
        terminal.say(f"unchecked {counted(unchecked, 'tensor file')} that {verb} not on this machine")
    if inspected.store_problem:
        terminal.say(f"store     not listed: {inspected.store_problem}")
    if inspected.resumes_elsewhere:
        terminal.say(f"store     training resumes from step {inspected.resumes_at:,}, which {inspected.store} has")
    terminal.result(inspected.as_dict())
    return inspected.exit_code


def _move(args: argparse.Namespace, terminal: Terminal) -> int:
    from ingot.errors import EXIT_OK
    from ingot.schema.checkpoint import FULL, WEIGHTS
    from ingot.trainer.launch.stored import fetch_checkpoint, push_checkpoint
    from ingot.units import format_bytes, format_seconds

    pushes = args.action == "push"
    path = Path(args.run)
    bar, kind = ByteBar(terminal), WEIGHTS if args.weights else FULL
    if pushes:
        moved = push_checkpoint(path, args.step, bar, kind)
    else:
        moved = fetch_checkpoint(path, args.step, terminal.say, bar, kind)
    what = f"{'weights of ' if args.weights else ''}step {moved.step}"
    where = f"{'in' if pushes else 'from'} {moved.store}"
    if moved.bytes:
        size, seconds = format_bytes(moved.bytes), format_seconds(moved.seconds)
        terminal.say(f"{'stored ' if pushes else 'fetched'}   {what}  {size}  {seconds}  {where}, verified")
    else:
        terminal.say(f"stored    {what} was {where}")
    terminal.result(moved.as_dict())
    terminal.next(f"ingot ckpt {'ls' if pushes else 'verify'} {args.run}")
    return EXIT_OK


def _pin(args: argparse.Namespace, terminal: Terminal) -> int:
    from ingot.errors import EXIT_OK
    from ingot.trainer.launch.retain import pin_checkpoint, unpin_checkpoint

    pinned = (pin_checkpoint if args.action == "pin" else unpin_checkpoint)(Path(args.run), args.step)
    done = "pinned    " if pinned.pinned else "unpinned  "
    terminal.say(f"{done}step {pinned.step}  {', '.join(pinned.places)}")
    if pinned.lacks:
        push = f"ingot ckpt push {args.run} --step {pinned.step}"
        terminal.say(f"note      it is not in the store {pinned.lacks}: {push} uploads it")
    if pinned.waits:
        terminal.say(f"note      {pinned.waits}; the next upload of the run pins it in the store")
    terminal.result(pinned.as_dict())
    return EXIT_OK


def _rewind(args: argparse.Namespace, terminal: Terminal) -> int:
    from ingot.errors import EXIT_OK
    from ingot.trainer.launch.rewind import rewind_run

    found = rewind_run(Path(args.run), args.to, terminal.say, ByteBar(terminal))
    steps = ", ".join(map(str, found.set_aside))
    aside = f"set aside {'steps' if len(found.set_aside) > 1 else 'step'} {steps}, in {args.run}/{found.folder}"
    terminal.say(aside if steps else "set aside nothing: no checkpoint is newer")
    terminal.say(f"continues after step {found.step}, at the next start")
    for change in found.changed:
        terminal.say(f"changed   {change}   since this checkpoint: the next start asks for it, or --set takes it back")
    terminal.result(found.as_dict())
    terminal.next(f"ingot train {args.run}", f"ingot ckpt ls {args.run}")
    return EXIT_OK


def _prune(args: argparse.Namespace, terminal: Terminal) -> int:
    from dataclasses import asdict

    from ingot.errors import EXIT_OK
    from ingot.trainer.launch.retain import prune_checkpoints

    found = prune_checkpoints(Path(args.run), dry_run=args.dry_run, say=terminal.say)
    gone = "would go" if args.dry_run else "removed"
    terminal.table(
        [(one.step, one.kind, one.place, "stays" if one.reason else gone, one.reason) for one in found],
        header=("step", "kind", "where", "what", "why"),
        right=(0,),
    )
    terminal.result({"checkpoints": [asdict(one) for one in found], "dry_run": args.dry_run, "exit_code": EXIT_OK})
    return EXIT_OK


def _prove(args: argparse.Namespace, terminal: Terminal) -> int:
    from ingot.report.lineage.prove import prove_run
    from ingot.schema.step_ranges import steps_text

    proof = prove_run(Path(args.run), hashes=args.hashes)
    done = f"{counted(proof.samples, 'sample')} in {_segments(proof.segments)}"
    terminal.say(f"ledger    {proof.steps:,} of {counted(proof.checkpoint, 'step')}: {done}, each as in the order")
    for name, epochs in sorted(proof.epochs.items()):
        what, windows = name or "all sources", proof.windows[name]
        full = f"each of its {windows:,} windows once in every full epoch, none twice" if epochs >= 1 else "none twice"
        terminal.say(f"epochs    {what} {epochs:.3f}: {full} (counted, steps 1 to {proof.counted_steps})")
    if proof.replaced:
        what = "samples were of windows in quarantine, and others of their source took their places"
        terminal.say(f"replaced  {proof.replaced:,} {what}, as recorded")
    if proof.untrained:
        many = f"{len(proof.untrained):,} steps changed no weights: their updates were skipped, or their data passed"
        terminal.say(f"untrained {steps_text(proof.untrained)} ({many})")
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

    repair = repair_ledger(Path(args.run), terminal.say)
    for name in repair.written:
        how = "fetched from the store" if name in repair.fetched else "computed from the order of samples"
        terminal.say(f"written   ledger/{name}: {how}, with the hash in the checkpoint")
    terminal.say(f"sound     the ledger of the checkpoints of steps {', '.join(map(str, sorted(repair.sound)))}")
    for step, why in sorted(repair.left.items()):
        terminal.say(f"left      step {step}: {why['code']}  {why['found']}")
    for step, files in sorted(repair.elsewhere.items()):
        where = "on no disk of this node: on another one, or lost"
        terminal.say(f"unchecked step {step}: {len(files)} tensor files are {where}, like {files[0]}")
    terminal.result(repair.as_dict())
    terminal.next(f"ingot ckpt verify {args.run}")
    return EXIT_OK


def _segments(number: int) -> str:
    return f"{number} segment{'s' if number != 1 else ''}"
