"""Documents of the quarantine lists of a run (data.quarantine): the windows with a token of them are left out.

They are looked for at each start, and recorded as damaged tokens are (schema/quarantine_record.py), from the step on at
which the run starts: the order of samples follows from the record, on any number of ranks. A document that was recorded
stays out, whatever the lists say later.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from ingot.schema import events
from ingot.schema.quarantine_record import Quarantined, quarantined_of, write_quarantine
from ingot.schema.run import RunConfig
from ingot.schema.run_folder import RunFolder
from ingot.trainer.checkpoint.agree import from_rank_zero
from ingot.trainer.loader.listed import left_out_windows, listed_documents, record_of, require_few_listed


def leave_out_listed(
    config: RunConfig,
    folder: RunFolder,
    recorded: Sequence[Quarantined],
    first_step: int,
    log: Callable[..., None],
    say: Callable[[str], None],
) -> tuple[Quarantined, ...]:
    """Return what a run that starts at `first_step` leaves out: `recorded`, and the documents of its lists. Collective.

    What is new is recorded and reported. Raises DataError if too many windows of a source would be left out, and the
    errors of `listed_in`.
    """
    if not config.data.quarantine:
        return tuple(recorded)

    def record() -> list[dict[str, Any]]:
        known = {_place(one) for one in recorded}
        found = [one for one in listed_documents(config, folder) if _place(record_of(one, 0)) not in known]
        records = (*recorded, *(record_of(one, first_step) for one in found))
        windows = partial(left_out_windows, config, (folder.root / config.data.tokens).resolve())
        require_few_listed(config, windows(records), found)
        if found:
            write_quarantine(folder.quarantine, records)
        for path, documents in Counter(one.path for one in found).items():
            own = windows([record_of(one, 1) for one in found if one.path == path])
            count = sum(out for out, _ in own.shares().values())
            log(events.LISTED, step=first_step, path=str(path), documents=documents, windows=count)
            say(
                f"listed    {documents:,} document{'s' * (documents != 1)} of {path} in {count:,} windows of the "
                f"tokens; from step {first_step} on, others of their source are in their place"
            )
        return [asdict(one) for one in records]

    return tuple(map(quarantined_of, from_rank_zero(record)))


def _place(one: Quarantined) -> tuple[str, str, int, int, str]:
    return one.shard, one.blocks_sha256, one.begin, one.end, one.code
