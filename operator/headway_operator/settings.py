"""The controller's own settings: environment variables in, one frozen value out.

Every variable that is wrong is named in one error. Knows nothing of Kubernetes or of resources.
"""

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from headway_engine.logs import FORMAT_ENV, LogFormat

DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
DNS_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
LOG_LEVELS = ("debug", "info", "warning", "error")


class PullPolicy(StrEnum):
    """When the node fetches the engine image."""

    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


class SettingsError(ValueError):
    """One line per variable that cannot be used."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Fixed for the life of the process."""

    watch_namespaces: tuple[str, ...] = ()  # empty: all
    engine_image: str
    engine_pull_policy: PullPolicy = PullPolicy.IF_NOT_PRESENT
    host: str = "0.0.0.0"
    port: int = 8080
    lease_name: str = "headway-operator"
    namespace: str = "default"  # where the Lease lives
    identity: str = "headway"  # who holds the Lease
    log_level: str = "info"
    log_format: LogFormat = LogFormat.TEXT


def read(environment: Mapping[str, str]) -> Settings:
    """Settings from environment variables; SettingsError names every bad one."""
    problems: list[str] = []

    def text(name: str, default: str) -> str:
        return environment.get(name, "").strip() or default

    def check(ok: bool, name: str, rule: str) -> None:
        if not ok:
            problems.append(f"{name}={environment.get(name, '')!r}: {rule}")

    namespaces = tuple(
        dict.fromkeys(
            part.strip() for part in text("HEADWAY_WATCH_NAMESPACES", "").split(",") if part.strip()
        )
    )
    for namespace in namespaces:
        check(
            bool(DNS_LABEL.fullmatch(namespace)),
            "HEADWAY_WATCH_NAMESPACES",
            f"{namespace!r} is not a namespace name; use a comma-separated list, or nothing for all",
        )
    image = text("HEADWAY_ENGINE_IMAGE", "")
    check(bool(image), "HEADWAY_ENGINE_IMAGE", "the image of the engine must be named")
    policy = text("HEADWAY_ENGINE_PULL_POLICY", PullPolicy.IF_NOT_PRESENT)
    check(policy in list(PullPolicy), "HEADWAY_ENGINE_PULL_POLICY", f"must be one of {', '.join(PullPolicy)}")
    port = text("HEADWAY_OPERATOR_PORT", "8080")
    check(
        port.isdecimal() and 0 <= int(port) <= 65535,
        "HEADWAY_OPERATOR_PORT",
        "must be a port, 0 for any free",
    )
    lease = text("HEADWAY_LEASE_NAME", "headway-operator")
    check(bool(DNS_NAME.fullmatch(lease)), "HEADWAY_LEASE_NAME", "must be an object name")
    own_namespace = text("POD_NAMESPACE", "default")
    check(bool(DNS_LABEL.fullmatch(own_namespace)), "POD_NAMESPACE", "must be a namespace name")
    level = text("HEADWAY_LOG_LEVEL", "info").lower()
    check(level in LOG_LEVELS, "HEADWAY_LOG_LEVEL", f"must be one of {', '.join(LOG_LEVELS)}")
    log_format = text(FORMAT_ENV, LogFormat.TEXT).lower()
    check(log_format in list(LogFormat), FORMAT_ENV, f"must be one of {', '.join(LogFormat)}")
    if problems:
        raise SettingsError(problems)
    return Settings(
        watch_namespaces=namespaces,
        engine_image=image,
        engine_pull_policy=PullPolicy(policy),
        host=text("HEADWAY_OPERATOR_HOST", "0.0.0.0"),
        port=int(port),
        lease_name=lease,
        namespace=own_namespace,
        identity=text("POD_NAME", socket.gethostname()),
        log_level=level,
        log_format=LogFormat(log_format),
    )
