import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.expect import refused

from ingot.data.dedup import substrings
from ingot.data.dedup.substrings import (
    RepeatedSpans,
    SubstringRules,
    cut,
    mark_repeated,
    window_hashes,
    window_partitions,
    write_windows,
)


def run(files, rules, partitions, work):
    """The spans of every text of every file, through the three steps."""
    folders = [work / f"file-{number}" for number in range(len(files))]
    marked = [work / f"partition-{number}" for number in range(partitions)]
    for folder in (*folders, *marked):
        folder.mkdir()
    written = [write_windows(texts, rules, partitions, folder) for texts, folder in zip(files, folders, strict=True)]
    count = sum(mark_repeated(number, folders, out) for number, out in enumerate(marked))
    spans = []
    for number, (texts, folder) in enumerate(zip(files, folders, strict=True)):
        repeated = RepeatedSpans(number, folder, marked, rules)
        spans.append([repeated.of(text) for text in texts])
        repeated.finish()
        assert sorted(path.name for path in folder.iterdir()) == ["starts.npy", "windows.npy"]
    return spans, sum(written), count


def by_hand(files, words):
    """Return the remaining words of each text, without hashes or files."""
    seen, left = set(), []
    for texts in files:
        for text in texts:
            tokens, covered = text.split(), set()
            for i in range(len(tokens) - words + 1):
                window = tuple(tokens[i : i + words])
                if window in seen:
                    covered.update(range(i, i + words))
                seen.add(window)
            left.append([token for i, token in enumerate(tokens) if i not in covered])
    return left


TEXT = st.lists(st.sampled_from(["a", "b", "A", "ä\u3000", "b \n", "c"]), max_size=25).map(" ".join)
FILES = st.lists(st.lists(TEXT, max_size=4), min_size=1, max_size=4)


@settings(max_examples=80)
@given(FILES, st.integers(2, 6), st.sampled_from([1, 2, 8]), st.sampled_from([3, 1 << 16]))
def test_as_by_hand(tmp_path_factory, files, words, partitions, block):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(substrings, "_BLOCK", block)
        patch.setattr(substrings, "PIECE", 10)
        spans, _, _ = run(files, SubstringRules(words=words), partitions, tmp_path_factory.mktemp("work"))
    left = [cut(text, found) for texts, all_found in zip(files, spans, strict=True)
            for text, found in zip(texts, all_found, strict=True)]  # fmt: skip
    assert [text.split() for text in left] == by_hand(files, words)


def test_a_repeated_paragraph_is_cut_with_the_whitespace_behind_it(tmp_path):
    notice = "all of the words of this notice\ncome again on every page "
    files = [["First page. " + notice + "\n\nThe end."], ["  Second one.  " + notice + "\n\nAnother end.", notice]]
    spans, windows, repeated = run(files, SubstringRules(words=6), 4, tmp_path)
    assert spans[0] == [[]]
    assert cut(files[1][0], spans[1][0]) == "  Second one.  Another end."
    assert spans[1][1] == [(0, len(notice))]
    assert windows == sum(len(text.split()) - 5 for texts in files for text in texts)
    assert repeated == 2 * (12 - 5)


def test_a_text_that_repeats_itself_keeps_the_first_time(tmp_path):
    text = "one two three four five six " * 3
    spans, _, _ = run([[text]], SubstringRules(words=4), 1, tmp_path)
    assert cut(text, spans[0][0]) == "one two three four five six "


def test_hashes_depend_on_the_words_of_the_window_alone():
    text = " ".join(f"w{i}" for i in np.random.default_rng(1).integers(0, 50, 3000))
    tokens = text.split()
    hashes = window_hashes(text, 3)
    assert len(hashes) == 2998
    windows = [tuple(tokens[i : i + 3]) for i in range(2998)]
    assert len(set(zip(windows, hashes.tolist(), strict=True))) == len(set(windows)) == len(set(hashes.tolist()))
    assert window_hashes("a b c", 3)[0] == window_hashes("x y a  b\nc", 3)[2] != window_hashes("A b c", 3)[0]
    assert not len(window_hashes("a b", 3))
    assert window_hashes("a b c", 2).tolist() == [
        5575586189823302995,
        2524348269419346710,
    ]  # the same on every machine and in every release


def test_other_texts_than_were_written_are_noticed(tmp_path):
    rules = SubstringRules(words=2)
    folder, marked = tmp_path / "file", tmp_path / "partition"
    folder.mkdir()
    marked.mkdir()
    write_windows(["a b c", "d e"], rules, 1, folder)
    mark_repeated(0, [folder], marked)
    spans = RepeatedSpans(0, folder, [marked], rules)
    assert spans.of("a b c") == []
    with refused("E-DEDUP-TEXTS-CHANGED", folder=str(folder)):
        spans.finish()
    with refused("E-DEDUP-TEXTS-CHANGED", folder=str(folder)):
        spans.of("d e f g")


def test_rules_and_sizes():
    assert [name for name, _ in SubstringRules(words=1).problems()] == ["words"]
    assert not list(SubstringRules().problems())
    assert window_partitions(10**6) == 1
    assert window_partitions(10**9) == 128
