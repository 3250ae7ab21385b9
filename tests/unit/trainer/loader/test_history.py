"""The mixtures of a run, read back from what was accepted."""

import json

import pytest
from tests.expect import refused

from ingot.schema.accepted import read_accepted
from ingot.schema.run_folder import RunFolder
from ingot.trainer.loader.order import earlier_weights

A, B, C = {}, {"web": 0.7, "my.source": 0.3}, {"web": 1.0}


@pytest.fixture
def history(tmp_path):
    """`history((step, old, new), ...)`: a run folder in which these changes of the mixture were accepted."""

    def make(*changes):
        folder = RunFolder(tmp_path)
        records = [{"step": 1, "changes": {"optim.lr": [1, 2]}}]
        records += [{"step": step, "changes": {"data.weights": [old, new]}} for step, old, new in changes]
        folder.accepted.write_text(json.dumps(records))
        return folder

    return make


def weights_before(folder, weights):
    return earlier_weights(read_accepted(folder.accepted), weights)


def test_changes_one_after_the_other(history):
    folder = history((40, A, B), (80, B, C))
    assert weights_before(folder, C) == [(40, A), (80, B)]


def test_no_change_no_history(history, tmp_path):
    assert weights_before(RunFolder(tmp_path / "none"), B) == []
    assert weights_before(history(), B) == []


def test_what_was_taken_back_before_it_was_trained_on_does_not_count(history):
    assert weights_before(history((40, A, B)), A) == []
    assert weights_before(history((40, A, B), (40, A, C)), C) == [(40, A)]
    assert weights_before(history((40, A, B), (80, A, B)), B) == [(80, A)]
    assert weights_before(history((40, A, B), (80, A, C)), C) == [(80, A)]


def test_a_mixture_that_comes_back(history):
    assert weights_before(history((40, A, B), (80, B, A)), A) == [(40, A), (80, B)]


@pytest.mark.parametrize("text", ["", "{", "[3]", '[{"step": 4}]', '[{"step": 4, "changes": {"data.weights": 3}}]'])
def test_what_cannot_be_read_is_an_error(tmp_path, text):
    folder = RunFolder(tmp_path)
    folder.accepted.write_text(text)
    with refused("E-RUN-CHANGES-READ"):
        weights_before(folder, A)
