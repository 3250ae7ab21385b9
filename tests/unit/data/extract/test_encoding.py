import pytest

from ingot.data.extract.html import decode_page

RUSSIAN = "Всеобщая декларация прав человека. Все люди рождаются свободными. " * 5
GERMAN = "Die Würde des Menschen ist unantastbar; sie zu achten ist Pflicht. " * 5


@pytest.mark.parametrize(
    ("text", "codec", "meta", "header"),
    [
        (RUSSIAN, "windows-1251", "windows-1251", ""),
        (RUSSIAN, "koi8-r", "", "koi8-r"),
        (RUSSIAN, "utf-8", "", "iso-8859-1"),  # a wrong header
        (RUSSIAN, "windows-1251", "", ""),  # not declared; detected
        (GERMAN, "iso-8859-1", "ISO-8859-1", ""),
        ("世界人権宣言。すべての人間は、生まれながらにして自由である。" * 9, "shift_jis", "Shift_JIS", ""),
        ("世界人权宣言。人人生而自由,在尊严和权利上一律平等。" * 9, "gb18030", "gb2312", ""),
        ("世界人権宣言" * 9, "iso2022_jp", "iso-2022-jp", ""),
        (GERMAN, "utf-16", "", ""),
        (GERMAN, "utf-16-le", "", "utf-8"),  # no byte order mark, and a wrong header
        (GERMAN, "utf-16-be", "utf-16", ""),
        (RUSSIAN, "windows-1251", "windows-1251", "utf-8"),
        (GERMAN, "utf-8-sig", "windows-1251", ""),
        (GERMAN, "utf-8", "rot13", "unicode_escape"),  # no codec of the web
    ],
)
def test_the_real_encoding_wins(text, codec, meta, header):
    page = (f'<html><meta http-equiv="Content-Type" content="text/html; charset={meta}">' if meta else "<p>") + text
    decoded, _ = decode_page(page.encode(codec), header)
    assert decoded == page


def test_utf7_is_no_encoding_of_the_web():
    """UTF-7 could hide tags from every reader of the raw page."""
    assert decode_page(b"<p>+ADw-script+AD4-</p>", "utf-7") == ("<p>+ADw-script+AD4-</p>", "utf-8")


def test_zeros_do_not_make_utf16():
    text = "A page with some\0 zeros\0\0 in it. " * 20
    assert decode_page(text.encode(), "") == (text, "utf-8")
    assert decode_page(b"\0" * 2000 + b"x", "")[1] == "utf-8"


def test_a_few_bad_bytes_do_not_change_the_encoding():
    decoded, name = decode_page(RUSSIAN.encode() + b"\xff\xfe tail", "utf-8")
    assert name == "utf-8" and decoded.startswith(RUSSIAN) and decoded.endswith("tail")


@pytest.mark.parametrize("raw", [b"", b"\x00\xff\x80" * 50, b"\xff\xfe", b'<meta charset="' + b"x" * 9000])
def test_never_fails(raw):
    assert isinstance(decode_page(raw, "nonsense")[0], str)
