"""The program `ingot VERB ...`: find the verb, run it, turn errors into messages and exit codes.

Each verb is a module of this package with EXAMPLES, configure(parser) and run(args, terminal); its description is in
VERBS. Only the module of the called verb is imported, so that help is instant.
"""

import argparse
import importlib
import os
import re
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import ClassVar

from ingot import __version__
from ingot.cli.terminal import Terminal
from ingot.errors import EXIT_OK, PARTS, CheckpointError, IngotError, Preempted, ResourceError, UsageError, missing_part
from ingot.storage import disk_full, is_full
from ingot.value_names import not_text

VERBS = {
    "quickstart": "run all stages on this machine: crawl, tokens, plan, training, recovery, export, report",
    "init": "create a project folder: a run file from a preset, and a .gitignore",
    "doctor": "check whether this machine can train, and measure its speed",
    "data": "build, inspect, verify, mix, trace and purge a corpus and its token shards",
    "tokenizer": "train a byte-level BPE tokenizer, or describe a tokenizer",
    "plan": "predict layouts, memory, time, failures and cost of a run; write the run file",
    "explain": "explain an error code, a slow run, a loss that is not finite, or the formulas of a plan",
    "check": "report every problem of a run file at once, with file and line; start nothing",
    "train": "start a run, or continue it with the same command",
    "profile": "show where the time of a step goes, by operation, axis and line, beside plan and roofline",
    "drill": "break copies of a run on purpose, and show that they recover bit for bit",
    "status": "show the state of a run: step, loss, speed, newest checkpoint, faults",
    "watch": "show runs while they train: charts, ranks, incidents, cost; on a page with --web",
    "alerts": "show which alerts of a run fired, or would have fired with other limits",
    "guard": "show what the guard of a run did, and answer its question",
    "ckpt": "list, verify, compare, move and clean up checkpoints; prove which samples a run consumed",
    "eval": "compute held-out bits per byte of a checkpoint, by source, with a unigram baseline",
    "sample": "generate text from a checkpoint",
    "export": "write a Hugging Face model folder, and verify that it gives the same logits",
    "report": "write the report of a run, as HTML and Markdown",
    "compare": "compare runs at equal tokens, FLOPs, steps or time: settings, metrics, charts",
}
# Actions of a verb that also has options itself, so that argparse subcommands do not fit. The module of "plan score" is
# plan_score.
_BEGIN_ANEW = ("doctor", "drill", "explain", "profile")  # verbs that continue nothing when they are given again
_ACTIONS = {"plan score": "compare predictions of the planner with published runs, by family"}

_EXIT_CODES = """exit codes:
  0 done · 1 a drill found a difference · 2 usage · 3 configuration or resources
  10 stopped on request, saved · 11 needs confirmation · 20 data integrity · 21 checkpoint integrity
  30 run folder busy · 93 failed repeatedly, do not restart
  130 interrupted: finished work is kept, the same command continues"""


class _VerbParser(argparse.ArgumentParser):
    """An argument parser that suggests the closest option or action for an unknown one."""

    line: ClassVar[list[str]] = []  # the arguments after the verb, to check whether --json is among them

    def error(self, message: str):
        import difflib

        known = [option for parser in _with_subcommands(self) for option in parser._option_string_actions]
        unknown = [word for word in message.split() if word.startswith("--")]
        for word in unknown if "unrecognized" in message else ():
            close = difflib.get_close_matches(word.split("=")[0], known, n=1)
            message += f"; did you mean {close[0]}?" if close else ""
        if match := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message):
            close = difflib.get_close_matches(match[1], re.split(r"[', ]+", match[2]), n=1)
            message += f"; did you mean {close[0]!r}?" if close else ""
        if "--json" in _VerbParser.line:
            _usage_as_json("E-OPTION-INVALID", message)
        actions = {sub.prog.split()[-1]: sub.prog for sub in _with_subcommands(self)[1:]}
        prog = next((actions[word] for word in _VerbParser.line if word in actions), self.prog)
        self.exit(2, f"{prog}: {message}\nSee: {prog} --help\n")


def _with_subcommands(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    actions = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return [parser, *(p for action in actions for sub in action.choices.values() for p in _with_subcommands(sub))]


def _common_options() -> argparse.ArgumentParser:
    """Return a parser with the options that all verbs have. Each verb's parser includes them, so that they may come
    after the verb's own options.
    """
    common = argparse.ArgumentParser(add_help=False)
    group = common.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    group.add_argument("-q", "--quiet", action="store_true", help="print errors only")
    group.add_argument("-v", "--verbose", action="store_true", help="print a traceback with errors")
    return common


def _verb_parser(verb: str) -> tuple[argparse.ArgumentParser, ModuleType]:
    module = importlib.import_module(f"ingot.cli.{verb.replace(' ', '_')}")
    common = _common_options()
    parser = _VerbParser(
        prog=f"ingot {verb}",
        description=VERBS.get(verb) or _ACTIONS[verb],
        epilog=_examples(module.EXAMPLES),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        parents=[common],
    )
    module.configure(parser)
    _complete_subcommands(parser, common, module.EXAMPLES)
    return parser, module


def _examples(lines: Sequence[str]) -> str:
    return "examples:\n" + "\n".join(f"  {line}" for line in lines)


def _complete_subcommands(
    parser: argparse.ArgumentParser, common: argparse.ArgumentParser, examples: Sequence[str]
) -> None:
    """Add the examples and the common options to each subcommand.

    The options have no default there, so that `ingot data --json build` works like `ingot data build --json`.
    """
    for sub in _with_subcommands(parser)[1:]:
        sub.formatter_class = argparse.RawDescriptionHelpFormatter
        sub.allow_abbrev = False
        sub.epilog = _examples([line for line in examples if line.startswith(sub.prog)] or examples)
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
        f"first steps:\n  ingot quickstart          all stages in under five minutes, without network\n"
        f"  ingot init my-run         create your own project\n"
        f"  ingot explain E-CODE      show the meaning, the usual causes and the fix of an error\n\n{_EXIT_CODES}\n"
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
    if wrong := next(filter(None, map(not_text, argv)), ""):
        error = UsageError(
            "E-ARGUMENT-TEXT",
            f"an argument contains {wrong}",
            rule="arguments are UTF-8 text",
            fix="rename the file, or type the argument again",
        )
        return _failed(error, Terminal(json_mode="--json" in rest), False)
    if verb not in VERBS:
        return _no_verb(verb, "--json" in rest)
    if rest and f"{verb} {rest[0]}" in _ACTIONS:
        verb, rest = f"{verb} {rest[0]}", rest[1:]
    parser, module = _verb_parser(verb)
    if verb == "explain":
        rest = module.normalize(rest)
    _VerbParser.line = rest
    terminal, verbose = Terminal(json_mode="--json" in rest), False
    try:
        args = parser.parse_args(rest)
        terminal, verbose = Terminal(json_mode=args.json, quiet=args.quiet), args.verbose
        return module.run(args, terminal)
    except IngotError as error:
        return _failed(error, terminal, verbose)
    except Preempted as stop:
        terminal.say(str(stop))
        return stop.exit_code
    except KeyboardInterrupt as interrupt:
        terminal.end_progress()
        anew = verb in _BEGIN_ANEW
        kept = str(interrupt) or ("nothing is kept" if anew else "finished work is kept")
        then = "begins anew" if anew else "continues from there"
        sys.stderr.write(f"interrupted; {kept}, and the same command {then}\n")
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # `ingot ... | head` is not an error
        return EXIT_OK
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in PARTS:
            raise
        return _failed(missing_part(package, PARTS[package]), terminal, verbose)
    except OSError as error:
        if is_full(error):
            return _failed(disk_full(error.filename or "", error), terminal, verbose)
        place = f"{error.filename}: " if error.filename else ""
        shown = ResourceError(
            "E-SYSTEM-ACCESS",
            f"{place}{error.strerror or error}",
            rule="files and folders must be readable and writable",
            fix="check the path and its permissions, then run the command again; -v shows a traceback",
            path=str(error.filename or ""),
            errno=error.errno or 0,
        )
        return _failed(shown, terminal, verbose)


def _no_verb(verb: str, json_mode: bool) -> int:
    import difflib

    close = difflib.get_close_matches(verb, VERBS, n=1)
    found = f"there is no verb {verb!r}" + (f"; did you mean '{close[0]}'?" if close else "")
    if json_mode:
        _usage_as_json("E-VERB-UNKNOWN", found)
    sys.stderr.write(f"ingot: {found}\nSee: ingot --help\n")
    return UsageError.exit_code


def _usage_as_json(code: str, found: str) -> None:
    facts = {"error": code, "kind": UsageError.kind, "found": found, "exit_code": UsageError.exit_code}
    Terminal(json_mode=True).result(facts)


def _failed(error: IngotError, terminal: Terminal, verbose: bool) -> int:
    """Print `error`, and with -v also the traceback of the exception that is being handled. Return the exit code."""
    if verbose:
        import traceback

        traceback.print_exc()
    if isinstance(error, CheckpointError):
        from ingot.trainer.launch.both_tiers import name_copy

        name_copy(error)
    terminal.error(error)
    return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
