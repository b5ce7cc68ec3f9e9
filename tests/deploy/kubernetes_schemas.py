"""Schemas of the objects that Kubernetes and its operators accept."""

import json
from functools import cache
from pathlib import Path

import jsonschema
from kubernetes_validate import utils

from .charts import Object

SCHEMAS = Path(__file__).parent / "schemas"
utils.schema_contents = cache(utils.schema_contents)  # 2 MB are read a call


@cache
def validator(kind: str) -> jsonschema.Draft202012Validator | None:
    file = SCHEMAS / f"{kind}.json"
    return jsonschema.Draft202012Validator(json.loads(file.read_text())) if file.exists() else None


@cache
def accepted(text: str, version: str) -> bool:
    """See that an object is valid; the same object of another cell is not looked at again."""
    found: Object = json.loads(text)
    custom = validator(found["kind"])
    if custom is None:
        assert utils.validate(found, version, strict=True) == version
        return True
    custom.validate(found)
    if found["kind"] == "LeaderWorkerSet":
        template = found["spec"]["leaderWorkerTemplate"]["workerTemplate"]
        selector = {"matchLabels": template["metadata"]["labels"]}
        wrapped = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "wrapped"}}
        utils.validate(
            {**wrapped, "spec": {"selector": selector, "template": template}}, version, strict=True
        )
    return True


def check(objects: list[Object], version: str) -> None:
    for each in objects:
        assert accepted(json.dumps(each, sort_keys=True), version)
    names = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert len(names) == len(set(names))
