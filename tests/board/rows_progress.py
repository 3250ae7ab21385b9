"""The row of a run without progress: it is reported within two windows, and a healthy run of the same length is not."""

import shutil
from pathlib import Path

from ingot.drill.clean import o7
from ingot.drill.oracles import Verdicts
from ingot.events import read_events
from ingot.schema import events
from ingot.schema.alert import PLATEAU, UNCHANGED, VANISHED

from .bench import Bench, options
from .row import Row, random_of

_STEPS, _WINDOW = 192, 24
_SETTINGS = (
    f"train.steps={_STEPS}",
    "train.global_batch=32",  # a smoother loss: plateaus of it show in few steps
    "optim.lr=0.003",
    "optim.clip_norm=10.0",
    "checkpoint.every_steps=96",
    f"guard.plateau_window={_WINDOW}",
    "guard.loss_spread=0.5",
    "guard.norm_spread=1.0",
    "guard.still_steps=8",
    'schedule.kind="planted"',
    'plugins.modules=["planted"]',
    'plugins.folder="lab"',
    "callbacks.planted={}",
)


def rs24(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """A learning rate of 0 from a step on, or a gradient of 0: an alert within two windows, and the run goes on to its
    end. A healthy run of the same length: no alert, also late in it."""
    lab = bench.root / "lab"
    lab.mkdir(exist_ok=True)
    shutil.copyfile(Path(__file__).parent / "planted.py", lab / "planted.py")
    still = random_of("RS24", seed).randrange(24, 96)
    dead = {"BOARD_FAULT": f"zero 0 {still}-{_STEPS} before_norm always"}
    cases = {
        f"healthy-{seed}": ({}, ""),
        f"rate-0-{still}-{seed}": ({"BOARD_STILL": str(still)}, UNCHANGED),
        f"dead-{still}-{seed}": (dead, VANISHED),
    }
    for name, (env, expected) in cases.items():
        ended = bench.train(name, *options((*_SETTINGS, f"seed={seed}")), env=env)
        folder = bench.folder(name)
        finished = [event["step"] for event in read_events(folder.events, events.FINISHED)]
        right = ended.code == 0 and finished == [_STEPS] and not folder.guard.exists()
        verdicts.judge("o6", name, "" if right else f"exit code {ended.code}: {ended.output[-300:]}")
        found = [(event["alert"], event["step"]) for event in read_events(folder.events, events.ALERT)]
        soon = [kind for kind, step in found if still <= step <= still + 2 * _WINDOW]
        right = expected in soon and {kind for kind, _ in found} <= {expected, PLATEAU} if expected else not found
        verdicts.judge("o6", name, "" if right else f"alerts {found}")
        verdicts.judge("o7", name, o7(folder, bench.temporary(name), bench.memory_before))


ROWS = (Row("RS24", "no progress: a learning rate of 0, a gradient of 0; and a healthy run, which has no alert", rs24),)
