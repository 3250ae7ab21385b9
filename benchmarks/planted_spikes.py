"""A plug-in of benchmarks/guard.py: what hurts a run, in the steps that SPIKES names, as "600:shuffled 800:rate".

shuffled: the targets of the step are the tokens of others. repeated: eight tokens of each sequence, again and again.
random: tokens without a rule. rate: fifty times the learning rate in the update of the step, once per process.
"""

import os
from dataclasses import replace
from typing import Any

import torch

from ingot.drill.planted import change_steps, with_tokens
from ingot.plugins.callback import CALLBACKS, CallbackPart, StepCallback

_FACTOR, _REPEATED = 50, 8
_spikes = {int(step): kind for step, kind in (one.split(":") for one in os.environ.get("SPIKES", "").split())}


class PlantedSpikes(StepCallback):
    def __init__(self, run: Any, options: dict[str, Any]):
        vocab, raised = run.config.model.vocab_size, set()

        def batch_of(batch: Any) -> Any:
            kind = _spikes.get(batch.step)
            random = torch.Generator().manual_seed(batch.step)
            tokens = torch.cat((batch.inputs, batch.targets[..., -1:]), dim=-1)
            if kind == "shuffled":
                mixed = batch.targets.flatten()[torch.randperm(batch.targets.numel(), generator=random)]
                return replace(batch, targets=mixed.reshape(batch.targets.shape))
            if kind == "repeated":
                return with_tokens(batch, tokens[..., torch.arange(tokens.shape[-1]) % _REPEATED])
            if kind == "random":
                return with_tokens(batch, torch.randint(vocab, tokens.shape, generator=random))
            return batch

        def rate_of(step: int, rate: float) -> float:
            if _spikes.get(step) != "rate" or step in raised:
                return rate
            raised.add(step)
            return _FACTOR * rate

        change_steps(batch=batch_of, rate=rate_of)


CALLBACKS.register(CallbackPart(name="planted_spikes", make=PlantedSpikes))
