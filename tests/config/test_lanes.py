"""`link_lanes`: threads for sealed connections, which other connections cannot use."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from prfaas.config.clusters import PoolTable

SEALED = {"memory": "1GiB", "link_encryption": "sealed"}


def test_sealed_links_may_have_lanes() -> None:
    assert PoolTable.model_validate(SEALED | {"link_lanes": 4}).link_lanes == 4
    assert PoolTable.model_validate({"memory": "1GiB"}).link_lanes == 1


@pytest.mark.parametrize("encryption", ["tls", "network"])
def test_lanes_that_nothing_would_use_are_refused_with_the_setting_that_uses_them(
    encryption: str,
) -> None:
    with pytest.raises(ValidationError, match='set link_encryption = "sealed", or leave'):
        PoolTable.model_validate(SEALED | {"link_encryption": encryption, "link_lanes": 2})


@pytest.mark.parametrize("lanes", [0, 17, 1.5])
def test_their_number_has_limits(lanes: float) -> None:
    with pytest.raises(ValidationError):
        PoolTable.model_validate(SEALED | {"link_lanes": lanes})
