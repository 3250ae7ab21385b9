"""The blocks that each rank of a layout saves, computed without the ranks.

The program that trains is built for one rank at a time, on the meta device and in a fake process group, and asked what
it would save. So no formula of a layout exists twice.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ingot.schema.checkpoint import CheckpointManifest
from ingot.schema.run import Optim, RunConfig
from ingot.trainer.build import build_parts
from ingot.trainer.checkpoint.files import FileContents
from ingot.trainer.checkpoint.save import file_contents
from ingot.trainer.checkpoint.state import (
    BIAS,
    CALLBACK,
    EXTRA,
    LOAD,
    MODEL,
    OPTIM,
    Moments,
    SavedShard,
    TrainingState,
)
from ingot.trainer.mesh.fake import fake_rank

_META = torch.device("meta")
_SOME = 0.1  # of a setting that decides by being more than 0 whether routers have a buffer


@dataclass(frozen=True)
class RankContents:
    """The file that a rank saves, without random states, and the layout as manifests describe it."""

    contents: FileContents
    layout: dict[str, int]


def rank_contents(config: RunConfig, manifest: CheckpointManifest, rank: int) -> RankContents:
    """Return what rank `rank` of the run `config` saves of the tensors that checkpoint `manifest` has.

    The process must not have a process group. Raises ConfigError for a layout that breaks a rule, CheckpointError if
    moments do not fit the parameters.
    """
    # Where state is kept has no effect on its blocks, and ZeRO-3 divides parameters as ZeRO-1 divides their moments.
    # The moments are those of the checkpoint, so no optimizer, loss term or callback of a plug-in is needed.
    parallel = replace(config.parallel, zero=1, offload="none", offload_parameters=False, async_tp=False)
    train = replace(config.train, compile="off", device="cpu")
    config = replace(config, parallel=parallel, train=train, model=_with_stored_buffers(config, manifest))
    with fake_rank(rank, parallel.world_size):
        plain = replace(config, optim=Optim(), loss={}, callbacks={})
        parts = build_parts(plain, _META, Path(), first_values=False)
        pieces = parts.model.shards
        state = TrainingState(
            pieces,
            _StoredMoments(_moments(manifest, pieces)),
            extras={name: _like(manifest, EXTRA + name) for name in _names(manifest, EXTRA)},
            buffers=parts.balance.shards if parts.balance else (),
            callbacks=_callbacks(manifest, pieces),
        )
        contents, _ = file_contents(state)
        parts.model.close()
        written = len(contents.written)
        return RankContents(replace(contents, parts=contents.parts[:written]), parts.mesh.layout)


def _with_stored_buffers(config: RunConfig, manifest: CheckpointManifest):
    """Return the model with the routers' buffers that the checkpoint has, which the run may have begun or ceased to
    use."""
    if not config.model.is_moe:
        return config.model
    biases, loads = (any(name.endswith(end) for name in manifest.tensors) for end in (BIAS, LOAD))
    moe = replace(config.model.moe, bias_rate=_SOME if biases else 0.0, global_loss=_SOME if loads else 0.0)
    return replace(config.model, moe=moe)


@dataclass(frozen=True)
class _StoredMoments:
    """The moments that a checkpoint has, as an optimizer without values."""

    kept: Moments

    def moments(self) -> Moments:
        return self.kept

    def put_moments(self, moments: Moments) -> None:
        """Do nothing: there are no values."""


def _moments(manifest: CheckpointManifest, pieces: list) -> Moments:
    kinds: dict[str, dict[str, str]] = {}  # parameter -> kind -> name of its tensor
    for name in _names(manifest, OPTIM):
        kind, _, parameter = name.partition(".")
        kinds.setdefault(parameter, {})[kind] = OPTIM + name
    return {
        piece.name: {
            kind: _like(manifest, name, () if not manifest.tensors[name].shape else piece.sizes)
            for kind, name in kinds.get(piece.name, {}).items()
        }
        for piece in pieces
    }


def _callbacks(manifest: CheckpointManifest, pieces: list) -> dict[str, Tensor | Mapping[str, Tensor]]:
    """Return the tensors of callbacks: those with the name and shape of a parameter at their end are cut like it."""
    here: dict[str, SavedShard] = {piece.name: piece for piece in pieces}
    whole: dict[str, Tensor] = {}
    cut: dict[str, dict[str, Tensor]] = {}
    for name in _names(manifest, CALLBACK):
        key, parameter = _split(manifest, name)
        if not parameter:
            whole[name] = _like(manifest, CALLBACK + name)
        elif parameter in here:
            cut.setdefault(key, {})[parameter] = _like(manifest, CALLBACK + name, here[parameter].sizes)
    return {**whole, **cut}


def _split(manifest: CheckpointManifest, name: str) -> tuple[str, str]:
    """Return the key and the parameter of a callback's tensor; the parameter is "" if it is not cut like one."""
    words = name.split(".")
    for at in range(1, len(words)):
        parameter = manifest.tensors.get(MODEL + ".".join(words[at:]))
        if parameter is not None and parameter.shape == manifest.tensors[CALLBACK + name].shape:
            return ".".join(words[:at]), ".".join(words[at:])
    return name, ""


def _names(manifest: CheckpointManifest, prefix: str) -> list[str]:
    return [name.removeprefix(prefix) for name in manifest.tensors if name.startswith(prefix)]


def _like(manifest: CheckpointManifest, name: str, sizes: tuple[int, ...] | None = None) -> Tensor:
    entry = manifest.tensors[name]
    return torch.empty(entry.shape if sizes is None else sizes, dtype=getattr(torch, entry.dtype), device=_META)
