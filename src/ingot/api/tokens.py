"""A token folder as batches for any training loop: `ingot.TokenDataset`. Imports no torch, except in `torch()`."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingot.api.batch import TokenBatch
from ingot.errors import ConfigError, UsageError, require
from ingot.schema.tokens import TokenManifest, read_token_manifest, training_tokens
from ingot.trainer.loader.order import Order
from ingot.trainer.loader.reader import TokenReader

if TYPE_CHECKING:
    from ingot.api.torch_tokens import TorchTokens

_VERSION = 1


class TokenDataset:
    """The batches of a token folder, memory-mapped, in the order in which `ingot train` reads them.

    The order is a function of (seed, folder, seq_len, weights) alone: for the same `global_batch`, step n has the same
    samples as step n of a training run (unless the weights of that run were changed on the way), and rank r of `ranks`
    has the r-th equal part of them. Every window of an epoch is read once, then the next epoch begins in another order.
    A block of a shard is compared with its hash when it is first read. Memory is O(shards).

    folder: a token folder, or DATA of `ingot data build --out DATA`. seq_len: T, tokens per sequence. global_batch:
    sequences per step over all ranks. weights: source -> share of the samples (default: by size). A `for` loop gives
    the steps after `step`, to the end of the current pass of `len(dataset)` steps; the next loop gives the next pass.

    Raises DataMissing or DataError for a folder without usable tokens, ConfigError if the ranks cannot share the batch
    or the weights do not fit the sources, UsageError for a rank out of range. Reading raises DataError for damaged
    data. Not thread-safe.

        dataset = ingot.TokenDataset("data", seq_len=1024, global_batch=32, rank=0, ranks=4)
        for batch in dataset:
            train_step(batch.inputs, batch.targets)  # int64 [8, 1024] each
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        seq_len: int,
        global_batch: int = 1,
        seed: int = 1234,
        rank: int = 0,
        ranks: int = 1,
        weights: Mapping[str, float] | None = None,
    ):
        _require_ranks(global_batch, rank, ranks)
        self.folder = training_tokens(Path(folder))
        self.manifest: TokenManifest = read_token_manifest(self.folder)
        self.seq_len, self.global_batch, self.seed = seq_len, global_batch, seed
        self.rank, self.ranks, self.weights = rank, ranks, dict(weights or {})
        self.step = 0  # the last step that was read
        self._open()

    def _open(self) -> None:
        self._order = Order(self.manifest, self.seq_len, self.seed, self.weights)
        self._reader = TokenReader(self.folder, self.seq_len, manifest=self.manifest)

    def __len__(self) -> int:
        """Return the number of steps of a pass: as many as the windows of the folder fill, at least 1."""
        return max(self._order.epoch_windows // self.global_batch, 1)

    def batch(self, step: int) -> TokenBatch:
        """Return this rank's part of the batch of step `step`, counted from 1. The position does not change."""
        if step < 1:
            raise UsageError(
                "E-DATASET-STEP", f"step {step}", rule="steps count from 1", fix="ask for step 1 or later", step=step
            )
        per_rank = self.global_batch // self.ranks
        ids = self._order.step(step, self.global_batch)[self.rank * per_rank : (self.rank + 1) * per_rank]
        tokens = self._reader.read(ids)
        return TokenBatch(step, tokens[:, :-1], tokens[:, 1:].copy(), ids)  # targets may be masked in place

    @property
    def last_step(self) -> int:
        """The last step of the current pass; of the next one, if a pass has just ended."""
        return (self.step // len(self) + 1) * len(self)

    def __iter__(self) -> Iterator[TokenBatch]:
        for step in range(self.step + 1, self.last_step + 1):
            batch = self.batch(step)
            self.step = step
            yield batch

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """Return the position and what decides the order, as JSON values, for a checkpoint.

        step: the last step that was trained (default: the last step that was read); with a DataLoader, `batch.step`.
        The ranks are not part of it: another number of ranks continues with the same samples.
        """
        state: dict[str, Any] = {"version": _VERSION, "step": self.step if step is None else step}
        return state | self._identity()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the step of a state. Raises ConfigError if the state is of another order: other tokens,
        seq_len, global_batch, seed or weights.
        """
        own = {"version": _VERSION} | self._identity()
        if changed := [name for name, value in own.items() if state.get(name) != value]:
            name = changed[0]
            raise ConfigError(
                "E-DATASET-STATE",
                f"{name} is {own[name]} here, but {state.get(name)} in the state",
                rule="a position is only valid in the same order of samples",
                fix="open the dataset with the arguments and tokens that the state was saved with",
                changed=changed,
            )
        self.step = int(state["step"])

    def _identity(self) -> dict[str, Any]:
        tokens = self.manifest.fingerprint()
        settings = {"seq_len": self.seq_len, "global_batch": self.global_batch, "seed": self.seed}
        return settings | {"weights": self.weights, "tokens": tokens}

    def torch(self, last_step: int | None = None) -> "TorchTokens":
        """Return a torch IterableDataset of the steps after the current position, each a TokenBatch of tensors.

        last_step: the last of them (default: the end of the current pass). With `DataLoader(dataset.torch(),
        batch_size=None, num_workers=N)`, the workers share the steps: none is lost or repeated, and they arrive in
        order. Each pass over the DataLoader begins at the same position: set `dataset.step = batch.step` as you train,
        and make the next DataLoader from `dataset.torch()` again. Raises MissingPartError without torch.
        """
        require("torch", "train")
        from ingot.api.torch_tokens import TorchTokens

        return TorchTokens(self.batch, self.step, self.last_step if last_step is None else last_step)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without mapped files: another process opens its own."""
        return {name: value for name, value in vars(self).items() if name not in ("_order", "_reader")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._open()

    def __repr__(self) -> str:
        part = f", rank {self.rank} of {self.ranks}" if self.ranks > 1 else ""
        return f"TokenDataset({str(self.folder)!r}, step {self.step}, {len(self):,} steps per pass{part})"


def _require_ranks(global_batch: int, rank: int, ranks: int) -> None:
    if not 0 <= rank < ranks:
        raise UsageError(
            "E-DATASET-RANK",
            f"rank {rank} of {ranks}",
            rule="ranks count from 0",
            fix=f"use a rank from 0 to {max(ranks, 1) - 1}",
            rank=rank,
            ranks=ranks,
        )
    if global_batch < 1 or global_batch % ranks:
        raise ConfigError(
            "E-DATASET-BATCH",
            f"global_batch {global_batch} cannot be divided among {ranks} ranks",
            rule="every rank reads the same number of sequences, at least one",
            fix=f"use a multiple of {ranks}",
            global_batch=global_batch,
            ranks=ranks,
        )
