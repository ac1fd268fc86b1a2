/* ggml_fuse.h - what to do with each node of a graph: run as it is, leave out, or run as one call of this library. */
#ifndef GDN_GGML_FUSE_H
#define GDN_GGML_FUSE_H

#include "ggml_host.h"

enum { MOST_COPIES = 64 };              /* of a window into the cache: one for each snapshot */

enum action { ACTION_HOST = 0, ACTION_NOTHING, ACTION_DELTA, ACTION_CONV };

/* A convolution: over CONCAT(window, x) where that is left out (`concat` not NULL), else over a tensor in memory. */
typedef struct conv_plan {
    tensor *conv, *concat, *out;        /* out: the SSM_CONV, or the SILU after it */
    bool    silu;
    int     n_copies;                   /* copies of windows that are done here, as (token, where to) */
    tensor *copies[MOST_COPIES];
} conv_plan;

/* A GATED_DELTA_NET, with what around it is left out. */
typedef struct delta_plan {
    tensor *delta;
    tensor *q, *k;                      /* as the kernel reads them */
    bool    normalise, maximum;         /* q and k by their L2 norm, and which form of it */
    float   l2_eps;
    tensor *cache, *rows;               /* states are read from the rows of a cache, not from src[5] */
    tensor *copy;                       /* the CPY of the new states, done here */
} delta_plan;

typedef struct step {
    uint8_t action;                     /* enum action */
    int     plan;                       /* index of its conv_plan or delta_plan */
} step;

typedef struct graph_plan {
    int n_nodes, n_convs, n_deltas;
    step *steps;
    conv_plan *convs;
    delta_plan *deltas;
    size_t n_bytes;                     /* of the one allocation behind them */
} graph_plan;

bool op_is(const tensor *t, int op);
bool op_is_view(const tensor *t);
bool op_is_empty(const tensor *t);    /* nothing to compute */
bool op_is_unary(const tensor *t, const char *name);
bool op_is_wanted(const tensor *op);      /* whether a node is one that this backend asks for */
bool plan_graph(cgraph *graph, graph_plan *plan);        /* false: out of memory */
#endif
