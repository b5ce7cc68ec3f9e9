"""Order of eviction from a full tier."""

from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.cache.eviction import LeasedLast, LeastRecentlyUsed


def policy(*keys: str) -> LeasedLast[str]:
    made: LeasedLast[str] = LeasedLast(LeastRecentlyUsed())
    for key in keys:
        made.added(key)
    return made


def test_what_is_leased_goes_after_the_rest_and_goes() -> None:
    leased = policy("a", "b", "c")
    leased.lease("a", 10, 5)
    assert list(leased.order()) == ["b", "c", "a"]
    leased.removed("a")
    assert (list(leased.order()), len(leased)) == (["b", "c"], 0)


def test_a_lease_ends_with_its_use_its_release_or_its_time() -> None:
    leased = policy("a", "b", "c", "d")
    for key, until in (("a", 10), ("b", 20), ("c", 30)):
        leased.lease(key, until, 5)
    leased.used("c")
    leased.release("b")
    assert list(leased.order()) == ["d", "c", "b", "a"]
    leased.expire(9)
    assert len(leased) == 1
    leased.expire(10)
    assert (list(leased.order()), len(leased)) == (["d", "c", "b", "a"], 0)
    leased.release("unknown")


def test_the_longer_of_two_leases_counts() -> None:
    leased = policy("a")
    leased.lease("a", 20, 5)
    leased.lease("a", 10, 5)
    leased.expire(15)
    assert len(leased) == 1


@given(st.lists(st.tuples(st.sampled_from("+-ulre"), st.integers(0, 5)), max_size=60))
def test_everything_is_in_the_order_once(steps: list[tuple[str, int]]) -> None:
    leased: LeasedLast[int] = LeasedLast(LeastRecentlyUsed())
    held: set[int] = set()
    for now, (step, key) in enumerate(steps):
        if step == "+" and key not in held:
            leased.added(key)
            held.add(key)
        elif step == "e":
            leased.expire(now)
        elif step == "r":
            leased.release(key)
        elif key in held and step == "-":
            leased.removed(key)
            held.remove(key)
        elif key in held and step in "ul":
            leased.used(key) if step == "u" else leased.lease(key, now + 3, 5)
        order = list(leased.order())
        assert sorted(order) == sorted(held)
        assert len(leased) <= len(held)
        assert leased.num_bytes == 5 * len(leased)


def test_copies_go_first_once_nobody_waits_for_them_and_stay_copies() -> None:
    leased = policy("own", "copy", "other")
    leased.lease("copy", 100, 1, is_copy=True)
    assert list(leased.order()) == ["own", "other", "copy"]
    leased.used("copy")
    assert list(leased.order()) == list(leased.unleased()) == ["copy", "own", "other"]
    leased.used("copy")
    leased.lease("copy", 200, 1)
    leased.expire(300)
    assert list(leased.order()) == ["copy", "own", "other"]
    leased.removed("copy")
    leased.added("copy")
    assert list(leased.order()) == ["own", "other", "copy"]


def test_bytes_of_leased_copies_are_known_and_end_with_their_leases() -> None:
    leased = LeasedLast(LeastRecentlyUsed[str]())
    for key in ("own", "copy", "later"):
        leased.added(key)
    leased.lease("own", 100, 1)
    leased.lease("copy", 100, 2, is_copy=True)
    leased.lease("later", 100, 4)
    leased.lease("later", 200, 4, is_copy=True)
    assert (leased.num_bytes, leased.copy_bytes) == (7, 6)
    leased.used("copy")
    leased.lease("copy", 300, 2)
    assert leased.copy_bytes == 6, "a copy remains one"
    leased.expire(200)
    assert leased.copy_bytes == 2
    leased.removed("copy")
    assert (leased.num_bytes, leased.copy_bytes) == (0, 0)
