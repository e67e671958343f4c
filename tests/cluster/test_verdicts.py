"""Random resources: the API server and the local check accept and refuse the same ones."""

import json
import random
import re

from cluster.controller import Controller
from cluster.plane import Plane
from headway_operator.resource import InvalidSpec, parse
from headway_operator.schema import admit
from support.random_specs import random_spec
from support.resources import Json, a_body

RESOURCES = 300


def accepted_here(body: Json) -> bool:
    try:
        parse(admit(body))
    except InvalidSpec:
        return False
    return True


def accepted_there(plane: Plane, bodies: list[Json]) -> set[str]:
    """Names that the API server would store; one bundle, judged one by one."""
    bundle = {"apiVersion": "v1", "kind": "List", "items": bodies}
    arguments = ("apply", "--dry-run=server", "--validate=strict", "-f", "-")
    done = plane.kubectl(*arguments, stdin=json.dumps(bundle), check=False)
    return set(re.findall(r"/(r\d+) created \(server", done.stdout))


def test_both_give_the_same_verdict(plane: Plane, controller: Controller, namespace: str) -> None:
    chance = random.Random(20)
    bodies = [a_body(f"r{number}", namespace=namespace) for number in range(RESOURCES)]
    for body in bodies:
        body["spec"] = random_spec(chance)
    here = {body["metadata"]["name"] for body in bodies if accepted_here(body)}
    there = accepted_there(plane, bodies)
    assert RESOURCES / 5 < len(there) < RESOURCES * 4 / 5, "the draw says little: nearly all on one side"
    differing = [body["spec"] for body in bodies if body["metadata"]["name"] in here ^ there]
    assert differing == []
