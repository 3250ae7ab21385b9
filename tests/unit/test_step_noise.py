"""The bound for steps of disturbed runs: what a pair of undisturbed runs explains is noise, and twice that is none."""

import random
from statistics import median

import pytest
from tests.step_noise import longest_median


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("drift", [1.0, 1.3])
def test_a_run_that_is_slower_than_the_noise_of_a_pair_is_found(seed: int, drift: float):
    own = random.Random(seed)

    def run(factor: float) -> list[float]:
        return [0.1 * factor * own.lognormvariate(0, 0.2) for _ in range(100)]

    limit = longest_median([run(1.0), run(drift)])
    assert median(run(drift)) < limit < median(run(2.5 * drift))
