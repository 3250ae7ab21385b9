"""`ingot ckpt reshard`, `convert`, `import`, `export`: checkpoints in another layout, and those of other systems."""

import argparse
import shlex

from ingot.cli.arguments import count, path, place
from ingot.cli.progress import ByteBar
from ingot.cli.terminal import Terminal
from ingot.units import counted

EXAMPLES = (
    'ingot ckpt reshard runs/demo runs/demo-16 --layout "dp_shard=8 tp=2"',
    "ingot ckpt convert runs/demo demo-hf",
    "ingot ckpt convert llama-hf my-run",
    "ingot ckpt import dcp/step-1000 llama-hf --model llama3-8b --eot-id 128001",
    "ingot ckpt export runs/demo dcp/demo --names torchtitan --optimizer",
)
ACTIONS = ("reshard", "convert", "import", "export")


def configure(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the actions of this file to those of `ingot ckpt`."""
    reshard = actions.add_parser(
        "reshard",
        help="write a checkpoint as if it had been saved in another layout, into a new run folder that continues from "
        "it; each rank then reads its own file only",
    )
    reshard.add_argument(
        "source", type=path, metavar="RUN|CHECKPOINT", help="run folder (its newest checkpoint), or a checkpoint folder"
    )
    reshard.add_argument("out", type=path, metavar="OUT", help="run folder to write; it must not exist")
    reshard.add_argument(
        "--layout",
        required=True,
        metavar="NAME=VALUE...",
        help="settings of [parallel] in one text, as 'dp_shard=4 tp=2' or, as ls shows them, 'dp 4 tp 2', and "
        "micro_batch; degrees that are not given are 1",
    )
    convert = actions.add_parser(
        "convert",
        help="to and from a Hugging Face folder: a checkpoint becomes one, as with `ingot export`; from one a project "
        "is made whose run starts from its weights, as with `ingot init --init`",
    )
    convert.add_argument(
        "source", type=path, metavar="RUN|CHECKPOINT|DIR", help="run folder, checkpoint folder, or Hugging Face folder"
    )
    convert.add_argument(
        "out", type=path, metavar="OUT", help="Hugging Face folder or project folder to write; it must not exist"
    )
    convert.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="dtype of the stored weights, for a checkpoint (default: float32)",
    )
    imports = actions.add_parser(
        "import",
        help="import weights from a folder of torch.distributed.checkpoint, without executing its pickles; the moments "
        "of an optimizer are not imported",
    )
    imports.add_argument("source", type=path, metavar="DCP_DIR", help="folder with .metadata and *.distcp files")
    imports.add_argument(
        "out", type=path, metavar="OUT", help="Hugging Face folder to write; a run starts from it with init = OUT"
    )
    imports.add_argument(
        "--model",
        type=place,
        required=True,
        metavar="PRESET|FILE|DIR",
        help="the model of these weights: a preset, a TOML file with [arch], or a folder with its config.json",
    )
    imports.add_argument(
        "--eot-id",
        type=count("eot-id", 0, 2**31 - 1),
        metavar="ID",
        help="id of the end-of-text token (default: eos_token_id in the config.json of --model)",
    )
    imports.add_argument(
        "--prefix",
        metavar="TEXT",
        help="text before the names of the model's tensors (default: found, if the folder holds one model)",
    )
    exports = actions.add_parser(
        "export",
        help="write the weights of a checkpoint as a folder of torch.distributed.checkpoint, and with --optimizer the "
        "state of AdamW; every tensor is read back and compared",
    )
    exports.add_argument(
        "source", type=path, metavar="RUN|CHECKPOINT", help="run folder (its newest save), or a checkpoint folder"
    )
    exports.add_argument("out", type=path, metavar="OUT", help="folder to write; it must not exist")
    exports.add_argument(
        "--names",
        choices=("huggingface", "torchtitan"),
        default="huggingface",
        help="names and order of rows: of the Hugging Face class, or of torchtitan's Llama (default: huggingface)",
    )
    exports.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="dtype of the stored weights; bfloat16 rounds them (default: float32)",
    )
    exports.add_argument(
        "--optimizer",
        action="store_true",
        help="also write the moments and settings of AdamW under 'optimizer', as torch's flat optimizer state",
    )


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    act = {"reshard": _reshard, "convert": _convert, "import": _import, "export": _export}[args.action]
    return act(args, terminal)


def _convert(args: argparse.Namespace, terminal: Terminal) -> int:
    from ingot.cli import export, init
    from ingot.errors import UsageError
    from ingot.hub.config_file import CONFIG
    from ingot.trainer.convert.new_folder import require_new

    require_new(args.out)
    if not (args.source / CONFIG).is_file():
        return export.run(argparse.Namespace(run=args.source, out=args.out, dtype=args.dtype), terminal)
    if args.dtype != "float32":
        raise UsageError(
            "E-CONVERT-DTYPE",
            f"--dtype {args.dtype} is given with the Hugging Face folder {args.source}",
            rule="a run starts from the weights as they are stored, and trains in its own precision",
            fix="leave --dtype out; train.precision in the run file is the precision of the run",
            dtype=args.dtype,
        )
    return init.run(argparse.Namespace(folder=args.out, model=None, init=args.source), terminal)


def _reshard(args: argparse.Namespace, terminal: Terminal) -> int:
    from ingot.errors import EXIT_OK, require
    from ingot.planner.show.layout import degrees_text
    from ingot.units import format_bytes

    require("torch", "train")
    from ingot.trainer.convert.reshard import read_layout, reshard_checkpoint

    found = reshard_checkpoint(args.source, args.out, read_layout(args.layout), ByteBar(terminal))
    ranks = f"{found.ranks} rank{'s' if found.ranks != 1 else ''}"
    terminal.say(
        f"written   step {found.step:,} for {ranks} ({degrees_text(found.layout)}), {format_bytes(found.bytes)}"
    )
    if found.store:
        terminal.say(f"note      the new run has no store: {found.store} belongs to the old one")
    terminal.result(found.as_dict())
    terminal.next(f"ingot ckpt verify {shlex.quote(str(args.out))}", f"ingot train {shlex.quote(str(args.out))}")
    return EXIT_OK


def _import(args: argparse.Namespace, terminal: Terminal) -> int:
    from pathlib import Path

    from ingot.errors import EXIT_OK, UsageError, require
    from ingot.hub.config_file import read_arch, read_config
    from ingot.planner.request.presets import load_model
    from ingot.trainer.convert.dcp_folder import require_metadata
    from ingot.trainer.convert.new_folder import require_new
    from ingot.units import format_count

    require_new(args.out)
    require_metadata(args.source)
    folder = Path(args.model)
    is_folder = folder.is_dir()
    arch = read_arch(folder) if is_folder else load_model(args.model).arch
    eot_id = args.eot_id
    if eot_id is None:
        found = read_config(folder).get("eos_token_id") if is_folder else None
        eot_id = found[0] if isinstance(found, list) and found else found
    if type(eot_id) is not int or not 0 <= eot_id < arch.vocab_size:
        raise UsageError(
            "E-EOT-UNSET",
            "the end-of-text token is not given" if eot_id is None else f"the end-of-text token {eot_id!r} is no token",
            rule=f"a model folder names its end-of-text token, one of the {arch.vocab_size:,} token ids",
            fix="add --eot-id ID",
            vocab_size=arch.vocab_size,
        )
    require("torch", "train")
    from ingot.trainer.convert.imported import import_dcp

    imported = import_dcp(args.source, args.out, arch, eot_id=eot_id, prefix=args.prefix, meter=ByteBar(terminal))
    terminal.say(f"imported  {format_count(imported.parameters)} parameters, {imported.dtype}, to {imported.path}")
    terminal.say(f"names     {imported.system}'s" + (f", after {imported.prefix!r}" if imported.prefix else ""))
    if imported.left:
        terminal.say(f"left out  {imported.left} entries that are not weights, such as the moments of an optimizer")
    terminal.result(imported.as_dict())
    terminal.next(f"ingot plan --init {shlex.quote(str(args.out))} --tokens DATA --out run.toml")
    return EXIT_OK


def _export(args: argparse.Namespace, terminal: Terminal) -> int:
    from ingot.errors import EXIT_OK, require
    from ingot.trainer.convert.new_folder import require_new
    from ingot.units import format_bytes

    require_new(args.out)
    require("torch", "train")
    from ingot.trainer.convert.dcp_out import export_dcp

    found = export_dcp(
        args.source, args.out, names=args.names, dtype=args.dtype, optimizer=args.optimizer, meter=ByteBar(terminal)
    )
    state = " and the state of AdamW" if found.optimizer else ""
    terminal.say(f"exported  weights{state} of step {found.step:,}: {counted(found.tensors, 'tensor')}, {found.dtype},")
    terminal.say(f"          {format_bytes(found.bytes)}, under {found.system}'s names, to {found.path}")
    terminal.say("compared  every tensor, read back, has the bits of the checkpoint")
    terminal.result(found.as_dict())
    terminal.next(f"ingot ckpt import {shlex.quote(str(args.out))} OUT --model {shlex.quote(str(args.out))}")
    return EXIT_OK
