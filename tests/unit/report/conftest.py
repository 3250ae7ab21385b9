"""A run folder as a drilled training run leaves it: 880 steps, one kill and restart, evaluations, samples, a twin."""

import importlib.util
import json
import math
import random
import sys
from pathlib import Path

import pytest

from ingot.config import to_dict, to_toml
from ingot.schema.arch import Arch
from ingot.schema.cluster import Cluster
from ingot.schema.corpus import CorpusManifest, CorpusPart, FunnelStage
from ingot.schema.parallel import Parallel
from ingot.schema.plan import Plan
from ingot.schema.run import Data, RunConfig, Schedule, Train
from ingot.schema.run_folder import RunFolder
from ingot.schema.tokens import Shard, TokenManifest
from ingot.storage import sha256_file, write_json

START = 1_780_000_000.0
STEPS, KILL, RESUMED = 880, 431, 400
HOSTILE = "<script>alert('x')</script>"


def loss_at(step: int) -> float:
    noise = random.Random(step).gauss(0, 0.06)
    return 4.72 + 3.6 * math.exp(-step / 55) + 0.5 * math.exp(-step / 400) + noise


def lr_at(step: int) -> float:
    return 3e-3 * min(step / 60, 0.1 + 0.45 * (1 + math.cos(math.pi * max(step - 60, 0) / (STEPS - 60))))


def steps_events(first: int, last: int, clock: float, step_seconds: float = 0.098):
    """step and progress events of steps first..last, logged in tens; returns (events, clock afterwards)."""
    events = []
    for log in range((first + 9) // 10 * 10, last + 1, 10):
        interval = range(max(first, log - 9), log + 1)
        clock += step_seconds * len(interval)
        for step in interval:
            norm = 0.7 + 2.5 * math.exp(-step / 40) + random.Random(-step).random() * 0.3
            events.append({"kind": "step", "time": clock, "step": step, "loss": loss_at(step), "grad_norm": norm,
                           "lr": lr_at(step)})  # fmt: skip
        speed = 4096 / step_seconds * (0.55 if log in (10, RESUMED + 10) else 1 + 0.03 * math.sin(log))
        events.append({
            "kind": "progress", "time": clock, "step": log, "steps": STEPS, "loss": loss_at(log),
            "bpb": loss_at(log) / 2.4, "grad_norm": 1.0, "lr": lr_at(log), "tokens": log * 4096,
            "tokens_per_second": speed, "mfu": None, "data_wait_seconds": 0.0002 * (2 + math.sin(log)),
            "step_seconds": 4096 / speed, "eta_seconds": (STEPS - log) * 0.1, "cost_usd": None,
            "peak_memory_bytes": 412 << 20,
        })  # fmt: skip
    return events, clock


def started(clock: float, attempt: int, from_step: int) -> dict:
    return {
        "kind": "run_started", "time": clock, "run": "quickstart", "attempt": attempt, "world_size": 2,
        "device": "cpu", "precision": "bf16", "parameters": 1_233_536, "flops_per_token": 7.2e6, "peak_flops": None,
        "versions": {"ingot": "0.1.0", "python": "3.11.9", "torch": "2.13.0"},
        "hardware": {"cpu": "AMD EPYC", "cores": 2, "memory_bytes": 23 << 30, "gpus": []},
        "from_step": from_step, "config_sha256": "9a1f" * 16, "data_fingerprint": "5f2c" * 16,
    }  # fmt: skip


def evaluation(clock: float, step: int, bpb: float) -> dict:
    def part(tokens, bpb, unigram):
        return {"bpb": bpb, "loss": bpb * 2.4, "tokens": tokens, "unigram_bpb": unigram}

    return {"kind": "evaluation", "time": clock, "step": step, **part(26_411, bpb, 2.83),
            "by_source": {"guide": part(24_000, bpb - 0.02, 2.82), "pydoc": part(2_411, bpb + 0.21, 2.97)}}  # fmt: skip


def checkpoint(progress: dict) -> dict:
    step = progress["step"]
    stall_seconds = 0.058 + 0.001 * (step // 100)
    return {"kind": "checkpoint", "time": progress["time"] + 0.06, "step": step, "bytes": 14_811_136,
            "stall_seconds": stall_seconds, "path": f"step-{step:08d}"}  # fmt: skip


def drilled_events() -> list[dict]:
    events = [started(START, 0, 0)]
    body, clock = steps_events(1, KILL - 1, START + 2.1)
    for event in body:
        events.append(event)
        if event["kind"] == "progress" and event["step"] % 100 == 0:
            events.append(checkpoint(event))
    events += [
        {"kind": "drill", "time": clock + 0.11, "action": "kill", "rank": 1, "pid": 4242, "step": KILL - 1},
        {"kind": "fault", "time": clock + 0.32, "rank": 1, "cause": "was killed (SIGKILL)", "step": KILL,
         "detected_by": "supervisor"},
        {"kind": "restart", "time": clock + 0.33, "attempt": 1, "of": 3},
        started(clock + 4.52, 1, RESUMED),
        {"kind": "start_times", "time": clock + 6.0, "attempt": 1, "total_seconds": 4.41, "seconds": {
            "detect": 0.21, "kill": 0.1, "wait": 0.01, "schedule": 0.2, "import": 2.0, "groups": 0.1, "build": 0.7,
            "load": 0.9, "warm_up": None}},
    ]  # fmt: skip
    body, clock = steps_events(RESUMED + 1, STEPS, clock + 4.52)
    for event in body:
        events.append(event)
        if event["kind"] == "progress":
            step, own = event["step"], {"kind": "metrics", "time": event["time"], "step": event["step"]}
            events.append(own | {"by": "noise_scale", "values": {"noise_scale_tokens": 2.0 * step, "odd": math.nan}})
            events.append(own | {"by": "loss", "values": {"z": 69.25 + 1 / step}})
        if event["kind"] == "progress" and event["step"] in (440, STEPS):
            events.append(evaluation(event["time"] + 0.5, event["step"], 2.07 if event["step"] == STEPS else 2.31))
            text = " a list of numbers is returned when the argument is not given, and the result is the same type"
            for prompt in ("The mean of", "If the file cannot be opened,", HOSTILE):
                events.append({"kind": "sample", "time": event["time"] + 1, "step": event["step"], "prompt": prompt,
                               "text": text + f" {HOSTILE} ``` | x"})  # fmt: skip
        if event["kind"] == "progress" and (event["step"] % 100 == 0 or event["step"] == STEPS):
            events.append(checkpoint(event))
    events.append({"kind": "finished", "time": clock + 2, "step": STEPS, "tokens": STEPS * 4096, "seconds": 48.0})
    events.append({"kind": "exported", "time": clock + 9, "path": "quickstart/hf", "max_logit_difference": 0.0})
    return events


def write_events(run: Path, events: list[dict]) -> Path:
    run.mkdir(parents=True, exist_ok=True)
    RunFolder(run).events.write_text("".join(json.dumps(e) + "\n" for e in events))
    return run


FUNNEL = (
    FunnelStage(name="read", ran="WARC response records", documents_in=5_412, documents_out=5_391,
                dropped={"read.http_status": 12, "read.not_html": 9}),
    FunnelStage(name="extract", ran="Resiliparse main content", documents_in=5_391, documents_out=5_360,
                dropped={"extract.empty": 31}),
    FunnelStage(name="url", ran="canonical URL, first one stays", documents_in=5_360, documents_out=5_312,
                dropped={"url.duplicate": 48}),
    FunnelStage(name="language", ran="lid.176.ftz on 2,000 characters, keep en, threshold 0.65", documents_in=5_312,
                documents_out=5_188, dropped={"language.other": 11, "language.unsure": 113}),
    FunnelStage(name="gopher", ran="preset web: words are whitespace-separated", documents_in=5_188,
                documents_out=2_771, dropped={"gopher.word_count": 1_702, "gopher.alphabetic_words": 402,
                                              "gopher_repetition.top_2_gram": 313}),
    FunnelStage(name="near_duplicates", ran="MinHash 128, 16 bands of 8, verified Jaccard 0.8", documents_in=2_771,
                documents_out=2_402, dropped={"near_duplicates.copy": 369}),
    FunnelStage(name="toxicity", ran="word list of 42 words; no classifier", documents_in=2_402, documents_out=2_400,
                dropped={"toxicity.words": 2}),
)  # fmt: skip


def run_config() -> RunConfig:
    return RunConfig(
        name="quickstart",
        model=Arch(vocab_size=4096, d_model=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32, d_ffn=344,
                   max_seq_len=512),
        data=Data(tokens="../data/tokens/train"),
        train=Train(steps=STEPS, seq_len=256, global_batch=16, micro_batch=8),
        parallel=Parallel(dp_shard=2),
        schedule=Schedule(warmup_steps=60),
    )  # fmt: skip


def plan() -> Plan:
    mib = 1 << 20
    return Plan(
        run_sha256="0" * 64,
        cluster=Cluster(name="this machine", device="cpu", devices_per_node=2, memory_bytes=23 << 30),
        parameters=1_233_536, flops_per_token=7.2e6, tokens_per_step=4096, steps=STEPS,
        memory_bytes={"weights": 5 * mib, "gradients": 3 * mib, "optimizer": 9 * mib, "activations": 61 * mib,
                      "logits": 48 * mib, "runtime": 280 * mib},
        step_seconds=0.104, checkpoint_bytes=14_802_432,
        formulas={"step_seconds": "4,096 tokens x 7.2 MFLOP / 355 GFLOP/s + 190 operations x 110 us"},
    )  # fmt: skip


@pytest.fixture
def logs():
    """The functions and constants of this file: test modules cannot import one another."""
    return sys.modules[__name__]


@pytest.fixture(scope="session")
def drilled_run(tmp_path_factory) -> Path:
    """The run folder of a project folder with corpus and tokens beside it."""
    root = tmp_path_factory.mktemp("quickstart")
    part = CorpusPart(name="guide.jsonl.gz", source="guide", documents=2_400, text_bytes=6 << 20, sha256="4" * 64)
    inputs = {"crawl-guide-0000.warc.gz": "1" * 64, "crawl-pydoc-0000.warc.gz": "2" * 64}
    corpus = CorpusManifest(inputs=inputs, config_sha256="3" * 64, parts=(part,), funnel=FUNNEL)
    write_json(root / "data" / "corpus" / "corpus.json", to_dict(corpus))
    shard = Shard(name="guide-0", source="guide", tokens=1_580_000, documents=2_350, text_bytes=6 << 20,
                  blocks_sha256="5" * 64, documents_sha256="6" * 64)  # fmt: skip
    tokens = TokenManifest(
        dtype="uint16", vocab_size=4096, eot_id=0, tokenizer_sha256="7" * 64,
        corpus_sha256=sha256_file(root / "data" / "corpus" / "corpus.json"), split="train", block_bytes=1 << 20,
        seed=1234, shards=(shard,),
    )  # fmt: skip
    write_json(root / "data" / "tokens" / "train" / "manifest.json", to_dict(tokens))
    run = write_events(root / "run", drilled_events())
    folder = RunFolder(run)
    folder.config.write_text(to_toml(run_config()))
    write_json(folder.plan, to_dict(plan()))
    twin = {"kill_step": KILL - 1, "resumed_from": RESUMED, "first_step": 401, "last_step": 460, "steps": 60,
            "equal": True, "max_difference": 0.0}  # fmt: skip
    write_json(run / "twin.json", twin)
    stages = [("doctor", 2.1, "2 cores, 23 GiB"), ("crawl", 14.8, "5,412 pages, 38 MB"), ("data", 41.0, "2,400 kept")]
    lines = [{"kind": "stage", "time": START, "name": n, "seconds": s, "summary": text} for n, s, text in stages]
    write_events(root, lines)
    return run


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """The functions that make a data folder by hand, from the tests of purge."""
    path = Path(__file__).parents[1] / "data" / "lineage" / "purge" / "conftest.py"
    spec = importlib.util.spec_from_file_location("folders", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tokenizer = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    vars(module)["tokenizer"] = module.train_bpe((record["text"] for record in module.crawl()), 300, tokenizer)
    return module


@pytest.fixture
def data(tmp_path, folders):
    return folders.make_folder(tmp_path / "data", folders.crawl(), folders.tokenizer)
