"""`ingot plan`: what a run needs and takes, and the run file that `ingot train` executes."""

import argparse
import math
from pathlib import Path

from ingot.cli.terminal import Terminal

HELP = "memory, steps, time and cost of a run before it starts; writes the run file"
EXAMPLES = (
    "ingot plan --model tiny --tokens data --out run.toml",
    "ingot plan --model llama3-8b --tokens 1.5T --cluster 8xh100",
    "ingot plan --init mixtral-hf --tokens data --out run.toml",
    "ingot plan --run run.toml --explain mem",
)

_BAR_WIDTH = 32


def configure(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what to plan")
    what.add_argument("--run", type=Path, metavar="FILE", help="an existing run file")
    what.add_argument("--model", metavar="PRESET|FILE", help="a model preset, or a TOML file with an [arch] section")
    what.add_argument(
        "--init",
        type=Path,
        metavar="DIR",
        help="instead of --model: a Hugging Face model folder; the run begins with its weights",
    )
    what.add_argument(
        "--tokens",
        metavar="DIR|COUNT",
        help="with --model or --init: DATA of `ingot data build --out DATA`, DATA/tokens or DATA/tokens/train;"
        " or a count like 1.5T",
    )
    what.add_argument(
        "--cluster",
        metavar="NAME|FILE",
        help="8xh100, 128x8xh100, or a machine.json (default: ./machine.json, else this machine)",
    )
    choice = parser.add_argument_group("choices, instead of the rules'")
    choice.add_argument("--name", default="", help="name of the run (default: the model's)")
    choice.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="optimizer steps (default: the preset's, else one pass over the tokens)",
    )
    choice.add_argument("--seq", type=int, metavar="T", help="sequence length in tokens (default: the preset's)")
    choice.add_argument(
        "--batch",
        type=int,
        metavar="N",
        help="global batch in sequences (default: the preset's, else by compute budget)",
    )
    choice.add_argument(
        "--lr",
        type=float,
        metavar="RATE",
        help="peak learning rate (default: the preset's, else by compute budget)",
    )
    choice.add_argument("--precision", choices=("bf16", "fp32"), default="bf16", help="of computation (default: bf16)")
    choice.add_argument(
        "--price",
        type=float,
        metavar="USD",
        help="US dollars per GPU and hour, per machine and hour on CPU (default: the device's list price)",
    )
    choice.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="with --run: change a value; repeatable",
    )
    output = parser.add_argument_group("what to show and write")
    output.add_argument("--out", type=Path, metavar="FILE", help="write the run file here, and plan.json beside it")
    output.add_argument("--force", action="store_true", help="overwrite --out")
    output.add_argument(
        "--explain", choices=("mem", "memory", "time", "all"), help="show the formulas with their numbers (default: no)"
    )


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    from ingot.config import to_dict
    from ingot.errors import EXIT_OK, ConfigError
    from ingot.planner.memory import rank_memory_bytes
    from ingot.recipes.project import write_plan

    planned = _planned(args)
    _show(planned, terminal)
    if args.explain:
        _explain(planned.plan.formulas, args.explain, terminal)
    for warning in planned.plan.warnings:
        terminal.say(f"{terminal.style('warn', 'yellow')}      {warning}")
    there = rank_memory_bytes(planned.plan.cluster, planned.run.parallel.world_size)
    fits = planned.plan.total_memory_bytes <= there
    if args.out:
        beside = write_plan(args.out, planned, force=args.force)
        terminal.say(f"wrote     {args.out}, {beside}")
    facts = {"run": to_dict(planned.run), "plan": to_dict(planned.plan), "reasons": planned.reasons}
    if not fits:
        terminal.result(facts | {"error": ConfigError.code, "exit_code": ConfigError.exit_code})
        terminal.next(*_ways_to_fit(args))
        return ConfigError.exit_code
    terminal.result(facts)
    file = args.out or args.run
    terminal.next(
        *(("ingot check " + str(file), "ingot train " + str(file)) if file else ("ingot plan ... --out run.toml",))
    )
    return EXIT_OK


def _ways_to_fit(args: argparse.Namespace) -> tuple[str, ...]:
    what = f"--run {args.run}" if args.run else f"{_model(args)} --tokens {args.tokens}"
    shorter = "--set train.seq_len=T" if args.run else "--seq T"
    return (
        f"ingot plan {what} --cluster NAME   (more or larger devices: 8xh100, 128x8xh100)",
        f"ingot plan {what} {shorter}   (shorter sequences need less memory; or a smaller model)",
    )


def _model(args: argparse.Namespace) -> str:
    return f"--init {args.init}" if args.init else f"--model {args.model}"


def _planned(args: argparse.Namespace):
    from ingot.errors import UsageError
    from ingot.planner.propose import Hints
    from ingot.recipes.clusters import find_cluster
    from ingot.recipes.project import plan_file, plan_model

    if sum(map(bool, (args.run, args.model, args.init))) != 1:
        raise UsageError(
            "give either --run or --model (or --init)", fix="ingot plan --run run.toml, or --model tiny --tokens DIR"
        )
    for option in ("steps", "seq", "batch", "lr", "price"):
        value = getattr(args, option)
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"--{option} {value}", rule="above 0" if option in ("lr", "price") else "at least 1")
    if args.force and not args.out:
        raise UsageError("--force without --out", rule="only a file that is written can be overwritten")
    cluster = find_cluster(args.cluster, args.run.parent if args.run else Path())
    if args.run:
        given = [f"--{o}" for o in ("tokens", "name", "steps", "seq", "batch", "lr") if getattr(args, o)]
        if given:
            raise UsageError(f"{', '.join(given)} with --run", rule="a run file has these values", fix="use --set")
        return plan_file(args.run, cluster, tuple(args.overrides), args.price or 0.0)
    if not args.tokens or args.overrides:
        found = "--set without --run" if args.overrides else f"{_model(args)} without --tokens"
        raise UsageError(found, rule="a new run is planned for some tokens", fix="--tokens data, or --tokens 1.5T")
    wanted = Hints(steps=args.steps or 0, seq_len=args.seq or 0, global_batch=args.batch or 0, lr=args.lr or 0.0)
    return plan_model(
        args.model,
        args.tokens,
        cluster,
        beside=args.out.parent if args.out else Path(),
        name=args.name,
        wanted=wanted,
        precision=args.precision,
        usd_per_hour=args.price or 0.0,
        init=args.init,
    )


def _show(planned, terminal: Terminal) -> None:
    from ingot.cli.check import show_notes
    from ingot.planner.notes import notes
    from ingot.units import format_bytes, format_count, format_seconds, format_usd

    plan, run = planned.plan, planned.run
    arch, train = run.model, run.train
    terminal.say(
        f"model     {format_count(plan.parameters)} parameters: {arch.num_layers} layers, width {arch.d_model},"
        f" {arch.num_heads}/{arch.num_kv_heads} heads, vocabulary {arch.vocab_size:,}"
    )
    show_notes(notes(run, plan.cluster), terminal)
    terminal.say(
        f"layout    {run.parallel.world_size} ranks{_degrees(run.parallel)} on {plan.cluster.name}, {train.precision};"
        f" batch {train.global_batch} = {train.micro_batch} x {run.accumulation} accumulated"
        f" x {run.parallel.data_ranks} ranks"
    )
    terminal.say(
        f"steps     {plan.steps:,} x {plan.tokens_per_step:,} tokens"
        f" = {format_count(plan.steps * plan.tokens_per_step)}, learning rate {run.optim.lr:g}"
    )
    if "epochs" in plan.formulas:
        terminal.say(f"data      {plan.formulas['epochs'].rpartition('= ')[2]} passes")
    terminal.say(f"memory    {format_bytes(plan.total_memory_bytes)} per rank")
    largest = max(plan.memory_bytes.values())
    rows = [
        (f"  {kind}", format_bytes(size), "█" * max(round(_BAR_WIDTH * size / largest), 1 if size else 0))
        for kind, size in sorted(plan.memory_bytes.items(), key=lambda item: -item[1])
    ]
    terminal.table(rows, right=(1,))
    if plan.step_seconds:
        speed = format_count(plan.tokens_per_step / plan.step_seconds)
        mfu = f", MFU {plan.mfu:.0%} (causal attention counted half)" if plan.mfu else ""
        terminal.say(f"time      {format_seconds(plan.step_seconds)} per step, {speed} tokens/s{mfu}")
        terminal.say(f"          {format_seconds(plan.total_seconds)} for all steps")
    else:
        terminal.say("time      unknown until this machine is measured")
    terminal.say(f"disk      {format_bytes(plan.checkpoint_bytes)} per checkpoint, {run.checkpoint.keep} are kept")
    if plan.usd:
        terminal.say(f"cost      {format_usd(plan.usd)} = {plan.formulas['usd']}")


def _degrees(parallel) -> str:
    """ " (pp 4 x dp_shard 8 x tp 4, ep 8)" where more than one axis is used, or experts are divided."""
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    used = [f"{name} {getattr(parallel, name)}" for name in names if getattr(parallel, name) > 1]
    shown = [" x ".join(used)] if len(used) > 1 else []
    shown += [f"ep {parallel.ep}"] if parallel.ep > 1 else []
    return f" ({', '.join(shown)})" if shown else ""


def _explain(formulas: dict[str, str], topic: str, terminal: Terminal) -> None:
    memory = ("memory.", "checkpoint_bytes")
    prefixes = {"mem": memory, "memory": memory, "time": ("time.", "flops_per_token", "tokens_per_step", "mfu")}
    chosen = {k: v for k, v in formulas.items() if topic == "all" or k.startswith(prefixes[topic])}
    width = max(map(len, chosen), default=0)
    terminal.say()
    for name, formula in chosen.items():
        terminal.say(f"{name:<{width}}  {formula}")
