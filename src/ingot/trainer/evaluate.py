"""Held-out bits per byte by source, beside a unigram model on the same tokens, and samples from fixed prompts.

Bits per byte compare models with different tokenizers: nats of all text tokens / ln 2 / UTF-8 bytes of the text.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

from ingot.schema.arch import Arch
from ingot.tokenizer.encoder import Encoder
from ingot.trainer.heldout import SourceText, Windows, cut_windows
from ingot.trainer.loader.reader import document_numbers
from ingot.trainer.mesh.collectives import gather_from
from ingot.trainer.model.generate import NextLogits, generate

# Samples for people to read: lively, but without the long tail of unlikely tokens.
SAMPLE_TEMPERATURE, SAMPLE_TOP_K = 0.8, 50


@dataclass(frozen=True)
class Score:
    """loss: nats per token; bpb: bits per byte; unigram_bpb: of token frequencies alone, on the same tokens."""

    bpb: float
    loss: float
    tokens: int
    unigram_bpb: float


@dataclass(frozen=True)
class Evaluation:
    total: Score
    by_source: dict[str, Score]

    def facts(self) -> dict:
        """The fields of an `evaluation` event (schema/events.py) besides the step."""
        return asdict(self.total) | {"by_source": {name: asdict(score) for name, score in self.by_source.items()}}


@dataclass(frozen=True)
class Heldout:
    """What is scored, ready to be scored many times. unigram: nats per token id, float64 [vocab_size]."""

    texts: list[SourceText]
    windows: Windows
    unigram: np.ndarray
    eot_id: int
    mask_documents: bool

    @classmethod
    def prepare(
        cls, texts: list[SourceText], unigram: np.ndarray, *, seq_len: int, eot_id: int, mask_documents: bool
    ) -> "Heldout":
        return cls(texts, cut_windows(texts, seq_len, eot_id), unigram, eot_id, mask_documents)


# (inputs, targets int64 [B, T], document ids or None) -> nats of every target [B, T]; where this rank has no result, 0
Nats = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def local_nats(model: torch.nn.Module) -> Nats:
    """Of a model that this process can run by itself."""
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

    readers: the ranks whose results count, by the part of the text that they score; this rank scores `part`.
    """
    windows = heldout.windows
    rows, parts = len(windows.source), len(readers or [0])
    # Every rank makes the same number of forwards: a sharded model gathers its weights in each.
    per_rank = -(-rows // parts)
    mine = np.arange(part * per_rank, (part + 1) * per_rank).clip(max=rows - 1)
    nats = score_windows(nats_of, heldout, mine, micro_batch, device)
    everyone = gather_from(readers, nats).reshape(-1)[:rows] if readers else nats
    base = (heldout.unigram[windows.targets] * windows.counted).sum(axis=1)
    tokens = windows.counted.sum(axis=1)

    def score(chosen: np.ndarray, text_bytes: int) -> Score:
        bits = 1 / (math.log(2) * text_bytes)
        total = float(everyone[chosen].sum())
        return Score(
            bpb=total * bits,
            loss=total / int(tokens[chosen].sum()),
            tokens=int(tokens[chosen].sum()),
            unigram_bpb=float(base[chosen].sum()) * bits,
        )

    by_source = {t.source: score(windows.source == i, t.text_bytes) for i, t in enumerate(heldout.texts)}
    whole = score(np.ones(rows, bool), sum(t.text_bytes for t in heldout.texts))
    return Evaluation(whole, by_source)


def score_windows(
    nats_of: Nats, heldout: Heldout, rows: np.ndarray, micro_batch: int, device: torch.device
) -> np.ndarray:
    """Nats of the counted targets of each row, float64 [len(rows)]."""
    nats = np.zeros(len(rows))
    for start in range(0, len(rows), micro_batch):
        batch = rows[start : start + micro_batch]
        inputs = heldout.windows.inputs[batch]
        documents = None
        if heldout.mask_documents:
            documents = torch.from_numpy(document_numbers(inputs, heldout.eot_id)).to(device)
        targets_BT = torch.from_numpy(heldout.windows.targets[batch]).to(device)
        nats_BT = nats_of(torch.from_numpy(inputs).to(device), targets_BT, documents)
        counted_BT = torch.from_numpy(heldout.windows.counted[batch]).to(device)
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
    """(prompt, continuation) for each prompt; the continuation ends before the first end of text. Collective.

    next_logits: makes one for a new text. All ranks draw the same tokens and make the same number of forwards, so none
    stops early.
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
