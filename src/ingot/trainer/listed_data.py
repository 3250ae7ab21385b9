"""Documents of the quarantine lists of a run (data.quarantine): the windows with a token of them are left out.

They are looked for at each start, and recorded as damaged tokens are (schema/quarantine_record.py), from the step on at
which the run starts: the order of samples follows from the record, on any number of ranks. A document that was recorded
stays out, whatever the lists say later.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from ingot.schema import events
from ingot.schema.quarantine import ListedDocument, listed_in
from ingot.schema.quarantine_record import Quarantined, quarantined_of, write_quarantine
from ingot.schema.run import RunConfig
from ingot.schema.run_folder import RunFolder
from ingot.schema.tokens import read_token_manifest
from ingot.trainer.checkpoint.agree import from_rank_zero
from ingot.trainer.loader.quarantine import QuarantinedWindows, require_few
from ingot.trainer.loader.reader import Windows

LISTED = "E-DOCUMENT-LISTED"


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
        found = [one for one in _listed(config, folder) if _place(_record(one, 0)) not in known]
        records = (*recorded, *(_record(one, first_step) for one in found))
        windows = partial(_windows, config, (folder.root / config.data.tokens).resolve())
        _require_few(config, windows(records), found)
        if found:
            write_quarantine(folder.quarantine, records)
        for path, documents in Counter(one.path for one in found).items():
            own = windows([_record(one, 1) for one in found if one.path == path])
            count = sum(out for out, _ in own.shares().values())
            log(events.LISTED, step=first_step, path=str(path), documents=documents, windows=count)
            say(
                f"listed    {documents:,} document{'s' * (documents != 1)} of {path} in {count:,} windows of the tokens; "
                f"from step {first_step} on, others of their source are in their place"
            )
        return [asdict(one) for one in records]

    return tuple(map(quarantined_of, from_rank_zero(record)))


def listed_windows(config: RunConfig, folder: RunFolder) -> dict[Path, tuple[int, int]]:
    """Return, for each list of a run whose documents its tokens have, their number and that of the windows with them.

    Raises DataError if too many windows of a source would be left out, and the errors of `listed_in`.
    """
    tokens, found = (folder.root / config.data.tokens).resolve(), _listed(config, folder)
    if not found:
        return {}
    _require_few(config, _windows(config, tokens, [_record(one, 1) for one in found]), found)
    by_path: dict[Path, list[Quarantined]] = {}
    for one in found:
        by_path.setdefault(one.path, []).append(_record(one, 1))
    shares = {path: _windows(config, tokens, own).shares() for path, own in by_path.items()}
    return {path: (len(own), sum(out for out, _ in shares[path].values())) for path, own in by_path.items()}


def _listed(config: RunConfig, folder: RunFolder) -> list[ListedDocument]:
    lists = [(folder.root / path).resolve() for path in config.data.quarantine]
    return listed_in((folder.root / config.data.tokens).resolve(), lists)


def _windows(config: RunConfig, tokens: Path, records: Sequence[Quarantined]) -> QuarantinedWindows:
    """Return the windows that `records` leave out; which others take their places does not matter."""
    manifest = read_token_manifest(tokens)
    return QuarantinedWindows(manifest, Windows(manifest, config.train.seq_len), 0, [(0, one) for one in records])


def _record(one: ListedDocument, step: int) -> Quarantined:
    return Quarantined(
        step=step,
        shard=one.shard.name,
        blocks_sha256=one.shard.blocks_sha256,
        begin=one.begin,
        end=one.end,
        code=LISTED,
    )


def _place(one: Quarantined) -> tuple[str, str, int, int, str]:
    return one.shard, one.blocks_sha256, one.begin, one.end, one.code


def _require_few(config: RunConfig, windows: QuarantinedWindows, found: Sequence[ListedDocument]) -> None:
    if found:
        lists = " and ".join(dict.fromkeys(str(one.path) for one in found))
        text = f"The tokens have {len(found):,} document{'s' * (len(found) != 1)} of {lists}"
        fix = "remove the documents from the tokens: ingot data purge DIR --quarantine LIST"
        require_few(windows, config.data.max_quarantined, text, fix)
