"""Faults in the loader: order, shuffling, a rank's part, document masks, the ledger, hashes of tokens."""

from .mutant import Mutant

_READER = "tests/unit/trainer/loader/test_reader.py"

MUTANTS: list[Mutant] = [
    Mutant(
        name="shuffle-of-epochs",
        what="every epoch has the order of the first",
        file="trainer/loader/order.py",
        before='key = derive(self.key, "epoch", epoch)',
        after='key = derive(self.key, "epoch")',
        tests=("tests/unit/trainer/loader/test_shuffle.py",),
    ),
    Mutant(
        name="order-after-changes",
        what="after a second change of weights, sources continue where the first change left them",
        file="trainer/loader/order.py",
        before="return mix.taken | {n: mix.taken.get(n, 0) + int(k) for",
        after="return mix.taken | {n: int(k) for",
        tests=("tests/unit/trainer/loader/test_order_changes.py",),
    ),
    Mutant(
        name="quotas-by-remainder",
        what="the samples that rounding leaves go to the sources with the smallest remainders",
        file="trainer/loader/order.py",
        before='np.argsort(quotas - shares, kind="stable")',
        after='np.argsort(shares - quotas, kind="stable")',
        tests=("tests/unit/trainer/loader/test_order.py",),
    ),
    Mutant(
        name="windows-without-overlap",
        what="windows of a shard begin seq_len + 1 apart: one token in seq_len is never a target",
        file="trainer/loader/reader.py",
        before="np.maximum((tokens - 1) // seq_len, 0)",
        after="np.maximum(tokens // (seq_len + 1), 0)",
        tests=("tests/unit/trainer/loader/test_windows.py",),
    ),
    Mutant(
        name="document-of-its-end",
        what="an end-of-text token belongs to the document after it",
        file="trainer/loader/reader.py",
        before="return np.cumsum(ends, axis=-1, dtype=np.int32) - ends",
        after="return np.cumsum(ends, axis=-1, dtype=np.int32)",
        tests=(f"{_READER}::test_document_numbers_count_ends_before_a_token",),
    ),
    Mutant(
        name="part-of-a-rank",
        what="a rank reads every ranks-th sample of the global batch instead of its part",
        file="trainer/loader/loader.py",
        before="slice(rank * per_rank, (rank + 1) * per_rank)",
        after="slice(rank, None, ranks)",
        tests=("tests/unit/trainer/loader/test_loader.py::test_all_ranks_together_read_the_global_batch",),
    ),
    Mutant(
        name="ledger-without-order",
        what="the proof of the ledger compares a step's samples without their order",
        file="trainer/loader/ledger.py",
        before="np.flatnonzero(ids != wanted)",
        after="np.flatnonzero(np.sort(ids) != np.sort(wanted))",
        tests=("tests/unit/trainer/loader/test_ledger.py",),
    ),
    Mutant(
        name="blocks-after-the-first",
        what="of a window's blocks, only the first is checked against its hash",
        file="trainer/loader/reader.py",
        before="range(start // block_tokens, (stop - 1) // block_tokens + 1)",
        after="(start // block_tokens,)",
        tests=(f"{_READER}::test_one_flipped_bit_is_found_when_its_block_is_touched_and_not_before",),
    ),
    Mutant(
        name="order-of-sources",
        what="sources follow each other in the same order in every cycle of 4,096 samples",
        file="trainer/loader/order.py",
        before='names = (cycle,) if not mix.begin else ("from", mix.begin, cycle)',
        after='names = ("cycle",) if not mix.begin else ("from", mix.begin)',
        tests=("tests/unit/trainer/loader/test_order.py", "tests/unit/trainer/loader/test_order_changes.py"),
    ),
    Mutant(
        name="change-one-step-early",
        what="new weights of sources act one step before the step at which they were accepted",
        file="trainer/loader/loader.py",
        before="mixes = [(step * global_batch, own) for step, own in earlier]",
        after="mixes = [((step - 1) * global_batch, own) for step, own in earlier]",
        tests=("tests/unit/trainer/test_mixture_change.py",),
    ),
]
