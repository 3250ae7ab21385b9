"""The section of run files and data recipes that names plug-ins."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Plugins:
    """Python modules that register parts: optimizers, layers, filters, sources, callbacks and others.

    Every rank, worker and planning command imports them, in this order, before anything starts.
    modules: names of modules, or short names that installed distributions give them.
    folder: where modules are looked for besides the installed packages, relative to the file that names them.
    code: module -> identity of its code. ingot writes it, with the run's other settings, and never reads it as a wish.
    """

    modules: tuple[str, ...] = ()
    folder: str = "."
    code: dict[str, str] = field(default_factory=dict)

    def problems(self):
        if not self.modules and self.folder != ".":
            yield "folder", f"{self.folder!r} has no effect without modules; set plugins.modules, or remove it"
        for name in sorted({name for name in self.modules if self.modules.count(name) > 1}):
            yield "modules", f"{name!r} is there twice; remove one of them"
        for name in self.modules:
            if not all(part.isidentifier() for part in name.replace("-", "_").split(".")):
                yield "modules", f"{name!r} is not the name of a Python module; write it like my_lab.parts, without .py"
