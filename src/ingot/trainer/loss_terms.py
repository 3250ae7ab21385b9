"""The loss terms of a run: made from its settings, and their means at log lines."""

from functools import partial

import numpy as np

from ingot.plugins.loss import LOSS_TERMS
from ingot.plugins.registry import options_of, resolve
from ingot.schema import events
from ingot.schema.run import RunConfig
from ingot.trainer.mesh.collectives import gather_from
from ingot.trainer.model.loss import LossTerm
from ingot.trainer.parts import RunParts


def loss_terms(config: RunConfig) -> list[LossTerm]:
    """Return new loss terms, for one stage of the model."""
    terms = []
    for name, values in config.loss.items():
        part = LOSS_TERMS[name]
        options = options_of(part, {key: value for key, value in values.items() if key != "weight"})
        terms.append(LossTerm(name, float(values["weight"]), partial(_called, resolve(part.term), options)))
    return terms


def _called(term, options, logits, targets, vocabulary):
    return term(logits, targets, vocabulary, options)


def log_loss_terms(parts: RunParts, step: int) -> None:
    """Write a `metrics` event with the mean of each term over the tokens since the previous log line. Collective."""
    if not parts.config.loss:
        return
    own = np.zeros((len(parts.config.loss), 2))
    for stage in parts.model.stages.values():
        terms = getattr(stage.get_submodule("readout"), "terms")  # noqa: B009
        own += np.stack([term.take().numpy() for term in terms])
    sums = gather_from(parts.token_readers, own).sum(axis=0)
    means = {name: float(total / tokens) for name, (total, tokens) in zip(parts.config.loss, sums, strict=True)}
    parts.log(events.METRICS, step=step, by="loss", values=means)
