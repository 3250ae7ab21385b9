import pytest
import torch
from tests.expect import refused

from ingot.schema.arch import Arch
from ingot.trainer.model.generate import KVCache, cached, choose_token, generate
from ingot.trainer.model.init import initialize
from ingot.trainer.model.transformer import Transformer

ARCH = Arch(vocab_size=61, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, d_ffn=40, max_seq_len=40)


@pytest.fixture(scope="module")
def model():
    model = Transformer(ARCH).double()
    initialize(model, ARCH, 5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5 if parameter.dim() > 1 else 1)
    return model


@pytest.mark.parametrize("pieces", [[7, 1, 1, 1, 1, 1], [1] * 12, [4, 5, 3], [12]], ids=str)
def test_cached_logits_equal_uncached_ones(model, pieces):
    x = torch.randint(0, 61, (2, 12), generator=torch.Generator().manual_seed(1))
    cache = KVCache(ARCH, 12)
    with torch.no_grad():
        whole = model(x)
        parts = [model(part, cache=cache) for part in x.split(pieces, dim=1)]
    assert torch.allclose(torch.cat(parts, dim=1), whole, rtol=1e-12, atol=1e-12)
    assert cache.tokens == 12


def test_greedy_equals_recomputing_everything(model):
    prompt = [3, 14, 15]
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(10):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert generate(cached(model, ARCH, 40), ARCH, prompt, max_tokens=10) == ids[3:]


def test_a_seed_repeats_and_seeds_differ(model):
    def draw(seed):
        return generate(cached(model, ARCH, 40), ARCH, [1], max_tokens=20, temperature=1.5, seed=seed)

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_stops_after_the_stop_token(model):
    made = generate(cached(model, ARCH, 40), ARCH, [3, 14, 15], max_tokens=10)
    assert (
        generate(cached(model, ARCH, 40), ARCH, [3, 14, 15], max_tokens=10, stop_id=made[4])
        == made[: made.index(made[4]) + 1]
    )


def test_top_k_takes_the_likeliest_only():
    logits = torch.tensor([0.0, 3.0, 1.0, 2.9])
    generator = torch.Generator().manual_seed(0)
    assert {choose_token(logits, 1.0, 2, generator) for _ in range(200)} == {1, 3}
    assert {choose_token(logits, 10.0, 0, generator) for _ in range(400)} == {0, 1, 2, 3}
    assert choose_token(logits, 0, 0, generator) == 1


def test_temperature_follows_the_softmax():
    logits, generator = torch.tensor([0.0, 1.0]), torch.Generator().manual_seed(0)
    share = sum(choose_token(logits, 0.5, 0, generator) for _ in range(4000)) / 4000
    assert share == pytest.approx(torch.tensor(2.0).sigmoid().item(), abs=0.02)


@pytest.mark.parametrize(
    "arguments, code",
    [
        ({"prompt": []}, "E-PROMPT-EMPTY"),
        ({"temperature": -1.0}, "E-SAMPLING-RANGE"),
        ({"max_tokens": 0}, "E-SAMPLING-RANGE"),
        ({"max_tokens": 40}, "E-CONTEXT-EXCEEDED"),
    ],
    ids=str,
)
def test_impossible_requests_are_refused(model, arguments, code):
    with refused(code):
        generate(cached(model, ARCH, 40), ARCH, **({"prompt": [1], "max_tokens": 5} | arguments))
