"""Options that several verbs share, the options of `ingot plan`, and the call of `ingot.plan` from these options."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ingot.cli.arguments import MOST_STEPS, count, fraction, path, place

if TYPE_CHECKING:
    from ingot.errors import UsageError
    from ingot.planner.request.answer import PlanResult

# Options that pin a setting of the layout; the search chooses the other settings.
_DEGREES = ("tp", "pp", "cp", "ep", "dp_shard", "dp_replicate", "zero", "micro_batch", "stages_per_rank", "ulysses")
_FORMS = ("recompute", "schedule", "context", "offload")
LAYOUT = (*_DEGREES, *_FORMS)
_RECIPES = ("tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4")


def add_overrides(parser: argparse._ActionsContainer, when: str = "") -> None:
    """Add the option --set, stored as `args.overrides`. when: beginning of its help text, such as "with --run: "."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help=f"{when}change one setting, for example optim.lr=1e-3; repeatable",
    )


def add_cluster(
    parser: argparse._ActionsContainer,
    text: str = "the cluster",
    default: str = "./machine.json, else this machine",
) -> None:
    """Add the option --cluster. text: what the cluster is used for; default: the cluster that is used without the
    option. Both are parts of the help text.
    """
    parser.add_argument(
        "--cluster",
        type=place,
        metavar="NAME|FILE",
        help=f"{text}: 8xh100, 128x8xh100, 16x72xgb200, v5p-256 (planning only), or a machine.json"
        f" (default: {default})",
    )


def add_budget(parser: argparse._ActionsContainer) -> None:
    """Add the options --tokens and --budget."""
    parser.add_argument(
        "--tokens",
        metavar="DIR|COUNT",
        help="token folder: DATA of `ingot data build --out DATA`, DATA/tokens or DATA/tokens/train; or a count: 1.5T",
    )
    parser.add_argument(
        "--budget",
        metavar="AMOUNT",
        help="compute budget instead of a count of tokens: 6e23flop, '$2M', 24h or '1M gpu-hours'; it also pays for"
        " losses to failures; without a model, ingot plans the compute-optimal size",
    )


def add_checkpoint(parser: argparse.ArgumentParser, *, device: bool = True) -> None:
    """Add the positional argument `run` for a verb that reads a checkpoint. device: also add the option --device."""
    parser.add_argument(
        "run", type=path, metavar="RUN|CHECKPOINT", help="run folder (its newest checkpoint), or a checkpoint folder"
    )
    if device:
        parser.add_argument(
            "--device", choices=("auto", "cpu", "cuda"), default="auto", help="device (default: a GPU if there is one)"
        )


def set_without_run(fix: str) -> "UsageError":
    """Return the error for --set without a run file."""
    from ingot.errors import UsageError

    found = "--set was given without a run file"
    return UsageError("E-SET-NO-RUN", found, rule="--set changes a setting of a run file", fix=fix)


def add_subject(parser: argparse.ArgumentParser) -> None:
    """Add the options for the model or run file, the cluster and the tokens or budget of a plan."""
    what = parser.add_argument_group("what to plan: one of --run, --model, --params, --init; or --budget alone")
    what.add_argument("--run", type=path, metavar="FILE", help="existing run file")
    what.add_argument("--model", metavar="PRESET|FILE", help="model preset, or TOML file with [arch]")
    what.add_argument("--params", metavar="COUNT", help="dense model of this number of parameters, for example 70b")
    what.add_argument(
        "--init",
        type=path,
        metavar="DIR",
        help="Hugging Face model folder, or a checkpoint or run folder; the run starts from its weights",
    )
    add_cluster(what)
    add_budget(what)
    add_overrides(what, "with --run: ")


def add_choices(parser: argparse.ArgumentParser) -> None:
    """Add the options for settings, layout and quantities that are otherwise default, searched or predicted."""
    _add_rules(parser)
    add_layout(parser)
    _add_quantities(parser)


def _add_rules(parser: argparse.ArgumentParser) -> None:
    choice = parser.add_argument_group("settings, instead of the default rules")
    choice.add_argument("--name", default="", help="name of the run (default: the name of the model)")
    choice.add_argument(
        "--steps",
        type=count("steps", 1, MOST_STEPS),
        metavar="N",
        help="optimizer steps (default: the preset's, else one pass over the tokens)",
    )
    choice.add_argument(
        "--seq", type=count("seq", 1, 10**9), metavar="T", help="sequence length in tokens (default: the preset's)"
    )
    choice.add_argument(
        "--batch",
        metavar="N",
        help="global batch in sequences, or in tokens with a unit: 4M (default: the preset's, else by compute budget)",
    )
    choice.add_argument(
        "--lr",
        type=fraction("lr", 1e-12, 100.0),
        metavar="RATE",
        help="peak learning rate (default: the preset's, else by compute budget)",
    )
    choice.add_argument("--precision", choices=("bf16", "fp32"), help="precision of the computation (default: bf16)")
    choice.add_argument(
        "--fp8",
        choices=_RECIPES,
        metavar="RECIPE",
        default="",
        help=f"compute matrix products in 8 or 4 bits (planning only): {', '.join(_RECIPES)}",
    )
    choice.add_argument(
        "--software",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="property of training software other than ingot, such as kernels=tuned (planning only); repeatable",
    )


def add_layout(parser: argparse.ArgumentParser, names: Sequence[str] = LAYOUT) -> None:
    """Add the options that pin settings of the layout. names: the settings to add, of LAYOUT; --pin comes with all."""
    layout = parser.add_argument_group("layout, instead of the fastest that the search finds")
    for name in names:
        form, option = name in _FORMS, name.replace("_", "-")
        layout.add_argument(
            f"--{option}",
            type=str if form else count(option, 0, 10**9),
            metavar="FORM" if form else "N",
            help=f"pin {_setting(name)}",
        )
    if names == LAYOUT:
        layout.add_argument(
            "--pin",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help="pin another setting of [parallel], such as async_tp=true; repeatable",
        )


def _add_quantities(parser: argparse.ArgumentParser) -> None:
    given = parser.add_argument_group("known quantities, instead of predicted ones")
    given.add_argument("--mfu", metavar="SHARE", help="model FLOPs utilization: 45%% or 0.45")
    given.add_argument(
        "--price",
        metavar="USD",
        help="US dollars per device-hour (on CPU: per machine-hour; default: the list price of the device)",
    )
    given.add_argument(
        "--failures", metavar="SHARE", help="failures per node per day, such as 0.38%% (default: the rate of Llama 3)"
    )
    given.add_argument(
        "--assume",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="fact about the cluster or failures, such as network_bandwidth=400Gb/s, restart_seconds=20min; repeatable",
    )
    given.add_argument(
        "--restart-from",
        type=path,
        metavar="RUN",
        help="run folder whose measured restarts are assumed (median; default: 10 min)",
    )


def _setting(name: str) -> str:
    return "train.micro_batch" if name == "micro_batch" else f"parallel.{name}"


def planning_of(args: argparse.Namespace, *, top: int = 5, relative_to: Path = Path()) -> "PlanResult":
    """Call `ingot.plan` with the options of `add_subject` and `add_choices`, and return its result. Raises IngotError.

    top: number of layouts to return. relative_to: folder of the new run file, to which its paths are relative.
    """
    from ingot.planner.request.planning import plan

    _require_numbers(args)
    pinned = pins_of(args)
    if args.run:
        _require_only_run(args, pinned)
        return plan(run=args.run, overrides=args.overrides, cluster=args.cluster, **_given(args))
    _require_subject(args)
    return plan(
        args.model or "",
        params=args.params,
        init=args.init,
        cluster=args.cluster,
        tokens=args.tokens,
        budget=args.budget,
        name=args.name,
        steps=args.steps or 0,
        seq=args.seq or 0,
        batch=args.batch or 0,
        lr=args.lr or 0.0,
        precision=args.precision or "bf16",
        pinned=pinned,
        top=top,
        relative_to=relative_to,
        **_given(args),
    )


def _given(args: argparse.Namespace) -> dict:
    return {
        "recipe": args.fp8,
        "software": args.software,
        "mfu": args.mfu or 0.0,
        "price": args.price or 0.0,
        "failures": args.failures or 0.0,
        "assumptions": args.assume,
        "restart_from": args.restart_from,
    }


def pins_of(args: argparse.Namespace) -> dict[str, object]:
    """Return the settings that the options of `add_layout` pin. Raises UsageError."""
    from ingot.errors import ConfigError, UsageError
    from ingot.toml import parse_toml

    pinned = {name: value for name in LAYOUT if (value := getattr(args, name, None)) is not None}
    for pin in getattr(args, "pin", ()):
        key, equals, value = pin.partition("=")
        if not equals or not value:
            raise UsageError(
                "E-PIN-FORM",
                f"--pin {pin} is not of the form KEY=VALUE",
                rule="--pin takes a setting of [parallel] and its value",
                fix="write --pin KEY=VALUE, for example --pin tp=8",
                given=pin,
            )
        try:
            pinned[key.strip().replace("-", "_")] = parse_toml(f"value = {value}", "--pin")["value"]
        except ConfigError as error:
            if error.code != "E-CONFIG-SYNTAX":
                raise
            pinned[key.strip().replace("-", "_")] = value.strip()
    return pinned


def _require_numbers(args: argparse.Namespace) -> None:
    from ingot.errors import UsageError

    for option in ("batch", "mfu", "price", "failures", "budget", "params"):
        if getattr(args, option) is not None and not str(getattr(args, option)).strip():
            raise UsageError(
                "E-OPTION-EMPTY",
                f"--{option} has an empty value",
                rule=f"--{option} needs a value",
                fix=f"--{option} VALUE, or leave the option out",
                option=option,
            )
    if args.batch is not None and str(args.batch).strip() == "0":
        raise UsageError(
            "E-OPTION-RANGE",
            "--batch 0 is out of range",
            rule="--batch is at least 1 sequence",
            fix="--batch 512, --batch 4M, or leave the option out",
            option="batch",
            value=0,
        )


def _require_only_run(args: argparse.Namespace, pinned: dict[str, object]) -> None:
    from ingot.errors import UsageError

    _one_of(args)
    names = ("tokens", "budget", "name", "steps", "seq", "batch", "lr", "precision")
    given = [f"--{name}" for name in names if getattr(args, name)] + [f"--{name.replace('_', '-')}" for name in pinned]
    if given:
        raise UsageError(
            "E-RUN-AND-OPTION",
            f"{', '.join(given)} given together with --run",
            rule="with --run, these settings come from the run file",
            fix="change settings of the run file with --set KEY=VALUE",
            options=given,
        )


def _require_subject(args: argparse.Namespace) -> None:
    from ingot.errors import UsageError

    if args.overrides:
        raise set_without_run("use options for a new run (--pin tp=8, --steps N, ...), or plan a run file with --run")
    if args.budget and not any((args.model, args.params, args.init)):
        return
    _one_of(args)
    if args.tokens is None and args.budget is None:
        given = next(f"--{name} {getattr(args, name)}" for name in ("model", "params", "init") if getattr(args, name))
        fix = "--tokens data, --tokens 1.5T, or --budget 6e23flop"
        raise UsageError(
            "E-PLAN-NO-TOKENS",
            f"{given} was given without --tokens or --budget",
            rule="a new run is planned for a number of tokens or a compute budget",
            fix=fix,
        )


def _one_of(args: argparse.Namespace) -> None:
    from ingot.errors import UsageError

    given = [f"--{name}" for name in ("run", "model", "params", "init") if getattr(args, name)]
    if len(given) != 1:
        raise UsageError(
            "E-PLAN-SUBJECT",
            f"{', '.join(given)} given together" if given else "none of --run, --model, --params, --init, --budget",
            rule="a plan is for exactly one of --run, --model, --params and --init, or for a --budget alone",
            fix="ingot plan --run run.toml, or --model tiny --tokens DIR, or --params 70b --tokens 1.5T",
        )
