import math

import numpy as np
import pytest
import torch

from ingot.schema.arch import Arch
from ingot.trainer.evaluate import evaluate, sample_prompts
from ingot.trainer.heldout import Heldout, SourceText
from ingot.trainer.model.generate import cached
from ingot.trainer.model.init import initialize
from ingot.trainer.model.transformer import Transformer

VOCAB, EOT = 7, 0
TEXTS = [SourceText("a", np.array([5, 6, 1, 0, 2, 3, 0]), 40), SourceText("b", np.array([4, 4, 4, 0]), 11)]


def uniform(inputs, targets, documents):
    """Believes in nothing: every token costs ln V."""
    return torch.full(inputs.shape, math.log(VOCAB), dtype=torch.float64)


def heldout(seq_len=3, mask_documents=False):
    unigram = np.arange(1.0, VOCAB + 1)
    return Heldout.prepare(TEXTS, unigram, seq_len=seq_len, eot_id=EOT, mask_documents=mask_documents)


@pytest.mark.parametrize("seq_len", [1, 2, 3, 64])
@pytest.mark.parametrize("micro_batch", [1, 5])
def test_bits_per_byte_by_hand(seq_len, micro_batch):
    found = evaluate(uniform, heldout(seq_len), micro_batch=micro_batch, device=torch.device("cpu"))
    # 5 text tokens in source a, 3 in source b; the end of text is not scored.
    assert found.by_source["a"].tokens == 5 and found.by_source["b"].tokens == 3 and found.total.tokens == 8
    assert found.by_source["a"].bpb == pytest.approx(5 * math.log2(VOCAB) / 40, rel=1e-6)
    assert found.total.bpb == pytest.approx(8 * math.log2(VOCAB) / 51, rel=1e-6)
    assert found.total.loss == pytest.approx(math.log(VOCAB), rel=1e-6)
    assert found.by_source["b"].unigram_bpb == pytest.approx(3 * 5.0 / math.log(2) / 11)
    assert found.total.unigram_bpb == pytest.approx((6 + 7 + 2 + 3 + 4 + 3 * 5) / math.log(2) / 51)
    assert set(found.facts()) == {"bpb", "loss", "tokens", "unigram_bpb", "by_source"}


ARCH = Arch(vocab_size=VOCAB, d_model=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, d_ffn=16)


def model():
    built = Transformer(ARCH).double()
    initialize(built, ARCH, 1)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.mul_(10 if parameter.dim() > 1 else 1)
    return built


@pytest.mark.parametrize("mask", [False, True])
def test_documents_are_masked_as_in_training(mask):
    seen = []

    def spy(inputs, targets, documents):
        seen.append(None if documents is None else documents.tolist())
        return uniform(inputs, targets, documents)

    evaluate(spy, heldout(seq_len=8, mask_documents=mask), micro_batch=8, device=torch.device("cpu"))
    # The rows are EOT 5 6 1 EOT 2 3 EOT and EOT 4 4 4 EOT EOT EOT EOT; an end of text belongs to what it ends.
    assert seen == ([[[0, 1, 1, 1, 1, 2, 2, 2], [0, 1, 1, 1, 1, 2, 3, 4]]] if mask else [None])


class Encoder:
    eot_id = EOT

    def encode(self, text):
        return np.array([int(c) for c in text], np.uint32)

    def decode(self, ids):
        return "".join(map(str, ids))


def test_samples_repeat_and_end_before_the_end_of_text():
    def draw():
        built = model()
        return sample_prompts(lambda: cached(built, ARCH, 40), ARCH, Encoder(), ["123", "6", ""], max_tokens=30, seed=3)

    samples = draw()
    assert samples == draw()
    assert [prompt for prompt, _ in samples] == ["123", "6", ""]
    assert all("0" not in text for _, text in samples)
    assert any(text for _, text in samples)
