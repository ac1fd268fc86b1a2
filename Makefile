# `make demo` and `make test` need Python >= 3.10 with its headers, a C compiler and make; the rest goes into $(VENV).

PYTHON ?= python3
VENV   ?= .venv
JOBS   ?= $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
EXTRAS ?= test,peers,torch,server
PORT   ?= 8080
GDN_FUZZ ?= 10000
ARGS   ?=
PY     := $(VENV)/bin/python
PIP     = $(PY) -m pip --disable-pip-version-check install -q $(PIP_FLAGS)

SOURCES := setup.py $(wildcard gdn/*.pyx gdn/*.pxd gdn/*/*.pxi gdn/*/*.pxd gdn/*/*.h gdn/native/*)

.PHONY: demo serve build test test-cluster test-slow soak fuzz fuzz-bytes bench lint debug asan asan-short tsan asm old-cpu aarch64 docs sdist wheel clean distclean help
.DELETE_ON_ERROR:

help:
	@echo "make demo       generate text with the small model that ships with the project"
	@echo "make serve      the same model behind HTTP, PORT=8080: docs/SERVING.md"
	@echo "make test       the whole suite; EXTRAS=test leaves out the peers and torch"
	@echo "make test-cluster  the example cluster on a local Ray"
	@echo "make test-slow  the full grids and sweeps"
	@echo "make soak       a hundred thousand steps of a ring in each form, checked against a replay"
	@echo "make fuzz       random calls, GDN_FUZZ of them, and five times as many spoiled ones"
	@echo "make fuzz-bytes  damaged rings, saved sequences and GGUF files, FUZZ_SECONDS of each (needs clang)"
	@echo "make bench      times against the peers: JSON, a table of ratios, two plots"
	@echo "make lint       ruff and cython-lint"
	@echo "make debug      a build with bounds checks and asserts, and the suite against it"
	@echo "make asan       a build with AddressSanitizer and UBSan, and the suite against it"
	@echo "make asan-short  the same build, a few files of the suite (three minutes) and the C programs"
	@echo "make tsan       libgdn with ThreadSanitizer, under the C programs' threads"
	@echo "make asm        look for register spills in the hot loops of every level"
	@echo "make old-cpu    the base level under an emulated CPU without AVX (needs qemu-x86_64-static)"
	@echo "make aarch64    libgdn for aarch64, and the C programs under emulation (needs gcc-aarch64-linux-gnu, qemu-user-static)"
	@echo "make docs       the documents as a site, in build/site"
	@echo "make libgdn     the C library, and the plug-in of llama.cpp, in gdn/lib; make install-libgdn PREFIX=/usr/local"
	@echo "make sdist, make wheel, make clean, make distclean"

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "gdn needs Python >= 3.10, this is " + sys.version)'
	@$(PYTHON) -c 'import ensurepip' || { echo "$(PYTHON) cannot make virtual environments: on Debian, apt install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	touch $@

# Build tools go into the environment, so that a changed source is compiled alone.
$(VENV)/.installed: $(VENV)/.made pyproject.toml setup.py gdn/_version.py
	$(PIP) $$(sed -n 's/^requires = \[\(.*\)\]/\1/p' pyproject.toml | tr -d '",')
	GDN_LINK_ONLY=1 $(PIP) --no-build-isolation -e '.[gguf]'
	touch $@

$(VENV)/.built: $(VENV)/.installed $(SOURCES)
	$(PY) setup.py -q build_ext --inplace -j$(JOBS)
	touch $@

# gdn is there already, so that pip adds what the extras name and builds nothing.
$(VENV)/.extras-%: $(VENV)/.installed
	$(PIP) 'gdn[$*]'
	touch $@

build: $(VENV)/.built

demo: build
	OPENBLAS_NUM_THREADS=1 $(PY) examples/shakespeare/generate.py $(ARGS)

serve: build $(VENV)/.extras-server
	PYTHONPATH=examples $(PY) -m server --port $(PORT) $(ARGS)

test: build $(VENV)/.extras-$(EXTRAS)
	$(PY) -m pytest -m "not slow and not cluster" $(ARGS)

test-cluster: build $(VENV)/.extras-$(EXTRAS) $(VENV)/.extras-cluster
	$(PY) -m pytest -m cluster tests/test_cluster.py $(ARGS)

test-slow: build $(VENV)/.extras-$(EXTRAS)
	$(PY) -m pytest -m slow $(ARGS)

soak: build $(VENV)/.extras-$(EXTRAS)
	$(PY) -m pytest -s -m slow tests/test_soak.py $(ARGS)

fuzz: build $(VENV)/.extras-$(EXTRAS)
	GDN_FUZZ=$(GDN_FUZZ) $(PY) -m pytest tests/test_fuzz.py $(ARGS)

bench: build $(VENV)/.extras-$(EXTRAS) $(VENV)/.extras-bench
	$(PY) -m benchmarks $(ARGS)

lint: $(VENV)/.extras-lint
	$(VENV)/bin/ruff check .
	PATH=$(abspath $(VENV))/bin:$$PATH $(VENV)/bin/cython-lint gdn

# A copy of the package under build/debug, so that the fast build stays what it is.  It comes before the tree on the path,
# where the suite's own modules are; a process started in the tree must not find gdn there either.
debug: build $(VENV)/.extras-$(EXTRAS)
	GDN_DEBUG=1 $(PY) setup.py -q build --build-base build/debug --build-lib build/debug/lib build_ext -j$(JOBS)
	cd build/debug/lib && $(abspath $(PY)) -c 'import gdn; assert gdn.show_config("dicts")["debug"], gdn.__file__'
	PYTHONSAFEPATH=1 PYTHONPATH=$(abspath build/debug/lib):$(CURDIR) $(VENV)/bin/pytest -m "not slow and not cluster" $(ARGS)

# Python itself knows nothing of the sanitizers: their run-time libraries are loaded before it.  Its own leaks are not ours.
# Torch, the peers, a browser and the tests that build or emulate another gdn are left out.
SANITIZED := -O1 -g -Wall -Wno-implicit-fallthrough -std=gnu11 -DGDN_LIBRARY -Igdn/include -Iexamples/c_host
# $(call c-hosts,SANITIZER): the C programs against the libgdn.so of that build, which they own: leaks are theirs.
c-hosts = set -e; for program in examples/c_host/threads examples/c_host/pool tests/c/hammer; do \
	$(CC) $(SANITIZED) -fsanitize=$(2) $$program.c -o build/$(1)/$${program\#\#*/} build/$(1)/lib/gdn/lib/libgdn.so \
		-Wl,-rpath,$(abspath build/$(1)/lib/gdn/lib) -lpthread -lm; build/$(1)/$${program\#\#*/}; done

ASAN_TESTS ?= tests --ignore tests/peers --ignore tests/test_build.py --ignore tests/test_old_cpu.py \
              --ignore tests/test_transformers_layers.py --ignore tests/test_layer_peft.py --ignore tests/test_types.py \
              --ignore tests/test_server_page.py
asan: build $(VENV)/.extras-$(EXTRAS)
	GDN_SANITIZE=address,undefined $(PY) setup.py -q build --build-base build/asan --build-lib build/asan/lib build_ext -j$(JOBS)
	LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libubsan.so)" PYTHONMALLOC=malloc \
	ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 \
	PYTHONSAFEPATH=1 PYTHONPATH=$(abspath build/asan/lib):$(CURDIR) $(PY) -m pytest -m "not slow and not cluster" $(ASAN_TESTS) $(ARGS)
	ASAN_OPTIONS=detect_leaks=1 UBSAN_OPTIONS=print_stacktrace=1; export ASAN_OPTIONS UBSAN_OPTIONS; \
	$(call c-hosts,asan,address$(comma)undefined)

# What CI runs of it: kernels, rings, files, C programs.
asan-short: ASAN_TESTS = tests/test_delta_shapes.py tests/test_conv.py tests/test_rows.py tests/test_log_conv.py \
                         tests/test_ring.py tests/test_ring_buffer.py tests/test_ring_log.py tests/test_ring_steps.py \
                         tests/test_ring_c.py tests/test_gguf_damaged.py tests/test_corpus.py
asan-short: asan

# libgdn alone, without OpenMP, whose runtime ThreadSanitizer cannot see into: threads are those of the C programs.
comma := ,
tsan: $(VENV)/.installed
	GDN_SANITIZE=thread $(PY) setup.py -q build --build-base build/tsan --build-lib build/tsan/lib build_ext -j$(JOBS)
	$(call c-hosts,tsan,thread)

# libFuzzer on rings and saved sequences, atheris on GGUF files, FUZZ_SECONDS each, from tests/corpus; what they find is kept in
# build/corpus.  Needs clang with its run-time libraries.  libpython is linked for what of libgdn coverage counters keep.
FUZZ_SECONDS ?= 600
LIBPYTHON = $$($(PY) -c 'from sysconfig import get_config_var as v; print("-L" + v("LIBDIR"), "-Wl,-rpath," + v("LIBDIR"), \
	"-lpython" + v("LDVERSION"))')
FUZZ_FLAGS = -max_total_time=$(FUZZ_SECONDS) -timeout=1 -malloc_limit_mb=64 -max_len=65536 -artifact_prefix=build/fuzz/
fuzz-bytes: build $(VENV)/.extras-$(EXTRAS) $(VENV)/.extras-fuzz
	CC=clang GDN_SANITIZE=fuzzer-no-link,address,undefined $(PY) setup.py -q build --build-base build/fuzz \
		--build-lib build/fuzz/lib build_ext -j$(JOBS)
	mkdir -p build/corpus/ring build/corpus/saved build/corpus/gguf
	set -e; for name in RING SAVED; do low=$$(echo $$name | tr A-Z a-z); \
	clang -O1 -g -std=gnu11 -Wall -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -DFUZZ_$$name -Igdn/include \
		-Igdn/ring tests/c/fuzz_bytes.c -o build/fuzz/$$low build/fuzz/lib/gdn/lib/libgdn.so \
		-Wl,-rpath,$(abspath build/fuzz/lib/gdn/lib) $(LIBPYTHON); \
	build/fuzz/$$low $(FUZZ_FLAGS) build/corpus/$$low tests/corpus/$$low; done
	$(PY) tests/fuzz_gguf.py $(FUZZ_FLAGS) build/corpus/gguf tests/corpus/gguf

asm: build
	$(PY) benchmarks/asm.py $(ARGS)

old-cpu: build
	qemu-x86_64-static -cpu Nehalem $(PY) -m gdn check

# The extension modules too; they need a Python of that machine to run.
AARCH64 := aarch64-linux-gnu
aarch64: build
	CC=$(AARCH64)-gcc LDSHARED="$(AARCH64)-gcc -shared" _PYTHON_HOST_PLATFORM=linux-aarch64 \
	SETUPTOOLS_EXT_SUFFIX=.$(AARCH64).so \
	$(PY) setup.py -q build --build-base build/aarch64 --build-lib build/aarch64/lib build_ext -j$(JOBS)
	set -e; for program in threads pool; do \
	$(AARCH64)-gcc -O2 -std=gnu11 -Wall -Wextra -Werror -DGDN_LIBRARY -Igdn/include examples/c_host/$$program.c \
		-o build/aarch64/$$program build/aarch64/lib/gdn/lib/libgdn.so -lpthread -lm; \
	qemu-aarch64-static -L /usr/$(AARCH64) -E LD_LIBRARY_PATH=build/aarch64/lib/gdn/lib build/aarch64/$$program; done

docs: $(VENV)/.extras-docs
	$(PY) -m mkdocs build -q --strict

sdist: $(VENV)/.installed
	$(PIP) build
	SOURCE_DATE_EPOCH=$${SOURCE_DATE_EPOCH:-$$(git log -1 --format=%ct)} $(PY) -m build --sdist

# libgdn.so and the plug-in of ggml, in gdn/lib; they need no Python to run.
libgdn: build

PREFIX ?= /usr/local
install-libgdn: libgdn
	install -d $(DESTDIR)$(PREFIX)/lib/pkgconfig $(DESTDIR)$(PREFIX)/lib/cmake/gdn $(DESTDIR)$(PREFIX)/include
	install -m 755 gdn/lib/libgdn.so gdn/lib/libggml-gdn.so $(DESTDIR)$(PREFIX)/lib
	install -m 644 gdn/include/gdn.h $(DESTDIR)$(PREFIX)/include
	install -m 644 gdn/lib/gdnConfig.cmake $(DESTDIR)$(PREFIX)/lib/cmake/gdn
	sed 's|$${pcfiledir}/..|$${pcfiledir}/../..|' gdn/lib/gdn.pc > $(DESTDIR)$(PREFIX)/lib/pkgconfig/gdn.pc

wheel: $(VENV)/.made
	$(PY) -m pip wheel --no-deps -w dist $(PIP_FLAGS) .

clean:
	rm -rf build dist *.egg-info gdn/*.so gdn/lib .pytest_cache .ruff_cache .hypothesis .benchmarks $(VENV)/.built
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
