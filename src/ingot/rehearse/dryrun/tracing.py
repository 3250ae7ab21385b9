"""The processes that trace ranks, and the traces that earlier dry runs kept. It does not import torch.

A trace depends on a part of the run file, on the device, on the loads of experts and on the program. It is kept in the
user's cache under the hash of all of these, one file per rank, so that the same dry run, stopped or repeated, traces
only the ranks that are missing.
"""

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import ingot
from ingot.config import to_dict
from ingot.errors import ConfigError, ResourceError
from ingot.plugins.load import loaded_from
from ingot.schema.run import RunConfig
from ingot.storage import canonical_json, sha256_bytes, write_atomic

_MOST_KEPT = 32  # dry runs; a trace takes about 100 kB


@dataclass(frozen=True)
class Request:
    """A request for traces. jobs: number of processes. patience: seconds without progress after which tracing ends."""

    config: RunConfig
    device: str
    loads: Sequence[float]
    jobs: int
    patience: float


def trace_ranks(request: Request, ranks: Sequence[int], began: Callable[[int, str], None]) -> Iterator[dict]:
    """Run role.py and yield its answer for each rank, in the order in which they are traced.

    began: called with (rank, phase) when a rank enters a phase. When nothing happens for `patience` seconds, the
    answers end early. All processes have ended when the iterator ends or is closed.
    Raises ConfigError or ResourceError if a rank cannot be traced or the processes end early.
    """
    settings = {"ranks": list(ranks), "jobs": request.jobs, "device": request.device, "loads": list(request.loads)}
    plugins = request.config.plugins
    plugins = replace(plugins, folder=loaded_from(plugins.modules) or plugins.folder)
    message = json.dumps({"config": to_dict(replace(request.config, plugins=plugins)), **settings})
    command = [sys.executable, "-P", "-W", "ignore", "-m", "ingot.rehearse.dryrun.role"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    left, died = set(ranks), ""
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,  # a process group, so that `_end` also ends the forked children
        )
        assert process.stdin and process.stdout
        watchdog = _Watchdog(process, request.patience)
        try:
            with suppress(BrokenPipeError):  # the process ended early; its error output, read below, has the reason
                process.stdin.write(message)
                process.stdin.close()
            for line in process.stdout:
                if not line.endswith("\n"):  # the process was killed while it wrote
                    break
                watchdog.restart()
                answer = json.loads(line)
                if "died" in answer:
                    died = f"the process of rank {answer['rank']} died (exit code {answer['died']})"
                    break
                if "error" in answer:
                    raise failure(answer)
                if "phase" in answer:
                    began(answer["rank"], answer["phase"])
                    continue
                left.remove(answer["rank"])
                yield answer
        finally:
            watchdog.stop()
            _end(process)
        errors.seek(0)
        last = died or (errors.read().strip().splitlines() or [f"exit code {process.returncode}"])[-1]
    if left and not watchdog.barked:
        raise ResourceError(
            "E-DRYRUN-ENDED",
            f"the tracing process ended after {len(ranks) - len(left)} of {len(ranks)} ranks: {last}",
            rule="every chosen rank is traced",
            fix="free memory (350 MB per process are needed); the same command goes on with the ranks that are missing",
            traced=len(ranks) - len(left),
            ranks=len(ranks),
        )


class _Watchdog:
    """A timer that ends a process when `restart` is not called for `seconds`; it has then `barked`."""

    def __init__(self, process: subprocess.Popen, seconds: float):
        self.barked = False
        self._process, self._seconds = process, seconds
        self._timer = threading.Timer(seconds, self._bark)
        self._timer.start()

    def _bark(self) -> None:
        self.barked = True
        _end(self._process)

    def restart(self) -> None:
        self.stop()
        if not self.barked:
            self._timer = threading.Timer(self._seconds, self._bark)
            self._timer.start()

    def stop(self) -> None:
        self._timer.cancel()


def _end(process: subprocess.Popen) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def failure(answer: dict) -> Exception:
    """Return the error that role.py reports for a rank."""
    if "rule" in answer:
        return ConfigError(answer["code"], answer["error"], rule=answer["rule"], fix=answer["fix"], **answer["facts"])
    frames = [line for line in answer.get("traceback", "").splitlines() if line.lstrip().startswith("File ")]
    where = f", at {frames[-1].strip()}" if frames else ""
    return ResourceError(
        "E-DRYRUN-RANK",
        f"rank {answer['rank']} cannot be traced: {answer['error']}{where}",
        rule="the training program runs without an error on fake tensors",
        fix="report this with the run file; `ingot check` without --simulate still works",
        rank=answer["rank"],
    )


# -- kept traces ---------------------------------------------------------------------------------------------------


class KeptTraces:
    """The traces of one dry run that were kept. A folder that cannot be written keeps nothing.

    Not every setting of a run file has an effect on a trace: a change of the others finds the same traces again.
    """

    def __init__(self, config: RunConfig, device: str, loads: Sequence[float], home: Path | None = None):
        self.folder = (home or _home()) / key_of(config, device, loads)

    def read(self, rank: int) -> dict | None:
        """Return the answer for a rank, None if none was kept or the file is damaged."""
        try:
            answer = json.loads(gzip.decompress(self._file(rank).read_bytes()))
        except (OSError, EOFError, ValueError, zlib.error):
            return None
        return answer if isinstance(answer, dict) and answer.get("rank") == rank else None

    def write(self, answer: dict) -> None:
        with suppress(OSError):
            new = not self.folder.is_dir()
            packed = gzip.compress(json.dumps(answer).encode(), compresslevel=3, mtime=0)
            write_atomic(self._file(answer["rank"]), packed)
            if new:
                self._forget_oldest()

    def _file(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.json.gz"

    def _forget_oldest(self) -> None:
        folders = sorted(self.folder.parent.iterdir(), key=lambda folder: folder.stat().st_mtime)
        for folder in folders[:-_MOST_KEPT]:
            shutil.rmtree(folder, ignore_errors=True)


def _home() -> Path:
    """Return the folder of all kept traces in the user's cache (XDG Base Directory Specification)."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    with suppress(RuntimeError):  # a user without a home
        return Path(given or "~/.cache").expanduser() / "ingot" / "dry_run"
    return Path(os.devnull)


def key_of(config: RunConfig, device: str, loads: Sequence[float]) -> str:
    """Return the hash of everything on which a trace depends: settings, device, loads, ingot's source and torch."""
    settings = to_dict(config)
    seen = {name: settings[name] for name in ("model", "train", "optim", "parallel", "callbacks", "loss")}
    seen["train"] = {name: value for name, value in seen["train"].items() if name not in ("steps", "device", "compile")}
    seen["plugins"] = config.plugins.code
    seen["data"] = {"mask_documents": config.data.mask_documents}
    program = [_source_sha256(), _torch_version(), sys.version]
    return sha256_bytes(canonical_json([seen, device, list(loads), program]).encode())[:32]


@cache
def _source_sha256() -> str:
    root = Path(ingot.__file__).parent
    return sha256_bytes(b"".join(path.read_bytes() for path in sorted(root.rglob("*.py"))))


def _torch_version() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""
