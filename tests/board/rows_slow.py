"""Rows of slow ranks: nothing fails, but the rank has to be named, and its machine leaves where the user wants that."""

import shutil
from pathlib import Path

from ingot.drill.oracles import Verdicts
from ingot.errors import NodeUnhealthy
from ingot.events import read_events
from ingot.schema import events

from .bench import Bench, options
from .row import Row, judge_recovered, random_of
from .rows_launchers import SETTINGS, Launchers

SLOW_STEP, WITHIN = 10, 10
TRIALS = 4  # per seed: twenty with five seeds
HEALTHY_STEPS = 400  # per seed: 2,000 with five seeds
_WORK_SECONDS = 0.15  # of a step; the model of the bench adds a few milliseconds, or more on a busy machine
SLOWED = ('plugins.modules=["slowed"]', 'plugins.folder="lab"', "callbacks.slowed={}")
_SETTINGS = ("parallel.dp_shard=4", "checkpoint.every_steps=0", *SLOWED)
_DRAINS = (*SETTINGS, *SLOWED, "launch.straggler_seconds=1", "launch.node_seconds=15")
_NODE_SECONDS = 0.06  # of a step of a node; 120 steps, of which the slow node does about 80


def rs35(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """One rank of four takes twice as long from step 10 on, in its computation or for its data: named within ten steps,
    with its phase, and a factor within 15% of 2. Healthy ranks with a fifth of jitter: none is named."""
    random = random_of("RS35", seed)
    for trial in range(TRIALS):
        kind, rank = ("compute", "data")[trial % 2], random.randrange(4)
        found, problem = _stragglers(bench, f"straggler-{seed}-{trial}", 24, _WORK_SECONDS, 0.05, seed, rank, kind)
        if not problem:
            right = len(found) == 1 and found[0]["rank"] == rank and found[0]["phase"] == kind
            right = right and found[0]["step"] < SLOW_STEP + WITHIN and 1.7 <= found[0]["factor"] <= 2.3
            problem = "" if right else f"found {found}"
        verdicts.judge("o6", f"{kind} of rank {rank}", problem)
    found, problem = _stragglers(bench, f"healthy-{seed}", HEALTHY_STEPS, _WORK_SECONDS / 3, 0.2, seed, -1, "compute")
    verdicts.judge("o6", "healthy ranks", problem or (f"found {found}" if found else ""))


def _stragglers(
    bench: Bench, name: str, steps: int, seconds: float, jitter: float, seed: int, rank: int, kind: str
) -> tuple[list[dict], str]:
    """Train with slowed.py. Returns the events of slow ranks, and what went wrong otherwise."""
    write_slowed(bench)
    slow = f"{seconds} {jitter} {seed} {rank} {SLOW_STEP} {kind}"
    ended = bench.train(name, *options((*_SETTINGS, f"train.steps={steps}")), env={"BOARD_SLOW": slow})
    found = list(read_events(bench.folder(name).events, events.STRAGGLER))
    bench.drop(name)
    return found, "" if ended.code == 0 else f"exit code {ended.code}: {ended.output[-300:]}"


def write_slowed(bench: Bench) -> None:
    lab = bench.root / "lab"
    lab.mkdir(exist_ok=True)
    shutil.copyfile(Path(__file__).parent / "slowed.py", lab / "slowed.py")


def rs35_drain(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """One of two nodes, with a spare, takes twice as long from step 10 on, the leader's with odd seeds: with
    launch.on_straggler = "drain" it is drained once, otherwise nothing leaves."""
    write_slowed(bench)
    slow = 1 - seed % 2
    for policy in ("drain", "report"):
        name, where = f"slow-{policy}-{seed}", f"{policy}, node {slow}"
        with Launchers(bench, name, (*_DRAINS, f"launch.on_straggler={policy}")) as nodes:
            for number, letter in enumerate("abc"):
                rank = slow if number == slow else -1
                env = {"BOARD_SLOW": f"{_NODE_SECONDS} 0.05 {seed} {rank} {SLOW_STEP} compute"}
                nodes.start(1, node=f"node-{letter}", env=env)
            codes = [bench.ended(one).code for one in nodes.started]
            drained = ["ab"[slow]] if policy == "drain" else []
            expected = [NodeUnhealthy.exit_code if letter in drained else 0 for letter in "abc"]
            verdicts.judge("o6", where, "" if codes == expected else f"exit codes {codes} instead of {expected}")
            verdicts.judge("o6", where, _wrong_drains(nodes, slow, [f"node-{letter}" for letter in drained]))
        judge_recovered(bench, verdicts, name, where, bench.reference(*SETTINGS[:1]))


def _wrong_drains(nodes: Launchers, slow: int, drained: list[str]) -> str:
    """Return what is wrong with the events of a run whose node `slow` was slow; "" if nothing."""
    named = {(e["rank"], e["phase"]) for e in read_events(nodes.folder.events, events.STRAGGLER) if not e["ended"]}
    left = [(e["node"], e["verdict"]) for e in read_events(nodes.folder.events, events.HEALTH)]
    restarts = [e["reason"] for e in read_events(nodes.folder.events, events.PLANNED_RESTART)]
    faults = [e["failure"] for e in read_events(nodes.folder.events, events.FAULT)]
    right = left == [(node, "drain") for node in drained] and len(restarts) == len(drained) and not faults
    if right and named == {(slow, "compute")}:
        return ""
    return f"slow ranks {named}, findings {left}, restarts {restarts}, faults {faults}"


ROWS = (
    Row("RS35", "a slow rank", rs35),
    Row("RS35 drain", "a slow node, which leaves or is only reported", rs35_drain),
)
