"""The question to a person before the guard stops a run: the ranks wait, and go on with the measure that is chosen."""

import time

from ingot.schema import events
from ingot.schema.guard_answer import ANSWERS, take_answer, write_question
from ingot.schema.guard_record import STOP, Action, Measure
from ingot.trainer.checkpoint.agree import from_rank_zero
from ingot.trainer.mesh.collectives import any_rank
from ingot.trainer.parts import RunParts
from ingot.trainer.resilience.heartbeat import Phase

_LOOK_SECONDS = 0.5


def ask_person(trainer: RunParts, measure: Measure) -> Action | None:
    """Wait `guard.ask_seconds` for the measure to take in place of `measure`, which stops the run. Collective.

    Returns None if the run is to stop for another reason meanwhile. Without an answer in time, it is STOP.
    """
    folder, seconds = trainer.folder, trainer.config.guard.ask_seconds
    ends, until = time.monotonic() + seconds, time.time() + seconds
    from_rank_zero(lambda: write_question(folder.guard_question, measure, until))
    trainer.log(events.GUARD_ASKED, first=measure.first, last=measure.last, found=list(measure.found), until=until)
    clock = time.strftime("%H:%M:%S", time.localtime(until))
    trainer.say(
        f"guard     steps {measure.first}-{measure.last}: {', '.join(measure.found)}. No measure is left. Waiting "
        f"until {clock} for: ingot guard {folder.root} --take {'|'.join(ANSWERS)}"
    )

    def answer() -> Action | None:
        return take_answer(folder, measure) or (STOP if time.monotonic() >= ends else None)

    try:
        while True:
            found: Action | None = from_rank_zero(answer)
            if found is not None or any_rank(trainer.stop_vote.requests.current() is not None):
                return found
            trainer.heartbeat.enter(Phase.CALLBACK, measure.last)  # as a sign of life, for the watchdog
            time.sleep(_LOOK_SECONDS)
    finally:
        if trainer.place.is_first:
            folder.guard_question.unlink(missing_ok=True)
