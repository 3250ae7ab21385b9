"""Tables of the word rules: classes of characters, and chunks with special splits.

The tables follow spaCy 3.8 for `blank("en")` (prefixes, suffixes, infixes, exceptions) and datatrove 0.10
(punctuation). They are written here as ranges and as the grammar of contractions, not as lists of results.

A class is a bit. `FLAGS[character]` has the bits of a character. The Python rules and the compiled rules (which request
pages of 256 characters) both read this table, so they cannot disagree.
"""

import unicodedata
from array import array

# Results of Python's `str` methods for a character (BREAK: of `splitlines`), which the compiled loops have to match.
SPACE, BREAK, ALPHABETIC, ALPHANUMERIC, DECIMAL = (1 << bit for bit in range(5))
# datatrove: a word that consists only of PUNCTUATION does not count; a line ends a sentence if it ends in TERMINAL.
PUNCTUATION, TERMINAL = 1 << 5, 1 << 6
# spaCy: characters cut off at the front, characters cut off at the end, characters after which a full stop is cut off.
PREFIX, SUFFIX, BEFORE_STOP = 1 << 7, 1 << 8, 1 << 9
# spaCy: characters that may be next to an infix. Letters of scripts without case are both LOWER and UPPER.
LETTER, LOWER, UPPER, QUOTE, ICON = (1 << bit for bit in range(10, 15))
# spaCy's sentencizer: Unicode category P, and the marks that end a sentence.
CATEGORY_P, SENTENCE = 1 << 15, 1 << 16
# Characters that begin the entry of a list.
BULLET = 1 << 17

LINE_BREAKS = "\n\v\f\r\x1c\x1d\x1e\x85\u2028\u2029"
QUOTES = "'\"”“`‘´’‚,„»«「」『』（）〔〕【】《》〈〉\u2329\u232a⟦⟧"
_MARKS = "…,:;!?¿؟¡()[]{}<>_#*&。？！，、；：～·।،۔؛٪"
_CURRENCY = "$£€¥฿₽﷼" + "".join(map(chr, range(0x20A0, 0x20C0)))
_DASHES = "–—"
_BULLETS = "-*•‣⁃◦∙·▪▫■□●○◆◇▶►➢➤✓✔"

# Hexadecimal ranges, first-last: letters with case, letters without case, and category So of Unicode 11 (dingbats,
# emoji, box drawing).
_CASED = (
    "41-5A 61-7A C0-D6 D8-F6 F8-1BF 1C4-2AF 386 388-38A 38C 38E-38F 391-3A9 3AC-3AF 3B1-3C9 3CC-3CE 400-401 403-40A "
    "40C-40D 410-451 453-45A 45C-45D 490-491 496-497 4A2-4A3 4AE-4AF 4BA-4BB 4D8-4D9 4E8-4E9 1D00-1D25 1D6B-1D77 "
    "1D79-1D9A 1E00-1EFF 2C60-2C7B 2C7E-2C7F A722-A76F A771-A787 A78B-A78E A790-A7B9 A7FA AB30-AB5A AB60-AB64 "
    "FF21-FF3A FF41-FF5A"
)
_UNCASED = (
    "591-5F4 620-64A 66E-6D5 6E5-6FF 750-77F 8A0-8BD 900-9FF B80-CFF D80-DFF 1100-137F 2E80-2FDF 2FF0-30FF 31C0-31EF "
    "3200-4DBF 4E00-9FFF AC00-D7AF F900-FAFF FB1D-FBB1 FBD3-FD3D FD50-FDC7 FDF0-FDFB FE30-FE4F FE70-FEFC 1EE00-1EEBB "
    "1F200-1F2FF 20000-2A6DF 2A700-2EBEF 2F800-2FA1F"
)
_ICONS = (
    "A6 A9 AE B0 482 58D-58E 60E-60F 6DE 6E9 6FD-6FE 7F6 9FA B70 BF3-BF8 BFA C7F D4F D79 F01-F03 F13 F15-F17 F1A-F1F "
    "F34 F36 F38 FBE-FC5 FC7-FCC FCE-FCF FD5-FD8 109E-109F 1390-1399 1940 19DE-19FF 1B61-1B6A 1B74-1B7C 2100-2101 "
    "2103-2106 2108-2109 2114 2116-2117 211E-2123 2125 2127 2129 212E 213A-213B 214A 214C-214D 214F 218A-218B "
    "2195-2199 219C-219F 21A1-21A2 21A4-21A5 21A7-21AD 21AF-21CD 21D0-21D1 21D3 21D5-21F3 2300-2307 230C-231F "
    "2322-2328 232B-237B 237D-239A 23B4-23DB 23E2-2426 2440-244A 249C-24E9 2500-25B6 25B8-25C0 25C2-25F7 2600-266E "
    "2670-2767 2794-27BF 2800-28FF 2B00-2B2F 2B45-2B46 2B4D-2B73 2B76-2B95 2B98-2BC8 2BCA-2BFE 2CE5-2CEA 2E80-2E99 "
    "2E9B-2EF3 2F00-2FD5 2FF0-2FFB 3004 3012-3013 3020 3036-3037 303E-303F 3190-3191 3196-319F 31C0-31E3 3200-321E "
    "322A-3247 3250 3260-327F 328A-32B0 32C0-32FE 3300-33FF 4DC0-4DFF A490-A4C6 A828-A82B A836-A837 A839 AA77-AA79 "
    "FDFD FFE4 FFE8 FFED-FFEE FFFC-FFFD 10137-1013F 10179-10189 1018C-1018E 10190-1019B 101A0 101D0-101FC 10877-10878 "
    "10AC8 1173F 16B3C-16B3F 16B45 1BC9C 1D000-1D0F5 1D100-1D126 1D129-1D164 1D16A-1D16C 1D183-1D184 1D18C-1D1A9 "
    "1D1AE-1D1E8 1D200-1D241 1D245 1D300-1D356 1D800-1D9FF 1DA37-1DA3A 1DA6D-1DA74 1DA76-1DA83 1DA85-1DA86 1ECAC "
    "1F000-1F02B 1F030-1F093 1F0A0-1F0AE 1F0B1-1F0BF 1F0C1-1F0CF 1F0D1-1F0F5 1F110-1F16B 1F170-1F1AC 1F1E6-1F202 "
    "1F210-1F23B 1F240-1F248 1F250-1F251 1F260-1F265 1F300-1F3FA 1F400-1F6D4 1F6E0-1F6EC 1F6F0-1F6F9 1F700-1F773 "
    "1F780-1F7D8 1F800-1F80B 1F810-1F847 1F850-1F859 1F860-1F887 1F890-1F8AD 1F900-1F90B 1F910-1F93E 1F940-1F970 "
    "1F973-1F976 1F97A 1F97C-1F9A2 1F9B0-1F9B9 1F9C0-1F9C2 1F9D0-1F9FF 1FA60-1FA6D"
)
# Unicode's Sentence_Terminal: the marks that spaCy's sentencizer knows, and those that datatrove adds.
_SENTENCE = (
    "21 2E 3F 589 61F 6D4 700-702 7F9 964-965 104A-104B 1362 1367-1368 166E 1735-1736 1803 1809 1944-1945 1AA8-1AAB "
    "1B5A-1B5B 1B5E-1B5F 1C3B-1C3C 1C7E-1C7F 203C-203D 2047-2049 2E2E 2E3C 3002 A4FF A60E-A60F A6F3 A6F7 A876-A877 "
    "A8CE-A8CF A92F A9C8-A9C9 AA5D-AA5F AAF0-AAF1 ABEB FE52 FE56-FE57 FF01 FF0E FF1F FF61 10A56-10A57 11047-11048 "
    "110BE-110C1 11141-11143 111C5-111C6 111CD 111DE-111DF 11238-11239 1123B-1123C 112A9 1144B-1144C 115C2-115C3 "
    "115C9-115D7 11641-11642 1173C-1173E 11A42-11A43 11A9B-11A9C 11C41-11C42 16A6E-16A6F 16AF5 16B37-16B38 16B44 "
    "1BC9F 1DA88"
)
_TERMINAL = (
    _SENTENCE + " 61D-61E 837 839 83D-83E 17D4-17D6 17D9-17DA 1B7D-1B7E 2E53-2E54 10F55-10F59 10F86-10F89 11944 11946 "
    "11EF7-11EF8 11F43-11F44 16E98"
)
# datatrove's list of punctuation, including the two full-width digits in it.
_PUNCTUATION = "\"#$%&'()*+,-/:;<=>@[\\]^_`{|}~«´»–—’“”„…∶━►、〈〉《》「」【】％（），１：；～"


def _ranges(text: str) -> list[tuple[int, int]]:
    pairs = (piece.partition("-") for piece in text.split())
    return [(int(first, 16), int(last or first, 16)) for first, _, last in pairs]


def _of(characters: str) -> list[tuple[int, int]]:
    return [(ord(character), ord(character)) for character in characters]


_CLASSES = (
    (BREAK, _of(LINE_BREAKS)),
    (PUNCTUATION, [(0, 8), (11, 31), (127, 159), *_of(_PUNCTUATION), *_ranges(_TERMINAL)]),
    (TERMINAL, _ranges(_TERMINAL)),
    (PREFIX, [*_of("§%=" + _DASHES + _MARKS + QUOTES + _CURRENCY), *_ranges(_ICONS)]),
    (SUFFIX, [*_of(_DASHES + _MARKS + QUOTES), *_ranges(_ICONS)]),
    (BEFORE_STOP, [*_of("%²-+|()?:" + _MARKS + QUOTES), *_ranges("30-39"), *_ranges(_UNCASED)]),
    (LETTER, _ranges(_CASED + " " + _UNCASED)),
    (LOWER, _ranges("294 " + _UNCASED)),
    (UPPER, _ranges("3A2 " + _UNCASED)),
    (QUOTE, _of(QUOTES)),
    (ICON, _ranges(_ICONS)),
    (SENTENCE, _ranges(_SENTENCE)),
    (BULLET, _of(_BULLETS)),
)


def page(number: int) -> array:
    """Return the classes of the characters 256 * number .. 256 * number + 255, as 32-bit integers."""
    first = number * 256
    flags = array("I", bytes(256 * 4))
    for bit, ranges in _CLASSES:
        for start, end in ranges:
            if end < first or start > first + 255:
                continue
            for code in range(max(start, first), min(end, first + 255) + 1):
                flags[code - first] |= bit
    for i in range(256):
        character = chr(first + i)
        for bit, is_one in (
            (SPACE, character.isspace()),
            (ALPHABETIC, character.isalpha()),
            (ALPHANUMERIC, character.isalnum()),
            (DECIMAL, character.isdecimal()),
            (CATEGORY_P, unicodedata.category(character).startswith("P")),
        ):
            if is_one:
                flags[i] |= bit
        if flags[i] & LETTER and character.islower():
            flags[i] |= LOWER
        if flags[i] & LETTER and character.isupper():
            flags[i] |= UPPER
        if flags[i] & LOWER:
            flags[i] |= BEFORE_STOP
    return flags


class _Flags(dict[str, int]):
    """A table from a character to its classes. A page of 256 characters is made at the first look-up in it."""

    def __missing__(self, character: str) -> int:
        number = ord(character) >> 8
        self.update(zip(map(chr, range(number * 256, number * 256 + 256)), page(number), strict=True))
        return self[character]


FLAGS = _Flags()

# Gopher's list: a text without two of these words is hardly English prose.
STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")

# Units that are cut off after a digit. "тбكم" is two units: spaCy's list lacks the space between them.
_UNITS = (
    "km km² km³ m m² m³ dm dm² dm³ cm cm² cm³ mm mm² mm³ ha µm nm yd in ft kg g mg µg t lb oz m/s km/h kmh mph hPa Pa "
    "mbar mb MB kb KB gb GB tb TB T G M K % км км² км³ м м² м³ дм дм² дм³ см см² см³ мм мм² мм³ нм кг г мг м/с км/ч "
    "кПа Па мбар Кб КБ кб Мб МБ мб Гб ГБ гб Тб ТБ тбكم كم² كم³ م م² م³ سم سم² سم³ مم مم² مم³ كم غرام جرام جم كغ ملغ "
    "كوب اكواب US$ C$ A$"
)
UNITS = frozenset((*_UNITS.split(), *_CURRENCY))
LONGEST_UNIT = max(map(len, UNITS))

# (words, endings): each word, with or without a capital, takes each ending, with or without its apostrophes. Words are
# cut at the spaces.
_CONTRACTIONS = (
    ("i", "'m;'m a"),
    ("i you he she it we they", "'ll;'ll 've;'d;'d 've"),
    ("i you we they", "'ve"),
    ("you we they", "'re"),
    ("he she it", "'s"),
    ("who what when where why how there that this", "'s"),
    ("who what when where why how there that this these those", "'ll;'ll 've;'d;'d 've"),
    ("who what when where why how there these those", "'re;'ve"),
    ("ca could do does did had may might must need ought sha should wo would", "n't;n't 've"),
    ("could might must should would", "'ve"),
    ("ai are is was were have has dare", "n't"),
    ("not", "'ve"),
)
_ORDINARY = "ill its hell shell shed were well whore"  # ordinary words that look like contractions without apostrophe
_CUT = "can-not gon-na got-ta let-'s c'm-on how-'d-'y"  # cut at the hyphens; with or without a capital
_WHOLE_CAPITAL = "doin' goin' nothin' nuthin' ol' somethin' lovin' havin'"  # with or without a capital and the "'"
_WHOLE = (
    "em 'em ll 'll nuff 'nuff 'S 's \u2018S \u2018s and/or w/o 're 'Cause 'cause 'cos 'Cos 'coz 'Coz 'cuz 'Cuz 'bout "
    "ma'am Ma'am o'clock O'clock 'd a.m. p.m. e.g. E.g. E.G. i.e. I.e. I.E. v.s. vs. co. Co. D.C. Ph.D. N.C. N.D. N.H. "
    "N.J. N.M. N.Y. S.C. C++ '' \\\") <space> \\t \\n \u2014 ' ä. ö. ü."
)
_ABBREVIATIONS = (
    "Mt Ak Ala Apr Ariz Ark Aug Calif Colo Conn Dec Del Feb Fla Ga Ia Id Ill Ind Jan Jul Jun Kan Kans Ky La Mar Mass "
    "Mich Minn Miss Neb Nebr Nev Nov Oct Okla Ore Pa Sep Sept Tenn Va Wash Wis Adm Bros Corp Dr Gen Gov Inc Jr Ltd Md "
    "Messrs Mo Mont Mr Mrs Ms Prof Rep Rev Sen St"
)
_EMOTICONS = (
    ":) :-) :)) :-)) :))) :-))) (: (-: =) (= :] :-] [: [-: [= =] :o) (o: :} :-} 8) 8-) (-8 ;) ;-) (; (-; :( :-( :(( "
    ":-(( :((( :-((( ): )-: =( >:( :') :'-) :'( :'-( :/ :-/ =/ =| :| :-| ]= =[ :1 :P :-P :p :-p :O :-O :o :-o :0 :-0 "
    ":() >:o :* :-* :3 :-3 =3 :> :-> :X :-X :x :-x :D :-D ;D ;-D =D xD XD xDD XDD 8D 8-D ^_^ ^__^ ^___^ >.< >.> <.< "
    "._. ;_; -_- -__- v.v V.V v_v V_V o_o o_O O_o O_O 0_o o_0 0_0 o.O O.o O.O o.o 0.0 o.0 0.o @_@ <3 <33 <333 </3 "
    "(^_^) (-_-) (._.) (>_<) (*_*) (¬_¬) ಠ_ಠ ಠ︵ಠ (ಠ_ಠ) ¯\\(ツ)/¯ (╯°□°）╯︵┻━┻ ><(((*>"
)


def special_cases() -> dict[str, tuple[str, ...]]:
    """Return the exceptions to the splitting rules: chunk -> the words into which it is split.

    A chunk is also looked up after some of its prefixes and suffixes were cut off.
    """
    cases: dict[str, tuple[str, ...]] = {}
    for words, endings in _CONTRACTIONS:
        for word in words.split():
            for start in (word, word.title()):
                for ending in endings.split(";"):
                    for end in (ending, ending.replace("'", "")):
                        cases[start + end.replace(" ", "")] = (start, *end.split())
    for word in _ORDINARY.split():
        cases.pop(word, None)
        cases.pop(word.title(), None)
    for hour in range(1, 13):
        cases |= {f"{hour}{half}": (str(hour), half) for half in ("a.m.", "am", "p.m.", "pm")}
    cases |= {"y'all": ("y'", "all"), "yall": ("y", "all")}
    for cut in _CUT.split():
        for parts in (cut.split("-"), (cut[0].upper() + cut[1:]).split("-")):
            cases["".join(parts)] = tuple(parts)
    for word in _WHOLE_CAPITAL.split():
        cases |= {form: (form,) for word in (word, word.title()) for form in (word, word[:-1])}
    whole = [*_WHOLE.split(), *_EMOTICONS.split(), *(f"{word}." for word in _ABBREVIATIONS.split())]
    whole += [f"{letter}." for letter in "abcdefghijklmnopqrstuvwxyz"]
    cases |= {word: (word,) for word in whole}
    cases |= {f"°{scale}.": ("°", scale, ".") for scale in "cfkCFK"}
    curly = str.maketrans("'", "’")
    return cases | {case.translate(curly): tuple(p.translate(curly) for p in parts) for case, parts in cases.items()}
