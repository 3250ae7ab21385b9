"""The update is the paper's, a step is what torch alone would do, and the weights go where something can be learned."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.expect import refused

from ingot.schema.tokens import read_token_manifest
from ingot.trainer.experiments.doremi import DoremiRules, doremi, excess_nats, updated_weights
from ingot.trainer.experiments.proxy import Proxy, SourceBatches, proxy_run
from ingot.trainer.model.init import initialize
from ingot.trainer.model.transformer import Transformer

from ..conftest import write_tokens

VOCAB = 48


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """noise: uniform tokens, which nobody can predict. easy: one token. rules: the next one by a table."""
    random = np.random.default_rng(0)
    table = random.permutation(VOCAB - 1) + 1

    def sequence(source: str) -> np.ndarray:
        if source == "noise":
            return random.integers(1, VOCAB, 200)
        if source == "easy":
            return np.full(200, 7)
        found = [int(random.integers(1, VOCAB))]
        for _ in range(199):
            found.append(int(table[found[-1] - 1]))
        return np.array(found)

    folder = tmp_path_factory.mktemp("tokens")
    encoder = SimpleNamespace(encode=lambda text: SEQUENCES[text], eot_id=0, vocab_size=VOCAB, sha256="t")
    texts = {source: [f"{source}{n}" for n in range(60)] for source in ("noise", "easy", "rules")}
    SEQUENCES.update({text: sequence(source) for source, names in texts.items() for text in names})
    write_tokens(folder, encoder, texts, "train")
    return folder


SEQUENCES: dict[str, np.ndarray] = {}


def config(tokens, steps=60, **changes):
    run = proxy_run(
        tokens, read_token_manifest(tokens), steps=steps, width=32, layers=1, seq_len=32, global_batch=12, seed=3
    )
    return replace(run, optim=replace(run.optim, lr=1e-2), **changes)


@given(
    st.lists(st.tuples(st.floats(0.01, 1), st.floats(0, 20)), min_size=2, max_size=6),
    st.floats(0.01, 5),
    st.floats(0, 1),
)
def test_weights_move_as_in_algorithm_1(pairs, step_size, smoothing):
    weights = np.array([w for w, _ in pairs]) / sum(w for w, _ in pairs)
    excess = np.array([e for _, e in pairs])
    grown = [w * np.exp(step_size * e) for w, e in zip(weights, excess, strict=True)]
    wanted = [(1 - smoothing) * g / sum(grown) + smoothing * (1 / len(grown)) for g in grown]
    found = updated_weights(weights, excess, DoremiRules(step_size=step_size, smoothing=smoothing))
    assert np.allclose(found, wanted, rtol=1e-9) and found.sum() == pytest.approx(1)


def test_excess_is_clipped_token_by_token():
    proxy, reference = [torch.tensor([3.0, 1.0]), torch.tensor([1.0])], [torch.tensor([1.0, 5.0]), torch.tensor([2.0])]
    assert excess_nats(proxy, reference).tolist() == [1.0, 0.0]


def test_a_step_is_what_torch_alone_does(tokens):
    """Three steps on weighted sources against a plain model, a plain loss and torch's AdamW."""
    run, manifest = config(tokens), read_token_manifest(tokens)
    run = replace(run, train=replace(run.train, micro_batch=2))
    proxy = Proxy(run, manifest, torch.device("cpu"))
    plain = Transformer(run.model)
    initialize(plain, run.model, run.seed)
    groups = [
        {"params": [p for p in plain.parameters() if (p.dim() >= 2) == decays], "weight_decay": 0.1 * decays}
        for decays in (True, False)
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    batches, weights = SourceBatches(tokens, manifest, 32, 3, 4), np.array([0.2, 0.5, 0.3])
    for step in (1, 2, 3):
        batch = batches.step(step)
        proxy.train(step, batch, weights)
        loss = torch.zeros(())
        for part, weight in zip(batch, weights.tolist(), strict=True):
            logits = plain(part[:, :-1])
            loss = loss + weight * torch.nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten())
        adamw.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        for group in adamw.param_groups:
            group["lr"] = 1e-2 * step / 3  # warm-up of 3 steps
        adamw.step()
    for mine, its in zip(proxy.model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine, its, atol=2e-5)


def test_what_can_be_learned_gains_weight_and_noise_loses(tokens, tmp_path):
    out = tmp_path / "doremi.json"
    result = doremi(config(tokens), out=out)
    assert sum(result.weights.values()) == pytest.approx(1)
    assert result.base == pytest.approx({"easy": 1 / 3, "noise": 1 / 3, "rules": 1 / 3})
    assert result.weights["rules"] > 0.5 > 1 / 3 > result.weights["noise"]
    assert result.weights["rules"] > result.weights["easy"]
    mean = {name: np.mean([moment.excess[name] for moment in result.history]) for name in result.weights}
    assert mean["noise"] < 0.5 * mean["rules"]
    written = json.loads(out.read_text())
    assert written["weights"] == result.weights and len(written["history"]) == len(result.history) == 60
    assert written["rules"] == {"smoothing": 1e-3, "step_size": 1.0}


def test_the_same_seed_gives_the_same_weights(tokens):
    assert doremi(config(tokens, steps=5)).weights == doremi(config(tokens, steps=5)).weights


def test_a_proxy_begins_where_its_reference_began(tokens):
    """A step without a learning rate leaves both models equal: no excess, so the weights stay uniform."""
    run = config(tokens, steps=3)
    result = doremi(replace(run, optim=replace(run.optim, lr=1e-30)), {"noise": 1.0, "easy": 2.0})
    assert result.weights == pytest.approx({"easy": 1 / 3, "noise": 1 / 3, "rules": 1 / 3})
    assert result.base == pytest.approx({"easy": 2 / 3, "noise": 1 / 3, "rules": 0.0})


def test_what_makes_no_sense_is_refused(tokens):
    with refused("E-SOURCE-UNKNOWN", source="web"):
        doremi(config(tokens), {"web": 1.0})
    with refused("E-DOREMI-SETTING", setting="step_size"):
        doremi(config(tokens), rules=DoremiRules(step_size=0))
