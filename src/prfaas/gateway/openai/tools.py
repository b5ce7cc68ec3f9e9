"""Tools as chat templates get them."""

from __future__ import annotations

from typing import Any

import msgspec

from prfaas.gateway.http.json_codec import JsonObject
from prfaas.gateway.openai.validation import bad, shown, typed

_ALWAYS = ("description", "parameters")


class Function(msgspec.Struct):
    """A function that a chat may call; templates print its keys in this order."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class Tool(msgspec.Struct):
    """A tool of a chat."""

    function: Function
    type: str = "function"
    defer_loading: bool | None = None


def parse_tools(tools: object) -> list[JsonObject]:
    """The tools of a chat request, keys in vLLM's order, its defaults added, the rest left out.

    Templates print tools as JSON, so order and absent keys make tokens.

    Raises:
        RequestError: 400, naming the tool.

    References:
        vLLM 0.32, `ChatCompletionToolsParam` and `FunctionDefinition`, `model_dump`.
    """
    found: list[Tool] = typed(tools or [], list[Tool], "tools")
    return [_tool(tool, f"tools[{i}]") for i, tool in enumerate(found)]


def _tool(tool: Tool, place: str) -> JsonObject:
    if tool.type != "function":
        raise bad(f'{place}.type must be "function", got {shown(tool.type)}', "tools")
    deferred, function = tool.defer_loading, tool.function
    if function.defer_loading is None:
        function.defer_loading = deferred
    values = msgspec.structs.asdict(function).items()
    kept = {key: value for key, value in values if value is not None or key in _ALWAYS}
    parsed: JsonObject = {"type": "function", "function": kept}
    return parsed if deferred is None else parsed | {"defer_loading": deferred}
