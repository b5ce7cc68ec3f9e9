"""Owners of tags: the site whose tenant a tag belongs to.

A tag follows from a secret of its site, so that no other site can name it. The first site that uses
one owns it from then on: a ticket, a prompt or a purge of another site with that tag is refused.
"""

from __future__ import annotations

from collections.abc import Mapping

TAGS_MAX = 10_000
"""Tags of one site: each costs about 100 bytes, and a line in the file that keeps them."""


class TagOwners:
    """Tags and the sites that own them.

    Args:
        owners: Sites by tag, as they were kept.
        tags_max: Of one site; further ones are not accepted.
    """

    def __init__(self, owners: Mapping[str, str] | None = None, tags_max: int = TAGS_MAX) -> None:
        self._owners = dict(owners or {})
        self._tags_max = tags_max
        self._counts: dict[str, int] = {}
        for site in self._owners.values():
            self._counts[site] = self._counts.get(site, 0) + 1

    def __getitem__(self, tag: str) -> str | None:
        return self._owners.get(tag)

    def __len__(self) -> int:
        return len(self._owners)

    def items(self) -> dict[str, str]:
        """All tags with their sites."""
        return dict(self._owners)

    def claim(self, tag: str, site: str) -> bool:
        """Use a tag for a site.

        Returns:
            False if the tag is empty, is another site's, or is one more than a site may have.
        """
        owner = self._owners.get(tag)
        if owner is not None:
            return owner == site
        count = self._counts.get(site, 0)
        if not tag or count >= self._tags_max:
            return False
        self._owners[tag], self._counts[site] = site, count + 1
        return True
