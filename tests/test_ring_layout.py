"""The offsets that gdn.h's table promises are the compiler's, here and on aarch64; the header is C11 and C++."""

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from helpers import missing
from ring_tools import EXTENTS, HEADER, READERS, SLOT, UNDO

import gdn

HEADER_FILE = Path(gdn.__file__).parent / "include" / "gdn.h"
SIZES = {"gdn_ring_header": 512, "gdn_ring_slot": 128, "gdn_ring_readers": 128, "gdn_ring_undo": 136}
STRICT = ["-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
COMPILERS = {
    "c11": (["cc", "-std=c11", "-pedantic"], "c"),
    "c++": (["c++", "-std=c++11"], "cc"),
    # Freestanding, so that a compiler without the target's C library will do.
    "aarch64": (["aarch64-linux-gnu-gcc", "-std=c11", "-ffreestanding"], "c"),
}


def table():
    """(struct, field, offset, size) of every row of the comment's tables."""
    text, rows = HEADER_FILE.read_text(), []
    for part in text[:text.index("The buffer needs 4-byte alignment")].split("offset  size  ")[1:]:
        struct = part.split()[0]
        rows += [(struct, name, int(offset), int(size))
                 for offset, size, name in re.findall(r"^ \* +(\d+) +(\d+)  (\w+)", part, re.M)]
    return rows


def test_the_table_is_complete():
    rows = table()
    for struct, total in SIZES.items():
        at = 0
        for _, name, offset, size in [row for row in rows if row[0] == struct]:
            assert offset == at, name
            at += size
        assert at == total


@pytest.mark.parametrize("compiler", COMPILERS)
def test_offsets(compiler, tmp_path):
    command, suffix = COMPILERS[compiler]
    if shutil.which(command[0]) is None:
        missing(f"{command[0]}: on Debian, apt install g++ gcc-aarch64-linux-gnu")
    check = "static_assert" if suffix == "cc" else "_Static_assert"
    lines = ['#include "gdn.h"', "#include <stddef.h>"]
    for struct, name, offset, size in table():
        lines += [f'{check}(offsetof({struct}, {name}) == {offset}, "{name}");',
                  f'{check}(sizeof((({struct} *)0)->{name}) == {size}, "{name}");']
    lines += [f'{check}(sizeof({s}) == {n} && {a}({s}) == 4, "{s}");' for s, n in
              SIZES.items()
              for a in ["alignof" if suffix == "cc" else "_Alignof"]]
    source = tmp_path / f"layout.{suffix}"
    source.write_text("\n".join(lines) + "\n")
    subprocess.run([*command, *STRICT, f"-I{HEADER_FILE.parent}", str(source)], check=True)


def test_what_a_ring_says_is_where_the_table_says():
    buffer = np.zeros(gdn.StateRing.nbytes_for(3, 2, **EXTENTS), np.uint8)
    ring = gdn.StateRing.create(3, 2, buffer=buffer, **EXTENTS)
    at = {name: int.from_bytes(buffer[offset:offset + size].tobytes(), "little")
          for struct, name, offset, size in table() if struct == "gdn_ring_header"}
    assert bytes(buffer[:8]) == b"GDNRING\0"
    for name in ("n_slots", "n_rollback", "n_planes", "n_layers", "H_v", "S_k", "S_v", "conv_channels", "conv_width",
                 "nbytes"):
        assert at[name] == getattr(ring, name)
    assert (at["n_embd_s"], at["n_embd_r"]) == (2 * 4 * 3, 3 * 5)
    for layer in range(ring.n_layers):
        for rows, kind in ((ring.ssm(layer), "ssm"), (ring.conv(layer), "conv")):
            assert rows.data == ring.address + at[f"{kind}_offset"] + layer * at["layer_nb"]
            assert rows.nb[3] == at[f"{kind}_row_nb"]
    offsets = {(struct, name): offset for struct, name, offset, _ in table()}
    for struct, dtype in zip(SIZES, (HEADER, SLOT, READERS, UNDO), strict=True):
        for name in dtype.names:
            assert dtype.fields[name][1] == offsets[struct, name]
