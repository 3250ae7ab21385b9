"""Folders in which modules are: those of a run file or recipe, and that of the program."""

import sys
from pathlib import Path

from ingot.plugins.imports import family, first_name


def folders_of(top: str) -> set[Path]:
    """Return the folders that hold an imported top-level module or package. A package without a file of its own has one
    for each place where modules of it were found; without any, there is none."""
    names = [top] if vars(sys.modules[top]).get("__file__") else family(top)
    found = set()
    for name in names:
        own = vars(sys.modules[name])
        if file := own.get("__file__"):
            found.add(Path(file).parents[name.count(".") + ("__path__" in own)])
    return found


def folder_of_program() -> Path:
    """Return the first place where Python looks for modules: the folder of the script or notebook."""
    return Path(sys.path[0] if sys.path else "").resolve()


def own_file(top: str, folder: Path) -> Path | None:
    """Return the file of a top-level module or package that `folder` itself holds."""
    files = folder / f"{top}.py", folder / top / "__init__.py"
    return next((file for file in files if file.is_file()), None)


def is_beside(file: Path, module: str, folder: Path) -> bool:
    """Return whether `file`, without symbolic links, is the file of a module that `folder` itself holds."""
    first = first_name(module)
    return file == (folder / f"{first}.py").resolve() or file.is_relative_to((folder / first).resolve())
