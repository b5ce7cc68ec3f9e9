"""Chat templates rendered as `transformers` does, whose import takes over a second of CPU time.

References:
    `transformers` 5.19, `utils/chat_template_utils.py`, `render_jinja_template`.
"""

from __future__ import annotations

import datetime
import json
from typing import Any

_END_OF_MESSAGE = "CONTINUE_FINAL_MESSAGE_TAG "

Messages = list[dict[str, Any]]


class ChatTemplate:
    """The chat template of a checkpoint.

    Args:
        special: Texts of special tokens by their names, as in `eos_token`.

    Raises:
        jinja2.TemplateSyntaxError: It is no template, or has a tag that only `transformers` knows.
    """

    def __init__(self, source: str, special: dict[str, str]) -> None:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> None:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        self._template, self._special = environment.from_string(source), special
        self.source = source

    def render(self, messages: Messages, **variables: Any) -> str:
        """Text of a chat; whatever the template raises."""
        return self._template.render(**{**self._special, **variables, "messages": messages})

    def render_open(self, messages: Messages, **variables: Any) -> str:
        """Text of a chat up to the end of its last message; ValueError if the template changes it,
        and whatever it raises."""
        *earlier, last = messages
        if variables.get("add_generation_prompt"):
            raise ValueError("a message that is continued has no generation prompt behind it")
        if "content" not in self.source or last.get("content") is None:
            raise ValueError("the last message has no content that can be continued")
        said, content = _marked(last["content"])
        whole = self.render([*earlier, {**last, "content": content}], **variables)
        text, end, after = whole.rpartition(_END_OF_MESSAGE.strip())
        if not end or said.strip() not in whole:
            raise ValueError("the template leaves out the last message, which cannot be continued")
        return text if after.startswith(" ") else text.rstrip()


def _marked(content: str | Messages) -> tuple[str, str | Messages]:
    """The last text of a content, and the content with a mark behind it; ValueError without one."""
    if isinstance(content, str):
        return content, content + _END_OF_MESSAGE
    for at in reversed(range(len(content))):
        if "text" in content[at]:
            said = content[at]["text"]
            marked = {**content[at], "text": said + _END_OF_MESSAGE}
            return said, [*content[:at], marked, *content[at + 1 :]]
    raise ValueError("the last message has no text that can be continued")


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
