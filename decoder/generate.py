"""Decode one prompt and show which tokens were drafted, which were refused and which the target added."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from decoder.options import add_policy, command_parser
from profiles.errors import Fault, InputError, exit_code_of

if TYPE_CHECKING:
    from decoder.loading import Models
    from decoder.session import Generation

#: Terminal colours: accepted, rejected, the target's own.
ACCEPTED, REJECTED, BONUS, PLAIN = "\x1b[32m", "\x1b[9;31m", "\x1b[1;34m", "\x1b[0m"


def parser() -> argparse.ArgumentParser:
    """Return the command's argument parser."""
    out = command_parser(
        "generate",
        "Decode one prompt by speculation. Accepted draft tokens are printed as they are (green on a terminal), "
        "tokens\nof the target in [brackets], the first refused draft token of a round in ~tildes~.",
        "python -m decoder.generate --prompt 'def mean(xs):'\n"
        "  python -m decoder.generate --target ../shared/reference/deepspec/checkpoints/target_a_qwen3_4l_tied \\\n"
        "      --drafter ../shared/reference/deepspec/checkpoints/dspark_vanilla_block7 --prompt-ids 253,5,9,200,31",
    )
    what = out.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", metavar="TEXT", help="needs a tokenizer in the target folder")
    what.add_argument("--prompt-ids", metavar="ID,ID,...", help="token ids")
    add_policy(out)
    out.add_argument("--rounds", action="store_true", help="print a line a round")
    out.add_argument(
        "--check",
        action="store_true",
        help="decode without speculation too and compare (greedy only); exit 1 where they differ beyond rounding",
    )
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    options = parser().parse_args(argv)
    return exit_code_of(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    # Imports wait until here so that --help answers at once.
    from decoder.identity import GAP_BOUNDS, first_difference
    from decoder.loading import (
        TORCH_DTYPES,
        chosen_policy,
        chosen_rates,
        decode_with_progress,
        encode,
        load_models,
        make_decoder,
        make_request,
        parse_policy,
        write_json,
    )

    models = load_models(options)
    prompt = encode(options.prompt, models, "--prompt") if options.prompt is not None else _ids(options.prompt_ids)
    request = make_request(options, models, "prompt", prompt)
    if options.check and not request.sampling.greedy:
        raise InputError(
            Fault("needs --temperature 0: sampled texts are equal in law, not token by token", key="--check")
        )
    policy = chosen_policy(options, models)
    decoder = make_decoder(options, models, policy, chosen_rates(options, policy))
    finished, interrupted = decode_with_progress(decoder, [request], 1, policy.kind)
    if interrupted:
        raise KeyboardInterrupt
    found = finished[0]
    report = _report(found, models, options)
    code = 0
    if found.finish_reason == "failed":
        print(found.error, file=sys.stderr)
        code = 1
    colour = sys.stdout.isatty()
    print(marked(found, _shower(models), colour=colour))
    print(f"\n{legend(colour=colour)}")
    for line in _lines(found, options.rounds):
        print(line)
    if options.check:
        alone = make_decoder(options, models, parse_policy("none")).generate([request])[0]
        bound = GAP_BOUNDS[TORCH_DTYPES[options.dtype]]
        difference = first_difference(found.output_ids, alone.output_ids, alone.top2_gaps, bound)
        report["check"] = {
            "name": "greedy output equals the target's own",
            "predicted": None,
            "observed": None if difference is None else difference.gap,
            "error": None if difference is None else difference.token,
            "bound": bound,
            "unit": "gap between the top two logits at the first difference",
            "holds": difference is None or difference.excused,
        }
        if difference is None:
            print("check: the same tokens as the target alone")
        else:
            why = "a near-tie" if difference.excused else "NOT a near-tie"
            print(
                f"check: output token {difference.token} differs ({difference.found_id} for {difference.expected_id}): "
                f"{why}, the target's top two logits are {difference.gap:.3g} apart (bound {bound:g})"
            )
            code = code if difference.excused else 1
    write_json(options.json, report)
    return code


def _ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(
            Fault(f"expected whole numbers with commas between (got '{text}')", key="--prompt-ids")
        ) from None


def _shower(models: Models) -> Callable[[int], str]:
    decode = models.decode
    if decode is None:
        return lambda token: f"{token} "
    return lambda token: decode([token])


def legend(*, colour: bool) -> str:
    """Say what the marks of `marked` mean."""
    accepted, refused, bonus = "accepted draft tokens", "the first refused of a round", "the target's own"
    if colour:
        return f"{ACCEPTED}{accepted}{PLAIN}, {BONUS}{bonus}{PLAIN}, {REJECTED}{refused}{PLAIN}"
    return f"{accepted}, [{bonus}], ~{refused}~"


def marked(generation: Generation, show: Callable[[int], str], *, colour: bool) -> str:
    """Return the output with accepted, refused and bonus tokens told apart, round by round."""

    def bonus(token: int) -> str:
        return f"{BONUS}{show(token)}{PLAIN}" if colour else f"[{show(token)}]"

    parts = [bonus(token) for token in generation.output_ids[:1]]
    for record in generation.rounds:
        for token in record.proposed[: record.accepted_draft_tokens]:
            parts.append(f"{ACCEPTED}{show(token)}{PLAIN}" if colour else show(token))
        if False in record.judged:
            refused = show(record.proposed[record.accepted_draft_tokens])
            parts.append(f"{REJECTED}{refused}{PLAIN}" if colour else f"~{refused}~")
        if record.bonus_token is not None:
            parts.append(bonus(record.bonus_token))
    return "".join(parts)


def _lines(generation: Generation, each_round: bool) -> list[str]:
    rounds = generation.rounds
    lines = []
    if each_round:
        lines.append("round  position  proposed  verified  accepted  bonus  confidence")
        for number, record in enumerate(rounds, start=1):
            bonus = "-" if record.bonus_token is None else str(record.bonus_token)
            confidence = " ".join(f"{value:.2f}" for value in record.confidence)
            lines.append(
                f"{number:5d}  {record.anchor_position:8d}  {len(record.proposed):8d}  {record.verify_length:8d}  "
                f"{record.accepted_draft_tokens:8d}  {bonus:>5s}  {confidence}"
            )
    emitted = sum(record.emitted_tokens for record in rounds)
    lines.append(f"{len(generation.output_ids)} tokens, finished by {generation.finish_reason}")
    if rounds:
        verified = sum(record.verify_length for record in rounds)
        accepted = sum(record.accepted_draft_tokens for record in rounds)
        rate = f"{accepted / verified:.3f}" if verified else "none verified"
        lines.append(f"{len(rounds)} rounds, {emitted / len(rounds):.2f} tokens a round (bonus token included)")
        lines.append(f"draft tokens accepted: {accepted} of {verified} verified ({rate})")
    return lines


def _report(generation: Generation, models: Models, options: argparse.Namespace) -> dict[str, Any]:
    rounds = generation.rounds
    decode = models.decode
    return {
        "prompt_tokens": len(generation.request.prompt_ids),
        "output_ids": generation.output_ids,
        "text": decode(generation.output_ids) if decode else None,
        "logprobs": generation.logprobs,
        "finish_reason": generation.finish_reason,
        "error": generation.error,
        "greedy": generation.request.sampling.greedy,
        "seed": options.seed,
        "accepted_length_tokens": sum(r.emitted_tokens for r in rounds) / len(rounds) if rounds else None,
        "rounds": [
            {
                "anchor_position": r.anchor_position,
                "proposed_ids": list(r.proposed),
                "confidence_logits": list(r.confidence_logits),
                "confidence": list(r.confidence),
                "verify_length": r.verify_length,
                "accepted_draft_tokens": r.accepted_draft_tokens,
                "bonus_token": r.bonus_token,
                "emitted_tokens": r.emitted_tokens,
                "draft_s": r.draft_s,
                "verify_s": r.verify_s,
            }
            for r in rounds
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
