"""A training loop of one's own, with everything that protects a run of `ingot train`: kill it, and start it again.

    python examples/own_loop.py run.toml                                  # a run with one rank
    torchrun --nproc_per_node 2 examples/own_loop.py run.toml             # a run with two

The numbers are those of `ingot train run.toml`, bit for bit. A third argument names the run folder.
"""

import sys

import ingot


def main(run_file: str, out: str | None = None) -> None:
    """Train the run of `run_file`, or continue it after its newest verified checkpoint."""
    with ingot.Trainer(run_file, out, say=lambda text: print(text, flush=True)) as trainer:
        for batch in trainer.batches():
            trainer.forward_backward(batch)  # or a forward of your own: see trainer.backward
            trainer.optimizer_step(lr=trainer.learning_rate(batch.step))  # reduce, clip, veto, update, judge
            if trainer.should_log and trainer.rank == 0:
                mean = sum(numbers.loss for numbers in trainer.line) / len(trainer.line)
                print(f"mine      step {batch.step}  mean loss since the last line {mean:.4f}")
            if trainer.should_save:
                trainer.save()


if __name__ == "__main__":
    main(*sys.argv[1:])
