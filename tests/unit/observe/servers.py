"""Real servers on loopback that receive alerts: HTTP and SMTP, healthy and not."""

import base64
import json
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Receiver:
    """A server, and what it got: (path, JSON, headers) of each request, or the lines of each mail."""

    def __init__(self, server, scheme: str):
        self.server, self.got = server, []
        self.host, self.port = server.server_address[:2]
        self.url = f"{scheme}://127.0.0.1:{self.port}"


@contextmanager
def serving(server, scheme: str) -> Iterator[Receiver]:
    server.daemon_threads = True
    server.receiver = receiver = Receiver(server, scheme)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def http_server(*statuses: int, drips: bool = False) -> Iterator[Receiver]:
    """A server that answers with these statuses, one after the other, and with the last one from then on. drips: it
    answers with a byte now and then, and never with a whole line."""
    left = list(statuses)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.server.receiver.got.append((self.path, json.loads(body), dict(self.headers)))
            while drips:
                try:
                    self.wfile.write(b"H")
                except OSError:
                    return
                time.sleep(0.02)
            status = left.pop(0) if len(left) > 1 else left[0]
            self.send_response(status)
            self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *arguments):
            pass

    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Handler), "http") as receiver:
        yield receiver


@contextmanager
def smtp_server(*, code: int = 250, password: str = "", silent: bool = False) -> Iterator[Receiver]:
    """A server of RFC 5321. code: its answer to a mail. password: it wants this one, by AUTH PLAIN. silent: it accepts
    connections, and answers nothing."""

    class Handler(socketserver.StreamRequestHandler):
        def say(self, text: str) -> None:
            self.wfile.write(f"{text}\r\n".encode())

        def handle(self):
            if silent:
                self.rfile.read(1)
                return
            self.say("220 here")
            for line in iter(self.rfile.readline, b""):
                word = line[:4].upper()
                if word == b"EHLO":
                    self.say("250-here\r\n250-8BITMIME\r\n250 AUTH PLAIN")
                elif word == b"AUTH":
                    given = base64.b64decode(line.split()[2]).split(b"\0")[2].decode()
                    self.say("235 yes" if given == password else f"535 no: {given}")
                elif word == b"DATA":
                    self.say("354 go on")
                    lines = []
                    for text in iter(self.rfile.readline, b".\r\n"):
                        lines.append(text.decode().rstrip("\r\n"))
                    self.server.receiver.got.append(lines)
                    self.say(f"{code} answer")
                else:
                    self.say("221 bye" if word == b"QUIT" else "250 fine")
                    if word == b"QUIT":
                        return

    with serving(socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler), "smtp") as receiver:
        yield receiver
