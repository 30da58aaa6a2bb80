"""A factor on the load means the same for every kind of arrivals: as many times the requests, the same shape."""

from dataclasses import dataclass

import numpy as np
import pytest

from sim.rng import Streams
from sim.workload.base import ARRIVALS
from sim.workload.closed_loop import ClosedLoop
from sim.workload.load import scaled_load
from sim.workload.on_off import OnOff
from sim.workload.renewal import Gamma, Poisson
from sim.workload.replay import Replay
from sim.workload.varying import Diurnal, Peak

KINDS = {
    "poisson": (Poisson(rate_per_s=4), {"rate_per_s": 6}),
    "gamma": (Gamma(rate_per_s=4, cv=2), {"rate_per_s": 6}),
    "on_off": (
        OnOff(on_per_s=8, off_per_s=2, mean_on=10, mean_off=20),
        {"on_per_s": 12, "off_per_s": 3},
    ),
    "diurnal": (Diurnal(mean_per_s=4, amplitude=0.5, period=60, peak_at=30), {"mean_per_s": 6}),
    "peak": (Peak.__new__(Peak), {"base_per_s": 3, "peak_per_s": 12}),
    "replay": (Replay(path="x.csv", speed_up=2), {"speed_up": 3}),
    "closed_loop": (ClosedLoop(users=5), {"users": 8}),
}
for name, value in {"kind": "peak", "base_per_s": 2, "peak_per_s": 8, "from_": 1.0, "until": 2.0}.items():
    object.__setattr__(KINDS["peak"][0], name, value)


@pytest.mark.parametrize("kind", ARRIVALS.known())
def test_every_kind_scales(kind):
    arrivals, scaled = KINDS[kind]
    assert scaled_load(arrivals, 1.5) == scaled


def test_the_same_requests_come_at_another_pace():
    rng = Streams(1).get
    once = Poisson(rate_per_s=4).draw_arrivals_s(100, rng=rng("arrivals"))
    twice = Poisson(**scaled_load(Poisson(rate_per_s=4), 2)).draw_arrivals_s(50, rng=rng("arrivals"))
    np.testing.assert_allclose(once / 2, twice)


def test_users_are_whole_and_some_are_left():
    assert [scaled_load(ClosedLoop(users=5), factor)["users"] for factor in (0.1, 0.29, 0.3, 10)] == [1, 1, 2, 50]
    with pytest.raises(ValueError, match=r"0\.05 x 5 users leaves none"):
        scaled_load(ClosedLoop(users=5), 0.05)


@pytest.mark.parametrize("factor", [0, -1, float("inf"), float("nan"), True, "2"])
def test_what_is_no_factor(factor):
    with pytest.raises(ValueError, match="expected a factor above 0"):
        scaled_load(Poisson(rate_per_s=4), factor)


def test_a_kind_of_another_distribution_scales_by_its_names():
    @dataclass(frozen=True)
    class Mine:
        kind: str = "mine"
        calm_per_s: float = 1.0
        length: int = 3

    @dataclass(frozen=True)
    class Odd:
        kind: str = "odd"

    assert scaled_load(Mine(), 3) == {"calm_per_s": 3.0}
    with pytest.raises(ValueError, match="arrivals of kind 'odd' have nothing to scale"):
        scaled_load(Odd(), 3)
