"""Rows of bits that flip in what a rank computes: another rank that computes the same finds them."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from ingot.drill.oracles import Verdicts
from ingot.errors import NodeUnhealthy
from ingot.events import read_events
from ingot.schema import events
from ingot.trainer.integrity.recompute import is_chosen

from .bench import Bench, options
from .row import Row, judge_recovered, random_of

BITS = (3, 12, 22, 30)
_PLUGIN = ('plugins.modules=["computed"]', 'plugins.folder="lab"', "callbacks.computed={}", "guard.hash_every=1")
_EACH = "guard.recompute_every=1"
_THREE = (3, ("parallel.dp_shard=1", "parallel.dp_replicate=3", "train.global_batch=12"))
_LAYOUTS = {
    "two copies": (2, ("parallel.dp_shard=1", "parallel.dp_replicate=2")),
    "three copies": _THREE,
    "sharded state": (2, ("parallel.zero=1",)),
    "shards": (2, ("parallel.zero=3",)),
}
_SEED = 7  # of the bench's run
_INJECTIONS, _ONE_IN, _STEPS = 200, 8, 480
_WITHIN = range(13, 38)  # 99% of a binomial distribution of 200 with 1/8
_TRIALS = 10  # of each kind
Flip = tuple[int, int, int, str]  # rank, step, bit, place


def _lab(bench: Bench) -> None:
    lab = bench.root / "lab"
    lab.mkdir(exist_ok=True)
    shutil.copyfile(Path(__file__).parent / "computed.py", lab / "computed.py")


def _planted(flips: Sequence[Flip], more: str = "") -> dict[str, str]:
    return {"BOARD_WRONG": ",".join(" ".join(map(str, flip)) + more for flip in flips)}


def rs20(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """Flip each of four bits once in a gradient before it is reduced, in one run per layout. Then two hundred flips in
    one run that computes one in eight steps twice."""
    random = random_of("RS20", seed)
    _lab(bench)
    for layout, (ranks, settings) in _LAYOUTS.items():
        bits = random.sample(BITS, len(BITS))
        flips = [
            (random.randrange(ranks), random.randrange(5 + 5 * number, 7 + 5 * number), bit, "gradient")
            for number, bit in enumerate(bits)
        ]
        name, own, where = f"computed-{layout.replace(' ', '-')}-{seed}", (*settings, *_PLUGIN), f"{layout}: {flips}"
        ended = bench.train(name, *options((*own, _EACH)), env=_planted(flips))
        verdicts.judge("o6", where, "" if ended.code == 0 else f"exit code {ended.code}: {ended.output[-300:]}")
        verdicts.judge("o6", where, _wrong_names(bench, name, flips))
        judge_recovered(bench, verdicts, name, where, bench.reference(*own), faults=len(flips))
    _sampled(bench, seed, verdicts)


def _sampled(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    random, name = random_of("RS20 sampled", seed), f"computed-sampled-{seed}"
    steps = sorted(random.sample(range(5, _STEPS + 1), _INJECTIONS))
    # Three updates in a row whose gradient is not finite would end the run.
    flips = [(random.randrange(2), step, BITS[number % 4], "gradient") for number, step in enumerate(steps)]
    own = (
        f"train.steps={_STEPS}",
        f"guard.recompute_every={_ONE_IN}",
        "guard.preset=off",
        "guard.max_damages=0",
        *_PLUGIN,
    )
    ended = bench.train(name, *options(own), env=_planted(flips))
    where = f"{_INJECTIONS} flips, one in {_ONE_IN} steps computed twice"
    verdicts.judge("o6", where, "" if ended.code == 0 else f"exit code {ended.code}: {ended.output[-300:]}")
    found = {event["step"] for event in read_events(bench.folder(name).events, events.STATE_DAMAGED)}
    right = {step for step in steps if is_chosen(_SEED, step, _ONE_IN)}
    verdicts.judge("o6", where, "" if found == right else f"found {sorted(found)} instead of {sorted(right)}")
    verdicts.judge("o6", where, "" if len(found) in _WITHIN else f"found {len(found)} of {_INJECTIONS}")
    verdicts.numbers["sampled_found"] = len(found)


def _found(bench: Bench, name: str, flips: Sequence[Flip]) -> list[Flip]:
    """Return the flips without those in activations that nothing found. Rounding can remove a low bit of an activation
    before it reaches any gradient: then the run has the bits of an undisturbed one, which `judge_recovered` judges."""
    found = {event["step"] for event in read_events(bench.folder(name).events, events.STATE_DAMAGED)}
    return [flip for flip in flips if flip[3] != "activation" or flip[1] in found]


def _wrong_names(bench: Bench, name: str, flips: Sequence[Flip]) -> str:
    """Return what is wrong with the steps and bits that were found, and with the verdicts; "" if nothing."""
    log, root = bench.folder(name).events, bench.folder(name).root
    if missing := [flips[n] for n in range(len(flips)) if not Path(f"{root}.computed-{n}").exists()]:
        return f"{missing} were not planted"
    flips = _found(bench, name, flips)
    found = {(e["step"], e["bit"]) for e in read_events(log, events.STATE_DAMAGED)}
    exact = {(step, bit) for _, step, bit, place in flips if place != "activation"}
    if not exact <= found or {step for step, _ in found} != {step for _, step, *_ in flips}:
        return f"found {sorted(found, key=str)} instead of {flips}"
    replayed = [(e["verdict"], e["ranks"], e["named"]) for e in read_events(log, events.STATE_REPLAYED)]
    right = [("transient", [rank], True) for rank, *_ in flips]
    return "" if replayed == right else f"replays {replayed} instead of {right}"


def rs21(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """Flips in activations and moments: ten that do not come again, in one run, and ten runs with one that does."""
    random = random_of("RS21", seed)
    _lab(bench)
    ranks, settings = _THREE
    places = ["activation", "moment"] * (_TRIALS // 2)
    flips = [
        (random.randrange(ranks), random.randrange(5 + 5 * number, 7 + 5 * number), random.choice(BITS), place)
        for number, place in enumerate(places)
    ]
    name, own = f"transient-{seed}", (f"train.steps={5 * _TRIALS + 8}", *settings, *_PLUGIN)
    where = f"transient: {flips}"
    ended = bench.train(name, *options((*own, _EACH)), env=_planted(flips))
    verdicts.judge("o6", where, "" if ended.code == 0 else f"exit code {ended.code}: {ended.output[-300:]}")
    verdicts.judge("o6", where, _wrong_names(bench, name, flips))
    judge_recovered(bench, verdicts, name, where, bench.reference(*own), faults=len(flips))
    verdicts.numbers["transient_right"] = len(_found(bench, name, flips))
    right = 0
    for number, place in enumerate(places):
        flip = random.randrange(ranks), random.randrange(5, 20), random.choice(BITS), place
        name, where = f"persistent-{number}-{seed}", f"persistent: {flip}"
        own = ("train.steps=24", *settings, *_PLUGIN, _EACH)
        ended = bench.train(name, *options(own), env=_planted([flip], " always"))
        code = NodeUnhealthy.exit_code
        verdicts.judge("o6", where, "" if ended.code == code else f"exit code {ended.code}: {ended.output[-300:]}")
        replayed = [
            (e["verdict"], e["ranks"], e["named"])
            for e in read_events(bench.folder(name).events, events.STATE_REPLAYED)
        ]
        right += (is_right := replayed == [("persistent", [flip[0]], True)])
        verdicts.judge("o6", where, "" if is_right else f"replays {replayed}")
        bench.drop(name)
    verdicts.numbers["persistent_right"] = right


ROWS = (
    Row("RS20", "a wrong bit in a gradient", rs20),
    Row("RS21", "a wrong bit in an activation or a moment", rs21),
)
