"""Image names to command lines: what stands in for a container image where pods are processes.

Knows nothing of pods; the caller gives the container and the address.
"""

import fnmatch
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from headway_local.objects import Manifest, PodConfigError


@dataclass(frozen=True, slots=True)
class Image:
    """One rule. `entrypoint` and `default_arguments` are what ENTRYPOINT and CMD are in an image file.

    `address_arguments` come right after the entry point even where the container gives arguments of its own:
    all pods share one network stack here, so a server must be told which address is its own. Placeholders in
    any of them: {python}, {pod_ip}.
    """

    pattern: str  # fnmatch over the image reference, such as "*headway-engine*"
    entrypoint: tuple[str, ...]
    default_arguments: tuple[str, ...] = ()
    address_arguments: tuple[str, ...] = ()
    env: Mapping[str, str] | None = None


ENGINE = Image(
    "*headway-engine*", ("{python}", "-m", "headway_engine"), address_arguments=("--host", "{pod_ip}")
)
OPERATOR = Image("*headway-operator*", ("{python}", "-m", "headway_operator"))


@dataclass(frozen=True, slots=True)
class Images:
    """The rules, first match wins."""

    rules: tuple[Image, ...] = (ENGINE, OPERATOR)
    python: str = sys.executable

    def rule(self, image: str) -> Image:
        """The rule for an image reference; PodConfigError where none fits."""
        for rule in self.rules:
            if fnmatch.fnmatchcase(image, rule.pattern):
                return rule
        raise PodConfigError(f'image "{image}" has no local command')

    def env(self, image: str, pod_ip: str) -> dict[str, str]:
        """Variables that the image itself sets (ENV of an image file)."""
        return {key: self._fill(value, pod_ip) for key, value in (self.rule(image).env or {}).items()}

    def argv(self, container: Manifest, pod_ip: str) -> list[str]:
        """Command line as Kubernetes builds it: `command` replaces the entry point and its defaults, `args`
        the default arguments. $(VAR) is left as it stands."""
        rule = self.rule(container["image"])
        command, args = container.get("command"), container.get("args")
        if command:
            return [self._fill(word, pod_ip, only_python=True) for word in command] + list(args or ())
        words = rule.entrypoint + rule.address_arguments
        tail = list(args) if args else [self._fill(word, pod_ip) for word in rule.default_arguments]
        return [self._fill(word, pod_ip) for word in words] + tail

    def _fill(self, word: str, pod_ip: str, *, only_python: bool = False) -> str:
        if only_python:
            # In the image, `python` is the one that has our packages.
            return self.python if word in ("python", "python3") else word
        return word.replace("{python}", self.python).replace("{pod_ip}", pod_ip)
