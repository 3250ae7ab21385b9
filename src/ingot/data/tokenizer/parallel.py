"""Encoding a stream of documents, in order, on one or several processes."""

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import numpy as np

from ingot.data.tokenizer.encoder import Encoder, well_formed
from ingot.data.workers import deaf_to_ctrl_c
from ingot.errors import DataError

_BATCH_CHARACTERS = 1 << 20  # sent to a worker at once
_AHEAD = 2  # batches per worker that wait or run, so memory stays bounded

_encoder: Encoder  # of a worker process


def encode_documents(
    documents: Iterable[tuple[str, dict]], encoder: Encoder, workers: int
) -> Iterator[tuple[str, str, np.ndarray, int]]:
    """(source, id, token ids uint32, UTF-8 bytes of the text) per document, in the order of `documents`.

    The result is the same for any number of workers. Raises DataError when a worker process was killed. Workers end
    with this process, however it ends.
    """
    if workers <= 1:
        for batch in _batches(documents):
            yield from _with_names(batch, _encode_texts(encoder, [text for _, _, text in batch]))
        return
    # Spawned, not forked: the caller may have threads (torch, tokenizers), and a fork would copy their locks.
    context = multiprocessing.get_context("spawn")
    waiting: deque[tuple[list, Future]] = deque()
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=(encoder,))
    try:
        for batch in _batches(documents):
            with deaf_to_ctrl_c():  # it goes to the whole group; this process ends its workers
                waiting.append((batch, pool.submit(_encode_in_worker, [text for _, _, text in batch])))
            if len(waiting) >= workers * _AHEAD:
                done, future = waiting.popleft()
                yield from _with_names(done, future.result())
        for done, future in waiting:
            yield from _with_names(done, future.result())
        pool.shutdown()  # waits: a worker that is slow to start still reads the tokenizer's file
    except BrokenProcessPool:
        raise DataError(
            "a tokenizer process died (killed, or out of memory)",
            rule="every document is encoded exactly once, so the build stops; nothing was written",
            fix="run the same command again, with fewer --workers if memory is short",
        ) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _batches(documents: Iterable[tuple[str, dict]]) -> Iterator[list[tuple[str, str, str]]]:
    batch, characters = [], 0
    for source, document in documents:
        batch.append((source, document["id"], well_formed(document["text"])))
        characters += len(document["text"])
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _with_names(batch, encoded) -> Iterator[tuple[str, str, np.ndarray, int]]:
    for (source, identity, _), (ids, size) in zip(batch, encoded, strict=True):
        yield source, identity, ids, size


def _encode_texts(encoder: Encoder, texts: list[str]) -> list[tuple[np.ndarray, int]]:
    sizes = [len(text.encode()) for text in texts]
    return list(zip(encoder.encode_batch(texts), sizes, strict=True))


def _start_worker(encoder: Encoder) -> None:
    global _encoder
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _encoder = encoder


def _end_with_parent() -> None:
    # A pool's worker waits for work for ever, also when its parent was killed.
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
    os._exit(1)


def _encode_in_worker(texts: list[str]) -> list[tuple[np.ndarray, int]]:
    return _encode_texts(_encoder, texts)
