import pytest

from ingot.report.layout import layout_text


@pytest.mark.parametrize(
    "layout, text",
    [
        ({"dp_shard": 1}, "dp_shard 1"),
        ({"pp": 2, "dp_shard": 1}, "pp 2"),
        ({"pp": 2, "dp_shard": 4, "cp": 2, "ep": 8}, "pp 2 x dp_shard 4 x cp 2, ep 8"),
        ({"dp_shard": 1, "cp": 8, "context": "usp, ulysses 2"}, "cp 8 (usp, ulysses 2)"),
    ],
)
def test_layouts_in_words(layout, text):
    assert layout_text(layout) == text
