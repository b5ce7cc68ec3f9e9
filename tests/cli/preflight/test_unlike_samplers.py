"""Engines that would choose the first token of an answer and the others by different rules."""

import pytest

from prfaas.cli.preflight.agreement import unlike_samplers
from prfaas.config.deployment import Deployment
from prfaas.config.load import load_deployment
from tests.deployments import LAPTOP


def laptop(args: list[str], **routing: str) -> Deployment:
    found = load_deployment(LAPTOP)
    clusters = dict(found.clusters)
    [(name, engine)] = clusters["prfaas"].engines.items()
    engine = engine.model_copy(update={"args": [*engine.args, *args]})
    clusters["prfaas"] = clusters["prfaas"].model_copy(update={"engines": {name: engine}})
    table = found.routing.model_copy(update=routing)
    return found.model_copy(update={"clusters": clusters, "routing": table})


@pytest.mark.parametrize(
    "args",
    [
        ["--generation-config", "vllm"],
        ["--override-generation-config", '{"temperature": 0.5}'],
        ["--override-generation-config.temperature", "0.5"],
        ["--logits-processors", "some.module:Processor"],
    ],
)
def test_other_defaults_of_sampling_are_reported(args: list[str]) -> None:
    [line] = unlike_samplers(laptop(args))
    assert args[0].partition(".")[0] in line
    assert "prfaas-engine" in line
    assert not list(unlike_samplers(laptop(args, early_first_token="off")))


def test_what_chooses_no_token_is_not() -> None:
    assert not list(unlike_samplers(laptop(["--max-num-seqs", "3"])))
