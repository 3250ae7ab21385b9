from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ingot.trainer.telemetry.source_loss import MOST_SOURCES, SourceLoss, recorded_sources


def manifest(*shards):
    return SimpleNamespace(shards=[SimpleNamespace(source=source, tokens=tokens) for source, tokens in shards])


def test_the_largest_sources_are_recorded_under_names_of_metrics():
    names, places = recorded_sources(manifest(("web", 5), ("code/rust", 9), ("web", 1)))
    assert names == ["code_rust", "web"] and places.tolist() == [1, 0, 1]
    assert recorded_sources(manifest(("web", 5), ("web", 6)))[0] == []  # its loss is that of the step
    names, places = recorded_sources(manifest(*((f"s{number}", 100 - number) for number in range(70))))
    assert len(names) == MOST_SOURCES and "s63" in names and "s64" not in names
    assert places.max() == MOST_SOURCES and sorted(places.tolist())[-6:] == [MOST_SOURCES] * 6


def trained(readout, steps, names=("code", "web"), shards=(1, 0, 2)):
    """Steps of two micro-batches of two sequences of three tokens; window n is in shard n % 3."""
    loss = SourceLoss(names, np.array(shards), lambda ids: ids % 3, rows=2, tokens=3, readout=readout)
    for step, nats in steps.items():
        with loss.step(step):
            for micro_batch in (1, 0):  # a schedule may begin with any
                if readout is not None and readout.keeps_nats:
                    readout.kept_nats = torch.tensor(nats[micro_batch]).flatten()
                loss.computed(micro_batch)
        loss.add(step, np.arange(4) + step)
    return loss


def test_nats_are_added_up_by_the_source_of_their_sequence():
    readout = SimpleNamespace(keeps_nats=False, kept_nats=None)
    nats = [[[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]], [[4.0, 4.0, 4.0], [8.0, 8.0, 8.0]]]
    loss = trained(readout, {1: nats, 2: nats})
    assert not readout.keeps_nats
    # step 1: windows 1, 2, 3, 4: code, other, web, code; step 2: windows 2, 3, 4, 5: other, web, code, other
    sums = loss.take()
    assert sums.reshape(2, 3).tolist() == [[3 + 24 + 12, 12 + 6, 6 + 3 + 24], [9, 6, 9]]
    losses, shares = loss.means(2 * sums)  # of two ranks
    assert losses == pytest.approx({"code": 39 / 9, "web": 3.0}) and shares == {"code": 9 / 24, "web": 6 / 24}
    assert loss.take().tolist() == [0.0] * 6 and loss.means(loss.take()) == ({}, {})


def test_a_rank_whose_tokens_another_one_counts_adds_nothing():
    assert trained(None, {1: None}).take().tolist() == [0.0] * 6
