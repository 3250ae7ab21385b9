"""The oracles: what must hold of a disturbed run, each defined once. No torch.

O1 trace     every logged loss and gradient norm of every step has the bits of the undisturbed run R; of a step that a
             roll-back made void, those of the last time
O2 state     weights, moments, random states, samples, step and tokens of the last checkpoint hash to the value of R
O3 ledger    the last checkpoint lists the samples of the steps 1 to the last, each step once, the same as R
O4 detect    seconds from the fault to the first `fault` event; of a quiet fault, to the first finding of the guard, the
             first damage that hashes found, the first windows that were put into quarantine, or the alert
O5 recover   seconds from the fault to the first step that had not been reached before it, and that is sound
O6 message   exit code, error code and facts name the cause (each row says which)
O7 clean     no process, no socket that listens, no shared memory, no temporary file is left, and the last checkpoint
             verifies
O8 cost      steps done twice per fault, at most the interval of checkpoints
"""

import hashlib
import json
import struct
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np

from ingot.drill.restores import Restore, by_tier, read_restores
from ingot.events import read_events
from ingot.schema import events
from ingot.schema.alert import UNCHANGED
from ingot.schema.checkpoint import CheckpointManifest, file_of
from ingot.schema.run_folder import RunFolder
from ingot.trainer.checkpoint.manifest import candidate_folders, verify_checkpoint
from ingot.trainer.checkpoint.places import Places
from ingot.trainer.loader.ledger import is_untrained, read_ledger

ORACLES = ("o1", "o2", "o3", "o6", "o7", "o8")
RED = "RED"  # the outcome of a case in which something was wrong
_RANDOM = "random."  # keys of a rank's random states begin with it
Trace = dict[int, list[tuple[bytes, bytes]]]
Samples = list[tuple[int, bytes]]


@dataclass(frozen=True)
class RunFacts:
    """The facts of a run that are compared. trace: step -> the bits of (loss, gradient norm), once per time it was
    logged. void: steps that a roll-back made void, at least once. state: SHA-256 of the last checkpoint, with random
    states and without. samples: (step, ids) by the ledger. untrained: steps that changed no weights, by the ledger.
    """

    trace: Trace
    state: str
    state_of_all_layouts: str
    samples: Samples
    void: frozenset[int] = frozenset()
    untrained: frozenset[int] = frozenset()


def read_facts(folder: RunFolder) -> RunFacts:
    """Read the facts of a run from its event log and its newest checkpoint. Raises CheckpointError if that one is
    damaged, IndexError if there is none."""
    newest = candidate_folders(folder.checkpoints)[0]
    manifest = verify_checkpoint(newest)
    samples = list(read_ledger(folder.ledger, manifest.ledger))
    return RunFacts(
        trace=read_trace(folder),
        state=state_hash(newest, manifest, with_random_states=True),
        state_of_all_layouts=state_hash(newest, manifest, with_random_states=False),
        samples=[(step, ids.tobytes()) for step, ids in samples],
        void=read_void(folder),
        untrained=frozenset(step for step, ids in samples if is_untrained(ids)),
    )


def read_trace(folder: RunFolder) -> Trace:
    """Return step -> the bits of loss and gradient norm, once per time that the step was logged."""
    trace: Trace = {}
    for event in read_events(folder.events, events.STEP):
        bits = struct.pack("<d", event["loss"]), struct.pack("<d", event["grad_norm"])
        trace.setdefault(event["step"], []).append(bits)
    return trace


def read_void(folder: RunFolder) -> frozenset[int]:
    """Return the steps that a run rolled back: their numbers may be those of a damaged state."""
    pairs = ((e["from_step"], e["to_step"]) for e in read_events(folder.events, events.ROLLED_BACK))
    return frozenset(step for last, before in pairs for step in range(before + 1, last + 1))


def state_hash(path: Path, manifest: CheckpointManifest, *, with_random_states: bool) -> str:
    """Hash step, tokens, the place in the data and all tensors of a checkpoint, whole, whatever its layout.

    with_random_states: also the random state of every rank, which only runs with as many ranks have in common.
    """
    found = {name: Places(path).find(name, manifest.files[name].sha256) for name in map(file_of, range(manifest.world))}
    files = {name: _bytes_of_tensors(file) for name, file in found.items() if file is not None}
    digest = hashlib.sha256(f"{manifest.step} {manifest.tokens} {manifest.data_fingerprint}".encode())
    for name in sorted(manifest.tensors):
        entry = manifest.tensors[name]
        blocks = {chunk.offsets: files[chunk.file][chunk.key] for chunk in manifest.chunks(name)}
        whole = np.empty((*entry.shape, next(iter(blocks.values())).shape[-1]), np.uint8)
        for offsets, block in blocks.items():
            whole[tuple(slice(o, o + n) for o, n in zip(offsets, block.shape[:-1], strict=True))] = block
        digest.update(f"{name} {entry.dtype} {entry.shape}".encode() + whole.tobytes())
    if with_random_states:
        for tensors in files.values():
            for key in sorted(key for key in tensors if key.startswith(_RANDOM)):
                digest.update(key.encode() + tensors[key].tobytes())
    return digest.hexdigest()


def _bytes_of_tensors(file: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a safetensors file by key, each as bytes of shape (*its shape, bytes of an element). NumPy
    has no bfloat16, and no 8-bit floats."""
    data = np.memmap(file, np.uint8, "r")
    begin = 8 + int.from_bytes(data[:8].tobytes(), "little")
    found = {}
    for key, entry in json.loads(data[8:begin].tobytes()).items():
        if key != "__metadata__":
            first, end = entry["data_offsets"]
            elements = int(np.prod(entry["shape"], dtype=np.int64))
            size = (end - first) // elements if elements else 1
            found[key] = data[begin + first : begin + end].reshape(*entry["shape"], size)
    return found


def o1(ours: Trace, reference: Trace, void: frozenset[int] = frozenset()) -> str:
    """Return the first difference of a trace from that of R; "" without one. void: steps that were rolled back, of
    which the last time counts."""
    if missing := reference.keys() - ours.keys():
        return f"step {min(missing)} was not logged"
    for step in sorted(ours):
        times = ours[step][-1:] if step in void else ours[step]
        if different := [bits for bits in times if bits not in reference.get(step, [])]:
            loss, norm = (struct.unpack("<d", one)[0] for one in different[0])
            return f"step {step}: loss {loss!r} and gradient norm {norm!r} are not those of the undisturbed run"
    return ""


def o2(ours: str, reference: str) -> str:
    """Return the difference of two hashes of states; "" without one."""
    return "" if ours == reference else f"state {ours[:12]} instead of {reference[:12]}"


def o3(ours: Samples, reference: Samples) -> str:
    """Return the first difference of the samples from those of R; "" without one."""
    for mine, theirs in zip(ours, reference, strict=False):
        if mine[0] != theirs[0]:
            return f"step {mine[0]} instead of step {theirs[0]}"
        if mine[1] != theirs[1]:
            return f"step {mine[0]} has other samples"
    return "" if len(ours) == len(reference) else f"{len(ours)} steps instead of {len(reference)}"


# Who finds a quiet fault, by the event.
_FINDERS = {
    events.FINDING: "the guard",
    events.STATE_DAMAGED: "the hashes of the state",
    events.QUARANTINED: "the reader of the data",
    events.ALERT: "an alert",  # that weights do not change: others are about trends
}
# Who finds one that only its own kind of event reports: others of that kind come on a busy machine too.
_OWN_FINDERS = {events.STRAGGLER: "the watch for slow ranks", events.HEALTH: "the health watch"}


@dataclass
class Recovery:
    """The recovery from a fault at `injected` (Unix time), as the events show it, which `take` gets in order.

    reached: the highest step that was logged before the restart; of a quiet fault, the highest one that was found or
    rolled back. quiet: no process ends by the fault. found_by: the kind of event, of _OWN_FINDERS, that reports it; "":
    any other finder's. detected: O4, the seconds to the first event that reports it; by,
    cause: of that event. recovered: O5, the seconds to the first step, of an attempt begun after the fault, that no
    attempt before it had reached; of a quiet fault, to the first sound step after `reached`.
    """

    injected: float
    reached: int = 0
    quiet: bool = False
    found_by: str = ""
    detected: float | None = None
    by: str = ""
    cause: str = ""
    recovered: float | None = None
    _restarted: bool = False

    def take(self, event: dict) -> None:
        """Take in the next event of the log."""
        kind, after = event["kind"], event["time"] - self.injected
        if kind == self.found_by and after >= -0.001 and self.detected is None:
            self.detected, self.by, self.cause = max(after, 0.0), _OWN_FINDERS[kind], _found(event)
            self.reached = max(self.reached, event.get("step", 0))
        if self.quiet:
            self._take_quiet(event, after)
        elif kind == events.FAULT and self.detected is None and after >= -0.001:  # the log has milliseconds
            self.detected, self.by, self.cause = max(after, 0.0), event.get("detected_by", ""), event.get("cause", "")
        elif kind == events.RUN_STARTED and after > 0:
            self._restarted = True
        elif kind == events.STEP and not self._restarted:
            self.reached = max(self.reached, event["step"])
        elif kind == events.STEP and self.recovered is None and event["step"] > self.reached:
            self.recovered = after

    def _take_quiet(self, event: dict, after: float) -> None:
        kind = event["kind"]
        if kind in _FINDERS and not self.found_by and after >= -0.001 and event.get("alert", UNCHANGED) == UNCHANGED:
            if self.detected is None:
                self.detected, self.by, self.cause = max(after, 0.0), _FINDERS[kind], _found(event)
            # The tokens are left out before the step uses them.
            self.reached = max(self.reached, event["step"] - (kind == events.QUARANTINED))
        elif kind == events.ROLLED_BACK and after > 0:
            self.reached = max(self.reached, event["from_step"])
        elif kind == events.PROGRESS and self.detected is not None and event["step"] > self.reached:
            self.recovered = after if self.recovered is None else self.recovered  # it comes after the findings


def _found(event: dict) -> str:
    if event["kind"] == events.FINDING:
        return f"step {event['step']}: {', '.join(event['found'])}"
    if event["kind"] == events.QUARANTINED:
        return f"step {event['step']}: {event['found']}"
    if event["kind"] == events.ALERT:
        return f"step {event['step']}: {event['alert']}"
    if event["kind"] == events.STRAGGLER:
        return (
            f"step {event['step']}: rank {event['rank']} is {event['factor']:g} times as slow in its {event['phase']}"
        )
    if event["kind"] == events.HEALTH:
        return f"{event['node']}: {event['words']} ({event['verdict']})"
    bit = "" if event["bit"] is None else f"bit {event['bit']} of "
    return f"step {event['step']}: {bit}{event['tensor']} of rank {event['rank']}"


def recovery(folder: RunFolder, injected: float) -> Recovery:
    """Return what the log of a run shows of a fault at `injected` (Unix time)."""
    found = Recovery(injected)
    for event in read_events(folder.events, events.FAULT, events.STEP, events.RUN_STARTED):
        found.take(event)
    return found


def redone(trace: Trace) -> int:
    """O8: the number of steps that were done again."""
    return sum(len(times) - 1 for times in trace.values())


@dataclass
class Verdicts:
    """The findings of one row with one seed: oracle -> what it found wrong, in how many cases it was asked.

    outcomes: how many cases there were of each (fault, place of the fault, what came of it), for tables of cases.
    restores: (run folder, time) -> a restore in the log of a run that was judged.
    """

    asked: Counter = field(default_factory=Counter)
    wrong: dict[str, list[str]] = field(default_factory=dict)
    detect: list[float] = field(default_factory=list)
    recover: list[float] = field(default_factory=list)
    redone: int = 0
    numbers: dict[str, float] = field(default_factory=dict)
    outcomes: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    untrained: tuple[int, ...] = ()
    restores: dict[tuple[str, float], Restore] = field(default_factory=dict)

    @property
    def findings(self) -> int:
        """The number of findings so far."""
        return sum(map(len, self.wrong.values()))

    def judge(self, oracle: str, where: str, finding: str) -> None:
        """Record that `oracle` was asked in the case `where`. finding: what is wrong, "" if nothing."""
        self.asked[oracle] += 1
        if finding:
            self.wrong.setdefault(oracle, []).append(f"{where}: {finding}")

    def came_of(self, fault: str, place: str, outcome: str, since: int) -> None:
        """Count a case by its fault, by the place of the fault, and by its outcome: that it is red, if anything was
        found wrong after the first `since` findings."""
        self.outcomes[fault, place, outcome if self.findings == since else RED] += 1

    def restored(self, folder: RunFolder) -> None:
        """Record the restores of a run that has ended, once each."""
        self.restores |= {(str(folder.root), one.time): one for one in read_restores(folder)}

    def time(self, folder: RunFolder, injected: float) -> None:
        """Record O4 and O5 of a fault at `injected` (Unix time), as far as they apply."""
        found = recovery(folder, injected)
        for seconds, kept in ((found.detected, self.detect), (found.recovered, self.recover)):
            if seconds is not None:
                kept.append(seconds)

    def as_json(self, row: str, seed: int) -> dict:
        """Return the line of the row and seed. An oracle that was not asked is null."""
        states = {o: (o not in self.wrong) if self.asked[o] else None for o in ORACLES}
        return {
            "id": row,
            "seed": seed,
            "detect_s": round(median(self.detect), 3) if self.detect else None,
            "recover_s": round(median(self.recover), 3) if self.recover else None,
            "redone_steps": self.redone,
            **states,
            "cases": max(self.asked.values(), default=0),
            "numbers": {name: float(f"{value:.4g}") for name, value in self.numbers.items()},
            "wrong": [f"{oracle}: {one}" for oracle, found in self.wrong.items() for one in found],
            "passed": bool(self.asked) and not self.wrong,
            **({"outcomes": [[*case, count] for case, count in self.outcomes.items()]} if self.outcomes else {}),
            **({"restores": by_tier(self.restores.values())} if self.restores else {}),
        }
