"""The repeated sequences of a batch, counted by hand."""

import numpy as np

from ingot.report.diagnose.batch_text import describe_batch
from ingot.report.diagnose.document_signs import NGRAM


def test_a_sequence_that_comes_again_is_counted_over_documents():
    again = np.arange(100, 100 + NGRAM + 2)
    parts = [
        ("a", np.r_[np.arange(20), again]),
        ("b", np.r_[again, np.arange(40, 50)]),
        ("b", np.r_[np.arange(60, 75), again[:NGRAM]]),
        ("c", np.arange(5)),  # too short for a sequence
    ]
    text = describe_batch(parts, lambda tokens: " ".join(map(str, tokens)))
    total = sum(len(tokens) for _, tokens in parts)
    assert (text.documents, text.tokens) == (3, total)
    assert (text.shortest, text.median, text.longest) == (5, 30, 43)
    assert text.repeated == (2 * (NGRAM + 2) + NGRAM) / total
    (first,) = text.most_repeated  # the others overlap with it
    assert (first.times, first.documents, first.tokens) == (3, 2, tuple(again[:NGRAM].tolist()))
    assert first.text.startswith("100 101")
    nothing = describe_batch([("a", np.arange(50))])
    assert nothing.repeated == 0 and nothing.most_repeated == () and describe_batch([]).documents == 0
