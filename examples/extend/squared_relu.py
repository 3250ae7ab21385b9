"""The squared ReLU feed-forward (So et al. 2021, Primer). Run file: model.feed_forward = "squared_relu"."""

from torch import nn

from ingot.plugins.layers import FEED_FORWARDS, FeedForwardPart


class SquaredReLU(nn.Module):
    def __init__(self, d_model, d_ffn, options):
        super().__init__()
        self.up = nn.Linear(d_model, d_ffn, bias=False)
        self.down = nn.Linear(d_ffn, d_model, bias=False)

    def forward(self, x):
        return self.down(self.up(x).relu().square())


FEED_FORWARDS.register(
    FeedForwardPart(
        name="squared_relu",
        make=SquaredReLU,
        sharding={"up.weight": "column", "down.weight": "row"},
        matrices=2,  # of d_model x d_ffn
        saved=2,  # the results of relu and of square, for the backward
    )
)
