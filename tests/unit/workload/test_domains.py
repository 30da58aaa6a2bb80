"""The mix of domains at any time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.workload.domains import DomainLaw, MixChange

SCHEDULE = (
    MixChange(at=0, mix={"math": 1.0}),
    MixChange(at=10, mix={"code": 0.25, "math": 0.75}),
    MixChange(at=20, mix={"chat": 1.0}),
)


def test_names_are_in_order_of_first_mention():
    assert DomainLaw(SCHEDULE).names == ("math", "code", "chat")
    assert DomainLaw({"b": 0.5, "a": 0.5}).names == ("b", "a")
    assert DomainLaw(None).names == ("-",)


def test_a_mix_holds_from_its_time_on():
    law = DomainLaw(SCHEDULE)
    at_s = np.array([0, 9.999, 10, 19.999, 20, 1e9])
    assert law.domains_at(at_s, np.full(6, 0.9)).tolist() == [0, 0, 1, 1, 2, 2]
    assert law.domains_at(at_s, np.full(6, 0.5)).tolist() == [0, 0, 0, 0, 2, 2]


def test_shares_are_cut_at_their_sums():
    law = DomainLaw({"a": 0.2, "b": 0.3, "c": 0.5})
    uniforms = np.array([0.0, 0.1999, 0.2, 0.4999, 0.5, 1 - 2**-53])
    assert law.domains_at(np.zeros(6), uniforms).tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("mix", [{"a": 0.0, "b": 1.0}, {"b": 1.0, "a": 0.0}, {"b": 0.1, "c": 0.9, "a": 0.0}])
def test_a_share_of_0_is_never_drawn(mix):
    law = DomainLaw(mix)
    uniforms = np.array([0.0, 0.05, 0.5, 1 - 2**-53])
    assert list(mix).index("a") not in law.domains_at(np.zeros(4), uniforms)


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 9), min_size=1).filter(lambda mix: sum(mix.values()) > 0),
    st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=20),
)
def test_one_request_and_many_are_drawn_alike(parts, uniforms):
    total = sum(parts.values())
    law = DomainLaw({name: part / total for name, part in parts.items()})
    many = law.domains_at(np.zeros(len(uniforms)), np.array(uniforms))
    assert [law.domain_at(0.0, uniform) for uniform in uniforms] == many.tolist()
    assert all(parts[law.names[index]] > 0 for index in many)
