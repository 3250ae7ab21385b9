"""The restores of a run, by its log: from which tier, how many bytes from each place, in how many seconds. No torch."""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from ingot.events import read_events
from ingot.schema import events
from ingot.schema.run_folder import RunFolder

TIERS = ("disk", "memory", "store")
_KINDS = (events.CHECKPOINT_FETCHED, events.CHECKPOINT_LOADED, events.SNAPSHOT_RESTORED)


@dataclass(frozen=True, kw_only=True)
class Restore:
    """A restore at `time` (Unix seconds). tier: where the state was, one of TIERS. *_bytes: of blocks that were loaded
    from the local disks (without what verification read), from memory of the same node and of other nodes, and fetched
    from the store. seconds: until the ranks had the state, with verification and the fetch."""

    time: float
    tier: str
    disk_bytes: int = 0
    own_bytes: int = 0
    peer_bytes: int = 0
    store_bytes: int = 0
    seconds: float


PLACES = ("disk_bytes", "own_bytes", "peer_bytes", "store_bytes")


def read_restores(folder: RunFolder) -> list[Restore]:
    """Return the restores in the log of a run, in order. A checkpoint that was fetched and then not loaded counts with
    the next restore: its bytes were read for that one."""
    found, fetched, waited = list[Restore](), 0, 0.0
    for event in read_events(folder.events, *_KINDS):
        kind, seconds = event["kind"], event["seconds"]
        if kind == events.CHECKPOINT_FETCHED:
            fetched += event["bytes"]
            # The launcher fetches before there are ranks; nodes fetch while a checkpoint is loaded.
            waited += 0.0 if "node" in event else seconds
            continue
        if kind == events.SNAPSHOT_RESTORED:
            own, peers = event["own_bytes"], event["peer_bytes"]
            sizes = {"own_bytes": own, "peer_bytes": peers, "store_bytes": fetched}
            one = Restore(time=event["time"], tier="memory", **sizes, seconds=seconds + waited)
        else:
            tier, read = "store" if fetched else "disk", event["bytes"]
            one = Restore(time=event["time"], tier=tier, disk_bytes=read, store_bytes=fetched, seconds=seconds + waited)
        fetched, waited = 0, 0.0
        found.append(one)
    return found


def by_tier(restores: Iterable[Restore]) -> dict[str, dict[str, float]]:
    """Return tier -> the number of restores from it, the median of the bytes of each place, and the median and the
    largest seconds."""
    found: dict[str, dict[str, float]] = {}
    for tier in TIERS:
        if own := [one for one in restores if one.tier == tier]:
            sizes = {place: median(getattr(one, place) for one in own) for place in PLACES}
            seconds = [one.seconds for one in own]
            times = {"seconds": round(median(seconds), 3), "most_seconds": round(max(seconds), 3)}
            found[tier] = {"restores": len(own)} | sizes | times
    return found
