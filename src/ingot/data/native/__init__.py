"""The compiled core: small C modules for the most expensive loops, each with a Python reference that gives equal
results.

They are built when ingot is installed, if there is a C compiler; without one ingot is slower, not broken. Each caller
asks for its module with `compiled` and falls back to its reference. INGOT_NATIVE=0 switches all of them off.
"""

import importlib
import os
from types import ModuleType

MODULES = ("_minhash", "_page", "_quality")


def compiled(name: str) -> ModuleType | None:
    """The C module `name` of MODULES, or None where it was not built or INGOT_NATIVE=0."""
    if os.environ.get("INGOT_NATIVE") == "0":
        return None
    try:
        return importlib.import_module(f"ingot.data.native.{name}")
    except ImportError:
        return None
