"""The routes of an application, through the wrappers around it."""

from typing import Any

from fastapi.routing import APIRoute


def routes_of(app: Any) -> set[tuple[str, str]]:
    """(method in small letters, path as OpenAPI writes it) of each route."""
    while not hasattr(app, "routes"):
        app = getattr(app, "_app", None) or app.__closure__[0].cell_contents
    return {
        (method.lower(), route.path_format)
        for route in app.routes
        if isinstance(route, APIRoute)
        for method in route.methods
    }
