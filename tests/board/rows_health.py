"""A row of machines that report faults: each is drained before its next step, and a spare takes its place; what is only
worth a warning is shown early, and the run goes on."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ingot.drill.oracles import Verdicts
from ingot.errors import NodeUnhealthy
from ingot.events import read_events
from ingot.schema import events

from .bench import Bench, options
from .row import Row, judge_recovered, random_of
from .rows_launchers import SETTINGS, Launchers
from .rows_slow import SLOWED, write_slowed

_PATIENT = ("launch.node_seconds=15",)  # a machine that is drained leaves at once; a busy one is not lost
_DIMM, _GPU, _PORT = "memory DIMM_A1", "GPU 3", "mlx5_0 port 1"
_REMAPS = "Row Remapper: New row marked for remapping, reset gpu to activate."
# Reports, and whether the run may save before it goes on without the machine.
_REPORTS: dict[str, tuple[dict[str, Any], bool]] = {
    "XID": ({"kind": "xid", "code": 79, "device": _GPU, "words": "GPU has fallen off the bus."}, True),
    "ECC": ({"kind": "xid", "code": 48, "device": _GPU, "words": "DBE"}, False),
    "memory": ({"kind": "ecc_uncorrected", "device": _DIMM}, False),
    "NIC": ({"kind": "link_lost", "device": _PORT}, True),
    "scrubbing": ({"kind": "ecc_scrubbed", "device": _DIMM}, True),
    "rows": ({"kind": "row_remap_failure", "device": _GPU}, True),
}
# Reports in their order, and what is shown of them; "": nothing.
_WARNINGS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"kind": "ecc_corrected", "device": _DIMM, "count": 9}, ""),
    ({"kind": "ecc_corrected", "device": _DIMM}, f"{_DIMM}: 10 corrected memory errors"),
    ({"kind": "ecc_corrected", "device": _DIMM, "count": 9}, ""),
    ({"kind": "ecc_corrected", "device": _DIMM}, f"{_DIMM}: 20 corrected memory errors"),
    ({"kind": "row_remap_pending", "device": _GPU}, f"{_GPU}: row remap pending"),
    ({"kind": "xid", "code": 63, "device": _GPU, "words": _REMAPS}, f"{_GPU}: XID 63: {_REMAPS}"),
    ({"kind": "temperature", "device": _GPU}, f"{_GPU}: temperature"),
    ({"kind": "link_down", "device": _PORT}, ""),
    ({"kind": "link_up", "device": _PORT}, ""),
    ({"kind": "machine_check", "device": "processor"}, "processor: machine check"),
)
# Steps that last longer than it takes to see a report: all but the one that is under way begin after it.
_LONG_STEPS = ("train.steps=12", *SETTINGS[1:], *SLOWED)
_STEP_SECONDS = 1.0


def rs36(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """Report a fault of node 1, and another one of the leader's machine, to runs of two nodes with a spare; then wrong
    memory in the middle of a long step; then what is only worth a warning."""
    random, kinds = random_of("RS36", seed), tuple(_REPORTS)
    for number in (1, 0):
        kind = kinds[(seed + 3 * number) % len(kinds)]
        _drain(bench, verdicts, f"health-{seed}-{number}", kind, number, random.randrange(9, 60))
    number, kind = seed // 2 % 2, ("ECC", "memory")[seed % 2]
    _drain(bench, verdicts, f"long-{seed}", kind, number, random.randrange(5, 8), long=True)
    _warn(bench, verdicts, f"warned-{seed}", (seed + 1) % 2, random.randrange(9, 40))


def _drain(
    bench: Bench, verdicts: Verdicts, name: str, kind: str, number: int, step: int, *, long: bool = False
) -> None:
    """Report a fault of a node after a step. long: steps take a second, and none may begin after the report."""
    (report, saves), where = _REPORTS[kind], f"{kind} of node {number} at step {step}{' of a second' * long}"
    settings, env = SETTINGS, {}
    if long:
        write_slowed(bench)
        settings, env = _LONG_STEPS, {"BOARD_SLOW": f"{_STEP_SECONDS} 0 0 -1 0 compute"}
    with Launchers(bench, name, settings) as nodes:
        files = _start(bench, nodes, name, "abc", env)
        nodes.wait_for_step(step)
        injected, seen = time.time(), bench.last_step(name)
        _write(files[number], [report])
        codes = [bench.ended(one).code for one in nodes.started]
        expected = [NodeUnhealthy.exit_code if n == number else 0 for n in range(3)]
        verdicts.judge("o6", where, "" if codes == expected else f"exit codes {codes} instead of {expected}")
        verdicts.judge("o6", where, _wrong_events(nodes, "ab"[number], saves))
        if long:
            verdicts.judge("o6", where, _trained_after(nodes, seen))
        node = {"SLURMD_NODENAME": f"node-{'ab'[number]}"}
        again = bench.train(name, *options(settings), env=env | node)
        refused = again.code == NodeUnhealthy.exit_code and "E-NODE-UNHEALTHY" in again.output
        verdicts.judge("o6", where, "" if refused else f"the drained machine may join again: {again.code}")
        verdicts.time(nodes.folder, injected)
    judge_recovered(bench, verdicts, name, where, bench.reference(*settings[:1]))


def _warn(bench: Bench, verdicts: Verdicts, name: str, number: int, step: int) -> None:
    """Report what is only worth a warning of a node: it is shown while the run trains, and nothing else happens."""
    where, node = f"warnings of node {number} at step {step}", f"node-{'ab'[number]}"
    with Launchers(bench, name) as nodes:
        files = _start(bench, nodes, name, "ab", {})
        nodes.wait_for_step(step)
        _write(files[number], [report for report, _ in _WARNINGS])
        ends = [bench.ended(one) for one in nodes.started]
        codes = [one.code for one in ends]
        verdicts.judge("o6", where, f"exit codes {codes}" if any(codes) else "")
        verdicts.judge("o6", where, _wrong_warnings(nodes, node, ends[0].output))
    judge_recovered(bench, verdicts, name, where, bench.reference(*SETTINGS[:1]), faults=0)


def _start(bench: Bench, nodes: Launchers, name: str, letters: str, env: dict[str, str]) -> list[Path]:
    """Start a launcher for each letter. Returns the files from which they read reports."""
    files = [bench.root / f"{name}.{letter}.health" for letter in letters]
    for letter, file in zip(letters, files, strict=True):
        nodes.start(1, *_PATIENT, f"launch.health_file={file}", node=f"node-{letter}", env=env)
    return files


def _write(file: Path, reports: Sequence[Mapping[str, Any]]) -> None:
    file.write_text("".join(json.dumps(report) + "\n" for report in reports))


def _wrong_events(nodes: Launchers, letter: str, saves: bool) -> str:
    """Return what is wrong with the events of a run whose machine `letter` was drained; "" if nothing."""
    found = [e["node"] for e in read_events(nodes.folder.events, events.HEALTH)]
    restarts = [e["reason"] for e in read_events(nodes.folder.events, events.PLANNED_RESTART)]
    faults = [e["failure"] for e in read_events(nodes.folder.events, events.FAULT)]
    saved = [e["reason"] for e in read_events(nodes.folder.events, events.STOPPED)]
    if found != [f"node-{letter}"] or len(restarts) != 1 or faults:
        return f"reports of {found}, restarts {restarts}, faults {faults}"
    return "" if saved == ["drain"] * saves else f"stopped {saved}"


def _trained_after(nodes: Launchers, seen: int) -> str:
    """Return which steps of the first attempt began after the report of a fault; "" if none did.

    seen: the last step before the report; the one after it was under way.
    """
    trained = []
    for event in read_events(nodes.folder.events, events.STEP, events.PLANNED_RESTART):
        if event["kind"] == events.PLANNED_RESTART:
            late = [step for step in trained if step > seen + 1]
            return f"steps {late} began after the report, which came after step {seen}" if late else ""
        trained.append(event["step"])
    return "no planned restart"


def _wrong_warnings(nodes: Launchers, node: str, output: str) -> str:
    """Return what is wrong with the warnings about a node; "" if nothing. output: of the leader."""
    log = list(read_events(nodes.folder.events))
    kinds = [event["kind"] for event in log]
    shown = [event for event in log if event["kind"] == events.HEALTH]
    expected = [(report["kind"], words) for report, words in _WARNINGS if words]
    found = [(event["report"], event["words"]) for event in shown]
    same = len(found) == len(expected) and all(
        kind == wanted and words.startswith(begin)
        for (kind, words), (wanted, begin) in zip(found, expected, strict=True)
    )
    if not same or {(event["node"], event["verdict"]) for event in shown} != {(node, "warn")}:
        return f"findings {[(event['node'], event['verdict'], event['words']) for event in shown]}"
    if missing := [words for _, words in expected if f"{node}: {words}" not in output]:
        return f"the leader does not show {missing}"
    if kinds.index(events.FINISHED) < len(kinds) - 1 - kinds[::-1].index(events.HEALTH):
        return "a warning came after the end of the training"
    others = {events.FAULT, events.RESTART, events.PLANNED_RESTART, events.STOPPED} & {*kinds}
    if nodes.folder.drained.exists():
        return "a machine is drained"
    return f"{others} in the log" if others else ""


ROWS = (Row("RS36", "a machine reports an XID, wrong memory, a lost link", rs36),)
