"""A request as routing sees it."""

from __future__ import annotations

from dataclasses import dataclass

from prfaas.core.kv.blocks import Layout


@dataclass(frozen=True, slots=True)
class Ask:
    """A request that has to be routed.

    Attributes:
        number: Unique among the open requests.
        num_prompt_tokens: Tokens in all its sequences.
        num_tokens_to_fit: Tokens of its longest sequence; 0 if the engine cuts it.
        layout: What `hashes` were made for; None if no engine's is known.
        hashes: Hash chain of a single prompt; empty with several.
        offloadable: Whether prefill and decode may be split.
        tenant: Whose it is.
        may_ship: Whether its tenant may use the links.
        streams: Whether its first token is seen.
    """

    number: int
    num_prompt_tokens: int
    num_tokens_to_fit: int
    layout: Layout | None
    hashes: list[bytes]
    offloadable: bool
    tenant: str = ""
    may_ship: bool = True
    streams: bool = True

    @property
    def shippable_tokens(self) -> int | None:
        """Prefix that could be shipped; None while nobody can say."""
        return None if self.layout is None else self.layout.last_boundary(self.num_prompt_tokens)
