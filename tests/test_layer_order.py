"""Layers and ops called in any order of lengths, in turn and from several threads: the bits of a fresh process."""

import hashlib
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from layer_cases import Case, run

import gdn

LENGTHS = [(256, 128), (128, 256), (64, 128), (192, 256), (1, 64, 1, 63, 2), (1500, 3, 1500)]
FAMILIES = ("qwen35", "kimi")


def digest(*arrays):
    return hashlib.sha256(b"".join(x.tobytes() for x in arrays)).hexdigest()


def prompt(n, *shape):
    return np.random.default_rng(n).standard_normal((n, *shape), np.float32)


def layer_calls(case, lengths):
    """Digests of one sequence's calls of those lengths, and of the same lengths on sequences of their own."""
    ring = case.ring(len(lengths) + 1)
    for seq_id in range(len(lengths) + 1):
        ring.acquire(seq_id)
    for i, n in enumerate(lengths):
        trace = {}
        y = run(case.layer, ring, prompt(n, 64), [0] * n)
        alone = run(case.layer, ring, prompt(n, 64), [i + 1] * n, trace=trace)
        yield digest(y, alone, *trace.values())
    yield digest(ring.ssm(0).numpy(), ring.conv(0).numpy())


def op_calls(lengths):
    """Digests of every op on that many tokens, chunked and token by token, for both gates."""
    for n in lengths:
        x = prompt(n, 1, 4, 24).swapaxes(0, 1)
        a, A = x[..., 0], -np.abs(x[0, 0, :, 0])
        outs = [gdn.l2_norm(x), gdn.rms_norm_gated(x, x, x[0, 0, 0]), gdn.decay_gate(a, A, A),
                *gdn.causal_conv1d(x[:, :, 0], x[0, 0].T.copy())]
        for g in (-np.abs(a), -np.abs(x)):
            for mode in ("auto", "chunked", "recurrent"):
                outs += gdn.gated_delta_net(x[:, :, :2], x[:, :, 2:], x, g, a, head_map="tiled", qk_l2norm=True, beta_logit=True,
                                            mode=mode)
        yield digest(*outs)


@pytest.fixture(scope="module")
def fresh():
    """The digests of every list of lengths, each from a process that made those calls alone."""
    code = ("import json, sys; sys.path.insert(0, sys.argv[1]); import test_layer_order as t; n = json.loads(sys.argv[3])\n"
            "print(json.dumps(list(t.op_calls(n) if sys.argv[2] == 'ops' else t.layer_calls(t.Case(sys.argv[2]), n))))")
    command = [sys.executable, "-c", code, str(Path(__file__).parent)]
    return {(kind, lengths): json.loads(subprocess.run([*command, kind, json.dumps(lengths)], check=True,
                                                       capture_output=True).stdout)
            for kind in (*FAMILIES, "ops") for lengths in LENGTHS}


def test_any_order_in_one_process(fresh):
    """Every list in two shuffled orders, the layers and the ops taking turns call by call."""
    cases = {family: Case(family) for family in FAMILIES}
    for seed in range(2):
        todo = [LENGTHS[i] for i in np.random.default_rng(seed).permutation(len(LENGTHS))]
        for lengths in todo:
            calls = [*(layer_calls(case, lengths) for case in cases.values()), op_calls((*lengths, 1))]
            turns = list(zip(*calls, strict=True))
            for i, kind in enumerate((*FAMILIES, "ops")):
                got = [turn[i] for turn in turns]
                assert (got[:-1] if kind == "ops" else got) == fresh[kind, lengths], (kind, lengths)


def test_threads_that_share_layers(fresh):
    """Eight threads, each with its own ring and order, on the same two layers."""
    cases = {family: Case(family) for family in FAMILIES}

    def calls(seed):
        order = np.random.default_rng(seed).permutation(len(LENGTHS) * len(FAMILIES))
        for i in order:
            family, lengths = FAMILIES[i % len(FAMILIES)], LENGTHS[i // len(FAMILIES)]
            if list(layer_calls(cases[family], lengths)) != fresh[family, lengths]:
                return family, lengths
        return None

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(calls, range(8))) == [None] * 8
