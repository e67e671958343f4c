"""HEAD, OPTIONS and methods that a path does not have, at both ports."""

import httpx
import pytest

from support import fake_engine
from support.engine_server import engine_server


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with engine_server(tmp_path_factory.mktemp("engine"), command=fake_engine.COMMAND) as e:
        yield e


@pytest.mark.parametrize(("management", "path"), [(False, "/v1/models"), (True, "/readyz")])
def test_head_is_get_without_the_body(engine, management, path):
    """As load balancers ask."""
    url = (engine.management_url if management else engine.url) + path
    with httpx.Client(timeout=30) as http:
        got, asked = http.get(url), http.head(url)
        assert (asked.status_code, asked.content) == (200, b"")
        assert asked.headers["content-length"] == str(len(got.content))
        assert http.get(url).content == got.content  # the connection is still good


@pytest.mark.parametrize(
    ("management", "method", "path", "allow"),
    [
        (False, "GET", "/v1/completions", "POST"),
        (False, "OPTIONS", "/v1/completions", "POST"),
        (False, "DELETE", "/v1/models/tiny", "GET, HEAD"),
        (False, "HEAD", "/v1/completions", "POST"),
        (True, "DELETE", "/control/limits", "GET, HEAD, PUT"),
        (True, "POST", "/metrics", "GET, HEAD"),
    ],
)
def test_another_method_is_told_which_there_are(engine, management, method, path, allow):
    """One path may have several routes; Allow names the methods of all."""
    url = (engine.management_url if management else engine.url) + path
    answer = httpx.request(method, url, timeout=30)
    assert answer.status_code == 405
    assert answer.headers["allow"] == allow
    if method != "HEAD":
        told = answer.json()
        assert (told if management else told["error"])["message"].startswith("Method Not Allowed")


def test_unknown_paths_are_told_in_the_form_of_their_port(engine):
    """And not in the framework's."""
    assert httpx.get(f"{engine.url}/nowhere", timeout=30).json()["error"]["type"] == "not_found_error"
    told = httpx.get(f"{engine.management_url}/nowhere", timeout=30)
    assert (told.status_code, told.json()) == (404, {"field": None, "message": "Not Found"})
