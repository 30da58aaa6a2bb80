import dataclasses
import re
from typing import get_args

import pytest

from analysis.validate import lab_claims, verdicts
from analysis.validate.document import DOCS, read_parts
from analysis.validate.lab_data import Lab
from analysis.validate.rungs import Claim, Verdict, summarize
from analysis.validate.verdicts import Row, claims_markdown, dynamic_gains, judge_all, short_table, worst
from sim.errors import InputError

NAMES = [value for name, value in vars(verdicts).items() if name.isupper() and isinstance(value, str) and " " in value]


def claim(number, verdict="cannot be judged"):
    return Claim(number, "a claim", "claimed", "the paper's", "table 1", verdict, "why")


def parts(numbers=range(1, 21), verdict="cannot be judged", **others):
    claims = [dataclasses.asdict(claim(number, verdict)) for number in numbers]
    return {"paper": {"claims": claims, "checks": []}, **others}


def lab(*rows):
    return {
        "lab_claims": [dict(zip(("what", "paper", "ours", "verdict"), row, strict=True)) for row in rows],
        "checks": [],
    }


def engine(**observed):
    """Return an engine's checks: by policy, accepted length and verified tokens at one load."""
    checks = []
    for policy, pair in observed.items():
        for name, value in zip(("accepted length", "verified tokens"), pair, strict=True):
            checks.append({"name": f"85%, {policy.replace('_k', ' k=')}: {name}", "observed": value})
    return {"checks": checks}


def one(number, **others):
    (found,) = judge_all(parts([number], **others))
    return found


def test_the_lab_calls_its_claims_as_they_are_looked_up():
    said = {found.what for found in lab_claims.claims(Lab({}, {}, {}, {}), {})}
    looked_up = {name for name in NAMES if name != verdicts.NUMBER}
    assert len(looked_up) > 8
    assert looked_up <= said


@pytest.mark.parametrize(
    ("ours", "said", "verdict"),
    [
        ("+20.0 [+14.0, +26.0] %", "holds", "holds here"),
        ("+9.0 [+4.0, +15.0] %", "holds", "holds in direction"),
        ("+30.0 [+19.0, +40.0] %", "holds", "holds in direction"),
        ("+1.0 [-4.0, +6.0] %", "undecided", "cannot be judged"),
        ("-5.0 [-9.0, -1.0] %", "does not hold", "does not hold"),
    ],
)
def test_an_interval_is_graded_by_the_papers_range(ours, said, verdict):
    row = Row("DSpark over DFlash", "+16 to +18 %", ours, said)
    assert row.graded() == verdict
    assert one(6, lab=lab((verdicts.OVER_DFLASH, "+16 to +18 %", ours, said))).verdict == verdict


def test_where_the_claim_is_an_order_a_sign_is_enough():
    assert Row("a", "+6 to +7 %", "+30.0 [+19.0, +40.0] %", "holds").graded(bare=True) == "holds here"
    assert Row("a", "above 0", "+0.100 [+0.050, +0.150]", "holds").graded() == "holds here"


def test_several_measurements_together_are_the_worst():
    assert worst(["holds here", "does not hold", "cannot be judged"]) == "does not hold"
    assert worst(["holds in direction", "holds here"]) == "holds in direction"
    rows = (
        (verdicts.CODE, "+47 %", "+45.0 [+40.0, +50.0] %", "holds"),
        (verdicts.MATH, "+60 %", "+9.0 [+4.0, +14.0] %", "holds"),
    )
    found = one(15, lab=lab(*rows))
    assert (found.verdict, found.source) == ("holds in direction", "lab")
    assert found.ours == "+45.0 [+40.0, +50.0] %; +9.0 [+4.0, +14.0] %"
    assert "the paper's" in found.why


@pytest.mark.parametrize("number", sorted(set(verdicts.JUDGES)))
def test_what_is_not_measured_names_its_command(number):
    found = one(number)
    assert found.verdict == "cannot be judged"
    assert re.search(r"python -m analysis\.validate\.document (lab|engines?)", found.why)
    partly = one(number, lab=lab(*((name, "+1 %", "-", "not measured") for name in NAMES)))
    assert partly == found


def test_a_verdict_reached_without_the_engine_stays():
    (found,) = judge_all(parts([9], "holds in direction"))
    assert (found.verdict, found.ours) == ("holds in direction", "the paper's")
    assert "by the engine: not measured yet" in found.why


def test_another_family_or_batch_holds_in_direction_at_best_and_a_small_target_refutes_nothing_of_gemma():
    near = ((verdicts.OVER_EAGLE3, "+27 to +31 %", "+29.0 [+26.0, +32.0] %", "holds"),)
    near += ((verdicts.OVER_DFLASH, "+16 to +18 %", "+17.0 [+15.0, +19.0] %", "holds"),)
    near += ((verdicts.SEQUENTIAL, "+0.2 to +1.3 %", "+1.0 [+0.1, +2.0] %", "holds"),)
    assert one(5, lab=lab(*near)).verdict == "holds here"
    assert one(7, lab=lab(*near)).verdict == "holds in direction"
    assert one(8, lab=lab(*near)).verdict == "holds in direction"
    far = ((verdicts.OVER_EAGLE3, "+27 to +31 %", "-4.0 [-5.0, -3.0] %", "does not hold"), near[1])
    assert one(5, lab=lab(*far)).verdict == "does not hold"
    assert one(7, lab=lab(*far)).verdict == "cannot be judged"


def test_dynamic_lengths_are_held_against_a_line_through_the_fixed_ones():
    # Fixed lengths accept 0.6 of 1 and 1.2 of 3 draft tokens; between them, at 2, 0.9.
    found = engine(none=(1.0, 1.0), mtp1=(1.6, 2.0), fixed_k3=(2.2, 4.0), dspark_async=(2.08, 3.0))
    assert dynamic_gains({check["name"]: check for check in found["checks"]}) == {
        "85%, dspark_async": pytest.approx(20.0)
    }
    (judged,) = judge_all(parts([9], "holds here", engine=found))
    assert judged.verdict == "holds in direction"
    assert judged.ours == "the paper's; engine: +20 to +20 %"
    worse = engine(mtp1=(1.6, 2.0), fixed_k3=(2.2, 4.0), dspark_async=(1.8, 3.0))
    (judged,) = judge_all(parts([9], "holds here", engine=worse))
    assert judged.verdict == "does not hold"


def test_a_budget_that_does_not_fall_does_not_hold():
    def checks(light, heavy):
        rows = [(f"{load}%, dspark_async: verified tokens", value) for load, value in ((25, light), (85, heavy))]
        return {"checks": [{"name": name, "observed": value} for name, value in rows]}

    for light, heavy, verdict in ((3.0, 2.0, "holds in direction"), (2.0, 3.0, "does not hold")):
        (found,) = judge_all(parts([12], "holds in direction", engine=checks(light, heavy)))
        assert found.verdict == verdict
        assert f"engine: {light:.1f} to {heavy:.1f}" in found.ours


def test_crossings_are_those_that_engines_reports():
    check = dataclasses.asdict(summarize("V4-Flash, fixed k=5: load from which none is faster", 0.0, "requests"))
    checks = [dict(check, predicted=171.0), dict(check, name=check["name"].replace("k=5", "k=1"))]
    (found,) = judge_all(parts([11], "holds here", engines={"checks": checks}))
    assert "simulated: k=5 171, k=1 never" in found.ours


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [
        ("1.40 [1.30, 1.50]", "holds in direction"),
        ("0.80 [0.70, 0.90]", "does not hold"),
        ("1.00 [0.90, 1.10]", "holds in direction"),
    ],
)
def test_one_stream_that_is_slower_refutes_the_latency_claim(ours, verdict):
    rows = lab((verdicts.ONE_STREAM, "aim", ours, "undecided"))
    (found,) = judge_all(parts([20], "holds in direction", lab=rows))
    assert found.verdict == verdict
    assert ours in found.ours


def test_no_claims_without_the_paper():
    assert judge_all({"engines": {"checks": []}}) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [({"verdict": "maybe"}, "unknown verdict 'maybe'"), ({"colour": "red"}, "not a claim")],
)
def test_a_claim_that_is_none_names_the_command(change, message):
    broken = {"paper": {"claims": [dataclasses.asdict(claim(1)) | change], "checks": []}}
    with pytest.raises(InputError, match=message):
        judge_all(broken)


def test_the_committed_parts_judge_every_claim():
    found = judge_all(read_parts(DOCS))
    assert [one.number for one in found] == list(range(1, 21))
    assert {one.verdict for one in found} <= set(get_args(Verdict))
    assert all(one.why for one in found if one.verdict in ("cannot be judged", "does not hold"))
    assert sum(line.startswith("| ") for line in claims_markdown(found)) == 22
    assert len(short_table(found)) == 22
