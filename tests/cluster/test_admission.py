"""Bad resources are refused by the API server itself, with the field named: the controller need not run."""

from cluster.controller import Controller
from headway_local.kube_api import ApiError, KubeApi
from support.bad_resources import BAD, GOOD, Bad, Json


def path(namespace: str) -> str:
    return f"/apis/headway.dev/v1alpha1/namespaces/{namespace}/inferencedeployments"


async def dry_run(api: KubeApi, namespace: str, body: Json) -> None:
    inside = {**body, "metadata": {**body["metadata"], "namespace": namespace}}
    await api.create(path(namespace), inside, dryRun="All", fieldValidation="Strict")


async def test_every_bad_resource_is_refused_with_its_field_named(
    controller: Controller, api: KubeApi, namespace: str
) -> None:
    """One test for the whole table: the plane is the same and a row takes milliseconds."""
    wrong: list[str] = []
    for bad in BAD:
        try:
            await dry_run(api, namespace, bad.body)
        except ApiError as error:
            if not _names(error, bad):
                wrong.append(f"{bad.title}: {bad.field} is not named in: {error}")
        else:
            wrong.append(f"{bad.title}: accepted")
    assert not wrong, "\n".join(wrong)


def _names(error: ApiError, bad: Bad) -> bool:
    """422 with a cause at the field or below it; 400 for a field that does not exist."""
    causes = (error.status.get("details") or {}).get("causes") or ()
    fields = [str(cause.get("field", "")) for cause in causes]
    if error.code == 422:
        return any(field.startswith(bad.field) for field in fields)
    return error.code == 400 and f'unknown field "{bad.field}' in str(error)


async def test_every_good_resource_is_accepted(controller: Controller, api: KubeApi, namespace: str) -> None:
    refused: list[str] = []
    for title, body in GOOD:
        try:
            await dry_run(api, namespace, body)
        except ApiError as error:
            refused.append(f"{title}: {error}")
    assert not refused, "\n".join(refused)
