"""JSON to an address on the web, and mail to an SMTP server, each within a time limit. No error shows a secret.

A server that accepts a connection and then sends byte after byte for ever satisfies the time limit of each read. So a
timer closes the connection when the time of the whole attempt is over.
"""

import base64
import http.client
import json
import os
import smtplib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from email.message import EmailMessage
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from ingot.schema.alerting import EmailChannel

_AGAIN = (408, 425, 429)  # statuses after which another attempt may succeed; and all from 500 on


class SendFailed(Exception):
    """An attempt that failed. reason: in words, without addresses and answers of servers: they may hold secrets.
    again: another attempt may succeed."""

    def __init__(self, reason: str, *, again: bool):
        super().__init__(reason)
        self.reason, self.again = reason, again


def secret(variable: str) -> str:
    """Return the value of an environment variable. Raises SendFailed if it is not set."""
    if not (value := os.environ.get(variable, "").strip()):
        raise SendFailed(f"the environment variable {variable} is not set", again=False)
    return value


def post_json(variable: str, body: Any, seconds: float, path: str = "") -> None:
    """Post `body` as JSON to the address in an environment variable. path: appended to that of the address.

    Redirections are not followed. Proxies come from the usual environment variables. Raises SendFailed.
    """
    address = secret(variable)
    wrong = SendFailed(f"{variable} has no address that begins with http:// or https://", again=False)
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise wrong from None
    if parts.scheme not in ("http", "https") or not host:
        raise wrong
    headers = {"Content-Type": "application/json", "User-Agent": "ingot", "Connection": "close"}
    if parts.username:
        account = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
        headers["Authorization"] = f"Basic {base64.b64encode(account).decode()}"
    target = (parts.path.rstrip("/") if path else parts.path) + path + (f"?{parts.query}" if parts.query else "")
    secure = parts.scheme == "https"
    proxy = None if proxy_bypass(host) else getproxies().get(parts.scheme)
    try:
        via = urlsplit(proxy if proxy and "://" in proxy else f"http://{proxy}") if proxy else None
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind((via and via.hostname) or host, via.port if via else port, timeout=seconds)
        if via and secure:
            connection.set_tunnel(host, port)
        elif via:
            target = f"http://{host}{f':{port}' if port else ''}{target or '/'}"
            headers["Host"] = host
        with _within(seconds, connection):
            connection.request("POST", target or "/", json.dumps(body, ensure_ascii=False).encode(), headers)
            status = connection.getresponse().status
    except Exception as error:  # also of a connection that the timer closed
        raise _failed(error, seconds) from None
    if status >= 300:
        raise SendFailed(f"HTTP {status}", again=status >= 500 or status in _AGAIN)


def send_mail(email: EmailChannel, message: EmailMessage, seconds: float) -> None:
    """Send `message` to the server of a channel. Raises SendFailed."""
    user, password = (secret(name) if name else "" for name in (email.user_env, email.password_env))
    try:
        context = ssl.create_default_context()
        # The name of this machine without asking the network for it, which may take long.
        options = {"timeout": seconds, "local_hostname": socket.gethostname() or "localhost"}
        client = smtplib.SMTP_SSL(context=context, **options) if email.security == "tls" else smtplib.SMTP(**options)
        vars(client)["_host"] = (
            email.host
        )  # smtplib checks certificates against it, and sets it only if it connects at once
        with _within(seconds, client):
            client.connect(email.host, email.port)
            if email.security == "starttls":
                client.starttls(context=context)
            if user:
                client.login(user, password)
            client.send_message(message)
            with suppress(smtplib.SMTPException, OSError):  # it has the message
                client.quit()
    except Exception as error:
        raise _failed(error, seconds) from None


@contextmanager
def _within(seconds: float, connection: Any) -> Iterator[None]:
    """Close `connection` when `seconds` are over, and at the end."""
    began = time.monotonic()

    def cut() -> None:
        if (sock := connection.sock) is not None:
            with suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)  # also below TLS

    timer = threading.Timer(seconds, cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    except Exception:
        if time.monotonic() - began >= seconds:  # smtplib reports it as a connection that was closed
            raise TimeoutError from None
        raise
    finally:
        timer.cancel()
        with suppress(Exception):
            connection.close()


def _failed(error: Exception, seconds: float) -> SendFailed:
    """Describe an error by its kind alone."""
    if isinstance(error, SendFailed):
        return error
    if isinstance(error, TimeoutError):
        return SendFailed(f"no answer within {seconds:g} s", again=True)
    if isinstance(error, socket.gaierror):
        return SendFailed("the name of its host has no address", again=True)
    if isinstance(error, ssl.SSLCertVerificationError):
        return SendFailed("its certificate is not trusted", again=False)
    if isinstance(error, ssl.SSLError):
        return SendFailed("no secure connection (TLS)", again=True)
    if isinstance(error, smtplib.SMTPAuthenticationError):
        return SendFailed("the account or its password is refused", again=False)
    if isinstance(error, smtplib.SMTPNotSupportedError):
        return SendFailed("the server lacks what `security` asks for", again=False)
    if isinstance(error, smtplib.SMTPResponseException):
        return SendFailed(f"SMTP {error.smtp_code}", again=400 <= error.smtp_code < 500)
    if isinstance(error, smtplib.SMTPRecipientsRefused):
        return SendFailed("the addresses are refused", again=False)
    if isinstance(error, OSError) and error.strerror:
        return SendFailed(error.strerror.lower(), again=True)
    return SendFailed(f"no answer that can be read ({type(error).__name__})", again=True)
