/* gdn.h - Gated DeltaNet and Kimi Delta Attention on the CPU: the C face.
 *
 * No Python header is needed.  The functions are members of one table, `gdn_api`, which a host fetches once:
 *
 *     const gdn_api *gdn = gdn_get_api(GDN_ABI);                 linked with libgdn.so, no Python anywhere
 *     gdn_api *gdn = PyCapsule_Import("gdn._core.api", 0);      from C that embeds Python, GIL held
 *     gdn_api *gdn = (gdn_api *)(uintptr_t)address;              the integer `gdn.capi` seen from Python
 *
 * and checks with `gdn_api_ok(gdn)`.  After that no call needs the GIL, touches Python or allocates.
 *
 * Ownership   The library never allocates, frees or keeps caller memory.  Scratch comes from the caller:
 *             ask the `*_scratch_size` function with the same arguments, hand in that many bytes at any address.
 * Strides     `nb` is in bytes and signed; any multiple of the element's size is legal on every axis: permuted, padded, negative,
 *             and (inputs only) 0 to broadcast.  `ne[0]` is the fastest axis by convention, as in ggml.
 * Types       float32 is computed.  Activations (q, k, v, g, beta, out, x, a, gate) and states may be float32, float16 or
 *             bfloat16, each its own; the rest is float32.  Anything else is GDN_ERR_TYPE.
 * Aliasing    Stated per function.  Overlaps that are not allowed there are the caller's duty: C calls do not
 *             look for them (the Python functions do).
 * Threads     Every function may be called from several threads at once on memory that is not shared, except
 *             where it says otherwise.  `n_threads` is the largest number of workers for this call, OpenMP's or the
 *             host's (set_parallel_for); 0 takes the library's default, and leaves threads out for a while when they made
 *             calls slower, as they do beside another busy process.  Results have the same bits for any number.
 *             Calls from inside a parallel region run serial, and calls in a forked child whose parent had threads.
 * Errors      Every function returns a gdn_status; none aborts or prints.  Arguments are checked before anything is written.
 */
#ifndef GDN_H
#define GDN_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define GDN_ABI 2u

typedef enum gdn_status {
    GDN_OK            = 0,
    GDN_ERR_NULL      = 1,  /* a required pointer is NULL */
    GDN_ERR_TYPE      = 2,  /* a tensor's type is none that the call takes */
    GDN_ERR_SHAPE     = 3,  /* extents disagree or are negative */
    GDN_ERR_STRIDE    = 4,  /* a stride or address is no multiple of its element's size, or an output is broadcast */
    GDN_ERR_VALUE     = 5,  /* an option is unknown, missing or out of range */
    GDN_ERR_ROW       = 6,  /* a row index is outside the cache */
    GDN_ERR_SCRATCH   = 7,  /* scratch is smaller than the size function asks for */
    GDN_ERR_ABI       = 8,  /* a struct's `size` is not one this library knows */
    GDN_ERR_FULL      = 9,  /* ring: no free slot */
    GDN_ERR_UNKNOWN   = 10, /* ring: unknown sequence */
    GDN_ERR_LOST      = 11, /* ring: the sequence's state was lost in a step that never committed */
    GDN_ERR_BUSY      = 12, /* ring: already acquired, or already in a step */
    GDN_ERR_ROLLBACK  = 13, /* ring: rollback deeper than the planes hold */
    GDN_ERR_DAMAGED   = 14, /* ring: bytes are no ring, truncated, of another abi or shape, or fail their checksum */
    GDN_ERR_LOCKED    = 15, /* ring: a living process holds the lock and does not let go */
    GDN_ERR_TWICE     = 16, /* a row is written twice */
    GDN_ERR_PENDING   = 17, /* ring: a committed tree waits for ring_accept */
    GDN_ERR_SPARE     = 18  /* ring: a step needs more spare rows than the ring has */
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

/* What the arguments of both calls on states end with: states, rows, sequences, scratch and the token log.
 *
 *   state      where sequences start, rows of states along its last axis; data NULL starts all from zeros
 *   state_out  where states go; may be exactly `state`; data NULL keeps none
 *   n_seqs     with cu_seqlens its length - 1, else what the arrays hold
 *   cu_seqlens NULL, or n_seqs+1 token offsets from 0 to n_tokens: the arrays then hold one sequence, packed
 *   rows_in    NULL: sequence i starts from row i; or n_seqs rows of `state`, -1 = zeros
 *   rows_out   NULL: snapshot s of sequence i goes to row s * n_seqs + i; or n_seqs * n_snapshots rows [i][s], -1 = nowhere
 *   n_snapshots    K >= 1: snapshot s is the state s tokens before the end.  It exists for s < the sequence's length
 *              (snapshot 0 always); the row of one that does not exist is left untouched.
 *   snapshot_nb    only without rows_out: bytes from one snapshot of a sequence to the next, 0 = n_seqs rows.  Rows of
 *              different snapshots or sequences must not meet (GDN_ERR_TWICE); with rows_in, state_out must not be `state`.
 *   message    NULL, or where a refused call explains itself (NUL-terminated)
 *
 * All rows of rows_in are read as if before any row is written, so `state` and `state_out` may be one cache and rows
 * may be forked or permuted; a row written twice is GDN_ERR_TWICE.
 * Thread safety: concurrent calls may share a cache as long as no row is written by one and touched by another.
 *
 * The token log.  A token changes a state by a decay and one outer product: S <- exp(g) S + k d^T.  The tensors log_* of the
 * arguments hold such entries, one a token; lists of indices say which are read and written, as rows_in and rows_out do for
 * states, so that a token can be taken back by forgetting its entry, and no state is written for it.  All of it may be
 * zero: no log.  Data NULL of a log tensor is no log.
 *
 *   log_in     n_seqs * n_log_in: the entries [i][j] on top of the row sequence i starts from, oldest first, -1 behind the last.
 *              The sequence stands at row + entries; with row -1, at zeros + entries
 *   log_out    n_seqs * n_log_out, n_log_out at least the longest length: where the entry of token t of sequence i goes, [i][t],
 *              -1 = nowhere; what stands behind a sequence's length is not used.  No entry is read or written twice, or both
 *              (GDN_ERR_TWICE)
 *   parents    one for each token, in the arrays' order: index within the sequence's tokens of the one it continues, smaller
 *              than its own, -1 = where the sequence stands.  A token sees its ancestors alone.  rows_out then names no row,
 *              and checkpoints are at n <= 0
 *   checkpoints    n_checkpoints * 3, each (i, n, row): the state of sequence i after n tokens of this call goes to row of
 *              state_out too; -(its entries) <= n <= its length, so that n < 0 is a state of the log alone: its oldest
 *              entries folded into a row, which the next call names in rows_in.  No row is written twice, here or by rows_out
 *   rows_out   NULL with log_in, log_out or parents keeps no snapshot
 *
 * A sequence without tokens keeps its log, and its snapshots and checkpoints are written.  causal_conv1d takes the same lists:
 * a token's window is its last width-1 ancestors, the log's x among them, and the row's window before those.
 *
 * Narrow states.  state and state_out may be float16 or bfloat16.  What is computed of them is float32: a state is rounded
 * once a call, as it is written.  GDN_ROUND_NEAREST takes ties to even.  GDN_ROUND_STOCHASTIC goes up with the probability of
 * what is cut off, by bits that follow from the seed, the sequence's index, how many tokens of the call the state has seen and
 * the element's index in its row: the same for any threads and rows, so every call wants a seed of its own.  A finite number
 * beyond float16 becomes 65504; out and other activations are rounded to nearest, to infinity beyond. */
typedef struct gdn_call {
    gdn_tensor state, state_out;
    int64_t  n_seqs;
    int64_t  n_snapshots;
    int64_t  snapshot_nb;
    const int64_t *rows_in;
    const int64_t *rows_out;
    const int64_t *cu_seqlens;
    void    *scratch;
    size_t   scratch_size;
    char    *message;
    size_t   message_size;
    const int64_t *log_in;      /* members from here on are beyond GDN_ARGS_LEAST */
    int64_t  n_log_in;
    const int64_t *log_out;
    int64_t  n_log_out;
    const int64_t *parents;
    const int64_t *checkpoints;
    int64_t  n_checkpoints;
    int32_t  rounding;          /* GDN_ROUND_*: how states narrower than float32 are stored */
    int32_t  reserved;          /* 0 */
    uint64_t seed;              /* of GDN_ROUND_STOCHASTIC, else 0 */
} gdn_call;

enum { GDN_ROUND_NEAREST = 0, GDN_ROUND_STOCHASTIC = 1 };

/* The smallest `size` of gdn_delta_net_args and gdn_conv_args.  Members beyond a struct's `size` count as zero, so that a
 * program keeps running with a library whose structs have grown.  A larger `size` than this library knows is taken if the
 * bytes that it does not know are zero, else it is GDN_ERR_ABI. */
#define GDN_ARGS_LEAST(type) (offsetof(type, call) + offsetof(gdn_call, log_in))

/* gated_delta_net: one call of the gated delta rule over any number of sequences.
 *
 *     S   <- exp(g_t) * S;   d = beta_t * (v_t - S^T k_t);   S <- S + k_t d^T;   o_t = scale * S^T q_t
 *
 *   q, k       ne = S_k, H_k, n_tokens, n_seqs
 *   v, out     ne = S_v, H_v, n_tokens, n_seqs      out is written; it may be exactly v, and nothing else
 *   g          ne = 1 or S_k, H_v, n_tokens, n_seqs: natural log of the decay, scalar (GDN) or per channel (KDA)
 *   beta       ne = 1, H_v, n_tokens, n_seqs
 *   state(_out)    ne = S_k, S_v, H_v, rows
 *   log_k      ne = S_k, H_k, entries: the key as the rule used it
 *   log_d      ne = S_v, H_v, entries: beta_t * (v_t - S^T k_t)
 *   log_g      ne = 1 or S_k, H_v, entries
 * With call.cu_seqlens q..out have n_seqs = 1. */
typedef struct gdn_delta_net_args {
    uint32_t size;              /* sizeof(gdn_delta_net_args) */
    int32_t  head_map;          /* GDN_HEAD_* */
    int32_t  mode;              /* GDN_MODE_* */
    uint32_t flags;             /* GDN_QK_L2NORM | ... */
    float    scale;
    float    l2_eps;
    int32_t  n_threads;
    int32_t  reserved;          /* 0 */
    gdn_tensor q, k, v, g, beta, out;
    gdn_tensor log_k, log_d, log_g;
    gdn_call call;
} gdn_delta_net_args;

/* causal_conv1d: depthwise causal convolution with carried state, y[t,c] = act(bias[c] + sum_w weight[w,c] x[t-width+1+w,c]).
 *
 *   x, out     ne = channels, n_tokens, n_seqs       out may be exactly x
 *   weight     ne = width, channels                  width >= 1
 *   bias       ne = channels, or data NULL
 *   state(_out)    ne = width-1, channels, rows, or width-1, channels, 1, rows as a ring gives it; oldest input first
 *   log_x      ne = channels, entries */
enum { GDN_ACT_NONE = 0, GDN_ACT_SILU = 1, GDN_ACT_SIGMOID = 2 };

typedef struct gdn_conv_args {
    uint32_t size;              /* sizeof(gdn_conv_args) */
    int32_t  activation;        /* GDN_ACT_NONE or GDN_ACT_SILU */
    int32_t  n_threads;
    int32_t  reserved;          /* 0 */
    gdn_tensor x, weight, bias, out;
    gdn_tensor log_x;
    gdn_call call;
} gdn_conv_args;

enum { GDN_L2_FORM_SUM = 0, GDN_L2_FORM_MAX = 1 };

enum {
    GDN_GATE_SOFTPLUS = 0,      /* A softplus(x) */
    GDN_GATE_BOUNDED = 1,       /* lower_bound sigmoid(-A x), as FLA's KDA has it */
    GDN_GATE_CLAMPED = 2        /* max(A softplus(x), lower_bound) */
};

/* ---------------------------------------------------------------------------------------------------------------
 * The state ring: one flat buffer, from anywhere, that holds the recurrent and convolution states of n_slots sequences.
 * All functions take the buffer itself as their first argument.  It has one of two forms:
 *
 * GDN_FORM_PLANES  Every slot has n_planes planes and a head.  A step writes each token's state to the next plane; rolling
 *     back n tokens moves the head back n planes.  State row of a slot's plane: row = plane * n_slots + slot, the same
 *     for every layer and for both kinds of state.
 * GDN_FORM_LOG  Every slot owns one state row and n_entries log entries (see gdn_call): the sequence stands at its row and
 *     the n_log entries that its list names, oldest first.  A step whose tokens fit into log_capacity adds entries and
 *     writes no state; else all but the newest n_rollback are folded: the state before them goes to another row, one of
 *     n_spare that all slots share, which is the slot's once the step commits.  Rolling back forgets entries.
 *
 * The buffer is a gdn_ring_header, then tables and rows at the byte offsets (from the buffer's start) it names:
 *
 *     offset  size  gdn_ring_header
 *          0     8  magic           "GDNRING", NUL
 *          8     4  abi             GDN_RING_ABI
 *         12     4  header_size     512
 *         16     8  nbytes          of the whole buffer
 *         24     8  tag             of what its states are (model, head order); 0: not told
 *         32     8  nonce           another for every ring ever made
 *         40     4  form            GDN_FORM_*
 *         44     4  dtype           of the recurrent rows: GDN_TYPE_F32, _F16 or _BF16; the rest is float32
 *         48     4  n_slots         sequences the ring has room for
 *         52     4  n_rollback      tokens that can be taken back
 *         56     4  n_planes        n_rollback + 1 + spare; 1 in log form
 *         60     4  n_layers
 *         64     4  H_k             0: not told
 *         68     4  H_v
 *         72     4  S_k
 *         76     4  S_v
 *         80     4  per_channel     1: a gate has S_k values a head, 0: one
 *         84     4  conv_channels   0: no convolution state
 *         88     4  conv_width      a row keeps the last conv_width - 1 inputs
 *         92     4  log_capacity    entries that a committed sequence may have; 0 in plane form
 *         96     4  n_entries       of a slot: log_capacity + n_rollback + 1; 0 in plane form
 *        100     4  n_spare         rows beyond one a slot; 0 in plane form
 *        104     4  n_ids           extent of the id table, a power of two
 *        108     4  head_map        GDN_HEAD_*: which key head's k a value head's entries go with; 0: not told
 *        112     8  n_rows          of a layer: n_planes * n_slots + n_spare
 *        120     8  n_embd_s        elements of a recurrent row: S_k * S_v * H_v, [H_v][S_v][S_k], key index contiguous
 *        128     8  n_embd_r        floats of a convolution row: [conv_channels][conv_width - 1], oldest first
 *        136     8  slots_offset    gdn_ring_slot[n_slots]
 *        144     8  readers_offset  gdn_ring_readers[n_slots]
 *        152     8  journal_offset  gdn_ring_undo[n_slots]: records as they were before the change under way
 *        160     8  lists_offset    for each slot int32[2][n_entries]: the order of its entries, of which one counts; then
 *                                     int32[n_rollback + 1]: parents of a tree
 *        168     8  list_nb         bytes from a slot's lists to the next slot's
 *        176     8  spares_offset   int32[n_spare]: state rows that no slot has
 *        184     8  ids_offset      int32[n_ids]: slots, open addressing by sequence id, -1 = none
 *        192     8  free_offset     uint32[(n_slots + 31) / 32]: bits of free slots
 *        200     8  ssm_offset      recurrent row 0 of layer 0
 *        208     8  ssm_row_nb      bytes from a recurrent row to the next
 *        216     8  conv_offset     convolution row 0 of layer 0
 *        224     8  conv_row_nb     bytes from a convolution row to the next
 *        232     8  log_offset      entry 0 of layer 0: its k [H_k][S_k]; entry of a slot = slot * n_entries + place in list
 *        240     8  entry_nb        bytes from an entry to the next
 *        248     8  entry_d         bytes from an entry's k to its d [H_v][S_v]
 *        256     8  entry_g         ... to its g [H_v] or [H_v][S_k]
 *        264     8  entry_x         ... to the convolution's input [conv_channels]
 *        272     8  layer_nb        bytes from a layer's rows and entries to the next layer's
 *        280    96  reserved        0
 *        376     4  reserved_word   0
 *        380     4  checksum        crc32 of the 380 bytes before it
 *        384     4  lock            0, or who holds it
 *        388     4  sequence        odd while slot records change
 *        392     4  n_journal       entries that undo the change under way
 *        396     4  last_step       id of the last step begun
 *        400     4  n_spare_free    of the spare rows' table
 *        404   108  reserved_state  0
 *
 *     offset  size  gdn_ring_slot
 *          0     8  seq_id          -1: no sequence
 *          8     8  position        tokens the state has seen
 *         16     8  owner_start     when the marking process started, so that a process id used again is not mistaken for it
 *         24     8  n_tokens        of the step that marked it
 *         32     4  state           GDN_SLOT_*
 *         36     4  mark            GDN_MARK_*: who else may touch the slot now
 *         40     4  owner           process id of who marked it
 *         44     4  step            id of the step that marked it
 *         48     4  next            next slot of that step, -1 at its end
 *         52     4  id_at           its place in the id table, -1: none
 *         56     4  head            plane form: plane of the committed state
 *         60     4  valid           planes behind the head that hold the states before it; as many tokens,
 *                                     but at most n_rollback, can be taken back
 *         64     4  touched         planes that may have been written since it was marked
 *         68     4  row             log form: the slot's state row
 *         72     4  zero            1: the row counts as zeros whatever it holds
 *         76     4  order           which of the two lists counts
 *         80     4  first           place in the list of the oldest entry; places count around its end
 *         84     4  n_log           entries on top of the row
 *         88     4  new_row         of the step that marked it: where the folded state goes, -1 = nothing is folded
 *         92     4  n_kept          ... n_log entries that are not folded
 *         96     4  n_new           ... entries it writes, behind the n_log
 *        100     4  n_tree          entries behind the n_log of a committed tree that waits for ring_accept
 *        104     4  tree            ... 1: its tokens are a tree
 *        108    20  reserved        0
 *
 *     offset  size  gdn_ring_readers
 *          0    32  count           copies and saves under way, by 8 processes at most
 *         32    32  owner           their process ids
 *         64    64  owner_start     and when these started
 *
 *     offset  size  gdn_ring_undo
 *          0     4  slot            whose record
 *          4     4  reserved        0
 *          8   128  old             the gdn_ring_slot that it was
 *
 * The buffer needs 4-byte alignment and is read by its own offsets alone, so it may lie at another address in every
 * process.  Rows and entries start on 64-byte addresses of the process that created it if the address modulo 64 is kept.
 *
 * Reading without these functions: remember `sequence` (acquire) until it is even, read slot records, and read
 * `sequence` again: equal means that what was read is one committed state of all slots.  A row of a committed plane
 * stays as it is until its sequence's next step begins (spare >= 1: until the second next), and so do a log's entries.
 *
 * Steps.  ring_begin marks the sequences and says which rows and entries the in-place calls read and write; ring_commit
 * publishes all of them at once.  ring_abort, or the death of the owning process (found when somebody needs what it
 * holds, and by ring_attach), leaves every sequence as it was; only if a step of plane form may have written the
 * committed plane itself (spare == 0 and more than n_rollback tokens, or as many from a fresh start) it is GDN_ERR_LOST
 * from then on, until reset, loaded or released.  Planes that an aborted step wrote are gone: ring_max_rollback says
 * what is left.  Whether kernels wrote what a step is committed with is the caller's duty.
 *
 * Trees (log form).  A step with `parents` has drafts that branch.  Committed, each of its sequences waits for
 * ring_accept, which says which path stays; until then its position is the one before the step, and begin, rollback,
 * copy and save of it are GDN_ERR_PENDING.
 *
 * Thread safety: every ring function may be called from any thread of any process on the same ring; a lock in the
 * buffer, taken over from holders that died, orders them.  A sequence that one caller has in a step, or is loading or
 * resetting, is GDN_ERR_BUSY for others; one that is being copied or saved, for steps and other changes only.  Processes
 * must see each other's process ids.  The lock is held for no longer than it takes to change slot records; waiting 10 s
 * for a living holder (stopped, or forked while another thread held it) gives GDN_ERR_LOCKED.
 * A refused call changes nothing. */
#define GDN_RING_ABI 2u

enum { GDN_FORM_PLANES = 0, GDN_FORM_LOG = 1 };
enum { GDN_SLOT_FREE = 0, GDN_SLOT_LIVE = 1, GDN_SLOT_LOST = 2, GDN_SLOT_FILLING = 3 };
enum {
    GDN_MARK_NONE = 0,
    GDN_MARK_STEP = 1,  /* a step that continues the sequence */
    GDN_MARK_FRESH = 2, /* a step or reset that starts it afresh */
    GDN_MARK_FILL = 3   /* a new sequence is being written */
};

#pragma pack(push, 4)
typedef struct gdn_ring_header {
    char     magic[8];
    uint32_t abi, header_size;
    int64_t  nbytes;
    uint64_t tag, nonce;
    int32_t  form, dtype, n_slots, n_rollback, n_planes, n_layers, H_k, H_v, S_k, S_v, per_channel;
    int32_t  conv_channels, conv_width, log_capacity, n_entries, n_spare, n_ids, head_map;
    int64_t  n_rows, n_embd_s, n_embd_r;
    int64_t  slots_offset, readers_offset, journal_offset, lists_offset, list_nb, spares_offset, ids_offset, free_offset;
    int64_t  ssm_offset, ssm_row_nb, conv_offset, conv_row_nb;
    int64_t  log_offset, entry_nb, entry_d, entry_g, entry_x, layer_nb;
    int64_t  reserved[12];
    uint32_t reserved_word, checksum;
    uint32_t lock, sequence, n_journal, last_step;
    int32_t  n_spare_free;
    uint32_t reserved_state[27];
} gdn_ring_header;

typedef struct gdn_ring_slot {
    int64_t  seq_id, position;
    uint64_t owner_start;
    int64_t  n_tokens;
    int32_t  state, mark;
    uint32_t owner, step;
    int32_t  next, id_at;
    int32_t  head, valid, touched;
    int32_t  row, zero, order, first, n_log, new_row, n_kept, n_new, n_tree, tree;
    int32_t  reserved[5];
} gdn_ring_slot;

typedef struct gdn_ring_readers {
    uint32_t count[8], owner[8];
    uint64_t owner_start[8];
} gdn_ring_readers;

typedef struct gdn_ring_undo {
    int32_t  slot, reserved;
    gdn_ring_slot old;
} gdn_ring_undo;
#pragma pack(pop)

/* What ring_size and ring_init make a ring of.  n_planes = n_rollback + 1 + spare.  `size` may be that of the members up
 * to and with `spare`; members beyond it count as zero. */
typedef struct gdn_ring_params {
    uint32_t size;              /* sizeof(gdn_ring_params) */
    int32_t  n_slots, n_rollback, n_layers, H_v, S_k, S_v;
    int32_t  conv_channels, conv_width;     /* 0 and 1 without convolution */
    int32_t  spare;             /* 0, or more; -1 = 1 if n_rollback > 0, else 0; log form: -1 */
    int32_t  form;              /* GDN_FORM_* */
    int32_t  H_k, per_channel;  /* log form: extents of an entry; plane form: carried along, 0 = not told */
    int32_t  log_capacity;      /* log form: at least n_rollback + 1; 0 = max(16, 2 n_rollback) */
    int32_t  n_spare;           /* log form: 1 to n_slots; 0 = n_slots */
    int32_t  dtype;             /* of the recurrent rows: GDN_TYPE_F32, GDN_TYPE_F16 or GDN_TYPE_BF16 */
    int32_t  head_map;          /* GDN_HEAD_*: only ring_copy_state and ring_save_state of log form need it, if 1 < H_k < H_v */
    uint64_t tag;               /* of what the states are, 0 = not told */
} gdn_ring_params;

/* A step over n_seqs different sequences.  The caller fills what is not marked `out`; arrays are the caller's and are not
 * looked at after ring_begin.  `size` may be that of the members up to and with `nonce`; members beyond it count as zero.
 *
 * With log form rows_out is -1 throughout, and the lists are what gdn_call takes. */
typedef struct gdn_ring_step {
    uint32_t size;              /* sizeof(gdn_ring_step) */
    uint32_t step;              /* out: this step's id; 0 when it is over */
    int64_t  n_seqs;
    int64_t  n_snapshots;       /* K, the second extent of rows_out: at least 1; plane form: min(most tokens, n_rollback + 1) */
    const int64_t *seq_ids;     /* n_seqs */
    const int64_t *n_tokens;    /* n_seqs, each >= 0 */
    const int64_t *positions;   /* NULL, or n_seqs: -1 = continue, 0 = start afresh, else the position it must be at */
    int64_t *rows_in;           /* out, n_seqs: the row that holds the state; -1 = zeros */
    int64_t *rows_out;          /* out, n_seqs * n_snapshots: row of the state s tokens before the end; -1 = none */
    int64_t  failed;            /* out: which entry a refused ring_begin is about, n_seqs + i for fork i, or -1 */
    int32_t  first;             /* out: slot of the first sequence */
    int32_t  reserved;          /* 0 */
    uint64_t nonce;             /* out: of the ring */
    int64_t  n_log_in;          /* second extent of log_in: log_capacity, or the most entries of any sequence */
    int64_t  n_log_out;         /* second extent of log_out: at least the most tokens */
    int64_t *log_in;            /* log form, out: entries on top of rows_in, oldest first, -1 behind the last */
    int64_t *log_out;           /* log form, out: where each token's entry goes, -1 = nowhere */
    const int64_t *parents;     /* log form, NULL or a tree: for each token, sequences one after another, the index within
                                   its sequence's tokens of the one it continues, -1 = where the sequence stands */
    const int64_t *forks;       /* n_forks * 3: (i, n, new id): once the step commits, the new sequence is one of its own
                                   that has seen the first n tokens (with parents: 0) of sequence i; gone if it aborts */
    int64_t  n_forks;
    int64_t  max_checkpoints;   /* of `checkpoints`: n_seqs + n_forks suffice, n_forks in plane form */
    int64_t *checkpoints;       /* out, n_checkpoints * 3: (i, n, row), as gdn_call takes them */
    int64_t  n_checkpoints;     /* out */
} gdn_ring_step;

/* A host's own threads.  fn(context, body, job, n_shares) runs body(job, i) for each i in 0 .. n_shares-1 exactly once, on
 * any threads, in any order, and returns when all are done.  n_shares is at most the call's n_threads. */
typedef void (*gdn_share_fn)(void *job, int32_t share);
typedef void (*gdn_parallel_for)(void *context, gdn_share_fn body, void *job, int32_t n_shares);

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
    /* The log decay of x = a + dt_bias in one of the forms GDN_GATE_*.
     * a, out ne = 1 or S_k, H, n_tokens, n_seqs; A ne = (H), -exp(A_log), so 0 or less; dt_bias ne = (1 or S_k, H).
     * lower_bound: below 0, finite; 0, which is none, for GDN_GATE_SOFTPLUS.  out may be exactly a.
     * GDN_ERR_VALUE: an A above 0 or NaN, a bound that is missing, not used or no bound. */
    gdn_status (*decay_gate)(const gdn_tensor *a, const gdn_tensor *A, const gdn_tensor *dt_bias, int32_t gate,
                             float lower_bound, const gdn_tensor *out, int32_t n_threads);
    /* a X = b, a ne = n, n, batch; b, out ne = m, n, batch (ggml_solve_tri's meaning).  out may be exactly b. */
    gdn_status (*solve_tri)(const gdn_tensor *a, const gdn_tensor *b, int32_t lower, int32_t unit,
                            const gdn_tensor *out, int32_t n_threads);
    const char *(*status_string)(gdn_status status);

    /* Bytes a buffer needs, up to 60 of padding included.  GDN_ERR_VALUE: extents out of range, form and extents that
     * contradict each other, or a ring over 2^63 bytes.  GDN_ERR_TYPE: dtype. */
    gdn_status (*ring_size)(const gdn_ring_params *params, size_t *bytes);
    /* Make the buffer an empty ring.  Nobody else may use it meanwhile.  Rows are not written. */
    gdn_status (*ring_init)(const gdn_ring_params *params, void *buffer, size_t bytes);
    /* Check that the buffer holds a ring, and resolve what dead processes left.  Every process calls it once before
     * anything else.  Extents and offsets are trusted from then on; a record that somebody has overwritten since is
     * GDN_ERR_DAMAGED for whoever uses it.  GDN_ERR_DAMAGED; GDN_ERR_STRIDE: no multiple of 4. */
    gdn_status (*ring_attach)(void *buffer, size_t bytes);
    /* Give a slot (*slot >= 0: that one, -1: any) to a new sequence, zero state, position 0.  seq_id -1 is reserved.
     * GDN_ERR_FULL; GDN_ERR_BUSY: the sequence is there already or the slot taken; GDN_ERR_ROW: no such slot. */
    gdn_status (*ring_acquire)(gdn_ring_header *ring, int64_t seq_id, int64_t *slot);
    gdn_status (*ring_release)(gdn_ring_header *ring, int64_t seq_id);
    /* GDN_ERR_UNKNOWN, _LOST, _BUSY (also: named twice, or spare rows that others' steps hold), _PENDING, _VALUE (n_tokens
     * < 0, another position, a tree of more than n_rollback + 1 tokens or no tree, log lists in plane form), _FULL (forks):
     * see step->failed.  GDN_ERR_SHAPE: n_snapshots or another extent is too small.  GDN_ERR_SPARE. */
    gdn_status (*ring_begin)(gdn_ring_header *ring, gdn_ring_step *step);
    /* By the process that began the step, on any thread.  GDN_ERR_VALUE: the step is over, another process's, or of
     * another ring that this buffer held before. */
    gdn_status (*ring_commit)(gdn_ring_header *ring, gdn_ring_step *step);
    gdn_status (*ring_abort)(gdn_ring_header *ring, gdn_ring_step *step);
    /* Take back n tokens.  Moves no state.  GDN_ERR_ROLLBACK: more than ring_max_rollback; GDN_ERR_VALUE: n < 0. */
    gdn_status (*ring_rollback)(gdn_ring_header *ring, int64_t seq_id, int64_t n);
    gdn_status (*ring_reset)(gdn_ring_header *ring, int64_t seq_id);          /* zero state, position 0, nothing to roll back */
    gdn_status (*ring_copy)(gdn_ring_header *ring, int64_t src, int64_t dst); /* acquire dst as an independent copy of src */
    gdn_status (*ring_position)(gdn_ring_header *ring, int64_t seq_id, int64_t *position);
    gdn_status (*ring_max_rollback)(gdn_ring_header *ring, int64_t seq_id, int64_t *n);
    /* A sequence as bytes: what ring_load on any ring of the same layer extents takes.  *bytes is what was written;
     * GDN_ERR_SCRATCH: `size` is too small (the sequence may have gained depth since ring_save_size). */
    gdn_status (*ring_save_size)(gdn_ring_header *ring, int64_t seq_id, size_t *bytes);
    gdn_status (*ring_save)(gdn_ring_header *ring, int64_t seq_id, void *data, size_t size, size_t *bytes);
    /* Acquire seq_id (or repair it, if lost) with what was saved.  GDN_ERR_DAMAGED: no such bytes, or other extents,
     * or another tag (0 fits all), or more depth than this ring keeps, or depth from a ring of the other form. */
    gdn_status (*ring_load)(gdn_ring_header *ring, int64_t seq_id, const void *data, size_t size);
    /* A layer's rows.  conv: ne = conv_width-1, conv_channels, 1, rows; ssm: ne = S_k, S_v, H_v, rows.
     * GDN_ERR_ROW: no such layer. */
    gdn_status (*ring_conv)(gdn_ring_header *ring, int64_t layer, gdn_tensor *rows);
    gdn_status (*ring_ssm)(gdn_ring_header *ring, int64_t layer, gdn_tensor *rows);
    /* A layer's log entries: k ne = S_k, H_k, entries; d ne = S_v, H_v, entries; g ne = 1 or S_k, H_v, entries;
     * x ne = conv_channels, entries.  GDN_ERR_ROW: no such layer; GDN_ERR_VALUE: the ring has no log. */
    gdn_status (*ring_log)(gdn_ring_header *ring, int64_t layer, gdn_tensor *k, gdn_tensor *d, gdn_tensor *g, gdn_tensor *x);
    /* Keep a path of the tree that seq_id committed: n indices of its tokens, ascending, each the next one's parent, the
     * first one's parent -1; none takes all back.  By any process.  GDN_ERR_VALUE: no path, or no tree waits. */
    gdn_status (*ring_accept)(gdn_ring_header *ring, int64_t seq_id, const int64_t *tokens, int64_t n);
    /* ring_copy, ring_save_size and ring_save of the state alone, without what could be rolled back.  Such bytes load into
     * rings of any n_rollback and either form.  A log is folded for it.  GDN_ERR_VALUE: the ring was not told its head_map;
     * GDN_ERR_STRIDE: data at no multiple of 4. */
    gdn_status (*ring_copy_state)(gdn_ring_header *ring, int64_t src, int64_t dst);
    gdn_status (*ring_save_state_size)(gdn_ring_header *ring, int64_t seq_id, size_t *bytes);
    gdn_status (*ring_save_state)(gdn_ring_header *ring, int64_t seq_id, void *data, size_t size, size_t *bytes);
    /* Run loops on the host's own threads instead of OpenMP's, for every call of this table from now on; NULL goes back.
     * GDN_ERR_BUSY while a call runs on several threads; a forked child starts with OpenMP's. */
    gdn_status (*set_parallel_for)(gdn_parallel_for fn, void *context);
} gdn_api;

/* libgdn.so's only function: its table, the same each time; NULL for another ABI, and where GDN_LEVEL in the environment
 * names no level that this CPU runs.  Nothing to free, no call that must come first, safe from any thread.  A process may
 * hold the library's table and Python's at once, also on the same ring. */
const gdn_api *gdn_get_api(uint32_t abi);

/* Whether a fetched table is one this header describes. */
static inline int gdn_api_ok(const gdn_api *api)
{
    return api != NULL && api->abi == GDN_ABI && api->size >= sizeof(gdn_api);
}

#ifdef __cplusplus
}
#endif
#endif /* GDN_H */
