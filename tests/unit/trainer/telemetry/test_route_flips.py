from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ingot.trainer.telemetry.route_flips import RouteFlips


class Chosen(nn.Module):
    """A router whose routes are given."""

    seen = None

    def forward(self, experts):
        return SimpleNamespace(experts_MK=torch.tensor(experts))


def test_the_share_of_experts_that_a_token_did_not_have_before():
    router = Chosen()
    flips = RouteFlips({0: nn.ModuleList([router, nn.Linear(1, 1)])})

    def check(*batches):
        with flips.watching():
            for experts in batches:
                router(experts)
        return flips.share()

    router([[0, 1]])  # nobody looks
    assert check([[0, 1], [2, 3]], [[4, 5]]) is None
    assert check([[1, 0], [3, 2]], [[4, 5]]) == 0.0  # the order says nothing
    assert check([[1, 7], [2, 3]], [[8, 9]]) == pytest.approx(3 / 6)
    assert check([[1, 7], [2, 3]], [[8, 9]]) == 0.0
    assert check([[1, 7]]) is None  # another batch
    flips.went_back()
    assert check([[1, 7]]) is None  # the check before is void
    assert check([[1, 7]]) == 0.0
