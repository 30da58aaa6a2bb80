"""From texts and drafters to banks: every place judged, confidence calibrated, files that say what they are made of."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from decoder.calibration import Outcomes, fit_temperatures
from decoder.confidence import confidence_of
from decoder.drafter import Drafter
from decoder.errors import Fault, InputError
from decoder.lab.bank import Judged, judge_text, places_of, target_probs
from decoder.lab.store import META, Meta, Text, digest, load_meta, read_shard, shard_paths
from decoder.lab.targets import target_sha256
from decoder.target import HfTarget
from profiles.files import BankArrays, load_profile, save_profile
from profiles.files import digest as file_digest
from profiles.schema import Bank, DomainLaw, Profile, Provenance
from profiles.schema import Drafter as ProfileDrafter


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts of the lab by domain, with what the target was thinking; ``sha256``: of the tokens of the whole folder."""

    meta: Meta
    by_domain: Mapping[str, Sequence[Text]]
    sha256: str

    @property
    def temperature(self) -> float:
        """Temperature at which blocks are judged: what the target wrote at; 1 for what a person wrote."""
        return self.meta.temperature if self.written else 1.0

    @property
    def written(self) -> bool:
        """Whether the target wrote them."""
        return self.meta.text == "written"

    def features(self, text: Text, layers: Sequence[int]) -> Tensor:
        """Return a text's hidden states over ``layers``, ``[rows, layers * hidden_size]``, float32."""
        width, kept = self.meta.hidden_size, self.meta.layers
        parts = [text.features[:, kept.index(layer) * width :][:, :width] for layer in layers]
        return torch.cat(parts, -1).float() if parts else torch.zeros(text.features.shape[0], 0)


@dataclass(frozen=True, slots=True)
class Recorded:
    """The bank of one drafter in one domain.

    ``temperatures``: of the calibration. ``error_mean``, ``error_worst``: how far chances are off because hidden states
    were kept in float16, on texts whose target was run again; None where none was.
    """

    name: str
    kind: str
    chained: bool
    draft_length: int
    domain: str
    bank: BankArrays
    temperatures: tuple[float, ...]
    error_mean: float | None
    error_worst: float | None


def load_texts(folder: Path, target: Path, at_most: int | None = None) -> Texts:
    """Read a folder of the lab's text, at most so many texts a domain; raises `InputError`.

    Refuses text of another target, and text without the state after the final norm.
    """
    meta = load_meta(folder)
    faults = []
    own = target_sha256(target)
    if meta.target_sha256 != own:
        faults.append(
            Fault(
                f"was made with {meta.target}, weights {meta.target_sha256[:12]}; this target's are {own[:12]}",
                str(folder / META),
                key="target_sha256",
            )
        )
    paths = shard_paths(folder)
    if not paths:
        faults.append(Fault("holds no shards yet; `python -m decoder.collect` writes them", str(folder)))
    if faults:
        raise InputError(*faults)
    texts: dict[str, list[Text]] = {}
    for path in paths:
        for text in read_shard(path):
            own_domain = texts.setdefault(text.domain, [])
            if at_most is None or len(own_domain) < at_most:
                own_domain.append(text)
    return Texts(meta, dict(sorted(texts.items())), digest(paths))


def record(
    texts: Texts,
    target: HfTarget,
    drafters: Mapping[str, Drafter],
    *,
    chained_length: int | None,
    check_texts: int,
    min_outcomes: int,
    seed: int,
) -> list[Recorded]:
    """Judge every place of every text with every drafter; raises `InputError`.

    ``chained_length``: draft tokens of chained drafters, None: what each was trained for. ``check_texts``: texts of
    each domain whose target is run again in full. ``min_outcomes``: what calibration asks for.
    """
    last = target.num_layers - 1
    faults = [
        Fault(
            f"layer {layer} was not kept; there are {', '.join(map(str, texts.meta.layers))}", key=f"--drafter {name}"
        )
        for name, drafter in drafters.items()
        for layer in (*drafter.feature_layers, last)
        if layer not in texts.meta.layers
    ]
    if faults:
        raise InputError(*faults)
    lengths = {
        name: chained_length if drafter.chained and chained_length else drafter.trained_length
        for name, drafter in drafters.items()
    }
    for name, length in lengths.items():
        have = sum(
            len(places_of(text, length))
            for own in texts.by_domain.values()
            for number, text in enumerate(own)
            if number % 2 == 0
        )
        if have < min_outcomes:
            faults.append(
                Fault(
                    f"texts of even number hold {have} places for a block of {length}; calibration needs "
                    f"{min_outcomes}: more text, or --min-outcomes",
                    key=f"--drafter {name}",
                )
            )
    if faults:
        raise InputError(*faults)
    head = target.lm_head
    judged: dict[tuple[str, str], dict[int, Judged]] = {
        (name, domain): {} for name in drafters for domain in texts.by_domain
    }
    errors: dict[tuple[str, str], list[NDArray[np.float64]]] = {key: [] for key in judged}
    total = sum(len(own) for own in texts.by_domain.values())
    with tqdm(total=total, desc="texts", unit="text", disable=None) as bar, torch.inference_mode():
        for domain, own in texts.by_domain.items():
            for number, text in enumerate(own):
                used = {name: drafter for name, drafter in drafters.items() if len(places_of(text, lengths[name])) > 0}
                states = texts.features(text, (last,))[text.prompt_tokens :].to(target.device)
                probs = target_probs(states, head, texts.temperature) if used else states
                checked = _run_again(target, text, drafters, texts.temperature) if number < check_texts else {}
                for name, drafter in used.items():
                    features = texts.features(text, drafter.feature_layers).to(target.device)
                    one = judge_text(
                        text,
                        drafter,
                        features,
                        probs,
                        temperature=texts.temperature,
                        draft_length=lengths[name],
                        seed=seed,
                        written=texts.written,
                    )
                    judged[name, domain][number] = one
                    if name in checked:
                        again = judge_text(
                            text,
                            drafter,
                            *checked[name],
                            temperature=texts.temperature,
                            draft_length=lengths[name],
                            seed=seed,
                        )
                        errors[name, domain].append(np.abs(again.chance - one.chance).ravel())
                bar.update()
    found = []
    for name, drafter in drafters.items():
        banks = {domain: judged[name, domain] for domain in texts.by_domain if judged[name, domain]}
        temperatures = _calibrate(banks.values(), min_outcomes)
        for domain, blocks in banks.items():
            off = np.concatenate(errors[name, domain]) if errors[name, domain] else None
            found.append(
                Recorded(
                    name,
                    drafter.kind,
                    drafter.chained,
                    lengths[name],
                    domain,
                    _bank(blocks, temperatures),
                    temperatures,
                    None if off is None else float(off.mean()),
                    None if off is None else float(off.max()),
                )
            )
    return found


def _run_again(
    target: HfTarget, text: Text, drafters: Mapping[str, Drafter], temperature: float
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return each drafter's features and the target's distributions from a pass over the text, nothing rounded."""
    layers = sorted({layer for drafter in drafters.values() for layer in drafter.feature_layers})
    rows = int(text.token_ids.shape[0])
    output = target.forward(text.token_ids.tolist(), target.new_cache(), layers, rows - text.prompt_tokens)
    logits = output.logits.float()
    probs = logits if temperature == 0 else torch.softmax(logits / temperature, -1)
    width = target.hidden_size
    return {
        name: (
            torch.cat(
                [output.features[:, layers.index(layer) * width :][:, :width] for layer in drafter.feature_layers]
                or [output.features[:, :0]],
                -1,
            ),
            probs,
        )
        for name, drafter in drafters.items()
    }


def _calibrate(domains: Iterable[Mapping[int, Judged]], min_outcomes: int) -> tuple[float, ...]:
    """Fit one temperature a position to the texts of even number, all domains together."""
    blocks = [one for domain in domains for number, one in domain.items() if number % 2 == 0]
    survived = np.concatenate([np.logical_and.accumulate(one.outcome, axis=1) for one in blocks])
    logits = np.concatenate([one.confidence_logits for one in blocks])
    return fit_temperatures(Outcomes(logits, survived, np.ones_like(survived)), min_outcomes=min_outcomes)


def _bank(blocks: Mapping[int, Judged], temperatures: Sequence[float]) -> BankArrays:
    logits = np.concatenate([one.confidence_logits for one in blocks.values()])
    half = np.float16
    return BankArrays(
        confidence_raw=confidence_of(logits).astype(half).astype(np.float64),
        confidence=confidence_of(logits, temperatures).astype(half).astype(np.float64),
        chance=np.concatenate([one.chance for one in blocks.values()]).astype(half).astype(np.float64),
        accepted=np.concatenate([one.outcome for one in blocks.values()]),
        request=np.repeat(np.array(list(blocks), np.int64), [len(one.place) for one in blocks.values()]),
        position=np.concatenate([one.place for one in blocks.values()]),
    )


# ---------------------------------------------------------------------------------------------------------------- files


def save_profile_of(
    path: Path, texts: Texts, found: Sequence[Recorded], folders: Mapping[str, Path], command: str
) -> None:
    """Write banks beside ``path`` and name them in the profile there; other drafters of that profile are kept.

    Raises `InputError` where the profile that is there was recorded on other text, or the disk refuses.
    """
    meta = texts.meta
    wrote = f"wrote at temperature {meta.temperature:g}" if texts.written else "read (a person's answers)"
    taken = "" if meta.prompt_tokens is None else f", prompts of {meta.prompt_tokens} tokens cut to the fewest"
    few = "" if meta.per_domain is None else f", the first {meta.per_domain} of each domain"
    ends = ", answers going on past their end" if meta.ignore_eos else ""
    source = (
        f"text that {meta.target} (weights sha256 {meta.target_sha256[:16]}) {wrote}, split {meta.split}{taken}{few}"
        f"{ends}, tokens sha256 {texts.sha256[:16]}"
    )
    kept: dict[str, ProfileDrafter] = {}
    if path.exists():
        before = load_profile(path)
        kept = {name: drafter for name, drafter in before.acceptance.items() if name not in folders}
        faults = [
            Fault(
                f"was recorded on other text ({law.provenance.source if isinstance(law, Bank) else 'none'}); this is "
                f"{source}: give another --name or --out",
                str(path),
                key=f"acceptance.{name}.domains.{domain}",
            )
            for name, drafter in kept.items()
            for domain, law in drafter.domains.items()
            if not isinstance(law, Bank) or law.provenance.source != source
        ]
        if faults:
            raise InputError(*faults)
    made: dict[str, ProfileDrafter] = dict(kept)
    parts: dict[Path, Path] = {}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for name in folders:
            own = [one for one in found if one.name == name]
            domains: dict[str, DomainLaw] = {}
            for one in own:
                file = path.with_name(f"{path.stem}_{name}_{one.domain}.npz")
                parts[file] = _write(one.bank, file)
                domains[one.domain] = Bank(
                    file=file.name,
                    sha256=file_digest(parts[file]),
                    provenance=_provenance(texts, one, folders[name], source, command),
                )
            made[name] = ProfileDrafter(
                kind="chain" if own[0].chained else "block",
                trained_length=own[0].draft_length,
                domains=domains,
            )
        profile = Profile(
            format="dspark-profile/1",
            name=f"measured/{path.stem}",
            description=f"Acceptance of drafters for {meta.target}, recorded at every position of text that it "
            f"{'wrote' if texts.written else 'read'} (temperature {texts.temperature:g}), by domain; no step time.",
            acceptance=dict(sorted(made.items())),
        )
        for file, part in parts.items():
            part.replace(file)
        save_profile(profile, path)
    except OSError as fault:
        raise InputError(Fault(f"cannot write: {(fault.strerror or str(fault)).lower()}", str(path.parent))) from None
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)


def _write(bank: BankArrays, file: Path) -> Path:
    """Write a bank beside its place: probabilities as float16, numbers as small as they fit."""
    part = file.with_name(f".{file.name}.part")
    with part.open("wb") as opened:
        np.savez_compressed(
            opened,
            confidence_raw=bank.confidence_raw.astype(np.float16),
            confidence=bank.confidence.astype(np.float16),
            chance=bank.chance.astype(np.float16),
            accepted=bank.accepted,
            request=bank.request.astype(np.int32),
            position=bank.position.astype(np.int32),
        )
    return part


def _provenance(texts: Texts, one: Recorded, folder: Path, source: str, command: str) -> Provenance:
    number = len(np.unique(one.bank.request))
    error = (
        "not measured"
        if one.error_mean is None
        else f"{one.error_mean:.1e} on average, {one.error_worst:.1e} at worst, where the target was run again"
    )
    device = texts.meta.versions.get("device", "cpu")
    return Provenance(
        origin="measured",
        source=source,
        hardware=f"{platform.machine()}, {os.cpu_count()} cores; the text: {device}",
        version=f"python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}",
        command=command,
        date=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        note=f"{len(one.bank.position)} positions of {number} {one.domain} texts; drafter {one.kind}, weights sha256 "
        f"{target_sha256(folder)[:16]}; temperatures {' '.join(f'{t:g}' for t in one.temperatures)}, fitted on the "
        "texts of even number, all domains together; target distributions and features from hidden states kept as "
        f"float16: chances are off by {error}",
    )
