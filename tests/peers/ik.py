"""ik_llama.cpp's ggml through ctypes, from the wheel ``ik-llama-cpp-python``: its ``delta_net`` and its conventions.

    q, k    ne [S, n_tokens, H_k, n_seqs], contiguous: a head's tokens follow each other
    v       ne [S, n_tokens, H_v, n_seqs], any strides but the first
    g       ne [n_tokens, 1, H_v, n_seqs], beta ne [1, n_tokens, H_v, n_seqs]: views whose memory is
            [H_v, n_tokens, n_seqs], read so whatever the strides say; beta are logits, the sigmoid is inside
    state   ne [S, S * H_v, 1, n_seqs], contiguous, [key][value]
    result  flat: out [S, H_v, n_tokens, n_seqs], then the state in the layout it came in
    S is 64 or 128, H_v % H_k == 0, value head h reads key head h // (H_v // H_k), scale 1/sqrt(S).
"""

import ctypes as C
import functools

from tests.peers import ggml
from tests.peers.ggml import ptr

# Of the functions ggml.py uses, these are not here or take other arguments.
OTHER = {"set_rows", "softplus", "gated_delta_net", "ssm_conv", "solve_tri", "graph_plan", "graph_compute"}


class Library(ggml.Library):
    SIGNATURES = {name: s for name, s in ggml.Library.SIGNATURES.items() if name not in OTHER} | {
        "delta_net": (ptr, ptr, ptr, ptr, ptr, ptr, ptr, ptr),
        "graph_plan": (ggml.Plan, ptr, C.c_int), "graph_compute": (C.c_int, ptr, C.POINTER(ggml.Plan)),
    }

    def plan(self, graph, n_threads):
        return self.ggml_graph_plan(graph, n_threads)


@functools.cache
def load():
    """The library from the wheel; PeerMissing if it is not there."""
    folder = ggml.folder_of("ik_llama_cpp", "ik-llama-cpp-python") / "lib"
    return Library(C.CDLL(str(folder / "libggml.so")))


def by_head(t):
    """[S, H, n_tokens, n_seqs] as the contiguous [S, n_tokens, H, n_seqs] that q and k need."""
    return t.ctx.op("cont", t.permute(0, 2, 1, 3))


def delta_net_result(out, S, H_v, n_tokens, n_seqs):
    """Views of the result: out [S, H_v, n_tokens, n_seqs] and state [S (value), S (key), H_v, n_seqs]."""
    return out.view((S, H_v, n_tokens, n_seqs)), out.view((S, S, H_v, n_seqs), offset=4 * S * H_v * n_tokens * n_seqs)
