"""A pod as one machine can run it beside others: own ports, kept folders, no pause for load balancers.

Kubernetes gives each pod an address; on one machine all are 127.0.0.1. So the node changes the port numbers
in the pod (not the names), in its probes, and tells the program by its port options. Knows no processes.
"""

import copy
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

from headway_local.objects import Manifest

ENGINE_PORT_OPTIONS: Mapping[str, str] = {"http": "--port", "management": "--management-port"}
"""Name of a container port to the option that moves it."""


def free_port() -> int:
    """A port that is free on the loopback address at this moment."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def adapt(
    pod: Manifest,
    *,
    port_options: Mapping[str, str] = ENGINE_PORT_OPTIONS,
    kept_volumes: Mapping[str, Path] | None = None,
    new_port: Callable[[], int] = free_port,
) -> Manifest:
    """A copy of the pod in which every port that has an option is a new one.

    `kept_volumes` names emptyDir volumes that become folders of this machine, so that what is in them (a
    model cache) outlives the pod. A preStop hook that only sleeps goes: it gives load balancers time to
    learn that the pod leaves, and here the only one knows at once.
    """
    pod = copy.deepcopy(pod)
    for volume in pod["spec"].get("volumes") or ():
        if "emptyDir" in volume and (folder := (kept_volumes or {}).get(volume["name"])):
            del volume["emptyDir"]
            volume["hostPath"] = {"path": str(folder)}
    for container in pod["spec"]["containers"]:
        hook = (container.get("lifecycle") or {}).get("preStop") or {}
        if "sleep" in hook:
            del container["lifecycle"]["preStop"]
        numbers: dict[int, int] = {}
        for port in container.get("ports") or ():
            option = port_options.get(port.get("name", ""))
            if option is None:
                continue
            old = int(port["containerPort"])
            port["containerPort"] = numbers.setdefault(old, new_port())
            container["args"] = _with_option(container.get("args") or [], option, str(numbers[old]))
        for action in _actions(container):
            if isinstance(action.get("port"), int):
                action["port"] = numbers.get(action["port"], action["port"])
    return pod


def _actions(container: Manifest) -> list[Manifest]:
    """Everything in a container that names a port: probes and the preStop hook."""
    hooks = [container.get(f"{kind}Probe") for kind in ("startup", "readiness", "liveness")]
    hooks.append((container.get("lifecycle") or {}).get("preStop"))
    return [h[kind] for h in hooks if h for kind in ("httpGet", "tcpSocket") if kind in h]


def _with_option(args: list[str], option: str, value: str) -> list[str]:
    """The arguments with this option set once, at the end."""
    kept: list[str] = []
    skip = False
    for word in args:
        if skip:
            skip = False
        elif word == option:
            skip = True
        elif not word.startswith(f"{option}="):
            kept.append(word)
    return [*kept, option, value]
