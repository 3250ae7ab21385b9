"""The process that writes one rank's checkpoint files while the rank trains.

The program `python -m ingot.trainer.checkpoint.writer` has no torch and no part in collectives. The rank sends it
requests, and it answers each with a value or an error (message.py). It reads the tensors from the memory of the rank's
snapshot. It ends at once when its rank ends, by the kernel's hand and by the closed pipe, so that nothing writes into a
run whose rank is gone; a kill at any moment leaves an unfinished folder that no reader takes for a checkpoint.
"""

import contextlib
import itertools
import json
import mmap
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from ingot.errors import ResourceError
from ingot.machine.processes import die_with_parent, signals_blocked
from ingot.schema.checkpoint import LedgerSegment, segments_of
from ingot.schema.run_folder import RunFolder
from ingot.trainer.checkpoint.files import CheckpointFacts, CheckpointFiles, FileContents, PublishedSave, facts_of
from ingot.trainer.checkpoint.message import as_error, as_value, pack_json, read_message, unpack_json
from ingot.trainer.checkpoint.part import RankBlocks
from ingot.trainer.checkpoint.places import keep_names, kept_names
from ingot.trainer.checkpoint.tensor_file import FilePart

LOST_WRITER = "E-CKPT-WRITER"
_LENGTH_BYTES = 8
# A writer that has not answered after this time hangs. Ten minutes are for other programs that keep the disk busy.
_PATIENCE_SECONDS = 600.0
_SLOWEST_BYTES_PER_SECOND = 10e6
_END_SECONDS = 5.0  # after a SIGKILL; a process that waits for a dead disk ends later, or never
_BLOCKED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class WriterProcess:
    """The writer process of this rank. A process that has ended is replaced by a new one at the next save.

    Every method after `begin` raises the error that the writer answers, or ResourceError if the writer ended or hangs.
    """

    def __init__(self, folder: RunFolder, rank: int, snapshot_fds: Sequence[int]):
        self._folder, self._rank, self._fds = folder, rank, tuple(snapshot_fds)
        self._process: subprocess.Popen[bytes] | None = None
        self._patience = _PATIENCE_SECONDS

    @property
    def pid(self) -> int | None:
        """The id of the process; None before the first save."""
        return self._process.pid if self._process else None

    def begin(self, snapshot_bytes: int = 0) -> None:
        """Start the process unless it runs. Called in the main thread, before a save of `snapshot_bytes`.

        Raises ResourceError if the system starts no process.
        """
        self._patience = _PATIENCE_SECONDS + snapshot_bytes / _SLOWEST_BYTES_PER_SECOND
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        # A scheduler may signal every process of a job. The rank decides when its writer ends: by closing the pipe.
        module, root = "ingot.trainer.checkpoint.writer", str(self._folder.root.absolute())
        names = kept_names(self._folder.root)
        try:
            with signals_blocked(_BLOCKED):
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", module, root, str(os.getpid()), *names],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    pass_fds=self._fds,
                    start_new_session=True,  # Ctrl-C in a terminal is for the launcher, which lets the ranks save
                )
        except OSError as error:
            raise _writer_error(self._rank, f"could not be started ({error.strerror})") from None

    def make_folder(self, facts: CheckpointFacts, bytes_by_rank: Sequence[int]) -> None:
        """See CheckpointFiles.make_folder."""
        self._ask(_about("make_folder", facts) | {"bytes": list(bytes_by_rank)})

    def write(self, facts: CheckpointFacts, contents: FileContents, fd: int, size: int, begin: int) -> bytes:
        """Write this rank's file from the snapshot `fd`, which has `size` bytes, with tensors from `begin` on. Returns
        the bytes of its RankBlocks."""
        request = {"rank": self._rank, "contents": contents, "fd": fd, "size": size, "begin": begin}
        return self._ask(_about("write", facts) | request)

    def finish(
        self,
        facts: CheckpointFacts,
        parts: Sequence[bytes],
        ledger: Sequence[LedgerSegment],
        segment: bytes,
        keep: int,
        keep_every: int,
    ) -> PublishedSave:
        """See CheckpointFiles.finish. parts: the bytes of the RankBlocks of all ranks."""
        request = _about("finish", facts) | {"facts": facts, "ledger": ledger}
        request |= {"keep": keep, "keep_every": keep_every}
        return PublishedSave(**unpack_json(self._ask(request, segment, *parts)))

    def _ask(self, request: dict[str, Any], *more: bytes) -> bytes:
        process, answers = self._process, list[bytes]()
        assert process is not None and process.stdin is not None and process.stdout is not None
        to, back = process.stdin, process.stdout

        def exchange() -> None:
            with contextlib.suppress(OSError, ValueError):  # ValueError: the pipe was closed, because the run ends
                _send(to, pack_json(request | {"more": len(more)}), *more)
                answers.extend(itertools.islice(_frames(back), 1))

        # A thread of its own, because a pipe has no timeout. If the writer hangs, it ends with the writer.
        exchanging = threading.Thread(target=exchange, name="checkpoint writer", daemon=True)
        exchanging.start()
        exchanging.join(self._patience)
        if answers:
            return read_message(answers[0], bytes)
        how = (
            f"did not answer within {self._patience:,.0f} s" if exchanging.is_alive() else f"ended ({_ending(process)})"
        )
        self.close()
        raise _writer_error(self._rank, f"{how}, and step {request['step']} is not saved")

    def close(self) -> None:
        """End the process, even in the middle of a write."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
            for pipe in (process.stdin, process.stdout):  # those of a process that hangs have a reader, and would block
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()


def _about(do: str, facts: CheckpointFacts) -> dict[str, Any]:
    return {"do": do, "kind": facts.kind, "step": facts.step, "epoch": facts.epoch}


def _writer_error(rank: int, what: str) -> ResourceError:
    return ResourceError(
        LOST_WRITER,
        f"the process that writes the checkpoints of rank {rank} {what}",
        rule="a checkpoint is saved completely or not at all; the last checkpoint is unchanged",
        fix="none is needed: the next save starts another process. If it happens again, look for a lack of memory or a "
        "disk that hangs, or set checkpoint.mode = 'sync'",
        rank=rank,
    )


def _ending(process: subprocess.Popen[bytes]) -> str:
    with contextlib.suppress(subprocess.TimeoutExpired):
        code = process.wait(_END_SECONDS)
        return f"signal {-code}" if code < 0 else f"exit code {code}"
    return "its pipe is closed"


def _send(pipe: IO[bytes], *frames: bytes) -> None:
    for frame in frames:
        pipe.write(len(frame).to_bytes(_LENGTH_BYTES, "little"))
        pipe.write(frame)
    pipe.flush()


def _frames(pipe: IO[bytes]) -> Iterator[bytes]:
    while len(length := pipe.read(_LENGTH_BYTES)) == _LENGTH_BYTES:
        size = int.from_bytes(length, "little")
        frame = pipe.read(size)
        if len(frame) < size:
            return
        yield frame


# -- the process --


def main(root: str, rank_pid: str, *names: str) -> None:
    """Answer the requests on standard input until it is closed. rank_pid: the process that started this one; this one
    ends with it. names: of the run on the disks.
    """
    die_with_parent()  # a stopped process cannot see that its pipe was closed
    if os.getppid() != int(rank_pid):
        return  # the rank ended before that took effect
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nothing else may write between the answers
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_until_the_rank_is_gone, args=(requests,), daemon=True).start()
    folder = RunFolder(Path(root))
    keep_names(folder.root, names)
    while True:
        request = json.loads(requests.get())
        more = [requests.get() for _ in range(request["more"])]
        try:
            answer = as_value(_answer(folder, request, more))
        except Exception as error:
            answer = as_error(error)
        _send(answers, answer)


def _read_until_the_rank_is_gone(requests: "queue.SimpleQueue[bytes]") -> None:
    for frame in _frames(sys.stdin.buffer):
        requests.put(frame)
    os._exit(0)


def _answer(folder: RunFolder, request: dict[str, Any], more: list[bytes]) -> bytes:
    files = CheckpointFiles(folder.of(request["kind"]), request["step"], request["epoch"])
    if request["do"] == "make_folder":
        files.make_folder(request["bytes"])
        return b""
    if request["do"] == "write":
        contents = _contents(request["contents"])
        size = request["size"]  # 0 on a rank that owns no weights
        image = memoryview(mmap.mmap(request["fd"], size, prot=mmap.PROT_READ) if size else b"")[request["begin"] :]
        return files.write(request["rank"], contents, _cut(image, contents.parts)).to_bytes()
    facts, ledger = facts_of(request["facts"]), segments_of(request["ledger"])
    segment, *parts = more
    rules = request["keep"], request["keep_every"]
    return pack_json(files.finish(facts, list(map(RankBlocks.from_bytes, parts)), ledger, segment, *rules))


def _contents(values: dict[str, Any]) -> FileContents:
    return FileContents(
        tuple(FilePart(one["key"], one["dtype"], tuple(one["shape"])) for one in values["parts"]),
        tuple((name, tuple(offsets), tuple(sizes)) for name, offsets, sizes in values["written"]),
        {name: (dtype, tuple(shape)) for name, (dtype, shape) in values["kinds"].items()},
    )


def _cut(image: memoryview, parts: Sequence[FilePart]) -> Iterator[memoryview]:
    begin = 0
    for part in parts:
        yield image[begin : begin + part.bytes]
        begin += part.bytes


if __name__ == "__main__":
    main(*sys.argv[1:])
