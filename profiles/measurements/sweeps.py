"""Closed-loop runs of any known tool. The tool is recognised by the names in the file.

========================  =======================================================================================
``table``                 CSV: ``concurrency, output_tokens_per_s`` and more (`TABLE_COLUMNS`)
``vllm``                  result JSON of ``vllm bench serve``, ``summary.json`` of ``vllm bench sweep serve``
``sglang``                JSONL of ``sglang.bench_serving``
``aiperf``                ``profile_export_aiperf.json``
``inferencex``            ``agg_*.json`` and the CSV that its site exports
========================  =======================================================================================
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from profiles.errors import Fault
from profiles.measurements.points import LoadPoint
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

TABLE_COLUMNS = (
    "output_tokens_per_s",
    "user_tokens_per_s",
    "tpot_ms",
    "ttft_ms",
    "prompt_tokens",
    "output_tokens",
    "accepted_length",
    "policy",
    "k",
)
#: Requests of a run for each that is under way at once, under which its ends weigh.
FEW_WAVES = 3


@dataclass(frozen=True, slots=True)
class Sweep:
    """The runs of one file, the tool that wrote it, and what a reader should know of them."""

    tool: str
    points: tuple[LoadPoint, ...]
    remarks: tuple[str, ...] = ()


def read_sweep(path: Path, policy: str | None = None, only: Mapping[str, str] | None = None) -> Sweep:
    """Read the closed-loop runs of a file.

    Parameters
    ----------
    policy : ``none``, ``mtp1`` or ``fixed:K``, optional
        What the engine ran, where the file does not say; a file that says otherwise is at fault.
    only : mapping, optional
        Keep the rows of an export whose columns equal these.

    Raises
    ------
    MeasurementError
        Every fault of the file at once.
    """
    text, file = read_text(path), str(path)
    if looks_like_json(text):
        rows = json_rows(text, file)
        tool = _tool_of_json(rows[0])
    else:
        columns, rows = csv_rows(text, file)
        tool = "inferencex" if "Output Throughput/GPU (tok/s)" in columns else "table"
        if tool == "table":
            check_columns(columns, ("concurrency",), TABLE_COLUMNS, file)
    rows = _only(rows, only or {}, file)
    sweep = _READERS[tool](rows)
    points = [_as_said(point, policy) for point in sweep.points] if policy else list(sweep.points)
    for point in points:
        _check_against_itself(point)
    return replace(sweep, points=tuple(points))


def _tool_of_json(row: Row) -> str:
    values = row.values
    if "output_tput_per_gpu" in values:
        return "inferencex"
    if isinstance(values.get("output_token_throughput"), dict) or "input_config" in values:
        return "aiperf"
    if "output_throughput" in values:
        return "sglang" if "accept_length" in values or "mean_e2e_latency_ms" in values else "vllm"
    if "error_type" in values and "bench_overrides" in values:
        raise row.fault("a benchmark that failed: it holds no result")
    keys = ", ".join(list(values)[:6]) or "none"
    raise row.fault(
        "not a result of vllm bench serve (output_throughput, mean_tpot_ms), SGLang's bench_serving (accept_length), "
        "AIPerf "
        f"(input_config, output_token_throughput) or InferenceX (output_tput_per_gpu); keys are {keys}"
    )


def _only(rows: list[Row], only: Mapping[str, str], file: str) -> list[Row]:
    kept = rows
    for key, wanted in only.items():
        found = sorted({row.text(key) for row in kept})
        kept = [row for row in kept if row.text(key) == wanted]
        if not kept:
            raise MeasurementError(Fault(f"no row has {key}={wanted}; there are {', '.join(found)}", file))
    return kept


def _as_said(point: LoadPoint, policy: str) -> LoadPoint:
    """Return the point under the policy that the command line names."""
    k = draft_tokens_of(policy)
    if point.draft_tokens not in (None, 0, k) or (k == 0 and point.accepted_length not in (None, 1.0)):
        said = f"k = {point.draft_tokens}" if point.draft_tokens else f"an accepted length of {point.accepted_length:g}"
        raise MeasurementError(Fault(f"'{policy}' was said on the command line; the file has {said}", point.place))
    accepted = 1.0 if k == 0 else point.accepted_length
    if k > 0 and point.draft_tokens == 0:
        accepted = None  # the file knew nothing of speculation
    return replace(point, draft_tokens=k, accepted_length=accepted)


def draft_tokens_of(policy: str) -> int:
    """Return k of ``none``, ``mtp1`` or ``fixed:K``; raises ValueError at anything else."""
    if policy in ("none", "mtp1"):
        return 0 if policy == "none" else 1
    found = re.fullmatch(r"fixed:([1-9][0-9]?)", policy)
    if found is None:
        raise ValueError(
            f"unknown policy '{policy}'; known: none, mtp1, fixed:K: a fit needs runs whose rounds are all of one "
            "length"
        )
    return int(found[1])


def _check_against_itself(point: LoadPoint) -> None:
    """Raise `MeasurementError` where a point contradicts itself, as where per GPU and per engine are mixed up."""
    if point.accepted_length is not None and point.draft_tokens is not None:
        most = point.draft_tokens + 1
        if not 1 <= point.accepted_length <= most:
            raise MeasurementError(
                Fault(
                    f"accepted length {point.accepted_length:g} is outside 1 to {most}, which is what k = "
                    f"{point.draft_tokens} "
                    "can yield, bonus included",
                    point.place,
                )
            )
    if point.output_tokens_per_s is None or point.tpot_s is None:
        return
    if point.output_tokens_per_s > 1.25 * point.concurrency / point.tpot_s:
        raise MeasurementError(
            Fault(
                f"{point.output_tokens_per_s:g} output tokens/s are more than {point.concurrency:g} requests at "
                f"{1 / point.tpot_s:.3g} tokens/s each can give; is one of them per GPU, or the concurrency another?",
                point.place,
            )
        )


# --------------------------------------------------------------------------------------------------------- a table


def _read_table(rows: Sequence[Row]) -> Sweep:
    return Sweep("table", tuple(collect(rows, _table_point)))


def _table_point(row: Row) -> LoadPoint:
    user = row.maybe("user_tokens_per_s", above=0)
    tpot_ms = row.maybe("tpot_ms", above=0)
    output = row.maybe("output_tokens_per_s", above=0)
    if user is None and tpot_ms is None and output is None:
        raise row.fault("needs output_tokens_per_s, user_tokens_per_s or tpot_ms", "output_tokens_per_s")
    if user is not None and tpot_ms is not None and abs(user * tpot_ms / 1e3 - 1) > 0.05:
        raise row.fault(f"{user:g} contradicts tpot_ms {tpot_ms:g}: one is 1000 / the other", "user_tokens_per_s")
    ttft_ms = row.maybe("ttft_ms", above=0)
    k = _table_draft_tokens(row)
    accepted = row.maybe("accepted_length", least=1)
    if k == 0 and accepted not in (None, 1.0):
        raise row.fault(f"{accepted:g} without speculation; give policy and k", "accepted_length")
    return LoadPoint(
        concurrency=row.number("concurrency", above=0),
        output_tokens_per_s=output,
        tpot_s=1 / user if user is not None else tpot_ms / 1e3 if tpot_ms is not None else None,
        ttft_s=ttft_ms / 1e3 if ttft_ms is not None else None,
        prompt_tokens=row.maybe("prompt_tokens", above=0),
        output_tokens=row.maybe("output_tokens", above=1),
        accepted_length=1.0 if k == 0 else accepted,
        draft_tokens=k,
        place=row.place,
    )


def _table_draft_tokens(row: Row) -> int:
    policy, k = row.text("policy") or None, row.maybe("k", least=0, most=63, whole=True)
    if policy is None:
        return int(k or 0)
    if policy == "fixed":
        return int(row.number("k", least=1, most=63, whole=True))
    if policy not in ("none", "mtp1"):
        raise row.fault(
            f"unknown policy '{policy}'; known: none, mtp1, fixed: a fit needs runs whose rounds are all of one length",
            "policy",
        )
    wanted = 0 if policy == "none" else 1
    if k not in (None, wanted):
        raise row.fault(f"expected {wanted} with policy {policy} (got {k:g})", "k")
    return wanted


# ------------------------------------------------------------------------------------------------------- vLLM and
# SGLang


def _read_vllm(rows: Sequence[Row]) -> Sweep:
    return Sweep("vllm", tuple(collect(rows, _vllm_point)), _waves(rows))


def _vllm_point(row: Row) -> LoadPoint:
    """Read a result of ``vllm bench serve``: throughput of the engine, mean TPOT over requests, counters of the run."""
    _check_finished(row)
    positions = len(row.numbers("spec_decode_per_position_acceptance_rates")) if _speculated(row) else 0
    accepted = row.maybe("spec_decode_acceptance_length", least=1)
    return LoadPoint(
        concurrency=_concurrency(row),
        output_tokens_per_s=row.number("output_throughput", above=0),
        tpot_s=row.number("mean_tpot_ms", above=0) / 1e3,
        ttft_s=_milliseconds(row, "mean_ttft_ms"),
        prompt_tokens=_mean_tokens(row, "total_input_tokens"),
        output_tokens=_mean_tokens(row, "total_output_tokens"),
        accepted_length=accepted if _speculated(row) else 1.0,
        draft_tokens=positions or None if _speculated(row) else 0,
        place=row.place,
    )


def _speculated(row: Row) -> bool:
    return row.has("spec_decode_acceptance_length")


def _read_sglang(rows: Sequence[Row]) -> Sweep:
    return Sweep("sglang", tuple(collect(rows, _sglang_point)), _waves(rows))


def _sglang_point(row: Row) -> LoadPoint:
    """Read a line of ``sglang.bench_serving``; its accept length counts the bonus token, its k is not written."""
    _check_finished(row)
    accepted = row.maybe("accept_length", least=1)
    return LoadPoint(
        concurrency=_concurrency(row),
        output_tokens_per_s=row.number("output_throughput", above=0),
        tpot_s=row.number("mean_tpot_ms", above=0) / 1e3,
        ttft_s=_milliseconds(row, "mean_ttft_ms"),
        prompt_tokens=_mean_tokens(row, "total_input_tokens"),
        output_tokens=_mean_tokens(row, "total_output_tokens"),
        accepted_length=1.0 if accepted is None else accepted,
        draft_tokens=0 if accepted is None else None,
        place=row.place,
    )


def _concurrency(row: Row) -> float:
    if not row.has("max_concurrency"):
        rate = row.text("request_rate") or "not said"
        raise row.fault(
            f"missing or null: requests were sent at a rate ({rate}), so that the load was not held; run the "
            "benchmark with "
            "--max-concurrency",
            "max_concurrency",
        )
    asked = row.number("max_concurrency", above=0)
    requests = row.maybe("completed", above=0)
    if requests is not None and requests < asked:
        raise row.fault(
            f"only {requests:g} requests were completed: so many never ran at once (got {asked:g})", "max_concurrency"
        )
    return asked


def _check_finished(row: Row) -> None:
    if row.maybe("completed", least=0) == 0:
        raise row.fault("no request was completed", "completed")


def _milliseconds(row: Row, key: str) -> float | None:
    value = row.maybe(key, least=0)
    return None if not value else value / 1e3


def _mean_tokens(row: Row, key: str) -> float | None:
    total, requests = row.maybe(key, least=0), row.maybe("completed", above=0)
    return None if not total or requests is None else total / requests


def _waves(rows: Sequence[Row]) -> tuple[str, ...]:
    remarks = []
    for row in rows:
        requests, asked = row.maybe("completed"), row.maybe("max_concurrency")
        if requests and asked and requests < FEW_WAVES * asked:
            remarks.append(
                f"{row.place}: {requests:g} requests at {asked:g} at once: the beginning and the end of the run, at "
                "lower "
                "load, weigh in its means"
            )
        if failed := row.maybe("failed"):
            remarks.append(f"{row.place}: {failed:g} requests failed; the means are of the others")
    return tuple(remarks)


# ----------------------------------------------------------------------------------------------------------------
# AIPerf

_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0}


def _read_aiperf(rows: Sequence[Row]) -> Sweep:
    remarks = tuple(
        f"{row.place}: {count:g} requests ended in an error; the means are of the others"
        for row in rows
        if (count := row.maybe("error_request_count.avg"))
    )
    return Sweep("aiperf", tuple(collect(rows, _aiperf_point)), remarks)


def _aiperf_point(row: Row) -> LoadPoint:
    """Read ``profile_export_aiperf.json``: each metric is a block with a unit and ``avg``; ITL is what we call TPOT."""
    if not row.has("inter_token_latency"):
        raise row.fault("missing: the run did not stream; use --streaming", "inter_token_latency")
    accepted = row.maybe("spec_decode_acceptance_length.avg", least=1)
    return LoadPoint(
        concurrency=_aiperf_concurrency(row),
        output_tokens_per_s=row.number("output_token_throughput.avg", above=0),
        tpot_s=_aiperf_seconds(row, "inter_token_latency"),
        ttft_s=_aiperf_seconds(row, "time_to_first_token") if row.has("time_to_first_token") else None,
        prompt_tokens=row.maybe("input_sequence_length.avg", above=0),
        output_tokens=row.maybe("output_sequence_length.avg", above=1),
        accepted_length=1.0 if accepted is None else accepted,
        draft_tokens=0 if accepted is None else None,
        place=row.place,
    )


def _aiperf_seconds(row: Row, metric: str) -> float:
    unit = row.text(f"{metric}.unit")
    if unit not in _SECONDS:
        raise row.fault(f"expected one of {', '.join(_SECONDS)} (got '{unit}')", f"{metric}.unit")
    return row.number(f"{metric}.avg", above=0) * _SECONDS[unit]


def _aiperf_concurrency(row: Row) -> float:
    if row.has("input_config.loadgen.concurrency"):
        return row.number("input_config.loadgen.concurrency", above=0)
    phases = (row.values.get("input_config") or {}).get("phases")
    for phase in reversed(phases if isinstance(phases, list) else []):  # the last is the one that was measured
        if isinstance(phase, dict) and phase.get("concurrency") is not None:
            return Row(row.file, row.line, phase, f"{row.prefix}input_config.phases.").number("concurrency", above=0)
    raise row.fault(
        "missing: the load was not held; run with --concurrency and no request rate", "input_config.loadgen.concurrency"
    )


# ------------------------------------------------------------------------------------------------------------
# InferenceX

#: The columns of the site's CSV, by the keys of the result files.
_SITE = {
    "conc": "Concurrency",
    "output_tput_per_gpu": "Output Throughput/GPU (tok/s)",
    "mean_intvty": "Mean Interactivity (tok/s/user)",
    "mean_tpot": "Mean TPOT (ms)",
    "mean_ttft": "Mean TTFT (ms)",
    "isl": "ISL",
    "osl": "OSL",
    "tp": "TP",
    "ep": "EP",
    "dp_attention": "DP Attention",
    "disagg": "Disaggregated",
    "spec_decoding": "Spec Decoding",
    "hw": "Hardware",
    "model": "Model",
    "framework": "Framework",
    "precision": "Precision",
}
#: One engine is one value of each of these.
_ONE_ENGINE = ("hw", "model", "framework", "precision", "tp", "ep", "pp", "dp_attention")


def _read_inferencex(rows: Sequence[Row]) -> Sweep:
    named = {True: _SITE, False: {key: key for key in _SITE}}["Concurrency" in rows[0].values]
    faults = []
    for key in _ONE_ENGINE:
        found = sorted({row.text(named.get(key, key)) for row in rows})
        if len(found) > 1:
            column = named.get(key, key)
            faults.append(
                Fault(
                    f"several engines: {column} is {', '.join(found)}; choose with --only '{column}=...'", rows[0].file
                )
            )
    if faults:
        raise MeasurementError(*faults)
    speculating = [row for row in rows if row.text(named["spec_decoding"]).lower() not in ("", "none", "false")]
    plain = [row for row in rows if row not in speculating]
    if not plain:
        raise MeasurementError(
            Fault(
                "every row speculates, and neither accepted length nor draft length is exported: a round's length "
                "and what "
                "it yields cannot be told apart; settle it with the rows of no speculation, or with acceptance "
                "counters",
                rows[0].file,
            )
        )
    remarks = []
    if speculating:
        remarks.append(
            f"{rows[0].file}: {len(speculating)} of {len(rows)} rows speculate and are set aside: the export has "
            "neither "
            "their accepted length nor k"
        )
    return Sweep("inferencex", tuple(collect(plain, lambda row: _inferencex_point(row, named))), tuple(remarks))


def _inferencex_point(row: Row, named: Mapping[str, str]) -> LoadPoint:
    """Read a row of InferenceX: throughput is per GPU, times are seconds.

    The site's CSV heads its times ``(ms)`` and gives seconds; which of the two is found out from interactivity, which
    is 1 / TPOT in the same row.
    """
    if row.text(named["disagg"]).lower() == "true":
        raise row.fault(
            "prefill on other GPUs: concurrency there is not what this engine decodes; leave the row out",
            named["disagg"],
        )
    gpus = int(row.number(named["tp"], least=1, whole=True) * (row.maybe("pp", least=1) or 1))
    tpot = row.number(named["mean_tpot"], above=0)
    user = row.number(named["mean_intvty"], above=0)
    unit = 1.0 if abs(tpot * user - 1) < 0.1 else 1e-3 if abs(tpot * user / 1e3 - 1) < 0.1 else None
    if unit is None:
        raise row.fault(
            f"{tpot:g} contradicts {named['mean_intvty']} {user:g}: it is 1 / the other", named["mean_tpot"]
        )
    ttft = row.maybe(named["mean_ttft"], above=0)
    return LoadPoint(
        concurrency=row.number(named["conc"], above=0),
        output_tokens_per_s=row.number(named["output_tput_per_gpu"], above=0) * gpus,
        tpot_s=1 / user,
        ttft_s=ttft * unit if ttft is not None else None,
        prompt_tokens=row.maybe(named["isl"], above=0),
        output_tokens=row.maybe(named["osl"], above=1),
        gpus=gpus,
        place=row.place,
    )


_READERS: dict[str, Callable[[Sequence[Row]], Sweep]] = {
    "table": _read_table,
    "vllm": _read_vllm,
    "sglang": _read_sglang,
    "aiperf": _read_aiperf,
    "inferencex": _read_inferencex,
}
