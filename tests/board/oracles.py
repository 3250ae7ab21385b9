"""The oracles: what must hold of a disturbed run, each defined once.

O1 trace     every logged loss and gradient norm of every step has the bits of the undisturbed run R
O2 state     weights, moments, random states, samples, step and tokens of the last checkpoint hash to the value of R
O3 ledger    the last checkpoint lists the samples of the steps 1 to the last, each step once, the same as R
O4 detect    seconds from the fault to the first `fault` event
O5 recover   seconds from the fault to the first step that had not been reached before it
O6 message   exit code, error code and facts name the cause (each row says which)
O7 clean     no process, no shared memory, no temporary file is left, and the last checkpoint verifies. A port is held
             by a process, so none is left either
O8 cost      steps done twice per fault, at most the interval of checkpoints
"""

import hashlib
import os
import struct
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np
import safetensors.numpy

from ingot.errors import IngotError
from ingot.events import read_events
from ingot.schema import events
from ingot.schema.checkpoint import CheckpointManifest, file_of
from ingot.schema.run_folder import RunFolder
from ingot.trainer.checkpoint.manifest import candidate_folders, verify_checkpoint
from ingot.trainer.checkpoint.places import Places
from ingot.trainer.loader.ledger import read_ledger

ORACLES = ("o1", "o2", "o3", "o6", "o7", "o8")
_RANDOM = "random."  # keys of a rank's random states begin with it
Trace = dict[int, list[tuple[bytes, bytes]]]
Samples = list[tuple[int, bytes]]


@dataclass(frozen=True)
class Facts:
    """The facts of a run that are compared. trace: step -> the bits of (loss, gradient norm), once per time it was
    logged. state: SHA-256 of the last checkpoint, with random states and without. samples: (step, ids) by the ledger.
    """

    trace: Trace
    state: str
    state_of_all_layouts: str
    samples: Samples


def read_facts(folder: RunFolder) -> Facts:
    """Read the facts of a run from its event log and its newest checkpoint. Raises CheckpointError if that one is
    damaged, IndexError if there is none."""
    newest = candidate_folders(folder.checkpoints)[0]
    manifest = verify_checkpoint(newest)
    return Facts(
        trace=read_trace(folder),
        state=state_hash(newest, manifest, with_random_states=True),
        state_of_all_layouts=state_hash(newest, manifest, with_random_states=False),
        samples=[(step, ids.tobytes()) for step, ids in read_ledger(folder.ledger, manifest.ledger)],
    )


def read_trace(folder: RunFolder) -> Trace:
    """Return step -> the bits of loss and gradient norm, once per time that the step was logged."""
    trace: Trace = {}
    for event in read_events(folder.events, events.STEP):
        bits = struct.pack("<d", event["loss"]), struct.pack("<d", event["grad_norm"])
        trace.setdefault(event["step"], []).append(bits)
    return trace


def state_hash(path: Path, manifest: CheckpointManifest, *, with_random_states: bool) -> str:
    """Hash step, tokens, the place in the data and all tensors of a checkpoint, whole, whatever its layout.

    with_random_states: also the random state of every rank, which only runs with as many ranks have in common.
    """
    found = {name: Places(path).find(name, manifest.files[name].sha256) for name in map(file_of, range(manifest.world))}
    files = {name: safetensors.numpy.load_file(file) for name, file in found.items() if file is not None}
    digest = hashlib.sha256(f"{manifest.step} {manifest.tokens} {manifest.data_fingerprint}".encode())
    for name in sorted(manifest.tensors):
        entry = manifest.tensors[name]
        blocks = {chunk.offsets: files[chunk.file][chunk.key] for chunk in manifest.chunks(name)}
        whole = np.empty(entry.shape, next(iter(blocks.values())).dtype)
        for offsets, block in blocks.items():
            whole[tuple(slice(o, o + n) for o, n in zip(offsets, block.shape, strict=True))] = block
        digest.update(f"{name} {entry.dtype} {entry.shape}".encode() + whole.tobytes())
    if with_random_states:
        for tensors in files.values():
            for key in sorted(key for key in tensors if key.startswith(_RANDOM)):
                digest.update(key.encode() + tensors[key].tobytes())
    return digest.hexdigest()


def o1(ours: Trace, reference: Trace) -> str:
    """Return the first difference of a trace from that of R; "" without one."""
    if missing := reference.keys() - ours.keys():
        return f"step {min(missing)} was not logged"
    for step in sorted(ours):
        if different := [bits for bits in ours[step] if bits not in reference.get(step, [])]:
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


def detect_seconds(folder: RunFolder, injected: float) -> float | None:
    """O4: seconds from `injected` (Unix time) to the first fault event after it."""
    times = [event["time"] for event in read_events(folder.events, events.FAULT) if event["time"] >= injected - 0.001]
    return max(times[0] - injected, 0.0) if times else None


def recover_seconds(folder: RunFolder, injected: float) -> float | None:
    """O5: seconds from `injected` (Unix time) to the first step beyond those of the attempts before it; None if no
    attempt was started after it."""
    log = list(read_events(folder.events, events.STEP, events.RUN_STARTED))
    start = next((n for n, e in enumerate(log) if e["kind"] == events.RUN_STARTED and e["time"] > injected), len(log))
    reached = max((e["step"] for e in log[:start] if e["kind"] == events.STEP), default=0)
    later = (e for e in log[start:] if e["kind"] == events.STEP and e["step"] > reached)
    return next((e["time"] - injected for e in later), None)


def redone(trace: Trace) -> int:
    """O8: the number of steps that were done again."""
    return sum(len(times) - 1 for times in trace.values())


def shared_memory() -> set[str]:
    """Return the names in /dev/shm."""
    with suppress(OSError):
        return {path.name for path in Path("/dev/shm").iterdir()}
    return set()


def o7(folder: RunFolder, temporary: Path, memory_before: set[str], alive: Iterable[int]) -> str:
    """Return what a run that has ended left; "" if nothing.

    temporary: its folder for temporary files. memory_before: the names in /dev/shm before it. alive: its processes that
    still live.
    """
    if alive := list(alive):
        return f"processes {alive} are left"
    if new := [name for name in shared_memory() - memory_before if not _in_use(f"/dev/shm/{name}")]:
        return f"shared memory {sorted(new)} is left"  # one in use is of another program: ours have ended
    if files := [str(path.relative_to(temporary)) for path in temporary.rglob("*") if path.is_file()]:
        return f"temporary files {files} are left"
    if files := leftovers(folder):
        return f"{files} are left in the run folder"
    candidates = candidate_folders(folder.checkpoints)
    if not candidates:
        return "there is no checkpoint"
    try:
        verify_checkpoint(candidates[0])
    except IngotError as error:
        return f"the last checkpoint is damaged: {error.found}"
    return ""


def leftovers(folder: RunFolder) -> list[str]:
    """Return what saves and atomic writes leave in a run folder if they are killed."""
    names = [str(path.relative_to(folder.root)) for path in folder.root.rglob("*") if _is_temporary(path.name)]
    return sorted(names + ([folder.stop_request.name] if folder.stop_request.exists() else []))


def _is_temporary(name: str) -> bool:
    return name.startswith((".saving-", ".removed-")) or name.endswith(".tmp")


def _in_use(path: str) -> bool:
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(OSError):
                if path in Path(f"/proc/{entry.name}/maps").read_text():
                    return True
                if any(str(link.readlink()) == path for link in Path(f"/proc/{entry.name}/fd").iterdir()):
                    return True
    return False


def gone_within(seconds: float, alive) -> list[int]:
    """Wait until `alive()` is empty, at most `seconds`. Returns the processes that are left."""
    deadline = time.monotonic() + seconds
    while (left := alive()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


@dataclass
class Verdicts:
    """The findings of one row with one seed: oracle -> what it found wrong, in how many cases it was asked."""

    asked: Counter = field(default_factory=Counter)
    wrong: dict[str, list[str]] = field(default_factory=dict)
    detect: list[float] = field(default_factory=list)
    recover: list[float] = field(default_factory=list)
    redone: int = 0
    numbers: dict[str, float] = field(default_factory=dict)

    def judge(self, oracle: str, where: str, finding: str) -> None:
        """Record that `oracle` was asked in the case `where`. finding: what is wrong, "" if nothing."""
        self.asked[oracle] += 1
        if finding:
            self.wrong.setdefault(oracle, []).append(f"{where}: {finding}")

    def time(self, folder: RunFolder, injected: float) -> None:
        """Record O4 and O5 of a fault at `injected` (Unix time), as far as they apply."""
        for seconds, kept in (
            (detect_seconds(folder, injected), self.detect),
            (recover_seconds(folder, injected), self.recover),
        ):
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
        }
