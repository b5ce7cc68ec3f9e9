"""Choice of the decode engine: the fewest requests first, and not the engine that failed."""

from prfaas.core.dispatch.stages import DecodeBook
from prfaas.core.dispatch.types import ClusterMember


def test_one_that_was_tried_is_passed_over_and_not_forgotten() -> None:
    book = DecodeBook([ClusterMember("a", "pool"), ClusterMember("b", "pool")])
    assert book.choose(avoid="a") == "b"
    assert book.choose() == "a"
    assert book.choose(avoid="a") == "b"
    book.set_ready("b", ready=False)
    assert book.choose(avoid="a") is None
    assert book.choose() == "a"
    assert book.num_on("a") + book.num_on("b") == 4
