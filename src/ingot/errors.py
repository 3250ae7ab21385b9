"""Every error that users see, in one tree of exceptions; each instance also has a stable code for its cause.

    IngotError
    ├── UsageError            exit  2   the command line asks for something that does not exist
    ├── ConfigError           exit  3   a run file or option breaks a rule
    ├── MissingPartError      exit  3   an optional part of ingot is not installed
    ├── ResourceError         exit  3   not enough disk or memory, or a port in use
    ├── ConfirmationNeeded    exit 11   the command would change a running experiment; confirm it explicitly
    ├── DataError             exit 20   crawl files, corpora, token shards
    │   └── DataMissing       exit  3   there is no data at the given path
    ├── CheckpointError       exit 21   a checkpoint fails verification, or no checkpoint can be used
    ├── RunBusyError          exit 30   another process owns the run directory
    ├── NodeUnhealthy         exit 31   this machine has a fault that a run may not depend on
    └── RunFailed             exit 93   the same failure again and again: restarting will not help
    Preempted                 exit 10   not an error: stopped on request; the last line names the saved step

An error states what was found, the rule that this breaks, and the fix.
"""

EXIT_OK = 0
EXIT_PREEMPTED = 10


class IngotError(Exception):
    """The base of all errors shown to users.

    code: the stable name of the cause, "E-...". `ingot explain CODE` describes the cause with the text in errors.toml
      of the package that raises the error.
    found: the problem, with its place (file, key, value).
    rule: the condition that should hold instead.
    fix: the command or edit that resolves the problem.
    facts: the values in the text (paths, numbers, names), for programs and tests.
    """

    kind = "E-INGOT"
    exit_code = 1

    def __init__(self, code: str, found: str, /, *, rule: str = "", fix: str = "", **facts: object):
        super().__init__(found)
        self.code, self.found, self.rule, self.fix, self.facts = code, found, rule, fix, facts

    def __str__(self) -> str:
        lines = [self.found.replace("\n", "\n  ")]
        if self.rule:
            lines.append(f"  rule: {self.rule}")
        if self.fix:
            lines.append(f"  fix:  {self.fix}")
        return "\n".join(lines)

    def __reduce__(self):
        # The default pickling of exceptions, which worker processes use, would lose keyword-only arguments.
        return (_rebuild, (type(self), self.code, self.found, self.rule, self.fix, self.facts))


def _rebuild(cause: type[IngotError], code: str, found: str, rule: str, fix: str, facts: dict) -> IngotError:
    return cause(code, found, rule=rule, fix=fix, **facts)


class UsageError(IngotError):
    kind, exit_code = "E-USAGE", 2


class ConfigError(IngotError):
    kind, exit_code = "E-CONFIG", 3


class MissingPartError(IngotError):
    kind, exit_code = "E-PART", 3


class ResourceError(IngotError):
    kind, exit_code = "E-RESOURCE", 3


class ConfirmationNeeded(IngotError):
    kind, exit_code = "E-CONFIRM", 11


class DataError(IngotError):
    kind, exit_code = "E-DATA", 20


class DataMissing(DataError):
    kind, exit_code = "E-MISSING", 3


class CheckpointError(IngotError):
    kind, exit_code = "E-CKPT", 21


class RunBusyError(IngotError):
    kind, exit_code = "E-BUSY", 30


class NodeUnhealthy(IngotError):
    kind, exit_code = "E-NODE", 31


class RunFailed(IngotError):
    kind, exit_code = "E-RUN", 93


class Preempted(Exception):
    """Stopped on request after everything was saved and verified."""

    exit_code = EXIT_PREEMPTED


# Packages that an extra of ingot installs, not the base installation: package -> extra.
PARTS = {
    "torch": "train",
    "safetensors": "train",
    "fastwarc": "data",
    "resiliparse": "data",
    "fasttext": "data",
    "xxhash": "data",
    "tokenizers": "data",
    "tiktoken": "data",
    "pyarrow": "data",
    "pyarrow.parquet": "data",
    "duckdb": "data",
    "obstore": "data",
    "ray": "ray",
    "trafilatura": "trafilatura",
    "starlette": "web",
    "uvicorn": "web",
    "prometheus_client": "prometheus",
    "tensorboard": "tensorboard",
    "opentelemetry": "otlp",
    "wandb": "wandb",
    "clearml": "clearml",
    "mlflow": "mlflow",
    "trackio": "trackio",
}


def missing_part(package: str, part: str) -> MissingPartError:
    return MissingPartError(
        "E-PART-MISSING",
        f"this needs the package {package!r}, which is not installed",
        rule=f"it belongs to the part 'ingot[{part}]'",
        fix=f"pip install 'ingot[{part}]'",
        package=package,
        part=part,
    )


def require(module: str, part: str):
    """Return the imported `module`, as in `require("tokenizers", "data")`.

    Raises MissingPartError, which names the extra to install, if the module is not installed.
    """
    import importlib

    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] != module.split(".")[0]:
            raise
        raise missing_part(module, part) from None


def catalogs() -> dict[str, dict[str, dict]]:
    """Return package -> error code -> entry with meaning (str), causes (list of str) and fix (str).

    The entries of a package are in its errors.toml; those under "ingot" may be raised by every package.
    """
    import tomllib
    from importlib import resources

    root = resources.files("ingot")
    folders = [root, *sorted((folder for folder in root.iterdir() if folder.is_dir()), key=lambda folder: folder.name)]
    files = {folder.name: folder.joinpath("errors.toml") for folder in folders}
    return {name: tomllib.loads(file.read_text(encoding="utf-8")) for name, file in files.items() if file.is_file()}


def describe(code: str) -> dict | None:
    """Return the catalog entry of an error code, None for an unknown code."""
    return next((codes[code] for codes in catalogs().values() if code in codes), None)
