"""Plug-ins that find identity numbers: some are built in, others come from any installed package.

A plug-in is an object with `placeholder` ("<IBAN>") and `find(text)`, which yields spans (start, end) of `text`. A
package offers one through the entry point group `ingot.pii`:

    [project.entry-points."ingot.pii"]
    de_tax_id = "my_package.ids:TaxId"      # the object, or a class or function that makes it

A recipe names plug-ins (`pii.ids = ["iban", "de_tax_id"]`); only installed packages are searched, so a recipe from
someone else cannot bring code along. The built-in plug-ins find numbers whose check digits or unusual form make false
matches rare.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Protocol, cast

from ingot.data.pii.numbers import is_luhn
from ingot.errors import ConfigError

GROUP = "ingot.pii"


class IdPlugin(Protocol):
    """A plug-in. placeholder: the text that replaces a hit. find: yields the spans (start, end) of hits in `text`."""

    @property
    def placeholder(self) -> str: ...

    def find(self, text: str) -> Iterable[tuple[int, int]]: ...


@dataclass(frozen=True)
class CheckedPattern:
    """A plug-in made of a pattern and a check. check: gets the letters and digits of a match, in upper case."""

    placeholder: str
    pattern: re.Pattern
    check: Callable[[str], bool]

    def find(self, text: str) -> Iterator[tuple[int, int]]:
        for match in self.pattern.finditer(text):
            if self.check("".join(filter(str.isalnum, match[0])).upper()):
                yield match.span()


# Country code and length of its IBANs, from SWIFT's registry (ISO 13616).
_IBAN_LENGTHS = """
    AD24 AE23 AL28 AT20 AZ28 BA20 BE16 BG22 BH22 BR29 BY28 CH21 CR22 CY28 CZ24 DE22 DK18 DO28 EE20 EG29 ES24 FI18 FO18
    FR27 GB22 GE22 GI23 GL18 GR27 GT28 HR21 HU28 IE22 IL23 IQ23 IS26 IT27 JO30 KW30 KZ20 LB28 LC32 LI21 LT20 LU20 LV21
    LY25 MC27 MD24 ME22 MK19 MR27 MT31 MU30 NL18 NO15 PK24 PL28 PS29 PT25 QA29 RO24 RS22 SA24 SC31 SE24 SI19 SK24 SM27
    ST25 SV28 TL23 TN24 TR26 UA29 VA22 VG24 XK20
"""
_IBAN_LENGTH = {item[:2]: int(item[2:]) for item in _IBAN_LENGTHS.split()}


def _iban_pattern() -> re.Pattern:
    # One form per country, so that a match ends where the number ends even if words in capitals follow.
    forms = "|".join(f"{code}[0-9]{{2}}(?:[ -]?[0-9A-Z]){{{length - 4}}}" for code, length in _IBAN_LENGTH.items())
    return re.compile(rf"(?<!\w)(?=[A-Z]{{2}}[0-9]{{2}})(?:{forms})(?!\w)")


def is_iban(text: str) -> bool:
    """Check an IBAN (ISO 13616) without separators: it has the length that its country uses, and its number leaves
    remainder 1 modulo 97 (ISO/IEC 7064)."""
    if _IBAN_LENGTH.get(text[:2]) != len(text) or not text.isascii():
        return False
    return int("".join(str(int(c, 36)) for c in text[4:] + text[:4])) % 97 == 1


def is_us_ssn(digits: str) -> bool:
    """Check a US Social Security number: its area, group and serial number are ones that are issued, and it is not a
    published example."""
    area, group, serial = digits[:3], digits[3:5], digits[5:]
    issued = area not in ("000", "666") and area < "900" and group != "00" and serial != "0000"
    return issued and digits not in ("078051120", "219099999", "123456789")


def is_cpf(digits: str) -> bool:
    """Check a Brazilian CPF number (Cadastro de Pessoas Fisicas) by its two check digits modulo 11."""
    for length in (9, 10):
        total = sum(int(d) * weight for d, weight in zip(digits, range(length + 1, 1, -1), strict=False))
        if int(digits[length]) != total * 10 % 11 % 10:
            return False
    return len(set(digits)) > 1


def is_dni(text: str) -> bool:
    """Check a Spanish DNI (eight digits) or NIE (X, Y or Z and seven digits) by its last letter, which encodes the
    number modulo 23."""
    number = text[:-1].translate(str.maketrans("XYZ", "012"))
    return "TRWAGMYFPDXBNJZSQVHLCKE"[int(number) % 23] == text[-1]


def is_codice_fiscale(text: str) -> bool:
    """Check an Italian codice fiscale by its last letter, which encodes the sum of a value per character; odd and even
    positions have different values."""
    odd = dict(zip("0123456789ABCDEFGHIJ", (1, 0, 5, 7, 9, 13, 15, 17, 19, 21) * 2, strict=True))
    odd |= dict(zip("KLMNOPQRSTUVWXYZ", (2, 4, 18, 20, 11, 3, 6, 8, 12, 14, 16, 10, 22, 25, 24, 23), strict=True))
    total = sum(odd[c] for c in text[:15:2]) + sum(int(c) if c.isdigit() else ord(c) - 65 for c in text[1:15:2])
    return chr(65 + total % 26) == text[15]


def is_aadhaar(digits: str) -> bool:
    """Check an Indian Aadhaar number by Verhoeff's check digit, computed in the dihedral group of ten elements."""
    check = 0
    for place, digit in enumerate(reversed(digits)):
        check = _dihedral(check, _permuted(int(digit), place))
    return check == 0


def _dihedral(one: int, other: int) -> int:
    if one < 5:
        return (one + other) % 5 + 5 * (other >= 5)
    return (one - other) % 5 + 5 * (other < 5)


def _permuted(digit: int, times: int) -> int:
    for _ in range(times % 8):
        digit = (1, 5, 7, 6, 2, 8, 3, 0, 9, 4)[digit]
    return digit


def _is_nino(text: str) -> bool:
    return text[:2] not in ("BG", "GB", "KN", "NK", "NT", "TN", "ZZ")


def _is_sin(digits: str) -> bool:
    return digits[0] not in "08" and is_luhn(digits)


def _plugin(placeholder: str, pattern: str, check: Callable[[str], bool]) -> CheckedPattern:
    return CheckedPattern(placeholder, re.compile(rf"(?<![\w.\-/]){pattern}(?!-?\w|\.[0-9])"), check)


BUILT_IN: dict[str, IdPlugin] = {
    "iban": CheckedPattern("<IBAN>", _iban_pattern(), is_iban),
    "us_ssn": _plugin("<US_SSN>", r"[0-9]{3}([- ])[0-9]{2}\1[0-9]{4}", is_us_ssn),
    "uk_nino": _plugin("<UK_NINO>", r"[A-CEGHJ-PR-TW-Z][A-CEGHJ-NPR-TW-Z] ?(?:[0-9]{2} ?){3}[A-D]", _is_nino),
    "ca_sin": _plugin("<CA_SIN>", r"[0-9]{3}([- ])[0-9]{3}\1[0-9]{3}", _is_sin),
    "br_cpf": _plugin("<BR_CPF>", r"(?:[0-9]{3}\.){2}[0-9]{3}-[0-9]{2}", is_cpf),
    "es_dni": _plugin("<ES_DNI>", r"(?:[0-9]{8}|[XYZ]-?[0-9]{7})-?[A-HJ-NP-TV-Z]", is_dni),
    "it_codice_fiscale": _plugin(
        "<IT_CODICE_FISCALE>", r"[A-Z]{6}[0-9]{2}[A-EHLMPRST][0-9]{2}[A-Z][0-9]{3}[A-Z]", is_codice_fiscale
    ),
    "in_aadhaar": _plugin("<IN_AADHAAR>", r"[2-9][0-9]{3}([ -])[0-9]{4}\1[0-9]{4}(?!\1[0-9])", is_aadhaar),
}


def _entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def problems_of(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield (field, message) for each of `names` that is not installed."""
    installed = sorted({*BUILT_IN, *_entry_points()}) if names else []
    for name in names:
        if name not in installed:
            yield "ids", f"{name!r} is not installed; installed are {', '.join(installed)}"


def load_ids(names: Iterable[str]) -> list[IdPlugin]:
    """Return the plug-ins called `names`, in that order. Raises ConfigError if a plug-in is missing or invalid."""
    for _, message in problems_of(names):
        raise ConfigError(
            "E-PII-PLUGIN-MISSING",
            f"pii.ids: {message}",
            rule=f"pii.ids names built-in plug-ins, or plug-ins of installed packages (entry point group {GROUP})",
            fix="install the package that offers the plug-in, or remove the name from pii.ids",
            names=list(names),
        )
    return [BUILT_IN[name] if name in BUILT_IN else _load(_entry_points()[name]) for name in names]


def _load(point: EntryPoint) -> IdPlugin:
    offered = point.load()
    plugin = offered() if callable(offered) else offered
    if not isinstance(getattr(plugin, "placeholder", None), str) or not callable(getattr(plugin, "find", None)):
        raise ConfigError(
            "E-PII-PLUGIN-INVALID",
            f"pii.ids: {point.name!r} ({point.value}) is not a plug-in",
            rule="a plug-in has an attribute `placeholder` (a string) and a method `find(text)`",
            fix="correct the entry point in its package, or remove the name from pii.ids",
            name=point.name,
            value=point.value,
        )
    return cast(IdPlugin, plugin)
