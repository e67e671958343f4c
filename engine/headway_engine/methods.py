"""Methods of HTTP that no route speaks of: HEAD is a GET without its body, and a 405 says what is allowed.

Alike at both ports. Knows nothing of the routes.
"""

from starlette.applications import Starlette
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send


def heads(app: ASGIApp) -> ASGIApp:
    """The application, with an answer to HEAD wherever it has one to GET. The server leaves the body out:
    it still knows what was asked. Which route it was is told to whoever watches the request."""

    async def asked(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await app(scope, receive, send)
            return
        as_get = {**scope, "method": "GET"}
        try:
            await app(as_get, receive, send)
        finally:
            if "route" in as_get:
                scope["route"] = as_get["route"]

    return asked


def allowed(app: Starlette, scope: Scope) -> str:
    """The `Allow` header for a path: the methods of all its routes. Each route knows only its own."""
    methods: set[str] = set()
    for route in app.routes:
        if isinstance(route, Route) and route.matches(scope)[0] is not Match.NONE:
            methods |= set(route.methods or ())
    return ", ".join(sorted(methods | ({"HEAD"} if "GET" in methods else set())))
