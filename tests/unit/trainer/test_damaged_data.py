"""Runs on damaged token shards, on forked ranks: they stop, or all ranks leave the same windows out from the same step
on, and end with the bits of a run that was directed to do so on sound shards."""

import contextlib
import hashlib
import json
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tests.expect import refused
from tests.unit.trainer.test_loop import files_of, run_rank, step_facts

from ingot.events import read_events
from ingot.report.lineage.exposure import RunTokens
from ingot.report.lineage.prove import prove_run
from ingot.report.lineage.repair import repair_ledger
from ingot.schema.load_filter import LoadFilter
from ingot.schema.quarantine_record import Quarantined, continued, read_quarantine, write_quarantine
from ingot.schema.tokens import MANIFEST, read_token_manifest
from ingot.storage import write_json
from ingot.tokenizer.encoder import load_encoder
from ingot.trainer.checkpoint.manifest import list_checkpoints
from ingot.trainer.loader.ledger import read_ledger
from ingot.trainer.loader.order import Order
from ingot.trainer.loader.reader import DAMAGE, TokenReader, Windows
from ingot.trainer.loader.window_filter import WindowFilter

STEPS, SEQ_LEN = 24, 16


def flipped(path, block):
    data = bytearray(path.read_bytes())
    data[4096 * block + 100] ^= 1
    path.write_bytes(data)


@pytest.fixture
def tokens(token_folders, tmp_path):
    """tokens(name): a copy of the training tokens."""

    def make(name="tokens"):
        shutil.copytree(token_folders / "train", tmp_path / name)
        return tmp_path / name

    return make


def latest_block(folder, shard=0, seed=1234):
    """The block of a shard that a run uses last, and the first step that does."""
    manifest = read_token_manifest(folder)
    order, size = Order(manifest, SEQ_LEN, seed), manifest.block_bytes // 2
    first = {}
    for step in range(STEPS, 0, -1):
        for number, start in zip(*map(np.ndarray.tolist, order.locate(order.step(step, 4))), strict=True):
            if number == shard:
                first |= dict.fromkeys(range(start // size, (start + SEQ_LEN) // size + 1), step)
    return max(first.items(), key=lambda one: one[1])


def settings(folder, **changes):
    usual = {"dp_shard": 2, "steps": STEPS, "on_damage": "quarantine", "max_quarantined": 0.5}
    return usual | {"tokens": str(folder)} | changes


def ids_by_step(folder):
    manifest = list_checkpoints(folder.checkpoints)[0].manifest
    return {step: ids.tolist() for step, ids in read_ledger(folder.ledger, manifest.ledger)}


def trained(fork_ranks, folder, ranks=2, until_step=None):
    return [ending for ending, _ in fork_ranks(run_rank, ranks, folder, until_step)]


def test_all_ranks_leave_the_same_windows_out(fork_ranks, make_run, tokens):
    damaged, sound = tokens("damaged"), tokens("sound")
    number, step = latest_block(sound)
    flipped(damaged / "metal.tokens", number)
    found = make_run("found", **settings(damaged))
    assert trained(fork_ranks, found) == [(STEPS, False)] * 2
    (record,) = read_quarantine(found.quarantine)
    manifest, windows = read_token_manifest(sound), Windows(read_token_manifest(sound), SEQ_LEN)
    block, shard = manifest.block_bytes // 2, manifest.shards[0]
    begin, end = number * block, min((number + 1) * block, shard.tokens)
    assert (record.shard, record.begin, record.end) == ("metal", begin, end)
    assert record.code == "E-SHARD-HASH" and record.step == step > 2
    starts = SEQ_LEN * np.arange(windows.counts[0])
    touching = np.flatnonzero((starts < end) & (starts + SEQ_LEN >= begin))
    (event,) = read_events(found.events, "quarantined")
    assert (event["step"], event["shard"], event["windows"]) == (step, "metal", len(touching))

    whole = make_run("whole", **settings(sound, on_damage="stop"))
    trained(fork_ranks, whole)
    before, after = ids_by_step(whole), ids_by_step(found)
    changed = {step for step in before if before[step] != after[step]}
    assert min(changed) == record.step  # the first step that would have used them
    assert not set(touching) & {one for at in range(step, STEPS + 1) for one in after[at]}
    shards = windows.locate(np.array(before[record.step]))[0], windows.locate(np.array(after[record.step]))[0]
    assert np.array_equal(*shards)  # of the same source: each has one shard

    ordered = make_run("ordered", **settings(sound, on_damage="stop"))
    write_quarantine(ordered.quarantine, [record])
    trained(fork_ranks, ordered)
    assert step_facts(found) == step_facts(ordered) and ids_by_step(ordered) == after
    assert files_of(found) == files_of(ordered)
    proof = prove_run(found.root)
    assert proof.fault is None and proof.steps == STEPS
    assert proof.replaced == sum(a != b for step in changed for a, b in zip(before[step], after[step], strict=True))


def test_a_run_that_continues_has_the_same_order(fork_ranks, make_run, tokens):
    """Killed after the record and before a checkpoint has it, on another layout, and without the file of the record."""
    damaged = tokens("damaged")
    flipped(damaged / "metal.tokens", latest_block(damaged)[0])
    whole = make_run("whole", **settings(damaged, every_steps=4))
    trained(fork_ranks, whole)
    (record,) = read_quarantine(whole.quarantine)
    killed = make_run("killed", **settings(damaged, every_steps=4))
    before = 4 * ((record.step - 1) // 4)
    trained(fork_ranks, killed, until_step=before)
    write_quarantine(killed.quarantine, [record])
    assert trained(fork_ranks, killed, until_step=record.step + 4) == [(record.step + 4, True)] * 2
    assert not list(read_events(killed.events, "quarantined"))  # nothing was found again
    killed.quarantine.unlink()
    make_run("killed", **settings(damaged, every_steps=4, dp_shard=1))
    assert trained(fork_ranks, killed, ranks=1) == [(STEPS, False)]
    assert read_quarantine(killed.quarantine) == (record,)
    assert ids_by_step(killed) == ids_by_step(whole)
    lost = min(killed.ledger.iterdir())
    content = lost.read_bytes()
    lost.unlink()
    killed.quarantine.unlink()
    assert repair_ledger(killed.root).written == (lost.name,) and lost.read_bytes() == content
    assert prove_run(killed.root).fault is None
    assert RunTokens(killed.root).quarantine == (record,)


def shortened(path):
    path.write_bytes(path.read_bytes()[:-2])


def swapped(path):
    """Another shard of the same size in its place."""
    data = path.read_bytes()
    path.write_bytes(data[4000:] + data[:4000])


def wider(path):
    path.write_bytes(np.frombuffer(path.read_bytes(), "<u2").astype("<u4").tobytes())


def foreign(path):
    """Tokens beyond the vocabulary, with right hashes all the way to the manifest."""
    tokens = np.frombuffer(path.read_bytes(), "<u2").copy()
    tokens[-5] = 300
    data = tokens.tobytes()
    path.write_bytes(data)
    digests = b"".join(hashlib.sha256(data[at : at + 4096]).digest() for at in range(0, len(data), 4096))
    path.with_suffix(".blocks").write_bytes(digests)
    manifest = json.loads((path.parent / MANIFEST).read_bytes())
    manifest["shards"][0]["blocks_sha256"] = hashlib.sha256(digests).hexdigest()
    write_json(path.parent / MANIFEST, manifest)


@pytest.mark.parametrize(
    ("damage", "code", "blocks"),
    [
        (lambda path: flipped(path, 1), "E-SHARD-HASH", [(1, 2)]),
        (shortened, "E-SHARD-SIZE", [(0, None)]),
        (Path.unlink, "E-SHARD-MISSING", [(0, None)]),
        (swapped, "E-SHARD-HASH", [(0, None)]),
        (wider, "E-SHARD-SIZE", [(0, None)]),
        (lambda path: flipped(path.with_suffix(".blocks"), 0), "E-SHARD-HASH", [(0, None)]),
        (foreign, "E-SHARD-TOKEN-ID", [(3, None)]),
    ],
)
def test_each_damage_is_found_before_its_tokens_are_used(tokens, damage, code, blocks):
    """Wherever it is, and whenever it comes: also after its blocks were read."""
    folder = tokens()
    stop = read_token_manifest(folder).shards[0].tokens
    if damage is not foreign:  # it has another manifest from the start
        held = TokenReader(folder, SEQ_LEN)
        held.read(np.arange(held.windows.count))
    damage(folder / "metal.tokens")
    readers = [TokenReader(folder, SEQ_LEN)]
    if code in ("E-SHARD-HASH", "E-SHARD-SIZE") and hash_is_old(folder):
        readers.append(held)
    for reader in readers:
        found = reader.survey(0)
        assert [(one.begin, one.end) for one in found] == [
            (2048 * first, stop if last is None else 2048 * last) for first, last in blocks
        ]
        assert {one.error.code for one in found} == {code} <= DAMAGE
        for window in range(reader.windows.counts[0]):
            start = SEQ_LEN * window
            hurt = any(start < one.end and start + SEQ_LEN >= one.begin for one in found)
            with refused(code) if hurt else contextlib.nullcontext():
                reader.read(np.array([window]))


def hash_is_old(folder):
    """True if metal.blocks is as it was built: an open reader has it in memory."""
    built = read_token_manifest(folder).shards[0].blocks_sha256
    return hashlib.sha256((folder / "metal.blocks").read_bytes()).hexdigest() == built


def test_too_much_damage_stops_the_run(fork_ranks, make_run, tokens):
    damaged = tokens()
    number, step = latest_block(damaged)
    flipped(damaged / "metal.tokens", number)
    folder = make_run("run", **settings(damaged, max_quarantined=0.05))

    def expect_stop(rank, ranks):
        with refused("E-QUARANTINE-LIMIT", source="metal"):
            run_rank(rank, ranks, folder)
        return max(step_facts(folder), default=0)

    assert fork_ranks(expect_stop, 2)[0] < step and not folder.quarantine.exists()
    stops = make_run("stops", **settings(damaged, on_damage="stop"))

    def expect_error(rank, ranks):
        with refused("E-SHARD-HASH", shard="metal", block=number):
            run_rank(rank, ranks, stops)

    fork_ranks(expect_error, 2)


def test_a_record_that_a_checkpoint_lacks_holds_for_later_steps():
    """The checkpoint of step 20 was trained without what another attempt found at step 18."""
    one = Quarantined(step=18, shard="metal", blocks_sha256="b", begin=0, end=10, code="E-SHARD-HASH")
    later = replace(one, step=30)
    assert continued([one, later], [], 20) == (replace(one, step=21), later)
    assert continued([one, later], [one], 20) == (one, later)
    assert continued([], [one], 20) == (one,)


def test_windows_that_fail_the_filter_are_replaced(fork_ranks, make_run, tokens, token_folders):
    """The order is the same on one rank, which finds the same windows; and none of them is used."""
    folder = tokens()
    manifest, rules = read_token_manifest(folder), LoadFilter(ngram=2, max_repeated=0.2)
    reader = TokenReader(folder, SEQ_LEN)
    every = reader.read(np.arange(reader.windows.count))
    fails = {
        window
        for window, row in enumerate(every.tolist())
        if 1 - len(set(pairwise(row))) / SEQ_LEN > rules.max_repeated
    }
    found = make_run("found", **settings(folder, on_damage="stop", filter=rules))
    trained(fork_ranks, found)
    used = {one for ids in ids_by_step(found).values() for one in ids}
    order = Order(manifest, SEQ_LEN, 1234)
    hit = fails & {one for step in range(1, STEPS + 1) for one in order.step(step, 4).tolist()}
    assert len(hit) > 2 and not used & fails
    logged = list(read_events(found.events, "quarantined"))
    assert {event["code"] for event in logged} == {"E-WINDOW-REPEATS"}
    assert len(logged) == len(read_quarantine(found.quarantine)) >= len(hit)
    assert all(event["windows"] == 1 for event in logged)
    alone = make_run("alone", **settings(folder, on_damage="stop", filter=rules, dp_shard=1))
    trained(fork_ranks, alone, ranks=1)
    assert ids_by_step(alone) == ids_by_step(found)
    assert read_quarantine(alone.quarantine) == read_quarantine(found.quarantine)
    assert prove_run(found.root).replaced == sum(
        one in fails for step in range(1, STEPS + 1) for one in order.step(step, 4).tolist()
    )
    encoder = load_encoder(token_folders / "tokenizer.json")
    ids = np.resize(encoder.encode("ab\ufffd\ufffd"), SEQ_LEN + 1)
    broken = WindowFilter(LoadFilter(max_broken=0.3), encoder.decode)
    hurt, sound = broken.findings(reader, np.array([5]), ids[None]), broken.findings(reader, np.array([5]), every[5:6])
    assert [one.error.code for one in hurt] == ["E-WINDOW-BROKEN"] and sound == []
