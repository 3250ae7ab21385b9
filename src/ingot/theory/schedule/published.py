"""Bubbles as their authors give them, and when the tables here have exactly them.

Times F, I, W are those of one stage and one micro-batch, B = I + W; P ranks. Where a rank holds v stages, a paper's F
and B of all its layers are v times ours.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Published:
    """bubble(ranks, F, I, W, F&B): time in which a rank idles; F&B: time of a forward and a backward run together.

    of: what the bubble is measured in: the whole step, or the longest span of one rank (Timeline.step_time, .span).
    exact: when the table's bubble is the formula's; elsewhere `otherwise` holds.
    """

    formula: str
    source: str
    bubble: Callable[[int, float, float, float, float], float]
    of: Literal["step", "span"] = "step"
    exact: str = "always"
    otherwise: str = ""


_GPIPE = "Huang et al. 2019, arXiv 1811.06965"
_MEGATRON = "Narayanan et al. 2021, arXiv 2104.04473, section 2.2"
_ZERO_BUBBLE = "Qi et al. 2023, arXiv 2401.10241"
_DUALPIPE = "DeepSeek-AI 2024, arXiv 2412.19437, and github.com/deepseek-ai/DualPipe"


def _one_forward_one_backward(ranks: int, f: float, i: float, w: float, fb: float) -> float:
    return (ranks - 1) * (f + i + w)


def _dualpipe(pairs: int, i: float, w: float, fb: float) -> float:
    return (pairs - 1) * (fb + i + w - 3 * w)


PUBLISHED: dict[str, Published] = {
    "gpipe": Published("(P-1)(F+B)", _GPIPE, _one_forward_one_backward),
    "1f1b": Published("(P-1)(F+B)", _MEGATRON, _one_forward_one_backward),
    "interleaved": Published("(P-1)(F+B), F and B of one of the v stages", _MEGATRON, _one_forward_one_backward),
    "looped_bfs": Published(
        "(P-1)(F+B), F and B of one of the v stages",
        "Lamy-Poirier 2022, arXiv 2211.05953",
        _one_forward_one_backward,
        exact="from P micro-batches on",
        otherwise="more",
    ),
    "zb_h1": Published(
        "(P-1)(F+I-W)",
        f"{_ZERO_BUBBLE}, section 2",
        lambda p, f, i, w, fb: (p - 1) * (f + i - w),
        of="span",
        exact="W <= F, from P micro-batches on",
        otherwise="more",
    ),
    "zb_h2": Published(
        "(P-1)(F+I-2W)",
        f"{_ZERO_BUBBLE}, section 2",
        lambda p, f, i, w, fb: (p - 1) * (f + i - 2 * w),
        of="span",
        exact="W <= F and 2W <= F+I, from 2P-1 micro-batches on",
        otherwise="more; never below 0",
    ),
    "zb_2p": Published(
        "0",
        f"{_ZERO_BUBBLE}, section 3 (found by search there, and nearly so by the delays of this table)",
        lambda p, f, i, w, fb: 0.0,
        of="span",
        exact="(F+I)/W <= 3.5, from 3P micro-batches on",
        otherwise="more",
    ),
    "zb_v": Published(
        "0",
        _ZERO_BUBBLE,
        lambda p, f, i, w, fb: 0.0,
        of="span",
        exact="F = I = W, from 2P-1 micro-batches on",
        otherwise="more",
    ),
    "dualpipe": Published(
        "(P/2-1)(F&B+B-3W)",
        _DUALPIPE,
        lambda p, f, i, w, fb: _dualpipe(p // 2, i, w, fb),
        exact="F = I = W and F&B = F+B",
        otherwise="with F = I = W and a shorter F&B, at most this",
    ),
    "dualpipe_v": Published(
        "(P-1)(F&B+B-3W)",
        f"{_DUALPIPE}, where P counts stages, 2 per rank; Qi et al. 2025, huggingface.co/blog/ufotalent/cut-in-half",
        lambda p, f, i, w, fb: _dualpipe(p, i, w, fb),
        exact="F = I = W and F&B = F+B",
        otherwise="with F = I = W and a shorter F&B, at most this",
    ),
}
