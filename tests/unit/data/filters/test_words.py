"""Words and sentences beside what spaCy 3.8.18 gives, and the compiled rules beside the plain ones."""

import unicodedata

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ingot.data.filters import words
from ingot.data.filters.words import (
    count_sentences,
    english,
    native,
    split_english,
    split_sentences,
    split_whitespace,
    split_words,
    tables,
)

# A text, and in the next line the words of spacy.blank("en"), which have no spaces in them.
# words: off
_GOLDEN = r"""
Don't stop: we're nearly there, aren't we?
Do n't stop : we 're nearly there , are n't we ?
She said "Yes!" (and meant it).
She said " Yes ! " ( and meant it ) .
It cost US$5.50, i.e. 3.20€ or so...
It cost US$ 5.50 , i.e. 3.20 € or so ...
Mr. Smith's well-known U.S. company—founded in 1999—grew 10%.
Mr. Smith 's well - known U.S. company — founded in 1999 — grew 10 % .
I'd've gone, but y'all cannot come; gonna be late.
I 'd 've gone , but y' all can not come ; gon na be late .
See https://www.example.com/a,b?c=d#e, or mail jane.doe@example.co.uk.
See https://www.example.com/a,b?c=d#e , or mail jane.doe@example.co.uk .
www.example.com. and example.Com and 8.8.8.8/x and 10.0.0.1/x
www.example.com . and example . Com and 8.8.8.8/x and 10.0.0.1 / x
The U.K. won 3-2 on 12/05/2020 at 8:30am and 9p.m. sharp
The U.K. won 3 - 2 on 12/05/2020 at 8:30am and 9 p.m. sharp
“Curly quotes,” it’s said, ‘aren’t’ straight’s rival…
“ Curly quotes , ” it ’s said , ‘ are n’t ’ straight ’s rival …
and/or w/o c++ C++ C# F# .NET a.m.
and/or w/o c++ C++ C # F # .NET a.m.
wait--what? no---really ——oh yes—no a~b 5-a a-5 1-2
wait -- what ? no --- really — — oh yes — no a ~ b 5 - a a-5 1 - 2
:-) hello:) :))) (^_^) >.< xD 8) <3 no:(
:-) hello :) :))) (^_^) >.< xD 8) <3 no :(
$100 £20 5€ 10km 3m/s 25°C. 20°c. 7kg, 5GB/s +5 5+ ++ +a
$ 100 £ 20 5 € 10 km 3 m/s 25 ° C . 20 ° c . 7 kg , 5GB / s +5 5 + + + + a
snake_case foo.Bar foo.bar foo,bar foo, bar 1,000,000 a:b 9:a
snake_case foo . Bar foo.bar foo , bar foo , bar 1,000,000 a : b 9 : a
don t dont Dont cant its ill I'll we’ll've
don t do nt Do nt ca nt its ill I 'll we’ll've
'tis the 'em rock'n'roll o'clock ol' somethin'
' tis the 'em rock'n'roll o'clock ol' somethin'
...and .. then . . . the end.. x.) U.S.A.
... and .. then . . . the end .. x. ) U.S.A.
[1] {a} <b> #tag @name &amp; *bold* _it_ `code`
[ 1 ] { a } < b > # tag @name & amp ; * bold * _ it _ ` code `
中文，没有空格。日本語？ Привет, мир! नमस्ते। שלום
中文，没有空格。日本語 ？ Привет , мир ! नमस्ते । שלום
e.g. E.g. vs. Ph.D. Inc. St. No. x. Z. ä. é.
e.g. E.g. vs. Ph.D. Inc. St. No . x. Z. ä. é .
☃snow☃man 🎉party ▲up →right ©2020 ™
☃ snow ☃ man 🎉 party ▲ up →right © 2020 ™
a/b/c http://x y:// ://z ftp://host.de:21/p user@host user:pw@host.org
a / b / c http://x y:// : //z ftp://host.de:21/p user@host user:pw@host.org
"""
# words: on
GOLDEN = dict(zip(_GOLDEN.strip().split("\n")[::2], _GOLDEN.strip().split("\n")[1::2], strict=True))
# spaCy's sentencizer, cut as datatrove cuts
SENTENCES = [
    ["One.", " Two!", " Three?"],
    ["Mr. Smith went.", " He came back."],
    ["No mark at all"],
    ["What?!", ' Really... yes. "', 'Quoted."', " Next"],
    ["A.  Two spaces. "],
    ["Yes.", "  Two spaces."],
    [""],
    ["  "],
    ["He paid 3.50 for it, e.g. in cash."],
    ["(First.)", " Second"],
    ["中文。日本語？はい"],
    ["end. [", "3]"],
]
needs_native = pytest.mark.skipif(native() is None, reason="the compiled core was not built")


@pytest.fixture(params=["0", "1"], ids=["plain", "compiled"])
def either(request, monkeypatch):
    monkeypatch.setenv("INGOT_NATIVE", request.param)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("text", GOLDEN)
def test_words_are_spacys(text):
    assert " ".join(split_english(text)) == GOLDEN[text]


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("pieces", SENTENCES, ids=range(len(SENTENCES)))
def test_sentences_are_spacys(pieces):
    text = "".join(pieces)
    assert split_sentences(text) == pieces
    assert count_sentences(text) == len(pieces)


def test_the_definition_is_chosen_by_name():
    assert split_words("don't stop.", "whitespace") == split_whitespace("don't stop.") == ["don't", "stop."]
    assert split_words("don't stop.", "spacy") == ["do", "n't", "stop", "."]


# Everything that a rule looks at, put together without sense.
_PIECES = [
    *english.SPECIAL,
    *(list(tables.UNITS) * 2),
    *(list("abcABCZ019._-/:@,;!?'\"()[]{}+*^=<>~#&%$°…—–’‘“”²ªßÄé中ж№🎉☃漢あ２") * 12),
    *(["..", "...", "……", "http://", "www.", "example.com", ".co.uk", "user@", "8.8.8.8", "192.168.1.1", "US$"] * 8),
]
chunks = st.lists(st.sampled_from(_PIECES), min_size=1, max_size=6).map("".join)
spaces = st.sampled_from([*(" " * 9), "  ", "\n", "\n\n", "\t", "\u00a0", " \n", "\u3000"])
texts = st.lists(st.tuples(chunks, spaces), max_size=12).map(lambda pairs: "".join(a + b for a, b in pairs)) | st.text()


@needs_native
@settings(max_examples=600, deadline=None)
@given(texts)
@example("\ud800 a lone surrogate.")
def test_compiled_equals_plain(text):
    plain = [word for chunk in text.split() for word in english.words_of_chunk(chunk)]
    assert split_english(text) == plain
    assert count_sentences(text) == len(english.sentences(text))


@pytest.mark.usefixtures("either")
@settings(max_examples=200, deadline=None)
@given(texts)
def test_nothing_but_whitespace_is_lost(text):
    assert "".join(split_english(text)) == "".join(text.split())
    assert "".join(split_sentences(text)) == text


@given(st.characters())
def test_classes_agree_with_pythons_methods(character):
    flags = tables.FLAGS[character]
    assert bool(flags & tables.SPACE) == character.isspace()
    assert bool(flags & tables.ALPHABETIC) == character.isalpha()
    assert bool(flags & tables.ALPHANUMERIC) == character.isalnum()
    assert bool(flags & tables.BREAK) == (len(f"a{character}b".splitlines()) == 2)
    assert bool(flags & tables.CATEGORY_P) == unicodedata.category(character).startswith("P")
    if flags & (tables.LOWER | tables.UPPER):
        assert flags & tables.LETTER


def test_special_cases():
    cases = tables.special_cases()
    assert len(cases) == 1343  # spaCy's 1,347 without four that are whitespace
    assert all("".join(parts) == case for case, parts in cases.items())
    assert cases["wouldn't've"] == ("would", "n't", "'ve")
    assert cases["We’re"] == ("We", "’re")
    assert "well" not in cases


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("text", ["!" * 50_000, "a-" * 25_000, "a.a@" * 12_500, ":)" * 25_000, "a" * 50_000 + ".com"])
def test_hostile_texts_take_linear_time(text):
    """Quadratic work on any of them would take minutes."""
    assert "".join(split_english(text)) == text


def test_without_a_compiler_it_is_slower_and_not_broken(monkeypatch):
    monkeypatch.setattr(words, "compiled", lambda name: None)
    assert native() is None
    assert split_english("It isn't.") == ["It", "is", "n't", "."]
