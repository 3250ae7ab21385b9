"""40 ways to spoil a run file: each is found, and the way out is named."""

import json
import re
from dataclasses import replace

import pytest

from ingot.config import to_toml
from ingot.machine.facts import Machine, this_cluster
from ingot.planner.request.clusters import load_cluster
from ingot.planner.request.presets import load_model
from ingot.planner.run.check import check_run
from ingot.schema.arch import Arch
from ingot.schema.cluster import Cluster
from ingot.schema.run import Data, RunConfig, Schedule, Train
from ingot.storage import sha256_bytes

GIB = 1024**3
CPU = Cluster(name="here", device="cpu", devices_per_node=2, memory_bytes=16 * GIB, runtime_bytes=350 << 20)
RUN = RunConfig(
    name="demo",
    model=Arch(
        vocab_size=512, d_model=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, d_ffn=176, max_seq_len=128
    ),
    data=Data(tokens="tokens/train", heldout="tokens/heldout", tokenizer="tokens/tokenizer.json"),
    train=Train(steps=100, seq_len=64, global_batch=8, micro_batch=4),
)


def write_tokens(folder, tokenizer: bytes, tokens: int = 6500, **changes):
    folder.mkdir(parents=True)
    (folder / "web-0.tokens").write_bytes(bytes(2 * tokens))
    (folder / "web-0.blocks").write_bytes(b"b" * 32)
    (folder / "web-0.documents").write_bytes(b"d" * 28)
    shard = {
        "name": "web-0", "source": "web", "tokens": tokens, "documents": 1, "text_bytes": 4 * tokens,
        "blocks_sha256": sha256_bytes(b"b" * 32), "documents_sha256": sha256_bytes(b"d" * 28),
    }  # fmt: skip
    manifest = {
        "version": 1, "dtype": "uint16", "vocab_size": 512, "eot_id": 0, "tokenizer_sha256": sha256_bytes(tokenizer),
        "corpus_sha256": "c", "split": "train", "block_bytes": 1 << 20, "seed": 1, "shards": [shard],
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest | changes))


@pytest.fixture
def project(tmp_path):
    write_tokens(tmp_path / "tokens/train", b"{}")
    write_tokens(tmp_path / "tokens/heldout", b"{}")
    (tmp_path / "tokens/tokenizer.json").write_bytes(b"{}")
    (tmp_path / "run.toml").write_text(to_toml(RUN))
    return tmp_path


def findings(project, machine=CPU, cores=2, overrides=()):
    return check_run(project / "run.toml", machine, cores=cores, overrides=overrides)


def errors(project, **more):
    return [f for f in findings(project, **more) if f.severity == "error"]


def test_a_good_run_has_no_errors(project):
    assert errors(project) == []


# (line of the run file, what it becomes, what the answer must contain, the line's key or "")
MUTATIONS = [
    ("weight_decay = 0.1", "weigth_decay = 0.1", "'optim.weight_decay'"),
    ("clip_norm = 1.0", "clipnorm = 1.0", "'optim.clip_norm'"),
    ("beta2 = 0.95", "betas = 0.95", "'optim.beta"),
    ("steps = 100", "step = 100", "'train.steps'"),
    ("seq_len = 64", "seq_length = 64", "'train.seq_len'"),
    ("global_batch = 8", "globalbatch = 8", "'train.global_batch'"),
    ("micro_batch = 4", "microbatch = 4", "'train.micro_batch'"),
    ("[optim]", "[optimizer]", "'optim'"),
    ("[schedule]", "[scheduler]", "'schedule'"),
    ("[checkpoint]", "[checkpoints]", "'checkpoint'"),
    ("[evaluate]", "[eval]", "'evaluate'"),
    ("[model]", "[arch]", "model"),
    ("d_model = 64", "dmodel = 64", "'model.d_model'"),
    ("num_kv_heads = 2", "n_kv_heads = 2", "'model.num_kv_heads'"),
    ("d_ffn = 176", "ffn = 176", "'model.d_ffn'"),
    ("warmup_steps = 0", "warmup = 0", "'schedule.warmup_steps'"),
    ("precision = \"bf16\"", "precision = \"bfloat16\"", "'bf16'"),
    ("precision = \"bf16\"", "precision = \"fp8\"", "'bf16'"),
    ("kind = \"cosine\"", "kind = \"cosin\"", "'cosine'"),
    ("kind = \"cosine\"", "kind = \"wsd\"", "decay_steps"),
    ("device = \"auto\"", "device = \"gpu\"", "'cuda'"),
    ("device = \"auto\"", "device = \"cuda\"", "'auto'"),
    ("steps = 100", "steps = \"1k\"", "write 1000"),
    ("steps = 100", "steps = 1e2", "write 100"),
    ("seq_len = 64", "seq_len = \"64\"", "write 64"),
    ("lr = 0.003", "lr = \"3e-3\"", "write 0.003"),
    ("vocab_size = 512", "vocab_size = 512.0", "write 512"),
    ("mask_documents = false", "mask_documents = \"no\"", "must be true or false"),
    ("steps = 100", "steps = 0", "from 1 to 1,000,000,000"),
    ("lr = 0.003", "lr = -0.003", "from 1e-12 to 100"),
    ("beta1 = 0.9", "beta1 = 9", "from 0 to 1"),
    ("num_kv_heads = 2", "num_kv_heads = 3", "[1, 2, 4]"),
    ("head_dim = 16", "head_dim = 15", "even"),
    ("seq_len = 64", "seq_len = 4096", "model.max_seq_len=128"),
    ("global_batch = 8", "global_batch = 10", "8 or 12"),
    ("vocab_size = 512", "vocab_size = 256", "512 or more"),
    ("dp_shard = 1", "dp_shard = 3", "nearest: 12 or 24"),
    ("tokens = \"tokens/train\"", "tokens = \"tokens/trian\"", "ingot data build"),
    ("tokenizer = \"tokens/tokenizer.json\"", "tokenizer = \"tokenizer.json\"", "contains the token folders"),
    ("warmup_steps = 0", "warmup_steps = 200", "longer than the 100 steps"),
    ("micro_batch = 4", "global_batch = 8", "run.toml"),  # a key twice: TOML itself refuses
    ("name = \"demo\"", "name = demo", "run.toml"),
]  # fmt: skip


def test_there_are_forty():
    assert len(MUTATIONS) >= 40


@pytest.mark.parametrize(("line", "spoiled", "way_out"), MUTATIONS)
def test_a_spoiled_run_file_is_caught_and_the_way_out_named(project, line, spoiled, way_out):
    path = project / "run.toml"
    text = path.read_text()
    assert text.count(f"\n{line}\n") or text.startswith(line), f"the fixture has no line {line!r}"
    path.write_text(text.replace(line, spoiled, 1))
    found = errors(project)
    assert found
    answer = "\n".join(f"{f.where}: {f.message} {f.fix}" for f in found)
    assert way_out in answer
    assert re.search(r"run\.toml:\d+|\(at line \d+", answer)


def test_all_problems_come_at_once(project):
    path = project / "run.toml"
    text = path.read_text().replace("weight_decay", "weigth_decay").replace("\nsteps = 100", '\nsteps = "1k"')
    path.write_text(text.replace("num_kv_heads = 2", "num_kv_heads = 3"))
    assert len(errors(project)) == 3


def test_what_is_wrong_in_one_phase_hides_nothing_of_the_others(project):
    command = ("data.heldout=nowhere", "parallel.dp_shard=99", "model.vocab_size=256", "optim.lr=high", "optim.beta1=9")
    gpus = Cluster(name="gpu", device="cuda", devices_per_node=2, memory_bytes=80 * GIB)
    found = findings(project, overrides=command, machine=gpus)
    places = [f.where for f in found if f.severity == "error"]
    assert re.search(r"run\.toml:\d+", places[0])  # the batch, which 99 ranks cannot share
    assert set(places[1:]) == {f"--set {override.partition('=')[0]}" for override in command}
    assert len(found) == len({(f.where, f.message) for f in found})


def test_findings_come_in_the_order_of_the_lines(project):
    path = project / "run.toml"
    text = path.read_text().replace('"tokens/train"', '"x"').replace("num_kv_heads = 2", "num_kv_heads = 3")
    path.write_text(text.replace("beta1 = 0.9", "beta1 = 9").replace("\nkeep = 3", "\nkeep = 0"))
    lines = [int(f.where.rpartition(":")[2]) for f in errors(project)]
    assert len(lines) == 4 and lines == sorted(lines)


def test_too_few_tokens_for_the_model_is_said_by_the_plan_only(project):
    assert not any("per parameter" in f.message for f in findings(project))


def test_a_typo_does_not_hide_a_broken_rule(project):
    path = project / "run.toml"
    text = path.read_text().replace("log_every", "log_evry").replace("global_batch = 8", "global_batch = 10")
    path.write_text(text)
    assert len(errors(project)) == 2


def test_a_key_in_the_wrong_section_is_sent_to_the_right_one(project):
    found = errors(project, overrides=("train.lr=0.001",))
    assert "did you mean 'optim.lr'" in found[0].message


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda f: (f / "web-0.tokens").unlink(), "is missing"),
        (lambda f: (f / "web-0.tokens").write_bytes(b"short"), "5 bytes"),
        (lambda f: (f / "web-0.blocks").write_bytes(b"x" * 32), "SHA-256"),
        (lambda f: (f / "web-0.documents").unlink(), "is missing"),
        (lambda f: (f / "manifest.json").write_text("{"), "cannot be read"),
        (lambda f: (f / "manifest.json").write_text("{}"), "missing key"),
    ],
)
def test_damaged_token_folders(project, damage, expected):
    damage(project / "tokens/train")
    assert any(expected in f.message for f in errors(project))


def test_another_tokenizer_is_refused(project):
    (project / "tokens/tokenizer.json").write_bytes(b"{ }")
    assert "not the tokenizer" in errors(project)[0].message


def test_too_little_data(project):
    found = errors(project, overrides=("train.global_batch=400",))
    assert "400 sequences" in found[0].message
    assert "use 101 or fewer" in found[0].fix


def test_weights_of_unknown_sources(project):
    assert "sources are web" in errors(project, overrides=("data.weights={wbe=1.0}",))[0].message


def test_more_ranks_than_cores_and_more_ranks_than_gpus(project):
    ranks = ("parallel.dp_shard=4", "train.global_batch=16")
    slow = findings(project, overrides=ranks)
    assert any(f.severity == "warning" and "4 ranks share 2 cores" in f.message for f in slow)
    gpus = Cluster(name="gpu", device="cuda", devices_per_node=2, memory_bytes=80 * GIB)
    assert f"{gpus.name} has 2" in errors(project, machine=gpus, overrides=ranks)[0].message


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("parallel.tp=3",), {"parallel.tp"}),
        (("parallel.cp=3", "parallel.offload=nvme"), {"parallel.cp", "parallel.offload_folder"}),
        (("parallel.pp=2", "parallel.schedule=dualpipe_v"), {"parallel.pp"}),
        (("parallel.pp=2", "parallel.schedule=zb_h1", "parallel.stages_per_rank=2"), {"parallel.pp"}),
        (("parallel.pp=2", "model.num_layers=4", "parallel.schedule=dualpipe_v"), {"parallel.schedule"}),
        (("parallel.offload=cpu", "parallel.offload_parameters=true"), {"parallel.offload_parameters"}),
        (("parallel.tp=2", "parallel.async_tp=true"), {"parallel.async_tp"}),
    ],
)
def test_illegal_layouts_are_refused_at_their_key(project, overrides, expected):
    found = errors(project, cores=8, overrides=overrides)
    text = (project / "run.toml").read_text().splitlines()
    keys = set()
    for finding in found:
        line = re.search(r":(\d+)$", finding.where)
        keys.add("parallel." + text[int(line[1]) - 1].split(" ")[0] if line else finding.where.removeprefix("--set "))
    assert keys >= expected, found


def test_a_legal_layout_of_three_axes_has_no_errors(project):
    overrides = ("parallel.tp=2", "parallel.pp=2", "parallel.dp_shard=2", "train.micro_batch=2")
    assert errors(project, cores=8, overrides=overrides) == []


def test_what_does_not_fit_is_an_error(project):
    machine = this_cluster(Machine(cores=2, cpu="", memory_bytes=GIB // 4, available_bytes=GIB // 4, gpus=()))
    assert any("does not fit" in f.message for f in errors(project, machine=machine))


def test_no_room_for_the_checkpoints(project, monkeypatch):
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(10**9, 10**9, 10**5))
    assert "checkpoint" in errors(project)[0].message
    assert "4 saves of the weights alone" in errors(project)[0].message
    found = errors(project, overrides=('checkpoint.weights_every=""',))
    assert "weights" not in found[0].message


def test_legal_values_that_are_hardly_meant(project):
    found = findings(project, overrides=("optim.lr=3", "checkpoint.every_steps=500", "schedule.warmup_steps=90"))
    assert {f.severity for f in found} == {"warning"}
    for key in ("optim.lr", "checkpoint.every_steps", "warm-up"):
        assert any(key in f.message for f in found)


@pytest.mark.parametrize(
    ("model", "warmup", "codes"),
    [("llama3-8b", 999, ["E-WARMUP-SHORT"]), ("llama3-8b", 1000, []), ("smollm2-135m", 0, [])],
)
def test_a_large_model_with_a_short_warmup_is_warned_about(project, model, warmup, codes):
    arch = load_model(model).arch
    train = replace(RUN.train, steps=5000)
    run = replace(RUN, model=arch, train=train, schedule=Schedule(warmup_steps=warmup))
    (project / "run.toml").write_text(to_toml(run))
    found = [f for f in findings(project, machine=load_cluster("8xh100")) if f.code]
    assert [f.code for f in found] == codes and all(f.severity == "warning" for f in found)
    assert all("schedule.warmup_steps" in f.fix and "1,000" in f.fix for f in found)


def test_a_missing_file_and_a_file_that_is_no_text(tmp_path):
    assert "there is no file" in check_run(tmp_path / "run.toml", CPU, cores=2)[0].message
    (tmp_path / "run.toml").write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in check_run(tmp_path / "run.toml", CPU, cores=2)[0].message
