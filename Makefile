PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip --disable-pip-version-check
INSTALLED := .venv/installed
CONSTRAINTS := .ci/constraints.txt
# Programs of tests/support, tests/benchmarks and fuzz.
MODULE = PYTHONPATH=tests $(BIN)/python -m

.PHONY: real-model demo test check lint types unit scenarios unit-and-scenarios one-process docs fuzz readers viewer-axe roundtrip gpu-test gpu-compile gpu-sanitize damage guards arithmetic sanitized sanitized-tests cpu-sanitize store-matrix store-stress versions versions-part without-c zoo engines code-size spec-words

demo: $(INSTALLED)
	$(BIN)/kvpack demo

# The language model that `kvpack bench quality` measures by default, 98 MB, in kvpack's cache folder or that of KVPACK_REAL_MODEL,
# and its basis beside it.
real-model: $(INSTALLED)
	$(BIN)/python -m kvpack.bench.real_model

# mypy has one process, which runs beside the tests.
test: lint
	$(MAKE) --no-print-directory --jobs 2 types unit

lint: $(INSTALLED)
	$(BIN)/ruff check

types: $(INSTALLED)
	$(BIN)/mypy --package kvpack
	$(BIN)/mypy spec/decoder

# The files with tests marked kernels, which the second run interprets.
KERNEL_TESTS = $(shell grep -lr "pytest.mark.kernels" tests --include="test_*.py")

# Compiled Python files are written even where the environment says not to: every process would compile them again.
export PYTHONDONTWRITEBYTECODE =

# Tests are given out in the order of the files, so that one worker makes what the tests of a file share.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/pytest --quiet --numprocesses 2 --dist worksteal

unit: $(INSTALLED)
	$(PYTEST) -m "not scenario"
	TRITON_INTERPRET=1 $(PYTEST) -m "not scenario" $(KERNEL_TESTS)

# The tests marked scenario: whole programs, stores under faults, readers without guards, models of every kind, compiled models, and
# whatever takes more than a second, with all its parameters.
scenarios: $(INSTALLED)
	$(PYTEST) -m scenario
	TRITON_INTERPRET=1 $(PYTEST) -m scenario $(KERNEL_TESTS)

# Both, without collecting all tests twice.
unit-and-scenarios: $(INSTALLED)
	$(PYTEST)
	TRITON_INTERPRET=1 $(PYTEST) $(KERNEL_TESTS)

# What has one process, or waits for packages, for `make --jobs 2 one-process unit-and-scenarios`: the tests leave a tenth of two cores.
# A sixth of the fuzz targets a day: to start one takes longer than its share of the time. `make fuzz` also measures how many lines they reach.
one-process: $(INSTALLED)
	$(MAKE) --no-print-directory --jobs 1 types docs sanitized versions-part readers sanitized-tests PROCESSES=1
	$(MAKE) --no-print-directory fuzz PROCESSES=1 OPTIONS="$(OPTIONS) --share 6 --lines 0"

# What a change needs: the tests of the folders that differ from main, or of what is not committed (tests/support/touched.py).
# A run without tests, which pytest ends with 5, is none that fails.
check: lint types
	tests=$$($(MODULE) support.touched) || exit 1; \
	test -n "$$tests" || exit 0; \
	$(PYTEST) -m "not scenario" $$tests || [ $$? = 5 ] || exit 1; \
	kernels=$$(grep -lr "pytest.mark.kernels" $$tests --include="test_*.py"); \
	test -z "$$kernels" || TRITON_INTERPRET=1 $(PYTEST) $$kernels || [ $$? = 5 ]

# The guides, the reference and the specification as HTML, as .ci/docs/conf.py says; every warning is an error.
docs: $(INSTALLED)
	$(BIN)/python .ci/docs/build.py build/docs

# Fuzz the readers; SECONDS is the time of all targets together, OPTIONS are those of fuzz/run.py.
fuzz: $(INSTALLED)
	OMP_NUM_THREADS=1 $(MODULE) fuzz.run --seconds $(or $(SECONDS),60) --processes $(or $(PROCESSES),2) $(OPTIONS)

# The readers of spec/readers beside the library and the second decoder: all vectors, FILES new files, and SECONDS (or MINUTES) of mutations.
readers: $(INSTALLED)
	OMP_NUM_THREADS=1 $(MODULE) support.spec_readers --seconds $(or $(SECONDS),$(if $(MINUTES),$(shell echo $$((60 * $(MINUTES)))),60)) \
		--files $(or $(FILES),500) $(OPTIONS)

# axe-core over the page of `kvpack view` in headless Chromium (tests/support/viewer_axe.py); AXE is its axe.min.js, of the npm package axe-core.
viewer-axe: $(INSTALLED)
	OMP_NUM_THREADS=1 $(MODULE) support.viewer_axe $(AXE)

# All damage to the golden files, and the readers without each of their guards: some minutes each (fuzz/README.md).
damage: $(INSTALLED)
	OMP_NUM_THREADS=1 $(MODULE) support.golden_damage

guards: $(INSTALLED)
	OMP_NUM_THREADS=1 $(MODULE) support.guard_removal

# The second decoder with each of its steps of arithmetic changed: which changes no vector catches, in some minutes.
arithmetic: $(INSTALLED)
	OMP_NUM_THREADS=1 $(MODULE) support.arithmetic_changes

# Tiny models of all architectures of transformers over packed caches: writes what works, and what is refused.
zoo: $(INSTALLED)
	OMP_NUM_THREADS=1 $(MODULE) support.model_zoo --write

# Measurements for developers: bench-fidelity, bench-overview, bench-pages, bench-decode, bench-presets, bench-resume, bench-weights, bench-viewer and bench-device-files; OPTIONS are those of `--help`.
bench-%: $(INSTALLED)
	$(MODULE) benchmarks $* $(OPTIONS)

# Words of the specification by document, and the sums beside their limits.
spec-words: $(INSTALLED)
	$(MODULE) support.spec_words

# Lines of code, and the functions that pack, load, attend and a decode step run, beside their limits.
code-size: $(INSTALLED)
	OMP_NUM_THREADS=1 $(MODULE) support.code_size

# Encoders on tensors of any contents.
roundtrip: $(INSTALLED)
	$(MODULE) fuzz.roundtrip --seconds $(or $(SECONDS),60)

# The tests of caches and attention by PyTorch operations, as where no C compiler was found.
without-c: $(INSTALLED)
	KVPACK_KERNELS=torch $(PYTEST) -m "not scenario" tests/test_attention.py tests/cache

# The oldest and the newest dependencies that pyproject.toml allows; the fast part, which CI runs, is `make versions-part`.
versions: $(INSTALLED)
	$(BIN)/python .ci/versions.py --whole

versions-part: $(INSTALLED)
	$(BIN)/python .ci/versions.py

# Every kind of store under every fault, half an hour; KILLS are those of all kinds together, OPTIONS those of `--help`.
store-matrix: $(INSTALLED)
	OMP_NUM_THREADS=1 $(MODULE) support.store_matrix --kills $(or $(KILLS),7000) $(OPTIONS)

# A store in use by processes that are killed at random, every hit checked; LOCATION is a folder (default: a temporary one) or a URL.
store-stress: $(INSTALLED)
	OMP_NUM_THREADS=1 $(MODULE) support.store_endurance --minutes $(or $(MINUTES),10) $(addprefix --location ,$(LOCATION)) $(OPTIONS)

# kvpack in real engines on the CPU, which build/engines holds: some GB, and some minutes. LMCache and SGLang take what vLLM has installed.
# A process is tests/support/engines/vllm_process.py, whose vLLM loads tests/support/engines/vllm_cpu_spec.py, or
# tests/support/engines/vllm_packed.py, or tests/support/engines/vllm_groups.py; tests/support/engines/vllm_plain.py is vLLM by itself. OPTIONS are those of run_vllm.py:
# `--model DIR` is another model whose tokens are bytes. tests/support/engines/llama_cpp_model.py makes the models for llama.cpp, which is
# built from source, without what its library does not need.
LLAMA_CPP = -DLLAVA_BUILD=OFF -DGGML_OPENMP=OFF -DGGML_LLAMAFILE=OFF -DGGML_CPU_REPACK=OFF -DCMAKE_CXX_FLAGS_RELEASE=-O1

engines: $(INSTALLED)
	$(BIN)/python tests/support/engines/run_vllm.py $(OPTIONS)
	test -d build/engines/lmcache || $(PIP) install --quiet --no-deps --target build/engines/lmcache lmcache==0.5.6 sortedcontainers aiofiles
	PYTHONPATH=build/engines/lmcache build/engines/vllm/bin/python tests/support/engines/lmcache_round_trip.py
	test -d build/engines/sglang || $(PIP) install --quiet --no-deps --target build/engines/sglang sglang==0.5.23 orjson IPython traitlets gguf
	PYTHONPATH=build/engines/sglang build/engines/vllm/bin/python tests/support/engines/sglang_round_trip.py
	test -d build/engines/mlx || $(PIP) install --quiet --no-deps --target build/engines/mlx mlx==0.32.4 mlx-cpu==0.32.4 mlx-lm==0.32.2
	PYTHONPATH=build/engines/mlx $(BIN)/python tests/support/engines/mlx_lm_round_trip.py
	test -d build/engines/llama_cpp || CMAKE_ARGS="$(LLAMA_CPP)" $(PIP) install --quiet --no-deps --target build/engines/llama_cpp \
		llama-cpp-python==0.3.36 gguf==0.19.0 diskcache==5.6.3
	PYTHONPATH=build/engines/llama_cpp $(BIN)/python tests/support/engines/llama_cpp_round_trip.py

# The kernels compiled, on a machine with a CUDA device: most of the time goes to compiling, so in many processes.
GPU_TESTS = $(shell grep -lrE "pytest.mark.(kernels|cuda)" tests --include="test_*.py")

gpu-test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/pytest --quiet --numprocesses auto --dist worksteal $(GPU_TESTS)

# The kernels compiled for chips that are not there, with the registers and shared memory that they take beside what each chip has.
CHIPS = 80 86 89 90 100 120
COMPILED = "k=octahedral:b=3;v=group:b=3" octopus-3 "kvpack-2;raw=0" "kvpack-3;raw=0" "oscar-2;raw=0" "kivi-4;raw=0" "turboquant-3;raw=0" "fp8;raw=0" "nvfp4;raw=0" "hqmq-s24-r3;raw=0" kv=trellis:b=2

gpu-compile: $(addprefix gpu-compile-,$(CHIPS))

gpu-compile-%: $(INSTALLED)
	$(MODULE) support.compile_kernels --capability $* $(COMPILED)

# Every tile loader, on any words, the sidecars and the lookups, under the checkers of memory accesses and of races.
SANITIZED_TESTS = $(addprefix tests/kernels/test_,attention.py sidecars.py shared_table.py)
SANITIZED = no_word_reads_beyond or different_lengths or octopus-qjl-2 or int-4-med3 or more_outliers or factors_of_any_size or any_word_finds

gpu-sanitize: $(INSTALLED)
	for tool in memcheck racecheck; do \
		compute-sanitizer --tool $$tool --error-exitcode 1 $(BIN)/python -m pytest --quiet $(SANITIZED_TESTS) -k "$(SANITIZED)" || exit 1; \
	done

# The C kernels under the checkers of memory accesses and undefined behaviour, on any words, strides and lengths. What the checkers add
# takes a compiler most of six minutes to optimize well, and two to optimize a little (.ci/gcc-o1). AddressSanitizer finds what the two
# checks that are left out find, which take a quarter of that time.
CHECKED = -fsanitize=address,undefined -fno-sanitize=null,object-size
CHECKERS = $(shell gcc -print-file-name=libasan.so) $(shell gcc -print-file-name=libubsan.so)

sanitized: $(INSTALLED)
	rm -rf build/bdist* build/lib* build/sanitized build/temp*
	CC=$(CURDIR)/.ci/gcc-o1 CFLAGS="$(CHECKED) -fno-sanitize-recover=all -g1" LDFLAGS="$(CHECKED)" \
		$(PIP) install --quiet --no-deps --no-build-isolation --target build/sanitized .

cpu-sanitize: sanitized
	$(MAKE) --no-print-directory sanitized-tests

# What `make sanitized` has built.
sanitized-tests:
	export LD_PRELOAD="$(CHECKERS)" ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=build/sanitized OMP_NUM_THREADS=1; \
	$(BIN)/python -P -c "from kvpack.kernels.cpu import library as l; assert 'sanitized' in l.library()._name" && \
	$(BIN)/python -P -m pytest -o "pythonpath=build/sanitized . tests" --quiet --numprocesses $(or $(PROCESSES),2) $(wildcard tests/kernels/test_cpu_*.py) tests/runtime/test_reader.py tests/pages/test_page_codec.py \
		-k "no_word or supported_call or any_side or groups_are or every_codec or chunks_like or streams_equal or any_number_of_bytes or flags_changed or thousand or floats_are or calls_write or checksums_read or any_strides or arbitrary_bytes or flipped_bit or word_counts or lossless_runs or minifloat"

# Tests import a quarter of the packages' 14,000 modules, which are compiled when they are first imported.
# pip first, for --group (25.1), and setuptools: the package is then built without a second, unpinned download of it.
# setuptools compares object files with C sources only, so files of an earlier build go: a header may have changed.
# The C library is compiled while pip installs what kvpack needs.
NEEDED = import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; d = p["optional-dependencies"]; \
	print(*p["dependencies"], *d["bench"], *d["transformers"], sep="\n")
$(INSTALLED): pyproject.toml $(CONSTRAINTS) $(wildcard kernels/cpu/*.[ch])
	$(PYTHON) -m venv .venv
	$(PIP) install --quiet --constraint $(CONSTRAINTS) pip setuptools
	rm -rf build/lib* build/temp*
	$(BIN)/python -c '$(NEEDED)' >.venv/needed
	$(PIP) install --quiet --no-deps --no-build-isolation --editable . & built=$$!; \
	$(PIP) install --no-compile --constraint $(CONSTRAINTS) --group docs --group fuzz --group test --requirement .venv/needed && wait $$built
	touch $@
