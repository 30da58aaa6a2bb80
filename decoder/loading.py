"""From a command's options to models, prompts and policies, and back to files that appear whole."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from decoder.calibration import Calibration, load_calibration
from decoder.checkpoint import load_drafter
from decoder.drafter import Drafter
from decoder.errors import CheckpointError, Fault, InputError, RequestError
from decoder.lab.targets import drafter_folder, target_folder
from decoder.packed import pack_models
from decoder.rates import FlatRates, ProfileRates, Rates
from decoder.sampling import Sampling
from decoder.session import Decoder, Generation, Request
from decoder.stopping import Decode, Limits
from decoder.target import HfTarget, load_target
from profiles.files import find_profile, load_profile
from profiles.reading import parse_document, validate
from sim.verify import POLICIES, Policy

TORCH_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True)
class Models:
    """Loaded models and what goes with them."""

    target: HfTarget
    drafter: Drafter | None
    calibration: Calibration | None
    tokenizer: Any
    eos_ids: frozenset[int]
    #: Whether a prompt goes into the target's chat template.
    chat: bool

    @property
    def decode(self) -> Decode | None:
        """Token ids to text, where the target folder has a tokenizer."""
        if self.tokenizer is None:
            return None

        def text(ids: Sequence[int]) -> str:
            return str(self.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

        return text


def load_models(options: argparse.Namespace) -> Models:
    """Load what the options name; raises `InputError`."""
    if options.threads is not None:
        if options.threads < 1:
            raise InputError(Fault(f"expected at least 1 (got {options.threads})", key="--threads"))
        torch.set_num_threads(options.threads)
    device = check_device(options.device)
    dtype = TORCH_DTYPES[options.dtype]
    drafter_at = drafter_folder(options.drafter, options.target)
    folder = target_folder(options.target, options.lab)
    target = load_target(folder, device=device, dtype=dtype)
    drafter = load_drafter(drafter_at, target, device=device, dtype=dtype) if drafter_at else None
    pack_models(target, drafter)
    calibration = load_calibration(options.calibration) if options.calibration else None
    if calibration is not None:
        if drafter is None:
            raise InputError(Fault("a calibration needs a drafter", key="--calibration"))
        if calibration.drafter != drafter.kind:
            raise CheckpointError(
                Fault(
                    f"was fitted for a {calibration.drafter} drafter; this one is {drafter.kind}",
                    str(options.calibration),
                    key="drafter",
                )
            )
    tokenizer = load_tokenizer(folder)
    chat = not options.raw and bool(getattr(tokenizer, "chat_template", None))
    return Models(target, drafter, calibration, tokenizer, eos_ids(target), chat)


def check_device(name: str) -> str:
    """Return the name of a device that is there; raises `InputError`."""
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
        raise InputError(Fault(f"expected cpu, cuda or cuda:N (got '{name}')", key="--device"))
    if kind == "cuda" and not torch.cuda.is_available():
        raise InputError(Fault("this machine, or this build of torch, has no CUDA device", key="--device"))
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise InputError(Fault(f"there are {torch.cuda.device_count()} CUDA devices (got '{name}')", key="--device"))
    return name


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a target folder, None where it has none; raises `InputError`."""
    if not (folder / "tokenizer.json").exists() and not (folder / "tokenizer_config.json").exists():
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as fault:
        raise InputError(Fault(f"its tokenizer cannot be loaded: {str(fault).splitlines()[0]}", str(folder))) from None


def eos_ids(target: HfTarget) -> frozenset[int]:
    """Return the target's own stop tokens."""
    config = getattr(target.model, "generation_config", None) or target.model.config
    eos = getattr(config, "eos_token_id", None)
    return frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos])


def parse_policy(text: str, option: str = "--policy") -> Policy:
    """Read a policy: its kind alone, or a YAML mapping with its keys; raises `InputError`."""
    text = text if text.lstrip().startswith("{") else f"{{kind: {text}}}"
    document = parse_document(text, option)
    known = POLICIES.known()
    kind = document.data.get("kind")
    if kind not in known:
        raise InputError(Fault(f"unknown policy '{kind}'; known: {', '.join(known)}", option))
    policy: Policy = validate(known[kind], document)
    return policy


def chosen_policy(options: argparse.Namespace, models: Models) -> Policy:
    """Return the policy that was asked for, or the plainest one for these models."""
    if options.policy is not None:
        return parse_policy(options.policy)
    if models.drafter is None:
        return parse_policy("none")
    return parse_policy(f"{{kind: fixed, k: {models.drafter.trained_length}}}")


def chosen_rates(options: argparse.Namespace, policy: Policy) -> Rates:
    """Return the rates of the profile that was named, else flat ones."""
    if options.profile is None:
        return FlatRates()
    path = find_profile(options.profile)
    profile = load_profile(path)
    if profile.step_time is None:
        raise InputError(Fault("holds no step time", str(path), key="step_time"))
    rates = ProfileRates(profile.step_time, options.profile_drafter or policy.drafter or "")
    if policy.drafter is not None:
        rates.steps_per_s(1, 1)  # a missing draft cost is told before anything is decoded
    return rates


def make_decoder(options: argparse.Namespace, models: Models, policy: Policy, rates: Rates | None = None) -> Decoder:
    """Return the decoder of a command."""
    return Decoder(
        models.target,
        models.drafter,
        policy,
        rates=rates,
        temperatures=models.calibration.temperatures if models.calibration else None,
        greedy_draft=options.greedy_draft,
        decode=models.decode,
    )


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of a file: its domain and its tokens."""

    domain: str
    token_ids: tuple[int, ...]


def encode(text: str, models: Models, where: str) -> tuple[int, ...]:
    """Return the tokens of a text, as what a user says where the target has a chat template.

    Raises `RequestError` without a tokenizer.
    """
    if models.tokenizer is None:
        raise RequestError(Fault("the target folder has no tokenizer; give token ids instead of text", where))
    if models.chat:
        messages = [{"role": "user", "content": text}]
        return tuple(models.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
    return tuple(int(token) for token in models.tokenizer.encode(text))


def read_prompts(path: Path, models: Models) -> list[Prompt]:
    """Read JSON lines with ``domain`` (default: any) and ``prompt`` (text) or ``prompt_ids``.

    Raises `RequestError` with every fault, by line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as fault:
        raise RequestError(Fault(f"cannot read: {getattr(fault, 'strerror', None) or fault}", str(path))) from None
    prompts: list[Prompt] = []
    faults: list[Fault] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompts.append(_prompt(json.loads(line), models, f"{path}:{number}"))
        except RequestError as fault:
            faults += fault.faults
        except ValueError as fault:
            faults.append(Fault(f"not JSON: {fault}", str(path), number))
    if not prompts and not faults:
        faults.append(Fault("holds no prompt", str(path)))
    if faults:
        raise RequestError(*faults)
    return prompts


def _prompt(raw: Any, models: Models, where: str) -> Prompt:
    if not isinstance(raw, dict) or ("prompt" in raw) == ("prompt_ids" in raw):
        raise RequestError(Fault('expected an object with either "prompt" or "prompt_ids"', where))
    unknown = sorted(set(raw) - {"domain", "prompt", "prompt_ids"})
    if unknown:
        raise RequestError(Fault(f"unknown key; known: domain, prompt, prompt_ids (got '{unknown[0]}')", where))
    domain = raw.get("domain", "any")
    if not isinstance(domain, str) or not domain:
        raise RequestError(Fault(f"expected a name (got {domain!r})", where, key="domain"))
    if "prompt" in raw:
        if not isinstance(raw["prompt"], str):
            raise RequestError(Fault("expected text", where, key="prompt"))
        return Prompt(domain, encode(raw["prompt"], models, where))
    ids = raw["prompt_ids"]
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise RequestError(Fault("expected a list of whole numbers", where, key="prompt_ids"))
    return Prompt(domain, tuple(ids))


def make_request(
    options: argparse.Namespace, models: Models, name: str, token_ids: Sequence[int], **changes: Any
) -> Request:
    """Return the request that the options describe for one prompt."""
    stops = options.stop_token if options.stop_token is not None else [] if options.ignore_eos else models.eos_ids
    return Request(
        request_id=name,
        prompt_ids=tuple(token_ids),
        limits=Limits(
            max_new_tokens=options.max_new_tokens, stop_token_ids=frozenset(stops), stop_strings=tuple(options.stop)
        ),
        sampling=Sampling(
            temperature=changes.get("temperature", options.temperature),
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            repetition_penalty=options.repetition_penalty,
        ),
        seed=options.seed,
        grammar=options.grammar,
        draft_tree_width=options.draft_tree_width,
    )


def decode_with_progress(
    decoder: Decoder, requests: Sequence[Request], concurrency: int, label: str
) -> tuple[list[Generation], bool]:
    """Decode requests and show progress on stderr, where that is a terminal.

    Returns those that finished, in the order they were asked for, and whether Ctrl-C ended the work before the rest.
    """
    done: dict[str, Generation] = {}
    interrupted = False
    total = sum(request.limits.max_new_tokens for request in requests)
    with tqdm(total=total, unit="token", desc=label, disable=None, leave=False) as bar:

        def show(tokens: int) -> None:
            bar.update(tokens)

        try:
            for generation in decoder.run(requests, concurrency=concurrency, progress=show):
                done[generation.request.request_id] = generation
        except KeyboardInterrupt:
            interrupted = True
    return [done[request.request_id] for request in requests if request.request_id in done], interrupted


def write_json(path: Path | None, report: Any) -> None:
    """Write a report, by rename; nothing without a path."""
    if path is None:
        return
    try:
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        part.replace(path)
    except OSError as fault:
        raise InputError(Fault(f"cannot write: {(fault.strerror or str(fault)).lower()}", str(path))) from None
