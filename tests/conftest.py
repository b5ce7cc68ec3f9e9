"""What all tests share."""

from pathlib import Path

import pytest
from hypothesis import settings

from prfaas.wire.identity import make_authority, make_identity

# A slow example on a busy machine is no finding; the timeout of every test stands.
settings.register_profile("prfaas", deadline=None)
settings.load_profile("prfaas")


@pytest.fixture(scope="session")
def identities(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the parts of a deployment, and of a stranger that its authority knows."""
    directory = tmp_path_factory.mktemp("identities")
    make_authority(directory)
    for name in ("gateway", "prfaas-pool", "pd-pool", "stranger"):
        make_identity(directory, name)
    return directory
