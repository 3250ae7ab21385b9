"""The origin of a part: the module that registers it, and the identity of that module's code."""

import hashlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

_HASH_DIGITS = 16


@dataclass(frozen=True)
class Origin:
    """The place of a call of ingot. module: the name of the Python module. file, line: ("", 0) if unknown.

    code: the identity of the module's code (`code_of`) if the module is being imported; else "".
    """

    module: str
    file: str
    line: int
    code: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def calling_origin() -> Origin:
    """Return the module whose import called ingot; outside of an import, the module whose function called it.

    A module that registers its parts through a function of another one is their origin.
    """
    frames = [frame for frame in _frames() if not _is_ingot(frame)]
    for frame in frames:
        if _is_import(frame):
            module, file = frame.f_globals["__name__"], Path(frame.f_code.co_filename)
            return Origin(module, str(file), frame.f_lineno, code_of(module, file) if file.is_file() else "")
    if not frames:
        return Origin("", "", 0)
    caller = frames[0]
    return Origin(caller.f_globals.get("__name__", ""), caller.f_code.co_filename, caller.f_lineno)


def _frames() -> Iterator[FrameType]:
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_ingot(frame: FrameType) -> bool:
    return f"{frame.f_globals.get('__name__', '')}.".startswith("ingot.")


def _is_import(frame: FrameType) -> bool:
    """Return whether a frame is the top level of a module that Python's import system executes."""
    caller = frame.f_back
    by_import = caller is not None and caller.f_code.co_filename.startswith("<frozen importlib")
    return by_import and frame.f_code.co_name == "<module>"


def code_of(module: str, file: Path, version: str = "") -> str:
    """Return the identity of a plug-in's code: the version of its distribution, if known, and a hash of its files.

    The files are the module's own or, if it is in a package, all .py files of the folder that contains it.
    """
    in_package = "." in module or file.name == "__init__.py"
    files = sorted(file.parent.rglob("*.py")) if in_package else [file]
    digest = hashlib.sha256()
    for path in files:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(file.parent).as_posix()} {len(content)}\n".encode() + content)
    return f"{version} {digest.hexdigest()[:_HASH_DIGITS]}".strip()
