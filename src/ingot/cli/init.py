"""`ingot init DIR`: create a project folder with a run file to edit. `ingot ckpt convert` calls it, too."""

import argparse
import shlex

from ingot.cli.arguments import path
from ingot.cli.terminal import Terminal

EXAMPLES = ("ingot init my-run", "ingot init my-run --model smollm2-135m", "ingot init my-run --init llama-hf")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=path, help="folder to create; it must not contain a run.toml")
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", metavar="PRESET", help="model preset (default: tiny)")
    model.add_argument(
        "--init",
        type=path,
        metavar="DIR",
        help="Hugging Face model folder, or a checkpoint or run folder; the run starts from its weights",
    )


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    from ingot.errors import EXIT_OK
    from ingot.planner.request.planning import make_project

    init = args.init
    files = make_project(args.folder, "" if init else args.model or "tiny", init)
    for file in files:
        terminal.say(f"created {file} ({len(file.read_text(encoding='utf-8').splitlines())} lines)")
    terminal.result({"created": [str(file) for file in files]})
    build = ""
    if init:  # the weights know the tokens of their own tokenizer
        tokenizer = init.resolve() / "tokenizer.json"
        build = f" --tokenizer {shlex.quote(str(tokenizer)) if tokenizer.is_file() else 'TOKENIZER.json'}"
    model = f"--init {shlex.quote(str(init.resolve()))}" if init else f"--model {args.model or 'tiny'}"
    terminal.next(
        f"cd {args.folder}",
        f"ingot data build CRAWL.warc.gz --out data{build}",
        f"ingot plan {model} --tokens data --out run.toml --force   (fits the run to the data)",
        "ingot train run.toml",
    )
    return EXIT_OK
