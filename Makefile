# `make demo` and `make test` need only Python 3.10+ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# With it, each of the tests' processes would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test slow clusters trackers options faults fuzz check docs clean

help:
	@echo "make demo    fine-tune the bundled model and show that it learned (minutes on a CPU)"
	@echo "make test    run the tests"
	@echo "make slow    run the longer tests"
	@echo "make clusters  train with the Ray, SLURM and sshd installed on this machine (about 10 minutes)"
	@echo "make trackers  run the tests of all trackers, including Weave (35 more packages)"
	@echo "make options  test every value of every option: it changes a run, or is rejected or reported (about 20 minutes)"
	@echo "make faults  inject 500 kills, 2,000 corruptions, full disks, payloads, signals, full disks under every writing command (about 40 minutes)"
	@echo "make fuzz    run 20,000 requests with bad values, then 3,000 damaged files; each must end with exit code 0 or 2 (about 35 minutes)"
	@echo "make check   lint, format, types, import directions, links of the docs"
	@echo "make setup   only create the environment in $(VENV)"
	@echo "make docs    write the options page and the map in CONTRIBUTING.md, then build the site in build/docs"

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "crosstune needs Python 3.10 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing crosstune and its libraries into $(VENV) (a few minutes the first time)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e '.[torch,mlx,gguf,llamacpp,peft,bnb,hqq,quanto,data,latents,vision,sweep,ui,test,dev]'
	touch $@

demo: setup
	$(BIN)/crosstune train --name demo --overwrite --max_steps 40 --lr 1e-3 --eval_samples 48 --eval_steps 20
	@echo
	$(BIN)/crosstune generate runs/demo --prompt "After 45 minutes, shut down the coffee maker in the garage."

# One process per core, each with one thread: more threads do not speed up small models.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile

# The longer tests; CI runs them too.
slow: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow -n auto --dist loadfile

# Ray (75 MB) is used only by these tests; SLURM and sshd come from the system.
clusters: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray]'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow tests/faults/test_ray_cluster.py \
		tests/faults/test_slurm_cluster.py tests/faults/test_ssh_cluster.py

# `make setup` installs all trackers except Weave, which needs 75 MB more.
trackers: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[track]'
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/engine/test_trackers.py

options: setup
	OPTIONS=all OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow tests/contract/test_option_effects.py

faults: setup
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/faults.py

fuzz: setup
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/fuzz_requests.py --cases 20000
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/fuzz_files.py --cases 3000

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

docs: setup
	$(BIN)/crosstune options --markdown > docs/reference/options.md
	$(BIN)/crosstune import --keys > docs/reference/imported-keys.md
	$(BIN)/python docs/write_map.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .ruff_cache .mypy_cache
