"""The options and the socket of a web page that a command serves until Ctrl-C."""

import argparse
import contextlib
import os
import sys
import threading

from ingot.cli.arguments import count

_IDLE_SECONDS = 0.5


def add_address(group: argparse._ArgumentGroup, port: int) -> None:
    """Add --port and --host. port: the default."""
    group.add_argument(
        "--port",
        type=count("port", 0, 65_535),
        metavar="N",
        help=f"port of the page (default: {port}; 0: any free port)",
    )
    group.add_argument(
        "--host", metavar="NAME", help="address of the page (default: 127.0.0.1, reachable from this machine only)"
    )


def is_asked(args: argparse.Namespace, verb: str, port: int) -> bool:
    """Return True if --web is given. Raises UsageError for --port or --host without --web."""
    from ingot.errors import UsageError

    if not args.web and (args.port is not None or args.host):
        raise UsageError(
            "E-WEB-OPTION-ALONE",
            "--port or --host is given without --web",
            rule="--port and --host are options of the web page",
            fix=f"add --web: ingot {verb} --web --port {port}",
        )
    return args.web


def run_until_interrupted(uvicorn, app, listening, say, end_streams=lambda: None) -> None:
    """Serve `app` on the socket `listening` until Ctrl-C. uvicorn: the module. say: prints a line. end_streams: ends
    the answers that last as long as the server.

    Answers get three seconds to end. A thread that still makes one then, or waits for a disk that does not answer, is
    left: the process ends at once, with exit code 0, because it would wait for it otherwise.
    """
    import logging

    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_keep_alive=20, timeout_graceful_shutdown=3
    )
    server = uvicorn.Server(config)
    shut_down, log = server.shutdown, logging.getLogger("uvicorn.error")

    async def end(sockets=None) -> None:
        end_streams()
        log.addFilter(_nothing)  # of each answer that is left, a traceback
        await shut_down(sockets)

    server.shutdown = end
    try:
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[listening])
    finally:
        log.removeFilter(_nothing)
    if _has_busy_threads():
        say("ended     before an answer to the page was ready")
        sys.stdout.flush()
        os._exit(0)


def _nothing(record) -> bool:
    return False


def _has_busy_threads() -> bool:
    """Return whether a thread works for which the end of this process would wait."""
    others = [one for one in threading.enumerate() if one is not threading.main_thread() and not one.daemon]
    for one in others:
        one.join(_IDLE_SECONDS)  # idle threads of a loop that was closed are ending now
    return any(one.is_alive() for one in others)


def listen(host: str, port: int):
    """Return a socket that listens. Raises UsageError for a host that is none, ResourceError if the port is taken."""
    import socket

    from ingot.errors import ResourceError, UsageError

    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError):  # the latter: a label that is empty or too long
        raise UsageError(
            "E-WEB-HOST",
            f"--host {host} cannot be resolved to an address",
            rule="--host is an address or a name of this machine",
            fix="use --host 127.0.0.1",
            host=host,
        ) from None
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address)
    except OSError as error:
        listening.close()
        raise ResourceError(
            "E-WEB-PORT",
            f"cannot listen on {host}:{port}: {error.strerror}",
            rule="the web page needs a port that no other program uses",
            fix="use another port; --port 0 takes any free port",
            host=host,
            port=port,
        ) from None
    listening.listen(128)
    return listening
