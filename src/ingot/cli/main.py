"""`ingot VERB ...`: finds the verb, runs it, turns errors into messages and exit codes.

Each verb is one module beside this one with HELP, EXAMPLES, configure(parser) and run(args, terminal). Only the verb
that is called gets imported, so that help is instant.
"""

import argparse
import difflib
import importlib
import os
import re
import sys
from types import ModuleType
from typing import ClassVar

from ingot import __version__
from ingot.cli.terminal import Terminal
from ingot.errors import EXIT_OK, PARTS, IngotError, Preempted, ResourceError, UsageError, missing_part

VERBS = {
    "quickstart": "the whole way on this machine: crawl, tokens, plan, training, recovery, export, report",
    "init": "start a project folder from a preset",
    "doctor": "is this machine fit to train?",
    "data": "build, inspect, verify and trace a corpus and its token shards",
    "tokenizer": "train a byte-level BPE, or show one",
    "plan": "memory, steps, time and cost of a run; writes the run file",
    "explain": "why a run is slow; the formulas behind a plan",
    "check": "every problem of a run file at once, before anything starts",
    "train": "start a run, or continue it: the same command",
    "status": "where a run stands",
    "ckpt": "list and verify checkpoints",
    "eval": "held-out bits per byte of a checkpoint, by source",
    "sample": "generate text from a checkpoint",
    "export": "write a Hugging Face model folder and prove that it gives the same logits",
    "report": "the report of a run, as HTML and Markdown",
}

# Verbs of their own behind a verb that has options and no subcommands; their modules are plan_score and so on.
_ACTIONS = ("plan score",)

_EXIT_CODES = """exit codes:
  0 done · 2 usage · 3 configuration or resources · 10 stopped on request, saved · 11 needs confirmation
  20 data integrity · 21 checkpoint integrity · 30 run folder busy · 93 failed for good, do not restart
  130 interrupted: what was finished is kept, the same command continues"""


class _Parser(argparse.ArgumentParser):
    """argparse that suggests the option or verb that was probably meant."""

    line: ClassVar[list[str]] = []  # the words after the verb, to know whether --json was among them

    def error(self, message: str):
        known = [option for parser in _with_subcommands(self) for option in parser._option_string_actions]
        unknown = [word for word in message.split() if word.startswith("--")]
        for word in unknown if "unrecognized" in message else ():
            close = difflib.get_close_matches(word.split("=")[0], known, n=1)
            message += f"; did you mean {close[0]}?" if close else ""
        if match := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message):
            close = difflib.get_close_matches(match[1], re.split(r"[', ]+", match[2]), n=1)
            message += f"; did you mean {close[0]!r}?" if close else ""
        if "--json" in _Parser.line:
            Terminal(json_mode=True).result({"error": UsageError.kind, "found": message, "exit_code": 2})
        actions = {sub.prog.split()[-1]: sub.prog for sub in _with_subcommands(self)[1:]}
        prog = next((actions[word] for word in _Parser.line if word in actions), self.prog)
        self.exit(2, f"{prog}: {message}\nSee: {prog} --help\n")


def _with_subcommands(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    verbs = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return [parser, *(sub for action in verbs for sub in action.choices.values())]


def _common_options() -> argparse.ArgumentParser:
    """Options of every verb; given to the verbs so that they may stand anywhere on the line."""
    common = argparse.ArgumentParser(add_help=False)
    group = common.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    group.add_argument("-q", "--quiet", action="store_true", help="print errors only")
    group.add_argument("-v", "--verbose", action="store_true", help="print a traceback with errors")
    return common


def _verb_parser(verb: str) -> tuple[argparse.ArgumentParser, ModuleType]:
    module = importlib.import_module(f"ingot.cli.{verb.replace(' ', '_')}")
    epilog = "examples:\n" + "\n".join(f"  {example}" for example in module.EXAMPLES)
    common = _common_options()
    parser = _Parser(
        prog=f"ingot {verb}",
        description=module.HELP,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        parents=[common],
    )
    module.configure(parser)
    _give_subcommands(parser, common, epilog)
    return parser, module


def _give_subcommands(parser: argparse.ArgumentParser, common: argparse.ArgumentParser, epilog: str) -> None:
    # `ingot data build --json` has to work like `ingot data --json build`: the subcommand's copy must not reset it.
    for sub in _with_subcommands(parser)[1:]:
        sub.formatter_class = argparse.RawDescriptionHelpFormatter
        sub.allow_abbrev = False
        sub.epilog = sub.epilog or epilog
        for flag in ("--json", "-q", "-v"):
            original = common._option_string_actions[flag]
            sub.add_argument(
                *original.option_strings,
                action="store_true",
                default=argparse.SUPPRESS,
                help=original.help,
            )


def _top_help() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {verb:<{width}}  {text}" for verb, text in VERBS.items())
    return (
        f"ingot {__version__}: from raw crawl files to a trained language model\n\n"
        f"usage: ingot VERB [options]      ingot VERB --help\n\n{verbs}\n\n"
        f"first steps:\n  ingot quickstart          the whole way in under five minutes, without network\n"
        f"  ingot init my-run         a project of your own\n\n{_EXIT_CODES}\n"
    )


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help", "help"):
        sys.stdout.write(_top_help())
        return EXIT_OK if argv else 2
    if argv[0] in ("-V", "--version"):
        print(f"ingot {__version__}")
        return EXIT_OK
    verb, rest = argv[0], argv[1:]
    if verb not in VERBS:
        return _no_verb(verb, "--json" in rest)
    if rest and f"{verb} {rest[0]}" in _ACTIONS:
        verb, rest = f"{verb} {rest[0]}", rest[1:]
    parser, module = _verb_parser(verb)
    _Parser.line = rest
    args = parser.parse_args(rest)
    terminal = Terminal(json_mode=args.json, quiet=args.quiet)
    try:
        return module.run(args, terminal)
    except IngotError as error:
        return _failed(error, terminal, args.verbose)
    except Preempted as stop:
        terminal.say(str(stop))
        return stop.exit_code
    except KeyboardInterrupt:
        terminal.end_progress()
        sys.stderr.write("interrupted; what was finished is kept, the same command continues\n")
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # `ingot ... | head` is not an error
        return EXIT_OK
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in PARTS:
            raise
        return _failed(missing_part(package, PARTS[package]), terminal, args.verbose)
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        shown = ResourceError(
            f"{place}{error.strerror or error}",
            rule="files and folders can be read and written, and the disk has room",
            fix="see to permissions and space, then run the same command again; -v shows where it happened",
        )
        return _failed(shown, terminal, args.verbose)


def _no_verb(verb: str, json_mode: bool) -> int:
    close = difflib.get_close_matches(verb, VERBS, n=1)
    found = f"no verb {verb!r}" + (f"; did you mean '{close[0]}'?" if close else "")
    if json_mode:
        facts = {"error": UsageError.kind, "found": found, "exit_code": UsageError.exit_code}
        Terminal(json_mode=True).result(facts)
    sys.stderr.write(f"ingot: {found}\nSee: ingot --help\n")
    return UsageError.exit_code


def _failed(error: IngotError, terminal: Terminal, verbose: bool) -> int:
    """Show `error`, with the traceback of what is being handled if asked for; returns its exit code."""
    if verbose:
        import traceback

        traceback.print_exc()
    terminal.error(error)
    return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
