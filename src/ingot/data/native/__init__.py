"""The compiled core: small C modules for the most expensive loops, each with a Python reference that gives equal
results.

The modules are built when ingot is installed, if there is a C compiler; without them ingot works, but more slowly. Each
caller gets its module from `compiled`, or uses its Python reference. INGOT_NATIVE=0 switches all modules off.
"""

import importlib
import os
from types import ModuleType

MODULES = ("_minhash", "_page", "_quality")


def compiled(name: str) -> ModuleType | None:
    """Return the C module `name`, one of MODULES; None if it is not built or INGOT_NATIVE=0."""
    if os.environ.get("INGOT_NATIVE") == "0":
        return None
    try:
        return importlib.import_module(f"ingot.data.native.{name}")
    except ImportError:
        return None
