"""`ingot check`: its output and its exit code."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.expect import reported

pytest.importorskip("torch")

from ingot.cli.main import main
from ingot.rehearse.dryrun import dry_run
from ingot.rehearse.dryrun.communicators import check_streams, communicators_of
from ingot.rehearse.dryrun.mesh_world import Grid, WorldCheck
from ingot.rehearse.dryrun.rendezvous import Call, Fault

RUN = """
name = "traced"
[model]
vocab_size = 512
d_model = 64
num_layers = 4
num_heads = 4
num_kv_heads = 2
head_dim = 16
d_ffn = 128
max_seq_len = 64
tied_embeddings = false
[data]
tokens = "nowhere"
[train]
steps = 2
seq_len = 64
global_batch = 8
micro_batch = 1
[parallel]
dp_shard = 2
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def run_file(tmp_path) -> str:
    path = Path(tmp_path / "run.toml")
    path.write_text(RUN)
    return str(path)


KNOWN = {}  # the cache of fake operations that all traces share


@pytest.fixture
def traced_here(monkeypatch):
    """Trace the ranks of a dry run in this process: starting one that imports torch takes most of its time. The ranks
    are listed as they are traced. limit[0]: so many of them are traced, then patience ends."""
    traced, limit = [], [99]

    def trace_ranks(request, ranks, began):
        from ingot.rehearse.dryrun import role

        for rank in ranks[: limit[0]]:
            tracker = role.trace_rank(request.config, rank, request.device, KNOWN, request.loads)
            traced.append(rank)
            yield json.loads(json.dumps(role.answer_of(request.config, tracker, rank, 0.0)))

    monkeypatch.setattr(dry_run, "trace_ranks", trace_ranks)
    return traced, limit


def test_a_clean_dry_run_without_data_exits_0_and_reports_the_data(run_file, capsys, traced_here):
    command = ["check", run_file, "--cluster", "8xh100", "--simulate"]
    options = ["--set", "parallel.tp=2", "--set", "parallel.async_tp=true", "--set", "parallel.recompute=full"]
    assert main([*command, *options]) == 0
    text = capsys.readouterr().out
    assert "nowhere is not a token folder" in text and "1 note" in text and "error" not in text
    assert "overlap of parallel.async_tp is not traced" in text
    assert "no mismatch, no deadlock" in text and "useful" in text
    assert "no order of hardware queues can lock the ranks" in " ".join(text.split()) and "mesh_tp" in text
    lines = text.splitlines()
    assert lines[0] == "traced on 8xh100, as predicted:"  # the answer first, then the findings, then the traces
    assert [line.split()[0] for line in lines[1:5]] == ["fits", "step", "exposed", "change"]
    traced = [lines.index(line) for line in lines if line.startswith(("1/2  ", "2/2  "))]
    assert len(traced) == 2 and traced[0] < lines.index(next(line for line in lines if "were traced" in line))


def test_a_folder_stands_for_its_run_file_and_a_name_must_be_one_of_a_folder(run_file, capsys):
    """`ingot train` trains in a folder that it is given, and makes one with the name of the run for a run file."""
    folder = str(Path(run_file).parent)
    assert main(["check", folder, "--cluster", "8xh100"]) == 0
    assert "2 of the 8 GPUs" in capsys.readouterr().out
    assert main(["check", folder, "--cluster", "8xh100", "--set", 'name="a/b"']) == 0
    capsys.readouterr()
    assert main(["check", run_file, "--cluster", "8xh100", "--set", 'name="a/b"', "--json"]) == 3
    (found,) = [one for one in json.loads(capsys.readouterr().out)["findings"] if one["severity"] == "error"]
    assert found["where"] == "--set name" and "'a/b'" in found["message"]
    Path(folder, "events.jsonl").touch()  # the run has its folder already
    assert main(["check", run_file, "--cluster", "8xh100", "--set", 'name="a/b"']) == 0
    assert main(["check", f"{folder}/empty"]) == 3


def test_data_counts_on_this_machine_and_is_a_note_elsewhere(run_file, capsys):
    assert main(["check", run_file, "--cluster", "8xh100"]) == 0
    assert "note     " in capsys.readouterr().out
    damaged = Path(run_file).parent / "machine.json"
    damaged.write_text("{")
    assert main(["check", run_file, "--cluster", "8xh100"]) == 0  # the machine is not asked for
    assert "ingot train" not in capsys.readouterr().out
    damaged.unlink()
    assert main(["check", run_file, "--json"]) == 3
    facts = json.loads(capsys.readouterr().out)
    assert [f["severity"] for f in facts["findings"] if f["missing_here"]] == ["error"]


def test_a_store_folder_that_does_not_exist_is_found_before_the_start(run_file, capsys, tmp_path):
    command = ["check", run_file, "--set", f"checkpoint.remote.url=file://{tmp_path}/store", "--json"]

    def problems(*more):
        main([*command, *more])
        found = json.loads(capsys.readouterr().out)["findings"]
        return [(one["severity"], one["where"]) for one in found if one["code"] == "E-STORE-NO-FOLDER"]

    assert problems() == [("error", "--set checkpoint.remote.url")]
    assert problems("--cluster", "8xh100") == [("note", "--set checkpoint.remote.url")]
    (tmp_path / "store").mkdir()
    assert problems() == [] and not list((tmp_path / "store").iterdir())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("checkpoint.remote.url", "file:///{name}"),
        ("init", "{name}/hf"),
        ("data.quarantine", '["{name}/list.jsonl"]'),
    ],
)
def test_a_place_that_the_system_refuses_to_look_at_is_a_finding(run_file, capsys, key, value):
    """Below a folder without permission, which root would have; a name that is too long is refused to everyone."""
    name = "n" * 300
    assert main(["check", run_file, "--set", f"{key}={value.format(name=name)}", "--json"]) == 3
    found = json.loads(capsys.readouterr().out)["findings"]
    (problem,) = (one for one in found if one["where"] == f"--set {key}")
    assert problem["severity"] == "error" and name in problem["message"]


def test_json_has_the_findings_and_the_useful_share_of_the_work(run_file, capsys, traced_here):
    command = ["check", run_file, "--cluster", "8xh100", "--simulate", "--json", "--set", "parallel.recompute=full"]
    assert main(command) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["errors"] == 0 and [f["severity"] for f in facts["findings"] if f["missing_here"]] == ["note"]
    (useful,), first = facts["simulated"]["useful_flops"], facts["simulated"]["ranks"][0]
    assert 0.6 * first["matmul_flops"] < useful < first["matmul_flops"] + first["attention_flops"]
    predicted = facts["predicted"]
    assert predicted["fits"] and predicted["margin_bytes"] == predicted["available_bytes"] - predicted["memory_bytes"]
    assert predicted["change"]["step_seconds"] < 0.98 * predicted["step_seconds"]


def test_what_was_traced_is_shown_and_kept_when_patience_ends(run_file, capsys, traced_here):
    traced, limit = traced_here
    command = ["check", run_file, "--cluster", "8xh100", "--simulate", "--set", "parallel.pp=2"]
    limit[0] = 1
    assert main([*command, "--json"]) == 3
    facts = reported(capsys.readouterr().out, "E-DRYRUN-PATIENCE")
    assert len(facts["simulated"]["ranks"]) == 1 and facts["simulated"]["missing"] == [2, 1, 3]
    assert main(command) == 3
    text = capsys.readouterr().out
    assert "1/4  pp 0 dp_shard 0: " in text and "kept from an earlier dry run" in text
    assert "Not finished: 2 of 4 ranks" in text and "no deadlock" not in text
    limit[0] = 99
    assert main([*command, "--set", "checkpoint.keep=7"]) == 0
    text = capsys.readouterr().out
    assert text.count("kept from an earlier dry run") == 2 and "no mismatch, no deadlock" in text
    assert traced == [0, 2, 1, 3]  # every rank once


def test_a_broken_layout_is_reported_once_and_not_simulated(run_file, capsys):
    command = ["check", run_file, "--cluster", "8xh100", "--simulate", "--set", "parallel.tp=3"]
    assert main(command) == 3
    text = capsys.readouterr().out
    assert text.count("parallel.tp=3") <= 1 and "Not simulated" in text
    assert main([*command, "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["findings"]


def test_what_a_dry_run_cannot_follow_is_a_finding(run_file, capsys):
    options = ["--set", "parallel.offload=nvme", "--set", "parallel.offload_folder=state"]
    assert main(["check", run_file, "--cluster", "8xh100", "--simulate", "--json", *options]) == 3
    assert any("nvme" in f["message"] for f in json.loads(capsys.readouterr().out)["findings"])


def test_a_fault_makes_it_exit_3(run_file, capsys, monkeypatch):
    fault = WorldCheck(Fault("deadlock", "rank 0 waits for rank 1", {0: 1}), True, 1)
    found = dry_run.DryRun(Grid(dict.fromkeys(dry_run.AXES, 1)), [trace(0, 1, 1)], [], fault, [], [1.0], [0.0], False)
    monkeypatch.setattr(dry_run, "simulate", lambda *_, **__: found)
    assert main(["check", run_file, "--cluster", "8xh100", "--simulate"]) == 3
    assert "Collectives: deadlock" in capsys.readouterr().out


@pytest.mark.parametrize("orders", ["opposite", "equal"])
def test_streams_that_lock_or_share_queues_are_reported_with_the_variable(run_file, capsys, monkeypatch, orders):
    """The planted fault: a rank waits for a message ahead of the sum that the other rank waits for before it sends."""
    pair = (0, 1)
    post, wait = (Call(op, pair, "float32", 4, "down", 1, ticket=n) for op, n in (("irecv", -1), ("wait", 0)))
    send, total = Call("send", pair, "float32", 4, "down", 0), Call("all_reduce", pair, "float32", 8, "dp")
    first = [post, wait, total] if orders == "opposite" else [post, total, wait]
    groups = [("dp", "mesh_dp_shard", pair, "dp_shard"), ("down", "pipeline_channel", pair, "pp")]
    made = {0: communicators_of(groups, first), 1: communicators_of(groups, [total, send])}
    streams = check_streams({0: first, 1: [total, send]}, made, queues=2)
    grid = Grid(dict.fromkeys(dry_run.AXES, 1) | {"pp": 2})
    traces, whole = [trace(0, 1, 1), trace(1, 1, 1)], WorldCheck(None, True, 2)
    found = dry_run.DryRun(grid, traces, [], whole, [], [9.0, 9.0], [0.0, 0.0], False, (), streams)
    monkeypatch.setattr(dry_run, "simulate", lambda *_, **__: found)
    command = ["check", run_file, "--cluster", "8xh100", "--simulate"]
    assert main(command) == (3 if orders == "opposite" else 0)
    text = " ".join(capsys.readouterr().out.split())
    assert "Communicators of rank 0, 2 of 2 used" in text and "1 irecv from 1" in text
    assert "3 streams on 2 hardware queues" in text and "CUDA_DEVICE_MAX_CONNECTIONS=3" in text
    if orders == "opposite":
        assert "rank 1: all_reduce" in text and "with one hardware queue" in text
    else:
        assert "side by side: 2 with one queue, at most 2 with any." in text
    main([*command, "--json"])
    facts = json.loads(capsys.readouterr().out)["simulated"]["streams"]
    assert facts["queues"] == 2 and facts["room"] == (None if orders == "opposite" else 2)


def trace(rank: int, initial: int, steady: int) -> dry_run.Trace:
    moments = {name: dry_run.PhaseMemory(10, {}, "forward", 0) for name in dry_run.MOMENTS}
    moments["initialisation"] = replace(moments["initialisation"], bytes=initial)
    moments["steady step"] = replace(moments["steady step"], bytes=steady)
    return dry_run.Trace(rank, f"rank {rank}", rank, moments, 0.0, 0.0, 0.0, 0, {}, {}, [], 0.0, 0)


@pytest.mark.parametrize(
    ("steady", "line"),
    [
        ((1000, 2000), None),
        ((1000, 2100), None),  # 5% are left out of formulas
        ((1000, 2120), "rank 1 peaks at 2.1 KiB (steady step), the planner bills 2.0 KiB: 6% above it."),
        ((1500, 2120), "rank 0 peaks at 1.5 KiB (steady step), the planner bills 1000 B"),
    ],
)
def test_memory_above_the_planners_bill_is_reported(run_file, capsys, monkeypatch, steady, line):
    traces = [trace(rank, initial=500, steady=bytes) for rank, bytes in enumerate(steady)]
    grid = Grid(dict.fromkeys(dry_run.AXES, 1) | {"pp": 2})
    found = dry_run.DryRun(grid, traces, [], WorldCheck(None, True, 2), [], [1000.0, 2000.0], [0.0, 0.0], False)
    monkeypatch.setattr(dry_run, "simulate", lambda *_, **__: found)
    assert main(["check", run_file, "--cluster", "8xh100", "--simulate"]) == 0
    lines = [text for text in capsys.readouterr().out.splitlines() if text.startswith("More memory than planned")]
    assert (len(lines) == 1 and line in lines[0]) if line else not lines


def test_given_loads_of_experts_are_compared_with_balanced_ones(run_file, tmp_path, capsys, traced_here):
    moe = "[model.moe]\nnum_experts = 8\ntop_k = 2\nd_expert = 32\n[data]"
    Path(run_file).write_text(RUN.replace("[data]", moe) + "ep = 2\n")
    loads = tmp_path / "loads.json"
    loads.write_text("[4, 1, 1, 1, 1, 1, 1, 1]")
    command = ["check", run_file, "--cluster", "8xh100", "--simulate", "--expert-load"]
    assert main([*command, "balanced"]) == 0
    assert "of balanced" not in capsys.readouterr().out
    assert main([*command, str(loads)]) == 0
    assert "With these expert loads" in (text := capsys.readouterr().out) and "agree with the formulas" in text
    loads.write_text("[4, 1]")
    assert main([*command, str(loads)]) == 3
    assert "not a list of 8 non-negative numbers" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--expert-load=loads.json", "--patience=9"])
def test_options_of_a_dry_run_need_one(run_file, capsys, option):
    assert main(["check", run_file, option]) == 3
    assert "E-SIMULATE-ALONE" in capsys.readouterr().err


def test_the_timeline_is_drawn(run_file, capsys):
    pipeline = ["--set", "parallel.pp=2", "--set", "parallel.dp_shard=1", "--cluster", "8xh100"]
    main(["check", run_file, *pipeline, "--timeline", "--json"])
    lines = json.loads(capsys.readouterr().out)["timeline"]
    assert lines[0].startswith("1f1b, 2 ranks")
    assert main(["check", run_file, "--cluster", "8xh100", "--timeline", "--json"]) == 3
    reported(capsys.readouterr().out, "E-PIPELINE-NONE", pp=1)
