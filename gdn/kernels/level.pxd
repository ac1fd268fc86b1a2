# The contract between _core and a level module (base, v3, v4): checked jobs in, one work item at a time.
#
# A job is a checked call.  _core fills it, splits it into n_items independent work items and runs each once, on any
# thread: item(job, i, scratch).  No item reads what another writes.  Nothing here allocates.

from libc.stdint cimport int64_t

from gdn._c cimport gdn_conv_args, gdn_delta_net_args, gdn_tensor

# A checkpoint: a sequence's state after n tokens of the call, of its log's if n <= 0, also goes to a row.
ctypedef struct gdn_checkpoint:
    int64_t n
    char *row

# Where the states of a call lie; state_out's strides are those of args.state_out.
ctypedef struct gdn_state_rows:
    const char **state_in             # where sequence i starts: NULL is zeros
    const int64_t **state_in_nb       # its first byte strides (a staged row has its own)
    char **state_out                  # where snapshot s of sequence i goes: [i * n_snapshots + s]; NULL is nowhere
    const int64_t *checkpoint_first   # [n_seqs + 1], of calls with lists: sequence i has checkpoints[first[i]..first[i + 1])
    const gdn_checkpoint *checkpoints

# One delta-rule call.  Work item i = (sequence, group of value heads, column part); groups are the value heads that share
# a key head (n_groups = H_k) or single ones (H_v); columns are [part * part_columns, ...) of each head.
ctypedef struct gdn_delta_job:
    const gdn_delta_net_args *args    # tensors, options, cu_seqlens; extents below are their shorthands
    int64_t H_k, H_v, S_k, S_v, n_seqs, n_snapshots
    int per_channel                   # g per key channel (KDA)
    int tiled                         # head map
    int single_tokens                 # at most one token a sequence on average
    int has_lists                     # a token log, a tree or checkpoints: log.pxi
    int64_t n_entries                 # the most that a sequence stands on
    int64_t few_tokens                # the most of a sequence that takes a state in place though it has lists
    float scale
    int64_t chunked_from              # sequences of at least this many tokens run chunked
    int64_t part_unit                 # parts are multiples of this many columns
    int64_t n_groups
    int64_t n_parts, part_columns     # columns are split only when heads and sequences are fewer than threads
    gdn_state_rows rows               # strides over key, value column and head

# One convolution call.  Work item i = (sequence, channel part).
ctypedef struct gdn_conv_job:
    const gdn_conv_args *args
    int64_t channels, width, n_seqs, n_snapshots
    int has_lists                     # a token log, a tree or checkpoints
    int64_t tree_tokens               # of the longest sequence of a call with a tree, else 0
    int64_t n_parts, part_channels
    gdn_state_rows rows               # strides over window position and channel

# A row-wise call (l2_norm, rms_norm_gated, decay_gate): work item i = a block of rows along ne[0].
ctypedef struct gdn_rowwise_job:
    gdn_tensor x, y, w, out           # l2: x; rms: x, gate y, weight w; gate: a x, A y, dt_bias w
    int64_t n_rows, rows_per_item     # rows are (i1, i2, i3) of out, i1 fastest
    float eps, lower_bound
    int form, activation, gate

# solve_tri: work item i = (batch, column part).
ctypedef struct gdn_solve_job:
    gdn_tensor a, b, out
    int lower, unit
    int64_t n_parts, part_columns

ctypedef void (*gdn_item_fn)(const void *job, int64_t item, void *scratch) noexcept nogil

ctypedef struct gdn_level:
    const char *name
    int vl                                                            # float lanes of a vector
    void (*delta_plan)(gdn_delta_job *) noexcept nogil                # fills chunked_from, part_unit, n_groups, few_tokens
    size_t (*delta_scratch)(const gdn_delta_job *) noexcept nogil     # bytes a worker needs, 64-byte aligned
    size_t (*conv_scratch)(const gdn_conv_job *) noexcept nogil
    gdn_item_fn delta, conv, l2_norm, rms_norm_gated, decay_gate, solve_tri
