"""The process that evaluates a save of a run while the run trains. The launcher starts it (launch/evaluations.py):

    python -m ingot.trainer.background_eval.process RUN SAVE PID RANKS TOKENS SECONDS

PID: the launcher, with which this process ends. RANKS: of the run on this machine, whose GPUs are theirs. TOKENS: of
held-out text, at most; 0: they are to be chosen, for an evaluation every SECONDS (size.py). Standard output gets a JSON
object per line: an event of each result, at last {"reason": ...}, "" if all went well. If the save was removed before
it was in memory: {"gone": true}.
"""

import contextlib
import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from ingot.errors import IngotError
from ingot.machine.facts import host_memory
from ingot.machine.processes import die_with_parent
from ingot.schema import events
from ingot.schema.evaluate import BackgroundEvaluation
from ingot.schema.run import RunConfig
from ingot.schema.run_folder import RunFolder
from ingot.theory.rules import load_run
from ingot.trainer.heldout import data_path

REASON, GONE = "reason", "gone"
_OOM_SCORE = Path("/proc/self/oom_score_adj")
_AUTOGROUP = Path("/proc/self/autogroup")  # sched(7), "The autogroup feature"
Emit = Callable[..., None]  # (kind of an event, its fields)


def main(root: str, save: str, launcher: str, ranks: str, tokens: str, seconds: str) -> None:
    """Evaluate the save, within the limits of the run file."""
    die_with_parent()
    if os.getppid() != int(launcher):
        return  # the launcher ended before that took effect
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nothing else may write between the results

    def write(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        folder = RunFolder(Path(root))
        config = load_run(folder.config)
        limit = keep_limits(config.evaluate.background)
        heldout = int(tokens), float(seconds)
        _evaluate(config, Path(save), int(ranks), heldout, lambda kind, **facts: write({"kind": kind, **facts}))
        write({REASON: ""})
    except Exception as error:
        traceback.print_exc()
        if not Path(save).is_dir():
            write({GONE: True})
        elif isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            write({REASON: f"it ran out of memory: its limit is {limit / 2**30:.2f} GiB (memory_bytes)"})
        else:
            found = error.found if isinstance(error, IngotError) else f"{type(error).__name__}: {error}"
            write({REASON: found.strip().partition("\n")[0][:500]})


def keep_limits(settings: BackgroundEvaluation) -> int:
    """Take the claims to cores and memory that the settings allow, before torch is imported. Returns the limit of
    memory in bytes."""
    os.nice(settings.nice)
    # Where the kernel makes a group of each session, and shares the cores out by group, niceness counts inside of it.
    with contextlib.suppress(OSError):
        _AUTOGROUP.write_text(str(settings.nice))
    with contextlib.suppress(OSError):  # a machine without /proc
        _OOM_SCORE.write_text("1000")  # the kernel kills this process before a rank
    # A thread of a library that has its own pool counts, too.
    os.environ.update(
        dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(settings.threads))
    )
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    limit = settings.memory_bytes or host_memory()[1] // 2
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return limit


def _evaluate(config: RunConfig, save: Path, ranks: int, heldout: tuple[int, float], emit: Emit) -> None:
    import torch

    from ingot.trainer.mesh.start import use_tf32
    from ingot.trainer.trained import evaluate_trained, load_trained, samples_of_run

    settings = config.evaluate.background
    torch.set_num_threads(settings.threads)
    device, number = device_of(settings.device, config.train.device, ranks)
    use_tf32(config.train.tf32 and device == "cuda")
    trained = load_trained(save, device, number)
    tokens, interval_seconds = heldout
    if config.data.heldout and not tokens:
        from ingot.trainer.background_eval.size import choose_size

        size = choose_size(trained, interval_seconds)
        emit(events.EVALUATION_SIZED, **size.facts())
        tokens = size.tokens
    began = time.monotonic()

    def seconds() -> float:
        nonlocal began
        before, began = began, time.monotonic()
        return round(began - before, 6)

    if config.data.heldout:
        emit(events.EVALUATION, **evaluate_trained(trained, max_tokens=tokens).facts(), seconds=seconds())
    for prompt, text in samples_of_run(trained):
        emit(events.SAMPLE, prompt=prompt, text=text)
    seconds()
    if settings.tasks:
        from ingot.trainer.background_eval.scores import score_tasks

        folder = data_path(trained.folder, settings.task_folder) if settings.task_folder else None
        scores = score_tasks(trained, settings.tasks, folder, settings.task_examples)
        emit(events.TASK_SCORES, **scores.facts(), seconds=seconds())


def device_of(
    wanted: str, of_run: Literal["auto", "cpu", "cuda"], ranks: int
) -> tuple[Literal["auto", "cpu", "cuda"], int]:
    """Return the device of an evaluation and the number of its GPU. wanted: evaluate.background.device. of_run:
    train.device. ranks: of the run on this machine, which use its first GPUs."""
    import torch

    if wanted.startswith("cuda:"):
        return "cuda", int(wanted.removeprefix("cuda:"))
    spare = torch.cuda.is_available() and torch.cuda.device_count() > ranks
    return ("cuda", ranks) if wanted == "auto" and of_run != "cpu" and spare else ("cpu", 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
