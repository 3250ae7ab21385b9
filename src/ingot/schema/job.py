"""A job that a launcher starts as processes: today on this machine; a batch system would need the same four fields."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Job:
    """`processes` ranks of the Python module `module` with `arguments`, each with `env` added to the environment."""

    module: str
    arguments: tuple[str, ...]
    processes: int
    env: dict[str, str] = field(default_factory=dict)
