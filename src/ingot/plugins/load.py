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
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from ingot.errors import ConfigError, IngotError
from ingot.plugins.registry import MAIN, Registry
from ingot.value_names import close

GROUP = "ingot.plugins"
_HASH_DIGITS = 16


@dataclass(frozen=True)
class Plugin:
    """A plug-in that was imported. name: as the file names it. module: the Python module. folder: where modules were
    looked for, absolute. code: see `code_of`. version: of the distribution that gives the module its name, or ""."""

    name: str
    module: str
    folder: Path
    file: Path
    code: str
    version: str = ""


_loaded: dict[str, Plugin] = {}  # by the name of the Python module
_folders: list[Path] = []  # those that this module added to sys.path


def load_plugins(names: Sequence[str], folder: Path) -> dict[str, str]:
    """Import the plug-ins `names` in this order. Returns name -> identity of its code.

    folder: where modules are looked for, besides the installed packages. A plug-in that this process has imported
    already is imported again only if its file or code changed. Raises ConfigError if a plug-in cannot be imported.
    """
    return {plugin.name: plugin.code for plugin in import_plugins(names, folder)}


def import_plugins(names: Sequence[str], folder: Path) -> list[Plugin]:
    """Import the plug-ins `names` as `load_plugins` does, and return them."""
    if not names:
        return []
    folder = folder.resolve()
    _look_in(folder)
    importlib.invalidate_caches()
    return [_load(name, folder) for name in names]


def _look_in(folder: Path) -> None:
    """Let Python find the modules of `folder`, before those of the folders of earlier calls.

    All of them are at the end of sys.path: a file like random.py must not replace a module of the standard library.
    """
    if folder not in _folders:
        if str(folder) in sys.path:
            return
        _folders.append(folder)
    own = [str(one) for one in _folders]
    sys.path[:] = [place for place in sys.path if place not in own]
    sys.path += [str(folder), *(place for place in own if place != str(folder))]


def _load(name: str, folder: Path) -> Plugin:
    there = frozenset(sys.modules)
    module, version = name, ""
    file = _file_of(name, name, folder, there)
    if file is None and (point := installed_plugins().get(name)):
        module, version = point.module, point.dist.version if point.dist else ""
        file = _file_of(module, name, folder, there)
    if file is None:
        raise _missing(module, folder)
    plugin = Plugin(name, module, folder, file, code_of(module, file, version), version)
    if module in _loaded and (_loaded[module].file, _loaded[module].code) == (file, plugin.code):
        return plugin
    if module in _loaded:
        _forget(module, name)
    with _imported_by(name, module, there):
        importlib.import_module(module)
    _loaded[module] = plugin
    return plugin


def installed_plugins() -> dict[str, EntryPoint]:
    """Return the plug-ins that installed distributions offer, by short name."""
    return {point.name: point for point in entry_points(group=GROUP)}


def _missing(module: str, folder: Path) -> ConfigError:
    beside = [path.stem for path in folder.glob("*.py")] + [path.parent.name for path in folder.glob("*/__init__.py")]
    near = close(module, sorted({*beside, *installed_plugins()}))
    meant = f"; did you mean {near[0]!r}?" if near else ""
    return ConfigError(
        "E-PLUGIN-MISSING",
        f"there is no module {module!r} in {folder} or among the installed packages{meant}",
        rule="a plug-in is a Python file beside the run file or recipe, or an installed module",
        fix="correct [plugins] modules, set plugins.folder to the folder of the module, or install its package",
        module=module,
        folder=str(folder),
        meant=near,
    )


def _file_of(module: str, name: str, folder: Path, there: Collection[str]) -> Path | None:
    """Return the file of a Python module, without importing the module itself; None if there is no such module.

    The package of the module is imported, for the plug-in `name`. there: see `_imported_by`.
    """
    old = _loaded.get(module)
    if old is not None and old.folder != folder and _is_beside(old.file, module, old.folder):
        _forget(module, old.name)  # a file of the same name beside another run file
    if module == MAIN:
        return None
    try:
        with _imported_by(name, module, there):
            spec = importlib.util.find_spec(module)
    except ConfigError as error:
        cause = error.__cause__
        if isinstance(cause, ValueError) and not error.facts["file"]:  # a module without a specification: __main__
            return None
        if isinstance(cause, ModuleNotFoundError) and f"{module}.".startswith(f"{cause.name}."):
            return None  # its package does not exist
        raise
    if spec is None or not spec.origin or not Path(spec.origin).is_file():
        return None
    found, first = Path(spec.origin).resolve(), module.partition(".")[0]
    if _is_beside(found, module, folder):
        return found
    if any(_is_beside(found, module, other) for other in _folders):
        return None  # beside the file of an earlier call, which other processes do not search
    if own := [path for path in (folder / f"{first}.py", folder / first / "__init__.py") if path.exists()]:
        raise ConfigError(
            "E-PLUGIN-SHADOWED",
            f"{own[0]} would not be imported: Python finds {first!r} in {found}",
            rule="a plug-in has a name that no installed package and no module of the standard library has",
            fix="rename the module",
            module=module,
            found=str(found),
        )
    return found


def _is_beside(file: Path, module: str, folder: Path) -> bool:
    """Return whether `file`, without symbolic links, is the file of a module that `folder` itself holds."""
    first = module.partition(".")[0]
    return file == (folder / f"{first}.py").resolve() or file.is_relative_to((folder / first).resolve())


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


def _forget(module: str, name: str, kept: Collection[str] = ()) -> None:
    """Undo the import of `module` as the plug-in `name`, and of all plug-ins of the same package.

    kept: modules that stay unless a plug-in imported them.
    """
    top = f"{module.partition('.')[0]}."
    plugins = [_loaded.pop(other) for other in list(_loaded) if f"{other}.".startswith(top)]
    for registry in Registry.every:
        for plugin in {name, *(plugin.name for plugin in plugins)}:
            registry.forget(plugin)
    kept = () if plugins else kept
    for other in [other for other in sys.modules if f"{other}.".startswith(top) and other not in kept]:
        # Python takes a compiled module for current if its source has the same size and was changed in the same second.
        if cached := getattr(sys.modules[other], "__cached__", None):
            Path(cached).unlink(missing_ok=True)
        del sys.modules[other]


@contextlib.contextmanager
def _imported_by(name: str, module: str, there: Collection[str]) -> Iterator[None]:
    """Attribute what is registered inside to the plug-in `name`, and turn what it raises into a ConfigError.

    After an error only the modules `there` remain. What a plug-in prints goes to standard error: the output of a
    command with --json stays JSON.
    """
    before, Registry.importing = Registry.importing, name
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except IngotError:
        _forget(module, name, there)
        raise
    except (Exception, SystemExit) as error:
        _forget(module, name, there)
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


def frame_of(error: BaseException) -> tuple[str, str, int] | None:
    """Return (plug-in, file, line) if code of a plug-in raised `error`, or called the library that did; else None.

    Code of ingot that a plug-in called is no such library: what it raises is about ingot, or about the device.
    """
    own = str(Path(__file__).parents[1])
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if not file.is_absolute():  # <frozen ...> and the like
            continue
        file = file.resolve()
        for plugin in _loaded.values():
            of_package = "." in plugin.module or plugin.file.name == "__init__.py"
            if file == plugin.file or (of_package and file.is_relative_to(plugin.file.parent)):
                return plugin.name, frame.filename, frame.lineno or 0
        if str(file).startswith(own):
            return None
    return None
