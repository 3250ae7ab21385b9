"""Documents of the quarantine lists of a run (data.quarantine), and the windows of its tokens with them. No torch."""

from collections.abc import Sequence
from pathlib import Path

from ingot.schema.quarantine import ListedDocument, listed_in
from ingot.schema.quarantine_record import Quarantined
from ingot.schema.run import RunConfig
from ingot.schema.run_folder import RunFolder
from ingot.schema.tokens import read_token_manifest
from ingot.trainer.loader.quarantine import LISTED, QuarantinedWindows, require_few
from ingot.trainer.loader.reader import Windows


def listed_windows(config: RunConfig, folder: RunFolder) -> dict[Path, tuple[int, int]]:
    """Return, for each list of a run whose documents its tokens have, their number and that of the windows with them.

    Raises DataError if too many windows of a source would be left out, and the errors of `listed_in`.
    """
    tokens, found = (folder.root / config.data.tokens).resolve(), listed_documents(config, folder)
    if not found:
        return {}
    require_few_listed(config, left_out_windows(config, tokens, [record_of(one, 1) for one in found]), found)
    by_path: dict[Path, list[Quarantined]] = {}
    for one in found:
        by_path.setdefault(one.path, []).append(record_of(one, 1))
    shares = {path: left_out_windows(config, tokens, own).shares() for path, own in by_path.items()}
    return {path: (len(own), sum(out for out, _ in shares[path].values())) for path, own in by_path.items()}


def listed_documents(config: RunConfig, folder: RunFolder) -> list[ListedDocument]:
    """Return the documents of the run's tokens that are on its lists. Raises the errors of `listed_in`."""
    lists = [(folder.root / path).resolve() for path in config.data.quarantine]
    return listed_in((folder.root / config.data.tokens).resolve(), lists)


def left_out_windows(config: RunConfig, tokens: Path, records: Sequence[Quarantined]) -> QuarantinedWindows:
    """Return the windows that `records` leave out; which others take their places does not matter."""
    manifest = read_token_manifest(tokens)
    return QuarantinedWindows(manifest, Windows(manifest, config.train.seq_len), 0, [(0, one) for one in records])


def record_of(one: ListedDocument, step: int) -> Quarantined:
    """Return the record that leaves a document out from `step` on."""
    return Quarantined(
        step=step,
        shard=one.shard.name,
        blocks_sha256=one.shard.blocks_sha256,
        begin=one.begin,
        end=one.end,
        code=LISTED,
    )


def require_few_listed(config: RunConfig, windows: QuarantinedWindows, found: Sequence[ListedDocument]) -> None:
    """Raise DataError if `windows`, because of the documents `found`, are too many of a source."""
    if found:
        lists = " and ".join(dict.fromkeys(str(one.path) for one in found))
        text = f"The tokens have {len(found):,} document{'s' * (len(found) != 1)} of {lists}"
        fix = "remove the documents from the tokens: ingot data purge DIR --quarantine LIST"
        require_few(windows, config.data.max_quarantined, text, fix)
