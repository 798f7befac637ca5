# Each target is one CMake preset or one tool. A bare Debian 12 lacks `make` itself: apt-get install make.
JOBS ?= $(shell nproc)
SEED ?= 1
MODEL ?= models/tiny-k2
MUTANT ?= 0
# The CUDA backend is built where there is a GPU to run it; CI compiles it wherever there is a toolkit.
CUDA ?= $(if $(wildcard /dev/nvidia0),AUTO,OFF)

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.PHONY: demo test build lint format bench bench-ops sim check soak eval gpu-check clean

demo: build
	python3 tools/demo.py --program build/perigee --model $(MODEL) --seed $(SEED)

test: setup-test
	cmake --preset release -DPERIGEE_CUDA=$(CUDA)
	cmake --build --preset release -j $(JOBS)
	ctest --test-dir build -j $$(($(JOBS) + 1)) --output-on-failure --no-tests=error

build: setup-build
	cmake --preset release -DPERIGEE_TESTS=$(if $(wildcard build/tests),ON,OFF) -DPERIGEE_CUDA=$(CUDA)
	cmake --build --preset release -j $(JOBS) --target perigee

setup-%:
	tools/setup $*

lint: setup-check
	python3 tools/tidy.py
	git ls-files -z '*.h' '*.cc' | xargs -r -0 clang-format-14 --dry-run -Werror
	JOBS=$(JOBS) python3 tools/static_checks.py

format: setup-check
	git ls-files -z '*.h' '*.cc' | xargs -r -0 clang-format-14 -i

bench bench-ops: setup-test
	cmake --preset release
	cmake --build --preset release -j $(JOBS) --target benchmarks
	tools/$(subst -, ,$@)

sim: setup-test
	cmake --preset release
	cmake --build --preset release -j $(JOBS) --target sim --target pd_sim
	build/tests/sim/sim --seed $(SEED) --mutant $(MUTANT)
	build/tests/sim/pd/pd_sim --seed $(SEED)

check: setup-check
	.ci/run

soak: setup-check
eval: build setup-test
soak eval:
	tools/$@

gpu-check: setup-test
	cmake --preset release -DPERIGEE_CUDA=ON && cmake --build --preset release -j $(JOBS)
	.venv/bin/python tools/gpu_checks.py

clean:
	rm -rf build build-*
