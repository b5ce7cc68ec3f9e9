"""Media in chat messages: what an engine is let fetch for a client.

An engine fetches what a URL names, with the network rights of its host: other services, a cloud's
metadata address, files. So a URL passes if it carries its bytes ("data:"), or if the operator has
listed its host under `model.media_domains`.

References:
    vLLM 0.32, `multimodal/media/connector.py` and `renderers/chat_utils.py`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection

from prfaas.gateway.http.json_codec import JsonObject
from prfaas.gateway.openai.messages import TEXT_KEYS
from prfaas.gateway.openai.validation import bad, shown

ANY_PUBLIC = "*"
"""Value of `model.media_domains` for all names except those of private networks."""
_URL_KEYS = {"image_url": "image_url", "audio_url": "audio_url", "video_url": "video_url"}
_URL_TYPES = frozenset({*_URL_KEYS, "input_image"})
_TYPES = _URL_TYPES | {*TEXT_KEYS, "input_audio", "tool_reference"}
_MEDIA_KEYS = frozenset(
    {*_URL_KEYS, "input_audio", "image_pil", "image_embeds", "audio_embeds", "video_embeds"}
    | {"prompt_embeds", "uuid"}
)
_URL = re.compile(r"https?://(\[[0-9a-f:.]{2,45}\]|[a-z0-9.-]{1,253})(:[0-9]{1,5})?(?:[/?#].*)?")
"""Pattern of an unambiguous URL: no user, no escapes and no unusual characters in the host."""
_PUBLIC_NAME = re.compile(r"(?:[a-z0-9](?:[a-z0-9-]*[a-z0-9])?\.)+[a-z][a-z0-9-]*[a-z0-9]")
_PRIVATE_ENDS = frozenset(
    {"localhost", "localdomain", "local", "internal", "intranet", "private", "lan", "home", "corp"}
    | {"arpa", "svc", "test"}
)
_TRANSLATED = tuple(map(ipaddress.IPv6Network, ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16")))
"""NAT64 and 6to4: the address within may be a private one. Teredo is not global to begin with."""


def check_media(messages: list[JsonObject], domains: Collection[str]) -> None:
    """Refuse parts of messages that would have an engine fetch what it may not.

    Args:
        messages: They have passed `parse_messages`.
        domains: Hosts that may be fetched from, in lower case; `ANY_PUBLIC` for all public names.

    Raises:
        RequestError: 400, naming the part.
    """
    for i, message in enumerate(messages):
        content = message.get("content")
        for j, part in enumerate(content if isinstance(content, list) else []):
            if isinstance(part, dict):
                _check_part(part, f"messages[{i}].content[{j}]", domains)


def _check_part(part: JsonObject, place: str, domains: Collection[str]) -> None:
    kind = part["type"]
    if kind not in _TYPES:
        raise bad(
            f"{place}.type must be text, image_url or the like, got {shown(kind)}", "messages"
        )
    # vLLM takes some keys for media whatever the type says, and a `uuid` for the name under which
    # it keeps them, for all tenants.
    own = {"image_url"} if kind == "input_image" else {kind}
    odd = sorted((_MEDIA_KEYS & part.keys()) - own)
    if odd:
        raise bad(f"{place} of type {kind!r} must not have {', '.join(odd)}", "messages")
    if kind in _URL_TYPES:
        key = _URL_KEYS.get(kind, "image_url")
        _check_url(part.get(key), f"{place}.{key}", domains)


def _check_url(value: object, place: str, domains: Collection[str]) -> None:
    url = value.get("url") if isinstance(value, dict) else value
    if not isinstance(url, str):
        raise bad(f"{place} must hold a URL, got {shown(value)}", "messages")
    if url[:5].lower() == "data:":
        return
    found = _URL.fullmatch(url.lower())
    if found is None:
        raise bad(
            f'{place} must be a "data:" URL, or one that begins with http:// or https:// and a '
            f"host; got {shown(url)}",
            "messages",
        )
    host = found[1].strip("[]")
    if host in domains or (ANY_PUBLIC in domains and _is_public(host)):
        return
    raise bad(
        f'{place}: nothing is fetched from {shown(host)}; send the media itself as a "data:" URL, '
        "or have the operator add the host to model.media_domains",
        "messages",
    )


def _is_public(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
        is_translated = address.version == 6 and any(address in net for net in _TRANSLATED)
        return address.is_global and not is_translated
    except ValueError:
        # A last label of digits would be an address in another notation.
        named = _PUBLIC_NAME.fullmatch(host) is not None
        return named and host.rpartition(".")[2] not in _PRIVATE_ENDS
