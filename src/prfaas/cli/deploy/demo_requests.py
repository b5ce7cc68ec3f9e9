"""The twelve requests of the demo: chat turns, documents, and follow-ups on them.

The documents are this package's own sources and their comments: real text that every installation
has. With the demo's tokenizer a byte is a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import prfaas

PACKAGE = Path(prfaas.__file__).parent


@dataclass(frozen=True, slots=True)
class DemoRequest:
    """One turn.

    Attributes:
        text: Message of the user.
        follows: Index of the request whose conversation it continues; None for a new one.
    """

    title: str
    text: str
    follows: int | None = None


def document(name: str, num_chars: int) -> str:
    """The first `num_chars` characters of a source file, or of all files of a folder."""
    path = PACKAGE / name
    files = sorted(path.glob("*.py")) if path.is_dir() else [path]
    return "\n".join(file.read_text() for file in files)[:num_chars]


def demo_requests() -> list[DemoRequest]:
    """The requests, in the order they are sent."""
    chat = (
        "We serve a chat model from two datacenters. Long prompts make the first token late, and "
        "while one is prefilled everybody else's answers stutter. What could we do about it "
        "without buying more accelerators for the site that decodes?"
    )
    return [
        DemoRequest("chat: late first tokens", chat),
        DemoRequest(
            "document of 2K", f"Review this.\n\n{document('core/routing/decision.py', 2200)}"
        ),
        DemoRequest("chat: goes on", "Is Ethernet between the two sites enough for that?", 0),
        DemoRequest("document of 6K", f"Explain this.\n\n{document('wire/identity.py', 6000)}"),
        DemoRequest("  a question on it", "Which of these files may other users read?", 3),
        DemoRequest("chat: thresholds", f"{chat} And how long is long? Please be specific."),
        DemoRequest("document of 12K", f"Find the bug.\n\n{document('pool/receive', 12000)}"),
        DemoRequest("chat: caches", "What does a prefix cache keep of a linear-attention layer?"),
        DemoRequest(
            "document of 4K", f"Shorten this.\n\n{document('core/kv/prefix_index.py', 4000)}"
        ),
        DemoRequest(
            "  a question on the 12K", "And is it safe when a peer lies about its name?", 6
        ),
        DemoRequest("document of 9K", f"Summarise this.\n\n{document('wire/messages', 9000)}"),
        DemoRequest("chat: thanks", "Thank you, that was helpful. One sentence to sum it up?", 5),
    ]
