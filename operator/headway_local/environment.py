"""A container's environment variables, resolved as the kubelet does it.

Knows nothing of processes and volumes.
"""

import base64
import re
from collections.abc import Mapping

from headway_local.objects import Manifest, ObjectSource, PodConfigError

_REFERENCE = re.compile(r"\$\$|\$\(([-._a-zA-Z][-._a-zA-Z0-9]*)\)")
_SUBSCRIPT = re.compile(r"^metadata\.(labels|annotations)\['([^']+)'\]$")


def expand(text: str, variables: Mapping[str, str]) -> str:
    """$(VAR) by its value, $$ by $; a reference to an unknown variable stays as it is."""

    def replace(match: re.Match[str]) -> str:
        if match.group(0) == "$$":
            return "$"
        return variables.get(match.group(1), match.group(0))

    return _REFERENCE.sub(replace, text)


def field_value(path: str, pod: Manifest, *, pod_ip: str, host_ip: str) -> str:
    """The downward API: value of one field path; PodConfigError for one that does not exist."""
    meta, spec = pod["metadata"], pod.get("spec", {})
    plain = {
        "metadata.name": meta["name"],
        "metadata.namespace": meta.get("namespace", ""),
        "metadata.uid": meta.get("uid", ""),
        "spec.nodeName": spec.get("nodeName", ""),
        "spec.serviceAccountName": spec.get("serviceAccountName", ""),
        "status.podIP": pod_ip,
        "status.podIPs": pod_ip,
        "status.hostIP": host_ip,
        "status.hostIPs": host_ip,
    }
    if path in plain:
        return str(plain[path])
    if match := _SUBSCRIPT.match(path):
        return str((meta.get(match.group(1)) or {}).get(match.group(2), ""))
    if path in ("metadata.labels", "metadata.annotations"):
        values = meta.get(path.removeprefix("metadata.")) or {}
        return "\n".join(f'{key}="{value}"' for key, value in sorted(values.items()))
    raise PodConfigError(f"unsupported field path {path}")


def secret_data(secret: Manifest) -> dict[str, bytes]:
    """Decoded content of a Secret; `stringData` counts too (`headway up` has no server that folds it in)."""
    data = {key: base64.b64decode(value) for key, value in (secret.get("data") or {}).items()}
    return data | {key: value.encode() for key, value in (secret.get("stringData") or {}).items()}


def config_map_data(config_map: Manifest) -> dict[str, bytes]:
    """Content of a ConfigMap as bytes."""
    data = {key: value.encode() for key, value in (config_map.get("data") or {}).items()}
    return data | {
        key: base64.b64decode(value) for key, value in (config_map.get("binaryData") or {}).items()
    }


async def resolve(
    container: Manifest,
    pod: Manifest,
    source: ObjectSource,
    *,
    pod_ip: str,
    host_ip: str,
    base: Mapping[str, str],
) -> dict[str, str]:
    """The container's whole environment: `base` first, then envFrom, then env in order.

    Raises PodConfigError where a referenced object or key is missing and not optional.
    """
    namespace = pod["metadata"].get("namespace", "default")
    declared: dict[str, str] = {}

    async def content(kind: str, ref: Manifest) -> dict[str, bytes] | None:
        found = await (source.config_map if kind == "configmap" else source.secret)(namespace, ref["name"])
        if found is None:
            if ref.get("optional"):
                return None
            raise PodConfigError(f'{kind} "{ref["name"]}" not found')
        return config_map_data(found) if kind == "configmap" else secret_data(found)

    for entry in container.get("envFrom") or ():
        kind, ref = (
            ("configmap", entry["configMapRef"])
            if "configMapRef" in entry
            else ("secret", entry["secretRef"])
        )
        for key, value in (await content(kind, ref) or {}).items():
            declared[entry.get("prefix", "") + key] = value.decode()

    for entry in container.get("env") or ():
        name = entry["name"]
        origin = entry.get("valueFrom")
        if origin is None:
            declared[name] = expand(entry.get("value") or "", {**base, **declared})
        elif "fieldRef" in origin:
            declared[name] = field_value(origin["fieldRef"]["fieldPath"], pod, pod_ip=pod_ip, host_ip=host_ip)
        elif "configMapKeyRef" in origin or "secretKeyRef" in origin:
            kind = "configmap" if "configMapKeyRef" in origin else "secret"
            ref = origin["configMapKeyRef"] if kind == "configmap" else origin["secretKeyRef"]
            values = await content(kind, ref)
            if values is not None and ref["key"] in values:
                declared[name] = values[ref["key"]].decode()
            elif not ref.get("optional"):
                raise PodConfigError(f"couldn't find key {ref['key']} in {kind} {namespace}/{ref['name']}")
        else:
            raise PodConfigError(f"variable {name}: unsupported source {sorted(origin)}")
    return {**base, **declared}
