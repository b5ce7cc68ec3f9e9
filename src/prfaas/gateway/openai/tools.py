"""Tools as chat templates get them."""

from __future__ import annotations

from prfaas.gateway.http.json_codec import JsonObject
from prfaas.gateway.openai.validation import bad, shown

_FUNCTION_KEYS = ("name", "description", "parameters", "strict", "defer_loading")
_ALWAYS = ("description", "parameters")


def parse_tools(tools: object) -> list[JsonObject]:
    """The tools of a chat request, keys in vLLM's order, its defaults added, the rest left out.

    Templates print tools as JSON, so order and absent keys make tokens.

    Raises:
        RequestError: 400, naming the tool.

    References:
        vLLM 0.32, `ChatCompletionToolsParam` and `FunctionDefinition`, `model_dump`.
    """
    if not isinstance(tools, list):
        return []
    return [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]


def _tool(tool: object, place: str) -> JsonObject:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or not isinstance(function, dict):
        raise bad(f"{place} must be an object with a function, got {shown(tool)}", "tools")
    if tool.get("type", "function") != "function":
        raise bad(f'{place}.type must be "function", got {shown(tool["type"])}', "tools")
    deferred = tool.get("defer_loading")
    kept = {key: function.get(key) for key in _FUNCTION_KEYS}
    kept["defer_loading"] = deferred if kept["defer_loading"] is None else kept["defer_loading"]
    _check(kept, place)
    function = {key: value for key, value in kept.items() if value is not None or key in _ALWAYS}
    parsed: JsonObject = {"type": "function", "function": function}
    return parsed if deferred is None else parsed | {"defer_loading": deferred}


def _check(function: JsonObject, place: str) -> None:
    if not isinstance(function["name"], str):
        raise bad(f"{place}.function.name must be a string, got {shown(function['name'])}", "tools")
    for key, kind, what in (
        ("description", str, "a string"),
        ("parameters", dict, "an object"),
        ("strict", bool, "true or false"),
        ("defer_loading", bool, "true or false"),
    ):
        value = function[key]
        if value is not None and not isinstance(value, kind):
            raise bad(f"{place}.function.{key} must be {what}, got {shown(value)}", "tools")
