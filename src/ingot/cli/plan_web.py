"""`ingot plan --web`: serve the planner as a web page on this machine."""

import argparse

from ingot.cli import serving
from ingot.cli.terminal import Terminal

PORT = 8737
# Options of the page and of every verb, which are not settings of a plan.
_NOT_PLAN_OPTIONS = ("web", "port", "host", "json", "quiet", "verbose")
_DEFAULTS = {"top": 5}


def add_page(parser: argparse.ArgumentParser) -> None:
    """Add the options of the web page to the parser of `ingot plan`."""
    page = parser.add_argument_group("web page")
    page.add_argument(
        "--web", action="store_true", help="serve the planner as a web page on this machine, until Ctrl-C"
    )
    serving.add_address(page, PORT)


def serve(args: argparse.Namespace, terminal: Terminal) -> int:
    """Serve the page until Ctrl-C. Raises ResourceError if the port is taken, MissingPartError if ingot[web] is not
    installed."""
    from ingot.errors import EXIT_OK, require

    require("starlette", "web")
    uvicorn = require("uvicorn", "web")
    from ingot.planner.web.app import LOOPBACK, make_app

    host = args.host or "127.0.0.1"
    listening = serving.listen(host, PORT if args.port is None else args.port)
    port = listening.getsockname()[1]
    local = host in ("localhost", *LOOPBACK, "::1")
    name = f"[{host}]" if ":" in host else host
    url = f"http://{name}:{port}/{_link(args)}"
    terminal.say(f"planner   {url}   (Ctrl-C ends it)")
    if not local:
        terminal.say(f"{terminal.style('warn', 'yellow')}      everyone who can reach {name}:{port} can use the page")
    terminal.result({"url": url, "port": port})
    app = make_app(LOOPBACK if local else ("*",))
    serving.run_until_interrupted(uvicorn, app, listening, terminal.say)
    return EXIT_OK


def _link(args: argparse.Namespace) -> str:
    """Return the given options of `ingot plan` as the query of the page's URL. Raises UsageError for an option that has
    no control on the page."""
    from urllib.parse import urlencode

    from ingot.errors import UsageError
    from ingot.planner.web.answers import settled
    from ingot.planner.web.settings import FIELDS, link_pairs, read_settings

    given = {
        key: value
        for key, value in vars(args).items()
        if key not in _NOT_PLAN_OPTIONS and value and value != _DEFAULTS.get(key)
    }
    given |= {"recipe": given.pop("fp8")} if "fp8" in given else {}
    if others := [f"--{key.replace('_', '-')}" for key in given if key not in FIELDS]:
        kept = ", ".join(f"--{key.replace('_', '-')}" for key in FIELDS if hasattr(args, key))
        raise UsageError(
            "E-WEB-OPTION",
            f"{', '.join(others)} cannot be used with --web",
            rule=f"the page has controls only for {kept}",
            fix=f"remove {', '.join(others)}",
            options=others,
        )
    state = read_settings((key, str(value)) for key, value in given.items())
    settled(state)
    return f"?{urlencode(link_pairs(state))}" if given else ""
