"""The stubs of the compiled modules against the modules, the examples against the stubs, and help() for everything public."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import gdn

ROOT = Path(__file__).parents[1]
COMPILED = ("gdn._core", "gdn._tensor", "gdn._ring")
# How Python before 3.12 says to type checkers that a class has the buffer protocol.
EXPECTED = {"gdn._tensor.Tensor.__buffer__ is not present at runtime"}


def public():
    """(name, object) of all that a user reaches from `gdn`: functions, classes, their methods and properties."""
    for name, x in vars(gdn).items():
        if name.startswith("_") or inspect.ismodule(x) or not (callable(x) or isinstance(x, type)):
            continue
        yield name, x
        if isinstance(x, type):
            for base in x.__mro__:
                if base.__module__.startswith("gdn"):
                    yield from ((f"{name}.{key}", getattr(x, key)) for key in vars(base) if not key.startswith("_"))


def run(*command):
    return subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, cwd=ROOT)


def test_stubs_say_what_the_modules_have():
    """Signatures by mypy's stubtest; of what a stub lacks, only what users reach counts."""
    done = run("mypy.stubtest", "--concise", *COMPILED)
    names = {f"{module}.{name}" for name, x in public() for module in COMPILED}
    wrong = [line for line in done.stdout.splitlines() if line.startswith("gdn") and line not in EXPECTED
             and not ("is not present in stub" in line and line.split()[0] not in names)]
    assert not wrong and "Traceback" not in done.stderr, "\n".join(wrong) + done.stderr


def test_everything_public_is_documented():
    """Functions, classes, methods and properties by docstrings of their own; plain attributes by that of their class."""
    silent, seen = [], 0
    for name, x in public():
        owner, _, key = name.partition(".")
        seen += 1
        if callable(x) or isinstance(x, property) or inspect.getdoc(x) and inspect.isgetsetdescriptor(x):
            documented = bool(x.__doc__ and x.__doc__.strip())
        else:
            documented = re.search(rf"\b{key}\b", inspect.getdoc(getattr(gdn, owner)) or "")
        if not documented:
            silent.append(name)
    assert not silent and seen > 80, silent


def test_mypy_strict():
    """What is annotated, and an example against it; what it imports beside is read, not judged."""
    done = run("mypy", "--strict", "--follow-imports=silent", "gdn/_arguments.py", "gdn/_errors.py", "gdn/batch.py",
               "gdn/reference.py", "gdn/ring.py", "examples/c_host/shared.py")
    assert done.returncode == 0, done.stdout + done.stderr


ADAPTED = """
import torch
import gdn.adapters.fla, gdn.adapters.torch, gdn.adapters.transformers
from gdn.adapters.peft import from_peft
from gdn.adapters.state_dict import read_layer

q, g = torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 2)
names: list[str] = gdn.adapters.transformers.install(["qwen3_5", "kimi_linear"]) + gdn.adapters.transformers.register()
with gdn.adapters.transformers.installed("qwen3_5") as replaced:
    ran: int = gdn.adapters.transformers.calls[replaced[0]]
gdn.adapters.transformers.uninstall()
for f in (gdn.adapters.fla.chunk_gated_delta_rule, gdn.adapters.fla.fused_recurrent_gated_delta_rule):
    out, final = f(q, q, q, g, beta=g.sigmoid(), cu_seqlens=[0, 1, 4], output_final_state=True)
    assert final is not None and final.shape[0] == 2
gdn.adapters.fla.chunk_kda(q, q, q, q, g, safe_gate=True)
gdn.adapters.fla.fused_recurrent_kda(query=q, key=q, value=q)
y, cache = gdn.adapters.fla.causal_conv1d_update(q[0, 0], *gdn.adapters.fla.causal_conv1d(q.flatten(2), q[0, 0])[:1])
gdn.adapters.fla.as_module()
out, state = gdn.adapters.torch.gated_delta_rule(q, q, q, g, g)
out = gdn.adapters.torch.gated_delta_rule_update(q, q, q, g, g, state, recurrent=True)
out = gdn.adapters.torch.rms_norm_gated(gdn.adapters.torch.causal_conv1d(q.flatten(2), q[0, 0]), out, g)
weights, config = read_layer({"A_log": g}, "", {"model_type": "qwen3_5"}, {"gate": "softplus"})
A, B, scale = from_peft("folder")[config.H_k]["qkv"][0]
"""


def test_programs_on_adapters(tmp_path):
    """Programs that call the adapters pass mypy --strict, and what they get is not Any: a wrong use of it is an error."""
    right, wrong = tmp_path / "right.py", tmp_path / "wrong.py"
    right.write_text(ADAPTED)
    wrong.write_text(ADAPTED + "names.nothing\nout.nothing\nweights.nothing\nscale.nothing\ncache.nothing\n")
    command = "mypy", "--strict", "--follow-imports=silent"
    done = run(*command, str(right))
    assert done.returncode == 0, done.stdout + done.stderr
    assert run(*command, str(wrong)).stdout.count("has no attribute \"nothing\"") == 5
