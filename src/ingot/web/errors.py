"""Answers of the servers to errors: JSON {found, rule, fix} for the page, and a traceback in the terminal for bugs."""

import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ingot.errors import IngotError


def error_handlers(broken: str, fix: str) -> Mapping[Any, Callable[[Request, Exception], Any]]:
    """Return the handlers of a Starlette application. broken, fix: what the page says after an internal error."""

    async def internal(request: Request, error: Exception) -> Response:
        traceback.print_exception(error, file=sys.stderr)
        return _answer(500, broken, fix=fix)

    return {IngotError: _refused, HTTPException: _no_such_thing, Exception: internal}


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, IngotError)
    return _answer(400, error.found, error.rule, error.fix)


async def _no_such_thing(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _answer(error.status_code, str(error.detail))


def _answer(status: int, found: str, rule: str = "", fix: str = "") -> Response:
    return JSONResponse({"found": found, "rule": rule, "fix": fix}, status_code=status)
