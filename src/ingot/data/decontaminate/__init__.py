"""Documents that hold parts of evaluation sets: found by n-grams of words, dropped or cut.

A model that saw a benchmark's questions is measured wrongly. An n-gram of 13 words that stands in an item and in a
document is taken as a copy, as for GPT-3 (Brown et al. 2020, arXiv:2005.14165, appendix C: 13-grams, 200 characters
cut on both sides, documents in more than 10 pieces dropped); `share` asks for a part of an item's n-grams instead, as
Llama 3 (arXiv:2407.21783, section 5.1.4: 8-grams) and Tulu 3 (arXiv:2411.15124: 8-grams, half of an item) do.
Words are lower case letters, digits and marks of any script; punctuation and whitespace do not count, and each
ideograph or kana is a word. Out of scope: paraphrases, translations, and scripts without spaces other than those.

How it is fast: of each window of words only the lengths and first letters are combined, with a few numpy operations
for a whole document, and looked up in a bitmap; a true hash is computed of the few windows that remain.

The folder of an index, memory-mapped, so that all workers of a machine share it (16 to 24 bytes per n-gram):
    hashes.npy   uint64 [n-grams], sorted: xxh3 of the n-gram
    owners.npy   uint32 [n-grams]: the number of the item that each belongs to
    bitmap.npy   uint64 [power of two]: four bits per n-gram's shape
    totals.npy   uint32 [items]: distinct n-grams of each item
    index.json   settings, lengths of n-grams, evaluation sets with their first item; written last
"""

from ingot.data.decontaminate.index import DecontaminationRules, build_index, fingerprint
from ingot.data.decontaminate.stage import Decontaminate, Match

__all__ = ["Decontaminate", "DecontaminationRules", "Match", "build_index", "fingerprint"]
