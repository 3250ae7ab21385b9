"""`ingot watch RUN...`: show runs while they train, in the terminal or as a web page."""

import argparse
import shlex
from typing import TYPE_CHECKING

from ingot.cli import serving
from ingot.cli.arguments import fraction, path
from ingot.cli.terminal import Terminal

if TYPE_CHECKING:
    from ingot.watch.live import LiveRun

PORT = 8738
MOST_RUNS = 50
EXAMPLES = (
    "ingot watch runs/demo",
    "ingot watch runs/demo --every 60 | tee log",
    "ingot watch runs/demo --web",
    "ingot watch runs/small runs/large --web --port 0",
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=path, nargs="+", metavar="RUN", help="run folder; several are shown together")
    parser.add_argument(
        "--every",
        type=fraction("every", 0.1, 86_400),
        metavar="SECONDS",
        help="print the state as text every so many seconds, until every run has ended",
    )
    page = parser.add_argument_group("web page")
    page.add_argument("--web", action="store_true", help="serve a live page on this machine, until Ctrl-C")
    serving.add_address(page, PORT)


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    from ingot.errors import UsageError

    if len(args.run) > MOST_RUNS:
        raise UsageError(
            "E-WATCH-RUNS",
            f"{len(args.run)} runs are given",
            rule=f"at most {MOST_RUNS} runs are shown together",
            fix="name the runs to compare",
            runs=len(args.run),
        )
    other = "--web" if args.web else "--json" if terminal.json_mode else ""
    if args.every is not None and other:
        raise UsageError(
            "E-WATCH-EVERY",
            f"--every {args.every:g} is given together with {other}",
            rule="--every prints text; --web shows new steps at once, and --json prints one state",
            fix=f"leave out --every, or {other}",
            option=other,
        )
    if serving.is_asked(args, f"watch {shlex.quote(str(args.run[0]))}", PORT):
        return _serve(args, terminal)
    return _show(args, terminal)


def _live_runs(args: argparse.Namespace) -> "list[LiveRun]":
    """Return the runs, each once. Raises UsageError for a folder without a run file."""
    from ingot.report.facts import no_run_folder
    from ingot.watch.live import LiveRun, distinguish

    runs = [LiveRun(root) for root in dict.fromkeys(args.run)]
    for own in runs:
        if not own.folder.config.is_file():
            raise no_run_folder(own.folder.root)
    for own in runs:
        own.refresh()
    distinguish(runs)
    return runs


def _show(args: argparse.Namespace, terminal: Terminal) -> int:
    """Follow the runs in the terminal, or print their state as JSON."""
    from dataclasses import asdict

    from ingot.errors import EXIT_OK
    from ingot.watch.chapters import head
    from ingot.watch.terminal.follow import show

    runs = _live_runs(args)
    if terminal.json_mode:
        terminal.result({"runs": [asdict(head(own.read_all())) for own in runs]})
    else:
        show(runs, every=args.every, say=terminal.say)
    terminal.next(shlex.join(["ingot", "watch", *map(str, args.run), "--web"]))
    return EXIT_OK


def _serve(args: argparse.Namespace, terminal: Terminal) -> int:
    """Serve the page until Ctrl-C. Raises ResourceError if the port is taken, MissingPartError if ingot[web] is not
    installed."""
    import secrets
    import socket

    from ingot.errors import EXIT_OK, require

    require("starlette", "web")
    uvicorn = require("uvicorn", "web")
    from ingot.watch.web.app import make_app
    from ingot.web.guards import LOOPBACK, names_of_host

    runs = _live_runs(args)
    host = args.host or "127.0.0.1"
    listening = serving.listen(host, PORT if args.port is None else args.port)
    port = listening.getsockname()[1]
    token = secrets.token_urlsafe(24)
    shown = socket.gethostname() if host in ("0.0.0.0", "::") else host
    name = f"[{shown}]" if ":" in shown else shown
    url = f"http://{name}:{port}/?token={token}"
    terminal.say(f"watch     {url}   (Ctrl-C ends it)")
    if names_of_host(host) != LOOPBACK:
        warning = "who can read the network can read the token and the page: it is not encrypted"
        terminal.say(f"{terminal.style('warn', 'yellow')}      {warning}")
    terminal.result({"url": url, "port": port})
    app = make_app(runs, token=token, cookie=f"ingot-watch-{port}", hosts=names_of_host(host))
    serving.run_until_interrupted(uvicorn, app, listening, terminal.say, app.state.end_streams)
    return EXIT_OK
