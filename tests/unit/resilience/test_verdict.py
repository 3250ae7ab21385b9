import math

import pytest

from ingot.errors import RunFailed
from ingot.resilience.verdict import Verdict
from ingot.schema.layout import RunFolder


def test_finite_values_pass(tmp_path):
    Verdict(RunFolder(tmp_path)).require_finite([1, 2], [3.5, 1e30], [0.0, 2.0])


@pytest.mark.parametrize(("losses", "norms"), [([1.0, math.nan], [1.0, 1.0]), ([1.0, 1.0], [1.0, math.inf])])
def test_the_first_bad_step_is_named(tmp_path, losses, norms):
    with pytest.raises(RunFailed, match="step 42"):
        Verdict(RunFolder(tmp_path)).require_finite([41, 42], losses, norms)


def ask(rank, ranks, root, who):
    folder = RunFolder(root / str(rank))  # the file as this rank's view of the disk shows it
    folder.root.mkdir()
    if rank in who:
        folder.stop_request.touch()
    return Verdict(folder).stop_requested()


@pytest.mark.parametrize(("who", "answer"), [((), False), ((1,), True), ((0, 1), True)])
def test_all_ranks_stop_when_one_sees_the_request(fork_ranks, tmp_path, who, answer):
    assert fork_ranks(ask, 2, tmp_path, who) == [answer, answer]
