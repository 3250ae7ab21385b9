"""`ingot init DIR`: create a project folder with a run file to edit."""

import argparse

from ingot.cli.arguments import path
from ingot.cli.terminal import Terminal

EXAMPLES = ("ingot init my-run", "ingot init my-run --model smollm2-135m")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=path, help="folder to create; it must not contain a run.toml")
    parser.add_argument("--model", default="tiny", metavar="PRESET", help="model preset (default: tiny)")


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    from ingot.errors import EXIT_OK
    from ingot.planner.request.planning import make_project

    files = make_project(args.folder, args.model)
    for file in files:
        terminal.say(f"created {file} ({len(file.read_text(encoding='utf-8').splitlines())} lines)")
    terminal.result({"created": [str(file) for file in files]})
    terminal.next(
        f"cd {args.folder}",
        "ingot data build CRAWL.warc.gz --out data",
        f"ingot plan --model {args.model} --tokens data --out run.toml --force   (fits the run to the data)",
        "ingot train run.toml",
    )
    return EXIT_OK
