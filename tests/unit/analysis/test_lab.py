"""The lab's report on banks whose law is known: what holds is said to hold, and what does not is not."""

import numpy as np
import pytest

from analysis.validate.lab import report
from analysis.validate.lab_claims import PAPER, claims
from analysis.validate.lab_data import GRID, keep_grid, load_grid, load_lab, measured, qualities, quality_of
from analysis.validate.lab_figures import figure_2
from profiles.errors import ProfileError
from profiles.recipes.banks import Rounds, follow
from profiles.recipes.offline import table1_mean
from profiles.recipes.sources import POSITIONS, PRINTED, Shared
from tests.helpers.banks import made_bank, save_banks, save_speed

DOMAINS = {"code": 0.3, "math": 0.4, "chat": -0.3}
#: Means of the law by position (probits): DSpark above DFlash, which decays; EAGLE-3 below at first, rising.
LAWS = {
    "dspark": [0.8, 0.7, 0.7, 0.7],
    "dflash": [0.75, 0.4, 0.2, 0.0],
    "eagle3": [0.2, 0.4, 0.5, 0.6],
    "dspark_rnn": [0.8, 0.7, 0.7, 0.7],
    "dspark_b4": [0.8, 0.7, 0.7, 0.7],
    "dflash_b4": [0.75, 0.6, 0.5, 0.4],
    "dspark_b8": [0.8] + [0.7] * 7,
    "dflash_b8": [0.75, 0.6, 0.5, 0.4] + [-0.2] * 4,
    "dspark_d2": [0.8, 0.7, 0.7, 0.7],
    "dflash_d5": [0.75, 0.5, 0.3, 0.1],
}


def made_lab(folder, laws=LAWS, domains=DOMAINS, raw_temperature=2.0):
    banks = {
        name: {
            domain: made_bank([mean + shift for mean in means], raw_temperature=raw_temperature, seed=index)
            for index, (domain, shift) in enumerate(domains.items())
        }
        for name, means in laws.items()
    }
    shipped = ("dspark", "dflash", "eagle3")
    save_banks(folder, "toy_t1", {name: banks[name] for name in shipped})
    save_banks(folder / "lab", "toy_t1", {name: own for name, own in banks.items() if name not in shipped})
    keep_grid([folder / "lab"], folder / GRID)
    save_banks(folder, "toy_corpus", {"dspark": {"code": made_bank(laws["dspark"])}})
    save_speed(folder, "dspark", 1.6, 0.0605)
    save_speed(folder, "dflash", 1.4, 0.06)
    return load_lab(folder, folder)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return made_lab(tmp_path_factory.mktemp("lab"))


def verdicts(lab):
    return {claim.what: claim.verdict for claim in claims(lab, qualities(lab.by_temperature[1.0], ("dspark",)))}


def test_what_holds_is_said_to_hold(lab):
    found = verdicts(lab)
    unmeasured = [what for what, verdict in found.items() if verdict == "not measured"]
    assert unmeasured == ["gated head over vanilla: within 2 %"]
    assert {verdict for what, verdict in found.items() if what not in unmeasured} == {"holds"}, found


def test_the_same_claims_fall_where_the_law_is_the_other_way(tmp_path):
    """The sibling: the drafters change places, and the domains too."""
    swapped = {
        **LAWS,
        "dspark": [-0.4, 0.0, -0.2, -0.5],
        "dflash": [0.1, 0.2, 0.5, 0.6],
        "eagle3": [0.5, 0.3, 0.2, 0.0],
        "dspark_d2": [-0.4, 0.0, -0.2, -0.5],
        "dflash_b8": LAWS["dspark_b8"],
        "dspark_rnn": [0.8] * 4,
    }
    found = verdicts(made_lab(tmp_path, swapped, {"code": -0.3, "math": -0.4, "chat": 0.5}))
    for what, verdict in found.items():
        # Calibration has its own test, and times are as they were.
        if verdict != "not measured" and not what.startswith(("raw", "STS", "the sequential", "aim: one stream")):
            assert verdict == "does not hold", what


def test_a_modest_confidence_is_no_overconfident_one_and_an_honest_one_needs_no_mending():
    modest, honest = (
        quality_of(measured("toy", 3, {"code": made_bank([0.8, 0.7, 0.7], raw_temperature=t)}, {})) for t in (0.5, 1.0)
    )
    assert modest.excess.below(0)
    assert modest.mended.above(0)
    assert honest.excess.low < 0 < honest.excess.high
    assert not honest.mended.above(0.005)


def test_without_data_nothing_is_claimed(tmp_path):
    save_banks(tmp_path, "toy_t0", {"dspark": {"code": made_bank([0.5, 0.4])}})
    found = claims(load_lab(tmp_path, tmp_path), {})
    assert {claim.verdict for claim in found} == {"not measured"}


def test_the_grid_that_is_kept_says_what_its_banks_say(lab, tmp_path):
    bank = made_bank([0.5, 0.4])
    save_banks(tmp_path / "lab", "toy_t1", {"dflash_b2": {"chat": bank}})
    keep_grid([tmp_path / "lab"], tmp_path / GRID)
    keep_grid([tmp_path], tmp_path / GRID)
    (kept,) = load_grid(tmp_path / GRID).values()
    assert kept.draft_length == 2
    assert kept.sources["chat"].command == "none"
    for name in Rounds.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(kept.by_domain["chat"], name), getattr(follow(bank), name))


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"a": {}}', '{"a": {"draft_length": 1, "domains": {"code": {"rounds": 3}}}}']
)
def test_a_grid_that_is_none_is_refused_by_name(tmp_path, text):
    (tmp_path / GRID).write_text(text)
    with pytest.raises(ProfileError, match=r"grid\.json: is no grid of the lab .*: python -m analysis\.validate lab"):
        load_grid(tmp_path / GRID)


def test_the_report_is_written_with_its_plots(lab, tmp_path):
    found = report(lab, tmp_path)
    text = (tmp_path / "README.md").read_text()
    for plot in ("conditional_t1", "depth", "draft_length", "thresholds", "reliability"):
        assert (tmp_path / f"{plot}.png").stat().st_size > 5_000
        assert f"({plot}.png)" in text
    assert "| DSpark over DFlash, accepted length | +16 to +18 % |" in text
    assert "| dspark, corpus text | 4 |" in text
    assert "a test; none; 1; 2026-11-30" in text
    lengths = {check.name: check.error for check in found.checks()}
    means = np.array(LAWS["dspark"])
    assert 1 < lengths["accepted length, dspark, t=1"] < 1 + means.size
    # Outcomes here are drawn by the chances themselves, so both ways of following the texts agree up to luck.
    for name, error in lengths.items():
        if name.startswith("by chance"):
            assert abs(error) < 0.15, name


def test_the_paper_s_figures_are_the_paper_s(shared_dir):
    shared, seen = Shared(shared_dir), {}
    domains = ("Math", "Code", "Chat")

    def columns(drafter):
        return [shared.columns(POSITIONS, "conditional_acceptance", domain=d, drafter=drafter)[0] for d in domains]

    dspark, dflash, eagle3 = columns("DSpark"), columns("DFlash"), columns("Eagle3")
    seen["start"] = [a[0] - b[0] for a, b in zip(dflash, eagle3, strict=True)]

    def later(conditional):
        """Acceptance over positions 2 to 7 together, each weighted by the rounds that judge it."""
        survival = np.cumprod(conditional)
        return survival[1:].sum() / survival[:-1].sum()

    seen["decay"] = [later(a) - a[0] for a in dflash]
    seen["chain"] = [later(a) - a[0] for a in eagle3]
    seen["later"] = [later(a) - later(b) for a, b in zip(dspark, dflash, strict=True)]
    (before,), (after,) = (shared.columns(PRINTED, f"printed_ece_{when}_percent") for when in ("before", "after"))
    seen["mended"] = (before - after) / 100
    for name, ends in seen.items():
        assert PAPER[name] == f"{min(ends):+.2f} to {max(ends):+.2f}", name

    folder = "reference/dspark_paper/fig4_"
    length = {
        (d, drafter): shared.columns(
            f"{folder}accepted_length_by_draft_length.csv",
            "accepted_length_tokens_per_round",
            domain=d,
            drafter=drafter,
        )[0]
        for d in domains
        for drafter in ("DFlash", "DSpark (markov)", "DSpark (rnn)")
    }
    gains = {d: 100 * (length[d, "DSpark (markov)"] / length[d, "DFlash"] - 1) for d in domains}
    growth = [gain[3] - gain[1] for gain in gains.values()]
    assert PAPER["growth"] == f"{min(growth):+.0f} to {max(growth):+.0f} points"
    rnn = np.concatenate([100 * (length[d, "DSpark (rnn)"] / length[d, "DSpark (markov)"] - 1) for d in domains])
    assert PAPER["rnn"] == f"{rnn.min():+.0f} to {rnn.max():+.0f} %"
    (markov,), (dflash_ms,) = (
        shared.columns(f"{folder}round_latency.csv", "round_latency_ms", drafter=drafter)
        for drafter in ("DSpark (markov)", "DFlash")
    )
    more = 100 * (markov / dflash_ms - 1)
    assert PAPER["round"] == f"{more.min():+.1f} to {more.max():+.1f} %"

    def depth(domain, drafter, layers):
        return shared.columns(
            "reference/dspark_paper/fig3_accepted_length_by_depth.csv",
            "accepted_length_tokens_per_round",
            domain=domain,
            drafter=drafter,
            drafter_layers=layers,
        )[0].mean()

    deep = [100 * (depth(d, "DSpark", "2") / depth(d, "DFlash", "5") - 1) for d in domains]
    assert PAPER["depth"] == f"{min(deep):+.0f} to {max(deep):+.0f} %"
    for domain in ("Code", "Math"):
        more = table1_mean(shared, "Qwen3-4B", "DSpark", domain) / table1_mean(shared, "Qwen3-4B", "DSpark", "Chat")
        assert PAPER[domain.lower()] == f"{100 * (more - 1):+.0f} %"
    for name, drafter in (("dflash", "DFlash"), ("eagle3", "Eagle3")):
        gains = []
        for model in ("Qwen3-4B", "Qwen3-8B", "Qwen3-14B"):
            mine, other = (
                np.mean([table1_mean(shared, model, one, domain) for domain in domains]) for one in ("DSpark", drafter)
            )
            gains.append(100 * (mine / other - 1))
        assert PAPER[name] == f"{min(gains):+.0f} to {max(gains):+.0f} %"


def test_a_position_that_no_round_reached_is_a_dash(tmp_path):
    lab = made_lab(tmp_path, {**LAWS, "dflash": [0.75, -9.0, -9.0, -9.0]})
    rows = [row for row in figure_2(lab).rows if row[0].startswith("dflash")]
    assert rows
    assert all(row[2].startswith("0.000") and row[3:] == ["-", "-"] for row in rows)
