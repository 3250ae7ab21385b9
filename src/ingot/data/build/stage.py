"""What every per-document stage of the data pipeline looks like."""

from typing import Protocol

from ingot.schema.document import Document, Drop


class Stage(Protocol):
    """Called once per document, in crawl order. May change the document in place; returns why it has to go, or None.

    name: the stage's row in the funnel, and `Drop.stage` of what it drops.
    ran: what exactly runs, for the funnel ("lid.176.ftz, keeps en, threshold 0.65").

    A stage does not raise on any document: what it cannot handle is a Drop with its own rule.
    """

    @property
    def name(self) -> str: ...

    @property
    def ran(self) -> str: ...

    def __call__(self, document: Document) -> Drop | None: ...
