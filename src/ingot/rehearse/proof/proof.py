"""The proof of a run's own model: every layout of a few processes against one process, in float64.

Parallel code that is wrong usually still trains. Here a tiny version of the model, with the layers, optimizer and
callbacks of the run and of its plug-ins, makes a few steps on each layout, and everything that one process computes is
compared: losses, gradient norms, parameters and optimizer state.
"""

import contextlib
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ingot.config import to_dict
from ingot.errors import ResourceError
from ingot.plugins.load import loaded_from
from ingot.rehearse.proof.cases import cases, tiny
from ingot.schema.run import RunConfig

_RANKS = ("-P", "-W", "ignore", "-m", "ingot.rehearse.proof.ranks")
_ENDING_SECONDS = 10.0  # a killed process ends at once; one that a plug-in started elsewhere may not
TOLERANCE = 1e-9  # of the largest difference, relative to the largest number of a tensor; float64 sums differ by 1e-15


@dataclass(frozen=True)
class CaseResult:
    """The comparison of one layout. ranks: 0 if the layout does not fit the model; `error` then says why, else that of
    a rank, or "". deviation: the largest one. where: the tensor that has it."""

    name: str
    ranks: int
    deviation: float
    where: str
    error: str = ""

    @property
    def ran(self) -> bool:
        return self.ranks > 0

    @property
    def ok(self) -> bool:
        return not self.error and self.deviation <= TOLERANCE


@dataclass(frozen=True)
class LayoutProof:
    """compared: the layouts that fit the model, in order. left_out: the layouts that do not fit it."""

    compared: tuple[CaseResult, ...]
    left_out: tuple[CaseResult, ...]

    @property
    def ok(self) -> bool:
        return all(case.ok for case in self.compared)

    def facts(self) -> dict[str, Any]:
        """Return the proof as plain values, for JSON. An infinite deviation is null."""
        rows = [
            {
                "layout": case.name,
                "ranks": case.ranks,
                "deviation": case.deviation if math.isfinite(case.deviation) else None,
                "where": case.where,
                "error": case.error,
                "equal": case.ok,
            }
            for case in self.compared
        ]
        left_out = [{"layout": case.name, "why": case.error} for case in self.left_out]
        return {"equal": self.ok, "tolerance": TOLERANCE, "compared": rows, "left_out": left_out}


def case_line(case: CaseResult) -> str:
    """Return the line that people see for a layout."""
    if not case.ran:
        return f"left out  {case.name}: {case.error.partition(';')[0]}"
    if case.error:
        return f"FAILED    {case.name}: {case.error}"
    verdict = "equal" if case.ok else "DIFFERS"
    return f"{verdict:<8}  {case.name}: largest deviation {case.deviation:.1e}, {case.where}"


def prove_layouts(run: RunConfig) -> Generator[CaseResult, None, None]:
    """Train the tiny version of `run` on each layout and yield a CaseResult for each. Its processes end when the
    generator ends or is closed.

    Raises ResourceError if one process cannot train the model, with the reason.
    """
    small = tiny(run)
    plugins = replace(run.plugins, folder=loaded_from(run.plugins.modules) or run.plugins.folder)
    small = replace(small, plugins=plugins)
    every = list(cases(small))
    fitting = [case for case in every if case.run is not None]
    runs = [small, *(case.run for case in fitting if case.run)]
    # The answers are closed before the folder is removed, also after an error: no process writes to it any more.
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(_answers(runs, Path(folder))) as answers:
        if error := next(answers):
            raise ResourceError(
                "E-PROOF-ONE-PROCESS",
                f"one process cannot train the tiny version of the model: {error}",
                rule="layouts are compared with one process",
                fix="correct the plug-in, or the settings of the run",
                cause=error,
            )
        expected = Expected.read(Path(folder) / "0")
        number = 0
        for case in every:
            if case.run is None:
                yield CaseResult(case.name, 0, 0.0, "", case.why)
                continue
            number += 1
            error, ranks = next(answers), case.run.parallel.world_size
            if error:
                yield CaseResult(case.name, ranks, math.inf, "", error)
            else:
                yield expected.compare(case.name, Path(folder) / str(number), ranks)


def _answers(runs: Sequence[RunConfig], folder: Path) -> Generator[str, None, None]:
    """Start ranks.py and yield the error of each run, or "". All its processes have ended when the iterator is closed.

    Raises ResourceError if the processes end before they have answered.
    """
    request = json.dumps({"cases": [to_dict(run) for run in runs], "folder": str(folder)})
    command = [sys.executable, *_RANKS]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    alive, held = socket.socketpair()  # every process holds the second end; when none is left, the first one ends
    with tempfile.TemporaryFile("w+") as errors, alive, held:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
            pass_fds=[held.fileno()],
        )
        assert process.stdin and process.stdout
        try:
            held.close()
            with contextlib.suppress(BrokenPipeError):  # the process ended early; its error output has the reason
                process.stdin.write(request)
                process.stdin.close()
            for _ in runs:
                line = process.stdout.readline()
                if not line:
                    errors.seek(0)
                    last = (errors.read().strip().splitlines() or ["no message"])[-1]
                    raise ResourceError(
                        "E-PROOF-DIED",
                        f"the processes of the proof ended: {last}",
                        rule="the proof trains a tiny model in up to four processes",
                        fix="free memory, and run the same command again",
                    )
                yield json.loads(line)["error"] or ""
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the ranks too, which are no children of this process
            process.wait()
            select.select([alive], [], [], _ENDING_SECONDS)


@dataclass(frozen=True)
class Expected:
    """The results of one process. losses, norms: of each step. tensors: masters and optimizer state, whole."""

    losses: np.ndarray
    norms: np.ndarray
    tensors: dict[str, np.ndarray]

    @classmethod
    def read(cls, folder: Path) -> "Expected":
        losses, norms, blocks = _read(folder, 0)
        return cls(losses, norms, {name: values for name, _, values in blocks})

    def compare(self, name: str, folder: Path, ranks: int) -> CaseResult:
        """Compare everything that the ranks of a case hold, block by block, also blocks that several ranks hold."""
        found, losses = _Largest(), []
        left = {name: np.ones(tensor.shape, bool) for name, tensor in self.tensors.items()}
        for rank in range(ranks):
            own, norms, blocks = _read(folder, rank)
            losses += [own] if len(own) else []
            found.add("gradient norm", norms, self.norms, self.norms)
            for tensor, place, values in blocks:
                whole = self.tensors[tensor]
                found.add(tensor, values, whole[place], whole)
                left[tensor][place] = False
        found.add("loss", np.mean(losses, axis=0), self.losses, self.losses)
        missing = [tensor for tensor, parts in left.items() if parts.any()]
        error = f"no rank holds all of {missing[0]}" if missing else ""
        return CaseResult(name, ranks, found.deviation, found.where, error)


@dataclass
class _Largest:
    """The largest deviation so far, and the tensor that has it."""

    deviation: float = 0.0
    where: str = "loss"

    def add(self, name: str, found: np.ndarray, right: np.ndarray, whole: np.ndarray) -> None:
        """Compare `found` with `right`, relative to the largest number of `whole`."""
        largest = max(float(np.abs(whole).max(initial=0.0)), 1e-30)
        deviation = float(np.abs(found - right).max(initial=0.0)) / largest
        if math.isnan(deviation) or deviation > self.deviation:
            self.deviation, self.where = math.inf if math.isnan(deviation) else deviation, name


Block = tuple[str, tuple[slice, ...], np.ndarray]


def _read(folder: Path, rank: int) -> tuple[np.ndarray, np.ndarray, list[Block]]:
    """Return losses, gradient norms and blocks of one rank: (tensor, its place in the whole, values)."""
    blocks = []
    with np.load(folder / f"rank{rank}.npz") as file:
        for key in file.files:
            if key not in ("losses", "norms"):
                name, _, offsets = key.rpartition("|")
                values = file[key]
                starts = [int(number) for number in offsets.split(",")]
                place = tuple(slice(o, o + n) for o, n in zip(starts, values.shape, strict=True))
                blocks.append((name, place, values))
        return file["losses"], file["norms"], blocks
