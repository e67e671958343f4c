"""Starts a control plane to play with, and prints how to reach it; runs until Ctrl-C.

The plane lives in a network namespace of its own; its API server is also reachable at a loopback port of the
machine. A user without privileges gets the namespace inside a user namespace.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOCKET_ENV = "HEADWAY_CLUSTER_SOCKET"
# In place of this folder, where this script would hide the package of the same name.
sys.path[0] = str(ROOT / "tests")


def entrance() -> socket.socket:
    """The loopback socket for the API server, made in the machine's own network.

    Without privileges this process starts itself anew inside `unshare`, which takes the socket along.
    """
    if SOCKET_ENV in os.environ:
        return socket.socket(fileno=int(os.environ[SOCKET_ENV]))
    listening = socket.create_server(("127.0.0.1", 0))
    if os.geteuid() != 0:
        if shutil.which("unshare") is None:
            raise SystemExit("this needs root, or the command `unshare` (util-linux)")
        listening.set_inheritable(True)
        os.environ[SOCKET_ENV] = str(listening.fileno())
        os.execvp("unshare", ["unshare", "--map-root-user", "--net", sys.executable, *sys.argv])
    return listening


def kubeconfig(admin: Path, port: int, target: Path) -> None:
    """The admin's kubeconfig with the address that the machine sees."""
    config = json.loads(admin.read_text())
    config["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{port}"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.touch(mode=0o600)
    target.write_text(json.dumps(config, indent=1))


def main() -> int:
    """Command line; see --help."""
    parser = argparse.ArgumentParser(description="A real Kubernetes control plane on this machine.")
    parser.add_argument("--lane", choices=["1.37", "1.34"], default="1.37", help="Kubernetes minor")
    parser.add_argument("--gpus", type=int, default=4, help="made-up GPUs of the node")
    switch = argparse.BooleanOptionalAction
    parser.add_argument("--headway", action=switch, default=True, help="install the chart")
    options = parser.parse_args()
    listening = entrance()
    from cluster.node import Node
    from cluster.plane import API_PORT, PLANE_IP, Plane, PlaneError
    from headway_local.proxy import Forwarder

    print("==> starting etcd, API server, controllers, scheduler", flush=True)
    try:
        plane = Plane.start(options.lane)
    except PlaneError as error:
        raise SystemExit(str(error)) from None
    node = None
    try:
        node = Node(plane, gpus=options.gpus)
        door = Forwarder("127.0.0.1", 0, lambda: [(PLANE_IP, API_PORT)])
        port = node.call(door.start(listening))
        path = ROOT / ".headway" / "kubeconfig"
        kubeconfig(plane.admin, port, path)
        if options.headway:
            print("==> installing the chart", flush=True)
            chart = ["install", "headway", str(ROOT / "charts/headway"), "--set", "replicas=1"]
            plane.helm(*chart, "-n", "headway-system", "--create-namespace", "--wait", "--timeout", "120s")
        print(
            f"""
A Kubernetes {options.lane} control plane is running; pods are processes of this machine. In another terminal:

  export KUBECONFIG={path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}
  kubectl get nodes
  kubectl apply -f examples/quickstart.yaml
  kubectl get infd --watch
  kubectl get --raw /api/v1/namespaces/default/services/chat:http/proxy/v1/models
  echo '{{"model": "chat", "messages": [{{"role": "user", "content": "What is the capital of France?"}}]}}' |
    kubectl create --raw /api/v1/namespaces/default/services/chat:http/proxy/v1/chat/completions -f -

kubectl logs, exec and port-forward do not work here. Logs and volumes of pods: {plane.folder}/pods.
Ctrl-C ends everything.
""",
            flush=True,
        )
        ended = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: ended.set())
        ended.wait()
        print("==> stopping", flush=True)
    finally:
        if node is not None:
            node.stop()
        plane.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
