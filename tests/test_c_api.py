"""The C face without Python in between: the header in C and C++, the table through ctypes and through compiled C."""

import ctypes
import subprocess
from ctypes import byref, c_char_p, c_int64, c_size_t, c_uint32, c_void_p
from pathlib import Path

import numpy as np
import pytest
from c_tools import (
    LEAST,
    NULL,
    OK,
    REFUSED,
    SCRATCH,
    SHAPE,
    STRIDE,
    TYPE,
    VALUE,
    Api,
    ConvCall,
    DeltaArgs,
    DeltaCall,
    Tensor,
    check_null,
    check_refusal,
    spoiled,
    tensor,
)
from helpers import Carved, assert_close, case, same_bits, truth
from test_conv import make

import gdn

INCLUDE = Path(gdn.__file__).parent / "include"
TENSORS = DeltaArgs.TENSORS
TILED, INTERLEAVED = 1, 2
L2NORM, L2_MAX, BETA_LOGIT, SCALE_GIVEN = 1, 2, 4, 8


def test_the_table(api):
    assert (api.abi, api.size) == (2, ctypes.sizeof(Api))
    capsule = gdn._core.api
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = c_void_p, [ctypes.py_object, c_char_p]
    assert get(capsule, b"gdn._core.api") == gdn.capi
    fetch = ctypes.pythonapi.PyCapsule_Import
    fetch.restype, fetch.argtypes = c_void_p, [c_char_p, ctypes.c_int]
    assert fetch(b"gdn._core.api", 0) == gdn.capi
    for field in Api._fields_[2:]:
        assert ctypes.cast(getattr(api, field[0]), c_void_p).value, f"{field[0]} is NULL"


def test_status_strings(api):
    texts = [api.status_string(s) for s in range(15)]
    assert all(texts) and len(set(texts)) == 15
    assert api.status_string(-1) and api.status_string(15) and api.status_string(2**31 - 1)


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("n_threads", [0, 1, 3])
def test_a_call(rng, api, mode, per_channel, n_threads):
    c = case(rng, 2, 37, 2, 4, 20, 33, "mix", per_channel)
    expected, final, _ = truth(c, "interleaved")
    state = Carved(shape=c["state"].shape, order=[0, 1, 3, 2], gaps=[0, 3, 0, 1])
    call = DeltaCall(c, state.array, head_map=INTERLEAVED, mode=mode, n_threads=n_threads)
    for offset in (0, 1, 63):
        out = call.with_scratch(api, offset=offset).run(api)
        assert_close(out, expected, "out")
        assert_close(state.array, final, "state")
        assert state.intact()


def test_the_same_bits_as_from_python(rng, api):
    c = case(rng, 2, 37, 2, 2, 32, 48)
    out, state = gdn.gated_delta_net(**c)
    target = np.empty_like(state)
    call = DeltaCall(c, target).with_scratch(api)
    assert same_bits(call.run(api), out) and same_bits(target, state)


def test_options(rng, api):
    c = case(rng, 1, 20, 1, 1, 16, 16)
    c["q"] *= 5
    c["beta"] = rng.standard_normal(c["beta"].shape).astype(np.float32)
    common = L2NORM | BETA_LOGIT | SCALE_GIVEN
    for flags, form in ((common, "sum"), (common | L2_MAX, "max")):
        expected, _, _ = truth(c, qk_l2norm=True, l2_form=form, l2_eps=0.5, beta_logit=True, scale=3)
        call = DeltaCall(c, flags=flags, scale=3, l2_eps=0.5).with_scratch(api)
        assert_close(call.run(api), expected, form)


def test_no_states_at_all(rng, api):
    c = case(rng, 2, 20, state=False)
    expected, _, _ = truth(c)
    assert_close(DeltaCall(c).with_scratch(api).run(api), expected, "out")


def test_slots_without_rows(rng, api):
    """rows_out NULL: snapshot s of sequence i is row s * n_seqs + i, or snapshot_nb bytes on."""
    c = case(rng, 2, 10, 1, 1, 16, 16)
    _, _, states = truth(c)
    packed = Carved(shape=(6, 1, 16, 16))
    DeltaCall(c, packed.array, n_snapshots=3).with_scratch(api).run(api)
    planes = Carved(shape=(3, 5, 1, 16, 16))
    before = planes.array.copy()
    DeltaCall(c, planes.array[0], n_snapshots=3, snapshot_nb=planes.array.strides[0]).with_scratch(api).run(api)
    for s in range(3):
        assert_close(packed.array[2 * s:2 * s + 2], states[9 - s], f"slot {s}")
        assert same_bits(planes.array[s, :2], packed.array[2 * s:2 * s + 2])
    assert same_bits(planes.array[:, 2:], before[:, 2:]) and packed.intact()


def test_rows_and_lengths(rng, api):
    c = case(rng, 1, 12, 1, 1, 16, 16, state=False)
    cache = rng.standard_normal((6, 1, 16, 16)).astype(np.float32)
    expected = cache.copy()
    want = gdn.gated_delta_net_inplace(*(c[n] for n in TENSORS[:5]), expected, [3, -1, 0], [[0, 1], [3, -1], [4, 5]],
                                       cu_seqlens=[0, 7, 7, 12])
    call = DeltaCall({**c, "state": cache}, cache, n_seqs=3, n_snapshots=2, cu_seqlens=[0, 7, 7, 12], rows_in=[3, -1, 0],
                 rows_out=[0, 1, 3, -1, 4, 5]).with_scratch(api)
    assert same_bits(call.run(api), want) and same_bits(cache, expected)


DELTA_REFUSED = REFUSED | {
    **{f"{n} NULL": (spoiled(n, data=None), NULL) for n in TENSORS[:6]},
    **{f"{n} i32": (spoiled(n, type=26), TYPE) for n in TENSORS},
    **{f"{n} extent": (spoiled(n, ne=(1, 7)), SHAPE) for n in TENSORS},
    **{f"{n} negative extent": (spoiled(n, ne=(2, -1)), SHAPE) for n in TENSORS},
    **{f"{n} stride": (spoiled(n, nb=(1, 6)), STRIDE) for n in TENSORS},
    "q address": (lambda c: setattr(c.a.q, "data", c.a.q.data + 2), STRIDE),
    "q beyond memory": (lambda c: [spoiled(n, ne=(2, 2**63 - 1))(c) for n in TENSORS[:6]], SHAPE),
    "head_map unknown": (lambda c: c.set(head_map=3), VALUE),
    "head_map missing": (lambda c: c.set(head_map=0), VALUE),
    "mode unknown": (lambda c: c.set(mode=3), VALUE),
    "mode negative": (lambda c: c.set(mode=-1), VALUE),
    **{f"flag {i}": (lambda c, i=i: c.set(flags=1 << i), VALUE) for i in range(4, 32)},
    "scale NaN": (lambda c: c.set(flags=SCALE_GIVEN, scale=float("nan")), VALUE),
    "l2_eps negative": (lambda c: c.set(flags=L2NORM, l2_eps=-1), VALUE),
}


@pytest.mark.parametrize("name", DELTA_REFUSED)
def test_refused(rng, api, name):
    spoil, status = DELTA_REFUSED[name]
    c = case(rng, 2, 5, 2, 4, 16, 16)
    state = Carved(shape=c["state"].shape)
    call = DeltaCall(c, state.array, head_map=TILED).with_scratch(api)
    spoil(call)
    check_refusal(api, call, name, status, state.words)


def test_messages_fit_their_buffer(rng, api):
    call = DeltaCall(case(rng, 1, 5), mode=77)
    for size in (0, 1, 5):
        call.text.raw = b"#" * 200
        call.set(message_size=size)
        assert api.gated_delta_net(byref(call.a)) == VALUE
        assert call.text.raw[size:] == b"#" * (200 - size)
        assert size == 0 or b"\0" in call.text.raw[:size]


@pytest.mark.parametrize("n_snapshots", [2**40, 2**61, 2**62, 2**62 + 1, 2**63 - 1])
@pytest.mark.parametrize("snapshot_nb", [0, 64])
def test_sizes_do_not_wrap_around(rng, api, n_snapshots, snapshot_nb):
    """More slots than any memory holds: refused, or a scratch size nobody can offer, never a small one."""
    c = case(rng, 2, 5)
    call = DeltaCall(c, np.empty_like(c["state"]), n_snapshots=n_snapshots, snapshot_nb=snapshot_nb)
    n = c_size_t(0)
    status = api.gated_delta_net_scratch_size(byref(call.a), byref(n))
    assert status in (SHAPE, VALUE) or n.value >= 8 * n_snapshots, (status, n.value)


def row_wise(out):
    """Arguments of every row-wise function but the last, n_threads."""
    x, weight, A, a = (np.full(shape, 0.5, np.float32) for shape in ((3, 4), 4, 3, (3, 3)))
    A *= -1
    x, weight, A, a, out = (tensor(y) for y in (x, weight, A, a, out))
    return {"l2_norm": (x, 1e-6, 0, out), "rms_norm_gated": (x, x, weight, 1e-6, 1, out),
            "decay_gate": (x, A, x, 1, -5, out), "solve_tri": (a, x, 1, 0, out)}


@pytest.mark.parametrize("name", [name for name, _ in Api._fields_[2:10]])
def test_null_arguments(rng, api, name):
    out = np.empty((3, 4), np.float32)
    calls = {call.name: call for call in (DeltaCall(case(rng)), ConvCall(*make(rng)))}
    arguments = {call: (calls[call].with_scratch(api).a,) for call in calls}
    sizes = {call + "_scratch_size": (*arguments[call], c_size_t()) for call in calls}
    rows = {function: (*given, 1) for function, given in row_wise(out).items()}
    check_null(getattr(api, name), {**arguments, **sizes, **rows}[name])


def test_negative_threads_everywhere(api):
    out = Carved(shape=(3, 4))
    for name, arguments in row_wise(out.array).items():
        function, before = getattr(api, name), out.words.copy()
        assert function(*arguments, -1) == VALUE, name
        assert np.array_equal(out.words, before), name
        assert function(*arguments, 1) == OK, name


def test_scratch_too_small(rng, api):
    c = case(rng, 2, 20)
    for slack, scratch in ((-1, True), (0, False)):
        call = DeltaCall(c).with_scratch(api, slack)
        if not scratch:
            call.set(scratch=None)
        before = call.out.words.copy(), call.scratch.copy()
        assert api.gated_delta_net(byref(call.a)) == SCRATCH
        assert str(call.n_scratch).encode() in call.text.value
        assert np.array_equal(before[0], call.out.words) and np.array_equal(before[1], call.scratch)


# ---- the header ------------------------------------------------------------------------------------------------

C_PROGRAM = """
#include "gdn.h"
#include <stdlib.h>
#include <string.h>
size_t sizes[4] = { sizeof(gdn_tensor), sizeof(gdn_delta_net_args), sizeof(gdn_api),
                    GDN_ARGS_LEAST(gdn_delta_net_args) };

struct fake_ggml { void *data; int type; int64_t ne[4]; size_t nb[4]; };

static gdn_tensor make(float *data, int64_t a, int64_t b, int64_t c, int64_t d)
{
    struct fake_ggml t;
    gdn_tensor result;
    t.data = data; t.type = 0;
    t.ne[0] = a; t.ne[1] = b; t.ne[2] = c; t.ne[3] = d;
    t.nb[0] = 4; t.nb[1] = 4 * (size_t)a; t.nb[2] = t.nb[1] * (size_t)b; t.nb[3] = t.nb[2] * (size_t)c;
    { gdn_tensor from = GDN_TENSOR_FROM_GGML(&t); result = from; }
    return result;
}

/* Decode n tokens, one call each, on memory of this program's own; returns the status. */
int decode(const gdn_api *gdn, int64_t H, int64_t S, int64_t n, const float *q, const float *k, const float *v,
           const float *g, const float *beta, float *out, float *state)
{
    gdn_delta_net_args a;
    size_t n_bytes = 0, n_state = (size_t)(S * S * H);
    int64_t t;
    int status = gdn_api_ok(gdn) ? GDN_OK : GDN_ERR_ABI;
    float *own = (float *)calloc(n_state, sizeof(float));
    float *row = (float *)malloc((size_t)(5 * S * H) * sizeof(float));
    memset(&a, 0, sizeof a);
    a.size = sizeof a;
    a.call.n_seqs = a.call.n_snapshots = 1;
    for (t = 0; t < n && status == GDN_OK; t++) {
        size_t wide = (size_t)(S * H), narrow = (size_t)H;
        memcpy(row, q + t * S * H, wide * 4);
        memcpy(row + wide, k + t * S * H, wide * 4);
        memcpy(row + 2 * wide, v + t * S * H, wide * 4);
        memcpy(row + 3 * wide, g + t * H, narrow * 4);
        memcpy(row + 3 * wide + narrow, beta + t * H, narrow * 4);
        a.q = make(row, S, H, 1, 1);
        a.k = make(row + wide, S, H, 1, 1);
        a.v = make(row + 2 * wide, S, H, 1, 1);
        a.g = make(row + 3 * wide, 1, H, 1, 1);
        a.beta = make(row + 3 * wide + narrow, 1, H, 1, 1);
        a.out = make(row + 4 * wide, S, H, 1, 1);
        a.call.state = a.call.state_out = make(own, S, S, H, 1);
        if (a.call.scratch == NULL) {
            status = gdn->gated_delta_net_scratch_size(&a, &n_bytes);
            a.call.scratch = malloc(n_bytes);
            a.call.scratch_size = n_bytes;
        }
        if (status == GDN_OK)
            status = gdn->gated_delta_net(&a);
        memcpy(out + t * S * H, row + 4 * wide, wide * 4);
    }
    memcpy(state, own, n_state * sizeof(float));
    free(a.call.scratch);
    free(own);
    free(row);
    return status;
}
"""

STRICT = ["-Wall", "-Wextra", "-Werror", "-Wconversion", "-Wno-sign-conversion", "-pedantic"]


def compile_c(folder, name, text, *command):
    source = folder / name
    source.write_text(text)
    target = folder / (name + ".so")
    done = subprocess.run([*command, *STRICT, f"-I{INCLUDE}", "-shared", "-fPIC", "-o", str(target), str(source)],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(target))


@pytest.mark.parametrize("standard", ["c99", "c11", "gnu17"])
def test_a_c_program_decodes(rng, tmp_path, standard):
    library = compile_c(tmp_path, "decode.c", C_PROGRAM, "cc", f"-std={standard}")
    sizes = (c_size_t * 4).in_dll(library, "sizes")
    assert list(sizes)[:2] == [ctypes.sizeof(Tensor), ctypes.sizeof(DeltaArgs)]
    assert sizes[3] == LEAST[DeltaArgs] and sizes[2] == Api.from_address(gdn.capi).size
    c = case(rng, 1, 9, 2, 2, 16, 16, "-1e-3", state=False)
    expected, final, _ = truth(c)
    out, state = np.empty_like(c["v"]), np.empty((1, 2, 16, 16), np.float32)
    pointers = [c_void_p(x.ctypes.data) for x in (*(c[n] for n in TENSORS[:5]), out, state)]
    status = library.decode(c_void_p(gdn.capi), c_int64(2), c_int64(16), c_int64(9), *pointers)
    assert status == OK
    assert_close(out, expected, "out")
    assert_close(state, final, "state")


@pytest.mark.parametrize("standard", ["c++11", "c++20"])
def test_the_header_is_cpp_too(tmp_path, standard):
    text = '#include "gdn.h"\nextern "C" int usable(const gdn_api *api) { return gdn_api_ok(api); }\n'
    library = compile_c(tmp_path, "use.cpp", text, "c++", f"-std={standard}")
    assert library.usable(c_void_p(gdn.capi)) == 1 and library.usable(None) == 0
    other = (c_uint32 * 64).from_buffer_copy(ctypes.string_at(gdn.capi, 8) + bytes(248))
    other[0] += 1
    assert library.usable(byref(other)) == 0


def test_the_header_alone(tmp_path):
    """Included twice, first, and with nothing else."""
    compile_c(tmp_path, "twice.c", '#include "gdn.h"\n#include "gdn.h"\nint x = GDN_ABI;\n', "cc", "-std=c99")
