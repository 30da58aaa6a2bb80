"""What a drafter's tokens were worth, from the counters of any known engine.

- Prometheus text of vLLM (``/metrics``): ``vllm:spec_decode_num_drafts``, ``..._num_draft_tokens``,
  ``..._num_accepted_tokens`` and ``..._num_accepted_tokens_per_pos{position="0"}``; of two snapshots, the difference.
- Result JSON of ``vllm bench serve``: rates by position and the number of drafts.
- SGLang's ``meta_info``: ``spec_accept_histogram`` (or ``spec_correct_drafts_histogram``), rounds by draft tokens
accepted. - CSV ``k, accepted_length``: the mean of runs with each draft length.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from profiles.errors import Fault
from profiles.measurements.points import AcceptanceCounts
from profiles.measurements.rows import (
    MeasurementError,
    Row,
    check_columns,
    collect,
    csv_rows,
    json_rows,
    looks_like_json,
    read_text,
)

#: Draft tokens that may be missing from whole blocks (requests that end inside one) before depths count as censored.
CUT_BLOCKS = 0.02

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?$")
_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')
_MEAN_ONLY = (
    "a mean accepted length at one draft length is one number for k positions; settle it with {better}, or with "
    "means at "
    "k = 1, 2, ... as CSV (k, accepted_length)"
)


def read_acceptance(path: Path, before: Path | None = None) -> AcceptanceCounts | dict[int, float]:
    """Read counts by position, or mean accepted lengths by draft length, from a file of a known kind.

    ``before``: an earlier snapshot of the same Prometheus counters, subtracted. Raises `MeasurementError`.
    """
    text, file = read_text(path), str(path)
    if looks_like_json(text):
        found: AcceptanceCounts | dict[int, float] = _counts_of_json(json_rows(text, file))
    elif text.lstrip().startswith("#") or _SAMPLE.match(text.strip().splitlines()[0].strip()):
        counters = _counters(text, file)
        if before is not None:
            counters = _between(_counters(read_text(before), str(before)), counters, file)
        return _counts_of_counters(counters, file)
    else:
        found = _lengths(text, file)
    if before is not None:
        raise MeasurementError(Fault("an earlier snapshot is of use with Prometheus counters only", str(before)))
    return found


# ------------------------------------------------------------------------------------------------------- Prometheus
# text


def _counters(text: str, file: str) -> dict[str, float]:
    """Return the speculation counters of a Prometheus text, summed over engines; positions as ``per_pos:0``."""
    found: dict[str, float] = defaultdict(float)
    models: set[str] = set()
    other = ""
    for n, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        sample = _SAMPLE.match(line)
        if sample is None:
            raise MeasurementError(Fault(f"not a line of Prometheus text (got '{line[:60]}')", file, n))
        name = sample[1].removesuffix("_total")
        if "spec_accept_length" in name or "spec_decode_draft_acceptance_rate" in name:
            other = name
        if not name.startswith("vllm:spec_decode_num_"):
            continue
        labels = dict(_LABEL.findall(sample[2] or ""))
        models.add(labels.get("model_name", ""))
        row = Row(file, n, {name: sample[3]})
        key = name.removeprefix("vllm:spec_decode_num_")
        if key == "accepted_tokens_per_pos":
            position = labels.get("position", "")
            if not position.isdecimal():
                raise row.fault(f'expected a label position="0", "1", ... (got \'{position}\')', name)
            key = f"per_pos:{int(position)}"
        found[key] += row.number(name, least=0, whole=True)
    if len(models) > 1:
        raise MeasurementError(
            Fault(f"counters of several models: {', '.join(sorted(models))}; keep one's lines", file)
        )
    if "drafts" not in found or "per_pos:0" not in found:
        hint = f"; {other} is not enough: {_MEAN_ONLY.format(better='counts by position')}" if other else ""
        raise MeasurementError(
            Fault(
                "no counters vllm:spec_decode_num_drafts and vllm:spec_decode_num_accepted_tokens_per_pos: was "
                "speculation "
                f"on?{hint}",
                file,
            )
        )
    return dict(found)


def _between(first: Mapping[str, float], last: Mapping[str, float], file: str) -> dict[str, float]:
    fallen = [key for key in first if last.get(key, 0.0) < first[key]]
    if fallen:
        raise MeasurementError(
            Fault(
                f"{fallen[0]} fell from {first[fallen[0]]:g} to {last.get(fallen[0], 0.0):g}: the engine was restarted",
                file,
            )
        )
    return {key: value - first.get(key, 0.0) for key, value in last.items()}


def _counts_of_counters(counters: Mapping[str, float], file: str) -> AcceptanceCounts:
    positions = sorted(int(key.removeprefix("per_pos:")) for key in counters if key.startswith("per_pos:"))
    if positions != list(range(len(positions))):
        raise MeasurementError(Fault(f"positions are {', '.join(map(str, positions))}; expected 0, 1, 2, ...", file))
    accepted = tuple(counters[f"per_pos:{position}"] for position in positions)
    total = counters.get("accepted_tokens")
    if total is not None and abs(total - sum(accepted)) > 1e-3 * total:
        raise MeasurementError(
            Fault(f"accepted by position add up to {sum(accepted):g}, num_accepted_tokens is {total:g}", file)
        )
    return _checked(AcceptanceCounts(counters["drafts"], accepted, counters.get("draft_tokens")), Row(file, None, {}))


def _checked(counts: AcceptanceCounts, row: Row) -> AcceptanceCounts:
    """Return the counts; raises `MeasurementError` where they are no counts of accepted prefixes of whole blocks."""
    if counts.rounds <= 0:
        raise row.fault("no drafts: nothing was speculated")
    before = counts.rounds
    for k, count in enumerate(counts.accepted, start=1):
        if count > before * (1 + 1e-9):
            what = f"the {counts.rounds:g} drafts" if k == 1 else f"{before:g} at position {k - 1}"
            raise row.fault(
                f"{count:g} accepted at draft position {k} are more than {what}: a token counts only if all before it "
                "were accepted; these are rates of something else"
            )
        before = count
    whole = counts.rounds * len(counts.accepted)
    if counts.drafted is not None and counts.drafted < (1 - CUT_BLOCKS) * whole:
        raise row.fault(
            f"blocks were cut: {counts.drafted / counts.rounds:.2f} of {len(counts.accepted)} draft tokens were "
            "verified in a "
            "round, so that what deeper ones are worth is unknown, not rejected; measure with whole blocks (a fixed "
            "draft "
            "length, no schedule by load or confidence)"
        )
    return counts


# ------------------------------------------------------------------------------------------------------------------
# JSON


def _counts_of_json(rows: list[Row]) -> AcceptanceCounts:
    first = rows[0]
    if first.has("spec_decode_acceptance_length") or first.has("spec_decode_num_drafts"):
        parts = collect(rows, _counts_of_vllm)
    else:
        parts = collect(rows, _counts_of_sglang)
    depth = max(len(part.accepted) for part in parts)
    return AcceptanceCounts(
        rounds=sum(part.rounds for part in parts),
        accepted=tuple(sum(part.accepted[k] for part in parts if k < len(part.accepted)) for k in range(depth)),
    )


def _counts_of_vllm(row: Row) -> AcceptanceCounts:
    if not row.has("spec_decode_per_position_acceptance_rates"):
        better = "a version of vLLM that reports rates by position, or its /metrics"
        raise row.fault(_MEAN_ONLY.format(better=better), "spec_decode_per_position_acceptance_rates")
    rounds = row.number("spec_decode_num_drafts", above=0)
    rates = row.numbers("spec_decode_per_position_acceptance_rates")
    counts = AcceptanceCounts(rounds, tuple(rate * rounds for rate in rates), row.maybe("spec_decode_draft_tokens"))
    return _checked(counts, row)


def _counts_of_sglang(row: Row) -> AcceptanceCounts:
    """Read one answer's ``meta_info``: histogram[n] rounds accepted exactly n draft tokens."""
    meta = row.values.get("meta_info")
    inner = Row(row.file, row.line, meta, f"{row.prefix}meta_info.") if isinstance(meta, dict) else row
    for key in ("spec_correct_drafts_histogram", "spec_accept_histogram"):
        if inner.has(key):
            histogram = inner.numbers(key)
            rounds = sum(histogram)
            accepted = tuple(sum(histogram[k:]) for k in range(1, len(histogram)))
            if not accepted or rounds <= 0:
                raise inner.fault("no round with a draft token", key)
            return AcceptanceCounts(rounds, accepted)
    means = [key for key in ("spec_accept_length", "accept_length") if inner.has(key)]
    if means:
        raise inner.fault(_MEAN_ONLY.format(better="spec_accept_histogram of the answers' meta_info"), means[0])
    keys = ", ".join(list(inner.values)[:6]) or "none"
    raise inner.fault(f"no acceptance here: neither spec_accept_histogram nor spec_decode_... ; keys are {keys}")


# ------------------------------------------------------------------------------------------------------ means by length


def _lengths(text: str, file: str) -> dict[int, float]:
    columns, rows = csv_rows(text, file)
    check_columns(columns, ("k", "accepted_length"), (), file)
    found: dict[int, float] = {}
    for k, length, row in collect(rows, _length):
        if k in found:
            raise row.fault(f"{k} appears twice", "k")
        found[k] = length
    for k in range(1, max(found)):
        if k not in found:
            raise MeasurementError(
                Fault(
                    f"k = {k} is missing: survival at a position is the difference of two neighbours; measure it", file
                )
            )
    return found


def _length(row: Row) -> tuple[int, float, Row]:
    k = int(row.number("k", least=1, most=64, whole=True))
    return k, row.number("accepted_length", least=1, most=k + 1), row
