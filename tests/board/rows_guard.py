"""Rows of numbers that hurt: gradients that are not finite, data that no learning explains, a rate that is too high."""

import json
import shutil
from pathlib import Path

from ingot.drill.clean import o7
from ingot.drill.oracles import Verdicts, o1, o2, o3, read_facts, read_trace
from ingot.events import read_events
from ingot.schema import events
from ingot.schema.guard_record import AGAIN, EARLIER, LOWER, PASS, STOP, read_measures
from ingot.trainer.checkpoint.manifest import candidate_folders, verify_checkpoint

from .bench import Bench, options
from .row import Row, judge_recovered, random_of

_STEPS = 48
_SETTINGS = (
    f"train.steps={_STEPS}",
    "optim.lr=0.01",
    "guard.window=16",
    "guard.ready=8",
    "guard.settle_steps=0",
    "guard.loss_spread=0.1",
    "guard.norm_spread=0.3",
    'schedule.kind="planted"',
    'plugins.modules=["planted"]',
    'plugins.folder="lab"',
    "callbacks.planted={}",
)


def rs22(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """NaN in the gradients of three steps: each time that they are trained, as of bad data, or once, as of a fault of
    the hardware. The run trains them again, reports which of the two it is, and passes the data if it is they. From a
    step on for ever: the run stops within three tries. No NaN reaches a checkpoint, and the last good one stays."""
    random = random_of("RS22", seed)
    first = random.randrange(20, 36)
    steps = f"{first}-{first + 2}"
    expected = {"data": [AGAIN, PASS], "hardware": [AGAIN]}
    for verdict, actions in expected.items():
        name, word = f"nan-{verdict}-{seed}", " always" if verdict == "data" else ""
        fault = f"nan {random.randrange(2)} {steps} before_norm{word}"
        ended = bench.train(name, *_options(bench), env={"BOARD_FAULT": fault})
        measures = [(one.action, one.first, one.last) for one in read_measures(bench.folder(name).guard)]
        right = ended.code == 0 and measures == [(action, first, first + 2) for action in actions]
        verdicts.judge("o6", fault, "" if right else f"exit code {ended.code}, measures {measures}")
        found = [
            (e["verdict"], e["first"], e["last"]) for e in read_events(bench.folder(name).events, events.GUARD_REPLAYED)
        ]
        right = found == [(verdict, first, first + 2)]
        verdicts.judge("o6", fault, "" if right else f"the verdicts are {found}")
        _judge_finite(bench, verdicts, name, fault)
        if verdict == "data":
            judge_ordered(bench, verdicts, name, fault, steps, {}, *_SETTINGS)
        else:
            own = tuple(_options(bench)[1::2])
            # It goes back to a checkpoint with eight proven steps after it.
            judge_recovered(bench, verdicts, name, fault, bench.reference(*own), faults=4)
    name, fault = f"nan-strict-{seed}", f"nan {random.randrange(2)} {first}-{_STEPS} before_norm always"
    ended = bench.train(name, *_options(bench, 'guard.preset="strict"'), env={"BOARD_FAULT": fault})
    measures = [one.action for one in read_measures(bench.folder(name).guard)]
    right = ended.code == 93 and "E-GUARD-STOPPED" in ended.output and measures == [AGAIN, PASS, STOP]
    verdicts.judge("o6", fault, "" if right else f"exit code {ended.code}, {measures}: {ended.output[-300:]}")
    _judge_finite(bench, verdicts, name, fault)
    kept = [verify_checkpoint(path).step for path in candidate_folders(bench.folder(name).checkpoints)]
    good = [step for step in kept if step < first]
    verdicts.judge("o2", fault, "" if good else f"no checkpoint from before step {first} is left: {kept}")
    # The fault is in the ranks, and not in what the run reads: one process finds finite numbers.
    explained = bench.ingot("explain", "nan", str(bench.folder(name).root), "--json")
    if explained.code:
        verdicts.judge("o6", "explained", f"exit code {explained.code}: {explained.output[-300:]}")
        return
    causes = [cause["name"] for cause in json.loads(explained.output)["causes"] if cause["found"]]
    verdicts.judge("o6", "explained", "" if causes == ["hardware or layout"] else f"the causes are {causes}")


def _judge_finite(bench: Bench, verdicts: Verdicts, name: str, where: str) -> None:
    """Judge that no checkpoint of the run has a NaN."""
    deep = bench.ingot("ckpt", "verify", str(bench.folder(name).root), "--deep")  # names parameters with NaN
    verdicts.judge("o2", where, "" if deep.code == 0 else f"exit code {deep.code}: {deep.output[-300:]}")


def rs22_ladder(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """A gradient with a NaN once: its update is skipped. In four steps every time: the run goes back, and passes them.
    From a step on for ever: the run stops after its measures, and its last checkpoint is whole."""
    random = random_of("RS22 ladder", seed)
    first = random.randrange(20, 36)
    for last in (first, first + 3):
        name, steps = f"nan-{first}-{last}-{seed}", f"{first}-{last}"
        fault = f"nan {random.randrange(2)} {steps} before_norm always"
        ended = bench.train(name, *_options(bench), env={"BOARD_FAULT": fault})
        measures = [(one.action, one.first, one.last) for one in read_measures(bench.folder(name).guard)]
        rows = [] if first == last else [(AGAIN, first, first + 2), (PASS, first, first + 2)]
        right = ended.code == 0 and measures == rows
        verdicts.judge("o6", fault, "" if right else f"exit code {ended.code}, measures {measures}")
        judge_ordered(bench, verdicts, name, fault, steps, {}, *_SETTINGS)
    name, fault = f"nan-always-{seed}", f"nan {random.randrange(2)} {first}-{_STEPS} before_norm always"
    ended = bench.train(name, *_options(bench), env={"BOARD_FAULT": fault})
    measures = [one.action for one in read_measures(bench.folder(name).guard)]
    right = ended.code == 93 and "E-GUARD-STOPPED" in ended.output and measures == [AGAIN, PASS, EARLIER, LOWER, STOP]
    verdicts.judge("o6", fault, "" if right else f"exit code {ended.code}, {measures}: {ended.output[-300:]}")
    _judge_finite(bench, verdicts, name, fault)


def rs23(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """Shuffled labels, a repeated n-gram, and three steps of junk: found in their step, skipped or passed, and nothing
    else is found. Fifty times the learning rate in one step: found in the next one, and passed with its data."""
    random = random_of("RS23", seed)
    for kind, length in (("shuffled", 1), ("repeated", 1), ("shuffled", 3)):
        first = random.randrange(18, 40)
        name, steps = f"{kind}-{first}-{length}-{seed}", range(first, first + length)
        junk = {"BOARD_JUNK": f"{kind} {first}-{first + length - 1}"}
        ended = bench.train(name, *_options(bench), env=junk)
        measures = [one.action for one in read_measures(bench.folder(name).guard)]
        right = ended.code == 0 and measures == ([] if length == 1 else [AGAIN, PASS])
        verdicts.judge("o6", name, "" if right else f"exit code {ended.code}, {measures}: {ended.output[-300:]}")
        found = {event["step"] for event in read_events(bench.folder(name).events, events.FINDING)}
        verdicts.judge("o6", name, "" if found == set(steps) else f"found in steps {sorted(found)}")
        judge_ordered(bench, verdicts, name, name, f"{first}-{first + length - 1}", junk, *_SETTINGS)
    step = random.randrange(18, 36)
    name = f"rate-{step}-{seed}"
    ended = bench.train(name, *_options(bench), env={"BOARD_RATE": str(step)})
    measures = read_measures(bench.folder(name).guard)
    found = [(one.action, one.first) for one in measures]
    right = ended.code == 0 and found == [(AGAIN, step + 1), (PASS, step + 1), (EARLIER, step)]
    verdicts.judge("o6", name, "" if right else f"exit code {ended.code}, {found}: {ended.output[-300:]}")
    if right:
        judge_ordered(bench, verdicts, name, name, f"{step}-{measures[-1].last}", {}, *_SETTINGS)


def judge_ordered(
    bench: Bench, verdicts: Verdicts, name: str, where: str, steps: str, env: dict[str, str], *settings: str
) -> None:
    """Judge that the run ended with the bits of one that was ordered to pass `steps`, and left nothing. settings: of
    both."""
    folder, ordered = bench.folder(name), f"ordered-{name}"
    verdicts.judge("o7", where, o7(folder, bench.temporary(name), bench.memory_before))
    bench.train(ordered, *lab_options(bench, *settings, f'data.skip=["{steps}"]'), env=env)
    ours, reference = read_facts(folder), read_facts(bench.folder(ordered))
    trained = {step: found for step, found in read_trace(folder).items() if step in reference.trace}
    verdicts.judge("o1", where, o1(trained, reference.trace))
    verdicts.judge("o2", where, o2(ours.state, reference.state))
    verdicts.judge("o3", where, o3(ours.samples, reference.samples))
    others = [event["step"] for event in read_events(bench.folder(ordered).events, events.FINDING)]
    verdicts.judge("o6", where, f"the run that was ordered found something in steps {others}" if others else "")


def _options(bench: Bench, *more: str) -> list[str]:
    return lab_options(bench, *_SETTINGS, *more)


def lab_options(bench: Bench, *settings: str) -> list[str]:
    """Return settings as options of a run that may use the plug-ins of faults, which are put into its folder `lab`."""
    lab = bench.root / "lab"
    lab.mkdir(exist_ok=True)
    for plugin in ("planted.py", "flipped.py"):
        shutil.copyfile(Path(__file__).parent / plugin, lab / plugin)
    return options(settings)


ROWS = (
    Row("RS22", "NaN in steps in a row: of the data, of the hardware, for ever", rs22),
    Row("RS22 ladder", "a gradient that is not finite: in one step, in several, for ever; all measures", rs22_ladder),
    Row("RS23", "shuffled labels, a repeated n-gram, fifty times the learning rate", rs23),
)
