"""The guards of the pages' servers, as middleware: security headers, hosts, origins, and a token.

A page on this machine can be asked by every web site that its user visits. So a request needs a host name of this
machine (against DNS rebinding), and no foreign origin; a page about runs also needs a token, because other users of
this machine can reach a port of the loopback address.
"""

import hmac
import ipaddress
import socket
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
# Headers of every response. A page loads nothing from other sites, cannot be embedded in other pages, and is not
# cached.
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
}


class SecurityHeaders:
    """Middleware that adds HEADERS to every response."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def protected(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self._app(scope, receive, protected)


class OnlyHere:
    """Middleware that refuses requests of other web sites, and those that would change something.

    hosts: the host names that requests may have, besides IP addresses, which no foreign site can have as its name.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str]):
        self._app, self._hosts = app, {host.strip("[]").lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refusal := self._refusal(scope)) is not None:
            await refusal(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._is_known(_without_port(host)):
            return refused(400, "the host name of the request is unknown", "use the address that the command printed")
        if origin is not None and origin.lower() not in (f"http://{host.lower()}", f"https://{host.lower()}"):
            return refused(403, "the request comes from another web site", "open the page itself")
        # A link on another site may lead to the page, but no site may ask for its data.
        is_link = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
        if headers.get("sec-fetch-site", "none") not in ("same-origin", "none") and not is_link:
            return refused(403, "the request comes from another web site", "open the page itself")
        if scope["method"] not in ("GET", "HEAD"):
            return refused(405, "the page is read-only", "use GET")
        return None

    def _is_known(self, name: str) -> bool:
        if name in self._hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


class TokenGate:
    """Middleware that lets requests with the token through: as a cookie, or as `Authorization: Bearer TOKEN`.

    A request of `/?token=TOKEN` gets the cookie, and is sent on to `/`, so that the token is in no history and no
    referrer. cookie: its name; browsers send cookies to all ports of a host, so each server needs its own.
    """

    def __init__(self, app: ASGIApp, token: str, cookie: str):
        self._app, self._token, self._cookie = app, token.encode(), cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (answer := self._answer(scope)) is not None:
            await answer(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _answer(self, scope: Scope) -> Response | None:
        path, query = scope["path"], QueryParams(scope["query_string"])
        if path == "/" and "token" in query:
            if not self._is_token(query["token"]):
                return _denied()
            answer = RedirectResponse("/", status_code=303)
            answer.set_cookie(self._cookie, self._token.decode(), httponly=True, samesite="lax", path="/")
            return answer
        headers = Headers(scope=scope)
        given = headers.get("authorization", "").removeprefix("Bearer ").strip()
        given = given or _cookie_of(headers.get("cookie", ""), self._cookie)
        return None if self._is_token(given) else _denied()

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "replace"), self._token)


def names_of_host(host: str) -> tuple[str, ...]:
    """Return the host names that requests of a server may have that listens on `host`, besides IP addresses: also the
    names of this machine, if it can be reached from others."""
    if host in ("localhost", "::1", *LOOPBACK):
        return LOOPBACK
    return (*LOOPBACK, host, socket.gethostname(), socket.getfqdn())


def refused(status: int, found: str, fix: str, rule: str = "") -> Response:
    """Return an error as JSON."""
    return JSONResponse({"found": found, "rule": rule, "fix": fix}, status_code=status)


def _denied() -> Response:
    rule = "the page shows runs only to who has its token"
    return refused(401, "the token is missing or wrong", "open the address that the command printed", rule)


def _cookie_of(header: str, name: str) -> str:
    for part in header.split(";"):
        own, _, value = part.strip().partition("=")
        if own == name:
            return value
    return ""


def _without_port(host: str) -> str:
    """Return the lower-case name of a Host header, without its port and brackets."""
    name = host.lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.rpartition(":")[0] if ":" in name else name
