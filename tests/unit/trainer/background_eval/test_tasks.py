"""Tasks of lm-eval on a small model, compared with plain computation. lm-eval is large, so its absence skips them."""

import math
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("lm_eval", reason="needs the part eval: pip install 'ingot[eval]'")
from lm_eval.api.instance import Instance
from tests.unit.trainer.background_eval.tiny_task import write_task

from ingot.errors import UsageError
from ingot.schema.arch import Arch
from ingot.tokenizer.encoder import load_encoder
from ingot.trainer.background_eval.scores import score_tasks
from ingot.trainer.background_eval.tasks import TaskModel
from ingot.trainer.loader.reader import document_numbers
from ingot.trainer.model.transformer import Transformer

pytestmark = pytest.mark.nightly
POSITIONS = 32


@pytest.fixture(params=[False, True], ids=["whole", "masked"])
def trained(token_folders, request):
    encoder = load_encoder(token_folders / "tokenizer.json")
    arch = Arch(vocab_size=300, d_model=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, d_ffn=48,
                max_seq_len=POSITIONS)  # fmt: skip
    torch.manual_seed(3)
    model = Transformer(arch)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    data = SimpleNamespace(mask_documents=request.param, tokenizer="x")
    config = SimpleNamespace(model=arch, data=data, seed=5)
    return SimpleNamespace(config=config, folder=None, step=1, model=model, encoder=encoder, device=torch.device("cpu"))


def ask(kind, *arguments):
    return [Instance(request_type=kind, doc={}, arguments=one, idx=0) for one in arguments]


def nats_of(trained, context, target):
    """The log-probability of `target` after `context` and whether it is greedy, token by token."""
    total, greedy, documents = 0.0, True, None
    for at, token in enumerate(target):
        ids = torch.tensor([context + target[:at]])
        if trained.config.data.mask_documents:
            documents = torch.from_numpy(document_numbers(ids.numpy(), trained.encoder.eot_id))
        logits = trained.model(ids, None, documents)[0, -1].double()
        total += float(logits.log_softmax(-1)[token])
        greedy = greedy and int(logits.argmax()) == token
    return total, greedy


@torch.no_grad()
def test_log_likelihoods_are_those_of_single_tokens(trained):
    model, encode = TaskModel(trained), lambda text: trained.encoder.encode(text).tolist()
    pairs = [("stone ingot", " ore"), ("stone ", "pour stamp stone"), ("", "ore stamp"), ("pour", " x" * 3)]
    found = model.loglikelihood(ask("loglikelihood", *pairs))
    for (context, target), (nats, greedy) in zip(pairs, found, strict=True):
        whole, head = encode(context + target), encode(context.rstrip()) or [trained.encoder.eot_id]
        tail = whole[len(head) :] if context else whole
        assert (nats, greedy) == (
            pytest.approx(nats_of(trained, head, tail)[0], rel=1e-5),
            nats_of(trained, head, tail)[1],
        )
    best = int(trained.model(torch.tensor([[5]]), None, None)[0, -1].argmax())
    assert model._loglikelihood_tokens([(None, [5], [best]), (None, [5], [])])[0][1] is True


@torch.no_grad()
def test_a_long_text_is_scored_once_per_token(trained):
    text = "stone ingot ore pour stamp " * 9
    ids, eot = trained.encoder.encode(text).tolist(), trained.encoder.eot_id
    assert len(ids) > POSITIONS
    (found,) = TaskModel(trained).loglikelihood_rolling(ask("loglikelihood_rolling", (text,)))
    expected, at = nats_of(trained, [eot], ids[:POSITIONS])[0], POSITIONS
    while at < len(ids):  # each window ends with the next tokens, and begins as early as it can
        end = min(at + POSITIONS, len(ids))
        expected += nats_of(trained, ids[end - POSITIONS - 1 : at], ids[at:end])[0]
        at = end
    assert found == pytest.approx(expected, rel=1e-5)


@torch.no_grad()
def test_a_continuation_is_greedy_and_ends_before_its_stop_text(trained):
    model = TaskModel(trained)
    whole = model.generate_until(ask("generate_until", ("stone", {"until": [], "max_gen_toks": 12})))[0]
    ids = trained.encoder.encode("stone").tolist()
    new: list[int] = []
    while len(new) < 12:
        token = int(trained.model(torch.tensor([ids + new]), None, None)[0, -1].argmax())
        if token == trained.encoder.eot_id:
            break
        new.append(token)
    assert whole == trained.encoder.decode(new) and len(whole) > 3
    stop = whole[2:4]
    (short,) = model.generate_until(ask("generate_until", ("stone", {"until": [stop, "zzz"], "max_gen_toks": 12})))
    assert short == whole[: whole.find(stop)]


def test_a_local_task_is_scored_without_a_network(trained, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = write_task(tmp_path)
    scores = score_tasks(trained, ["nats"], tmp_path, examples=2)
    assert scores.examples == {"nats": 2} and scores.lower_is_better == ["nats/perplexity"]
    encode = lambda text: trained.encoder.encode(text).tolist()  # noqa: E731
    with torch.no_grad():
        sums = []
        for row in rows[:2]:
            head = encode(row["q"])
            sums.append(nats_of(trained, head, encode(row["q"] + row["a"])[len(head) :])[0])
    assert scores.scores["nats"]["perplexity"] == pytest.approx(math.exp(-sum(sums) / 2), rel=1e-4)
    with pytest.raises(UsageError) as error:
        score_tasks(trained, ["nat"], tmp_path)
    assert error.value.code == "E-EVAL-TASK-UNKNOWN" and "nats" in error.value.facts["nearest"]
