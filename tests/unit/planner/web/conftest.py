"""The page's server, asked in this process."""

import pytest


@pytest.fixture(scope="module")
def client():
    pytest.importorskip("starlette", reason="needs the part web: pip install 'ingot[web]'")
    pytest.importorskip("httpx2", reason="needs httpx2, which asks the server")
    from starlette.testclient import TestClient

    from ingot.planner.web import searching
    from ingot.planner.web.app import make_app

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(searching, "DEADLINE_SECONDS", 600.0)  # the machine may be busy
        with TestClient(make_app(), base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
            yield client
