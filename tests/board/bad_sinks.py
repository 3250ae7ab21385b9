"""A plug-in with sinks that hang, die, wait for half a minute, or write to a disk that is full."""

import os
import resource
import signal
import time

from ingot.plugins.sink import SINKS, Sink, SinkPart

LIMIT = 1 << 12


class Hangs(Sink):
    def __init__(self, place, options):
        self.own = place.own

    def scalars(self, step, tokens, values):
        time.sleep(1000)


class Sleeps(Hangs):
    def scalars(self, step, tokens, values):
        time.sleep(30)


class Dies(Hangs):
    def scalars(self, step, tokens, values):
        os.kill(os.getpid(), signal.SIGKILL)


class Full(Hangs):
    def __init__(self, place, options):
        resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, LIMIT))
        self.file = (place.own / "data").open("ab", buffering=0)

    def scalars(self, step, tokens, values):
        if self.file.write(bytes(LIMIT)) < LIMIT:
            raise OSError("no room")


for kind in (Hangs, Sleeps, Dies, Full):
    SINKS.register(SinkPart(name=kind.__name__.lower(), make=kind))
