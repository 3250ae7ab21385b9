"""The judgment of benchmarks/torture.py on made-up run folders: each thing that it compares turns it red."""

import hashlib
import importlib.util
import json
import shutil
import struct
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "benchmarks" / "torture.py"
SPEC = importlib.util.spec_from_file_location("torture", PATH)
assert SPEC is not None and SPEC.loader is not None
torture = sys.modules["torture"] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(torture)

STEPS = 300


def step_line(step: int, loss: float) -> str:
    return json.dumps({"kind": "step", "time": 1.0, "step": step, "loss": loss, "grad_norm": 0.5, "lr": 0.1}) + "\n"


def write_ledger(run: Path, ids: list[int]) -> None:
    data = struct.pack(f"<{len(ids)}q", *ids)
    (run / "ledger").mkdir(exist_ok=True)
    (run / "ledger" / "all").write_bytes(data)
    entry = {"file": "all", "first_step": 1, "last_step": STEPS, "sha256": hashlib.sha256(data).hexdigest()}
    rewrite(run, ledger=[entry])


def write_tensor(run: Path, content: bytes) -> None:
    head = json.dumps({"w": {"dtype": "U8", "shape": [len(content)], "data_offsets": [0, len(content)]}}).encode()
    file = manifest(run).with_name("rank-00000.safetensors")
    file.write_bytes(struct.pack("<Q", len(head)) + head + content)
    rewrite(run, files={file.name: {"sha256": hashlib.sha256(file.read_bytes()).hexdigest()}})


def manifest(run: Path) -> Path:
    return run / "checkpoints" / f"step-{STEPS:08d}" / "manifest.json"


def rewrite(run: Path, **values: object) -> None:
    before = json.loads(manifest(run).read_bytes()) if manifest(run).exists() else {}
    manifest(run).write_text(json.dumps(before | values))


IDS = list(range(STEPS * torture.BATCH))


@pytest.fixture(scope="module")
def twin(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("twin") / "run"
    manifest(run).parent.mkdir(parents=True)
    write_ledger(run, IDS)
    write_tensor(run, b"weights")
    (run / "events.jsonl").write_text("".join(step_line(step, 1 / step) for step in range(1, STEPS + 1)))
    return run


def redone(run: Path, loss: float) -> None:
    with (run / "events.jsonl").open("a") as log:
        log.write('{"kind": "st\n' + step_line(7, loss))


def rolled_back(run: Path) -> None:
    redone(run, 0.25)
    with (run / "events.jsonl").open("a") as log:
        log.write(json.dumps({"kind": "rolled_back", "from_step": 7, "to_step": 6}) + "\n" + step_line(7, 1 / 7))


def cut_log(run: Path) -> None:
    log = run / "events.jsonl"
    log.write_bytes(log.read_bytes()[:-9])


def other_order(run: Path) -> None:
    write_ledger(run, [1, 0, *IDS[2:]])


def stale_hash(run: Path) -> None:
    file = manifest(run).with_name("rank-00000.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"!")


@pytest.mark.parametrize(
    "change, found",
    [
        (lambda run: None, ()),
        (lambda run: redone(run, 1 / 7), ()),
        (rolled_back, ()),
        (lambda run: redone(run, 1 / 7 + 2**-54), ("step 7: loss",)),
        (cut_log, ("step 300 is not in the log",)),
        (lambda run: write_tensor(run, b"weightz"), ("has other bytes: w",)),
        (stale_hash, ("does not have its hash", "has other bytes: w")),
        (lambda run: write_ledger(run, [0, 0, *IDS[2:]]), ("sample 0 is trained in step 1",)),
        (other_order, ("step 1 has other samples",)),
        (lambda run: shutil.rmtree(manifest(run).parent), ("cannot be read",)),
        (lambda run: rewrite(run, files={}), ("has the files",)),
    ],
)
def test_what_differs_from_the_undisturbed_run_is_red(twin: Path, tmp_path: Path, change, found):
    run = tmp_path / "run"
    shutil.copytree(twin, run)
    change(run)
    findings = torture.judge(run, twin)
    assert len(findings) == len(found), findings
    assert all(text in finding for text, finding in zip(found, findings, strict=True)), findings


def test_what_a_run_leaves_is_red(twin: Path, tmp_path: Path):
    run, temporary = tmp_path / "run", tmp_path / "temporary"
    shutil.copytree(twin, run)
    temporary.mkdir()
    (run / "lock").touch()
    assert torture.leftovers(run, temporary) == []
    (run / "stop-request").touch()
    (run / "checkpoints" / ".saving-step").mkdir()
    (temporary / "scratch").touch()
    with (run / "lock").open("rb") as held:
        torture.fcntl.flock(held, torture.fcntl.LOCK_EX)
        assert len(torture.leftovers(run, temporary)) == 4
