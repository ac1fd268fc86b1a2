"""The house's rules, read from the sources: imports run one way, an include stands in its module's folder, before what
uses it, and names on top (`# Needs:`) what it takes from others of the same module."""

import ast
import re
from pathlib import Path

import pytest

GDN = Path(__file__).parents[1] / "gdn"
# From the bottom up: a file imports, when it is loaded, only from ranks below its own, or within its folder.
RANKS = (("_c", "_checked", "_version", "reference", "include"), ("kernels",), ("_level_base", "_level_v3", "_level_v4"),
         ("_arguments", "_errors"), ("_tensor",), ("_core",), ("_ring",), ("batch", "ring", "weight_layouts", "_config"),
         ("layer_config",), ("layer",), ("adapters", "native"), ("__init__", "__main__", "_check", "_drift", "_bench"))
RANK = {name: rank for rank, names in enumerate(RANKS) for name in names}
HOMES = {"_tensor": "tensor", "_core": "core", "_ring": "ring"}      # whose includes lie where; the levels' in kernels
NAME = re.compile(r"(?<![.\w])[A-Za-z_]\w*")
WORDS = {"nogil", "noexcept", "except", "enum", "struct", "extern", "inline", "const", "from"}


def room(path):
    """The rank's name of a source: its folder's owner, or its own."""
    parts = path.relative_to(GDN).with_suffix("").parts
    return {folder: module for module, folder in HOMES.items()}.get(parts[0], parts[0]) if len(parts) > 1 else parts[0]


def imports(path):
    """Modules of gdn that a source imports or cimports when it is loaded."""
    if path.suffix == ".py":
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "gdn":
                yield from ([alias.name for alias in node.names] if node.module == "gdn" else [node.module.split(".")[1]])
        return
    for module, names in re.findall(r"^from gdn(\.\w+)?\S* c?import (.*)", path.read_text(), re.M):
        yield from [module[1:]] if module else re.findall(r"\w+", names)


SOURCES = sorted(path for pattern in ("*.py", "*.pyx", "*.pxd", "*.pxi") for path in GDN.rglob(pattern))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(GDN)))
def test_imports_run_one_way(path):
    mine = room(path)
    for name in imports(path):
        # A pxd may declare with the names of a module above it: it loads nothing.
        assert name == mine or RANK[name] < RANK[mine], f"{mine} imports {name}, which stands above it"


# ---- includes ------------------------------------------------------------------------------------------------------


def sequence(path, folder):
    """(file, its code) of a module in the order in which the compiler reads them, each piece of the module between two
    includes apart; an include inside an include comes where it stands."""
    for i, piece in enumerate(re.split(r'^include "(.*)"$', path.read_text(), flags=re.M)):
        if i % 2:
            target = (GDN if path.suffix == ".pyx" else path.parent) / piece
            assert target.parent.name == folder, f"{path.name} includes {piece}, which is not in its own folder"
            yield from sequence(target, folder)
        else:
            yield path, piece


def strip(text):
    text = re.sub(r'"""(?:.|\n)*?"""', '""', text)
    return re.sub(r"#.*", "", re.sub(r'"(?:\\.|[^"\\\n])*"', '""', text))


def defined(text):
    """Names that code defines at its top level for what comes after."""
    names = set(re.findall(r"^(?:cdef|cpdef|ctypedef|def|class)\b[^(\n=:]*?(\w+) *(?:\(|:|=|\[|$)", text, re.M))
    names |= set(re.findall(r"^(\w+) *=", text, re.M))
    for type_name, pointer in re.findall(r"^ctypedef .*?(\w+) \(\*(\w+)\)", text, re.M):
        names = names - {type_name} | {pointer}
    for block in re.findall(r"^cdef (?:enum:|extern from .*)\n((?:    .*\n|\n)+)", text, re.M):
        block = re.sub(r"(    ctypedef struct .*\n)(?:        .*\n)+", r"\1", block)      # members are no names
        names |= set(re.findall(r"(\w+) *(?:=|\(|,|\[|$)", re.sub(r"\(.*\)", "(", block), re.M))
    for line in re.findall(r"^(?:cdef|cpdef) .*?\b(\w+(?:, *\w+)+) *$", text, re.M):
        names |= set(re.findall(r"\w+", line))
    return names - WORDS


def declared(text):
    """Names of arguments and local variables."""
    names = set(re.findall(r"\w+(?= *=[^=])", text))
    for line in re.findall(r"^ +cdef (.*)", text, re.M):
        names |= set(re.findall(r"(\w+)(?= *(?:,|=|\[|$))", line))
    for arguments in re.findall(r"^(?:cdef|def|cpdef)[^(\n]*\(((?:.|\n)*?)\)", text, re.M):
        names |= set(re.findall(r"(\w+) *(?:,|=|$|\))", arguments + ")"))
    return names


def module_pieces(module):
    folder = HOMES.get(module, "kernels")
    return [(path, strip(text)) for path, text in sequence(GDN / f"{module}.pyx", folder)]


def needs(path):
    """The `# Needs:` lines at the top of an include: the names, and the files that are taken whole."""
    lines = re.match(r"(?:#.*\n)*", path.read_text())[0].splitlines()
    at = next((i for i, line in enumerate(lines) if line.startswith("# Needs:")), len(lines))
    end = next((i for i in range(at + 1, len(lines)) if lines[i] in ("#", "")), len(lines))
    files = re.findall(r"(\w+\.\w+)(?: \(([^)]*)\))?", " ".join(line.strip("# ") for line in lines[at:end]))
    return {name for _, names in files for name in re.findall(r"\w+", names)}, {file for file, names in files if not names}


@pytest.mark.parametrize("module", [*HOMES, "_level_base"])
def test_includes_name_what_they_take(module):
    pieces = module_pieces(module)
    home = {}                                    # name: files that define it
    for path, text in pieces:
        for name in defined(text):
            home.setdefault(name, path)
    header = GDN / f"{module}.pxd"               # what it declares is there from the start
    before, wrong = defined(strip(header.read_text())) if header.exists() else set(), []
    for path, text in pieces:
        mine = {name for p, t in pieces if p == path for name in defined(t)}
        taken = {name for name in set(NAME.findall(text)) & set(home) if home[name] != path} - declared(text) - mine
        late = sorted(taken - before)
        if late:
            wrong.append(f"{path.name} uses {', '.join(late)} before they are there")
        before |= defined(text)
        if path.suffix == ".pxi" and 'include "' not in path.read_text():
            names, files = needs(path)
            unnamed = sorted(name for name in taken - names if home[name].name not in files)
            stale = sorted(names & set(home) - taken - mine)
            if unnamed:
                wrong.append(f"{path.name}: `# Needs:` lacks " + ", ".join(f"{home[x].name} ({x})" for x in unnamed))
            if stale:
                wrong.append(f"{path.name}: `# Needs:` names {', '.join(stale)}, which it does not take")
    assert not wrong, "\n".join(wrong)


def test_every_include_has_one_module():
    included = {}
    for module in (*HOMES, "_level_base"):
        for path in {path for path, _ in module_pieces(module) if path.suffix == ".pxi"}:
            included.setdefault(path, []).append(module)
    assert {path: modules for path, modules in included.items() if len(modules) > 1} == {}
    assert {path for path in GDN.rglob("*.pxi")} == set(included)
