"""The shipped profiles: they load, they hold the published numbers, and they can be made anew."""

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest
from scipy.special import expit, logit, ndtr

from profiles.curves import draft_cost, evaluate, step_cost
from profiles.files import SHIPPED, find_profile, known_profiles, load_bank, load_profile, save_profile
from profiles.recipes.catalogue import PROFILES
from profiles.recipes.confidence import read_figure6
from profiles.recipes.serving import build_serving
from profiles.recipes.sources import Shared
from profiles.schema import Bank, ParametricLaw, Profile, TableCurve, conditional, provenances
from sim.acceptance import solve_means

SERVED = {"paper/v4_flash": "V4-Flash", "paper/v4_pro": "V4-Pro"}
OFFLINE = {
    "paper/qwen3_4b": "Qwen3-4B",
    "paper/qwen3_8b": "Qwen3-8B",
    "paper/qwen3_14b": "Qwen3-14B",
    "paper/gemma4_12b": "Gemma4-12B",
}
DRAFTERS = {"eagle3": "Eagle3", "dflash": "DFlash", "dspark": "DSpark"}


def load(name: str) -> Profile:
    return load_profile(find_profile(name))


def law_of(profile: Profile, drafter: str, domain: str = "any") -> ParametricLaw:
    law = profile.acceptance[drafter].domains[domain]
    assert isinstance(law, ParametricLaw)
    return law


def rows(shared_dir: Path, file: str, **only: str) -> list[dict[str, str]]:
    with (shared_dir / "reference" / file).open(newline="") as lines:
        return [row for row in csv.DictReader(lines) if all(row[key] == value for key, value in only.items())]


# ------------------------------------------------------------------------------------------------------- all of them


#: Recorded with a drafter, not built from reference data.
MEASURED = [name for name in known_profiles() if name.startswith("measured/")]


def test_the_catalogue_is_what_is_shipped() -> None:
    assert sorted([*PROFILES, *MEASURED]) == known_profiles()


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_it_loads_and_is_named_as_its_file(name: str) -> None:
    profile = load(name)
    assert profile.name == name
    assert provenances(profile)


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_its_sources_exist(name: str, shared_dir: Path) -> None:
    text = find_profile(name).read_text()
    cited = set(re.findall(r"\.\./shared/([\w./-]+\w)", text))
    assert cited
    assert not [file for file in cited if not (shared_dir / file).exists()]


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_made_anew_it_is_the_same_file(name: str, shared_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    save_profile(PROFILES[name](Shared(shared_dir)), path)
    committed = (SHIPPED / f"{name}.json").read_bytes()
    assert path.read_bytes() == committed, f"run: python -m profiles.build {name}"


@pytest.mark.parametrize("name", MEASURED)
def test_a_measured_profile_has_its_banks(name: str) -> None:
    profile, path = load(name), find_profile(name)
    assert profile.name == name
    files = set()
    for drafter in profile.acceptance.values():
        for law in drafter.domains.values():
            assert isinstance(law, Bank)
            bank = load_bank(law, path, drafter.trained_length)
            assert len(bank.position) >= 2000
            assert law.provenance.origin == "measured"
            assert None not in (law.provenance.command, law.provenance.hardware, law.provenance.version)
            assert " /" not in (law.provenance.command or ""), "a path of one machine"
            files.add(law.file)
    assert files == {file.name for file in path.parent.glob(f"{path.stem}_*.npz")}, "a bank that no profile names"
    assert sum((path.parent / file).stat().st_size for file in files) < 4e6


# --------------------------------------------------------------------------------- V4-Flash and V4-Pro as they served

#: What DSpark's own curves are called, in files and in prose. MTP-1's telemetry is another matter.
FORBIDDEN = re.compile(r"fig(ure)?s?\.? ?[78]|derived_(dspark|tps|token_batch)|scatter_summary|fitted_lines", re.I)


@pytest.mark.parametrize("name", SERVED)
def test_nothing_in_it_comes_from_dsparks_own_curves(name: str) -> None:
    assert not FORBIDDEN.findall(find_profile(name).read_text())


def test_a_borrowed_curve_would_be_seen() -> None:
    for file in ("fig7_fitted_lines.csv", "derived_dspark_accepted_length.csv", "figure 8", "Fig. 7"):
        assert FORBIDDEN.search(json.dumps({"source": f"../shared/reference/dspark_paper/{file}"}))


@pytest.mark.parametrize("name", SERVED)
def test_its_recipe_opens_none_of_dsparks_own_curves(
    name: str, shared_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: set[str] = set()
    whole = Path.open

    def watched(self: Path, *args: object, **kwargs: object) -> object:
        opened.add(self.name)
        return whole(self, *args, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", watched)
    PROFILES[name](Shared(shared_dir))
    assert "derived_mtp_step_time.csv" in opened
    assert not [file for file in opened if FORBIDDEN.search(file)]


@pytest.mark.parametrize(("name", "worst"), [("paper/v4_flash", 0.030), ("paper/v4_pro", 0.042)])
def test_mtp_steps_are_those_of_the_telemetry(name: str, worst: float, shared_dir: Path) -> None:
    step_time = load(name).step_time
    assert step_time is not None
    cost = step_cost(step_time, 800)
    draft, _ = draft_cost(step_time, "mtp", 400)
    errors = []
    for row in rows(shared_dir, "dspark_paper/derived_mtp_step_time.csv", target_model=SERVED[name]):
        requests = float(row["requests_per_gpu"])
        step_s = np.interp(2 * requests, np.arange(801), cost.verify_s) + np.interp(
            requests, np.arange(401), draft.seconds
        )
        observed_s = float(row["step_time_over_mtp_accepted_length_ms"]) * 1.85 / 1e3
        errors.append(step_s / observed_s - 1)
    assert np.abs(errors).max() < worst
    assert np.sqrt(np.mean(np.square(errors))) < 0.0135


@pytest.mark.parametrize(
    ("name", "floor", "saturating", "saturation", "slope"),
    [("paper/v4_flash", 7.029, 1.619, 19.07, 0.02866), ("paper/v4_pro", 12.760, 7.746, 16.78, 0.07550)],
)
def test_the_step_law_agrees_with_the_published_fit(
    name: str, floor: float, saturating: float, saturation: float, slope: float
) -> None:
    step_time = load(name).step_time
    assert step_time is not None
    tokens = np.arange(10, 500)
    expected_s = 1.85e-3 * (floor + saturating * (1 - np.exp(-tokens / saturation)) + slope * tokens / 2)
    found_s = evaluate(step_time.verify, 500, "verify").seconds[10:500]
    np.testing.assert_allclose(found_s, expected_s, rtol=5e-4)


def test_survival_is_as_published() -> None:
    assert law_of(load("paper/v4_flash"), "dspark").survival.values == (0.807, 0.673, 0.571, 0.477, 0.407)
    assert law_of(load("engines/v4_flash_b300_tp4"), "dspark").survival.values == (0.807, 0.673, 0.571, 0.477, 0.407)
    lengths = 1 + np.cumsum(law_of(load("paper/v4_pro"), "dspark").survival.values)
    np.testing.assert_allclose(lengths, [1.84, 2.51, 3.01, 3.36, 3.61], atol=1e-9)
    for name in SERVED:
        assert law_of(load(name), "mtp").survival.values == (0.85,)


@pytest.mark.parametrize("name", SERVED)
def test_what_is_unpublished_is_assumed(name: str) -> None:
    found = provenances(load(name))
    for value in (
        "step_time.prefill",
        "step_time.draft.mtp.curve",
        "acceptance.mtp.domains.any.survival",
        "replica.gpus",
        "replica.kv_bytes_per_token",
        "replica.max_context_tokens",
    ):
        assert found[value].origin == "assumed", value
    assert "step time of none" in (found["step_time.verify"].reason or "")


@pytest.mark.parametrize("name", SERVED)
def test_draft_to_verify_ratio_is_the_b300s(name: str) -> None:
    """The median over the loads is the B300's; how far single loads are off is in the provenance."""
    served, measured = load(name).step_time, load("engines/v4_flash_b300_tp4").step_time
    assert served is not None
    assert measured is not None
    verify_s, graph_s = step_cost(served, 512).verify_s, step_cost(measured, 512).verify_s
    draft_s, table_s = (draft_cost(step_time, "dspark", 256)[0].seconds for step_time in (served, measured))
    requests = np.arange(5, 251)
    over = (draft_s[requests] / verify_s[2 * requests]) / (table_s[requests] / graph_s[2 * requests])
    assert 0.7 < over.min() < over.max() < 1.2
    assert 0.9 < np.median(over) < 1.1


def test_the_level_of_the_step_time_follows_the_assumed_accepted_length(shared_dir: Path) -> None:
    shared = Shared(shared_dir)
    low, high = (build_serving(shared, "V4-Flash", mtp_accepted_length=tokens) for tokens in (1.79, 1.92))
    assert low.step_time is not None
    assert high.step_time is not None
    ratio = step_cost(high.step_time, 600).verify_s[10:] / step_cost(low.step_time, 600).verify_s[10:]
    np.testing.assert_allclose(ratio, 1.92 / 1.79, rtol=2e-4)
    assert law_of(high, "mtp").survival.values == (0.92,)


def test_mtp_steps_do_not_depend_on_whom_the_slope_is_charged_to(shared_dir: Path) -> None:
    shared = Shared(shared_dir)
    by_token, by_request = (build_serving(shared, "V4-Flash", request_share=share) for share in (0.0, 1.0))
    assert by_token.step_time is not None
    assert by_request.step_time is not None
    one, other = step_cost(by_token.step_time, 1200), step_cost(by_request.step_time, 1200)
    for requests in (10, 100, 300):
        assert other.target_s(requests, 2 * requests, 0, 0) == pytest.approx(
            one.target_s(requests, 2 * requests, 0, 0), rel=1e-4
        )
        assert other.target_s(requests, 4 * requests, 0, 0) < one.target_s(requests, 4 * requests, 0, 0)


# --------------------------------------------------------------------------------------------------- measured engines


def test_the_b300_table_is_as_measured(shared_dir: Path) -> None:
    profile = load("engines/v4_flash_b300_tp4")
    assert profile.step_time is not None
    assert isinstance(profile.step_time.verify, TableCurve)
    verify_s = evaluate(profile.step_time.verify, 16_384, "verify").seconds
    draft_s = draft_cost(profile.step_time, "dspark", 256)[0].seconds
    measured = rows(shared_dir, "engines/v4_flash_b300_tp4_step_cost.csv")
    assert len(measured) == 83 + 5 + 35
    for row in measured:
        seconds = draft_s if row["kind"] == "draft_requests" else verify_s
        assert seconds[int(row["size"])] == pytest.approx(float(row["ms"]) / 1e3, abs=1e-9)


def test_the_b300_table_is_jagged_and_has_its_cliff() -> None:
    step_time = load("engines/v4_flash_b300_tp4").step_time
    assert step_time is not None
    assert isinstance(step_time.verify, TableCurve)
    graph, eager = step_time.verify.segments
    assert (np.diff(graph.seconds) < 0).sum() == 15
    seconds = evaluate(step_time.verify, 2048, "verify").seconds
    assert seconds[688] < seconds[672]
    assert seconds[673] == seconds[688]
    assert seconds[1024] == pytest.approx(0.02063)
    assert seconds[1025] == pytest.approx(0.1045)
    assert graph.sizes[-1] == 1024
    assert eager.between == "linear"


def test_h20_steps_are_those_of_d_cut(shared_dir: Path) -> None:
    profile = load("engines/qwen3_8b_h20")
    assert profile.step_time is not None
    cost = step_cost(profile.step_time, 1024)
    draft, per_token = draft_cost(profile.step_time, "dflash", 64)
    assert not per_token
    for row in rows(shared_dir, "engines/dcut_h20_step_time.csv", target="Qwen3-8B"):
        requests = int(row["batch_requests"])
        step_ms = 1e3 * (cost.target_s(requests, int(row["batch_tokens"]), 0, 0) + draft.seconds[requests])
        assert step_ms == pytest.approx(float(row["step_ms"]), rel=0.03)
    for row in rows(shared_dir, "engines/dcut_h20_throughput.csv", target="Qwen3-8B", method="none"):
        requests = int(row["batch_requests"])
        tokens_per_s = requests / cost.target_s(requests, requests, 0, 0)
        assert tokens_per_s == pytest.approx(float(row["output_tokens_per_s"]), rel=0.03)
    assert profile.replica is not None
    assert profile.replica.kv_bytes_per_token.value == 147_456


# ----------------------------------------------------------------------------------------------- table 1, figures 2, 6


@pytest.mark.parametrize("name", OFFLINE)
def test_its_chains_yield_table_1(name: str, shared_dir: Path) -> None:
    profile = load(name)
    for drafter, label in DRAFTERS.items():
        for domain in ("math", "code", "chat"):
            published = rows(
                shared_dir,
                "dspark_paper/table1_accepted_length.csv",
                target_model=OFFLINE[name],
                drafter=label,
                domain=domain.title(),
            )
            mean = np.mean([float(row["accepted_length_tokens_per_round"]) for row in published])
            assert 1 + sum(law_of(profile, drafter, domain).survival.values) == pytest.approx(mean, abs=1e-6)


@pytest.mark.parametrize("name", OFFLINE)
def test_its_positions_have_figure_2s_shape(name: str, shared_dir: Path) -> None:
    """Moved by one step in logit, by position; a small step for the model that figure 2 is about."""
    profile = load(name)
    for drafter, label in DRAFTERS.items():
        for domain in ("math", "code", "chat"):
            figure = rows(
                shared_dir,
                "dspark_paper/fig2_position_conditional_acceptance.csv",
                drafter=label,
                domain=domain.title(),
            )
            shape = np.array([float(row["conditional_acceptance"]) for row in figure])
            steps = logit(conditional(law_of(profile, drafter, domain).survival.values)) - logit(shape)
            assert np.ptp(steps) < 1e-5
            assert abs(steps[0]) < (0.03 if name == "paper/qwen3_4b" else 0.6)


@pytest.fixture(scope="module")
def figure6_rounds(shared_dir: Path) -> tuple[np.ndarray, np.ndarray]:
    """Draw chances ``[rounds, 7]`` and weights, with the shipped spread and the simulator's law, at its survival."""
    figure = read_figure6(Shared(shared_dir))
    spread = law_of(load("paper/qwen3_4b"), "dspark", "chat").spread
    survival = np.exp(np.interp(range(1, 8), (1, 3, 5, 7), np.log(figure.observed)))
    means = solve_means(tuple(survival), spread)
    rng = np.random.default_rng(11)
    z, w = rng.standard_normal((60_000, 1)), rng.standard_normal((60_000, 7))
    within = ndtr((means + spread.request_sd * z) / np.hypot(1, spread.token_sd))
    weight = 1 / (1 + np.cumprod(within, axis=1).sum(axis=1))
    return ndtr(means + spread.request_sd * z + spread.token_sd * w), weight / weight.sum()


@pytest.mark.parametrize(("position", "printed"), [(1, 0.818), (3, 0.812), (5, 0.864), (7, 0.907)])
def test_confidence_ranks_as_well_as_in_figure_6(
    position: int, printed: float, figure6_rounds: tuple[np.ndarray, np.ndarray]
) -> None:
    chance, weight = figure6_rounds
    survival = np.prod(chance[:, :position], axis=1)
    order = np.argsort(survival)
    accepted, rejected = (weight * survival)[order], (weight * (1 - survival))[order]
    auc = (accepted * (np.cumsum(rejected) - rejected / 2)).sum() / accepted.sum() / rejected.sum()
    assert auc == pytest.approx(printed, abs=0.016)


@pytest.mark.parametrize("position", [1, 3, 5, 7])
def test_raw_confidence_is_as_overconfident_as_in_figure_6(
    position: int, figure6_rounds: tuple[np.ndarray, np.ndarray], shared_dir: Path
) -> None:
    chance, weight = figure6_rounds
    figure = read_figure6(Shared(shared_dir))
    index = (1, 3, 5, 7).index(position)
    temperature = law_of(load("paper/qwen3_4b"), "dspark", "chat").confidence.raw_temperature
    assert min(temperature) > 1
    raw = expit(np.array(temperature) * logit(np.clip(chance, 1e-12, 1 - 1e-12)))
    assert weight @ np.prod(raw[:, :position], axis=1) == pytest.approx(figure.predicted[index], abs=0.006)
    assert weight @ np.prod(chance[:, :position], axis=1) == pytest.approx(figure.observed[index], abs=0.006)
