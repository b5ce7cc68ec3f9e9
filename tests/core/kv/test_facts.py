"""Facts behind a layout id: ids agree exactly where facts do, and words name what differs."""

from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.kv.blocks import ABSENT, UNKNOWN, differences, facts_id, in_words

FACTS = st.dictionaries(st.sampled_from("abcd"), st.sampled_from(["1", "2", "torch"]))


@given(ours=FACTS, theirs=FACTS)
def test_ids_agree_exactly_where_no_fact_differs(
    ours: dict[str, str], theirs: dict[str, str]
) -> None:
    found = differences(ours, theirs)
    assert (facts_id(ours) == facts_id(theirs)) == (not found)
    assert {each.fact for each in found} == {
        name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name)
    }


def test_the_order_of_facts_does_not_change_the_id() -> None:
    facts = {"b": "1", "a": "2"}
    assert facts_id(facts) == facts_id(dict(reversed(facts.items())))
    assert len(facts_id({})) == 32


def test_differences_come_in_the_order_of_the_first_and_name_both_values() -> None:
    ours, theirs = (
        {"z": "1", "dtype": "bfloat16", "a": "1"},
        {"dtype": "float16", "a": "1", "y": "2"},
    )
    found = differences(ours, theirs)
    assert [each.fact for each in found] == ["z", "dtype", "y"]
    assert in_words(found, "pd", "prfaas", limit=2) == (
        f"z: 1 at pd, {ABSENT} at prfaas; dtype: bfloat16 at pd, float16 at prfaas; and 1 more"
    )


def test_without_facts_the_words_say_so() -> None:
    assert in_words([], "pd", "prfaas") == f"pd and prfaas: {UNKNOWN}"


def test_vllm_leaves_its_hash_scheme_out_and_a_difference_names_both() -> None:
    """Layout ids of engines that name no scheme stay as they were."""
    vllm, sglang = {"dtype": "a"}, {"dtype": "a", "hash_scheme": "sglang_pages"}
    assert in_words(differences(vllm, sglang), "d", "p") == (
        "hash_scheme: sha256_cbor at d, sglang_pages at p"
    )
    assert [each.theirs for each in differences(sglang, vllm)] == ["sha256_cbor"]
    assert differences(vllm, {**vllm, "hash_scheme": "sha256_cbor"}) == []
