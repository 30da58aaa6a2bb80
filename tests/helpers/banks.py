"""Banks with a known law, for tests of what reads banks."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from scipy.special import expit, logit, ndtr

from profiles.files import BankArrays, digest, save_profile
from profiles.schema import Bank, Drafter, Profile, Provenance

SOURCE = Provenance(origin="measured", source="a test", hardware="none", version="1", command="none", date="2026-11-30")


def made_bank(
    means: Sequence[float],
    *,
    texts: int = 40,
    positions: int = 120,
    request_sd: float = 0.3,
    token_sd: float = 0.8,
    noise_sd: float = 0.0,
    raw_temperature: float = 1.0,
    seed: int = 0,
) -> BankArrays:
    """Draw a bank whose chance at draft token k is ``Phi(means[k] + text + place)``, outcomes by one luck a place."""
    rng = np.random.default_rng(seed)
    length = len(means)
    text = np.repeat(np.arange(texts), positions)
    place = np.tile(np.arange(positions), texts)
    effect = request_sd * rng.standard_normal((texts, 1)) + token_sd * rng.standard_normal((texts, positions + length))
    noise = noise_sd * rng.standard_normal((texts, positions + length))
    luck = rng.random((texts, positions + length))
    at = place[:, None] + np.arange(length)
    x = effect[text[:, None], at]
    chance = ndtr(np.array(means) + x)
    # What noise leaves of the knowledge, seen from the population.
    spread = request_sd**2 + token_sd**2
    shrink = spread / (spread + noise_sd**2) if noise_sd else 1.0
    seen = shrink * (x + noise[text[:, None], at])
    confidence = ndtr((np.array(means) + seen) / np.sqrt(1 + spread * (1 - shrink)))
    raw = expit(raw_temperature * logit(np.clip(confidence, 1e-9, 1 - 1e-9)))
    return BankArrays(raw, confidence, chance, luck[text[:, None], at] < chance, text, place)


def save_banks(folder: Path, name: str, drafters: Mapping[str, Mapping[str, BankArrays]]) -> Path:
    """Write a profile of banks by drafter and domain; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    acceptance = {}
    for drafter, domains in drafters.items():
        laws = {}
        for domain, bank in domains.items():
            file = folder / f"{name}_{drafter}_{domain}.npz"
            np.savez_compressed(file, **{key: getattr(bank, key) for key in BankArrays.__dataclass_fields__})
            laws[domain] = Bank(file=file.name, sha256=digest(file), provenance=SOURCE)
        kind = "block" if drafter.startswith("d") else "chain"
        acceptance[drafter] = Drafter(kind=kind, trained_length=bank.chance.shape[1], domains=laws)
    path = folder / f"{name}.json"
    save_profile(
        Profile(format="dspark-profile/1", name=f"measured/{name}", description="A test.", acceptance=acceptance), path
    )
    return path


def save_speed(folder: Path, drafter: str, ratio: float, round_s: float) -> Path:
    """Write times as ``decoder.evaluate --against-none --json`` does."""
    row = {
        "prompts": 9,
        "tokens_per_s": 20 * ratio,
        "none_tokens_per_s": 20.0,
        "ratio": ratio,
        "ratio_low": 0.98 * ratio,
        "ratio_high": 1.02 * ratio,
        "draft_s": 0.1 * round_s,
        "verify_s": 0.8 * round_s,
        "round_s": round_s,
        "round_low_s": 0.995 * round_s,
        "round_high_s": 1.005 * round_s,
        "none_round_s": 0.05,
    }
    machine = {"device": "x86_64", "cores": 2, "threads": 2, "dtype": "float32", "torch": "2", "date": "2026-11-30"}
    path = folder / f"speed_{drafter}.json"
    path.write_text(json.dumps({"speed": {"by_domain": {"all": row}, "draft_length": 5, **machine}}))
    return path
