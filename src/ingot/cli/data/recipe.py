"""`ingot data recipe`."""

import argparse
from pathlib import Path

from ingot.cli.terminal import Terminal

HELP = "print a whole recipe as TOML: every key, with its value"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", default="", metavar="NAME", help="quality rules: web, fineweb, gopher, c4, none")
    parser.add_argument("--recipe", metavar="FILE", help="a recipe to complete (default: the preset alone)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change one value; repeatable (default: none)"
    )


def run(args: argparse.Namespace, terminal: Terminal) -> None:
    from ingot.config import to_dict, to_toml
    from ingot.data.build.recipe import load_recipe

    recipe = load_recipe(Path(args.recipe) if args.recipe else None, args.set, args.preset)
    terminal.say(to_toml(recipe, whole=True))
    terminal.result(to_dict(recipe))
