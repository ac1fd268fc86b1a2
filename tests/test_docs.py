"""The documents: Python blocks run as they stand, C blocks compile against gdn.h, links lead somewhere."""

import re
import subprocess
import sysconfig
from pathlib import Path

import pytest

import gdn

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md"))]
BLOCKS = [(page, language, text) for page in PAGES
          for language, text in re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)]
# What a C block may speak of without declaring it.
C_CONTEXT = """
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include "gdn.h"
extern gdn_tensor q, k, v, g, beta;
extern int64_t slot;
void *scratch_of(size_t size);
"""


def blocks(*languages):
    chosen = [block for block in BLOCKS if block[1] in languages]
    return pytest.mark.parametrize("page, text", [(page, text) for page, _, text in chosen],
                                   ids=[f"{page.name}-{i}" for i, (page, *_) in enumerate(chosen)])


def test_every_block_is_of_a_language_that_is_checked():
    assert {language for _, language, _ in BLOCKS} <= {"python", "c", "sh", "cmake", "text"}


@blocks("python")
def test_python_runs(page, text, monkeypatch):
    monkeypatch.chdir(ROOT)
    exec(compile(text, page.name, "exec"), {})


@blocks("c")
def test_c_compiles(page, text, tmp_path):
    """As the body of a function that is handed the ring, unless the block makes one."""
    context = C_CONTEXT + ("" if "gdn_api *gdn" in text else "extern const gdn_api *gdn;\n")
    if "Py_" in text:
        context = "#include <Python.h>\n" + context
    arguments = "void" if "gdn_ring_header *ring" in text else "gdn_ring_header *ring"
    source = tmp_path / "block.c"
    source.write_text(f"{context}int block({arguments})\n{{\n{text}return 0;\n}}\n")
    done = subprocess.run(["cc", "-std=gnu11", "-Werror=implicit-function-declaration", "-fsyntax-only",
                           f"-I{gdn.get_include()}", f"-I{sysconfig.get_path('include')}", str(source)],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        assert re.match(r"https?://", target) or (page.parent / target).exists(), target


def test_every_fault_has_its_tests():
    rows = re.findall(r"^\| (?!fault|---)(.*?) \| (.*) \|$", (ROOT / "docs/FAULTS.md").read_text(), re.MULTILINE)
    assert len(rows) > 90
    for fault, tests in rows:
        names = re.findall(r"`(\w+)::(\w+)`", tests)
        assert names or tests.startswith("measured"), fault
        for file, name in names:
            path, = ROOT.glob(f"tests/**/test_{file}.py")
            assert re.search(rf"^def test_{name}\(", path.read_text(), re.MULTILINE), f"{file}::{name}"
