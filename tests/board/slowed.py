"""A plug-in with which ranks work for a known time: BOARD_SLOW = "SECONDS JITTER SEED RANK STEP KIND".

Each rank sleeps for SECONDS in each step, with normal jitter (a share of it). From STEP on, RANK takes twice as long:
KIND "compute" sleeps twice, "data" as long where it waits for its next batch.
"""

import os
import time
from random import Random

from ingot.plugins.callback import CALLBACKS, CallbackPart, StepCallback
from ingot.trainer.loader.loader import Loader


class Slowed(StepCallback):
    def __init__(self, run, options):
        seconds, jitter, seed, rank, step, self.kind = os.environ["BOARD_SLOW"].split()
        self.seconds, self.jitter = float(seconds), float(jitter)
        self.slow_from = int(step) if run.rank == int(rank) else 1 << 60
        self.random, self.get = Random(f"{seed} {run.rank}"), Loader._get
        if self.kind == "data":
            Loader._get = self._slow_get()

    def _slow_get(self):
        def get(loader):
            if loader.next_step >= self.slow_from:
                time.sleep(self.seconds)
            return self.get(loader)

        return get

    def on_gradients(self, step):
        work = self.seconds * max(1 + self.jitter * self.random.gauss(0, 1), 0.0)
        time.sleep(work * (2 if self.kind == "compute" and step >= self.slow_from else 1))


CALLBACKS.register(CallbackPart(name="slowed", make=Slowed))
