"""Import of the plug-ins that a run file or data recipe names, and the identity of their code.

A plug-in is a Python module that registers parts. It is looked for in the folder beside the file that names it, and
among the installed packages; a distribution may also give it a short name, as an entry point of the group
"ingot.plugins". Nothing is imported that the file does not name, and commands that only read a run (status, report,
ckpt, explain, data trace) import nothing at all.
"""

import contextlib
import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from ingot.errors import ConfigError, IngotError
from ingot.plugins.registry import Registry

GROUP = "ingot.plugins"
_HASH_DIGITS = 16


@dataclass(frozen=True)
class Plugin:
    """A plug-in that was imported. name: as the file names it. module: the Python module. folder: where modules were
    looked for, absolute. code: see `code_of`."""

    name: str
    module: str
    folder: Path
    file: Path
    code: str


_loaded: dict[str, Plugin] = {}  # by the name of the Python module


def load_plugins(names: Sequence[str], folder: Path) -> dict[str, str]:
    """Import the plug-ins `names` in this order. Returns name -> identity of its code.

    folder: where modules are looked for, besides the installed packages. A plug-in that this process has imported
    already is imported again only if its file or code changed. Raises ConfigError if a plug-in cannot be imported.
    """
    if not names:
        return {}
    place = str(folder.resolve())
    if place not in sys.path:
        sys.path.append(place)  # at the end: a file like random.py must not replace a module of the standard library
    importlib.invalidate_caches()
    return {name: _load(name, folder).code for name in names}


def _load(name: str, folder: Path) -> Plugin:
    module, version = name, ""
    file = _file_of(name, folder)
    if file is None and (point := installed_plugins().get(name)):
        module, version = point.value, point.dist.version if point.dist else ""
        file = _file_of(module, folder)
    if file is None:
        raise ConfigError(
            "E-PLUGIN-MISSING",
            f"there is no module {module!r} in {folder} or among the installed packages",
            rule="a plug-in is a Python file beside the run file or recipe, or an installed module",
            fix="correct [plugins] modules, set plugins.folder to the folder of the module, or install its package",
            module=module,
            folder=str(folder),
        )
    plugin = Plugin(name, module, folder.resolve(), file, code_of(module, file, version))
    if module in _loaded and (_loaded[module].file, _loaded[module].code) == (file, plugin.code):
        return plugin
    _forget(module)
    with _imported_by(name):
        importlib.import_module(module)
    _loaded[module] = plugin
    return plugin


def installed_plugins() -> dict[str, EntryPoint]:
    """Return the plug-ins that installed distributions offer, by short name."""
    return {point.name: point for point in entry_points(group=GROUP)}


def _file_of(module: str, folder: Path) -> Path | None:
    """Return the file of a Python module, without importing the module itself (its package is imported); None if there
    is no such module."""
    try:
        spec = importlib.util.find_spec(module)
    except ValueError:  # a module without a specification, such as __main__
        spec = None
    except (Exception, SystemExit) as error:
        if not (isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")):
            raise _failed(module, error) from error
        spec = None  # its package does not exist
    if spec is None or not spec.origin or not Path(spec.origin).is_file():
        return None
    found, first = Path(spec.origin).resolve(), module.partition(".")[0]
    own = [path for path in (folder / f"{first}.py", folder / first / "__init__.py") if path.exists()]
    if own and not found.is_relative_to(folder.resolve()):
        raise ConfigError(
            "E-PLUGIN-SHADOWED",
            f"{own[0]} would not be imported: Python finds {first!r} in {found}",
            rule="a plug-in has a name that no installed package and no module of the standard library has",
            fix="rename the module",
            module=module,
            found=str(found),
        )
    return found


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


def _forget(module: str) -> None:
    """Undo an earlier import of `module` by this process, because its code or place has changed."""
    old = _loaded.pop(module, None)
    if old is None:
        return
    for registry in Registry.every:
        registry.forget(old.name)
    top = module.partition(".")[0]
    for name in [name for name in sys.modules if name == top or name.startswith(f"{top}.")]:
        del sys.modules[name]


@contextlib.contextmanager
def _imported_by(name: str) -> Iterator[None]:
    """Attribute what is registered inside to the plug-in `name`, and turn what it raises into a ConfigError.

    What a plug-in prints goes to standard error: the output of a command with --json stays JSON.
    """
    before, Registry.importing = Registry.importing, name
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except IngotError:
        raise
    except (Exception, SystemExit) as error:
        raise _failed(name, error) from error
    finally:
        Registry.importing = before


def _failed(name: str, error: BaseException) -> ConfigError:
    where, line = place_of(error)
    return ConfigError(
        "E-PLUGIN-IMPORT",
        f"plug-in {name!r} cannot be imported: {last_line(error)}" + (f" ({where}:{line})" if where else ""),
        rule="every plug-in is imported, in every process, before anything starts",
        fix=f"correct {where or 'the module'}, or remove {name!r} from [plugins] modules",
        module=name,
        file=where,
        line=line,
    )


def last_line(error: BaseException) -> str:
    """Return the last line of the traceback of `error`: its type and message."""
    return "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]


def place_of(error: BaseException) -> tuple[str, int]:
    """Return file and line where `error` was raised, outside of the import system and of ingot; ("", 0) if unknown."""
    if isinstance(error, SyntaxError) and error.filename:
        return error.filename, error.lineno or 0
    own = str(Path(__file__).parents[1])
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_machinery(f.filename, own)]
    return (frames[-1].filename, frames[-1].lineno or 0) if frames else ("", 0)


def _is_machinery(file: str, own: str) -> bool:
    return file.startswith((own, "<frozen")) or "importlib" in file or file == contextlib.__file__


def loaded_from(names: Sequence[str]) -> str | None:
    """Return the folder in which this process looked for these plug-ins, absolute; None if it has imported none."""
    return next((str(plugin.folder) for plugin in _loaded.values() if plugin.name in names), None)
