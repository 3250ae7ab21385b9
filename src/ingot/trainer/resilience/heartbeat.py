"""The heartbeats of ranks: each writes what it does, since when, into memory that its supervisor reads. No torch.

A heartbeat is a few words in shared memory: writing one waits for nothing, needs no thread and takes a microsecond, and
the supervisor sees it whatever holds the rank's interpreter lock. The memory is a file without a name, which the kernel
releases with its last process. Times are seconds of the monotonic clock, which is one for all processes of a machine
and does not jump.
"""

import mmap
import os
import struct
import time
from dataclasses import dataclass
from enum import IntEnum
from zlib import crc32

HEARTBEAT_VARIABLE = "INGOT_HEARTBEAT_FD"  # the file descriptor of the memory, in the environment of the ranks


class Phase(IntEnum):
    """The phases of a rank's work. A phase ends when the next one begins."""

    START = 0  # imports, groups, the model, the load of a checkpoint; also the load after a roll-back
    COMPILE = 1  # the first step of an attempt, in which code is compiled and memory is allocated
    DATA = 2  # waiting for the next batch
    STEP = 3  # forward, backward, the update, and the log line after it
    SAVE = 4  # as long as training waits for a save
    EVALUATE = 5
    CALLBACK = 6  # the callbacks of a log line, which may do anything
    END = 7  # the last uploads; they may take any time
    LEAVE = 8  # the end of threads and groups; everything is saved and reported
    SAMPLE = 9  # the samples at the end of a run, which no evaluation before it has had

    @property
    def words(self) -> str:
        """The phase in an error message: "in a step"."""
        return _WORDS[self]


_WORDS = {
    Phase.START: "at the start",
    Phase.COMPILE: "in the first step",
    Phase.DATA: "waiting for data",
    Phase.STEP: "in a step",
    Phase.SAVE: "in a save",
    Phase.EVALUATE: "in an evaluation",
    Phase.CALLBACK: "in a callback",
    Phase.END: "at the end",
    Phase.LEAVE: "leaving the job",
    Phase.SAMPLE: "writing samples",
}
# Phases whose time alone says little: a save may go on after training does, and an evaluation may be a part of one.
# Their longest time is that of the whole work, which the rank reports (`Heartbeat.learn`).
REPORTED: tuple[Phase, ...] = (Phase.SAVE, Phase.EVALUATE)
# Process id, beats so far, phase, step, when the phase began [ns], file descriptors of the two reports (evidence.py),
# the age [ns] of the save that the rank waits for, and the longest time [ns] of each phase that ended; then a checksum
# of these, because a rank may be interrupted while it writes. After it, one byte: 1 while the rank waits for another.
_WORDS_OF_BEAT = struct.Struct(f"<{8 + len(Phase)}q")
_CHECKSUM = struct.Struct("<I")
_WAITS_AT = _WORDS_OF_BEAT.size + _CHECKSUM.size
_SLOT = 256
assert _WAITS_AT < _SLOT
_READS = 50


@dataclass(frozen=True)
class Beat:
    """The newest heartbeat of a rank.

    pid: 0 until the rank's own first beat. count: beats so far. since: when the phase began. stacks, collectives: file
    descriptors of the rank with its reports, -1 if it answers no questions. longest: for each Phase, the seconds of the
    longest one that ended, 0 if none has; for those of REPORTED, of the longest whole save and evaluation. waits:
    whether its training thread waits for another rank, as far as the host does that (mesh/waiting.py). in_flight: how
    old [s] a save in the background was when the rank began to wait for it, 0 if it waits for none.
    """

    pid: int
    count: int
    phase: Phase
    step: int
    since: float
    stacks: int
    collectives: int
    longest: tuple[float, ...]
    waits: bool = False
    in_flight: float = 0.0


class Heartbeats:
    """The memory of the heartbeats of `ranks`, with the supervisor. `fd` is passed on to the ranks."""

    def __init__(self, ranks: int):
        self.ranks = ranks
        self.fd = os.memfd_create("ingot-heartbeats")
        os.set_inheritable(self.fd, True)
        os.ftruncate(self.fd, ranks * _SLOT)
        self._memory = mmap.mmap(self.fd, ranks * _SLOT)
        self._last: list[Beat] = []
        self.begin()

    def begin(self) -> None:
        """Begin an attempt: every rank is at its start, from now on. No rank of an earlier one may be alive."""
        now = time.monotonic_ns()
        never = (0,) * len(Phase)
        for rank in range(self.ranks):
            _write(self._memory, rank * _SLOT, 0, 0, Phase.START, 0, now, -1, -1, 0, *never)
            self._memory[rank * _SLOT + _WAITS_AT] = False
        self._last = [Beat(0, 0, Phase.START, 0, now / 1e9, -1, -1, tuple(map(float, never)))] * self.ranks

    def read(self, rank: int) -> Beat:
        """Return the newest whole heartbeat of `rank`: the one read before while it is interrupted in writing."""
        for _ in range(_READS):
            slot = self._memory[rank * _SLOT : (rank + 1) * _SLOT]
            if _CHECKSUM.unpack_from(slot, _WORDS_OF_BEAT.size)[0] == crc32(slot[: _WORDS_OF_BEAT.size]):
                pid, count, phase, step, since, stacks, collectives, *times = _WORDS_OF_BEAT.unpack_from(slot)
                age, *longest = (value / 1e9 for value in times)
                waits, since = bool(slot[_WAITS_AT]), since / 1e9
                self._last[rank] = Beat(
                    pid, count, Phase(phase), step, since, stacks, collectives, tuple(longest), waits, age
                )
                break
        return self._last[rank]

    def close(self) -> None:
        self._memory.close()
        os.close(self.fd)


class Heartbeat:
    """The heartbeat of this rank. Without a supervisor it beats as well, and nobody reads it.

    stacks, collectives: file descriptors of this process's reports (see Beat).
    """

    def __init__(self, memory: mmap.mmap, rank: int, stacks: int = -1, collectives: int = -1):
        self._memory, self._at = memory, rank * _SLOT
        self._fixed = stacks, collectives
        self._longest = [0] * len(Phase)
        self._pid, self._count, self._phase, self._step = os.getpid(), 0, Phase.START, 0
        self._since = _WORDS_OF_BEAT.unpack_from(memory, self._at)[4] or time.monotonic_ns()  # when the attempt began
        self.set_waiting(False)
        self._beat()

    def enter(self, phase: Phase, step: int) -> None:
        """End the current phase and begin `phase`, of this step. Waits for nothing."""
        now = time.monotonic_ns()
        took = now - self._since
        if took > self._longest[self._phase] and self._phase not in REPORTED:
            self._longest[self._phase] = took
        self._phase, self._step, self._since, self._count = phase, step, now, self._count + 1
        _write(self._memory, self._at, self._pid, self._count, phase, step, now, *self._fixed, 0, *self._longest)

    def learn(self, phase: Phase, seconds: float) -> None:
        """Report the time of a whole save or evaluation that has ended, with what it did after training went on.

        Where this rank waited for it, its end is a sign of life: the last save of a run follows an earlier one.
        """
        self._longest[phase] = max(self._longest[phase], int(seconds * 1e9))
        if self._phase is phase:
            self._since, self._count = time.monotonic_ns(), self._count + 1
        self._beat()

    def wait_for_save(self, age: float) -> None:
        """Report that this rank waits for a save in the background, which began `age` seconds ago."""
        self._beat(int(age * 1e9))

    def _beat(self, in_flight: int = 0) -> None:
        beat = self._pid, self._count, self._phase, self._step, self._since, *self._fixed, in_flight
        _write(self._memory, self._at, *beat, *self._longest)

    def set_waiting(self, waits: bool) -> None:
        """Say whether the training thread waits for another rank, from now on. Costs a tenth of a microsecond."""
        self._memory[self._at + _WAITS_AT] = waits


def _write(memory: mmap.mmap, at: int, *words: int) -> None:
    beat = _WORDS_OF_BEAT.pack(*words)
    memory[at : at + len(beat) + _CHECKSUM.size] = beat + _CHECKSUM.pack(crc32(beat))


def open_heartbeat(rank: int | None = None, stacks: int = -1, collectives: int = -1) -> Heartbeat:
    """Return the heartbeat of this process: in its supervisor's memory if it has one and is its local rank `rank`.

    stacks, collectives: as in Heartbeat.
    """
    fd = None if rank is None else os.environ.get(HEARTBEAT_VARIABLE)
    if fd is None or rank is None:
        return Heartbeat(mmap.mmap(-1, _SLOT), 0, stacks, collectives)
    return Heartbeat(mmap.mmap(int(fd), 0), rank, stacks, collectives)
