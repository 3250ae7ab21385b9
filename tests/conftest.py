"""What every test may use: real data when it is at hand, and ranks forked from this process."""

import multiprocessing
import os
import time
import traceback
from pathlib import Path

import pytest

# One thread per process: forked ranks share two cores, and results stay the same on every machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def test_data() -> Path:
    """Real crawl files and text with ground truth; set INGOT_TEST_DATA to their folder."""
    folder = os.environ.get("INGOT_TEST_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("needs real data: set INGOT_TEST_DATA to its folder")
    return Path(folder)


def _rank_main(function, rank, world, store, arguments, pipe):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    try:
        from datetime import timedelta

        dist.init_process_group(
            "gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timedelta(seconds=60)
        )
        result = function(rank, world, *arguments)
        dist.barrier()
        pipe.send((True, result))
        dist.destroy_process_group()
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        pipe.close()
        os._exit(0)  # no atexit handlers of the parent's pytest


@pytest.fixture
def fork_ranks(tmp_path):
    """`fork_ranks(function, world, *arguments)` runs `function(rank, world, *arguments)` on `world` gloo ranks.

    The ranks are forked from this process, which has imported torch: 0.1 s instead of 7 s. Returns their results
    (picklable) by rank; the first rank's traceback becomes the failure. Closures work.
    """
    import torch.distributed  # noqa: F401  (imported before the fork, so that the ranks have it)

    runs = iter(range(10_000))

    def run(function, world, *arguments, timeout=120):
        context = multiprocessing.get_context("fork")
        store = str(tmp_path / f"ranks-{next(runs)}")
        processes, pipes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank_main, args=(function, rank, world, store, arguments, theirs))
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        deadline = time.monotonic() + timeout
        results, failure = [], None
        for rank, pipe in enumerate(pipes):
            try:
                left = max(deadline - time.monotonic(), 0)
                ok, value = pipe.recv() if pipe.poll(left) else (False, f"no answer within {timeout} s")
            except EOFError:
                ok, value = False, "died without a word"
            if not ok:
                failure = f"rank {rank} of {world}: {value}"
                break
            results.append(value)
        for process in processes:
            if failure:
                process.kill()
            process.join(10)
        if failure:
            pytest.fail(failure, pytrace=False)
        return results

    return run
