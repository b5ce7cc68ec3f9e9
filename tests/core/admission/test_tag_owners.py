"""A tag belongs to the first site that uses it, and a site has no more than its limit."""

from prfaas.core.admission.contracts import TagOwners


def test_a_tag_is_of_the_first_site_alone() -> None:
    owners = TagOwners()
    assert owners.claim("t" * 32, "a")
    assert owners.claim("t" * 32, "a")
    assert not owners.claim("t" * 32, "b")
    assert owners["t" * 32] == "a"
    assert not owners.claim("", "a")


def test_a_site_cannot_use_up_the_tags_of_others() -> None:
    owners = TagOwners({"0": "a"}, tags_max=3)
    assert [owners.claim(str(n), "a") for n in range(5)] == [True, True, True, False, False]
    assert owners.claim("9", "b")
    assert len(owners) == 4
