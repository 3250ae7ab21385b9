"""Scores of a fastText model file, `.bin` or `.ftz`, by fastText's own reader; loaded once per process."""

import functools
from pathlib import Path

from ingot.errors import ConfigError, require
from ingot.storage import sha256_file

# fastText adds it to every probability before it takes the logarithm, and returns the sum.
_ADDED = 1e-5
_PREFIX = "__label__"


class Scorer:
    """path: of the model. sha256: of the file. labels: that it knows, in no order, without the prefix "__label__"."""

    def __init__(self, path: Path):
        self.path, self.sha256 = path, _sha256(path)
        self._model = _load(str(path), self.sha256)
        self.labels = tuple(self.scores("a"))

    def scores(self, text: str) -> dict[str, float]:
        """Label -> probability; empty if the model knows nothing of the text."""
        # One line to fastText; a lone surrogate, which UTF-8 cannot say, becomes '?'.
        line = text.replace("\n", " ").encode("utf-8", "replace").decode()
        labels, found = self._model.predict(line, k=-1)
        pairs = zip(labels, found, strict=True)
        return {label.removeprefix(_PREFIX): min(max(float(p) - _ADDED, 0.0), 1.0) for label, p in pairs}


def model_sha256(path: Path) -> str:
    """Of a model file. Raises ConfigError when there is none."""
    return _sha256(path)


def _sha256(path: Path) -> str:
    try:
        stat = path.stat()
        return _file_sha256(str(path), stat.st_size, stat.st_mtime_ns)
    except OSError as error:
        raise ConfigError(
            f"no classifier at {path} ({error.strerror})",
            rule="ingot comes without weights: a model is trained here, or fetched by you",
            fix="ingot data classifier train --positive FILES --negative FILES --licence TEXT --out model.bin",
        ) from None


@functools.cache
def _file_sha256(path: str, size: int, modified: int) -> str:
    return sha256_file(Path(path))


@functools.cache
def _load(path: str, sha256: str):
    try:
        return require("fasttext", "data").load_model(path)
    except (ValueError, RuntimeError, MemoryError) as error:
        raise ConfigError(
            f"{path} is no fastText model ({error})", rule="a supervised model, .bin or .ftz", fix="train or fetch it"
        ) from None
