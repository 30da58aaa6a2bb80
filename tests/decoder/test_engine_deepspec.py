"""The engine in float32 on DeepSpec's checkpoints: batched, in any order, it says what one request at a time says."""

import pytest

from sim.verify import Fixed, Threshold
from tests.decoder.engines import alone, assert_same, engine_of, request, serve
from tests.decoder.reference import DRAFTS

pytestmark = pytest.mark.needs_shared


@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("temperature", (0.0, 1.0))
def test_batched_is_one_at_a_time(targets, drafters, name, temperature):
    target, drafter = targets[DRAFTS[name]], drafters[name]
    asked = [request(f"r{i}", [253, 5 + i, 9, 200 - i][: 2 + i], new=16, temperature=temperature) for i in range(3)]
    policy = Threshold(min_confidence=0.3) if "dspark" in name else Fixed(k=drafter.trained_length)
    expected = alone(target, drafter, policy, asked)
    options = {"max_context_tokens": 128, "max_running": 2, "blocks": 24}
    assert_same(serve(engine_of(target, drafter, policy, **options), asked[::-1]), expected[::-1])
