"""The token log through the table of C functions: the bits of the Python calls, in scratch of the size asked for."""

import numpy as np
import pytest
from c_tools import ConvCall, DeltaCall, tensor
from helpers import same_bits
from log_cases import Case

import gdn


def gated_delta_net(api, case):
    """case.call() through C."""
    q, k, v, g, beta = case.arrays()
    call = DeltaCall({"q": q, "k": k, "v": v, "g": g, "beta": beta, "state": case.cache}, case.cache, head_map=1,
                     n_seqs=len(case.lengths), cu_seqlens=case.starts, rows_in=case.rows_in, log_in=case.log_in,
                     n_log_in=case.log_in.shape[1], log_out=case.log_out, n_log_out=case.log_out.shape[1], parents=case.parents,
                     checkpoints=case.checkpoints, n_checkpoints=len(case.checkpoints), n_threads=1)
    call.a.log_k, call.a.log_d = tensor(case.log.k), tensor(case.log.d)
    call.a.log_g = tensor(case.log.g if case.per_channel else case.log.g[..., None])
    return call.with_scratch(api).run(api)


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("lengths", [(1, 1), (3, 9), (40, 2)])
def test_delta_rule(api, lengths, trees, per_channel):
    options = {"lengths": lengths, "entries": (6, 9), "trees": trees, "per_channel": per_channel, "S_v": 40,
               "checkpoints": [(0, -3), (1, 0)]}
    c, python = Case(1, **options), Case(1, **options)
    assert same_bits(gated_delta_net(api, c)[0], python.call())
    assert same_bits(c.memory, python.memory)
    assert same_bits(c.log.d, python.log.d)


@pytest.mark.parametrize("trees", [False, True])
def test_convolution(api, trees):
    rng = np.random.default_rng(2)
    x, weight = rng.standard_normal((2, 5, 40), dtype=np.float32), rng.standard_normal((40, 4), dtype=np.float32)
    parents = [[-1, 0, 0, 1, 2]] * 2 if trees else None
    log = gdn.TokenLog.allocate(20, H_k=1, H_v=1, S_k=1, S_v=1, channels=40)
    log.x[:] = rng.standard_normal(log.x.shape)
    cache, entries = rng.standard_normal((5, 40, 3), dtype=np.float32), log.x.copy()
    lists = {"log_in": np.array([[0, 1, 2], [3, -1, -1]]), "log_out": np.arange(4, 14).reshape(2, 5),
             "checkpoints": np.array([(0, -1, 3), (1, 0, 4)])}
    call = ConvCall(x, weight, None, cache.copy(), activation=1, rows_in=[0, 1], n_log_in=3, n_log_out=5, n_checkpoints=2,
                    parents=parents, **lists)
    call.a.state_out = call.a.state
    x_log = entries.copy()
    call.a.log_x = tensor(x_log)
    out = call.with_scratch(api).run(api)
    assert same_bits(out, gdn.causal_conv1d_inplace(x, weight, None, cache, [0, 1], log=log, parents=parents, **lists))
    assert same_bits(call.arrays["state"], cache)
    assert same_bits(x_log, log.x)
