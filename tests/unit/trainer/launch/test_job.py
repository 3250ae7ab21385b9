"""The number of threads that ranks get."""

import pytest

from ingot.schema.parallel import Parallel
from ingot.trainer.launch.train import most_ranks


@pytest.mark.parametrize("copies", [1, 2, 4])
def test_canonical_ranks_have_the_same_threads_on_any_number_of_copies(copies):
    parallel = Parallel(dp_replicate=copies, tp=2, reduce="canonical", virtual_ranks=4)
    assert most_ranks(parallel) == 8


def test_others_share_the_cores_among_themselves():
    assert most_ranks(Parallel(dp_shard=2, tp=2)) == 4
