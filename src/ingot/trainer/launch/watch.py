"""What the supervisor learns from the event log of a running job, line by line as it is written."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from ingot.schema import events


@dataclass
class Watch:
    """The log from where it ends now. `read` takes in what was added since.

    ranks: rank -> process id. step: last logged. saved: of the newest checkpoint that was
    verified, on loading or after saving; None until one was (0: the run began anew). ended: "finished" or "stopped".
    refused: why checkpoints were not used; whoever has told it empties the list.
    """

    path: Path
    ranks: dict[int, int] = field(default_factory=dict)
    step: int = 0
    saved: int | None = None
    ended: str = ""
    refused: list[str] = field(default_factory=list)
    _position: int = -1

    def __post_init__(self):
        self._position = self.path.stat().st_size if self.path.exists() else 0

    def read(self) -> None:
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._position)
            added = file.read()
        whole = added[: added.rfind(b"\n") + 1]
        self._position += len(whole)
        for line in whole.splitlines():
            try:
                self._take(json.loads(line))
            except ValueError:
                continue  # the torn line of a killed writer

    def new_attempt(self) -> None:
        """Forget the ranks of the last one."""
        self.ranks.clear()

    def _take(self, event: dict) -> None:
        kind = event.get("kind")
        if kind == events.RANK_STARTED:
            self.ranks[event["rank"]] = event["pid"]
        elif kind == events.RUN_STARTED:
            self.step = self.saved = event["from_step"]
        elif kind == events.PROGRESS:
            self.step = event["step"]
        elif kind == events.CHECKPOINT:
            self.saved = event["step"]
        elif kind == events.CHECKPOINT_REFUSED:
            self.refused.append(event["reason"])
        elif kind in (events.FINISHED, events.STOPPED):
            self.ended, self.step = kind, event["step"]
