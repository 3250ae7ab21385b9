"""The watch for bits of a run's state that change without an update, by hashes (hashing.py).

Masters, optimizer state and a loss scale change in updates alone, and copies of them are equal. So a rank hashes them
after the update of a step and again before the next update: another hash names the rank. And after the update, the
hashes of all copies are compared: a rank that differs from most others is named; of two copies both are suspects until
the steps were trained again (verdict.py). The parameters that the forward reads, if they are copies of the masters, and
the biases of routers are compared before the update, between the ranks that have the same.

Nothing waits for the device: the hashes stay there until a log line, where the host waits anyway.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ingot.errors import CheckpointError
from ingot.trainer.checkpoint.state import MODEL, OPTIM, TrainingState
from ingot.trainer.integrity.copies import CopyGroup, Place, copy_groups
from ingot.trainer.integrity.hashing import TensorHasher
from ingot.trainer.integrity.recompute import RecomputedGradients
from ingot.trainer.integrity.samples import GradientSamples
from ingot.trainer.integrity.verdict import NOTHING, Damage, OwnGradients, Suspicion, Trust
from ingot.trainer.mesh.collectives import largest_of_ranks
from ingot.trainer.mesh.mesh import Mesh

STATE_CHANGED = "E-STATE-CHANGED"
_REMEMBERED = 64
_STEP_COUNTS = f"{OPTIM}step"  # of all parameters, as one tensor
Published = Mapping[tuple[str, tuple[int, ...]], Tensor]
Point = Literal["before_update", "after_update", "before_save", "after_copy"]


class _Hashed:
    """Tensors that are hashed together, and the ranks that have copies of them."""

    def __init__(self, mesh: Mesh, tensors: Mapping[Place, Tensor], link: torch.device):
        self.names = [name for name, _, _ in tensors]
        self.hasher = TensorHasher(list(tensors.values()))
        self.groups: list[CopyGroup] = copy_groups(mesh, list(tensors), self.hasher.device, link)
        self._numbers = {i for i, (name, _, sizes) in enumerate(tensors) if name == _STEP_COUNTS or not sizes}

    def copies(self) -> list[CopyGroup]:
        """Return the groups that have copies of more than step counts and single numbers, which are equal on ranks with
        other shards, too."""
        return [group for group in self.groups if not self._numbers.issuperset(group.indexes)]


@dataclass(frozen=True)
class _Check:
    """The hashes of some tensors at one point of a step, on the device.

    own: int64 [tensors]. earlier: the same at the point from which on they may not have changed; None: they may have.
    shared: int64 [groups], the hash of all tensors that a group has copies of.
    """

    step: int
    point: Point
    of: _Hashed
    own: Tensor
    earlier: Tensor | None
    shared: list[Tensor]

    @property
    def groups(self) -> list[CopyGroup]:
        """The groups with which the hashes are exchanged. A rank that failed to copy its state has no check of it."""
        return [] if self.point == "after_copy" else self.of.groups


class StateHashes:
    """The hashes of a rank's state, every `every` steps, and in every step while steps are trained again.

    The constructor is collective over the world. All ranks call the methods at the same points of the same steps.
    published: (name, offsets) -> the parameters that are copies of masters (parallel/zero.py). moments: hash the state
    of the optimizer too; False if it is in files. gradients: compared at the same points, if the run recomputes them.
    replayed: the damage for which steps are trained again. samples: of this rank's own gradients, if damage may spoil
    both of two copies before it is found. has_copies: some rank has a copy of weights or optimizer state of another
    one, so that hashes can be compared. has_pairs: some weights have exactly two copies along dp_replicate, so that no
    majority is equal. Both are the same on all ranks.
    """

    def __init__(
        self,
        state: TrainingState,
        published: Published,
        mesh: Mesh,
        every: int,
        *,
        moments: bool = True,
        gradients: RecomputedGradients | None = None,
    ):
        link = torch.device(mesh.devices.device_type)
        self.every, self.gradients = every, gradients
        self.replayed: Damage | None = None
        self.samples: GradientSamples | None = None
        self._checked: list[int] = []  # the last steps whose copies were compared
        self._sound = 0  # the last of them before the damage
        self._counts = _step_counts(state) if moments else []
        self._stacked = torch.stack(self._counts) if self._counts else None
        self._masters = _Hashed(mesh, _masters(state, self._stacked, moments), link)
        self._copies = _Hashed(mesh, _copies_of_masters(state, published), link)
        copies = self._masters.copies()
        pairs = [group for group in copies if group.axis == "dp_replicate" and len(group.ranks) == 2]
        # Stages have different tensors: what all ranks do together cannot follow from those of one rank.
        self.has_copies, self.has_pairs = map(bool, largest_of_ranks(len(copies), len(pairs)))
        self._after: tuple[int, Tensor] | None = None
        self._to_save: tuple[int, Tensor] | None = None
        self._pending: list[_Check] = []
        self._compared: list[_Check] = []
        self._differs: Tensor | None = None
        self._suspects: list[_Check] = []
        self._changed: Tensor | None = None

    # -- in each step, without waiting --

    def before_update(self, step: int) -> None:
        """Hash the state before the update of `step`, if it was hashed after the update of the step before."""
        if self._after is None or self._after[0] != step - 1:
            return
        self._add(step, "before_update", self._masters, self._hashes(), self._after[1])
        if self._copies.groups:
            self._add(step, "before_update", self._copies, self._copies.hasher.hashes())
        self._after = None

    def after_update(self, step: int) -> None:
        """Hash the state after the update of `step`, if it is due. Call when the masters were published."""
        self._after = None
        if step % self.every == 0 or (self.replayed is not None and step <= self.replayed.step):
            self._after = step, self._hashes()
            self._add(step, "after_update", self._masters, self._after[1])

    def hash_now(self, step: int) -> None:
        """Hash the state after `step`, the last of a log line, whatever `every` is. Call `compare` and `read` then."""
        if self._after is None or self._after[0] != step:  # otherwise it was compared at this line
            self._after = step, self._hashes()
            self._add(step, "after_update", self._masters, self._after[1])

    def suspect_damage(self, step: int) -> None:
        """Hash the state after `step`, the last of a log line that looks like damage. If the run computes gradients
        twice in some steps, it does so in the next one. Call `compare` and `read` then."""
        self.hash_now(step)
        if self.gradients is not None:
            self.gradients.suspects_damage = True

    def before_save(self, step: int) -> None:
        """Hash the state after `step`, which will be saved if `read` finds no difference."""
        earlier = self._after[1] if self._after is not None and self._after[0] == step else None
        self._to_save = step, self._hashes()
        self._add(step, "before_save", self._masters, self._to_save[1], earlier)

    def hashed_to_save(self, step: int) -> bool:
        """Return whether the state was hashed for a save of `step`."""
        return self._to_save is not None and self._to_save[0] == step

    def end_save(self) -> None:
        """Forget the hash of a save that was made, or failed on some rank."""
        self._to_save = None

    def require_unchanged(self) -> None:
        """Hash the state after it was copied for a save. Raises CheckpointError if it differs from what `before_save`
        hashed: the copy may be damaged. The host waits for the device, as it did for the copy."""
        if self._to_save is None:
            return
        (step, earlier), self._to_save = self._to_save, None
        own = self._hashes()
        self._add(step, "after_copy", self._masters, own, earlier)
        if not torch.equal(own, earlier):
            raise CheckpointError(
                STATE_CHANGED,
                f"weights or optimizer state of rank {dist.get_rank()} changed while step {step} was copied",
                rule="what is saved is what was hashed before",
                fix="none is needed: the run goes back to the checkpoint before",
                rank=dist.get_rank(),
                step=step,
            )

    def _add(self, step: int, point: Point, of: _Hashed, own: Tensor, earlier: Tensor | None = None) -> None:
        self._pending.append(_Check(step, point, of, own, earlier, [(own * g.weights).sum() for g in of.groups]))
        for check in self._suspects:
            if (check.step, check.point, check.of) == (step, point, of):
                changed = (check.own != own).any()
                self._changed = changed if self._changed is None else self._changed | changed

    def _hashes(self) -> Tensor:
        if self._stacked is not None:
            torch.stack(self._counts, out=self._stacked)
        return self._masters.hasher.hashes()

    # -- at a log line --

    def compare(self) -> None:
        """Exchange the hashes since the last call with the ranks that have copies. Collective; does not wait."""
        flags = [(check.own != check.earlier).any() for check in self._pending if check.earlier is not None]
        for hashed in (self._masters, self._copies):
            checks = [check for check in self._pending if check.of is hashed and check.groups]
            for number, group in enumerate(hashed.groups if checks else ()):
                rows = group.exchange(torch.stack([check.shared[number] for check in checks]))
                flags.append((rows != rows[0]).any())
        device = self._masters.hasher.device
        if self.gradients is not None:
            flags += self.gradients.compare()
        self._differs = torch.stack([flag.to(device) for flag in flags]).any() if flags else None

    def read(self) -> bool:
        """Return whether a comparison found a difference on this rank. The host waits for the device."""
        differs, self._differs = self._differs, None
        self._compared, self._pending = self._pending, []
        steps = {check.step for check in self._compared if check.of is self._masters and check.groups}
        self._checked = [*self._checked, *sorted(steps)][-_REMEMBERED:]
        if self.gradients is not None:
            self.gradients.read()
        return differs is not None and bool(differs)

    # -- after a difference --

    def suspicion(self) -> Suspicion:
        """Return what the checks that were read last say of this rank. Collective over the world."""
        worst, self._suspects, self._changed = NOTHING, [], None
        for check in self._compared:
            found = NOTHING
            if check.earlier is not None:
                for index in torch.nonzero(check.own != check.earlier).flatten().tolist()[:1]:
                    found = self._about(check, index, int(check.earlier[index]), Trust.OWN_HASH)
            for group in check.groups:
                found = found.or_worse(self._among_copies(check, group, group.exchange(check.own[group.indexes])))
            if found.trust is Trust.UNDECIDED and not self._suspects:
                self._suspects = [check]
            worst = worst.or_worse(found)
        self._compared = []
        return worst if self.gradients is None else worst.or_worse(self.gradients.suspicion())

    def _among_copies(self, check: _Check, group: CopyGroup, rows: Tensor) -> Suspicion:
        """Return what the hashes of copies say of this rank. rows: int64 [ranks, tensors of the group]."""
        place = group.ranks.index(dist.get_rank())
        for column in (rows != rows[0]).any(0).nonzero().flatten().tolist()[:1]:
            hashes = rows[:, column].tolist()
            most = max(hashes, key=hashes.count)
            is_majority = 2 * hashes.count(most) > len(hashes)
            if is_majority and hashes[place] == most:
                continue
            other = most if is_majority else next(one for one in hashes if one != hashes[place])
            return self._about(check, group.indexes[column], other, Trust.MINORITY if is_majority else Trust.UNDECIDED)
        return NOTHING

    def _about(self, check: _Check, index: int, right: int, trust: Trust) -> Suspicion:
        flip = check.of.hasher.locate(index, int(check.own[index]) - right)
        element, bit = flip or (None, None)
        return Suspicion(trust=trust, step=check.step, tensor=check.of.names[index], element=element, bit=bit)

    def changed(self) -> bool:
        """Return whether this rank, as one of several suspects, has another hash now than when it was suspected."""
        own = self._changed is not None and bool(self._changed)
        return own or (self.gradients is not None and self.gradients.changed())

    def own_gradients(self) -> OwnGradients:
        """Return what the samples of this rank's gradients show of the steps that were trained again."""
        if self.samples is None or self.replayed is None:
            return OwnGradients()
        first, equal = self.samples.first_difference(self.replayed.step)
        return OwnGradients(first, self._sound, equal)

    def replay(self, damage: Damage, back_at: int) -> None:
        """Take in that the state was replaced by that of step `back_at`, because of `damage`."""
        self.forget()
        self.replayed = damage
        self._sound = max((step for step in self._checked if step < damage.step), default=0)
        self.went_back(back_at)
        if self.samples is not None:
            self.samples.replay()
        if self.gradients is not None:
            self.gradients.replayed = damage

    def end_replay(self) -> None:
        """Take in that the steps up to the damage were trained again."""
        self.replayed, self._suspects, self._changed = None, [], None
        if self.gradients is not None:
            self.gradients.replayed = None

    def went_back(self, step: int) -> None:
        """Take in that the steps after `step` are trained again: what was compared in them is of another pass."""
        self._checked = [one for one in self._checked if one <= step]

    def forget(self) -> None:
        """Take in that the state was replaced."""
        self._after, self._to_save, self._pending = None, None, []
        if self.gradients is not None:
            self.gradients.forget()


def _step_counts(state: TrainingState) -> list[Tensor]:
    return [kinds["step"].reshape(()) for kinds in state.optimizer.moments().values() if "step" in kinds]


def _masters(state: TrainingState, step_counts: Tensor | None, moments: bool) -> dict[Place, Tensor]:
    """Return what changes in updates alone: masters, state of the optimizer, loss scale. By name, offsets and sizes."""
    alone = replace(state, buffers=(), callbacks={})
    blocks = alone.blocks(state.optimizer.moments(), first_rank=False) if moments else alone.weights()
    found = {
        (block.name, block.offsets, block.sizes): block.tensor
        for block in blocks
        if block.tensor.numel() and not block.name.startswith(f"{_STEP_COUNTS}.")
    }
    if step_counts is not None:
        found[_STEP_COUNTS, (), tuple(step_counts.shape)] = step_counts
    return found


def _copies_of_masters(state: TrainingState, published: Published) -> dict[Place, Tensor]:
    """Return what the forward reads besides masters: published parameters, and buffers of the model."""
    found = {(f"copy of {MODEL}{name}", place, tuple(p.shape)): p for (name, place), p in published.items()}
    return found | {(MODEL + b.name, b.offsets, b.sizes): b.value for b in state.buffers}
