"""Import of the plug-ins that a run file or data recipe names, and the identity of their code.

A plug-in is a Python module that registers parts. It is looked for in the folder beside the file that names it, and
among the installed packages; a distribution may also give it a short name, as an entry point of the group
"ingot.plugins". Nothing is imported that the file does not name, and commands that only read a run (status, report,
ckpt, explain, data trace) import nothing at all.
"""

import contextlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from ingot.errors import ConfigError, IngotError
from ingot.plugins.imports import family, first_name, reached_from, with_importers
from ingot.plugins.origin import code_of
from ingot.plugins.places import folder_of_program, folders_of, is_beside, own_file
from ingot.plugins.registry import MAIN, Entry, Registry
from ingot.value_names import close

GROUP = "ingot.plugins"


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
    already, for another run or in the program itself, is imported again only if its code changed, or that of a plug-in
    that it imports. Afterwards each part belongs to the plug-in that would register it in a new process. Raises
    ConfigError if a plug-in cannot be imported.
    """
    return {plugin.name: plugin.code for plugin in import_plugins(names, folder)}


def import_plugins(names: Sequence[str], folder: Path) -> list[Plugin]:
    """Import the plug-ins `names` as `load_plugins` does, and return them."""
    if not names:
        return []
    folder = folder.resolve()
    _look_in(folder)
    importlib.invalidate_caches()
    _forget_outdated(names, folder)
    before, Registry.chosen = Registry.chosen, frozenset(names)
    try:
        plugins = [_load(name, folder) for name in names]
    finally:
        Registry.chosen = before
    _assign_parts(plugins, folder)
    return plugins


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
    with _imported_by(name, module, there):
        importlib.import_module(module)
    _loaded[module] = plugin
    return plugin


def _forget_outdated(names: Sequence[str], folder: Path) -> None:
    """Undo imports whose code is not that of `folder` or no longer on the disk, and imports of plug-ins that import it.

    All of them are forgotten before the first is imported again: a part may have moved from one to another.
    """
    outdated = {first_name(module) for module, plugin in _loaded.items() if not _is_current(plugin)}
    outdated |= {first_name(module) for module in Registry.displaced}
    outdated |= _found_elsewhere(names, folder) | _edited_since_import(names)
    Registry.displaced.clear()
    if outdated:
        tops = [name for name in list(sys.modules) if "." not in name and _is_of_plugins(name, folder)]
        _forget(with_importers(outdated, tops))


def _is_current(plugin: Plugin) -> bool:
    file = vars(sys.modules[plugin.module]).get("__file__") if plugin.module in sys.modules else None
    if not file or Path(file).resolve() != plugin.file or not plugin.file.is_file():
        return False
    return code_of(plugin.module, plugin.file, plugin.version) == plugin.code


def _found_elsewhere(names: Sequence[str], folder: Path) -> set[str]:
    """Return the modules and packages that were imported from beside another file, but are in `folder` too.

    Python would find a module in the program's own folder again; of those, only a plug-in is taken from `folder`.
    """
    program, named = folder_of_program(), {first_name(name) for name in names}
    others = {*_folders} - {folder, program}
    found = set()
    for name in [one for one in sys.modules if "." not in one] if others else named & sys.modules.keys():
        places = folders_of(name)
        if places & others or (program in places and program != folder and name in named):
            is_namespace = not vars(sys.modules[name]).get("__file__")
            if own_file(name, folder) or (is_namespace and (folder / name).is_dir()):
                found.add(name)
    return found


def _edited_since_import(names: Sequence[str]) -> set[str]:
    """Return the modules and packages of plug-ins that were imported, but not as plug-ins, and changed on the disk
    after they registered parts."""
    tops = {first_name(module) for module in _loaded}
    entries = [entry for registry in Registry.every for entry in registry.entries() if entry.code]
    entries = [entry for entry in entries if first_name(entry.by) not in tops]
    if not entries:
        return set()
    points = installed_plugins()
    wanted = {*names, *(points[name].module for name in names if name in points)}
    edited = {first_name(entry.by) for entry in entries if not _is_unedited(entry)}
    return edited & {first_name(name) for name in wanted}


def _is_unedited(entry: Entry) -> bool:
    file = Path(getattr(sys.modules.get(entry.by), "__file__", None) or "")
    return file.is_file() and code_of(entry.by, file) == entry.code


def _is_of_plugins(top: str, folder: Path) -> bool:
    """Return whether a top-level module or package is a plug-in, or was found where one was looked for."""
    if top not in sys.modules:
        return False
    looked_in = {folder, *_folders, *(plugin.folder for plugin in _loaded.values())}
    return any(first_name(module) == top for module in _loaded) or not folders_of(top).isdisjoint(looked_in)


def _assign_parts(plugins: Sequence[Plugin], folder: Path) -> None:
    """Let each part belong to the plug-in that registers it in a process that imports these `plugins` alone.

    That is the plug-in whose module it is in; else, for a part of a module that is no plug-in, the first one that
    imports this module.
    """
    names, by_module = {plugin.name for plugin in plugins}, {plugin.module: plugin.name for plugin in reversed(plugins)}
    reached: dict[str, set[str]] = {}

    def owner(entry: Entry) -> str:
        if entry.by in by_module:
            return by_module[entry.by]
        if entry.module in names:
            return entry.module
        for plugin in plugins:
            if plugin.module not in reached:
                reached[plugin.module] = reached_from(plugin.module, lambda top: _is_of_plugins(top, folder))
            if entry.by in reached[plugin.module]:
                return plugin.name
        return entry.module

    for registry in Registry.every:
        registry.assign(owner)


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
    if module == MAIN:
        return None
    _prefer(folder, module, name, there)
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
    found, first = Path(spec.origin).resolve(), first_name(module)
    if is_beside(found, module, folder):
        return found
    if any(is_beside(found, module, other) for other in _folders):
        return None  # beside the file of an earlier call, which other processes do not search
    if own := own_file(first, folder):
        raise ConfigError(
            "E-PLUGIN-SHADOWED",
            f"{own} would not be imported: Python finds {first!r} in {found}",
            rule="a plug-in has a name that no installed package and no module of the standard library has",
            fix="rename the module",
            module=module,
            found=str(found),
        )
    return found


def _prefer(folder: Path, module: str, name: str, there: Collection[str]) -> None:
    """Import the top-level module or package of `module` from `folder` if Python would find it beside another file.

    That is in the folder of the program, or of an earlier call that the program has in sys.path: places that other
    processes need not search. name, there: see `_imported_by`.
    """
    first = first_name(module)
    if first in sys.modules or not own_file(first, folder):
        return
    found, own = importlib.util.find_spec(first), PathFinder.find_spec(first, [str(folder)])
    file = Path(found.origin).resolve() if found and found.origin else None
    others = [one for one in (*_folders, folder_of_program()) if one != folder]
    if file and own and own.loader and any(is_beside(file, first, other) for other in others):
        with _imported_by(name, module, there):
            sys.modules[first] = importlib.util.module_from_spec(own)
            own.loader.exec_module(sys.modules[first])


def _forget(tops: Collection[str]) -> None:
    """Undo the import of these top-level modules and packages: their parts, and all modules of the packages."""
    entries = [entry.by for registry in Registry.every for entry in registry.entries()]
    _remove({module for module in (*_loaded, *entries, *sys.modules) if first_name(module) in tops})


def _remove(modules: Collection[str]) -> None:
    for module in modules:
        for registry in Registry.every:
            registry.forget(module)
        _loaded.pop(module, None)
        # Python takes a compiled module for current if its source has the same size and was changed in the same second.
        if cached := getattr(sys.modules.pop(module, None), "__cached__", None):
            Path(cached).unlink(missing_ok=True)


@contextlib.contextmanager
def _imported_by(name: str, module: str, there: Collection[str]) -> Iterator[None]:
    """Attribute what is registered inside to the plug-in `name`, and turn what it raises into a ConfigError.

    After an error, of the package of `module` only the modules `there` remain. What a plug-in prints goes to standard
    error: the output of a command with --json stays JSON.
    """
    before, Registry.importing = Registry.importing, name
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except IngotError:
        _undo(name, module, there)
        raise
    except (Exception, SystemExit) as error:
        _undo(name, module, there)
        raise _failed(name, error) from error
    finally:
        Registry.importing = before


def _undo(name: str, module: str, there: Collection[str]) -> None:
    _remove([one for one in family(first_name(module)) if one not in there])
    entries = [entry for registry in Registry.every for entry in registry.entries() if entry.module == name]
    _remove({entry.by for entry in entries if entry.by not in sys.modules})


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
