/* level.h - what a level module (base, v3, v4) exports to the door: jobs in, one work item at a time.
 *
 * A job is a checked call.  The door fills it, splits it into `n_items` independent work items and runs each
 * once, on any thread: item(job, i, scratch).  No item reads what another writes.  Nothing here allocates. */
#ifndef GDN_LEVEL_H
#define GDN_LEVEL_H

#include "gdn.h"

/* Where the states of a call lie. */
typedef struct gdn_state_rows {
    const char   **state_in;          /* where sequence i starts: NULL is zeros */
    const int64_t **state_in_nb;      /* its first byte strides (a staged row has its own) */
    char         **state_out;         /* where slot s of sequence i goes: [i * n_slots + s], NULL is nowhere;
                                         strides: args->state_out.nb */
} gdn_state_rows;

/* One delta-rule call.  Work item i = (sequence, group of value heads, column part); groups are the value heads
 * that share a key head (n_groups = H_k) or single ones (H_v); columns are [part * part_columns, ...) of each head. */
typedef struct gdn_delta_job {
    const gdn_delta_net_args *args;   /* tensors, options, cu_seqlens; extents below are their shorthands */
    int64_t H_k, H_v, S_k, S_v, n_seqs, n_slots;
    int     per_channel;              /* g per key channel (KDA) */
    int     tiled;                    /* head map */
    int     single_tokens;            /* at most one token a sequence on average */
    float   scale;
    int64_t chunked_from;             /* sequences of at least this many tokens run chunked */
    int64_t part_unit;                /* parts are multiples of this many columns */
    int64_t n_groups;
    int64_t n_parts, part_columns;    /* columns are split only when heads and sequences are fewer than threads */
    gdn_state_rows rows;              /* strides over key, value column and head */
} gdn_delta_job;

/* One convolution call.  Work item i = (sequence, channel part). */
typedef struct gdn_conv_job {
    const gdn_conv_args *args;
    int64_t channels, width, n_seqs, n_slots;
    int64_t n_parts, part_channels;
    gdn_state_rows rows;              /* strides over window position and channel */
} gdn_conv_job;

/* A row-wise call (l2_norm, rms_norm_gated, decay_gate): work item i = a block of rows along ne[0]. */
typedef struct gdn_rows_job {
    gdn_tensor x, y, w, out;          /* l2: x; rms: x, gate y, weight w; gate: a x, A y, dt_bias w */
    int64_t n_rows, rows_per_item;    /* rows are (i1, i2, i3) of out, i1 fastest */
    float   eps, lower_bound;
    int     form, activation, bounded;
} gdn_rows_job;

/* solve_tri: work item i = (batch, column part). */
typedef struct gdn_solve_job {
    gdn_tensor a, b, out;
    int     lower, unit;
    int64_t n_parts, part_columns;
} gdn_solve_job;

typedef void (*gdn_item_fn)(const void *job, int64_t item, void *scratch);

typedef struct gdn_level {
    const char *name;
    int         vl;                                   /* float lanes of a vector */
    void      (*delta_plan)(gdn_delta_job *job);            /* fills chunked_from, part_unit, n_groups */
    size_t    (*delta_scratch)(const gdn_delta_job *job);   /* bytes a worker needs, 64-byte aligned */
    size_t    (*conv_scratch)(const gdn_conv_job *job);
    gdn_item_fn delta, conv, l2_norm, rms_norm_gated, decay_gate, solve_tri;
} gdn_level;

#endif
