"""register(): transformers' own way in, by the `kernels` package.

transformers 5.24 asks for kernels >= 0.18.2 and < 0.19.  Where an older one is what can be installed, the program below
tells transformers that it is 0.18.2: the functions transformers imports from it, and the protocol of repositories and layers,
are those of 0.17.2.
"""

import subprocess
import sys

import pytest
from helpers import optional

optional("kernels")
optional("transformers")

START = """
import importlib.metadata, sys
from packaging.version import parse
version = importlib.metadata.version
if parse(version("kernels")) < parse("0.18.2"):
    importlib.metadata.version = lambda name: "0.18.2" if name == "kernels" else version(name)
import torch, kernels, transformers, logging
from transformers.utils.import_utils import is_kernels_available
assert is_kernels_available()
import model_tools
import gdn.adapters.transformers as adapter
from helpers import error
torch.set_num_threads(1)
ids = torch.randint(2, 64, (2, 21), generator=torch.Generator().manual_seed(0))
assert adapter.register() == sorted(adapter.LAYERS)
options = {"max_new_tokens": 8, "do_sample": False}

def logits(model):
    with torch.no_grad():
        return model(ids).logits

def used():
    return {name.removeprefix("kernels.") for name in adapter.calls if name.startswith("kernels.")}
"""

FAMILIES = START + """
for family in model_tools.FAMILIES:
    model = model_tools.build(family)
    before, tokens = logits(model), model.generate(ids, **options)
    assert not adapter.calls
    model.set_use_kernels(True)
    assert error(logits(model), before) < 1e-4, family
    assert torch.equal(model.generate(ids, **options), tokens), family
    kda = family in model_tools.KDA
    rules = {"chunk_kda", "fused_recurrent_kda"} if kda else {"chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"}
    assert used() == rules | {"causal_conv1d_fn", "causal_conv1d_update"}, (family, used())
    adapter.calls.clear()
"""

REST = START + """
import tempfile
model = model_tools.build("qwen3_5")
before = logits(model)
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    plain = type(model).from_pretrained(folder)
    assert torch.equal(logits(plain), before) and not adapter.calls
    loaded = type(model).from_pretrained(folder, use_kernels=True)
assert error(logits(loaded), before) < 1e-4 and used() == {"chunk_gated_delta_rule", "causal_conv1d_fn"}
adapter.calls.clear()
logits(plain)                                   # of the same family: what is kernelized is the model file's functions
assert used() == {"chunk_gated_delta_rule", "causal_conv1d_fn"}

adapter.calls.clear()                           # a gradient: transformers' own functions, in evaluation and in training
loaded(ids).logits.sum().backward()
assert not adapter.calls
loaded.zero_grad()
loaded.train()
loaded.set_use_kernels(True)
loaded(ids).logits.sum().backward()
assert not adapter.calls
loaded.eval()
loaded.set_use_kernels(True)

from transformers.models.qwen3_5 import modeling_qwen3_5 as file
q, g, cuts = torch.randn(1, 9, 2, 8), -torch.rand(1, 9, 2), torch.tensor([0, 4, 9])
out, _ = file.torch_chunk_gated_delta_rule(q, q, q, g, g, cu_seqlens=cuts)
parts = [file.torch_chunk_gated_delta_rule(*(x[:, a:b] for x in (q, q, q, g, g)))[0] for a, b in ((0, 4), (4, 9))]
assert error(out, torch.cat(parts, 1)) < 1e-5
for bad, kind in (({"cu_seqlens": torch.tensor([0, 4])}, ValueError), ({"initial_state": torch.zeros(2, 2, 8, 8)}, ValueError)):
    try:
        file.torch_chunk_gated_delta_rule(q, q, q, g, g, **bad)
    except kind:
        continue
    raise SystemExit(f"not refused: {bad}")

with adapter.installed("qwen3_5"):              # both ways at once
    adapter.calls.clear()
    assert error(logits(loaded), before) < 1e-4
    assert "qwen3_5.torch_chunk_gated_delta_rule" in adapter.calls and not used()

try:                                            # documented: a KernelConfig cannot name them
    config = transformers.KernelConfig({"chunk_gated_delta_rule": {"cpu": "gdn/gdn:chunk_gated_delta_rule"}})
    loaded.set_use_kernels(True, config)
except ValueError as refusal:
    assert "cpu" in str(refusal)
else:
    raise SystemExit("a KernelConfig took cpu")
"""


@pytest.mark.parametrize("program", [FAMILIES, REST], ids=["families", "rest"])
def test_kernels(program, pytestconfig):
    done = subprocess.run([sys.executable, "-c", program], cwd=pytestconfig.rootpath / "tests", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
