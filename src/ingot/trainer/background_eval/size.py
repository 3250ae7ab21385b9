"""The number of held-out tokens that each evaluation of a run in the background scores, by the cost of its model.

It is chosen once for a run, by the first evaluation, and kept: only scores of the same text can be compared.
"""

import time
from dataclasses import asdict, dataclass

import numpy as np
import torch

from ingot.machine.facts import usable_cores
from ingot.schema.evaluate import tokens_within
from ingot.trainer.evaluate import local_nats, score_rows
from ingot.trainer.heldout import open_heldout
from ingot.trainer.trained import Trained


@dataclass(frozen=True, kw_only=True)
class EvaluationSize:
    """The choice. tokens: for each evaluation, at most. share, max_tokens, every, heldout: the settings that it follows
    from; it is void when one of them changes. budget_seconds: of a core, or of a GPU, for all of an evaluation.
    start_seconds: of these, what it took before the text. seconds_per_token: of the text, measured on a window of it;
    null if it was not. reason: in words."""

    tokens: int
    share: float
    max_tokens: int
    every: str
    heldout: str
    budget_seconds: float
    start_seconds: float
    seconds_per_token: float | None
    reason: str

    def facts(self) -> dict:
        """Return the fields of an `evaluation_sized` event (schema/events.py), without the step."""
        return asdict(self)


def choose_size(trained: Trained, interval_seconds: float) -> EvaluationSize:
    """Choose the number of tokens. Call as soon as the model is loaded: the CPU time of this process so far counts as
    that of its start. interval_seconds: between two evaluations.

    Raises what `open_heldout` raises.
    """
    config, on_gpu = trained.config, trained.device.type != "cpu"
    settings, start = config.evaluate.background, time.process_time()
    lanes = torch.cuda.device_count() if on_gpu else usable_cores()
    budget, of_token, tokens = settings.share * interval_seconds * lanes, None, config.evaluate.max_tokens
    if trained.encoder is None:
        reason = "without data.tokenizer, the bytes of a part of the text are not known"
    else:
        of_token = _seconds_per_token(trained)
        tokens = tokens_within(budget, start, of_token, tokens)
        unit = f"{lanes} GPU{'s' * (lanes > 1)}" if on_gpu else f"{lanes} core{'s' * (lanes > 1)}"
        reason = f"{settings.share:g} of the time of {unit}"
        if tokens == config.evaluate.max_tokens:
            reason = "evaluate.max_tokens"
        elif budget < 2 * start:
            reason = f"as long as its start takes, which is more than half of {reason}"
    return EvaluationSize(
        tokens=tokens,
        share=settings.share,
        max_tokens=config.evaluate.max_tokens,
        every=settings.every,
        heldout=config.data.heldout,
        budget_seconds=round(budget, 3),
        start_seconds=round(start, 3),
        seconds_per_token=of_token,
        reason=reason,
    )


@torch.no_grad()
def _seconds_per_token(trained: Trained) -> float:
    """Return the time of one token of the text: CPU seconds of all threads, or seconds of the GPU. Only one window is
    scored, after the same one for a start: that of a large model takes long, and in a batch it takes no longer."""
    heldout = open_heldout(trained.config, trained.folder, trained.encoder, max_tokens=1)  # a document of each source
    assert heldout is not None
    clock, nats_of, window = time.process_time, local_nats(trained.model), np.zeros(1, np.int64)
    if trained.device.type != "cpu":
        clock = time.perf_counter
    score_rows(nats_of, heldout, window, 1, trained.device)
    began = clock()
    score_rows(nats_of, heldout, window, 1, trained.device)  # reads the result, so that a GPU is done
    return (clock() - began) / heldout.rows.inputs.shape[1]
