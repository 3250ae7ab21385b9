"""The encoder: text to token ids with any tokenizer.json, using tiktoken if that is exact, else `tokenizers`.

Plain text never becomes the end-of-text token, so that no crawled page can mark the end of its document. If a text
contains the name of a special token, the name is encoded as ordinary characters.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ingot.errors import ConfigError, DataError, UsageError, require
from ingot.tokenizer.byte_bpe import NotExact, tiktoken_form, well_formed

# Names of the end-of-text token in published tokenizers, the least ambiguous first.
_EOT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "<|eot|>", "<eos>", "</s>", "[EOS]", "<|end▁of▁sentence|>", "[SEP]")

_FORMAT = "a tokenizer is a tokenizer.json in the format of Hugging Face tokenizers"

# Texts that implementations often encode differently: kinds and runs of whitespace, contractions, scripts, digits of
# several scripts, combining marks, emoji joined by ZWJ, control characters, and words longer than any token.
_DIFFICULT = (
    "",
    " ",
    "Hello world! It's we'll THEY'VE I'M don't 'ſ 'S'd o'clock",
    "  two   three    four\n\n\nlines \n \r\n\t\ttabs \t mixed  ",
    "\u00a0nbsp\u2003em\u3000wide\u2028line\u0085next \x0b\x0c end\r\r",
    "1 12 123 1234 1234567890 3.14159 1,000,000 ٣٤٥ ४२ Ⅷ ½ x²",
    "def f(x):\n    return {'a': [x**2 for _ in range(10)]}  # ok?\n\n\n        deep()\n",
    "naïve café cafe\u0301 Ångström ﬁne İstanbul ǅ",
    "日本語のテキスト。中文字符测试，한국어 문장입니다. العربية עברית हिन्दी ไทย",
    "😀👩‍👩‍👧‍👦🏳️‍🌈🇩🇪 e\u0301\u0302\u0303 \u200b\u200d\ufeff\ufffd\ufffe 𝕬𝖇𝖈 𐍈",
    "\x00\x01\x1f\x7f\x80\x9f",
    "a" * 300 + " " * 300 + "x" + "\n" * 100 + "!" * 100 + "ab" * 200,
    "https://example.org/a_b-c?q=1&r=%20#x <b>bold</b> &amp; ``quotes'' “curly” — dash…",
)


@dataclass
class Encoder:
    """A loaded tokenizer.json. It is pickled as its path; worker processes reopen it without comparing engines again.

    vocab_size: largest id + 1. engine: "tiktoken" or "tokenizers". notice: the reason why tiktoken is not used, or "".
    sha256: hash of the file. eot: the end-of-text token. special: texts of the added tokens.
    """

    path: Path
    sha256: str
    vocab_size: int
    eot: str
    eot_id: int
    special: tuple[str, ...]
    notice: str
    _tokenizer: Any = field(repr=False)  # tokenizers.Tokenizer
    _tiktoken: Any = field(repr=False)  # tiktoken.Encoding, or None
    _ids: np.ndarray = field(repr=False)  # tiktoken's rank -> id

    @property
    def engine(self) -> str:
        return "tiktoken" if self._tiktoken else "tokenizers"

    def encode(self, text: str) -> np.ndarray:
        """Return the token ids of `text`, uint32, without an end-of-text token."""
        text = well_formed(text)
        if self._tiktoken:
            try:
                return self._ids[self._tiktoken.encode_to_numpy(text, disallowed_special=())]
            except ValueError:
                pass  # tiktoken's regex engine fails on about a million blanks in a row; `tokenizers` does not
        return self._plain(text, self._tokenizer.encode(text, add_special_tokens=False))

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the token ids of each text, as `encode` does. tiktoken uses one core, `tokenizers` all cores."""
        if self._tiktoken:
            return [self.encode(text) for text in texts]
        texts = [well_formed(text) for text in texts]
        encoded = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return [self._plain(text, e) for text, e in zip(texts, encoded, strict=True)]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of `ids`. Bytes that are not valid UTF-8 become U+FFFD."""
        return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False)

    def _plain(self, text: str, encoded) -> np.ndarray:
        """Return the ids of `encoded`, the result of `tokenizers` for `text`, without end-of-text tokens.

        If the model made that token from characters (as Unigram can), `text` is cut between these characters, and both
        halves are encoded separately.
        """
        ids = np.array(encoded.ids, dtype=np.uint32)
        hits = np.flatnonzero(ids == self.eot_id)
        if not len(hits):
            return ids
        begin, end = encoded.offsets[hits[0]]
        cut = (begin + end) // 2
        if not 0 < cut < len(text):
            raise DataError(
                "E-TOKENIZER-EOT-IN-TEXT",
                f"{self.path}: the text {text[begin:end]!r} is encoded as the end-of-text token {self.eot!r}",
                rule="text never becomes the end-of-text token; only ingot writes it, between documents",
                fix="choose another end-of-text token with --eot",
                path=str(self.path),
                eot=self.eot,
            )
        halves = (text[:cut], text[cut:])
        return np.concatenate([self._plain(h, self._tokenizer.encode(h, add_special_tokens=False)) for h in halves])

    def __reduce__(self):
        return reopen, (self.path, self.sha256, self.eot, self.notice)


def load_encoder(path: Path, sample: Sequence[str] = (), *, eot: str | int = "") -> Encoder:
    """Open a tokenizer.json of any kind.

    tiktoken is used if the conversion is exact by the rules of byte_bpe.py, and gives the same ids on `sample` and on a
    built-in sample of difficult text. eot: the end-of-text token or its id; if not given, the usual names are tried.
    Raises UsageError if the file cannot be read, ConfigError if it is not a tokenizer or has no end-of-text token.
    """
    encoder = _open(path, eot, use_tiktoken=True)
    if encoder._tiktoken and (text := _first_difference(encoder, sample)) is not None:
        encoder._tiktoken = None
        encoder.notice = f"tiktoken splits {text[:40]!r} differently"
    return encoder


def reopen(path: Path, sha256: str, eot: str, notice: str) -> Encoder:
    """Open the encoder that `load_encoder` returned, in another process. sha256, eot, notice: fields of that encoder;
    an empty `notice` means tiktoken.

    Raises DataError if the file has changed since then.
    """
    encoder = _open(path, eot, use_tiktoken=not notice)
    if encoder.sha256 != sha256:
        raise DataError(
            "E-TOKENIZER-CHANGED",
            f"{path} changed while it was in use",
            rule="all workers of a command use the same tokenizer.json",
            fix="run the command again",
            path=str(path),
        )
    encoder.notice = notice
    return encoder


def _open(path: Path, eot: str | int, *, use_tiktoken: bool) -> Encoder:
    tokenizers, tiktoken = require("tokenizers", "data"), require("tiktoken", "data")
    spec, sha256 = _read_spec(path)
    tokenizer = _parse(tokenizers, path, spec)
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    eot = _find_eot(vocab, eot, path)
    ordinary = [t for t in spec.get("added_tokens") or () if t["content"] == eot and not t.get("special")]
    if ordinary:  # `tokenizers` distinguishes only special tokens from text
        ordinary[0]["special"] = True
        tokenizer = _parse(tokenizers, path, spec)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # encode names of special tokens in a text as ordinary text
    encoding, ids, notice = None, np.empty(0, np.uint32), ""
    try:
        pattern, ranks, ids = tiktoken_form(spec)
        if vocab[eot] in ids:
            raise NotExact(f"merging plain text can give its end-of-text token {eot!r}")
        if use_tiktoken:
            encoding = tiktoken.Encoding(
                sha256, pat_str=pattern, mergeable_ranks=ranks, special_tokens={eot: len(ranks)}
            )
    except NotExact as reason:
        notice = str(reason)
    except (ValueError, KeyError) as error:  # tiktoken's regex engine does not support the pattern
        notice = f"tiktoken cannot read it ({error})"
    return Encoder(
        path=path,
        sha256=sha256,
        vocab_size=max(vocab.values()) + 1,
        eot=eot,
        eot_id=vocab[eot],
        special=tuple(token["content"] for token in spec.get("added_tokens") or ()),
        notice=notice,
        _tokenizer=tokenizer,
        _tiktoken=encoding,
        _ids=ids,
    )


def _read_spec(path: Path) -> tuple[dict[str, Any], str]:
    try:
        data = path.read_bytes()
        spec = json.loads(data)
    except OSError as error:
        raise UsageError(
            "E-TOKENIZER-UNREADABLE",
            f"cannot read a tokenizer from {path} ({error.strerror})",
            rule=_FORMAT,
            fix="check the path, or train a tokenizer: ingot tokenizer train CORPUS --out tokenizer.json",
            path=str(path),
        ) from None
    except ValueError as error:
        raise _bad_format(path, f"is not JSON ({error})") from None
    if not isinstance(spec, dict) or not isinstance(spec.get("model"), dict):
        raise _bad_format(path, "has no 'model' section")
    return spec, hashlib.sha256(data).hexdigest()


def _parse(tokenizers, path: Path, spec: dict[str, Any]):
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(spec))
    except Exception as error:  # the library raises plain Exception
        found = f"is not a tokenizer that 'tokenizers' {tokenizers.__version__} can read ({error})"
        raise _bad_format(path, found) from None


def _bad_format(path: Path, found: str) -> ConfigError:
    return ConfigError(
        "E-TOKENIZER-FORMAT",
        f"{path} {found}",
        rule=_FORMAT,
        fix="give a tokenizer.json, or train a tokenizer: ingot tokenizer train CORPUS --out tokenizer.json",
        path=str(path),
    )


def _find_eot(vocab: dict[str, int], eot: str | int, path: Path) -> str:
    if isinstance(eot, int):
        found = [token for token, number in vocab.items() if number == eot]
    else:
        found = [name for name in ([eot] if eot else _EOT_NAMES) if name in vocab]
    if found:
        return found[0]
    candidates = sorted(token for token in vocab if token[:1] in "<[" and token[-1:] in ">]" and len(token) > 2)
    raise ConfigError(
        "E-TOKENIZER-EOT",
        f"{path} has no end-of-text token "
        + (repr(eot) if eot != "" else f"with a usual name ({', '.join(_EOT_NAMES[:4])}, ..)"),
        rule="every document ends with one token that no text can contain",
        fix="give the token with --eot TOKEN" + (f"; candidates: {', '.join(candidates[:8])}" if candidates else ""),
        path=str(path),
        eot=eot,
        candidates=candidates[:8],
    )


def _first_difference(encoder: Encoder, sample: Sequence[str]) -> str | None:
    """Return the first text, of `sample` and the built-in texts, that tiktoken and `tokenizers` encode differently;
    None if there is none.
    """
    # Characters from all ranges of Unicode, after a space and between letters, to compare \p{L}, \p{N} and \s.
    corners = "".join(f"{chr(c)}a{chr(c)}1 {chr(c)}" for c in range(0xA0, 0x30000, 211) if not 0xD800 <= c < 0xE000)
    written_out = [f"a{name} {name}b" for name in encoder.special]
    for text in (*_DIFFICULT, corners, *written_out, *map(well_formed, sample)):
        fast = encoder._ids[encoder._tiktoken.encode_to_numpy(text, disallowed_special=())]
        if fast.tolist() != encoder._tokenizer.encode(text, add_special_tokens=False).ids:
            return text
    return None
