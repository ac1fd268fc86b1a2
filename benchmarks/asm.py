"""Do the hot loops keep their accumulators in registers?  Reads the machine code of every level with objdump.

    python benchmarks/asm.py [--all] [MODULE.so ...]

An innermost loop with at least HOT multiply-adds on whole vectors is a hot loop.  A vector stored to the stack inside
one is a spill, and a tile of a chunk's panel that is kept on the stack, because a loop over it was not unrolled, is
worse: exit status 1.  Reads of the stack alone (a constant or a pointer kept there) are shown, not refused, and
neither is a store to an array: where a row's last lanes are gathered and scattered one by one.

LEFT names the spills that are known and left: sixteen registers hold neither integer conversions beside accumulators
(narrow storage), nor every sum of four rows at once.  One more is refused.
"""

import argparse
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "gdn"
LEFT = {"base": {"walk_keys_f16": 5, "walk_values_f16": 1},      # most spills of a loop
        "v3": {"steps_on_bf16": 4, "steps_on_floats": 1}}
VECTOR = {"base": "xmm", "v3": "ymm", "v4": "zmm"}
HOT = 8
PROLOGUE = 8            # instructions that may take an address to align the stack
FUNCTION = re.compile(r"^[0-9a-f]+ <(.+)>:$")
INSTRUCTION = re.compile(r"^\s*([0-9a-f]+):\s+(\S+)\s*(.*?)\s*(?:#.*)?$")
JUMP = re.compile(r"^([0-9a-f]+) <")
WHOLE = re.compile(r"^v?mov(?:[ua]p[sd]|dq[ua]\d*)$")
MULTIPLY = re.compile(r"^v?(?:fn?m(?:add|sub)\d*ps|mulps)$")


@dataclass
class Loop:
    function: str
    start: int
    length: int
    multiplies: int
    loads: int
    stack_reads: int
    stack_writes: int

    @property
    def name(self):
        return re.sub(r"^__pyx_f_\w*?_level_(base|v3|v4)_", "", self.function)

    def __str__(self):
        return (f"{self.name:24} {self.start:7x} {self.length:5} instructions {self.multiplies:4} multiply-adds "
                f"{self.loads:4} vector loads {self.stack_reads:3} stack reads {self.stack_writes:3} spills")


def functions(module):
    """(name, [(address, mnemonic, operands)]) of every function in a module."""
    text = subprocess.run(["objdump", "-d", "--no-show-raw-insn", module], check=True, capture_output=True, text=True)
    name, body = None, []
    for line in text.stdout.splitlines():
        if match := FUNCTION.match(line):
            if name:
                yield name, body
            name, body = match[1], []
        elif match := INSTRUCTION.match(line):
            body.append((int(match[1], 16), match[2], match[3]))
    if name:
        yield name, body


def innermost(body):
    """Index ranges of loops that contain no other: from the target of a jump backwards to the jump, if
    the code between leads there: else it is the end of an outer loop whose middle lies elsewhere."""
    index = {address: i for i, (address, _, _) in enumerate(body)}
    ranges = set()
    for i, (_, mnemonic, operands) in enumerate(body):
        match = JUMP.match(operands) if mnemonic.startswith("j") else None
        first = index.get(int(match[1], 16)) if match else None
        if first is not None and first <= i:
            ranges.add((first, i))

    def goes_round(first, last):
        seen, ahead = set(), [first]
        while ahead:
            i = ahead.pop()
            if i == last:
                return True
            if i in seen or not first <= i < last:
                continue
            seen.add(i)
            _, mnemonic, operands = body[i]
            if mnemonic.startswith("j") and (match := JUMP.match(operands)):
                ahead.append(index.get(int(match[1], 16), -1))
            if mnemonic not in ("jmp", "ret"):
                ahead.append(i + 1)
        return False
    ranges = {r for r in ranges if goes_round(*r)}
    return [r for r in ranges if not any(o != r and r[0] <= o[0] and o[1] <= r[1] for o in ranges)]


def stack_of(body):
    """How operands on a function's stack begin."""
    framed = any(m == "mov" and o == "%rsp,%rbp" for _, m, o in body)
    return re.compile(r"\(%r(?:sp|bp)\b" if framed else r"\(%rsp\b")


def stack_arrays(body, stack):
    """Operands of places on the stack that hold no spilled vector: their address is taken, or floats side by side are moved."""
    arrays, floats = set(), {}
    for _, mnemonic, operands in body:
        place = re.search(r"-?\w*" + stack.pattern + r"\)", operands)
        if place and mnemonic == "lea":
            arrays.add(place[0])
        elif place and mnemonic in ("movss", "vmovss"):
            floats[int(place[0].split("(")[0] or "0", 16)] = place[0]
    return arrays | {operand for at, operand in floats.items() if at + 4 in floats}


def tiles_on_stack(name, body):
    """Whether a panel's function takes the address of an array on its stack (behind the prologue): its only arrays are
    tiles."""
    taken = re.compile(rf"{stack_of(body).pattern}[^)]*\),%(?!rsp)")
    return "chunk_panel" in name and any(
        mnemonic == "lea" and taken.search(operands) or mnemonic == "mov" and operands.startswith("%rsp,")
        for _, mnemonic, operands in body[PROLOGUE:])


def measure(name, body, vector):
    """The Loops of one function."""
    stack = stack_of(body)
    arrays = stack_arrays(body, stack)
    for first, last in innermost(body):
        loop = Loop(name, body[first][0], last - first + 1, 0, 0, 0, 0)
        for _, mnemonic, operands in body[first:last + 1]:
            if f"%{vector}" not in operands:
                continue
            loop.multiplies += bool(MULTIPLY.match(mnemonic))
            store = mnemonic.startswith(("mov", "vmov")) and operands.endswith(")")
            if stack.search(operands):
                loop.stack_writes += store and bool(WHOLE.match(mnemonic)) and operands.rsplit(",", 1)[1] not in arrays
                loop.stack_reads += not store
            loop.loads += "(" in operands and not store
        yield loop


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--all", action="store_true", help="every hot loop, not only the largest and the spilling")
    parser.add_argument("modules", nargs="*", type=Path)
    args = parser.parse_args()
    modules = args.modules or sorted(PACKAGE.glob("_level_*.so"))
    if not modules:
        sys.exit(f"no level modules in {PACKAGE}: make build")
    spills = 0
    for module in modules:
        level = re.match(r"_level_(\w+?)\.", module.name)[1]
        code = list(functions(module))
        loops = [loop for name, body in code for loop in measure(name, body, VECTOR[level])]
        hot = sorted((loop for loop in loops if loop.multiplies >= HOT), key=lambda loop: -loop.multiplies)
        if not hot:
            sys.exit(f"{module.name}: no loop with {HOT} multiply-adds on {VECTOR[level]} registers")
        spilling = [loop for loop in hot if loop.stack_writes]
        kept = [name for name, body in code if tiles_on_stack(name, body)]
        refused = [loop for loop in spilling if loop.stack_writes > LEFT.get(level, {}).get(loop.name, 0)]
        spills += len(refused) + len(kept)
        print(f"{level}: {len(hot)} hot loops, {len(spilling)} of them spill, {len(refused)} more than is known")
        for name in kept:
            print(f"    {name} keeps a tile on the stack")
        for i, loop in enumerate(hot):
            if args.all or i < 5 or loop.stack_writes:
                print("   ", loop)
    return 1 if spills else 0


if __name__ == "__main__":
    sys.exit(main())
