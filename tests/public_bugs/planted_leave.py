"""A plug-in whose rank 1 never returns from the end of its process groups, as torch's have been seen to hang."""

import os
import signal
from pathlib import Path

import torch.distributed as dist

from ingot.plugins.callback import CALLBACKS, CallbackPart, StepCallback


def hang():
    Path(os.environ["INGOT_DRILL_RUN"] + ".hangs").touch()
    signal.sigwait([signal.SIGWINCH])


class Leave(StepCallback):
    def __init__(self, run, options):
        if run.rank == 1:
            dist.destroy_process_group = hang


CALLBACKS.register(CallbackPart(name="leave", make=Leave))
