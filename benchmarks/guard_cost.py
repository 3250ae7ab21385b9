"""The CPU seconds of all that [guard] adds at its defaults, relative to a training step, on two copies of a model.

In every round a rank trains a step, and does what each guard does once: judges the step; looks at the range of its
gradient and at its alerts; hashes a sample of the rank's own gradients, which a step does while it reduces them; hashes
the state and compares it; and, as before a save, hashes it, compares it, hashes it again after the copy, and scores the
held-out batch. Each is counted as often as a run with the defaults does it: the judgment and the sample in each step, a
log line in ten steps, the range in one of `precision_every`, hashes of the state in one of `hash_every`. In
an hour, there is one full save with its batch, and five of the weights alone: an hour is as many steps as fit into it
by their CPU seconds. The sum of the medians is divided by the median step. A full save every 100 steps is given
besides, because `sanity_every` is the shortest interval of the batch.

    python benchmarks/guard_cost.py [--rounds 40] [--models tiny,25m]
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from intervals import ratio_in_percent
from record import record
from state_hashes import RANKS, model, ranks

from ingot.plugins.callback import StepNumbers
from ingot.schema.guard import Guard
from ingot.schema.parallel import Parallel
from ingot.schema.run import Data, RunConfig, Train
from ingot.theory.params import count_parameters
from ingot.trainer.build import build_parts
from ingot.trainer.evaluate import sanity_loss
from ingot.trainer.guard.alerts import AlertWatch
from ingot.trainer.guard.gradient_range import GradientRange
from ingot.trainer.guard.sanity import SANITY_ROWS
from ingot.trainer.heldout import Heldout, SourceText
from ingot.trainer.integrity.samples import GradientSamples
from ingot.trainer.integrity.watch import StateHashes
from ingot.trainer.step import train_step

HOUR, SAVES_AN_HOUR, FULL_AN_HOUR, LINE = 3600, 6, 1, 10
WARM_UP = 5  # the first steps allocate
PARTS = ("judgment", "alerts", "range", "samples", "check", "save", "batch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--models", default="tiny,25m", help="models, as tiny,25m (default: both)")
    args = parser.parse_args()
    figures = {}
    for name in args.models.split(","):
        found = ranks(lambda rank, name=name: measure(rank, name, args.rounds))
        figures[name] = shares({part: [s for rank in found for s in rank[part]] for part in ("step", *PARTS)})
        figures[name]["parameters"] = count_parameters(model(name)[0])
        print(name, figures[name], flush=True)
    record("guard_cost", figures, ["torch"])


def shares(seconds: dict[str, list[float]]) -> dict[str, object]:
    """Return the CPU seconds of each event, and the shares of a step at the intervals of the defaults."""
    guard, steps = Guard(), seconds["step"]
    hourly = [
        (SAVES_AN_HOUR * save + FULL_AN_HOUR * batch) * step / HOUR
        for save, batch, step in zip(seconds["save"], seconds["batch"], steps, strict=True)
    ]
    often = [(s + b) / guard.sanity_every for s, b in zip(seconds["save"], seconds["batch"], strict=True)]
    judged = [
        [one / every for one in seconds[part]]
        for part, every in (("judgment", 1), ("alerts", LINE), ("range", guard.precision_every))
    ]
    hashes = [
        check / guard.hash_every + sample for check, sample in zip(seconds["check"], seconds["samples"], strict=True)
    ]
    return {
        "CPU seconds": {part: round(statistics.median(each), 6) for part, each in seconds.items()},
        "steps and alerts": ratio_in_percent(judged, steps),
        "hashes": ratio_in_percent([hashes], steps),
        "saves, hourly and every ten minutes": ratio_in_percent([hourly], steps),
        "all": ratio_in_percent([*judged, hashes, hourly], steps),
        "all, with a full save every 100 steps": ratio_in_percent([*judged, hashes, often], steps),
    }


class TimedSamples(GradientSamples):
    """Samples of the gradients. seconds: the CPU time that they took in the steps so far."""

    seconds = 0.0

    def take(self, number: int, gradients: torch.Tensor) -> None:
        began = time.process_time()
        super().take(number, gradients)
        self.seconds += time.process_time() - began


def measure(rank: int, name: str, rounds: int) -> dict[str, list[float]]:
    """Return the CPU seconds of steps, and of what each guard does once, on this rank."""
    torch.set_num_threads(1)
    arch, seq_len, batch = model(name)
    own = batch // RANKS
    run = RunConfig(
        name=name,
        model=arch,
        data=Data(tokens="made up"),
        train=Train(steps=10**6, seq_len=seq_len, global_batch=batch, micro_batch=own, precision="fp32"),
        parallel=Parallel(dp_shard=1, dp_replicate=RANKS),
    )
    parts = build_parts(run, torch.device("cpu"), Path())
    judge, hashes = parts.step_judge, StateHashes(parts.state, parts.model.data.published(), parts.mesh, 1)
    assert judge is not None
    samples = TimedSamples(parts.model.data, torch.device("cpu"))
    shards = parts.model.shards
    measured = GradientRange(shards, arch.num_layers, torch.bfloat16, 1, tied=arch.tied_embeddings)
    watch = AlertWatch(run, shards, measured, None, lambda *_, **__: None, is_first=rank == 0)
    place = SimpleNamespace(device=torch.device("cpu"))
    trainer = SimpleNamespace(**vars(parts) | {"heldout": heldout_rows(arch.vocab_size, seq_len), "place": place})
    seconds: dict[str, list[float]] = {part: [] for part in ("step", *PARTS)}
    for step in range(1, rounds + WARM_UP + 1):
        ids = torch.randint(0, arch.vocab_size, (1, own, seq_len + 1))
        micro_batches = SimpleNamespace(step=step, inputs=ids[..., :-1], targets=ids[..., 1:], document_ids=None)
        results, sampled = [], samples.seconds
        spent = {"step": timed(lambda: results.append(train_step(parts, micro_batches, 1e-4)))}  # noqa: B023
        (result,) = results
        sampled = samples.seconds - sampled
        spent["step"] -= sampled
        spent["samples"] = sampled + timed(lambda: samples.reduced(step, result.loss))  # noqa: B023
        loss, norm = float(result.loss), float(result.grad_norm)
        line = [StepNumbers(LINE * step + i, loss, norm, skipped=False) for i in range(LINE)]
        spent["judgment"] = timed(lambda: judge_step(judge, result))  # noqa: B023
        spent["alerts"] = timed(lambda: watch.line(line, 1e-4, np.array([watch.unchanged(line, 1e-4)])))  # noqa: B023
        for shard in shards:
            shard.grad = torch.ones_like(shard.value)
        spent["range"] = timed(lambda: measured.look(step))  # noqa: B023
        spent["check"] = timed(lambda: check_hashes(hashes, step))  # noqa: B023
        spent["save"] = timed(lambda: save_hashes(hashes, step))  # noqa: B023
        spent["batch"] = timed(lambda: sanity_loss(trainer))
        if step > WARM_UP:
            for part, each in spent.items():
                seconds[part].append(each)
    return seconds


def timed(function: Callable[[], object]) -> float:
    """Return the CPU seconds of all threads of this process that a call takes."""
    began = time.process_time()
    function()
    return time.process_time() - began


def judge_step(judge, result) -> None:
    judged = judge.judge(result.loss, result.grad_norm)
    judge.add(result.loss, result.grad_norm, judged[0] > 0)


def check_hashes(hashes: StateHashes, step: int) -> None:
    hashes.after_update(step)
    hashes.before_update(step + 1)
    hashes.compare()
    assert not hashes.read()


def save_hashes(hashes: StateHashes, step: int) -> None:
    hashes.before_save(step)
    hashes.compare()
    assert not hashes.read()
    hashes.require_unchanged()
    hashes.end_save()


def heldout_rows(vocab_size: int, seq_len: int) -> Heldout:
    """Return held-out text of just the rows of the batch."""
    ids = np.random.default_rng(0).integers(1, vocab_size, SANITY_ROWS * seq_len)
    text = SourceText("made up", ids, 4 * len(ids))
    return Heldout.prepare([text], np.ones(vocab_size), seq_len=seq_len, eot_id=0, mask_documents=False)


if __name__ == "__main__":
    main()
