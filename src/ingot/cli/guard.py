"""`ingot guard RUN`: show what the guard of a run did, and answer its question."""

import argparse
import time
from typing import TYPE_CHECKING

from ingot.cli.arguments import path
from ingot.cli.terminal import Terminal
from ingot.units import counted
from ingot.value_names import printable

if TYPE_CHECKING:
    from pathlib import Path

    from ingot.errors import UsageError
    from ingot.report.status import RunStatus
    from ingot.schema.guard_record import Measure
    from ingot.schema.run_folder import RunFolder

_SHOWN = 8  # skipped steps
_MEASURES = ("pass", "earlier", "lower", "accept", "stop")  # as in schema/guard_answer.py

EXAMPLES = ("ingot guard runs/demo", "ingot guard runs/demo --take lower")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=path, metavar="RUN", help="run folder; the run may wait for the answer")
    parser.add_argument(
        "--take",
        choices=_MEASURES,
        help="answer the guard's question: pass the data of the steps, also that of one step earlier, lower the "
        "learning rate as well, accept the new level, or stop; on a run that has stopped, stop withdraws the answer",
    )


def _nothing_asked(folder: "RunFolder", status: "RunStatus", has_measures: bool) -> str:
    """Return the line of a guard without a question: what it did, besides measures."""
    if not folder.events.exists():
        return "the run has not started: its guard has judged no step"
    if has_measures:
        return "the guard asks nothing"
    if not (skipped := status.skipped_steps):
        return "the guard took no measure, and skipped no update"
    before = ".., " if len(skipped) > _SHOWN else ""
    steps = ", ".join(f"{step:,}" for step in skipped[-_SHOWN:])
    return f"the guard took no measure; it skipped the updates of {counted(len(skipped), 'step')}: {before}{steps}"


def _has_stopped(run: "Path", question: "Measure") -> "UsageError":
    """Return the error of `--take stop` for a run that has stopped: a next start would go on without a measure."""
    from ingot.errors import UsageError

    return UsageError(
        "E-GUARD-HAS-STOPPED",
        f"--take stop: the run {run} has stopped because of the steps {question.first}-{question.last}",
        rule="stop is an answer while the run waits (guard.ask_seconds); a run that has stopped stays so until "
        "`ingot train`",
        fix=f"leave it as it is; or choose how it goes on: ingot guard {run} --take lower (or pass, earlier, accept)",
        run=str(run),
        first=question.first,
        last=question.last,
    )


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    from dataclasses import asdict

    from ingot.errors import EXIT_OK, UsageError
    from ingot.report.facts import no_run_folder
    from ingot.report.status import command_after, read_status
    from ingot.schema.guard_answer import given_answer, question_of_waiting, write_answer
    from ingot.schema.guard_record import STOP, described, read_measures
    from ingot.schema.run_folder import RunFolder
    from ingot.trainer.checkpoint.resumable import open_question
    from ingot.trainer.resilience.lock import is_locked

    folder = RunFolder(args.run)
    if not folder.config.is_file():
        raise no_run_folder(args.run)
    status = read_status(args.run)
    measures, alive = read_measures(folder.guard), is_locked(folder.lock)
    question, until = question_of_waiting(folder) or (None, 0.0)
    if until < time.time() or not alive:  # a wait that was killed leaves its question
        until, question = None, None if alive else open_question(folder, measures)
    for one in measures:
        terminal.say(f"{one.action:9} {described(one)}")
    if args.take and question is None:
        raise UsageError(
            "E-GUARD-NO-QUESTION",
            f"--take {args.take}: the guard of {args.run} asks nothing",
            rule="it asks after its last measure, while a run waits (guard.ask_seconds) or when it has stopped",
            fix=f"see what it did: ingot guard {args.run}; to pass data by decision, set data.skip in the run file",
            run=str(args.run),
        )
    answer = args.take
    if answer == STOP and question is not None and until is None:
        if given_answer(folder, question) is None:
            raise _has_stopped(args.run, question)
        folder.guard_answer.unlink(missing_ok=True)
        terminal.say(f"withdrawn the answer about the steps {question.first}-{question.last}: no measure is chosen")
        answer = None
    elif answer and question is not None:
        write_answer(folder, question, answer)
    elif question is not None:
        answer = given_answer(folder, question)
    if answer and question is not None:
        steps = f"steps {question.first}-{question.last}"
        terminal.say(f"answered  {steps}: {answer}" + (" at once" if until else " at the next start"))
    elif question is None:
        terminal.say(_nothing_asked(folder, status, bool(measures)))
        if fault := status.fault:
            code = fault.get("code") or "a fault"
            cause = printable(str(fault.get("cause") or "failed"))
            terminal.say(f"ended     the run ended at step {fault.get('step')} with {code}: {cause}")
    elif until is not None:
        clock = time.strftime("%H:%M:%S", time.localtime(until))
        terminal.say(f"waits     until {clock} for an answer about the steps {question.first}-{question.last}")
    terminal.result(
        {
            "measures": [asdict(one) for one in measures],
            "question": None if question is None else asdict(question) | {"until": until},
            "answer": answer,
            "fault": status.fault,
            "skipped_steps": list(status.skipped_steps),
        }
    )
    if question is not None and answer is None:
        terminal.next(f"ingot guard {args.run} --take lower")
    elif status.fault and answer is None:
        terminal.next(command_after(status.fault, args.run))
    else:
        terminal.next(f"ingot train {args.run}" if answer and not alive else f"ingot status {args.run}")
    return EXIT_OK
