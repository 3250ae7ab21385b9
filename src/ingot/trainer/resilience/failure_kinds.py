"""The kinds of failures, and which one an error with a code is. No torch.

Signals and requests to stop (SIGTERM, SIGUSR1, launch.stop_after) are no failures: the run is `stopped`, and saved.
"""

from typing import Literal

from ingot.errors import (
    CheckpointError,
    ConfigError,
    ConfirmationNeeded,
    DataError,
    IngotError,
    MissingPartError,
    NodeUnhealthy,
    ResourceError,
    RunBusyError,
    UsageError,
)

Kind = Literal["crash", "killed", "hang", "bug", "memory", "data", "disk", "numerics", "settings", "node", "job"]

# The codes of errors that can end a rank, by their beginnings; the longest one that fits decides. In the order of what
# to look at: the program, the numbers, the tokens, the run file, the files of the run, the machine, another launcher.
_TABLE: dict[Kind, str] = {
    "bug": """
        E-CALLBACK E-COLLECTIVES-DIFFER E-LOADER-CLOSED E-LOSS-TERM E-OPTIMIZER-RAISED E-OPTIMIZER-UPDATE
        E-PLUGIN-RAISED E-RANKS-MESSAGE E-SCHEDULE-RATE E-STATE-MOMENTS E-STATE-OWNERS E-STATE-RANKS
        E-STATE-SHAPE
    """,
    "numerics": "E-GRADIENTS-VARY E-GUARD-STOPPED E-LOSS- E-POLICY-SKIP E-ROLLBACK- E-STATE-NOT-FINITE",
    "data": """
        E-DOCUMENT-LISTED E-HELDOUT-EMPTY E-LOADER-TIMEOUT E-QUARANTINE- E-SHARD- E-TOKENIZER-CHANGED E-TOKENS-
        E-WINDOW-
    """,
    "settings": """
        E-ASYNC-TP-DEVICE E-BATCH-DIVIDE E-CALLBACKS- E-CHECKPOINT-INTERVAL E-CKPT-OTHER-MODEL E-CONFIG-
        E-ENVIRONMENT-NUMBER E-FILTER-PLACE E-FORMAT-ENDING E-HELDOUT-UNSET E-HF- E-LAYER- E-LAYOUT-ILLEGAL
        E-LEASE-OTHER-RUN E-LOOP-RANKS E-MASTER-ADDRESS E-MICRO-BATCHES E-OPTIMIZER-RULE E-PACKAGE-MISSING
        E-PART-MISSING E-PLUGIN- E-PROMPT- E-QUANTITY E-RING- E-RUN-CHANGED E-RUN-OTHER-MODEL E-SCHEDULE-
        E-SEQ-LEN E-SEQUENCE-UNEVEN E-SET- E-SOURCE-UNKNOWN E-STEPS E-STORE-NAME E-STORE-URL E-TIER-NOT-EMPTY
        E-TOKENIZER- E-VOCABULARY-SMALL E-WEIGHT-TOO-SMALL E-WEIGHTS-NONE E-WEIGHTS-VALUE E-WORLD-SIZE
    """,
    "disk": """
        E-CKPT- E-DISK- E-GUARD-READ E-LEASE-PENDING E-LEDGER- E-OFFLOAD- E-QUARANTINE-READ
        E-REPLICA- E-RUN-CHANGES-READ E-RUN-FOLDER-LOST E-RUN-LOCK E-STORE- E-TIER- E-WEIGHTS-
    """,
    "memory": "E-REPLICA-MEMORY",
    "node": """
        E-DAMAGE-LIMIT E-GPU-MISSING E-GRADIENTS-DAMAGED E-NODE-UNHEALTHY E-NODES-UNFIT E-STATE-CHANGED E-STATE-DAMAGED
    """,
    "job": "E-FOLDER-BUSY E-LEASE-LOST E-RUN-BUSY",
}
# The "numerics" whose values `ingot explain nan` looks for. The others are no values: of the guard, or of its steps.
VALUES = frozenset({"E-LOSS-EXPLODED", "E-LOSS-NOT-FINITE", "E-LOSS-SCALE", "E-STATE-NOT-FINITE"})
CODES: dict[Kind, tuple[str, ...]] = {kind: tuple(text.split()) for kind, text in _TABLE.items()}
# The kind of an error whose code the table lacks, like one that a plug-in raises. Any other class: "bug".
_CLASSES: tuple[tuple[type[IngotError], Kind], ...] = (
    (DataError, "data"),
    (CheckpointError, "disk"),
    (ResourceError, "disk"),
    (NodeUnhealthy, "node"),
    (RunBusyError, "job"),
    (ConfigError, "settings"),
    (ConfirmationNeeded, "settings"),
    (MissingPartError, "settings"),
    (UsageError, "settings"),
)
_BEGINNINGS: dict[str, Kind] = {beginning: kind for kind, beginnings in CODES.items() for beginning in beginnings}


def kind_of_code(code: str) -> Kind | None:
    """Return the kind of failure that an error code is by the table; None if the table does not have it."""
    found = [beginning for beginning in _BEGINNINGS if code.startswith(beginning)]
    return _BEGINNINGS[max(found, key=len)] if found else None


def kind_of_error(error: IngotError) -> Kind:
    """Return the kind of failure that an error is: by its code, else by its class."""
    by_class: list[Kind] = [kind for type_, kind in _CLASSES if isinstance(error, type_)]
    return kind_of_code(error.code) or (by_class[0] if by_class else "bug")
