"""Rows of bits that flip in the state of a rank: it is named at once, and the run goes on as if nothing had been."""

import shutil
from pathlib import Path

from ingot.drill.oracles import Verdicts
from ingot.errors import NodeUnhealthy
from ingot.events import read_events
from ingot.schema import events

from .bench import Bench, options
from .row import Row, judge_recovered, random_of
from .rows_launchers import CANONICAL, SETTINGS, SHRINKS, Launchers

BITS = (0, 3, 22, 30)
_PLUGIN = ('plugins.modules=["flipped"]', 'plugins.folder="lab"', "callbacks.flipped={}", "guard.hash_every=1")
# Ranks, and the layout: copies, and shards that nobody else has.
_LAYOUTS = {
    "two copies": (2, ("parallel.dp_shard=1", "parallel.dp_replicate=2")),
    "three copies": (3, ("parallel.dp_shard=1", "parallel.dp_replicate=3", "train.global_batch=12")),
    "shards": (2, ("parallel.zero=3",)),
}
_PLACES = ("gradients", "optimizer", "update", "line")
_NODES = ("launch.node_seconds=15",)  # a machine that is drained leaves at once; a busy one is not lost


def _lab(bench: Bench) -> None:
    lab = bench.root / "lab"
    lab.mkdir(exist_ok=True)
    shutil.copyfile(Path(__file__).parent / "flipped.py", lab / "flipped.py")


def rs19(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """Flip each of four bits once, in one run per layout, each at another place of a step."""
    random = random_of("RS19", seed)
    _lab(bench)
    for layout, (ranks, settings) in _LAYOUTS.items():
        # A shard that nobody else has is not known between the update and its hash.
        places = [place for place in _PLACES if place != "optimizer" or layout != "shards"]
        bits, flips = random.sample(BITS, len(BITS)), []
        for number, bit in enumerate(bits):  # apart by more than an interval of checkpoints
            step = random.randrange(5 + 5 * number, 7 + 5 * number)
            flips.append((random.randrange(ranks), step, bit, places[(number + seed) % len(places)]))
        name, own = f"bits-{layout.replace(' ', '-')}-{seed}", (*settings, *_PLUGIN)
        where = f"{layout}: {flips}"
        text = ",".join(" ".join(map(str, flip)) for flip in flips)
        ended = bench.train(name, *options(own), env={"BOARD_FLIPS": text})
        verdicts.judge("o6", where, "" if ended.code == 0 else f"exit code {ended.code}: {ended.output[-300:]}")
        verdicts.judge("o6", where, _wrong_names(bench, name, flips))
        reference = bench.reference(*own)
        judge_recovered(bench, verdicts, name, where, reference, faults=len(flips))


def _wrong_names(bench: Bench, name: str, flips: list[tuple[int, int, int, str]]) -> str:
    """Return what is wrong with the ranks that were named, their bits and the steps; "" if nothing."""
    log = bench.folder(name).events
    found = [(e["rank"], e["step"], e["bit"]) for e in read_events(log, events.STATE_DAMAGED)]
    for rank, step, bit, place in flips:
        # The next comparison is that of the same step, or before the next update.
        steps = (step,) if place in ("gradients", "optimizer") else (step, step + 1)
        if not any((rank, at, bit) in found for at in steps):
            return f"bit {bit} of rank {rank} at step {step} is not among {found}"
    replayed = [(e["verdict"], e["ranks"], e["named"]) for e in read_events(log, events.STATE_REPLAYED)]
    right = [("transient", [rank], True) for rank, *_ in flips]
    return "" if replayed == right else f"replays {replayed} instead of {right}"


def rs19_persistent(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """A bit of the machine "node-b" flips in each step from one on: with a spare, with a run that may go on with fewer
    machines, and on this machine alone."""
    random, step = random_of("RS19 persistent", seed), random_of("RS19 persistent", seed).randrange(9, 60)
    bit = random.choice(BITS)
    _lab(bench)
    flips = {"BOARD_FLIPS": f"node-b {step} {bit} gradients always"}
    name, where = f"persistent-{seed}", f"bit {bit} from step {step} on"
    with Launchers(bench, name, (*SETTINGS, *_PLUGIN)) as nodes:
        for letter in "abc":
            nodes.start(1, *_NODES, node=f"node-{letter}", env=flips)
        codes = [bench.ended(one).code for one in nodes.started]
    expected = [0, NodeUnhealthy.exit_code, 0]
    verdicts.judge("o6", where, "" if codes == expected else f"exit codes {codes} instead of {expected}")
    drained = [(e["node"], e["report"]) for e in read_events(bench.folder(name).events, events.HEALTH)]
    verdicts.judge("o6", where, "" if drained == [("node-b", "wrong_state")] else f"health {drained}")
    judge_recovered(bench, verdicts, name, where, bench.reference(*SETTINGS[:1], *_PLUGIN), faults=2)

    name, own = f"persistent-shrinks-{seed}", (*CANONICAL, *_PLUGIN)
    with Launchers(bench, name, (*own, *SHRINKS, *_NODES)) as nodes:
        for letter in "ab":
            nodes.start(node=f"node-{letter}", env=flips)
        codes = [bench.ended(one).code for one in nodes.started]
    verdicts.judge("o6", where, "" if codes == expected[:2] else f"exit codes {codes} instead of {expected[:2]}")
    sizes = [event["world_size"] for event in read_events(bench.folder(name).events, events.RUN_STARTED)]
    verdicts.judge("o6", where, "" if sizes == [2, 1] else f"trained on {sizes} ranks")
    judge_recovered(bench, verdicts, name, f"{where}, shrinks", bench.reference(*own), faults=2, all_layouts=True)

    name, own = f"persistent-alone-{seed}", ("train.steps=120", *_PLUGIN)
    ended = bench.train(name, *options(own), env={**flips, "SLURMD_NODENAME": "node-b"})
    right = ended.code == NodeUnhealthy.exit_code and "E-NODE-UNHEALTHY" in ended.output
    verdicts.judge("o6", f"{where}, alone", "" if right else f"exit code {ended.code}: {ended.output[-300:]}")
    again = bench.train(name, *options(own), env={"SLURMD_NODENAME": "node-a"})
    verdicts.judge("o6", f"{where}, alone", "" if again.code == 0 else f"exit code {again.code}: {again.output[-300:]}")
    judge_recovered(bench, verdicts, name, f"{where}, alone", bench.reference(*own), faults=2)


ROWS = (
    Row("RS19", "a wrong bit in a weight of one rank", rs19),
    Row("RS19 persistent", "a wrong bit in a weight, again and again", rs19_persistent),
)
