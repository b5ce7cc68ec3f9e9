"""Engines fetch nothing for a client that the operator has not allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prfaas.config.clusters import EngineTable
from prfaas.config.deployment import ModelTable
from prfaas.engines.launch import engine_command
from prfaas.errors import RequestError
from prfaas.gateway.openai.messages import check_media
from tests.gateway.conftest import World, running

DATA = "data:image/png;base64,AAAA"
INSIDE = (
    "http://127.0.0.1/x",
    "http://169.254.169.254/latest/meta-data/",
    "http://10.0.0.1:8000/metrics",
    "http://[::1]/",
    "http://[::ffff:127.0.0.1]/",
    "http://[fe80::1]/",
    "http://0.0.0.0/",
    "http://2130706433/",
    "http://127.1/",
    "http://0x7f.0.0.1/",
    "http://0x7f000001/",
    "http://localhost/",
    "http://pd-engine:8100/v1/models",
    "http://metadata.google.internal/",
    "http://files.corp/",
    "http://[64:ff9b::a9fe:a9fe]/latest/meta-data/",
    "http://[2002:7f00:1::]/",
    "http://[2001:0:7f00:1::]/",
    "http://kubernetes.default.svc/",
    "http://db.localdomain/",
)
STRANGE = (
    "file:///etc/passwd",
    "FILE:///etc/passwd",
    "ftp://example.com/x",
    "gopher://example.com/x",
    "//example.com/x",
    "example.com/x",
    "http:///x",
    "http://example.com@127.0.0.1/",
    "http://user:word@example.com/",
    "http://example.com\\@127.0.0.1/",
    "http://exa mple.com/",
    "http://example.com\n/",
    "http://ex%61mple.com/",
    "http://еxample.com/",
    " http://example.com/",
    "",
    7,
    None,
    {"url": None},
)


def part(kind: str, url: object) -> dict[str, Any]:
    return {"type": kind, kind: {"url": url}}


def check(content: dict[str, Any], *domains: str) -> None:
    check_media([{"role": "user", "content": [content]}], frozenset(domains))


@pytest.mark.parametrize("kind", ["image_url", "audio_url", "video_url"])
@pytest.mark.parametrize("url", [*INSIDE, *STRANGE])
def test_nothing_inside_is_fetched(kind: str, url: object) -> None:
    for domains in ((), ("*",), ("*", "example.com")):
        with pytest.raises(RequestError, match=r"messages\[0\]\.content\[0\]") as caught:
            check(part(kind, url), *domains)
        assert caught.value.status == 400


def test_nothing_at_all_is_fetched_without_a_list() -> None:
    with pytest.raises(RequestError, match=r"model\.media_domains"):
        check(part("image_url", "https://example.com/cat.png"))
    check(part("image_url", DATA))
    check(part("image_url", DATA.upper()))
    check({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}})
    check({"type": "text", "text": "http://127.0.0.1/"})


@pytest.mark.parametrize(
    "url",
    ["https://example.com/cat.png", "HTTP://EXAMPLE.com:8080?a=@b", "https://example.com"],
)
def test_a_listed_host_is_fetched_from(url: str) -> None:
    check(part("image_url", url), "example.com")
    check({"type": "input_image", "image_url": url}, "example.com")
    check(part("video_url", url), "*")
    with pytest.raises(RequestError):
        check(part("image_url", url), "other.com", "xample.com", "com")


def test_an_operator_may_list_an_address() -> None:
    check(part("image_url", "http://10.0.0.1/x"), "10.0.0.1")
    check(part("image_url", "http://[fd00::1]:8080/x"), "fd00::1")
    check(part("image_url", "http://8.8.8.8/x"), "*")


@pytest.mark.parametrize(
    "smuggled",
    [
        {"type": "text", "text": "x", "uuid": "a", "image_url": "http://127.0.0.1/"},
        {"type": "text", "text": "x", "video_url": {"url": "file:///etc/passwd"}},
        part("image_url", DATA) | {"audio_url": {"url": "http://127.0.0.1/"}},
        part("image_url", DATA) | {"uuid": "another tenant's"},
        {"type": "image_pil", "image_pil": "x"},
        {"type": "image_embeds", "image_embeds": "x"},
        {"type": "prompt_embeds", "data": "x"},
        {"type": "file", "file": {"file_id": "x"}},
        {"type": "something_new", "url": "http://127.0.0.1/"},
    ],
)
def test_vllms_other_ways_to_name_media_are_refused(smuggled: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"messages\[0\]\.content\[0\]"):
        check(smuggled, "*")


async def test_a_refused_url_reaches_no_engine(world: World) -> None:
    content = [part("image_url", "http://169.254.169.254/latest/meta-data/")]
    body = {"messages": [{"role": "user", "content": content}]}
    status, answer = await world.post(body, "/v1/chat/completions")
    assert status == 400
    assert answer["error"]["param"] == "messages"
    assert not world.decode.calls
    content[0] = part("image_url", DATA)
    status, _ = await world.post(body, "/v1/chat/completions")
    assert status == 200
    assert world.decode.calls[-1].body["messages"][0]["content"] == content


async def test_the_deployments_list_counts(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    model = {"media_domains": ["Images.Example.com"]}
    async with running(checkpoint, identities, tmp_path / "state", model=model) as world:
        for host, expected in (("images.example.com", 200), ("example.com", 400)):
            content = [part("image_url", f"https://{host}/cat.png")]
            body = {"messages": [{"role": "user", "content": content}]}
            status, _ = await world.post(body, "/v1/chat/completions")
            assert status == expected


@pytest.mark.parametrize(
    ("domains", "expected"),
    [([], ["none.invalid"]), (["A.com", "b.com"], ["a.com", "b.com"]), (["a.com", "*"], None)],
)
def test_engines_that_are_started_get_the_list(
    domains: list[str], expected: list[str] | None
) -> None:
    model = ModelTable(name="tiny", path="x", media_domains=domains)
    engine = EngineTable(pool="p", args=["--seed", "7"])
    command = engine_command("e", engine, model, ("127.0.0.1", 1), Path("p.sock"), "run")
    flag = "--allowed-media-domains"
    assert (flag in command.args) is (expected is not None)
    if expected is not None:
        start = command.args.index(flag) + 1
        assert command.args[start : start + len(expected)] == expected
        assert command.args[start + len(expected)].startswith("--")
    assert command.env["VLLM_MEDIA_URL_ALLOW_REDIRECTS"] == "0"
