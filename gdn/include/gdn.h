/* gdn.h - Gated DeltaNet and Kimi Delta Attention on the CPU: the C face.
 *
 * No Python header is needed.  The functions are members of one table, `gdn_api`, which a host fetches once:
 *
 *     gdn_api *gdn = PyCapsule_Import("gdn._core.api", 0);      from C that embeds Python, GIL held
 *     gdn_api *gdn = (gdn_api *)(uintptr_t)address;              the integer `gdn.capi` seen from Python
 *
 * and checks with `gdn_api_ok(gdn)`.  After that no call needs the GIL, touches Python or allocates.
 *
 * Ownership   The library never allocates, frees or keeps caller memory.  Scratch comes from the caller:
 *             ask the `*_scratch_size` function with the same arguments, hand in that many bytes at any address.
 * Strides     `nb` is in bytes and signed; any multiple of 4 is legal on every axis: permuted, padded, negative,
 *             and (inputs only) 0 to broadcast.  `ne[0]` is the fastest axis by convention, as in ggml.
 * Types       Kernels take float32 (GDN_TYPE_F32) only; anything else is GDN_ERR_TYPE.
 * Aliasing    Stated per function.  Overlaps that are not allowed there are the caller's duty: C calls do not
 *             look for them (the Python functions do).
 * Threads     Every function may be called from several threads at once on memory that is not shared, except
 *             where it says otherwise.  `n_threads` is the largest number of OpenMP workers for this call; 0 takes the
 *             library's default.  Results have the same bits for any number.  Calls from inside a parallel
 *             region and calls in a forked child run serial.
 * Errors      Every function returns a gdn_status; none aborts or prints.  Arguments are checked before anything is written.
 */
#ifndef GDN_H
#define GDN_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define GDN_ABI 1u

typedef enum gdn_status {
    GDN_OK            = 0,
    GDN_ERR_NULL      = 1,  /* a required pointer is NULL */
    GDN_ERR_TYPE      = 2,  /* a tensor is not float32 */
    GDN_ERR_SHAPE     = 3,  /* extents disagree or are negative */
    GDN_ERR_STRIDE    = 4,  /* a stride or address is no multiple of 4, or an output is broadcast */
    GDN_ERR_VALUE     = 5,  /* an option is unknown, missing or out of range */
    GDN_ERR_ROW       = 6,  /* a row index is outside the cache, or a row is written twice */
    GDN_ERR_SCRATCH   = 7,  /* scratch is smaller than the size function asks for */
    GDN_ERR_ABI       = 8,  /* a struct's `size` is not one this library knows */
    GDN_ERR_FULL      = 9,  /* ring: no free slot */
    GDN_ERR_UNKNOWN   = 10, /* ring: unknown sequence */
    GDN_ERR_LOST      = 11, /* ring: the sequence's state was lost in a step that never committed */
    GDN_ERR_BUSY      = 12, /* ring: already acquired, or already in a step */
    GDN_ERR_ROLLBACK  = 13, /* ring: rollback deeper than the planes hold */
    GDN_ERR_DAMAGED   = 14  /* ring: bytes are no ring, truncated, of another abi or shape, or fail their checksum */
} gdn_status;

/* Storage types; the numbers are ggml's. */
enum { GDN_TYPE_F32 = 0, GDN_TYPE_F16 = 1, GDN_TYPE_I32 = 26, GDN_TYPE_BF16 = 30 };

/* A tensor: pointer, type, extents and byte strides.  numpy sees the same memory with the axes reversed. */
typedef struct gdn_tensor {
    void   *data;
    int32_t type;
    int64_t ne[4];
    int64_t nb[4];
} gdn_tensor;

/* A gdn_tensor over a ggml tensor's memory, from ggml's public fields (ggml.h must be included by the user). */
#define GDN_TENSOR_FROM_GGML(t)                                                        \
    { (t)->data, (int32_t)(t)->type,                                                   \
      { (t)->ne[0], (t)->ne[1], (t)->ne[2], (t)->ne[3] },                              \
      { (int64_t)(t)->nb[0], (int64_t)(t)->nb[1], (int64_t)(t)->nb[2], (int64_t)(t)->nb[3] } }

/* Which key head value head h reads. */
enum {
    GDN_HEAD_NONE        = 0, /* legal only when H_v == H_k, where both maps agree */
    GDN_HEAD_TILED       = 1, /* h % H_k            ggml's op, GGUF qwen35 */
    GDN_HEAD_INTERLEAVED = 2  /* h / (H_v / H_k)    transformers, FLA, ik_llama.cpp, onnxruntime */
};

enum { GDN_MODE_AUTO = 0, GDN_MODE_CHUNKED = 1, GDN_MODE_RECURRENT = 2 };

/* Flags of gdn_delta_net_args. */
enum {
    GDN_QK_L2NORM   = 1, /* q and k rows are divided by sqrt(sum x^2 + l2_eps) first */
    GDN_L2_MAX      = 2, /* ... by max(||x||, l2_eps) instead, as ggml_l2_norm does */
    GDN_BETA_LOGIT  = 4, /* beta holds logits: sigmoid is applied */
    GDN_SCALE_GIVEN = 8  /* use `scale`; without it scale is 1/sqrt(S_k) */
};

/* gated_delta_net: one call of the gated delta rule over any number of sequences.
 *
 *     S   <- exp(g_t) * S;   d = beta_t * (v_t - S^T k_t);   S <- S + k_t d^T;   o_t = scale * S^T q_t
 *
 *   q, k       ne = S_k, H_k, n_tokens, n_seqs
 *   v, out     ne = S_v, H_v, n_tokens, n_seqs      out is written; it may be exactly v, and nothing else
 *   g          ne = 1 or S_k, H_v, n_tokens, n_seqs: natural log of the decay, scalar (GDN) or per channel (KDA)
 *   beta       ne = 1, H_v, n_tokens, n_seqs
 *   state      ne = S_k, S_v, H_v, rows: where sequences start; data NULL starts all from zeros
 *   state_out  ne = S_k, S_v, H_v, rows: where states go; may be exactly `state`; data NULL keeps none
 *   cu_seqlens NULL, or n_seqs+1 token offsets from 0 to n_tokens: q..out then have ne[3] == 1, packed
 *   rows_in    NULL: sequence i starts from row i; or n_seqs rows of `state`, -1 = zeros
 *   rows_out   NULL: slot s of sequence i goes to row s * n_seqs + i; or n_seqs * n_slots rows [i][s], -1 = nowhere
 *   n_slots    K >= 1: slot s holds the state s tokens before the end.  It exists for s < the sequence's length
 *              (slot 0 always); the row of a slot that does not exist is left untouched.
 *
 * All rows of rows_in are read as if before any row is written, so `state` and `state_out` may be one cache and rows
 * may be forked or permuted; a row written twice is GDN_ERR_ROW.
 * Thread safety: concurrent calls may share a cache as long as no row is written by one and touched by another. */
typedef struct gdn_delta_net_args {
    uint32_t size;              /* sizeof(gdn_delta_net_args) */
    int32_t  head_map;          /* GDN_HEAD_* */
    int32_t  mode;              /* GDN_MODE_* */
    uint32_t flags;             /* GDN_QK_L2NORM | ... */
    float    scale;
    float    l2_eps;
    int32_t  n_threads;
    int32_t  reserved;          /* 0 */
    gdn_tensor q, k, v, g, beta, out, state, state_out;
    int64_t  n_seqs;            /* with cu_seqlens: its length - 1; else q.ne[3] */
    int64_t  n_slots;
    int64_t  slot_nb;           /* bytes between slots of one sequence when rows_out is NULL; 0 = n_seqs * state_out.nb[3] */
    const int64_t *rows_in;
    const int64_t *rows_out;
    const int64_t *cu_seqlens;
    void    *scratch;
    size_t   scratch_size;
    char    *message;           /* NULL, or where a refused call explains itself (NUL-terminated) */
    size_t   message_size;
} gdn_delta_net_args;

/* causal_conv1d: depthwise causal convolution with carried state, y[t,c] = act(bias[c] + sum_w weight[w,c] x[t-width+1+w,c]).
 *
 *   x, out     ne = channels, n_tokens, n_seqs       out may be exactly x
 *   weight     ne = width, channels                  width >= 1
 *   bias       ne = channels, or data NULL
 *   state      ne = width-1, channels, rows          oldest input first; data NULL starts from zeros
 *   state_out  as state; may be exactly `state`; data NULL keeps none
 * n_seqs .. cu_seqlens and the row rules are those of gdn_delta_net_args. */
enum { GDN_ACT_NONE = 0, GDN_ACT_SILU = 1, GDN_ACT_SIGMOID = 2 };

typedef struct gdn_conv_args {
    uint32_t size;              /* sizeof(gdn_conv_args) */
    int32_t  activation;        /* GDN_ACT_NONE or GDN_ACT_SILU */
    int32_t  n_threads;
    int32_t  reserved;          /* 0 */
    gdn_tensor x, weight, bias, out, state, state_out;
    int64_t  n_seqs;
    int64_t  n_slots;
    int64_t  slot_nb;
    const int64_t *rows_in;
    const int64_t *rows_out;
    const int64_t *cu_seqlens;
    void    *scratch;
    size_t   scratch_size;
    char    *message;
    size_t   message_size;
} gdn_conv_args;

enum { GDN_L2_FORM_SUM = 0, GDN_L2_FORM_MAX = 1 };

struct gdn_ring_header;         /* the state ring, below */

/* The function table.  Members are only ever appended; `size` says how many a library has. */
typedef struct gdn_api {
    uint32_t abi;               /* GDN_ABI */
    uint32_t size;              /* sizeof(gdn_api) of the library */

    gdn_status (*gated_delta_net)(const gdn_delta_net_args *args);
    gdn_status (*gated_delta_net_scratch_size)(const gdn_delta_net_args *args, size_t *bytes);
    gdn_status (*causal_conv1d)(const gdn_conv_args *args);
    gdn_status (*causal_conv1d_scratch_size)(const gdn_conv_args *args, size_t *bytes);
    /* out = x / sqrt(sum x^2 + eps) or x / max(||x||, eps) along ne[0].  out may be exactly x. */
    gdn_status (*l2_norm)(const gdn_tensor *x, float eps, int32_t form, const gdn_tensor *out, int32_t n_threads);
    /* out = x / sqrt(mean x^2 + eps) * weight * act(gate) along ne[0]; weight ne = (n).  out may be exactly x or gate. */
    gdn_status (*rms_norm_gated)(const gdn_tensor *x, const gdn_tensor *gate, const gdn_tensor *weight, float eps,
                                 int32_t activation, const gdn_tensor *out, int32_t n_threads);
    /* out = softplus(a + dt_bias) * A, or with lower_bound: *lower_bound * sigmoid(-A * (a + dt_bias)).
     * a, out ne = 1 or S_k, H, n_tokens, n_seqs; A ne = (H); dt_bias ne = (1 or S_k, H).  lower_bound may be NULL.
     * out may be exactly a. */
    gdn_status (*decay_gate)(const gdn_tensor *a, const gdn_tensor *A, const gdn_tensor *dt_bias,
                             const float *lower_bound, const gdn_tensor *out, int32_t n_threads);
    /* a X = b, a ne = n, n, batch; b, out ne = m, n, batch (ggml_solve_tri's meaning).  out may be exactly b. */
    gdn_status (*solve_tri)(const gdn_tensor *a, const gdn_tensor *b, int32_t lower, int32_t unit,
                            const gdn_tensor *out, int32_t n_threads);
    const char *(*status_string)(gdn_status status);
} gdn_api;

/* Whether a fetched table is one this header describes. */
static inline int gdn_api_ok(const gdn_api *api)
{
    return api != NULL && api->abi == GDN_ABI && api->size >= sizeof(gdn_api);
}

#ifdef __cplusplus
}
#endif
#endif /* GDN_H */
