"""The callbacks of a run: made from its settings, called at fixed points of a step, held to their contract."""

import contextlib
import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ingot.errors import RunFailed
from ingot.plugins.callback import CALLBACKS, CallbackRun, StepCallback, StepNumbers, Verdict
from ingot.plugins.piece import ParameterShard
from ingot.plugins.registry import options_of, resolve
from ingot.schema import events
from ingot.schema.run import RunConfig
from ingot.trainer.blame import blamed
from ingot.trainer.given import NOTHING_GIVEN, GivenCallbacks
from ingot.trainer.mesh.collectives import largest_of_ranks
from ingot.trainer.mesh.mesh import callback_group

ALLOWED = (Verdict.CONTINUE, Verdict.ROLL_BACK, Verdict.STOP)  # by urgency
MOST_RECORD_BYTES = 64 << 10
State = Mapping[str, Tensor | Mapping[str, Tensor]]


class Callbacks:
    """The callbacks of a run, in the order of the run file. Every call takes the same path on every rank.

    given: the callbacks that a program gave to the run; `config` has their names.
    An error that a callback raises becomes a RunFailed with its name, file and line.
    """

    def __init__(
        self,
        config: RunConfig,
        pieces: Sequence[ParameterShard],
        device: torch.device,
        given: GivenCallbacks = NOTHING_GIVEN,
        loss_scale: Tensor | None = None,
    ):
        distributed = dist.is_initialized()
        sums = distributed and config.callbacks
        group = callback_group(timedelta(seconds=config.launch.timeout_seconds)) if sums else None
        run = CallbackRun(
            config=config,
            rank=dist.get_rank() if distributed else 0,
            world_size=dist.get_world_size() if distributed else 1,
            device=device,
            pieces=pieces,
            sum_over_ranks=partial(_sum_over_ranks, group=group),
            loss_scale=loss_scale,
        )
        self.pieces, self._given, self._is_first = pieces, given, run.rank == 0
        self._own: dict[str, StepCallback] = {}
        for name, values in config.callbacks.items():
            with _blamed(name, "start"):
                made = given.make(name, run) if name in given.callbacks else _registered(name, run, values)
            if not isinstance(made, StepCallback):
                raise _broken(name, "start", f"made {type(made).__name__}, which is not a StepCallback")
            self._own[name] = made
        self.state: dict[str, State] = {name: self._checked_state(name, own) for name, own in self._own.items()}
        self._lent: list[weakref.ref[Tensor]] | None = []  # gradients of the first step, to see whether they are freed

    def _checked_state(self, name: str, callback: StepCallback) -> State:
        with _blamed(name, "tensors"):
            state = callback.tensors()
            by_piece = {key: tensor for key, tensor in state.items() if not isinstance(tensor, Tensor)}
            for key, tensors in by_piece.items():
                found = {n: tuple(tensor.shape) for n, tensor in tensors.items()}
                own = {piece.name: tuple(piece.sizes) for piece in self.pieces if piece.value.numel()}
                if wrong := [n for n in own | found if own.get(n) != found.get(n)]:
                    raise _broken(name, "tensors", f"{key!r} has no tensor of the shape of piece {wrong[0]!r}")
        if name not in self._given.callbacks and len(by_piece) != CALLBACKS[name].pieces:
            found = f"returns {len(by_piece)} tensors by piece, but its CallbackPart declares {CALLBACKS[name].pieces}"
            raise _broken(name, "tensors", found)
        return state

    def gradients(self, step: int) -> None:
        """Call `on_gradients`, after the gradients were reduced and before they are clipped."""
        for name, own in self._own.items():
            with _blamed(name, "on_gradients"):
                own.on_gradients(step)
        if self._lent == [] and self._own:
            self._lent = [weakref.ref(piece.grad) for piece in self.pieces if piece.grad is not None]

    def updated(self, step: int) -> None:
        """Call `on_update`, after the optimizer's step and after the gradients were freed."""
        self._require_freed()
        for name, own in self._own.items():
            with _blamed(name, "on_update"):
                own.on_update(step)

    def _require_freed(self) -> None:
        """Raise RunFailed in the first step if its gradients are still in use: then a callback kept them."""
        if self._lent:
            kept = [tensor for ref in self._lent if (tensor := ref()) is not None]
            if kept:
                names = ", ".join(self._own)
                size = sum(tensor.nbytes for tensor in kept)
                raise _broken(names, "on_gradients", f"kept {len(kept)} gradients ({size:,} bytes) beyond the step")
            self._lent = None

    def line(self, steps: Sequence[StepNumbers], log: Callable[..., None]) -> Verdict:
        """Write a `metrics` event for each callback that has some, and return the most urgent verdict. Collective."""
        asked = 0
        for name, own in self._own.items():
            with _blamed(name, "on_line"):
                metrics = own.on_line(steps)
                values = {str(key): float(value) for key, value in metrics.items()}
            if values:
                log(events.METRICS, step=steps[-1].step, by=name, values=values)
            with _blamed(name, "verdict"):
                verdict = own.verdict(steps)
            if verdict not in ALLOWED:
                raise _broken(name, "verdict", f"returned {verdict!r}, which is not one of {[v.name for v in ALLOWED]}")
            mine = ALLOWED.index(verdict)
            highest, lowest = largest_of_ranks(mine, -mine) if dist.is_initialized() else (mine, -mine)
            if highest != -lowest:
                raise _broken(name, "verdict", "returned another verdict on other ranks")
            asked = max(asked, mine)
        for function in self._given.functions if self._is_first else ():
            with _blamed(getattr(function, "__name__", "function"), "call"):
                function(steps)
        return ALLOWED[asked]

    def tensors(self) -> dict[str, Tensor | Mapping[str, Tensor]]:
        """Return the live tensors of all callbacks: "NAME.key" -> a tensor, or piece name -> tensor."""
        return {f"{name}.{key}": tensor for name, state in self.state.items() for key, tensor in state.items()}

    def records(self) -> dict[str, Any]:
        """Return what the callbacks record besides tensors, as JSON values by name."""
        records = {}
        for name, own in self._own.items():
            with _blamed(name, "record"):
                record = own.record()
                size = len(json.dumps(record, allow_nan=False))
            if size > MOST_RECORD_BYTES:
                raise _broken(name, "record", f"returned {size:,} characters of JSON, more than {MOST_RECORD_BYTES:,}")
            if record is not None:
                records[name] = record
        return records

    def restore(self, records: Mapping[str, Any]) -> None:
        """Give each callback its saved record."""
        for name, own in self._own.items():
            if name in records:
                with _blamed(name, "restore"):
                    own.restore(records[name])


def _registered(name: str, run: CallbackRun, values: Mapping[str, Any]) -> object:
    part = CALLBACKS[name]
    return resolve(part.make)(run, options_of(part, values))


def _sum_over_ranks(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    total = tensor.detach().clone()
    if group is not None:
        dist.all_reduce(total, group=group)
    return total


def _blamed(name: str, method: str) -> contextlib.AbstractContextManager[None]:
    """Turn an error of a callback into a RunFailed that names it."""
    return blamed(lambda found, file, line: _broken(name, method, found, file=file, line=line))


def _broken(name: str, method: str, found: str, **place: str | int) -> RunFailed:
    return RunFailed(
        "E-CALLBACK",
        f"callback {name!r}: {method} {found}",
        rule="a callback does the same on every rank, raises nothing and keeps to its contract (plugins/callback.py)",
        fix=f"correct the callback, or leave it out (table [callbacks.{name}]) with --accept-change callbacks",
        callback=name,
        method=method,
        **place,
    )
