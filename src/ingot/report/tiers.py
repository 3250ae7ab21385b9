"""The checkpoints of a run by tier: in memory, on the run's disk and in its store, and which were verified."""

from dataclasses import dataclass

from ingot.report.facts import RunData
from ingot.report.render.page import TableBlock
from ingot.schema.checkpoint import FULL
from ingot.trainer.checkpoint.manifest import list_checkpoints
from ingot.units import format_bytes

_SHOWN = 8


@dataclass
class _SaveTiers:
    """A step with what is known of its save, in words by tier."""

    memory: str = ""
    disk: str = ""
    store: str = ""
    size: str = ""
    verified: str = ""


def tiers_table(data: RunData) -> TableBlock | None:
    """Return a table of the newest saves by tier, newest first; None for a run without saves. Reads manifests."""
    saves: dict[int, _SaveTiers] = {}
    for event in data.checkpoints:
        own = saves.setdefault(event["step"], _SaveTiers())
        own.disk, own.size, own.verified = "was removed", format_bytes(event["bytes"]), "when it was saved"
    listed = {one.step: one for one in list_checkpoints(data.folder.checkpoints)}
    for step, one in listed.items():
        own = saves.setdefault(step, _SaveTiers())
        own.disk, own.size = ("damaged" if one.damage else "there"), own.size or format_bytes(one.bytes)
        own.verified = one.damage or own.verified
    for event in data.unsaved:
        if event.get("what", FULL) == FULL and "reason" in event and event["step"] not in listed:
            saves.setdefault(event["step"], _SaveTiers()).disk = f"failed: {event['reason']}"
    for event in data.refused:
        if event.get("step") in saves:
            saves[event["step"]].verified = f"refused on loading: {event.get('reason', '')}"
    for event in data.stored:
        if event.get("what", FULL) == FULL:
            saves.setdefault(event["step"], _SaveTiers()).store = "there"
    if data.snapshots:  # only the newest is kept
        newest = data.snapshots[-1]
        nodes = newest["nodes"]
        words = f"on {nodes:.0f} {'node' if nodes == 1 else 'nodes'}" if nodes else ""
        saves.setdefault(newest["step"], _SaveTiers()).memory = words
    if not saves:
        return None
    tiers = [("In memory", "memory"), ("On disk", "disk"), ("In the store", "store")]
    tiers = [(title, name) for title, name in tiers if any(getattr(own, name) for own in saves.values())]
    header = ("Step", "Size", *(title for title, _ in tiers), "Read back and compared")
    newest = sorted(saves.items(), reverse=True)[:_SHOWN]
    rows = [(f"{step:,}", own.size, *(getattr(own, name) for _, name in tiers), own.verified) for step, own in newest]
    of_these = "save" if len(rows) == 1 else f"{len(rows)} saves"
    return TableBlock(header, rows, right=(0, 1), caption=f"The newest {of_these} by tier")
