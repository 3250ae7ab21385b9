"""Text generation. In a single process, a key/value cache lets each new token cost only its own computation.

Shape letters: B batch, T new tokens, S tokens in the cache after them, G key/value heads, H head_dim, V vocab_size.
"""

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ingot.errors import UsageError
from ingot.schema.arch import Arch
from ingot.trainer.torch_private import compiler_is_loaded


class LayerCache:
    """The keys and values of one layer, written in place into a buffer for `capacity` tokens."""

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
    """A LayerCache for each layer. tokens: the number of tokens that have passed through all layers."""

    def __init__(self, arch: Arch, capacity: int):
        self.layers = [LayerCache(capacity) for _ in range(arch.num_layers)]

    @property
    def tokens(self) -> int:
        return self.layers[-1].tokens


def choose_token(logits_V: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """Return the most likely token at temperature 0, else a draw from softmax(logits / temperature).

    top_k: draw from the k most likely tokens only; 0 means all. The draw is on the CPU in float32, so that the same
    logits and seed give the same token on every rank and device.
    """
    logits_V = logits_V.float().cpu()
    if temperature == 0:
        return int(logits_V.argmax())
    if 0 < top_k < len(logits_V):
        kept, ids = logits_V.topk(top_k)
        logits_V = torch.full_like(logits_V, -torch.inf).scatter(0, ids, kept)
    probabilities = (logits_V / temperature).softmax(-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))


# All token ids so far -> logits [V] of the next token.
NextLogits = Callable[[Sequence[int]], Tensor]


def cached(model: torch.nn.Module, arch: Arch, capacity: int) -> NextLogits:
    """Return a NextLogits function with a KV cache, for a whole model and one text of at most `capacity` tokens."""
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
    """Return up to `max_tokens` token ids that continue `prompt`, ending with `stop_id` if the model generates it.

    Every rank of a parallel model must call this function with the same arguments and without stop_id, so that all
    ranks run the same number of forwards. Raises UsageError for an empty prompt, a sampling setting out of its range,
    or more tokens than the model has positions.
    """
    if not prompt:
        raise UsageError(
            "E-PROMPT-EMPTY",
            "the prompt has no tokens",
            rule="the model continues a prompt of at least one token",
            fix="pass a prompt that is not empty",
        )
    if temperature < 0 or top_k < 0 or max_tokens < 1:
        raise UsageError(
            "E-SAMPLING-RANGE",
            f"temperature={temperature}, top_k={top_k}, max_tokens={max_tokens}",
            rule="temperature and top_k are 0 or more; max_tokens is at least 1",
            fix="choose values in these ranges (temperature 0: the most likely token; top_k 0 considers all tokens)",
            temperature=temperature,
            top_k=top_k,
            max_tokens=max_tokens,
        )
    if len(prompt) + max_tokens > arch.max_seq_len:
        room = max(arch.max_seq_len - len(prompt), 0)
        raise UsageError(
            "E-CONTEXT-EXCEEDED",
            f"{len(prompt)} prompt tokens + {max_tokens} new tokens exceed the model's {arch.max_seq_len} positions",
            rule="prompt and new tokens fit into model.max_seq_len positions",
            fix=f"generate at most {room} new tokens, or shorten the prompt",
            prompt_tokens=len(prompt),
            max_tokens=max_tokens,
            max_seq_len=arch.max_seq_len,
        )
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt)
    while True:
        token = choose_token(next_logits(ids), temperature, top_k, generator)
        ids.append(token)
        if token == stop_id or len(ids) == len(prompt) + max_tokens:
            return ids[len(prompt) :]


def _without_compilation():
    """Return a context in which compiled blocks run eagerly: the cache has a new length at every token, and each length
    would be compiled again.

    A process that compiled nothing has not imported the compiler, and the import takes half a second.
    """
    return torch.compiler.set_stance("force_eager") if compiler_is_loaded() else contextlib.nullcontext()
