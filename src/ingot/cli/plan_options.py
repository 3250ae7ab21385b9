"""The options of verbs that plan, and the call of `ingot.plan` that they mean."""

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ingot.planner.request.answer import PlanResult

# Options that pin a setting of the layout: the search decides the others.
_DEGREES = ("tp", "pp", "cp", "ep", "dp_shard", "dp_replicate", "zero", "micro_batch", "stages_per_rank", "ulysses")
_FORMS = ("recompute", "schedule", "context", "offload")
_RECIPES = ("tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4")


def add_subject(parser: argparse.ArgumentParser) -> None:
    """What is planned, on what, for how much."""
    what = parser.add_argument_group("what to plan: one of --model, --params, --init, --run, or only --budget")
    what.add_argument("--run", type=Path, metavar="FILE", help="an existing run file")
    what.add_argument("--model", metavar="PRESET|FILE", help="a model preset, or a TOML file with an [arch] section")
    what.add_argument("--params", metavar="COUNT", help="a dense model known by its size alone, like 70b")
    what.add_argument(
        "--init", type=Path, metavar="DIR", help="a Hugging Face model folder; the run begins with its weights"
    )
    what.add_argument(
        "--cluster",
        metavar="NAME|FILE",
        help="8xh100, 128x8xh100, 16x72xgb200, v5p-256 (planning only), or a machine.json"
        " (default: ./machine.json, else this machine)",
    )
    what.add_argument(
        "--tokens",
        metavar="DIR|COUNT",
        help="DATA of `ingot data build --out DATA`, DATA/tokens or DATA/tokens/train; or a count like 1.5T",
    )
    what.add_argument(
        "--budget",
        metavar="AMOUNT",
        help="instead of a count of tokens: what may be spent: 6e23flop, '$2M', 24h or '1M gpu-hours'; failures count;"
        " without a model, the compute-optimal size for it",
    )
    what.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="with --run: change a value; repeatable",
    )


def add_choices(parser: argparse.ArgumentParser) -> None:
    """What is asked for in place of rules, searches and predictions."""
    _add_rules(parser)
    _add_layout(parser)
    _add_quantities(parser)


def _add_rules(parser: argparse.ArgumentParser) -> None:
    choice = parser.add_argument_group("choices, instead of the rules'")
    choice.add_argument("--name", default="", help="name of the run (default: the model's)")
    choice.add_argument(
        "--steps", type=int, metavar="N", help="optimizer steps (default: the preset's, else one pass over the tokens)"
    )
    choice.add_argument("--seq", type=int, metavar="T", help="sequence length in tokens (default: the preset's)")
    choice.add_argument(
        "--batch",
        metavar="N",
        help="global batch in sequences, or in tokens with a unit: 4M (default: the preset's, else by compute budget)",
    )
    choice.add_argument(
        "--lr", type=float, metavar="RATE", help="peak learning rate (default: the preset's, else by compute budget)"
    )
    choice.add_argument("--precision", choices=("bf16", "fp32"), help="of computation (default: bf16)")
    choice.add_argument(
        "--fp8",
        choices=_RECIPES,
        metavar="RECIPE",
        default="",
        help=f"products in 8 or 4 bits, planning only: {', '.join(_RECIPES)}",
    )
    choice.add_argument(
        "--software",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a property of other software than ingot's, planning only: kernels=tuned; repeatable",
    )


def _add_layout(parser: argparse.ArgumentParser) -> None:
    layout = parser.add_argument_group("the layout, instead of the fastest that is found")
    for name in _DEGREES:
        layout.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=f"pin {_setting(name)}")
    for name in _FORMS:
        layout.add_argument(f"--{name}", metavar="FORM", help=f"pin {_setting(name)}")
    layout.add_argument(
        "--pin",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="pin another setting of [parallel]: async_tp=true; repeatable",
    )


def _add_quantities(parser: argparse.ArgumentParser) -> None:
    given = parser.add_argument_group("quantities that you know, instead of the predicted ones")
    given.add_argument("--mfu", metavar="SHARE", help="model FLOPs utilisation: 45%% or 0.45")
    given.add_argument(
        "--price",
        metavar="USD",
        help="US dollars per device and hour, per machine and hour on CPU (default: the device's list price)",
    )
    given.add_argument("--failures", metavar="SHARE", help="failures per node and day: 0.38%% (default: Llama 3's)")
    given.add_argument(
        "--assume",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a fact of the cluster or of failures: network_bandwidth=400Gb/s, restart_seconds=20min; repeatable",
    )


def _setting(name: str) -> str:
    return "train.micro_batch" if name == "micro_batch" else f"parallel.{name}"


def planning_of(args: argparse.Namespace, *, top: int = 5, relative_to: Path = Path()) -> "PlanResult":
    """What `ingot.plan` answers to options of `add_subject` and `add_choices`. Raises IngotError."""
    from ingot.planner.request.planning import plan

    _require_numbers(args)
    pinned = _pinned(args)
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
    }


def _pinned(args: argparse.Namespace) -> dict[str, object]:
    import tomllib

    from ingot.errors import UsageError

    pinned = {name: value for name in (*_DEGREES, *_FORMS) if (value := getattr(args, name)) is not None}
    for pin in args.pin:
        key, equals, value = pin.partition("=")
        if not equals or not value:
            raise UsageError(f"--pin {pin}", rule="KEY=VALUE", fix="--pin tp=8")
        try:
            pinned[key.strip().replace("-", "_")] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            pinned[key.strip().replace("-", "_")] = value.strip()
    return pinned


def _require_numbers(args: argparse.Namespace) -> None:
    from ingot.errors import UsageError

    for option in ("steps", "seq", "lr"):
        value = getattr(args, option)
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"--{option} {value}", rule="above 0" if option == "lr" else "at least 1")
    for option in ("batch", "mfu", "price", "failures", "budget", "params"):
        if getattr(args, option) is not None and not str(getattr(args, option)).strip():
            raise UsageError(f"--{option} with nothing behind it", rule="a value", fix=f"--{option} VALUE, or leave it")
    if args.batch is not None and str(args.batch).strip() == "0":
        raise UsageError("--batch 0", rule="at least 1 sequence")


def _require_only_run(args: argparse.Namespace, pinned: dict[str, object]) -> None:
    from ingot.errors import UsageError

    _one_of(args)
    names = ("tokens", "budget", "name", "steps", "seq", "batch", "lr", "precision")
    given = [f"--{name}" for name in names if getattr(args, name)] + [f"--{name.replace('_', '-')}" for name in pinned]
    if given:
        raise UsageError(f"{', '.join(given)} with --run", rule="a run file has these values", fix="use --set")


def _require_subject(args: argparse.Namespace) -> None:
    from ingot.errors import UsageError

    if args.overrides:
        raise UsageError(
            "--set without --run", rule="a new run is planned by options", fix="--pin tp=8, --steps N, ..."
        )
    if args.budget and not any((args.model, args.params, args.init)):
        return
    _one_of(args)
    if args.tokens is None and args.budget is None:
        given = next(f"--{name} {getattr(args, name)}" for name in ("model", "params", "init") if getattr(args, name))
        fix = "--tokens data, --tokens 1.5T, or --budget 6e23flop"
        raise UsageError(f"{given} without --tokens or --budget", rule="a new run is planned for some tokens", fix=fix)


def _one_of(args: argparse.Namespace) -> None:
    from ingot.errors import UsageError

    if sum(map(bool, (args.run, args.model, args.params, args.init))) != 1:
        raise UsageError(
            "give either --run or --model (or --params, or --init)",
            fix="ingot plan --run run.toml, or --model tiny --tokens DIR, or --params 70b --tokens 1.5T",
        )
