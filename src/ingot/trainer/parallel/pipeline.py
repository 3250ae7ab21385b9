"""Plays a pipeline schedule: this rank's row of a table (theory/schedule), action by action.

    F  forward of a stage        needs hidden states of the stage before     sends its own to the stage after
    B  backward                  needs their gradient from the stage after   sends that of its input to the one before
    I  its half for the input    as B                                        as B
    W  its half for the weights  nothing                                     nothing

One process is a pipeline of one rank: F and B in turn, nothing sent. Where ranks share the tokens of sequences
(parallel/context.py), each plays the table with its own tokens.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ingot.errors import ConfigError
from ingot.theory.context import token_multiple
from ingot.theory.schedule import Action, Channel, Table
from ingot.theory.schedule.table import needed_by, sent_by
from ingot.trainer.mesh.mesh import Mesh
from ingot.trainer.parallel.channels import Channels
from ingot.trainer.parallel.context import TokenShare
from ingot.trainer.parallel.split_backward import WeightGradients


class DataParallel(Protocol):
    """Who exchanges gradients with the other data ranks. last: of this stage in this optimizer step."""

    def before_backward(self, stage: nn.Module, last: bool) -> None:
        """A backward of one micro-batch begins (B or I)."""

    def after_backward(self, stage: nn.Module, last: bool) -> None:
        """All gradients of one micro-batch are there (B or W)."""


class Batch(Protocol):
    """inputs, targets: int64 [A, B, T], A micro-batches. document_ids: int32 [A, B, T] or None."""

    @property
    def step(self) -> int: ...
    @property
    def inputs(self) -> Tensor: ...
    @property
    def targets(self) -> Tensor: ...
    @property
    def document_ids(self) -> Tensor | None: ...


@dataclass
class _Step:
    """What is alive within one optimizer step, by (stage, micro-batch); each entry goes when it is used.

    weight: what a nat counts in what is minimised, a scalar; None where no router asks.
    """

    batch: Batch
    scale: Tensor | None
    loss: Tensor
    weight: Tensor | None = None
    begun: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)  # input and output
    left: dict[tuple[int, int], WeightGradients] = field(default_factory=dict)
    hidden: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # between two stages of this rank
    gradients: dict[tuple[int, int], Tensor] = field(default_factory=dict)


class Pipeline:
    """stages: this rank's, by stage number. dtype: of the hidden states between stages. sequence_ranks: in how many
    parts they are cut along the sequence (tp, with sequence parallelism), beside the cp ranks' parts. pressure: makes
    of (keys_B, weight) what routers are told in training (model/moe.py); None for a model without any. Making a
    pipeline is collective over the world.

    A stage is called as `stage(x, targets or None, document_ids or None, [positions_T=], [pressure=])`, x being this
    rank's tokens [B, T / cp] on the first stage and hidden states after it; document ids are those of whole sequences.
    It returns hidden states [B, T / (cp x sequence_ranks), D], the last one the sum of nats.
    """

    def __init__(
        self,
        stages: dict[int, nn.Module],
        table: Table,
        mesh: Mesh,
        data: DataParallel,
        *,
        d_model: int,
        dtype: torch.dtype,
        device: torch.device,
        sequence_ranks: int = 1,
        pressure: Callable[[Tensor, Tensor], Any] | None = None,
    ):
        self.stages, self.table, self.data = stages, table, data
        self.d_model, self.dtype, self.device, self.sequence_ranks = d_model, dtype, device, sequence_ranks
        self.share, self.pressure = TokenShare(mesh), pressure
        self.data_rank, self.data_ranks = mesh.data_rank, mesh.data_ranks
        self.rank = mesh.index("pp")
        self.row = table.rows[self.rank]
        assert table.copies == 1 and set(stages) == set(table.stages_of(self.rank))
        self.channels = Channels(table, mesh, dtype, device)
        self.splits = any(action.kind == "I" for action in self.row)
        # The last action of each stage that begins, and that ends, a backward.
        self._last_begin = {action.stage: action for action in self.row if action.kind in "BI"}
        self._last_end = {action.stage: action for action in self.row if action.kind in "BW"}
        self._play = {"F": self._forward, "B": self._backward, "I": self._backward, "W": self._weights}

    def train(self, batch: Batch, scale: Tensor | None = None) -> Tensor:
        """Forward and backward of all micro-batches of one optimizer step of this data rank.

        A micro-batch counts nats of this rank's tokens / all of its tokens in the batch. scale: its backward is
        multiplied by it (fp16). Returns the sum of the losses, not scaled, on the rank of the last stage, and zero on
        the others; detached.
        """
        micro_batches = len(batch.inputs)
        if micro_batches != self.table.micro_batches:
            raise ConfigError(
                f"a batch of {micro_batches} micro-batches for a schedule of {self.table.micro_batches}",
                rule="a schedule is made for one number of micro-batches",
                fix="make the table with the run's accumulation",
            )
        shape = self._hidden_shape(batch.inputs[0])
        # In float64 a sum of float32 losses is exact, so it does not depend on who adds which of them.
        step = _Step(batch, scale, torch.zeros((), dtype=torch.float64, device=self.device))
        if self.pressure is not None:
            step.weight = torch.full_like(step.loss, 1 / self._own_tokens(batch)) * (1 if scale is None else scale)
        self.channels.start()
        for action, following in zip(self.row, (*self.row[1:], None), strict=True):
            # What the next action needs is on its way while this one computes.
            for upcoming in (action, following):
                if upcoming is not None and (parcel := needed_by(self.table, upcoming)):
                    self.channels.expect(parcel, shape)
            self._play[action.kind](action, step)
        self.channels.finish()
        return step.loss

    def _forward(self, action: Action, step: _Step) -> None:
        key, stage, batch = (action.stage, action.micro_batch), self.stages[action.stage], step.batch
        if self.table.before(action.stage) is None:
            x = self.share.own(batch.inputs[action.micro_batch])
        else:
            x = self._take(action, step.hidden).requires_grad_()
        documents = None if batch.document_ids is None else batch.document_ids[action.micro_batch]
        is_last = self.table.after(action.stage) is None
        with self._splitting(key, step):
            targets = self.share.own(batch.targets[action.micro_batch]) if is_last else None
            told = self._positions(batch.inputs.shape[-1]) | self._pressure(step, action.micro_batch)
            y = stage(x, targets, documents, **told)
        if is_last:
            y = y / self._own_tokens(batch)
            step.loss = step.loss + y.detach()
            y = y if step.scale is None else y * step.scale
        else:
            self._pass_on(action, y.detach(), step.hidden, self.table.after(action.stage))
        step.begun[key] = (x, y)

    def _backward(self, action: Action, step: _Step) -> None:
        """B or I. The gradient of the input goes first: the rank before waits for it."""
        key, stage = (action.stage, action.micro_batch), self.stages[action.stage]
        gradient = None if self.table.after(action.stage) is None else self._take(action, step.gradients)
        x, y = step.begun.pop(key)
        self.data.before_backward(stage, action is self._last_begin[action.stage])
        with self._splitting(key, step):
            torch.autograd.backward(y, gradient)
        if self.table.before(action.stage) is not None:
            assert x.grad is not None
            self._pass_on(action, x.grad, step.gradients, self.table.before(action.stage))
        del x, y, gradient
        if action.kind == "B":
            self._weights(action, step)

    def _weights(self, action: Action, step: _Step) -> None:
        """The end of a backward: W, or what comes after B."""
        if self.splits:
            step.left.pop((action.stage, action.micro_batch)).compute()
        self.data.after_backward(self.stages[action.stage], action is self._last_end[action.stage])

    def _splitting(self, key: tuple[int, int], step: _Step):
        return step.left.setdefault(key, WeightGradients()) if self.splits else nullcontext()

    def _take(self, action: Action, local: dict[tuple[int, int], Tensor]) -> Tensor:
        """What the neighbouring stage made for this action."""
        parcel = needed_by(self.table, action)
        return self.channels.receive(parcel) if parcel else local.pop((action.stage, action.micro_batch))

    def _pass_on(self, action: Action, made: Tensor, local: dict[tuple[int, int], Tensor], reader: int | None) -> None:
        """Send it, or lay it down for stage `reader` of the same rank."""
        if parcel := sent_by(self.table, action):
            self.channels.send(parcel, made)
        else:
            assert reader is not None
            local[reader, action.micro_batch] = made

    @torch.no_grad()
    def forward_only(
        self, inputs_BT: Tensor, targets_BT: Tensor | None, document_ids_BT: Tensor | None, *, per_token: bool
    ) -> Tensor | None:
        """One micro-batch through all stages: the last one's result on its ranks, None on the others.

        per_token: nats of every target, [B x T]; else there are no targets, and the result is logits [B, T, V]. Both
        are of whole sequences in order, on all cp ranks. All ranks of the pipeline have the arguments. T must divide by
        `token_multiple`.
        """
        assert per_token == (targets_BT is not None)
        result = hidden = None
        owner, shape = self.table.rank_of_stage, self._hidden_shape(inputs_BT)
        for number in self.table.stages_of(self.rank):
            stage, before, after = self.stages[number], self.table.before(number), self.table.after(number)
            if before is None:
                hidden = self.share.own(inputs_BT)
            elif owner[before] != self.rank:
                hidden = self.channels.take(Channel("activation", owner[before], self.rank), shape)
            targets = self.share.own(targets_BT) if after is None and targets_BT is not None else None
            positions = self._positions(inputs_BT.shape[1])
            y = stage(hidden, targets, document_ids_BT, **positions, per_token=per_token)
            if after is None:
                result = self._of_whole_sequences(y, len(inputs_BT))
            elif owner[after] == self.rank:
                hidden = y
            else:
                self.channels.pass_on(Channel("activation", self.rank, owner[after]), y)
        return result

    @property
    def token_multiple(self) -> int:
        """What the length of sequences must divide by."""
        return token_multiple(self.share.mesh.parallel)

    def _of_whole_sequences(self, y: Tensor, batch: int) -> Tensor:
        """y: logits [B, t, V] or nats [B x t] of this rank's tokens."""
        if self.share.ranks == 1:
            return y
        return self.share.whole(y) if y.dim() == 3 else self.share.whole(y.view(batch, -1)).flatten()

    def _positions(self, tokens: int) -> dict[str, Tensor]:
        """A stage that gets a part of the tokens has to be told which ones attention sees."""
        if self.sequence_ranks == self.share.ranks == 1:
            return {}
        return {"positions_T": self.share.positions(tokens, self.device)}

    def _pressure(self, step: _Step, micro_batch: int) -> dict[str, Any]:
        """Sequences are numbered through the run: data rank r reads the r-th equal part of each global batch."""
        if self.pressure is None:
            return {}
        micro_batches, rows, _ = step.batch.inputs.shape
        own = micro_batches * rows
        first = (step.batch.step * self.data_ranks + self.data_rank) * own + micro_batch * rows
        assert step.weight is not None
        return {"pressure": self.pressure(torch.arange(first, first + rows, device=self.device), step.weight)}

    def _own_tokens(self, batch: Batch) -> int:
        """Of this rank, in the whole step."""
        return batch.inputs.numel() // self.share.ranks

    def _hidden_shape(self, inputs_BT: Tensor) -> tuple[int, ...]:
        batch, tokens = inputs_BT.shape
        return (batch, tokens // (self.share.ranks * self.sequence_ranks), self.d_model)
