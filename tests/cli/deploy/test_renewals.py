"""Identities renewed by command, and by `prfaas up` while parts run."""

import asyncio
import datetime
from pathlib import Path

from prfaas.cli.deploy.renewals import renew_parts
from prfaas.cli.deploy.topology import lay_out, parts, prepare_identities
from prfaas.cli.supervision.supervisor import Supervisor
from prfaas.config.load import load_deployment
from prfaas.wire.identity import VALID_DAYS, identity_in
from tests.cli.conftest import Prfaas, one_line
from tests.cli.running_parts import DEPLOYMENT
from tests.cli.tiny_parts import QUICK, stopped

NEARLY = datetime.timedelta(days=VALID_DAYS - 1)


def test_identities_are_renewed_by_command(prfaas: Prfaas, tmp_path: Path) -> None:
    local = tmp_path / "identities"
    assert prfaas("identity", "gateway", "pd-pool", "--directory", local)[0] == 0
    before = identity_in(local, "gateway").key.read_bytes()
    # Nothing ends soon: a timer may run this every day.
    assert prfaas("identity", "--renew", "--directory", local) == (0, "", "")
    code, output, _ = prfaas("identity", "--renew", "gateway", "--directory", local)
    assert (code, output) == (0, f"{local}/gateway.pem\n{local}/gateway.key\n")
    assert identity_in(local, "gateway").key.read_bytes() != before


def test_a_renewal_that_can_not_be_is_one_line(prfaas: Prfaas, tmp_path: Path) -> None:
    assert "cannot be renewed" in one_line(
        prfaas("identity", "--renew", "nobody", "--directory", tmp_path)
    )
    args = ("identity", "--renew", "x", "--address", "a.example.net", "--directory", tmp_path)
    code, _, errors = prfaas(*args)
    assert code == 2
    assert "leave --address" in errors
    assert prfaas("identity", "--directory", tmp_path)[0] == 2


async def test_a_running_deployment_takes_up_what_was_renewed(tmp_path: Path) -> None:
    file = tmp_path / "deployment.toml"
    text = DEPLOYMENT.replace('"state"', f'"{tmp_path}/state"')
    file.write_text(text.replace('"identities"', f'"{tmp_path}/identities"'))
    deployment = load_deployment(file)
    deployment.state.mkdir()
    prepare_identities(deployment)
    (pools, _) = parts(lay_out(deployment, file))
    supervisor = Supervisor([pools], times=QUICK)
    async with stopped(supervisor):
        await supervisor.start()
        pid = pools[0].process.pid if pools[0].process else None
        now = datetime.datetime.now(datetime.UTC)
        assert renew_parts(supervisor, deployment, now) == []
        assert renew_parts(supervisor, deployment, now + NEARLY) == ["gateway", "pd-pool"]
        async with asyncio.timeout(30):
            while "identity_renewed" not in pools[0].log.read_text():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert pools[0].process is not None
        assert (pools[0].process.pid, pools[0].exit_code) == (pid, None)
