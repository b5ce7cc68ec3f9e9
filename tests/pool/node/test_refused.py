"""A refused peer learns the reason, retries ever more rarely, and fills no log."""

from pathlib import Path

import pytest

from prfaas import log_throttle
from prfaas.errors import ConfigError
from prfaas.log_throttle import LogThrottle
from prfaas.pool.node.store_room import check_limits
from tests.pool.conftest import World
from tests.pool.sites import until


@pytest.mark.parametrize("gateways", ["gateway", "prfaas-pool"])
async def test_a_pool_that_may_not_push_says_so_once_at_both_ends(
    world: World, caplog: pytest.LogCaptureFixture, gateways: str
) -> None:
    """It is a stranger, or has another role there: a stranger is told no names."""
    pd = await world.start_pd(sources=frozenset({"other"}), gateways=frozenset({gateways}))
    await world.start("prfaas-pool")
    await until(lambda: pd.metric("connections_refused_total", port="link") >= 4)
    lines = [record.getMessage() for record in caplog.records]
    here = [line for line in lines if "link to pd-pool" in line]
    [why] = here
    assert "refuses us" in why
    assert ("other" in why) is (gateways == "prfaas-pool")
    assert len([line for line in lines if line.startswith("connection")]) == 1


def test_a_thing_is_said_once_a_minute_and_not_too_many_are() -> None:
    now = [0]
    new = LogThrottle(lambda: now[0]).is_new
    assert [new("a"), new("a"), new("b")] == [True, False, True]
    assert sum(new(str(n)) for n in range(1000)) == log_throttle.TEXTS_MAX - 2
    now[0] = log_throttle.EVERY_NS
    assert new("a")


def test_limits_that_no_host_could_reach_are_refused(tmp_path: Path) -> None:
    check_limits(1 << 20, tmp_path / "not" / "there" / "yet", 1 << 20)
    with pytest.raises(ConfigError, match="memory are more than"):
        check_limits(900 << 40, None, 0)
    with pytest.raises(ConfigError, match="--disk-limit less"):
        check_limits(1 << 20, tmp_path, 1 << 62)
    group = tmp_path / "memory.max"
    group.write_text("4096\n")
    with pytest.raises(
        ConfigError, match=r"8\.0 KiB of memory are more than the 4\.0 KiB that this host has"
    ):
        check_limits(8192, None, 0, cgroup_max=group)
    group.write_text("max\n")
    check_limits(4097, None, 0, cgroup_max=group)
