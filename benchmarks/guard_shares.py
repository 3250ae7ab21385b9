"""The share of a batch that has to be bad until the guard sees it in its step: whole batches down to one document.

A small model is trained on real tokens, as in guard.py. Once steps are judged by their size, some have their batch in
its spoiled forms too, which are computed and judged with the figures of the default and change nothing; so each form is
planted in 20 states of the run. A sequence of the batch is one document of as many tokens:

- repeated: eight tokens of the sequence, again and again. random: tokens without a rule. Both in 1, 2, 4, 8 or all of
  the 16 sequences (--shares).
- shuffled: the targets are the tokens of others; in so many sequences: a quarter of them is a micro-batch of one of two
  ranks that do two of them in a step, a half the part of a rank.
- rate: fifty times the learning rate in the update, judged in the step after it; then the state is put back.

The healthy batch of each step is judged as well: what is found in it is a false verdict. Then the filter of windows
(data.filter.max_repeated) looks at the same sequences, and at all healthy ones of these steps.

    ingot quickstart --dir demo
    python benchmarks/guard_shares.py --tokens demo/data/tokens/train [--trials 20] [--every 10]

With --checkpoint RUN/checkpoints/STEP, of a run of guard_defaults.py on one source, the first state is that one.
"""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from guard import run_of
from record import record
from torch import Tensor

from ingot.drill.planted import with_tokens
from ingot.schema.guard import Guard
from ingot.schema.load_filter import LoadFilter
from ingot.trainer.build import build_parts
from ingot.trainer.checkpoint.load import load_checkpoint
from ingot.trainer.checkpoint.manifest import verify_checkpoint
from ingot.trainer.guard.step_judge import finding
from ingot.trainer.loader.loader import Batch, Loader
from ingot.trainer.loader.window_filter import repeated_share
from ingot.trainer.optim.gradients import gradient_norm_and_loss
from ingot.trainer.optim.schedule import learning_rate
from ingot.trainer.parts import StepParts
from ingot.trainer.step import forward_backward, train_step

KINDS = ("repeated", "random", "shuffled")
STEPS, FACTOR, REPEATED, MAX_REPEATED = 600, 50, 8, 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=Path, required=True, help="a token folder of real text")
    parser.add_argument("--seed", type=int, default=21, help="of the run")
    parser.add_argument("--checkpoint", type=Path, help="a checkpoint to begin from")
    parser.add_argument("--trials", type=int, default=20, help="steps with spoiled forms")
    parser.add_argument("--every", type=int, default=10, help="one of so many steps has them")
    parser.add_argument("--shares", default="1,2,4,8,16", help="sequences that are spoiled")
    args = parser.parse_args()
    shares = [int(share) for share in args.shares.split(",")]
    found = planted(args.tokens.resolve(), args.seed, args.checkpoint, args.trials, args.every, shares)
    for name, one in found.items():
        print(name, one)
    record("guard_shares", found, ["torch"])


def planted(
    tokens: Path, seed: int, checkpoint: Path | None, trials: int, every: int, shares: Sequence[int]
) -> dict[str, object]:
    """Train, and return how often each form was found in its step, with the smallest and largest deviations."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    run = replace(run_of(tokens, STEPS, seed), guard=Guard())
    parts, rate = (
        build_parts(run, torch.device("cpu"), Path()),
        learning_rate(run.train.steps, run.optim.lr, run.schedule),
    )
    trial, begin = _Trials(parts, run.model.vocab_size, shares), 0
    if checkpoint is not None:
        manifest = verify_checkpoint(checkpoint)
        load_checkpoint(checkpoint, manifest, parts.state, lambda size: None)
        parts.model.publish()
        trial.judge.restore(manifest.guard.losses, manifest.guard.norms)
        begin = manifest.step
    first = max(begin, run.settled_after + Guard.ready)
    last = first + every * trials
    assert last < STEPS
    with Loader(
        tokens,
        seq_len=run.train.seq_len,
        global_batch=run.train.global_batch,
        micro_batch=run.train.micro_batch,
        seed=seed,
        first_step=begin + 1,
        last_step=last + 1,
    ) as batches:
        waiting = None  # the state and the batch of before the update with the high rate
        for batch in batches:
            if waiting is not None:
                trial.after_rate(batch, *waiting)
                waiting = None
            if first < batch.step <= last and (batch.step - first) % every == 0:
                trial.plant(batch)
                waiting = batch, rate(batch.step)
            train_step(parts, batch, rate(batch.step))
    dist.destroy_process_group()
    return trial.figures()


class _Trials:
    """The trials on the state of a run, which is the same after each of them."""

    def __init__(self, parts: StepParts, vocab_size: int, shares: Sequence[int]):
        assert parts.step_judge is not None
        self.parts, self.vocab_size, self.shares, self.judge = parts, vocab_size, shares, parts.step_judge
        self.sigmas: dict[str, list[tuple[bool, float, float]]] = defaultdict(list)
        self.repeats: dict[str, list[float]] = defaultdict(list)
        self._before: list[Tensor] = []

    def plant(self, batch: Batch) -> None:
        """Judge the batch, and its spoiled forms. Keep the state for the rate."""
        self._judge("healthy", batch)
        self.repeats["healthy"] += repeated_share(_tokens(batch).numpy()[0], LoadFilter.ngram).tolist()
        for kind in KINDS:
            spoiled = batch
            for sequences in self.shares:
                spoiled = _spoiled(batch, kind, sequences, self.vocab_size)
                self._judge(f"{kind}, {sequences} of {batch.inputs.shape[1]} sequences", spoiled)
            self.repeats[kind] += repeated_share(_tokens(spoiled).numpy()[0], LoadFilter.ngram).tolist()
        self._before = [tensor.clone() for tensor in self._state()]

    def after_rate(self, batch: Batch, before: Batch, rate: float) -> None:
        """Judge `batch` after an update with `before` at a high rate, in place of the one that was made; undo it."""
        now = [tensor.clone() for tensor in self._state()]
        _copy(self._before, self._state())
        self.parts.model.publish()
        _gradient(self.parts, before)
        limit = self.parts.config.optim.clip_norm
        norm = _norm_and_loss(self.parts, torch.zeros(()))[0]
        self.parts.optimizer.step(FACTOR * rate, scale=(limit / norm).clamp(max=1.0).float())
        self.parts.model.publish()
        self._judge("rate", batch)
        _copy(now, self._state())
        self.parts.model.publish()

    def figures(self) -> dict[str, object]:
        """Return, by form, how often it was found, and the smallest and largest deviations of loss and norm."""
        found: dict[str, object] = {}
        for name, rows in self.sigmas.items():
            sizes = [[round(one(row[at] for row in rows), 1) for one in (min, max)] for at in (1, 2)]
            found[name] = {"found": sum(row[0] for row in rows), "of": len(rows), "loss": sizes[0], "norm": sizes[1]}
        over = {kind: [sum(s > MAX_REPEATED for s in each), len(each)] for kind, each in self.repeats.items()}
        largest = {kind: round(max(each), 3) for kind, each in self.repeats.items()}
        return found | {
            "left out by data.filter.max_repeated = 0.5": over,
            "largest share of repeated 8-grams": largest,
        }

    def _judge(self, name: str, batch: Batch) -> None:
        norm, loss = _norm_and_loss(self.parts, _gradient(self.parts, batch))
        judged = self.judge.judge(loss, norm).tolist()
        self.sigmas[name].append((finding(tuple(judged)) is not None, judged[1], judged[2]))
        self.parts.optimizer.step(0.0, found_inf=torch.ones(()))  # it frees the gradients, and changes nothing
        self.parts.model.publish()

    def _state(self) -> list[Tensor]:
        moments = [tensor for kinds in self.parts.optimizer.moments().values() for tensor in kinds.values()]
        return [*(shard.value for shard in self.parts.model.shards), *moments]


def _gradient(parts: StepParts, batch: Batch) -> Tensor:
    loss = forward_backward(parts, batch)
    parts.model.reduce()
    return loss


def _norm_and_loss(parts: StepParts, loss: Tensor) -> tuple[Tensor, Tensor]:
    return gradient_norm_and_loss(parts.model.shards, loss, parts.loss_share)


@torch.no_grad()
def _copy(values: list[Tensor], into: list[Tensor]) -> None:
    for value, tensor in zip(values, into, strict=True):
        tensor.copy_(value)


def _tokens(batch: Batch) -> Tensor:
    return torch.cat((batch.inputs, batch.targets[..., -1:]), dim=-1)


def _spoiled(batch: Batch, kind: str, sequences: int, vocab_size: int) -> Batch:
    """Return the batch with its first `sequences` spoiled."""
    random, tokens = torch.Generator().manual_seed(batch.step), _tokens(batch)
    own = tokens[:, :sequences]
    if kind == "shuffled":
        targets = batch.targets.clone()
        part = targets[:, :sequences]
        mixed = part.flatten()[torch.randperm(part.numel(), generator=random)]
        targets[:, :sequences] = mixed.reshape(part.shape)
        return replace(batch, targets=targets)
    if kind == "repeated":
        own = own[..., torch.arange(own.shape[-1]) % REPEATED]
    else:
        own = torch.randint(vocab_size, own.shape, generator=random)
    return with_tokens(batch, torch.cat((own, tokens[:, sequences:]), dim=1))


if __name__ == "__main__":
    main()
