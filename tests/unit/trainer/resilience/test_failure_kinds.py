from collections import Counter

import pytest

from ingot.errors import CheckpointError, NodeUnhealthy, RunBusyError, RunFailed, UsageError, catalogs
from ingot.trainer.resilience.failure_kinds import CODES, VALUES, kind_of_code, kind_of_error

_RANK = {"hub", "ingot", "machine", "plugins", "schema", "stores", "theory", "tokenizer", "trainer"}
_OTHERS = {
    "api",
    "cli",
    "data",
    "drill",
    "planner",
    "quickstart",
    "rehearse",
    "report",
    "watch",
}  # no rank of a job imports them
# Codes of packages that a rank imports, raised only where there is no rank: in a command, in the launcher.
_NO_RANK = """
    E-ABLATION-FOLDER E-ACCEPT-KEY E-ARCHIVE-ALONE E-ARCHIVE-MOVE E-CONTEXT-EXCEEDED E-CONVERT-FOLDER E-CORPUS-MISSING
    E-DCP-ARCHIVE E-DCP-BLOCKS E-DCP-DTYPE E-DCP-FORM E-DCP-MODEL E-DCP-NAMES E-DCP-OPTIMIZER
    E-DCP-PATH E-DCP-PICKLE E-DCP-PREFIX E-DCP-READ
    E-EVAL-TASK-FOLDER E-EVAL-TASK-UNKNOWN
    E-DOREMI-SETTING E-EVAL-TOKENS E-EXPORT-DTYPE E-EXPORT-FOLDER E-EXPORT-LOGITS E-FALLBACKS-OTHER E-FALLBACKS-READ
    E-FRESH-EXISTS E-FRESH-NODES E-GPU-COUNT E-JOB-UNKILLABLE E-MACHINE-MISSING E-MACHINE-UNREADABLE E-MIXTURE-COUNT
    E-MIXTURE-SOURCES E-NODE-DIFFERS E-NODES-MISSING E-OPTION-RANGE E-PROCESS-GROUP E-PROXY-EXPERTS E-RESHARD-LAYOUT
    E-RUN-FOLDER-SILENT E-RUN-MEMORY E-RUN-NAME E-RUN-NO-EVALUATION E-RUN-NO-PROGRESS E-RUN-NOT-FOUND E-RUN-REPEATS
    E-RUN-PAST-STEPS E-RUN-RESTARTS E-SAMPLING-RANGE E-SEEDS E-UNTIL-STEP
"""


def test_every_code_that_can_end_a_rank_has_a_kind():
    """A new code is red here until it is in the table, or in the list of those that end no rank."""
    found = catalogs()
    assert set(found) == _RANK | _OTHERS
    codes = {code for package in _RANK for code in found[package]}
    assert {code for code in codes if kind_of_code(code) is None} == set(_NO_RANK.split())


def test_every_code_of_numerics_is_one_of_values_or_one_that_is_none():
    """A new code is red here until somebody decides whether `ingot explain nan` has something to explain."""
    codes = {code for package in _RANK for code in catalogs()[package]}
    others = {"E-GRADIENTS-VARY", "E-GUARD-STOPPED", "E-POLICY-SKIP", "E-ROLLBACK-LIMIT", "E-ROLLBACK-NO-CHECKPOINT"}
    assert {code for code in codes if kind_of_code(code) == "numerics"} == VALUES | others and not VALUES & others


def test_every_line_of_the_table_decides_a_code():
    codes = {code for package in _RANK for code in catalogs()[package]}
    lines = Counter(beginning for beginnings in CODES.values() for beginning in beginnings)
    deciding = {max((line for line in lines if code.startswith(line)), key=len, default="") for code in codes}
    assert set(lines.values()) == {1} and set(lines) == deciding - {""}


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("E-LOSS-NOT-FINITE", "numerics"),
        ("E-GUARD-STOPPED", "numerics"),
        ("E-GRADIENTS-VARY", "numerics"),
        ("E-POLICY-SKIP", "numerics"),
        ("E-ROLLBACK-LIMIT", "numerics"),
        ("E-STATE-NOT-FINITE", "numerics"),
        ("E-STATE-DAMAGED", "node"),
        ("E-GRADIENTS-DAMAGED", "node"),
        ("E-LOSS-TERM", "bug"),  # of a plug-in
        ("E-PLUGIN-RAISED", "bug"),
        ("E-PLUGIN-MISSING", "settings"),
        ("E-TOKENS-MANIFEST", "data"),
        ("E-SHARD-READ", "data"),
        ("E-QUARANTINE-LIMIT", "data"),
        ("E-QUARANTINE-READ", "disk"),  # a record in the run folder
        ("E-CKPT-WRITE", "disk"),
        ("E-DISK-SPACE", "disk"),
        ("E-CONFIG-SETTINGS", "settings"),
        ("E-NOWHERE", None),
    ],
)
def test_the_longest_beginning_decides(code, kind):
    assert kind_of_code(code) == kind


@pytest.mark.parametrize(
    ("type_", "kind"),
    [
        (CheckpointError, "disk"),
        (NodeUnhealthy, "node"),
        (RunBusyError, "job"),
        (UsageError, "settings"),
        (RunFailed, "bug"),
    ],
)
def test_an_unknown_code_has_the_kind_of_its_class(type_, kind):
    assert kind_of_error(type_("E-OF-A-PLUGIN", "x")) == kind
    assert kind_of_error(type_("E-GUARD-STOPPED", "x")) == "numerics"
