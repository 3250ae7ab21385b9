"""Decontamination: drop or cut documents that contain parts of evaluation sets, found by n-grams of words.

A benchmark misjudges a model that was trained on its questions. An n-gram of 13 words that is in an item and in a
document counts as a copy, as for GPT-3 (Brown et al. 2020, arXiv:2005.14165, appendix C: 13-grams, 200 characters cut
on both sides, documents in more than 10 pieces dropped). With `share`, a document needs that share of an item's
n-grams instead, as for Llama 3 (arXiv:2407.21783, section 5.1.4: 8-grams) and Tulu 3 (arXiv:2411.15124: 8-grams, half
of an item).
Words are lower-case letters, digits and marks of any script; punctuation and whitespace are ignored, and each ideograph
or kana is a word. Out of scope: paraphrases, translations, and other scripts without spaces between words.

A cheap first test makes this fast: the lengths and first letters of each window of words are combined by a few numpy
operations for the whole document and looked up in a bitmap; a hash is computed only for windows that pass this test.

The folder of an index (16 to 24 bytes per n-gram):
    hashes.npy   uint64 [n-grams], sorted: xxh3 of the n-gram
    owners.npy   uint32 [n-grams]: the number of the item that contains each n-gram
    bitmap.npy   uint64 [power of two]: four bits per shape of an n-gram
    totals.npy   uint32 [items]: number of distinct n-grams of each item
    index.json   settings, lengths of n-grams, evaluation sets with the number of their first item; written last
"""

from ingot.data.decontaminate.index import Decontaminate, DecontaminationRules, NgramMatch, build_index, fingerprint

__all__ = ["Decontaminate", "DecontaminationRules", "NgramMatch", "build_index", "fingerprint"]
