"""Sampling, with a cache of keys and values where one process has the model: a new token costs one token's work.

Shape letters: B batch, T new tokens, S tokens in the cache after them, G key/value heads, H head_dim, V vocab_size.
"""

import contextlib
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ingot.errors import UsageError
from ingot.schema.arch import Arch


class LayerCache:
    """Keys and values of one layer, written in place into a buffer for `capacity` tokens."""

    def __init__(self, capacity: int):
        self.capacity, self.tokens = capacity, 0
        self.k_BGSH: Tensor | None = None
        self.v_BGSH: Tensor | None = None

    def append(self, k_BGTH: Tensor, v_BGTH: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new tokens; return keys and values of all tokens so far, [B, G, S, H] each."""
        if self.k_BGSH is None or self.v_BGSH is None:
            batch, groups, _, head_dim = k_BGTH.shape
            self.k_BGSH = k_BGTH.new_empty(batch, groups, self.capacity, head_dim)
            self.v_BGSH = torch.empty_like(self.k_BGSH)
        end = self.tokens + k_BGTH.shape[2]
        self.k_BGSH[:, :, self.tokens : end] = k_BGTH
        self.v_BGSH[:, :, self.tokens : end] = v_BGTH
        self.tokens = end
        return self.k_BGSH[:, :, :end], self.v_BGSH[:, :, :end]


class KVCache:
    """One LayerCache per layer; `tokens` is how many tokens have passed through all of them."""

    def __init__(self, arch: Arch, capacity: int):
        self.layers = [LayerCache(capacity) for _ in range(arch.num_layers)]

    @property
    def tokens(self) -> int:
        return self.layers[-1].tokens


def choose_token(logits_V: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """temperature 0 takes the most likely token; otherwise a draw from softmax(logits / temperature).

    top_k: only the k most likely ones take part; 0 means all. Drawn on the CPU in float32, so that the same logits and
    seed give the same token on every rank and device.
    """
    logits_V = logits_V.float().cpu()
    if temperature == 0:
        return int(logits_V.argmax())
    if 0 < top_k < len(logits_V):
        kept, ids = logits_V.topk(top_k)
        logits_V = torch.full_like(logits_V, -torch.inf).scatter(0, ids, kept)
    probabilities = (logits_V / temperature).softmax(-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))


# All token ids so far -> logits [V] of the next one.
NextLogits = Callable[[Sequence[int]], Tensor]


def cached(model: torch.nn.Module, arch: Arch, capacity: int) -> NextLogits:
    """Of a model that this process can run by itself, for one text of at most `capacity` tokens."""
    device = next(model.parameters()).device
    cache = KVCache(arch, capacity)

    def next_logits(ids: Sequence[int]) -> Tensor:
        new = torch.tensor([ids[cache.tokens :]], device=device)
        with torch.no_grad(), _without_compilation():
            return model(new, cache=cache)[0, -1]

    return next_logits


def generate(
    next_logits: NextLogits,
    arch: Arch,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    seed: int = 0,
    stop_id: int | None = None,
) -> list[int]:
    """Up to `max_tokens` token ids that follow `prompt`. Stops after `stop_id`, which is then the last one.

    Every rank of a parallel model must call it with the same arguments and without stop_id, so that all make the same
    number of forwards. Raises UsageError for an empty prompt, a negative temperature, or more tokens than the model's
    positions.
    """
    if not prompt:
        raise UsageError("the prompt has no tokens", rule="the model continues at least one token")
    if temperature < 0 or top_k < 0 or max_tokens < 1:
        raise UsageError(
            f"temperature={temperature}, top_k={top_k}, max_tokens={max_tokens}",
            rule="temperature and top_k are 0 or more, max_tokens is at least 1",
        )
    if len(prompt) + max_tokens > arch.max_seq_len:
        raise UsageError(
            f"{len(prompt)} prompt tokens and {max_tokens} new ones exceed the model's {arch.max_seq_len} positions",
            fix=f"ask for at most {max(arch.max_seq_len - len(prompt), 0)} new tokens, or shorten the prompt",
        )
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt)
    while True:
        token = choose_token(next_logits(ids), temperature, top_k, generator)
        ids.append(token)
        if token == stop_id or len(ids) == len(prompt) + max_tokens:
            return ids[len(prompt) :]


def _without_compilation():
    """Compiled blocks run as written: the cache has another length at every token, and each would be compiled anew.

    Where nothing was compiled the compiler is not even there, and importing it takes half a second.
    """
    loaded = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if loaded else contextlib.nullcontext()
