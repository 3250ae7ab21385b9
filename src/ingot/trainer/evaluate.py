"""Held-out bits per byte by source, with a unigram model on the same tokens for comparison; and samples from prompts.

Bits per byte make models with different tokenizers comparable: nats of all text tokens / ln 2 / UTF-8 bytes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ingot.schema.arch import Arch
from ingot.tokenizer.encoder import Encoder
from ingot.trainer.heldout import Heldout, sanity_rows
from ingot.trainer.loader.reader import document_numbers
from ingot.trainer.mesh.collectives import gather_from
from ingot.trainer.model.generate import NextLogits, cached, generate
from ingot.trainer.parts import RunParts

# Settings of samples for people to read: varied, but without the long tail of unlikely tokens.
SAMPLE_TEMPERATURE, SAMPLE_TOP_K = 0.8, 50


@dataclass(frozen=True)
class TextScore:
    """The score of some text. loss: nats per token. bpb: bits per byte. unigram_bpb: bits per byte of a model that
    uses only token frequencies, on the same tokens."""

    bpb: float
    loss: float
    tokens: int
    unigram_bpb: float


@dataclass(frozen=True)
class Evaluation:
    """The scores of the held-out text, in total and by source."""

    total: TextScore
    by_source: dict[str, TextScore]

    def facts(self) -> dict:
        """Return the fields of an `evaluation` event (schema/events.py), without the step."""
        return asdict(self.total) | {"by_source": {name: asdict(score) for name, score in self.by_source.items()}}


# (inputs, targets int64 [B, T], document ids on the host or None) -> nats of every target [B, T]; zeros on ranks
# without a result
Nats = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def local_nats(model: torch.nn.Module) -> Nats:
    """Return the scoring function of a model that is entirely in this process."""
    return lambda inputs, targets, documents: model(inputs, targets, documents, per_token=True).view(inputs.shape)


def evaluate(
    nats_of: Nats,
    heldout: Heldout,
    *,
    micro_batch: int,
    device: torch.device,
    part: int = 0,
    readers: Sequence[int] | None = None,
) -> Evaluation:
    """Score the held-out text; every rank gets the result. Collective if there are `readers`.

    part: the part of the text that this rank scores. readers: the rank that scores each part, in order.
    """
    cut = heldout.rows
    rows = len(cut.source)
    everyone = _nats_of_rows(nats_of, heldout, np.arange(rows), micro_batch, device, part, readers)
    base = (heldout.unigram[cut.targets] * cut.counted).sum(axis=1)
    tokens = cut.counted.sum(axis=1)

    def score(chosen: np.ndarray, text_bytes: int) -> TextScore:
        bits = 1 / (math.log(2) * text_bytes)
        total = float(everyone[chosen].sum())
        return TextScore(
            bpb=total * bits,
            loss=total / int(tokens[chosen].sum()),
            tokens=int(tokens[chosen].sum()),
            unigram_bpb=float(base[chosen].sum()) * bits,
        )

    by_source = {t.source: score(cut.source == i, t.text_bytes) for i, t in enumerate(heldout.texts)}
    whole = score(np.ones(rows, bool), sum(t.text_bytes for t in heldout.texts))
    return Evaluation(whole, by_source)


def sanity_loss(trainer: RunParts) -> float:
    """Return the loss of a fixed batch of held-out text, in nats per token, the same on all ranks. Collective."""
    heldout = trainer.heldout
    assert heldout is not None
    rows = sanity_rows(heldout)
    nats = _nats_of_rows(
        run_nats(trainer),
        heldout,
        rows,
        trainer.config.train.micro_batch,
        trainer.place.device,
        trainer.mesh.data_rank,
        trainer.readers,
    )
    return float(nats.sum()) / int(heldout.rows.counted[rows].sum())


def _nats_of_rows(
    nats_of: Nats,
    heldout: Heldout,
    rows: np.ndarray,
    micro_batch: int,
    device: torch.device,
    part: int,
    readers: Sequence[int] | None,
) -> np.ndarray:
    """Return the sum of nats of each of `rows`, divided among the `readers` (`evaluate`): float64 [len(rows)]."""
    # Every rank runs the same number of forwards, because a sharded model gathers its weights in each forward.
    per_rank = -(-len(rows) // len(readers or [0]))
    own = rows[np.arange(part * per_rank, (part + 1) * per_rank).clip(max=len(rows) - 1)]
    nats = score_rows(nats_of, heldout, own, micro_batch, device)
    return gather_from(readers, nats).reshape(-1)[: len(rows)] if readers else nats


def score_rows(nats_of: Nats, heldout: Heldout, rows: np.ndarray, micro_batch: int, device: torch.device) -> np.ndarray:
    """Return, for each row, the sum of nats over its counted targets: float64 [len(rows)]."""
    nats = np.zeros(len(rows))
    for start in range(0, len(rows), micro_batch):
        batch = rows[start : start + micro_batch]
        inputs = heldout.rows.inputs[batch]
        documents = None
        if heldout.mask_documents:
            documents = torch.from_numpy(document_numbers(inputs, heldout.eot_id))
        targets_BT = torch.from_numpy(heldout.rows.targets[batch]).to(device)
        nats_BT = nats_of(torch.from_numpy(inputs).to(device), targets_BT, documents)
        counted_BT = torch.from_numpy(heldout.rows.counted[batch]).to(device)
        nats[start : start + len(batch)] = (nats_BT.double() * counted_BT).sum(dim=1).cpu().numpy()
    return nats


def sample_prompts(
    next_logits: Callable[[], NextLogits],
    arch: Arch,
    encoder: Encoder,
    prompts: Sequence[str],
    *,
    max_tokens: int,
    seed: int,
) -> list[tuple[str, str]]:
    """Return (prompt, continuation) for each prompt; a continuation ends before the first end-of-text. Collective.

    next_logits: makes a NextLogits function for a new text. All ranks draw the same tokens and run the same number of
    forwards, so no rank stops early.
    """
    samples = []
    for number, prompt in enumerate(prompts):
        ids = generate(
            next_logits(),
            arch,
            encoder.encode(prompt).tolist() or [encoder.eot_id],
            max_tokens=max_tokens,
            temperature=SAMPLE_TEMPERATURE,
            top_k=SAMPLE_TOP_K,
            seed=seed + number,
        )
        text = ids[: ids.index(encoder.eot_id)] if encoder.eot_id in ids else ids
        samples.append((prompt, encoder.decode(text)))
    return samples


def run_nats(trainer: RunParts) -> Nats:
    """Return the scoring function of a run's model. The result is zeros except on the last pipeline stage. Each call is
    collective over pp, cp and tp."""

    def nats_of(inputs_BT: Tensor, targets_BT: Tensor, documents_BT: Tensor | None) -> Tensor:
        found = trainer.program.forward_only(inputs_BT, targets_BT, documents_BT, per_token=True)
        return torch.zeros(inputs_BT.shape, device=inputs_BT.device) if found is None else found.view(inputs_BT.shape)

    return nats_of


def run_logits(trainer: RunParts, capacity: int) -> NextLogits:
    """Return the function that computes the next token's logits, for one text of at most `capacity` tokens. Collective.

    All ranks get the same logits. A rank with the whole model and whole sequences caches keys and values. Otherwise the
    ranks run the whole text through the pipeline for every token, padded to a length that they can divide; because
    attention is causal, the padding does not change the result.
    """
    mesh, arch, device = trainer.mesh, trainer.config.model, trainer.place.device
    if mesh.size("pp") == mesh.size("cp") == mesh.size("tp") == 1:
        return cached(trainer.model.stages[0], arch, capacity)
    last = trainer.program.table.rank_of_stage[-1]
    source, multiple = mesh.ranks("pp")[last], trainer.program.token_multiple

    def next_logits(ids: Sequence[int]) -> Tensor:
        padded = [*ids, *[ids[-1]] * (-len(ids) % multiple)]
        logits_BTV = trainer.program.forward_only(torch.tensor([padded], device=device), None, None, per_token=False)
        if logits_BTV is None:
            logits_V = torch.empty(arch.vocab_size, dtype=trainer.model.hidden, device=device)
        else:
            logits_V = logits_BTV[0, len(ids) - 1].contiguous()
        if mesh.size("pp") > 1:
            dist.broadcast(logits_V, source, group=mesh.group("pp"))
        return logits_V

    return next_logits
