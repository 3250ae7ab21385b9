"""Faults in the data stages: filters, language, duplicates, personal data, URLs, shards, lineage."""

from .mutant import Mutant

_READ_BACK = "tests/unit/data/build/test_shards.py::test_every_document_is_in_exactly_one_split_and_reads_back"

MUTANTS: list[Mutant] = [
    Mutant(
        name="threshold-of-repetition",
        what="a limit of Gopher's repetition rules differs from the paper's table",
        file="data/filters/gopher.py",
        before="duplicate_6_gram: float = 0.14",
        after="duplicate_6_gram: float = 0.15",
        tests=("tests/unit/data/filters/test_gopher.py::test_limits_are_those_of_the_paper_and_inclusive",),
    ),
    Mutant(
        name="threshold-of-words",
        what="a page with exactly the least share of alphabetic words is dropped",
        file="data/filters/gopher.py",
        before="if alphabetic < rules.alphabetic_words:",
        after="if alphabetic <= rules.alphabetic_words:",
        tests=("tests/unit/data/filters/test_gopher.py::test_limits_are_those_of_the_paper_and_inclusive",),
    ),
    Mutant(
        name="sentences-of-c4",
        what="C4's rule asks for three sentences, not five",
        file="data/filters/c4.py",
        before="sentences: int = 5",
        after="sentences: int = 3",
        tests=("tests/unit/data/filters/test_c4.py::test_documents_are_dropped_by_name",),
    ),
    Mutant(
        name="threshold-of-a-language",
        what="thresholds of single languages are ignored",
        file="data/filters/language.py",
        before="if score < self.thresholds.get(language, self.threshold):",
        after="if score < self.threshold:",
        tests=("tests/unit/data/filters/test_language.py::test_thresholds_of_single_languages",),
    ),
    Mutant(
        name="bands-overlap",
        what="the bands of near-duplicate search share rows: fewer similar pairs become candidates",
        file="data/dedup/bands.py",
        before="columns[band * rules.rows : (band + 1) * rules.rows]",
        after="columns[band : band + rules.rows]",
        tests=(
            "tests/unit/data/dedup/test_bands.py::test_candidates_are_all_similar_pairs_of_a_bucket",
            "tests/unit/data/dedup/test_bands.py::test_buckets_are_those_of_whole_rows",
        ),
    ),
    Mutant(
        name="duplicates-by-estimate",
        what="pairs are duplicates from the similarity at which they are verified, not from the threshold",
        file="data/dedup/clusters.py",
        before="if similarity >= rules.jaccard:",
        after="if similarity >= rules.least_estimate:",
        tests=(
            "tests/unit/data/dedup/test_clusters.py::test_verified_pairs_are_exact",
            "tests/unit/data/dedup/test_clusters.py::test_a_pair_below_the_threshold_stays_even_if_a_band_agrees",
        ),
    ),
    Mutant(
        name="cards-of-15-digits",
        what="the Luhn sum doubles every second digit from the left: cards with 15 or 19 digits stay in the text",
        file="data/pii/numbers.py",
        before="sum(map(int, digits[-1::-2])) + sum(int(doubled[int(d)]) for d in digits[-2::-2])",
        after="sum(map(int, digits[1::2])) + sum(int(doubled[int(d)]) for d in digits[::2])",
        tests=(
            "tests/unit/data/test_pii.py::test_personal_data_is_replaced",
            "tests/unit/data/test_pii.py::test_luhn",
        ),
    ),
    Mutant(
        name="url-repeated-parameters",
        what="parameters of one name are sorted by value, although their order can matter",
        file="data/sources/url.py",
        before='sorted(pieces, key=lambda piece: piece.partition("=")[0])',
        after="sorted(pieces)",
        tests=("tests/unit/data/sources/test_url.py::test_one_spelling",),
    ),
    Mutant(
        name="index-of-documents",
        what="the document index of a shard begins again at 0 after each batch of 1,024 documents",
        file="data/build/shards.py",
        before='index["start"] = start + np.cumsum(',
        after='index["start"] = np.cumsum(',
        tests=(_READ_BACK,),
    ),
    Mutant(
        name="lineage-of-tokens",
        what="the lineage of a shard gives each document the tokens after its own",
        file="data/build/shards.py",
        before='            yield {"start": start, "tokens": tokens} | json.loads(line)\n            start += tokens\n',
        after='            start += tokens\n            yield {"start": start, "tokens": tokens} | json.loads(line)\n',
        tests=(_READ_BACK,),
    ),
]
