"""A run's checkpoint becomes a folder that transformers loads, or nothing is exported."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.checkpoints import ledger_of
from tests.expect import RecordedMeter, named, refused

from ingot.config import to_dict, to_toml
from ingot.events import EventLog, read_events
from ingot.plugins.piece import ParameterShard
from ingot.schema.arch import Arch, Mla, Moe
from ingot.schema.run import Data, RunConfig, Train
from ingot.schema.run_folder import RunFolder
from ingot.schema.tokens import Shard, TokenManifest
from ingot.storage import sha256_file, write_json
from ingot.theory.rules import load_run
from ingot.tokenizer.byte_bpe import train_bpe
from ingot.trainer.checkpoint.save import CheckpointFacts, save_checkpoint
from ingot.trainer.checkpoint.state import TrainingState
from ingot.trainer.export import huggingface
from ingot.trainer.export.huggingface import export_run
from ingot.trainer.model.transformer import Transformer

TEXTS = [
    "The mean of a list of numbers is their sum divided by how many there are.",
    "  Leading spaces, tabs\tand\n\nnewlines  stay   as they are. ",
    "naïve café — “quotes”, 日本語のテキスト, русский, العربية, 👩‍🚀🚀, e\u0301 and \u00e9",
    "def f(x):\n    return x ** 2  # 1234567890 0.001 1e-9",
    "",
    " ",
    "\u200b\u2028 odd separators \x07 and a null \x00 byte",
    "Don't they'll we've I'm IT'S",
]


class NoMoments:
    """The optimizer's part of a state, of which an export reads nothing."""

    def __init__(self, model):
        self.names = [name for name, _ in model.named_parameters()]

    def moments(self):
        return {name: {} for name in self.names}

    def put_moments(self, moments):
        pass


DENSE = Arch(
    vocab_size=400, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, d_ffn=64, max_seq_len=128
)
MIXTRAL = replace(DENSE, moe=Moe(num_experts=4, top_k=2, d_expert=24, global_loss=0.01, noise=0.5))
DEEPSEEK = replace(
    DENSE,
    num_kv_heads=4,
    norm_eps=1e-6,
    mla=Mla(q_rank=16, kv_rank=12, nope_dim=4, rope_dim=4, v_dim=6),
    moe=Moe(num_experts=8, top_k=2, d_expert=24, shared_experts=1, first_dense=1, scores="sigmoid", bias_rate=0.001),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("project"), DENSE)


def make_run(root: Path, arch: Arch) -> Path:
    """A run folder with one real checkpoint of random weights, its token manifest and a real tokenizer."""
    tokenizer = train_bpe(TEXTS * 40, 400, root / "tokens" / "tokenizer.json")
    eot_id = next(t["id"] for t in json.loads(tokenizer.read_text())["added_tokens"])
    shard = Shard(
        name="web-0", source="web|<b>", tokens=900, documents=9, text_bytes=3000, blocks_sha256="", documents_sha256=""
    )
    tokens = TokenManifest(
        dtype="uint16", vocab_size=400, eot_id=eot_id, tokenizer_sha256=sha256_file(tokenizer), corpus_sha256="c" * 64,
        split="train", block_bytes=1 << 20, seed=1, shards=(shard,),
    )  # fmt: skip
    write_json(root / "tokens" / "train" / "manifest.json", to_dict(tokens))
    config = RunConfig(
        name="demo_*run*",
        model=arch,
        data=Data(tokens="../tokens/train"),
        train=Train(steps=20, seq_len=64, global_batch=2, micro_batch=1),
    )
    folder = RunFolder(root / "run")
    folder.root.mkdir()
    folder.config.write_text(to_toml(config))
    torch.manual_seed(0)
    model = Transformer(arch).requires_grad_(False)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, float(parameter.dim() == 1), 0.15)
    for buffer in model.buffers():
        buffer.normal_()  # biases and loads as of a router that has learned

    def pieces(tensors):
        return [
            ParameterShard(n, tuple(t.shape), (0,) * t.dim(), tuple(t.shape), t.detach(), owner=True)
            for n, t in tensors
        ]

    state = TrainingState(pieces(model.named_parameters()), NoMoments(model), buffers=pieces(model.named_buffers()))
    facts = CheckpointFacts(
        step=20, tokens=2560, settings={}, config_sha256="a" * 64, data_fingerprint="b" * 64, layout={}
    )
    save_checkpoint(folder, facts, state, ledger_of(folder, 20), keep=1)
    log = EventLog(folder.events)
    log.write("evaluation", step=20, bpb=2.5, loss=5.0, tokens=777, unigram_bpb=3.25,
              by_source={"web|<b>": {"bpb": 2.5, "loss": 5.0, "tokens": 777, "unigram_bpb": 3.25}})  # fmt: skip
    log.close()
    return folder.root


def trained_model(run: Path) -> Transformer:
    from ingot.trainer.checkpoint.load import load_model

    model = Transformer(load_run(run / "run.toml").model)
    load_model(run / "checkpoints" / "step-00000020", model)
    return model.eval()


def require_same_logits(run: Path, folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokens_BT = torch.arange(120).remainder(400).view(2, 60)
    with torch.no_grad():
        assert (model(tokens_BT).logits - trained_model(run)(tokens_BT)).abs().max().item() <= 1e-5


def test_transformers_gives_the_logits_of_the_run(run, tmp_path):
    exported = export_run(run, tmp_path / "hf")
    assert exported.step == 20
    assert exported.max_logit_difference <= 1e-5
    require_same_logits(run, exported.path)
    assert next(read_events(run / "events.jsonl", "exported"))["max_logit_difference"] <= 1e-5


@pytest.mark.parametrize("arch", [MIXTRAL, DEEPSEEK], ids=["mixtral", "deepseek-v3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_with_experts_is_exported(arch, dtype, tmp_path):
    run = make_run(tmp_path, arch)
    meter = RecordedMeter()
    exported = export_run(run, tmp_path / "hf", dtype=dtype, meter=meter)
    meter.require_whole("writing")
    assert exported.max_logit_difference <= 1e-5
    if dtype == "float32":
        require_same_logits(run, exported.path)
    card = (exported.path / "README.md").read_text()
    facts = ("Mixtral", "2 of 4", "balance loss by batch 0.01, noise on router logits 0.5")
    if arch is DEEPSEEK:
        facts = ("DeepSeek-V3", "latent attention", "2 of 8 for each token, 1 shared", "bias step 0.001")
    assert all(fact in card for fact in facts)


@pytest.mark.parametrize(
    "overflow, described", [("drop", "tokens beyond were dropped"), ("fallback", "which is not in this folder")]
)
def test_a_capacity_is_of_training_and_does_not_hinder_an_export(overflow, described, tmp_path):
    run = make_run(tmp_path, replace(MIXTRAL, moe=replace(MIXTRAL.moe, capacity_factor=0.5, overflow=overflow)))
    exported = export_run(run, tmp_path / "hf")
    require_same_logits(run, exported.path)
    assert described in (exported.path / "README.md").read_text()
    assert export_run(run, tmp_path / "narrow", dtype="bfloat16").max_logit_difference <= 1e-5


def test_a_run_that_no_class_computes_is_refused_before_anything_is_written(tmp_path):
    run = make_run(tmp_path, replace(MIXTRAL, moe=replace(MIXTRAL.moe, scale=1.25)))
    with refused("E-HF-EXPORT", model_type="mixtral") as caught:
        export_run(run, tmp_path / "hf")
    assert named(caught.value.facts["problems"], "model.moe.scale", 1.25)
    assert not list(tmp_path.glob("*hf*"))


def test_auto_tokenizer_gives_the_ids_of_training(run, tmp_path):
    transformers = pytest.importorskip("transformers")
    from ingot.tokenizer.encoder import load_encoder

    folder = export_run(run, tmp_path / "hf").path
    ours = load_encoder(folder / "tokenizer.json")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ids == ours.encode(text).tolist(), text
        assert theirs.decode(ids) == text
    assert theirs.eos_token_id == ours.eot_id
    assert theirs("two words")["input_ids"] == theirs("two words", add_special_tokens=False)["input_ids"]
    assert theirs.model_max_length == 128


def test_bfloat16_is_proven_against_rounded_weights(run, tmp_path):
    exported = export_run(run, tmp_path / "hf", dtype="bfloat16")
    assert exported.max_logit_difference <= 1e-5
    assert 1e-5 < exported.rounding_logit_difference < 0.1
    whole = export_run(run, tmp_path / "whole")
    assert exported.files["model.safetensors"] < 0.6 * whole.files["model.safetensors"]
    assert whole.rounding_logit_difference == whole.max_logit_difference


def test_record_holds_the_hash_of_every_file(run, tmp_path):
    folder = export_run(run / "checkpoints" / "step-00000020", tmp_path / "hf").path
    record = json.loads((folder / "ingot.json").read_text())
    names = {"README.md", "config.json", "generation_config.json", "model.safetensors", "special_tokens_map.json",
             "tokenizer.json", "tokenizer_config.json"}  # fmt: skip
    assert names == set(record["files"]) == {p.name for p in folder.iterdir()} - {"ingot.json"}
    assert all(sha256_file(folder / name) == entry["sha256"] for name, entry in record["files"].items())


def test_model_card_states_facts_and_escapes_names(run, tmp_path):
    card = (export_run(run, tmp_path / "hf").path / "README.md").read_text()
    for fact in ("20 steps", "2,560", "3.2500", "2.5000", "b" * 64, "c" * 64, "AdamW", r"demo\_\*run\*"):
        assert fact in card
    assert "<b>" not in card


def test_export_replaces_its_own_folder_only(run, tmp_path):
    out = tmp_path / "hf"
    export_run(run, out)
    (out / "config.json").write_text("stale")
    export_run(run, out)
    assert json.loads((out / "config.json").read_text())["model_type"] == "llama"
    (out / "ingot.json").unlink()
    with refused("E-EXPORT-FOLDER", path=str(out)):
        export_run(run, out)
    file = tmp_path / "file"
    file.write_text("precious")
    with refused("E-EXPORT-FOLDER", path=str(file)):
        export_run(run, file)
    assert file.read_text() == "precious"


def test_wrong_logits_are_not_exported(run, tmp_path, monkeypatch):
    """Two names swapped in the mapping: shapes fit, and only the proof can notice."""
    from ingot.trainer.export import model_folder

    honest = model_folder.huggingface_names

    def swapped(arch, names):
        monkeypatch.undo()  # reading is honest again
        found = honest(arch, names)
        gate, up = "blocks.0.mlp.gate.weight", "blocks.0.mlp.up.weight"
        return found | {gate: found[up], up: found[gate]}

    monkeypatch.setattr(model_folder, "huggingface_names", swapped)
    with refused("E-EXPORT-LOGITS", limit=1e-5) as caught:
        export_run(run, tmp_path / "hf")
    assert caught.value.facts["difference"] > 1e-5
    assert list(tmp_path.iterdir()) == []


def test_not_a_number_is_not_exported(run, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface, "_logits", lambda model: torch.tensor([float("nan")]))
    with refused("E-EXPORT-LOGITS") as caught:
        export_run(run, tmp_path / "hf")
    assert math.isnan(caught.value.facts["difference"])
    assert list(tmp_path.iterdir()) == []


def test_another_tokenizer_is_refused(run, tmp_path):
    tokenizer = run.parent / "tokens" / "tokenizer.json"
    whole = tokenizer.read_bytes()
    try:
        tokenizer.write_bytes(whole + b"\n")
        with refused("E-TOKENIZER-MISMATCH", path=str(run / "../tokens/tokenizer.json")):
            export_run(run, tmp_path / "hf")
        tokenizer.unlink()
        with refused("E-TOKENIZER-UNSET", path=str(run / "../tokens/tokenizer.json")):
            export_run(run, tmp_path / "hf")
    finally:
        tokenizer.write_bytes(whole)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_checkpoint_is_refused(run, tmp_path):
    weights = next((run / "checkpoints").glob("*/rank-*.safetensors"))
    whole = weights.read_bytes()
    try:
        weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with refused("E-CKPT-HASH", path=str(weights.parent), file=weights.name):
            export_run(run, tmp_path / "hf")
    finally:
        weights.write_bytes(whole)


def test_an_export_needs_a_folder_of_its_own(run, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for out in (Path(), Path("..")):
        with refused("E-EXPORT-FOLDER", path=str(out)):
            export_run(run, out)


def test_what_is_no_run_is_refused(run, tmp_path):
    with refused("E-RUN-NOT-FOUND", path=str(tmp_path)):
        export_run(tmp_path, tmp_path / "hf")
    with refused("E-RUN-NOT-FOUND", path=str(run / "checkpoints" / "step-00000099")):
        export_run(run / "checkpoints" / "step-00000099", tmp_path / "hf")
    empty = RunFolder(tmp_path / "empty")
    empty.root.mkdir()
    empty.config.write_text((run / "run.toml").read_text())
    with refused("E-CKPT-NONE", run=str(empty.root)):
        export_run(empty.root, tmp_path / "hf")
