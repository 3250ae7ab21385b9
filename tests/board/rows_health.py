"""A row of machines that report faults: each is drained before its next step, and a spare takes its place."""

import json
import time

from ingot.drill.oracles import Verdicts
from ingot.errors import NodeUnhealthy
from ingot.events import read_events
from ingot.schema import events

from .bench import Bench, options
from .row import Row, judge_recovered, random_of
from .rows_launchers import SETTINGS, Launchers

_REFERENCE = SETTINGS[:1]
_PATIENT = ("launch.node_seconds=15",)  # a machine that is drained leaves at once; a busy one is not lost
# Reports, and whether the run may save before it goes on without the machine.
_REPORTS = {
    "XID": ({"kind": "xid", "code": 79, "device": "GPU 3", "words": "GPU has fallen off the bus."}, True),
    "ECC": ({"kind": "xid", "code": 48, "device": "GPU 3", "words": "DBE"}, False),
    "memory": ({"kind": "ecc_uncorrected", "device": "memory DIMM_A1"}, False),
    "NIC": ({"kind": "link_lost", "device": "mlx5_0 port 1"}, True),
}


def rs36(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """Report a fault of node 1, and one of the leader's machine, to runs of two nodes with a spare."""
    random = random_of("RS36", seed)
    kind = ["XID", "ECC", "memory", "NIC"][seed % 4]
    for number in (1, 0):
        name, step = f"health-{seed}-{number}", random.randrange(9, 60)
        report, saves = _REPORTS[kind]
        where = f"{kind} of node {number} at step {step}"
        with Launchers(bench, name) as nodes:
            files = [bench.root / f"{name}.{letter}.health" for letter in "abc"]
            for letter, file in zip("abc", files, strict=True):
                nodes.start(1, *_PATIENT, f"launch.health_file={file}", node=f"node-{letter}")
            nodes.wait_for_step(step)
            injected = time.time()
            files[number].write_text(json.dumps(report) + "\n")
            codes = [bench.ended(one).code for one in nodes.started]
            expected = [NodeUnhealthy.exit_code if n == number else 0 for n in range(3)]
            verdicts.judge("o6", where, "" if codes == expected else f"exit codes {codes} instead of {expected}")
            verdicts.judge("o6", where, _wrong_events(nodes, "ab"[number], saves))
            again = bench.train(name, *options(SETTINGS), env={"SLURMD_NODENAME": f"node-{'ab'[number]}"})
            refused = again.code == NodeUnhealthy.exit_code and "E-NODE-UNHEALTHY" in again.output
            verdicts.judge("o6", where, "" if refused else f"the drained machine may join again: {again.code}")
            verdicts.time(nodes.folder, injected)
        judge_recovered(bench, verdicts, name, where, bench.reference(*_REFERENCE))


def _wrong_events(nodes: Launchers, letter: str, saves: bool) -> str:
    """Return what is wrong with the events of a run whose machine `letter` was drained; "" if nothing."""
    found = [e["node"] for e in read_events(nodes.folder.events, events.HEALTH)]
    restarts = [e["reason"] for e in read_events(nodes.folder.events, events.PLANNED_RESTART)]
    faults = [e["failure"] for e in read_events(nodes.folder.events, events.FAULT)]
    saved = [e["reason"] for e in read_events(nodes.folder.events, events.STOPPED)]
    if found != [f"node-{letter}"] or len(restarts) != 1 or faults:
        return f"reports of {found}, restarts {restarts}, faults {faults}"
    return "" if saved == ["drain"] * saves else f"stopped {saved}"


ROWS = (Row("RS36", "a machine reports an XID, wrong memory, a lost link", rs36),)
