"""Characters that are no text: encoded data, encodings gone wrong, letters of several scripts in one word."""

import re

_BLOCKS = 12  # a run without spaces of a sixth of the text fills one of them
# Blobs have no spaces; base64 in mails and keys stands in lines of 64 or 76.
_UNBROKEN = re.compile(r"[!-~]{64,}+(?:\n[!-~]{1,80})*+")
_WEB_ADDRESS = re.compile(r"https?://|www\.")
_SLASHES = 30  # characters for each slash of a path, at most; base64 has one in 64
_ESCAPES = re.compile(
    r"(?:%[0-9A-Fa-f]{2}){2,}|(?:\\x[0-9A-Fa-f]{2}|\\u\{?[0-9A-Fa-f]{4,6}\}?|\\[0-7]{3}|\\[nrt\"'/\\]){2,}"
    r"|(?:&(?:#[0-9]{2,6}|#x[0-9A-Fa-f]{2,5}|[a-z]{2,6});){3,}|(?:=[0-9A-F]{2}){3,}"
)
_HEX_DUMP = re.compile(r"(?:\b(?:0x)?[0-9A-Fa-f]{2}\b[ ,\n]{1,2}){16,}|(?:\b[0-9A-Fa-f]{4}\b[ \n]){8,}")
_HEX_LETTER = re.compile("[A-Fa-f]")
_IN_HEX_DUMPS = b"0123456789abcdefx ,\r\n"
_SHORTEST = 100  # bytes of a block
_LONG_LINE = 300  # characters; of code that was made small for machines
_DISTINCT = 12  # characters in a blob; rulers of dashes and DNA have fewer

# UTF-8 read as Latin-1 or Windows-1252: a lead byte and continuation bytes, each as a character of its own.
_CONTINUATION = bytes(range(0x80, 0xC0)).decode("latin-1") + bytes(
    byte for byte in range(0x80, 0xA0) if byte not in (0x81, 0x8D, 0x8F, 0x90, 0x9D)
).decode("cp1252")
_MOJIBAKE = re.compile(
    rf"[\u00c2-\u00c5\u00ce\u00cf][{_CONTINUATION}]|\u00e2[\u0080-\u0082\u20ac][{_CONTINUATION}]"
    rf"|\u00f0[\u009f\u0178][{_CONTINUATION}]{{2}}|(?:[\u00d0\u00d1][{_CONTINUATION}]){{2,}}"
    rf"|(?:[\u00e0\u00e3-\u00e9][{_CONTINUATION}]{{2}}){{2,}}|\u00ef\u00bf\u00bd|\ufffd"
    # UTF-8 read as Windows-1251: every second letter is one of two.
    r"|(?:[\u0420\u0421][\u0080-\u00bf\u0400-\u040f\u0450-\u045f\u2013-\u2122\u0490\u0491]){3,}"
)
# How these begin in UTF-8.
_LATIN = re.compile(
    rb"\xc3(?:[\x82-\x85\x8e-\x91][\xc2-\xe2]|\xa2(?:\xe2\x82|\xc2\x80)|[\xa0\xa3-\xa9]\xc2[\x80-\x9f\xa1-\xbf]|"
    rb"\xaf\xc2\xbf|\xb0(?:\xc5|\xc2\x9f))"
)
_CYRILLIC = re.compile(rb"\xd0\xa0[\xc2-\xe2]")
_REPLACEMENT, _ER = "\ufffd".encode(), "\u0420".encode()
MOJIBAKE_SIGNS = (_REPLACEMENT, _ER)

_OTHER_ALPHABETS = (b"\xce", b"\xcf", b"\xd0", b"\xd1")  # how Greek and Cyrillic letters begin in UTF-8
_OTHER_LETTER = r"[\u0391-\u03a1\u03a3-\u03c9\u0400-\u04ff]"
# Three letters at least, so that units and differences ("\u03bcm", "k\u03a9", "\u0394t") stay.
_MIXED = re.compile(
    rf"(?:[A-Za-z]{_OTHER_LETTER}[A-Za-z]|{_OTHER_LETTER}[A-Za-z]{_OTHER_LETTER}|[A-Za-z]{{3}}{_OTHER_LETTER}"
    rf"|{_OTHER_LETTER}[A-Za-z]{{3}}|[A-Za-z]{_OTHER_LETTER}{{3}}|{_OTHER_LETTER}{{3}}[A-Za-z])\w*"
)


def encoded(text: str, data: bytes, signs: list[bytes]) -> float:
    """Share of the characters that stand in encoded data or escapes."""
    covered = 0
    size = len(text)
    block = max(len(data) // _BLOCKS, _SHORTEST)
    if any(data.find(b" ", i, i + block) < 0 for i in range(0, len(data) - block + 1, block)):
        for match in _UNBROKEN.finditer(text):
            blob = match[0]
            is_path = blob.count("/") * _SLASHES > len(blob)
            if len(set(blob)) >= _DISTINCT and not is_path and not _WEB_ADDRESS.match(blob):
                covered += len(blob)
    if b"{" in data and data.count(b"{") * 60 > size:
        lines = (line for line in text.split("\n") if len(line) >= _LONG_LINE)
        lines = (line for line in lines if line.count("\\") * 40 < len(line))  # formulas in TeX have braces too
        covered += sum(len(line) for line in lines if sum(map(line.count, "{}();=")) * 7 > len(line))
    if sum(data.count(sign) for sign in (b"%", b"\\", b"&", b"=") if sign in data) * 20 > size:
        covered += sum(match.end() - match.start() for match in _ESCAPES.finditer(text))
    middle = data[size // 2 : size // 2 + 400]
    if len(middle.translate(None, _IN_HEX_DUMPS)) * 3 < len(middle):
        dumps = (match[0] for match in _HEX_DUMP.finditer(text))
        covered += sum(map(len, filter(_HEX_LETTER.search, dumps)))  # without a letter: a table of numbers
    return min(covered / max(size, 1), 1.0)


def mojibake(text: str, data: bytes, signs: list[bytes]) -> float:
    """Share of the characters that come from a wrong decoding, or stand for what could not be decoded."""
    if text.isascii():
        return 0.0
    seen = _REPLACEMENT in signs or (b"\xc3" in data and _LATIN.search(data))
    if not seen and not (_ER in signs and _CYRILLIC.search(data)):
        return 0.0
    return sum(match.end() - match.start() for match in _MOJIBAKE.finditer(text)) / len(text)


def mixed_script(text: str, data: bytes, signs: list[bytes]) -> float:
    """Share of the words in which a Latin letter stands beside a Cyrillic or Greek one."""
    if text.isascii() or not any(lead in data for lead in _OTHER_ALPHABETS):
        return 0.0
    return sum(1 for _ in _MIXED.finditer(text)) / (data.count(b" ") + data.count(b"\n") + 1)
