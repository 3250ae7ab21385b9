"""Pipeline parallelism: the stages of a model, and the execution of a schedule on one rank.

A rank executes its row of a table (theory/schedule), action by action:

    F  forward of a stage         needs the input, from the previous stage     sends the output, to the next stage
    B  backward                   needs the output's gradient, from the next   sends the input's, to the previous stage
    I  backward for the input     as B                                         as B
    W  backward for the weights   needs nothing                                sends nothing

A forward and a backward that the table pairs (DualPipeV) run together: each computes while the exchanges of the other's
experts are on their way (parallel/turns.py). Without such exchanges one runs after the other.

One process is a pipeline of one rank: F and B alternate, and nothing is sent. Ranks that share the tokens of sequences
(parallel/context.py) each execute the table with their own tokens.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ingot.errors import ConfigError
from ingot.plugins.piece import ParameterShard
from ingot.theory.context import token_multiple
from ingot.theory.schedule import Action, Channel, ScheduleTable
from ingot.theory.schedule.table import most_waiting, needed_by, sent_by
from ingot.trainer.mesh.collectives import sum_in_place
from ingot.trainer.mesh.mesh import Mesh, own_group
from ingot.trainer.mesh.step_times import StepPhase, StepTimes
from ingot.trainer.parallel.channels import Channels
from ingot.trainer.parallel.context import TokenShare
from ingot.trainer.parallel.split_backward import SplitBackward, WeightGradients
from ingot.trainer.parallel.turns import Turns

_PHASES: dict[str, StepPhase] = {"F": "forward", "B": "backward", "I": "backward", "W": "backward"}


class DataParallel(Protocol):
    """The exchange of gradients with other data ranks. last: this is the stage's last micro-batch of the step."""

    def before_backward(self, stage: nn.Module, last: bool) -> None:
        """Prepare for the backward of one micro-batch (B or I)."""

    def after_backward(self, stage: nn.Module, last: bool) -> None:
        """Start the exchange that is due once all gradients of one micro-batch exist (after B or W)."""


class StepObserver(Protocol):
    """A part of a run that looks at the forwards of its steps. No method waits for the device."""

    def step(self, step: int) -> AbstractContextManager[None]:
        """Return the context of the forwards and backwards of this rank's own part of the batch of `step`."""
        ...

    def computed(self, micro_batch: int) -> None:
        """Take in that the last stage has computed the loss of a micro-batch, and its backward."""


class MicroBatches(Protocol):
    """The tokens of one optimizer step of a data rank, in A micro-batches.

    inputs, targets: int64 [A, B, T]. document_ids: int32 [A, B, T] on the host, or None.
    """

    @property
    def step(self) -> int: ...
    @property
    def inputs(self) -> Tensor: ...
    @property
    def targets(self) -> Tensor: ...
    @property
    def document_ids(self) -> Tensor | None: ...


@dataclass
class _StepState:
    """The tensors of one optimizer step by (stage, micro-batch); each entry is removed at its use.

    data_rank: whose part of the batch it is. observers: of this part. weight: the factor of one token's nats in the
    minimized loss, a scalar; None for a model without experts. begun: of each forward the input, the edge of the graph
    from which its backward starts, and on the last stage the sum of nats. The output itself is not kept: its graph is
    all that the backward needs. left: deferred weight gradients. hidden, gradients: tensors for the rank's next stage.
    """

    batch: MicroBatches
    data_rank: int
    scale: Tensor | None
    loss: Tensor
    observers: Sequence[StepObserver] = ()
    weight: Tensor | None = None
    begun: dict[tuple[int, int], tuple[Tensor, GradientEdge, Tensor | None]] = field(default_factory=dict)
    left: dict[tuple[int, int], WeightGradients] = field(default_factory=dict)
    hidden: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    gradients: dict[tuple[int, int], Tensor] = field(default_factory=dict)


class PipelineExecutor:
    """The execution of a pipeline's table on one rank. The constructor is collective over the world.

    stages: stage number -> module, of this rank. dtype: the dtype of the hidden states between stages. sequence_ranks:
    the number of parts into which tensor parallelism divides a cp rank's hidden states along the sequence.
    router_loss: makes a RouterLoss (model/routing.py) from (keys_B, weight); None for a model without experts. split:
    the model's SplitBackward, needed for a table with I and W. turns: of the two actions of a pair; None: they run one
    after the other. times: of the phases of steps; None: not measured. observers: see StepObserver. Neither notices the
    part of another rank, or a part that is computed once more.

    A stage is called as `stage(x, targets or None, document_ids or None, [positions_T=], [router_loss=])`. x: this
    rank's tokens [B, T / cp] on the first stage, hidden states on later stages. document_ids: for whole sequences, on
    the host. A stage returns hidden states [B, T / (cp x sequence_ranks), D]; the last stage returns the sum of nats.
    """

    def __init__(
        self,
        stages: dict[int, nn.Module],
        table: ScheduleTable,
        mesh: Mesh,
        data: DataParallel,
        *,
        d_model: int,
        dtype: torch.dtype,
        device: torch.device,
        sequence_ranks: int = 1,
        router_loss: Callable[[Tensor, Tensor], Any] | None = None,
        split: SplitBackward | None = None,
        turns: Turns | None = None,
    ):
        self.stages, self.table, self.data = stages, table, data
        self.d_model, self.dtype, self.device, self.sequence_ranks = d_model, dtype, device, sequence_ranks
        self.share, self.router_loss = TokenShare(mesh), router_loss
        self.times: StepTimes | None = None
        self.observers: list[StepObserver] = []
        self.data_rank, self.data_ranks = mesh.data_rank, mesh.data_ranks
        self.rank = mesh.index("pp")
        self.row, self.turns = table.rows[self.rank], turns
        pairs = table.overlaps[self.rank] if turns is not None else ()
        # The actions that run together: one, or a forward and a backward.
        self.slots = [self.row[i : i + 1 + (i in pairs)] for i in range(len(self.row)) if i - 1 not in pairs]
        assert table.copies == 1 and set(stages) == set(table.stages_of(self.rank))
        self.channels = Channels(table, mesh, dtype, device)
        self.split = split if any(action.kind == "I" for action in self.row) else None
        assert split is not None or all(action.kind in "FB" for action in self.row)
        readout = getattr(stages.get(table.stages - 1), "readout", None)
        if readout is not None:
            # A gradient of the head for each loss that waits for its backward would take more memory than a block.
            readout.late = most_waiting(table, table.stages - 1) > 1
        # For each stage the last action that begins a backward, and the last that ends one.
        self._last_begin = {action.stage: action for action in self.row if action.kind in "BI"}
        self._last_end = {action.stage: action for action in self.row if action.kind in "BW"}
        self._execute = {"F": self._forward, "B": self._backward, "I": self._backward, "W": self._weights}

    def train(self, batch: MicroBatches, scale: Tensor | None = None, data_rank: int | None = None) -> Tensor:
        """Run the forward and backward of all micro-batches of one optimizer step of this data rank.

        The loss of a micro-batch is the sum of its nats divided by this rank's tokens in the step. scale: the loss
        scale (fp16). data_rank: the rank that the batch belongs to, of a part that is computed to check a rank; None:
        this one, for its own step. Returns the sum of the unscaled
        losses, float64 and detached, on the rank of the last stage, and zero on other ranks. Raises ConfigError if the
        table has a different number of micro-batches.
        """
        micro_batches = len(batch.inputs)
        if micro_batches != self.table.micro_batches:
            raise ConfigError(
                "E-MICRO-BATCHES",
                f"the batch has {micro_batches} micro-batches, but the schedule has {self.table.micro_batches}",
                rule="a schedule is built for one number of micro-batches per step",
                fix="build the schedule with the run's accumulation: global_batch / (micro_batch x data ranks)",
                found=micro_batches,
                expected=self.table.micro_batches,
            )
        shape = self._hidden_shape(batch.inputs[0])
        # In float64 a sum of float32 losses is exact, so it does not depend on the order of the additions.
        part = self.data_rank if data_rank is None else data_rank
        step = _StepState(batch, part, scale, torch.zeros((), dtype=torch.float64, device=self.device))
        times = self.times if data_rank is None else None
        step.observers = self.observers if data_rank is None else ()
        if self.router_loss is not None:
            step.weight = torch.full_like(step.loss, 1 / self._own_tokens(batch)) * (1 if scale is None else scale)
        with ExitStack() as stack:
            for observer in step.observers:
                stack.enter_context(observer.step(batch.step))
            self.channels.start()
            for slot, following in zip(self.slots, (*self.slots[1:], ()), strict=True):
                # The message that the next action needs travels while this action computes.
                for upcoming in (*slot, *following[:1]):
                    if parcel := needed_by(self.table, upcoming):
                        self.channels.expect(parcel, shape)
                first, *second = (partial(self._execute[action.kind], action, step) for action in slot)
                around = [nullcontext if times is None else partial(times.phase, _PHASES[a.kind]) for a in slot]
                if second and self.turns is not None:
                    self.turns.run(first, second[0], (around[0], around[1]))
                else:
                    with around[0]():
                        first()
            self.channels.finish()
        return step.loss

    def _forward(self, action: Action, step: _StepState) -> None:
        key, stage, batch = (action.stage, action.micro_batch), self.stages[action.stage], step.batch
        if self.table.before(action.stage) is None:
            x = self.share.own(batch.inputs[action.micro_batch])
        else:
            x = self._take(action, step.hidden).requires_grad_()
        documents = None if batch.document_ids is None else batch.document_ids[action.micro_batch]
        is_last = self.table.after(action.stage) is None
        with self._splitting(key, step):
            targets = self.share.own(batch.targets[action.micro_batch]) if is_last else None
            more = self._positions(batch.inputs.shape[-1]) | self._router_loss(step, action.micro_batch)
            y = stage(x, targets, documents, **more)
        nats = y.detach() if is_last else None
        if is_last:
            y = y / self._own_tokens(batch)
            y = y if step.scale is None else y * step.scale
        else:
            self._pass_on(action, y.detach(), step.hidden, self.table.after(action.stage))
        step.begun[key] = (x, get_gradient_edge(y), nats)

    def _backward(self, action: Action, step: _StepState) -> None:
        """Execute B or I. The gradient of the input is sent first, because the previous stage waits for it."""
        key, stage = (action.stage, action.micro_batch), self.stages[action.stage]
        gradient = None if self.table.after(action.stage) is None else self._take(action, step.gradients)
        x, edge, nats = step.begun.pop(key)
        self.data.before_backward(stage, action is self._last_begin[action.stage])
        with self._splitting(key, step):
            torch.autograd.backward(edge, gradient)
        if nats is not None:  # a loss that is computed late has its value now
            for observer in step.observers:
                observer.computed(action.micro_batch)
            step.loss = step.loss + nats / self._own_tokens(step.batch)
        if self.table.before(action.stage) is not None:
            assert x.grad is not None
            self._pass_on(action, x.grad, step.gradients, self.table.before(action.stage))
        del x, edge, gradient
        if action.kind == "B":
            self._weights(action, step)

    def _weights(self, action: Action, step: _StepState) -> None:
        """Execute W, or the last part of B: compute deferred weight gradients, then start the gradient exchange."""
        if self.split is not None:
            step.left.pop((action.stage, action.micro_batch)).compute()
        self.data.after_backward(self.stages[action.stage], action is self._last_end[action.stage])

    def _splitting(self, key: tuple[int, int], step: _StepState):
        return nullcontext() if self.split is None else step.left.setdefault(key, WeightGradients(self.split))

    def _take(self, action: Action, local: dict[tuple[int, int], Tensor]) -> Tensor:
        """Return the tensor that the neighboring stage made for this action: received, or removed from `local`."""
        parcel = needed_by(self.table, action)
        return self.channels.receive(parcel) if parcel else local.pop((action.stage, action.micro_batch))

    def _pass_on(self, action: Action, made: Tensor, local: dict[tuple[int, int], Tensor], reader: int | None) -> None:
        """Send `made` to another rank, or store it in `local` for stage `reader` of this rank."""
        if parcel := sent_by(self.table, action):
            self.channels.send(parcel, made)
        else:
            assert reader is not None
            local[reader, action.micro_batch] = made

    @torch.no_grad()
    def forward_only(
        self, inputs_BT: Tensor, targets_BT: Tensor | None, document_ids_BT: Tensor | None, *, per_token: bool
    ) -> Tensor | None:
        """Run one micro-batch through all stages. Returns the result on the ranks of the last stage, None on others.

        per_token: the result is nats of every target, [B x T]; otherwise targets_BT is None and the result is logits
        [B, T, V]. Both cover whole sequences in order, on all cp ranks. All ranks of the pipeline pass the same
        arguments. T must be a multiple of `token_multiple`.
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
        """The number of which the length of sequences must be a multiple."""
        return token_multiple(self.share.mesh.parallel)

    def _of_whole_sequences(self, y: Tensor, batch: int) -> Tensor:
        """Gather y of whole sequences from the cp ranks. y: logits [B, t, V] or nats [B x t] of this rank's tokens."""
        if self.share.ranks == 1:
            return y
        return self.share.whole(y) if y.dim() == 3 else self.share.whole(y.view(batch, -1)).flatten()

    def _positions(self, tokens: int) -> dict[str, Tensor]:
        """Return the keyword argument positions_T for a stage that gets a part of the tokens; otherwise {}."""
        if self.sequence_ranks == self.share.ranks == 1:
            return {}
        return {"positions_T": self.share.positions(tokens, self.device)}

    def _router_loss(self, step: _StepState, micro_batch: int) -> dict[str, Any]:
        """Return the keyword argument router_loss of a stage; {} for a model without experts.

        The keys number the sequences of the run: data rank r reads the r-th equal part of each global batch.
        """
        if self.router_loss is None:
            return {}
        micro_batches, rows, _ = step.batch.inputs.shape
        own = micro_batches * rows
        first = (step.batch.step * self.data_ranks + step.data_rank) * own + micro_batch * rows
        assert step.weight is not None
        return {"router_loss": self.router_loss(torch.arange(first, first + rows, device=self.device), step.weight)}

    def _own_tokens(self, batch: MicroBatches) -> int:
        """Return the number of this rank's tokens in the whole step."""
        return batch.inputs.numel() // self.share.ranks

    def _hidden_shape(self, inputs_BT: Tensor) -> tuple[int, ...]:
        batch, tokens = inputs_BT.shape
        return (batch, tokens // (self.share.ranks * self.sequence_ranks), self.d_model)


# -- stages --


def cut_stage(model: Any, stage: int, stage_layers: Sequence[int]) -> nn.Module:
    """Reduce `model`, a Transformer on the meta device, to `stage` in place, and return it.

    Blocks keep their numbers, so names do not change. stage_layers: the number of blocks of each stage.
    """
    first = sum(stage_layers[:stage])
    own = {str(i) for i in range(first, first + stage_layers[stage])}
    blocks = model.get_submodule("blocks")
    for key in [key for key, _ in blocks.named_children() if key not in own]:
        del blocks[key]
    tied = getattr(model, "head", None) is None
    if stage != len(stage_layers) - 1:
        model.norm = model.head = None
    if stage != 0 and not (tied and stage == len(stage_layers) - 1):
        model.embed = None
    return model


class TiedEnds:
    """A tied matrix on two ranks: the first stage's embedding and the last stage's head. Their gradients are summed.

    Both ranks start from the same values and make the same updates; the first stage's copy is the owner.
    """

    def __init__(self, mesh: Mesh, rank_of_stage: Sequence[int], shards: list[ParameterShard]):
        """Make the process groups of all pairs. Collective over the world. shards: this rank's shards."""
        ends = rank_of_stage[0], rank_of_stage[-1]
        self.shard = next((shard for shard in shards if shard.name == "embed.weight"), None)
        lines = mesh.devices.mesh.flatten(1).T.tolist()  # the global ranks of every pipeline
        self.group = own_group([[line[end] for end in ends] for line in lines], mesh.timeout, "tied_ends")
        if self.shard is not None and mesh.index("pp") != ends[0]:
            self.shard.owner = False

    @torch.no_grad()
    def sum_gradients(self) -> None:
        if self.shard is not None and self.shard.grad is not None:
            assert self.group is not None
            sum_in_place(self.shard.grad, self.group)
