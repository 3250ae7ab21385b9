"""`ingot plan --web`: the planner as a page on this machine."""

import argparse
import contextlib

from ingot.cli.terminal import Terminal

PORT = 8737
# What is not about the plan: of the page itself, and of every verb.
_OURS = ("web", "port", "host", "json", "quiet", "verbose")
_DEFAULTS = {"top": 5}


def add_page(parser: argparse.ArgumentParser) -> None:
    """The options of the page, for the verb `plan`."""
    page = parser.add_argument_group("a page to play with")
    page.add_argument("--web", action="store_true", help="serve the planner as a page on this machine, until Ctrl-C")
    page.add_argument("--port", type=int, metavar="N", help=f"of the page (default: {PORT}; 0: any that is free)")
    page.add_argument("--host", metavar="NAME", help="address to listen on (default: 127.0.0.1, this machine alone)")


def is_asked(args: argparse.Namespace) -> bool:
    """Whether to serve the page. Raises UsageError for options that say how, without it."""
    from ingot.errors import UsageError

    if not args.web and (args.port is not None or args.host):
        raise UsageError("--port or --host without --web", rule="they are the page's", fix="ingot plan --web")
    return args.web


def serve(args: argparse.Namespace, terminal: Terminal) -> int:
    """Serves until it is interrupted. Raises ResourceError when the port is taken, MissingPartError without the part
    `web`."""
    from ingot.errors import EXIT_OK, require

    require("starlette", "web")
    uvicorn = require("uvicorn", "web")
    from ingot.planner.web.app import LOOPBACK, make_app

    host = args.host or "127.0.0.1"
    listening = _listen(host, PORT if args.port is None else args.port)
    port = listening.getsockname()[1]
    local = host in ("localhost", *LOOPBACK, "::1")
    name = f"[{host}]" if ":" in host else host
    url = f"http://{name}:{port}/{_link(args)}"
    terminal.say(f"planner   {url}   (Ctrl-C ends it)")
    if not local:
        terminal.say(f"{terminal.style('warn', 'yellow')}      everyone who reaches {name}:{port} can use it")
    terminal.result({"url": url, "port": port})
    app = make_app(LOOPBACK if local else ("*",))
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_keep_alive=20, lifespan="off")
    with contextlib.suppress(KeyboardInterrupt):  # the way to end it
        uvicorn.Server(config).run(sockets=[listening])
    return EXIT_OK


def _listen(host: str, port: int):
    import socket

    from ingot.errors import ResourceError, UsageError

    if not 0 <= port < 65_536:
        raise UsageError(f"--port {port}", rule="0 to 65,535; 0 takes any that is free")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError:
        raise UsageError(f"--host {host}", rule="an address or name of this machine", fix="--host 127.0.0.1") from None
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address)
    except OSError as error:
        listening.close()
        raise ResourceError(
            f"{host}:{port}: {error.strerror}", rule="the page needs a port of its own", fix="--port 0 takes a free one"
        ) from None
    listening.listen(128)
    return listening


def _link(args: argparse.Namespace) -> str:
    """What other options of `ingot plan` say, as the settings that the page opens with. Raises UsageError for those
    that it has no control for."""
    from urllib.parse import urlencode

    from ingot.errors import UsageError
    from ingot.planner.web.answers import settled
    from ingot.planner.web.settings import FIELDS, link_pairs, read_settings

    given = {
        key: value for key, value in vars(args).items() if key not in _OURS and value and value != _DEFAULTS.get(key)
    }
    given |= {"recipe": given.pop("fp8")} if "fp8" in given else {}
    if others := [f"--{key.replace('_', '-')}" for key in given if key not in FIELDS]:
        kept = ", ".join(f"--{key.replace('_', '-')}" for key in FIELDS if hasattr(args, key))
        raise UsageError(f"{', '.join(others)} with --web", rule=f"the page opens with {kept}", fix="leave it out")
    state = read_settings((key, str(value)) for key, value in given.items())
    settled(state)
    return f"?{urlencode(link_pairs(state))}" if given else ""
