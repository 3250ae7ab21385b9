"""Runs with quarantine lists: the windows of listed documents are left out, from the start on that reads the list."""

from dataclasses import replace

import numpy as np
import pytest
from tests.expect import refused
from tests.unit.trainer.test_loop import files_of, run_rank
from tests.unit.trainer.test_mixture_change import accept

from ingot.events import read_events
from ingot.report.lineage.exposure import RunTokens, exposure
from ingot.report.lineage.prove import prove_run
from ingot.schema.quarantine import QuarantineEntry, add_to_quarantine, listed_in
from ingot.schema.quarantine_record import read_quarantine
from ingot.schema.tokens import read_token_manifest
from ingot.theory.rules import load_run
from ingot.trainer.checkpoint.manifest import list_checkpoints
from ingot.trainer.loader.ledger import read_ledger
from ingot.trainer.loader.listed import listed_windows
from ingot.trainer.loader.quarantine import touched
from ingot.trainer.loader.reader import Windows

STEPS, SEQ_LEN = 24, 16
RUN = {"steps": STEPS, "every_steps": 8, "max_quarantined": 0.5}


def identity(number: int) -> str:
    return number.to_bytes(16, "little").hex()


LISTED = (identity(50), identity(7))  # the second one is in both sources


@pytest.fixture
def listed(tmp_path):
    """A list of two documents of the tokens, and one that is in none."""
    for document in (*LISTED, "f" * 32):
        add_to_quarantine(tmp_path / "list.jsonl", [QuarantineEntry(document=document, reason="x", date="2026-11-28")])
    return str(tmp_path / "list.jsonl")


def ids_by_step(folder):
    manifest = list_checkpoints(folder.checkpoints)[0].manifest
    return {step: ids.tolist() for step, ids in read_ledger(folder.ledger, manifest.ledger)}


def windows_with(tokens) -> set[int]:
    """The windows that have a token of a listed document, by their places."""
    manifest = read_token_manifest(tokens)
    windows, found = Windows(manifest, SEQ_LEN), set()
    for number, shard in enumerate(manifest.shards):
        index = np.fromfile(tokens / f"{shard.name}.documents", [("start", "<u8"), ("tokens", "<u4"), ("id", "V16")])
        for row in index:
            if bytes(row["id"]).hex() in LISTED:
                found |= {*touched(windows, number, int(row["start"]), int(row["start"] + row["tokens"]))}
    return found


def trained(fork_ranks, folder, ranks=2, until_step=None):
    return [ending for ending, _ in fork_ranks(run_rank, ranks, folder, until_step)]


def test_a_run_leaves_out_the_documents_of_its_lists(fork_ranks, make_run, token_folders, listed):
    """On two ranks and on one; ledger, proof, trace and log show it. Other windows of the source are in their place."""
    whole, found = make_run("whole", dp_shard=2, **RUN), make_run("found", dp_shard=2, quarantine=(listed,), **RUN)
    alone = make_run("alone", quarantine=(listed,), **RUN)
    for folder, ranks in ((whole, 2), (found, 2), (alone, 1)):
        assert trained(fork_ranks, folder, ranks) == [(STEPS, False)] * ranks
    without, out = ids_by_step(whole), windows_with(token_folders / "train")
    kept = ids_by_step(found)
    assert kept == ids_by_step(alone)
    assert not out & {one for ids in kept.values() for one in ids}
    changed = {(a, b) for step in without for a, b in zip(without[step], kept[step], strict=True) if a != b}
    assert {a for a, _ in changed} == out & {one for ids in without.values() for one in ids} != set()
    locate = Windows(read_token_manifest(token_folders / "train"), SEQ_LEN).locate
    assert np.array_equal(*(locate(np.array(own))[0] for own in zip(*changed, strict=True)))  # each shard is a source
    records = read_quarantine(found.quarantine)
    assert len(records) == 3 and {(one.step, one.code) for one in records} == {(1, "E-DOCUMENT-LISTED")}
    (event,) = read_events(found.events, "listed")
    assert (event["step"], event["path"], event["documents"], event["windows"]) == (1, listed, 3, len(out))
    proof = prove_run(found.root, hashes=True)
    assert proof.fault is None and proof.replaced == sum(one in out for ids in without.values() for one in ids)
    assert not any("in quarantine" in text for text in proof.unchecked)  # its bytes are sound
    step, tokens = next(step for step in without if out & {*without[step]}), RunTokens(found.root)
    replaced = tokens.order(tokens.layout_at(step)).replaced(step, 4)[1]  # as ingot data trace shows it
    assert replaced.tolist() == [one in out for one in without[step]]
    assert exposure(found.root, LISTED).samples == 0 < exposure(whole.root, LISTED).samples


def test_a_list_that_comes_later_holds_for_the_steps_to_come(fork_ranks, make_run, token_folders, listed):
    """The order of what was trained stays. A kill, another layout and a shorter list change nothing after that."""
    run = {"dp_shard": 2, **RUN}
    whole, folder = make_run("whole", **run), make_run("run", **run)
    trained(fork_ranks, whole)
    trained(fork_ranks, folder, until_step=8)
    config = load_run(folder.config)
    accept(folder, replace(config, data=replace(config.data, quarantine=(listed,))), "data.quarantine")
    trained(fork_ranks, folder, until_step=13)
    assert {one.step for one in read_quarantine(folder.quarantine)} == {9}
    folder.config.write_text(folder.config.read_text().replace("dp_shard = 2", "dp_shard = 1"))
    (folder.root.parent / "list.jsonl").write_text("")
    folder.quarantine.unlink()  # a copy is in the checkpoint
    assert trained(fork_ranks, folder, 1) == [(STEPS, False)]
    without, kept, out = ids_by_step(whole), ids_by_step(folder), windows_with(token_folders / "train")
    assert all(kept[step] == without[step] for step in range(1, 9))
    assert not out & {one for step in range(9, STEPS + 1) for one in kept[step]}
    assert out & {one for step in range(9, STEPS + 1) for one in without[step]}
    assert prove_run(folder.root).fault is None
    assert len(list(read_events(folder.events, "listed"))) == 1
    assert files_of(folder) != files_of(whole)


def test_too_many_listed_documents_are_refused_before_the_start(make_run, listed, token_folders):
    folder = make_run("run", quarantine=(listed,), **RUN | {"max_quarantined": 0.001})
    with refused("E-QUARANTINE-LIMIT", source="metal"):
        listed_windows(load_run(folder.config), folder)
    (found,) = listed_windows(load_run(make_run("more", quarantine=(listed,), **RUN).config), folder).values()
    assert found == (3, len(windows_with(token_folders / "train")))
    assert listed_in(token_folders / "train", []) == []
