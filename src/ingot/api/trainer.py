"""The parts of a run for a training loop of one's own: `ingot.Trainer`. Imports no torch before a run is opened."""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingot.errors import ConfigError, RunFailed, UsageError, require
from ingot.plugins.callback import StepNumbers, Verdict
from ingot.trainer.given import Given, given_callbacks
from ingot.trainer.launch.prepare import RunRequest

if TYPE_CHECKING:
    import torch

    from ingot.trainer.loader.loader import Batch
    from ingot.trainer.loop import RunLoop
    from ingot.trainer.parts import RunParts


class Trainer:
    """A run whose training loop is yours: the model, data, optimizer and checkpoints of `ingot train`, step by step.

    The arguments are those of `train`. The numbers are those of `ingot train` on the same run file, bit for bit, and
    either continues the other's run. Everything that protects a run is in the methods: the lock of the folder, settings
    that need consent, the ledger of samples, the policy's veto and verdict, stop requests, verified checkpoints. A part
    of a step that the loop left out raises RunFailed at the next batch. To leave the loop with `break` saves the last
    completed step, and an exception saves nothing; both times the same program continues. A call that raised halfway,
    like one that ran out of memory, cannot be repeated: gradients would count twice. Every later call raises RunFailed,
    and nothing more is saved.

    One process is one rank: start a program for N ranks with `torchrun --nproc_per_node N`. All methods are collective.
    The first Ctrl-C or SIGTERM makes the loop end after a saved step. Nothing restarts the program.

    Opening raises the errors of `train`, and ConfigError if the run has another number of ranks than there are
    processes. Training raises RunFailed for a loss that cannot be used or a step that is not complete.

        with ingot.Trainer("run.toml", out="runs/mine", say=print) as trainer:
            for batch in trainer.batches():
                loss = trainer.forward_backward(batch)
                trainer.optimizer_step()
                if trainer.should_save:
                    trainer.save()
    """

    def __init__(
        self,
        run_file: str | Path = "run.toml",
        out: str | Path | None = None,
        *,
        overrides: Sequence[str] = (),
        accept: Collection[str] = (),
        fresh: bool = False,
        archive: bool = False,
        until_step: int | None = None,
        callbacks: Iterable[Given] = (),
        say: Callable[[str], None] = lambda text: None,
    ):
        self._given, self._say = given_callbacks(callbacks), say
        self._request = RunRequest(
            Path(run_file),
            Path(out) if out is not None else None,
            overrides=overrides,
            accept=accept,
            fresh=fresh,
            archive=archive,
            until_step=until_step,
            given=self._given,
        )
        self.config, self.run = self._request.written, self._request.folder.root
        self._stack: contextlib.ExitStack | None = None
        self._loop: RunLoop | None = None
        self._ended = False
        self._batch: Batch | None = None  # the batch of the step that is not complete
        self._loss: Any = None
        self._backwards = 0
        self._broken = ""  # the method that raised halfway through a step

    def __enter__(self) -> "Trainer":
        require("torch", "train")
        from ingot.trainer.launch.own_loop import open_run

        with contextlib.ExitStack() as stack:
            self._loop = open_run(self._request, self._given, self._say, stack)
            stack.callback(self._forget)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind, error, trace) -> None:
        stack, self._stack = self._opened(), None
        if kind is not None:
            stack.__exit__(kind, error, trace)
            return
        with stack:
            if self._loop is not None and not self._ended and not self._broken:
                self._loop.stop()
                self._loop.end()

    def _forget(self) -> None:
        """Release the parts, before the process leaves its group."""
        self._loop = self._batch = self._loss = None

    # -- the steps, in the order of their calls --

    def batches(self) -> "Iterator[Batch]":
        """Yield this rank's part of the batch of each step, from the step after the newest checkpoint to the last step,
        `until_step` or a stop request; none if the run is finished. After a roll-back, steps come again.

        `batch.step`; `batch.inputs`, `batch.targets`: int64 [A, B, T], A micro-batches of B sequences, on the device;
        `batch.document_ids`: int32 [A, B, T] on the host, None unless documents are masked. Targets share no memory
        with inputs.
        Between two batches a checkpoint that was due must have been saved; evaluation and the end of the run are done
        here. Raises RunFailed for a step that is not complete.
        """
        self._opened()
        self._require_whole()
        while self._loop is not None and not self._ended:
            batch = self._loop.next_batch()
            if batch is None:
                self._ended = True
                self._loop.end()
                return
            batch = replace(batch, targets=batch.targets.clone())  # the loop may mask targets in place
            self._batch, self._loss, self._backwards = batch, None, 0
            yield batch
            self._require_whole()
            self._require(self._batch is None, "optimizer_step() was not called", "update the weights in every step")
            self._require(not self._loop.save_is_due, "save() was not called", "if trainer.should_save: trainer.save()")
            self._loop.finish_step()

    def forward_backward(self, batch: "Batch") -> "torch.Tensor":
        """Run forward and backward of all micro-batches in any layout. Returns the mean loss of this rank's tokens, in
        nats, float64; zero on ranks without the last pipeline stage. Does not wait for the device.

        Raises RunFailed unless `batch` is the last one that `batches` gave, and after an error that stopped it halfway.
        """
        from ingot.trainer.step import forward_backward

        self._require_batch(batch, self._loss is None)
        with self._uninterrupted("forward_backward()"):
            self._loss = forward_backward(self.parts, batch)
            self._backwards = len(batch.inputs)
        return self._loss

    def backward(self, loss: "torch.Tensor") -> None:
        """Run the backward of one micro-batch after a forward of your own; call it once per micro-batch of the batch.

        loss: the micro-batch's part of the mean loss of this rank's tokens: its sum of nats / `batch.inputs.numel()`.
        The loss scale of fp16 is applied here. Raises ConfigError for pipeline or context parallelism and for experts,
        which need `forward_backward`; RunFailed for more calls than micro-batches.

            documents = batch.document_ids if batch.document_ids is not None else [None] * len(batch.inputs)
            for inputs, targets, ids in zip(batch.inputs, batch.targets, documents):
                trainer.backward(trainer.model(inputs, targets, ids) / batch.inputs.numel())
        """
        import torch

        from ingot.trainer.step import backward

        _ = self.model
        self._require_whole()
        self._require(self._batch is not None, "there is no batch", "call backward() within the loop over batches()")
        count = self.config.accumulation
        self._require(self._backwards < count, f"more than {count} backwards", "call it once per micro-batch")
        with self._uninterrupted("backward()"):
            self._backwards += 1
            backward(self.parts, loss, last=self._backwards == count)
            before = torch.zeros((), dtype=torch.float64, device=loss.device) if self._loss is None else self._loss
            self._loss = before + loss.detach()

    def optimizer_step(self, lr: float | None = None) -> None:
        """Reduce and clip the gradients, update unless the policy vetoes it, and decide how to continue.

        The samples go to the ledger, callbacks are called, and a log line is written if one is due. lr: the learning
        rate, by default that of the run's schedule. Raises RunFailed if the gradients are not complete, or for weights
        that are not worth saving.
        """
        from ingot.trainer.step import update

        batch, loop = self._batch, self._opened_loop()
        self._require_whole()
        complete = batch is not None and self._backwards == self.config.accumulation
        self._require(complete, "the gradients are not complete", "call forward_backward(batch) once before it")
        assert batch is not None
        lr = loop.learning_rate(batch.step) if lr is None else lr
        with self._uninterrupted("optimizer_step()"):
            loop.judge(batch, update(self.parts, batch.step, self._loss, lr))
            self._batch = None

    def save(self) -> None:
        """Save and verify a checkpoint of the step that `optimizer_step` completed, or begin to, with checkpoint.mode =
        "async". Raises RunFailed unless `should_save` or `should_log`: only steps that the policy has judged are saved.
        """
        loop = self._opened_loop()
        self._require_whole()
        judged = self._batch is None and bool(loop.line) and loop.verdict is not Verdict.ROLL_BACK
        self._require(judged or loop.save_is_due, "the step has no log line", "save if should_save or should_log")
        if loop.done > loop.saved:
            loop.save()

    @property
    def should_log(self) -> bool:
        """True if the last step wrote a log line: `line` has its numbers."""
        return bool(self.line)

    @property
    def should_save(self) -> bool:
        """True if the last step has to be saved: by its interval, as the last one, or on a stop request."""
        return self._loop is not None and self._loop.save_is_due

    @property
    def line(self) -> Sequence[StepNumbers]:
        """The numbers of the steps since the previous log line (step, loss, grad_norm, skipped), equal on all ranks;
        empty between lines. Between two lines the numbers stay on the device.
        """
        return self._loop.line if self._loop is not None else ()

    # -- the parts --

    @property
    def step(self) -> int:
        """The last completed step."""
        return self._opened_loop().done

    def learning_rate(self, step: int) -> float:
        """Return the learning rate that the run's schedule has for `step`."""
        return self._opened_loop().learning_rate(step)

    @property
    def model(self) -> Any:
        """The torch module: `model(inputs, targets, ids)` is the sum of nats; with targets None, logits.

        inputs, targets: int64 [B, T]. ids: int32 [B, T] on the host, a micro-batch of `batch.document_ids`, which keeps
        attention inside documents. A run with data.mask_documents needs it: with None, attention crosses documents.

        Raises ConfigError for pipeline or context parallelism, for experts and for loss terms: there the module is a
        part, and `forward_backward` has what belongs to it.
        """
        parallel = self.parts.mesh.parallel
        found = {
            "pipeline stages (parallel.pp)": parallel.pp > 1,
            "parts of sequences (parallel.cp)": parallel.cp > 1,
            "experts": self.config.model.is_moe,
            f"loss terms ([loss]: {', '.join(self.config.loss)})": bool(self.config.loss),
        }
        if parts := [name for name, present in found.items() if present]:
            raise ConfigError(
                "E-LOOP-LAYOUT",
                f"no module computes the loss of a batch alone: the run has {' and '.join(parts)}",
                rule="a forward of one's own needs data and tensor parallelism alone, without experts and loss terms",
                fix="call trainer.forward_backward(batch), which computes the whole loss in every layout",
                parts=parts,
            )
        (stage,) = self.parts.model.stages.values()
        return stage

    @property
    def parts(self) -> "RunParts":
        """All parts of the run on this rank: mesh, model, optimizer, loader, policy, place (trainer/parts.py)."""
        return self._opened_loop().trainer

    @property
    def rank(self) -> int:
        """The rank of this process, from 0."""
        return self.parts.place.rank

    # -- checks --

    def _opened(self) -> contextlib.ExitStack:
        if self._stack is None:
            raise UsageError(
                "E-LOOP-CLOSED",
                "the trainer is not open",
                rule="a trainer is used within its with block, which holds the lock of the run",
                fix='with ingot.Trainer("run.toml") as trainer:',
            )
        return self._stack

    def _opened_loop(self) -> "RunLoop":
        self._opened()
        if self._loop is None:
            raise UsageError(
                "E-LOOP-FINISHED",
                f"{self.run} has no step left to train",
                rule="a run that is finished, or past until_step, is not built",
                fix='raise train.steps, or look at it: ingot.load_model("RUN")',
                run=str(self.run),
            )
        return self._loop

    @contextlib.contextmanager
    def _uninterrupted(self, method: str) -> Iterator[None]:
        """Mark the step as broken if the block raises: its gradients or weights are of a part of it."""
        self._broken = method
        yield
        self._broken = ""

    def _require_whole(self) -> None:
        fix = "let the error end the loop, then run the program again: it continues from the newest checkpoint"
        self._require(not self._broken, f"an error stopped {self._broken} halfway", fix)

    def _require_batch(self, batch: "Batch", fresh: bool) -> None:
        self._require_whole()
        self._require(batch is self._batch, "the batch is not that of this step", "pass the batch that batches() gave")
        self._require(fresh and not self._backwards, "its backward has run", "call forward_backward(batch) once a step")

    def _require(self, fine: bool, found: str, fix: str) -> None:
        if not fine:
            step = self._batch.step if self._batch is not None else self._opened_loop().done
            raise RunFailed(
                "E-LOOP-ORDER",
                f"step {step}: {found}",
                rule="each step is batch, forward and backward, optimizer_step, and save if it is due",
                fix=fix,
                step=step,
            )
