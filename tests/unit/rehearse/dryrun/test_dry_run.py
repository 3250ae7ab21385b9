"""The dry run against real ranks: a trace must say what happens, and planted faults must be found."""

import gc
import gzip
import json
import os
import threading
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from tests.expect import refused, settled  # noqa: E402

from ingot.errors import ConfigError  # noqa: E402
from ingot.plugins.callback import CALLBACKS, CallbackPart, StepCallback  # noqa: E402
from ingot.plugins.registry import MAIN  # noqa: E402
from ingot.rehearse.dryrun import dry_run, role, tracing  # noqa: E402
from ingot.rehearse.dryrun.dry_run import compare  # noqa: E402
from ingot.rehearse.dryrun.fake import Known  # noqa: E402
from ingot.rehearse.dryrun.mesh_world import check_world  # noqa: E402
from ingot.rehearse.dryrun.rendezvous import SENT, WAIT  # noqa: E402
from ingot.rehearse.dryrun.tracker import ROUNDING_BYTES, Tracker  # noqa: E402
from ingot.schema.arch import Arch  # noqa: E402
from ingot.schema.parallel import Parallel  # noqa: E402
from ingot.schema.run import Data, RunConfig, Train  # noqa: E402

ARCH = Arch(
    vocab_size=512, d_model=64, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16, d_ffn=128, max_seq_len=64,
    tied_embeddings=False,
)  # fmt: skip


def config(micro_batches: int = 4, **parallel) -> RunConfig:
    layout = Parallel(**parallel)
    train = Train(steps=2, seq_len=64, global_batch=micro_batches * layout.data_ranks, micro_batch=1)
    return RunConfig(name="traced", model=ARCH, data=Data(tokens=""), train=train, parallel=layout)


class Sums(StepCallback):
    def __init__(self, run, options):
        self.run = run

    def on_gradients(self, step):
        self.run.sum_over_ranks(torch.ones(3))


@pytest.fixture
def sums():
    """The settings of a callback that sums three numbers."""
    CALLBACKS.register(CallbackPart(name="sums", make=Sums))
    yield {"sums": {}}
    CALLBACKS.forget(MAIN)


# The cache of fake operations that all traces share, as those of a tracing process do. Layouts compute much the same.
KNOWN: Known = {}


def trace(run: RunConfig, rank: int) -> Tracker:
    return role.trace_rank(run, rank, known=KNOWN)


def traces(run: RunConfig, ranks: list[int]) -> dict[int, Tracker]:
    return {rank: trace(run, rank) for rank in ranks}


LAYOUTS = [  # those of the nightly tests are parts of others, or of REAL
    pytest.param({"dp_shard": 2, "zero": 1}, marks=pytest.mark.nightly),
    pytest.param({"dp_shard": 2, "zero": 2, "grads": "bf16"}, marks=pytest.mark.slow),
    pytest.param({"dp_shard": 2, "zero": 3}, marks=pytest.mark.nightly),
    {"dp_replicate": 2, "dp_shard": 2, "zero": 3, "recompute": "full"},
    {"tp": 2, "recompute": "selective"},
    pytest.param({"pp": 2, "dp_shard": 2}, marks=pytest.mark.nightly),
    pytest.param({"pp": 2, "tp": 2, "schedule": "zb_v"}, marks=pytest.mark.slow),
    {"dp_shard": 2, "pp": 2, "tp": 2, "schedule": "interleaved"},
]


@pytest.mark.parametrize("parallel", LAYOUTS, ids=lambda p: " ".join(f"{k}={v}" for k, v in p.items()))
def test_ranks_meet_and_work_and_traffic_agree_with_the_formulas(parallel):
    run = config(**parallel)
    grid, ranks = dry_run.grid_of(run), dry_run.chosen_ranks(dry_run.grid_of(run))
    found = {}
    for rank, tracker in traces(run, ranks).items():
        found[rank] = dry_run.read_answer(role.answer_of(run, tracker, rank, 0.0), grid)
    world = check_world({rank: trace.calls for rank, trace in found.items()}, grid)
    assert world.fault is None and world.alike
    streams = dry_run.streams_of(run, grid, list(found.values()))
    assert streams.room is not None and streams.room <= (1 if run.parallel.pp == 1 else streams.enough)
    for trace in found.values():
        listed = sum(sum(one.calls.values()) for one in trace.communicators)
        assert listed == sum(n for ops in trace.counts.values() for op, n in ops.items() if op not in (SENT, WAIT))
    places = dry_run.positions(run)
    for trace in found.values():
        for compared in compare(trace, places[trace.position], "cpu"):
            assert compared.agrees, (trace.name, compared)
        assert trace.moments[dry_run.STEADY].bytes > trace.moments["initialisation"].rest > 0


def test_the_first_and_last_stage_of_a_v_have_one_tied_embedding():
    run = config(pp=2, schedule="dualpipe_v")
    apart, tied = (
        trace(replace(run, model=replace(ARCH, tied_embeddings=both)), 0).peaks()["initialisation"].by_kind
        for both in (False, True)
    )
    assert apart["parameters"] - tied["parameters"] == ARCH.vocab_size * ARCH.d_model * (2 + 4)  # bf16 and masters


class RealTracker(Tracker):
    """A tracker of real tensors. Gloo's threads release a collective's tensors some time after the wait for it."""

    def __init__(self):
        super().__init__()
        self.released_late = set()
        self.thread = threading.get_ident()

    def _died(self, held):
        if threading.get_ident() != self.thread:
            self.released_late.add(held.number)
        super()._died(held)

    def unreleased(self, since):
        """Return how many storages of collectives, those numbered from `since` on, are still in memory."""
        return sum(
            self._kinds[held.number] == "communication" for held in list(self._live.values()) if held.number >= since
        )

    def peak_between(self, phase):
        """Return the phase's peak without the tensors that were released late, and with them until their release."""
        most, log = self.peaks()[phase].bytes, self._log
        try:
            self._log = [(n, 0 if n in self.released_late else more, place) for n, more, place in log]
            return self.peaks()[phase].bytes, most
        finally:
            self._log = log


def _really_trained(rank, world, run):
    """The same program with real tensors on a real rank: what the tracker saw of its second step."""
    from pathlib import Path

    from ingot.trainer.build import build_parts
    from ingot.trainer.step import train_step

    with RealTracker() as tracker:
        tracker.begin("build")
        parts = build_parts(run, torch.device("cpu"), Path(), None, first_values=False)
        for phase in (role.FIRST, role.STEADY):
            tracker.begin(phase)
            first = len(tracker._kinds)
            train_step(parts, role.empty_batch(run), 1e-3)
        tracker.begin("end")
    del parts
    gc.collect()
    settled(lambda: tracker.unreleased(first), 0, seconds=0.5)  # some are the program's: parameters that were gathered
    calls = [(c.op, c.group, c.dtype, c.elements, c.peer) for c in tracker.calls]
    return calls, tracker.flops_of(role.STEADY), tracker.peak_between(role.STEADY)


REAL = [
    {"dp_shard": 2, "zero": 3},
    {"pp": 2, "dp_shard": 2, "zero": 1},
    {"tp": 2},
    pytest.param({"cp": 2, "context": "ring", "zero": 1}, marks=pytest.mark.slow),
    pytest.param({"cp": 2, "context": "ulysses", "zero": 3}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("parallel", REAL, ids=str)
def test_a_trace_is_what_a_real_rank_does(fork_ranks, parallel):
    run = config(**parallel)
    run = replace(run, train=replace(run.train, compile="off", device="cpu"))
    world = run.parallel.world_size
    real = fork_ranks(_really_trained, world, run)
    for rank in (0, world - 1):
        calls, flops, (least, most) = real[rank]
        traced = trace(run, rank)
        assert [(c.op, c.group, c.dtype, c.elements, c.peer) for c in traced.calls] == calls
        assert traced.flops_of(role.STEADY) == flops
        peak = traced.peaks()[role.STEADY].bytes
        assert least - ROUNDING_BYTES <= peak <= most + ROUNDING_BYTES  # rounding: a scalar
        # Each of Gloo's two threads holds the input and output of one collective at most.
        sizes = [c.elements * getattr(torch, c.dtype).itemsize for c in traced.calls]
        assert most - peak <= 4 * max(sizes) + ROUNDING_BYTES


@pytest.mark.parametrize("parallel", [{"dp_shard": 2, "zero": 3}, {"cp": 2, "context": "ring"}], ids=str)
def test_a_trace_from_the_cache_is_the_same_and_adds_nothing_to_it(parallel):
    known: Known = {}
    traced = []
    for _ in range(2):
        tracker = role.trace_rank(config(1, **parallel), 0, "cuda", known)
        peaks = {phase: (peak.bytes, peak.by_kind, peak.place) for phase, peak in tracker.peaks().items()}
        traced.append((len(known), tracker.events, tracker.flops, peaks))
    assert traced[0] == traced[1]


def test_units_are_gathered_before_the_one_in_use_computes():
    """The order of issue, forward: while block i computes, the gather of block i + 1 has been issued."""
    tracker = trace(config(1, dp_shard=2, zero=3, unit_layers=1), 0)
    order = [(e.what if e.call is None else e.call.op, e.place) for e in tracker.events_of(role.STEADY)]
    for block in range(ARCH.num_layers):
        mine = [what for what, place in order if place == f"forward blocks.{block}"]
        ahead = mine[: mine.index("compute")]
        if block < ARCH.num_layers - 1:
            assert "all_gather" in ahead, (block, mine)
    scatters = [place for what, place in order if what == "reduce_scatter"]
    computed = [place for what, place in order if what == "compute" and place.startswith("backward blocks")]
    rest = {f"backward blocks.{block}" for block in range(ARCH.num_layers - 1)}
    # The gradients of a unit leave while the units before it compute, not all at the end.
    assert rest <= set(computed) and len(rest & set(scatters)) >= ARCH.num_layers - 2


def test_zero_1_scatters_each_unit_rest_the_backward():
    tracker = trace(config(2, dp_shard=2, zero=1, unit_layers=1), 0)
    events = tracker.events_of(role.STEADY)
    first = next(i for i, e in enumerate(events) if e.call and e.call.op == "reduce_scatter")
    after = [e for e in events[first:] if e.what == "compute" and e.place.startswith("backward")]
    assert len(after) > 10


def test_sums_of_callbacks_are_traced_in_their_own_group(sums):
    calls = [event.call for event in trace(replace(config(dp_shard=2), callbacks=sums), 0).events_of(role.STEADY)]
    (own,) = (call for call in calls if call and call.op == "all_reduce" and call.elements == 3)
    others = {call.channel for call in calls if call and call is not own}
    assert own.group == (0, 1) and others and own.channel not in others


def test_faults_on_one_stage_are_found_and_reported():
    """A skipped collective, another size, and a wait before the send that its answer depends on."""
    run = config(pp=2, dp_shard=2, zero=1)
    grid, names = dry_run.grid_of(run), {0: "pp 0", 2: "pp 1"}
    sound = {rank: tracker.calls for rank, tracker in traces(run, [0, 2]).items()}
    assert check_world(sound, grid).fault is None

    norm = max(i for i, call in enumerate(sound[2]) if len(call.group) == grid.world_size)
    skipped = check_world({**sound, 2: sound[2][:norm] + sound[2][norm + 1 :]}, grid, names).fault
    assert skipped and skipped.kind == "missing" and "(pp 1), which has ended" in skipped.message

    larger = replace(sound[2][norm], elements=3)
    resized = check_world({**sound, 2: [*sound[2][:norm], larger, *sound[2][norm + 1 :]]}, grid, names).fault
    assert resized and resized.kind == "mismatch" and "all_reduce of 3 float64" in resized.message

    first = list(sound[0])
    steps = [call for call in first if call.elements > 1]  # groups exchange one element when they are made
    posted, waited = (next(c for c in steps if c.op == op) for op in ("irecv", "wait"))
    first.remove(posted)
    first.remove(waited)
    sending = next(i for i, call in enumerate(first) if call.op == "isend" and call.elements > 1)
    first[sending:sending] = [posted, waited]
    early = check_world({**sound, 0: first}, grid, names).fault
    assert early and early.kind == "deadlock" and set(early.positions) == {0, 2}


class Listener(dry_run.Watcher):
    def __init__(self):
        self.phases, self.traces = [], []

    def began(self, rank, phase):
        self.phases.append((rank, phase))

    def traced(self, trace, done, ranks, was_kept):
        self.traces.append((trace.rank, done, ranks, was_kept))


def test_the_command_traces_in_processes_of_its_own_and_keeps_what_it_traced(tmp_path):
    seen, run = Listener(), config(pp=2, tp=2)
    found = dry_run.simulate(run, device="cpu", patience=600, watcher=seen, home=tmp_path)
    assert [place[1:] for place in seen.traces] == [(n, 4, False) for n in range(1, 5)]
    for rank in range(4):
        assert tuple(phase for each, phase in seen.phases if each == rank) == dry_run.MOMENTS
    assert not found.problems and found.world.followed == 2 and found.bases == [0, 2]
    assert [trace.name for trace in found.traces] == ["pp 0 tp 0", "pp 1 tp 0", "pp 0 tp 1", "pp 1 tp 1"]
    assert all(trace.memory_bytes < 1 << 30 for trace in found.traces)
    again = Listener()
    assert dry_run.simulate(run, device="cpu", patience=600, watcher=again, home=tmp_path) == found
    assert again.traces == [(rank, n, 4, True) for n, rank in enumerate((0, 2, 1, 3), 1)] and not again.phases


def test_a_kept_trace_that_is_damaged_is_not_used(tmp_path):
    kept = tracing.KeptTraces(config(tp=2), "cpu", (), tmp_path)
    assert kept.read(0) is None
    kept.write({"rank": 0, "x": 1})
    assert kept.read(0) == {"rank": 0, "x": 1}
    (file,) = kept.folder.iterdir()
    packed = file.read_bytes()
    for damaged in (packed[:-9], packed[:12] + b"xxxx" + packed[16:], b"", gzip.compress(b'{"rank": 1}'), b"[]"):
        file.write_bytes(damaged)
        assert kept.read(0) is None
    unwritable = tracing.KeptTraces(config(tp=2), "cpu", (), file)
    unwritable.write({"rank": 0})
    assert unwritable.read(0) is None


def test_old_dry_runs_are_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr(tracing, "_MOST_KEPT", 2)
    kept = [tracing.KeptTraces(config(tp=2), "cpu", (float(n),), tmp_path) for n in range(3)]
    for number, each in enumerate(kept):
        each.write({"rank": 0})
        os.utime(each.folder, (number, number))
    assert [each.read(0) is not None for each in kept] == [False, True, True]


def test_settings_outside_the_key_of_a_trace_do_not_change_it():
    """Everything that the key leaves out, changed at once; and each part of the key changes the key."""
    run = config(tp=2)
    other = replace(
        run,
        name="other",
        seed=99,
        init="elsewhere",
        data=Data(tokens="other", heldout="h", tokenizer="t", weights={"a": 2.0}, prefetch=7),
        train=replace(run.train, steps=77, device="cuda", compile="on"),
        schedule=replace(run.schedule, kind="wsd", warmup_steps=3, decay_steps=9, final_fraction=0.5),
        checkpoint=replace(run.checkpoint, every_steps=3, keep=9),
        evaluate=replace(run.evaluate, every_steps=2),
        watch=replace(run.watch, log_every=1),
        launch=replace(run.launch, max_restarts=0),
        cost=replace(run.cost, usd_per_hour=3.0),
    )
    key = tracing.key_of(run, "cpu", ())
    assert tracing.key_of(other, "cpu", ()) == key
    one, two = (role.answer_of(each, role.trace_rank(each, 1, "cpu"), 1, 0.0) for each in (run, other))
    for answer in (one, two):
        answer["memory_bytes"] = 0
    assert one == two
    changes = (
        (replace(run, parallel=replace(run.parallel, recompute="full")), "cpu", ()),
        (replace(run, train=replace(run.train, micro_batch=2)), "cpu", ()),
        (replace(run, optim=replace(run.optim, clip_norm=0.0)), "cpu", ()),
        (replace(run, model=replace(run.model, qk_norm=True)), "cpu", ()),
        (replace(run, data=replace(run.data, mask_documents=not run.data.mask_documents)), "cpu", ()),
        (run, "cuda", ()),
        (run, "cpu", (1.0,)),
    )
    assert len({key, *(tracing.key_of(*change) for change in changes)}) == len(changes) + 1


@pytest.mark.slow
def test_patience_counts_from_the_last_sign_of_progress(tmp_path, monkeypatch):
    """The process answers for one rank, enters phases of the next one for longer than patience, then hangs."""
    interpreter = tmp_path / "python"
    line = json.dumps({"rank": 0})
    phases = 'for i in 1 2 3 4 5 6; do sleep 0.25; echo \'{"rank": 1, "phase": "save"}\'; done'
    interpreter.write_text(f"#!/bin/sh\ncat > /dev/null\necho '{line}'\n{phases}\nsleep 600\n")
    interpreter.chmod(0o755)
    monkeypatch.setattr(tracing.sys, "executable", str(interpreter))
    seen = []
    request = tracing.Request(config(1, dp_shard=2), "cpu", (), 1, patience=1.0)
    answers = list(tracing.trace_ranks(request, [0, 1], lambda *phase: seen.append(phase)))
    assert answers == [{"rank": 0}] and seen == [(1, "save")] * 6


@pytest.mark.slow
def test_overlapped_tensor_parallelism_is_traced_without_its_overlap():
    plain, overlapped = (role.trace_rank(config(tp=2, async_tp=overlap), 0, "cuda") for overlap in (False, True))
    assert plain.calls == overlapped.calls
    assert plain.peaks()[role.STEADY] == overlapped.peaks()[role.STEADY]


def test_a_tracing_process_that_dies_early_is_reported(monkeypatch, tmp_path):
    interpreter = tmp_path / "python"
    interpreter.write_text("#!/bin/sh\nexec 0<&-\necho no such module >&2\nexit 1\n")
    interpreter.chmod(0o755)
    monkeypatch.setattr(tracing.sys, "executable", str(interpreter))
    with refused("E-DRYRUN-ENDED", traced=0, ranks=2):
        run = replace(config(1, dp_shard=2), data=Data(tokens="x" * 200_000))
        dry_run.simulate(run, device="cpu", patience=600, home=tmp_path / "kept")


def test_layouts_that_cannot_be_traced_are_refused():
    with refused("E-DRYRUN-NVME"):
        dry_run.simulate(config(offload="nvme", offload_folder="state", dp_shard=2, zero=1), device="cpu", patience=600)
    with pytest.raises(ConfigError):
        dry_run.simulate(config(tp=3), device="cpu", patience=600)
    with refused("E-DRYRUN-RANK", rank=0):
        raise tracing.failure({"rank": 0, "error": "ValueError: x", "traceback": 'File "a.py", line 1, in f\n  x'})
