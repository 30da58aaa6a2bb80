"""After every round both caches hold exactly the tokens before the next anchor: to 1e-9 in float64."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from decoder.checkpoint import make_drafter, make_net
from decoder.config import MTP, DraftConfig
from decoder.kv_cache import KvCache
from decoder.sampling import Sampling
from decoder.session import Decoder, Request
from decoder.small_model import SmallModelDrafter
from decoder.stopping import Limits
from decoder.target import HfTarget, keep_float64
from sim.errors import InvariantError
from sim.verify.fixed import Fixed
from sim.verify.threshold import Threshold
from tests.decoder.reference import DRAFTS, TARGET_A, TARGET_B
from tests.decoder.toys import DRAFTER_KINDS, REDUCED_KINDS, TableTarget, tiny_drafter

EXACT = 1e-9
PROMPT = (253, 17, 80, 3, 99, 41, 7)


def tiny_mtp(target, seed=3):
    config = DraftConfig(
        architecture=MTP,
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        target_layer_ids=(target.num_layers - 1,),
        ttt_length=3,
    )
    torch.manual_seed(seed)
    return make_drafter(make_net(config, dtype=torch.float64))


def tiny_llama(seed=4):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config).to(torch.float64)
    keep_float64(model)
    return HfTarget(model)


def logits_after(target, cache, anchor):
    return target.forward([anchor], cache, logit_rows=1).logits


def draft_facts(drafting):
    """Return what a drafter's cache holds: its own tensors, or a small model's answer."""
    if isinstance(drafting.cache, KvCache):
        rows = drafting.tokens
        return [tensor[..., :rows, :] for tensor in (*drafting.cache.keys, *drafting.cache.values)]
    return [logits_after(drafting.drafter.model, drafting.cache.fork(drafting.tokens), 5)]


def check_against_fresh(decoder, generation):
    generation.check()
    text = generation.token_ids
    fresh = decoder.target.new_cache()
    read = decoder.target.forward(text[:-1], fresh, decoder._feature_layers)
    cached = logits_after(decoder.target, generation.cache.fork(generation.cache.tokens), text[-1])
    assert float((cached - logits_after(decoder.target, fresh, text[-1])).abs().max()) < EXACT
    drafting = decoder.drafter.start()
    drafting.advance(text[:-1], read.features, text[-1])
    for found, want in zip(draft_facts(generation.drafting), draft_facts(drafting), strict=True):
        assert found.shape == want.shape
        assert float((found - want).abs().max()) < EXACT


def run(decoder, temperature, new=20, prompt=PROMPT, stop=()):
    request = Request(
        request_id="r",
        prompt_ids=prompt,
        limits=Limits(max_new_tokens=new, stop_token_ids=frozenset(stop)),
        sampling=Sampling(temperature=temperature),
        seed=11,
    )
    generation = decoder.admit(request)
    while not generation.finished:
        decoder.step([generation])
        check_against_fresh(decoder, generation)
    return generation


@pytest.mark.parametrize("temperature", (0.0, 1.5))
@pytest.mark.parametrize("name", DRAFTS)
def test_published_formats(name, temperature, targets64, drafters64):
    """At a high temperature most drafts are rejected, so that every round cuts both caches back."""
    drafter = drafters64[name]
    decoder = Decoder(targets64[DRAFTS[name]], drafter, Fixed(k=drafter.trained_length))
    generation = run(decoder, temperature, new=9)
    if temperature:
        assert any(r.accepted_draft_tokens < r.verify_length for r in generation.rounds)


@pytest.mark.parametrize("kind", ("mtp", "small_model"))
def test_other_drafters(kind, targets64):
    target = targets64[TARGET_A]
    drafter = tiny_mtp(target) if kind == "mtp" else SmallModelDrafter(targets64[TARGET_B], 4)
    for policy in (Fixed(k=4), Threshold(min_confidence=0.3)):
        run(Decoder(target, drafter, policy), 1.0, new=8)


def test_llama():
    target = tiny_llama()
    generation = run(Decoder(target, tiny_mtp(target), Fixed(k=3)), 1.0)
    assert len(generation.output_ids) == 20


@pytest.mark.parametrize("kind", (*DRAFTER_KINDS, *REDUCED_KINDS))
def test_after_a_stop_inside_a_block(kind):
    table = torch.full((6, 6), 0.1, dtype=torch.float64) + torch.eye(6, dtype=torch.float64).roll(1, 1) * 0.4
    decoder = Decoder(TableTarget(table), tiny_drafter(kind, 6, 4), Fixed(k=4))
    for seed in range(5):
        request = Request(
            request_id=str(seed),
            prompt_ids=(0, 1),
            limits=Limits(max_new_tokens=30, stop_token_ids=frozenset({5})),
            seed=seed,
        )
        generation = decoder.generate([request])[0]
        assert generation.finish_reason == "stop"
        check_against_fresh(decoder, generation)


def test_float64_norms_matter(deepspec):
    """Norms that round to float32 would leave an error far above the bound: what `keep_float64` is for."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(deepspec / "checkpoints" / TARGET_A, dtype=torch.float64)
    exact = AutoModelForCausalLM.from_pretrained(deepspec / "checkpoints" / TARGET_A, dtype=torch.float64)
    keep_float64(exact)
    rows = [HfTarget(m).forward(PROMPT, HfTarget(m).new_cache(), logit_rows=1).logits for m in (model, exact)]
    assert 1e-9 < float((rows[0] - rows[1]).abs().max()) < 1e-3


def test_a_cache_says_which_equation_failed():
    cache = KvCache(2)
    cache.append(0, torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 4))
    with pytest.raises(InvariantError, match="1 of 2"):
        cache.check()
    cache.append(1, torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 2, 4))
    with pytest.raises(InvariantError, match=r"\[2, 3\]"):
        cache.check()
    with pytest.raises(ValueError, match="cannot crop 3 rows to 4"):
        cache.crop(4)
    fork = cache.fork(2)
    fork.append(0, torch.ones(1, 1, 1, 4), torch.ones(1, 1, 1, 4))
    assert (fork.keys[0].shape[-2], cache.keys[0].shape[-2]) == (3, 3)
    assert not cache.keys[0].any()
