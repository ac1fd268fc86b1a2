/* ggml_fuse.c - which nodes of a graph are computed together.
 *
 * A group of nodes is fused only where its shape is one of those below, where nothing outside the group reads what is left
 * out (ggml's own use counts), and where no node in between touches memory that the fused call reads or writes at another
 * time than the graph says: ggml gives a tensor's memory to the next one as soon as its last reader is done. */
#include "ggml_fuse.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_NODES = 96 };               /* of a group */

typedef struct group {                  /* nodes of a graph, ascending, and which of them others may read */
    cgraph  *graph;
    tensor **nodes;
    int      n_nodes, count, n_outputs;
    int      index[MOST_NODES], outputs[MOST_NODES];
} group;

bool op_is(const tensor *t, int op) { return t != NULL && t->op == op; }

bool op_is_view(const tensor *t)
{
    return op_is(t, ggml.op.VIEW) || op_is(t, ggml.op.RESHAPE) || op_is(t, ggml.op.TRANSPOSE)
        || op_is(t, ggml.op.PERMUTE) || op_is(t, ggml.op.NONE);
}

static int64_t n_elements(const tensor *t) { return t->ne[0] * t->ne[1] * t->ne[2] * t->ne[3]; }

bool op_is_empty(const tensor *t) { return op_is_view(t) || n_elements(t) == 0; }

bool op_is_unary(const tensor *t, const char *name)
{
    return op_is(t, ggml.op.UNARY) && strcmp(ggml.op_desc(t), name) == 0;
}

static bool is_contiguous(const tensor *t)
{
    size_t nb = 4;
    for (int i = 0; i < 4; nb *= (size_t)t->ne[i++])
        if (t->ne[i] != 1 && t->nb[i] != nb)
            return false;
    return t->type == F32 || t->type == I32;
}

static const tensor *behind_views(const tensor *t)
{
    while (t && t->src[0] && op_is_view(t))
        t = t->src[0];
    return t;
}

/* ---- which nodes are asked for: what belongs to such a layer, so that it comes as one piece ---------------------- */

static bool name_begins(const tensor *t, const char *prefix) { return t && strncmp(t->name, prefix, strlen(prefix)) == 0; }

static bool weight_is(const tensor *t, const char *const *names)
{
    const char *dot = t ? strchr(t->name, '.') : NULL;
    t = behind_views(t);
    if (!t || strncmp(t->name, "blk.", 4) != 0 || !(dot = strchr(t->name + 4, '.')))
        return false;
    for (; *names; names++)
        if (strncmp(dot + 1, *names, strlen(*names)) == 0)
            return true;
    return false;
}

static const char *const GATE_WEIGHTS[] = { "ssm_alpha.", "ssm_beta.", "ssm_ba.", "ssm_f_a.", "ssm_f_b.", NULL };

/* Part of what leads from the layer's input to g and beta. */
static bool is_gate(const tensor *t, int depth)
{
    const tensor *source = t ? behind_views(t->src[0]) : NULL;
    if (!t || depth == 0)
        return false;
    if (op_is(t, ggml.op.MUL_MAT))
        return weight_is(t->src[0], GATE_WEIGHTS);
    if (op_is(t, ggml.op.ADD) || op_is(t, ggml.op.MUL))
        return is_gate(source, depth - 1) || is_gate(behind_views(t->src[1]), depth - 1);
    return (op_is(t, ggml.op.UNARY) || op_is(t, ggml.op.CONT) || op_is(t, ggml.op.SCALE) || op_is(t, ggml.op.EXP)
            || op_is(t, ggml.op.CLAMP)) && is_gate(source, depth - 1);
}

static bool is_window(const tensor *t)          /* CONCAT(window, x transposed) along tokens */
{
    return op_is(t, ggml.op.CONCAT) && t->op_params[0] == 0 && op_is(t->src[1], ggml.op.TRANSPOSE) && t->type == F32;
}

static bool is_convolved(const tensor *t)
{
    t = behind_views(t);
    return op_is(t, ggml.op.SSM_CONV)
        || (op_is_unary(t, "SILU") && op_is(behind_views(t->src[0]), ggml.op.SSM_CONV));
}

static bool is_normed(const tensor *t)          /* q or k, by its norm */
{
    if (op_is(t, ggml.op.SCALE) || op_is(t, ggml.op.REPEAT))
        return is_normed(behind_views(t->src[0]));
    return (op_is(t, ggml.op.RMS_NORM) || op_is(t, ggml.op.L2_NORM)) && is_convolved(t->src[0]);
}

bool op_is_wanted(const tensor *t)
{
    const tensor *source = behind_views(t->src[0]);
    if (op_is(t, ggml.op.GET_ROWS) || op_is(t, ggml.op.SCALE))
        return name_begins(source, "cache_s_l") || is_normed(t);
    if (op_is(t, ggml.op.CPY))
        return is_window(source) || op_is(source, ggml.op.GATED_DELTA_NET)
            || (op_is(source, ggml.op.GET_ROWS) && name_begins(behind_views(source->src[0]), "cache_s_l"));
    return is_window(t) || op_is(t, ggml.op.SSM_CONV) || op_is(t, ggml.op.GATED_DELTA_NET)
        || (op_is_unary(t, "SILU") && is_convolved(source)) || is_normed(t) || is_gate(t, 8);
}

/* ---- groups ------------------------------------------------------------------------------------------------------- */

static int index_of(const group *g, const tensor *t, int before)
{
    while (--before >= 0)
        if (g->nodes[before] == t)
            return before;
    return -1;
}

static bool in_group(const group *g, int node)
{
    for (int i = 0; i < g->count; i++)
        if (g->index[i] == node)
            return true;
    return false;
}

/* Add a node; a wrong one (not in this graph, or one too many) makes the group one that is never confined. */
static void add(group *g, int node, bool output)
{
    int at = g->count;
    if (node < 0 || g->count >= MOST_NODES) {
        g->count = MOST_NODES + 1;
        return;
    }
    if (g->count > MOST_NODES || in_group(g, node))
        return;
    for (; at > 0 && g->index[at - 1] > node; at--)
        g->index[at] = g->index[at - 1];
    g->index[at] = node;
    g->count++;
    if (output)
        g->outputs[g->n_outputs++] = node;
}

/* Nothing outside the group reads what is not an output of it. */
static bool is_confined(const group *g)
{
    int ops[MOST_NODES];
    if (g->count > MOST_NODES || g->n_outputs == 0)
        return false;
    for (int i = 0; i < g->count; i++)
        ops[i] = g->nodes[g->index[i]]->op;
    return ggml.can_fuse_subgraph_ext(g->graph, g->index, g->count, ops, g->outputs, g->n_outputs);
}

static bool reads(const tensor *t, const tensor *source)
{
    for (int i = 0; i < MAX_SRC; i++)
        if (t->src[i] == source)
            return true;
    return false;
}

static bool overlaps(const tensor *a, const tensor *b)
{
    size_t n_a = 4, n_b = 4;
    if (n_elements(a) == 0 || n_elements(b) == 0)
        return false;
    for (int i = 0; i < 4; i++) {
        n_a += (size_t)(a->ne[i] - 1) * a->nb[i];
        n_b += (size_t)(b->ne[i] - 1) * b->nb[i];
    }
    return a->data < b->data + n_b && b->data < a->data + n_a;
}

/* A node strictly between two that is not of the group writes t, or with `reading` also reads it. */
static bool is_touched(const group *g, int from, int to, const tensor *t, bool reading)
{
    for (int i = from + 1; i < to; i++) {
        const tensor *node = g->nodes[i];
        if (in_group(g, i) || op_is_empty(node))
            continue;
        if (overlaps(node, t))
            return true;
        for (int j = 0; reading && j < MAX_SRC; j++)
            if (node->src[j] && overlaps(node->src[j], t))
                return true;
    }
    return false;
}

static void leave_out(const group *g, graph_plan *plan)
{
    for (int i = 0; i < g->count; i++)
        plan->steps[g->index[i]].action = ACTION_NOTHING;
}

static group new_group(cgraph *graph, tensor **nodes, int n_nodes)
{
    group g = { graph, nodes, n_nodes, 0, 0, { 0 }, { 0 } };
    return g;
}

/* ---- the convolution: CONCAT, CPY of windows into the cache, SSM_CONV, SILU -------------------------------------- */

/* The views of the CONCAT and the copies made of them; each copy is a window of it. */
static bool collect_copies(group *g, conv_plan *c, int at, int conv)
{
    for (int i = at + 1; i < g->n_nodes; i++) {
        tensor *view = g->nodes[i];
        if (i == conv || !reads(view, c->concat))
            continue;
        if (!op_is(view, ggml.op.VIEW) || view->nb[1] != c->concat->nb[1] || view->nb[2] != c->concat->nb[2]
            || view->ne[0] != c->conv->src[1]->ne[0] - 1 || view->ne[1] != c->concat->ne[1]
            || view->ne[2] != c->concat->ne[2] || view->ne[3] != 1)
            return false;
        add(g, i, false);
        for (int j = i + 1; j < g->n_nodes; j++) {
            tensor *copy = g->nodes[j];
            if (!reads(copy, view))
                continue;
            if (!op_is(copy, ggml.op.CPY) || copy->src[0] != view || copy->type != F32 || copy->nb[0] != 4
                || c->n_copies == MOST_COPIES
                || !(is_contiguous(copy) || copy->ne[0] == view->ne[0] * view->ne[1]
                     || (copy->ne[0] == view->ne[0] && copy->ne[1] == view->ne[1] && copy->nb[1] == 4 * (size_t)copy->ne[0])))
                return false;
            c->copies[c->n_copies++] = copy;
            add(g, j, true);
        }
    }
    return true;
}

/* Whether everything may be done where the CONCAT stands. */
static bool can_go_first(const group *g, const conv_plan *c, int at)
{
    int last = g->index[g->count - 1];
    const tensor *x = c->concat->src[1];
    if (is_touched(g, at, last, c->out, true)
        || (overlaps(c->out, x) && !(c->out->data == x->data && is_contiguous(x->src[0]))))
        return false;
    for (int i = 0; i < c->n_copies; i++)
        if (is_touched(g, at, last, c->copies[i], true) || overlaps(c->copies[i], x) || overlaps(c->copies[i], c->out)
            || overlaps(c->copies[i], c->concat->src[0]))
            return false;
    return true;
}

static bool fuse_conv(graph_plan *plan, group *g, conv_plan *c, int conv, bool silu)
{
    int at = index_of(g, c->conv->src[0], conv), out = conv;
    g->count = g->n_outputs = c->n_copies = 0;
    c->concat = c->conv->src[0];
    c->out = c->conv;
    c->silu = silu;
    if (at < 0 || !is_window(c->concat) || c->concat->ne[3] != 1 || c->concat->src[0]->nb[0] != 4
        || c->concat->src[1]->nb[1] != 4 || c->concat->src[0]->ne[0] != c->conv->src[1]->ne[0] - 1)
        return false;
    add(g, at, false);
    add(g, conv, !silu);
    for (int i = conv + 1; silu && i < g->n_nodes && !op_is_unary(c->out, "SILU"); i++)
        if (reads(g->nodes[i], c->out)) {
            if (!op_is_view(g->nodes[i]) && !op_is_unary(g->nodes[i], "SILU"))
                return false;
            out = i;
            c->out = g->nodes[i];
            add(g, i, op_is_unary(c->out, "SILU"));
        }
    if ((silu && !op_is_unary(c->out, "SILU")) || !is_contiguous(c->out) || plan->steps[out].action != ACTION_HOST)
        return false;
    if (!collect_copies(g, c, at, conv) || !is_confined(g) || !can_go_first(g, c, at))
        return false;
    leave_out(g, plan);
    plan->steps[at] = (step){ ACTION_CONV, plan->n_convs };
    return true;
}

static void plan_conv(graph_plan *plan, group *g, int node)
{
    conv_plan *c = &plan->convs[plan->n_convs];
    c->conv = g->nodes[node];
    if (!fuse_conv(plan, g, c, node, true) && !fuse_conv(plan, g, c, node, false)) {
        c->concat = NULL;
        c->out = c->conv;
        c->silu = false;
        c->n_copies = 0;
        plan->steps[node] = (step){ ACTION_CONV, plan->n_convs };
    }
    plan->n_convs++;
}

/* ---- the delta rule: norms of q and k, gather of states, copy of states into the cache ----------------------------- */

/* x of L2_NORM(x), or of SCALE(RMS_NORM(x)) where that is the same; its eps, and which form it has. */
static tensor *norm_source(group *g, tensor *t, int delta, float *eps, bool *maximum)
{
    tensor *norm = t;
    float scale, bias, n = (float)t->ne[0];
    if (op_is(t, ggml.op.L2_NORM)) {
        memcpy(eps, t->op_params, 4);
        *maximum = true;
    } else {
        norm = op_is(t, ggml.op.SCALE) ? t->src[0] : NULL;
        if (!op_is(norm, ggml.op.RMS_NORM))
            return NULL;
        memcpy(&scale, t->op_params, 4);
        memcpy(&bias, t->op_params + 1, 4);
        if (bias != 0 || fabsf(scale * sqrtf(n) - 1) > 1e-6f)
            return NULL;
        memcpy(eps, norm->op_params, 4);
        *eps *= n;
        *maximum = false;
        add(g, index_of(g, t, delta), false);
    }
    add(g, index_of(g, norm, delta), false);
    return norm->src[0];
}

static void fuse_norms(graph_plan *plan, group *g, delta_plan *d, int at)
{
    float eps_q, eps_k;
    bool max_q, max_k;
    tensor *q, *k;
    g->count = g->n_outputs = 0;
    q = norm_source(g, d->delta->src[0], at, &eps_q, &max_q);
    k = q ? norm_source(g, d->delta->src[1], at, &eps_k, &max_k) : NULL;
    if (!k || eps_q != eps_k || max_q != max_k || g->count > MOST_NODES || q->nb[0] != 4 || k->nb[0] != 4)
        return;
    add(g, at, true);
    if (!is_confined(g) || is_touched(g, g->index[0], at, q, false) || is_touched(g, g->index[0], at, k, false)
        || overlaps(q, d->delta) || overlaps(k, d->delta))
        return;
    leave_out(g, plan);
    d->q = q;
    d->k = k;
    d->normalise = true;
    d->maximum = max_q;
    d->l2_eps = eps_q;
}

/* States straight from the cache, where the gather has no other reader; sequences that only move need it. */
static void fuse_gather(graph_plan *plan, group *g, delta_plan *d, int at)
{
    tensor *t = d->delta->src[5], *gather = (tensor *)behind_views(t), *cache;
    int first = index_of(g, gather, at);
    g->count = g->n_outputs = 0;
    if (first < 0 || !op_is(gather, ggml.op.GET_ROWS) || gather->src[1]->type != I32 || !is_contiguous(gather->src[1])
        || t->data != gather->data || !is_contiguous(t) || gather->type != F32)
        return;
    cache = gather->src[0];
    if (cache->type != F32 || cache->nb[0] != 4 || cache->ne[2] != 1 || cache->ne[3] != 1
        || cache->ne[0] != t->ne[0] * t->ne[1] * t->ne[2] || gather->src[1]->ne[0] < t->ne[3])
        return;
    add(g, first, false);
    add(g, at, true);
    for (int i = first + 1; i < g->n_nodes; i++)
        for (int j = 0; j < MAX_SRC && i != at; j++) {
            int source = g->nodes[i]->src[j] ? index_of(g, g->nodes[i]->src[j], i) : -1;
            if (source >= 0 && source != at && in_group(g, source)) {
                if (!op_is_view(g->nodes[i]) && n_elements(g->nodes[i]) != 0)
                    return;
                add(g, i, !op_is_view(g->nodes[i]));
            }
        }
    if (!is_confined(g) || is_touched(g, first, at, cache, false) || is_touched(g, first, at, gather->src[1], false))
        return;
    for (int i = 0; i < g->count; i++)
        if (g->index[i] != at)
            plan->steps[g->index[i]].action = ACTION_NOTHING;
    d->cache = cache;
    d->rows = gather->src[1];
}

/* The copy's rows are rows of the cache that is read, or nothing that is read. */
static bool rows_fit(const delta_plan *d, const tensor *copy)
{
    size_t row = d->cache ? d->cache->nb[1] : 0;
    if (!d->cache)
        return !overlaps(copy, d->delta->src[5]);
    return !overlaps(copy, d->cache)
        || (copy->data >= d->cache->data && (size_t)(copy->data - d->cache->data) % row == 0 && 4 * (size_t)d->cache->ne[0] == row
            && (is_contiguous(copy) || (copy->nb[1] % row == 0 && copy->nb[2] % row == 0)));
}

/* New states straight into the cache, where the copy is all that reads them. */
static void fuse_copy(graph_plan *plan, group *g, delta_plan *d, int at)
{
    const tensor *v = d->delta->src[2];
    size_t n_out = 4 * (size_t)n_elements(v), row = 4 * (size_t)(v->ne[0] * v->ne[0] * v->ne[1]);
    tensor *copy = NULL;
    int last = at;
    g->count = g->n_outputs = 0;
    add(g, at, false);
    for (int i = at + 1; i < g->n_nodes; i++) {
        tensor *view = g->nodes[i];
        if (!reads(view, d->delta))
            continue;
        if (!op_is(view, ggml.op.VIEW) || !is_contiguous(view))
            return;
        if (view->view_offs + 4 * (size_t)n_elements(view) <= n_out) {
            add(g, i, true);
            continue;
        }
        add(g, i, false);
        for (int j = i + 1; j < g->n_nodes; j++)
            if (reads(g->nodes[j], view)) {
                if (copy || !op_is(g->nodes[j], ggml.op.CPY) || view->view_offs != n_out)
                    return;
                copy = g->nodes[j];
                last = j;
                add(g, j, true);
            }
    }
    if (!copy || copy->type != F32 || !is_confined(g) || is_touched(g, at, last, copy, true)
        || !((is_contiguous(copy) && copy->ne[2] == 1 && n_elements(copy) == (int64_t)(row / 4) * v->ne[3])
             || ((size_t)copy->ne[0] * 4 == row && copy->nb[0] == 4 && copy->ne[1] == v->ne[3] && copy->ne[3] == 1
                 && copy->ne[2] <= d->delta->op_params[0]))
        || !rows_fit(d, copy))
        return;
    plan->steps[last].action = ACTION_NOTHING;
    d->copy = copy;
}

static void plan_delta(graph_plan *plan, group *g, int node)
{
    delta_plan *d = &plan->deltas[plan->n_deltas];
    memset(d, 0, sizeof(*d));
    d->delta = g->nodes[node];
    d->q = d->delta->src[0];
    d->k = d->delta->src[1];
    fuse_norms(plan, g, d, node);
    fuse_gather(plan, g, d, node);
    fuse_copy(plan, g, d, node);
    plan->steps[node] = (step){ ACTION_DELTA, plan->n_deltas++ };
}

static bool reserve(graph_plan *plan, int n_nodes, int n_convs, int n_deltas)
{
    size_t need = (size_t)n_nodes * sizeof(step) + (size_t)n_convs * sizeof(conv_plan) + (size_t)n_deltas * sizeof(delta_plan);
    if (need > plan->n_bytes || !plan->deltas) {
        free(plan->deltas);
        plan->deltas = malloc(need + need / 2 + 64);
        plan->n_bytes = plan->deltas ? need + need / 2 + 64 : 0;
        if (!plan->deltas)
            return false;
    }
    plan->convs = (conv_plan *)(plan->deltas + n_deltas);
    plan->steps = (step *)(plan->convs + n_convs);
    memset(plan->steps, 0, (size_t)n_nodes * sizeof(step));
    plan->n_nodes = n_nodes;
    plan->n_convs = plan->n_deltas = 0;
    return true;
}

bool plan_graph(cgraph *graph, graph_plan *plan)
{
    tensor **nodes = ggml.graph_nodes(graph);
    int n_nodes = ggml.graph_n_nodes(graph), n_convs = 0, n_deltas = 0;
    group g = new_group(graph, nodes, n_nodes);
    for (int i = 0; i < n_nodes; i++) {
        n_convs += op_is(nodes[i], ggml.op.SSM_CONV);
        n_deltas += op_is(nodes[i], ggml.op.GATED_DELTA_NET);
    }
    if (!reserve(plan, n_nodes, n_convs, n_deltas))
        return false;
    for (int i = 0; i < n_nodes; i++)
        if (op_is(nodes[i], ggml.op.SSM_CONV))
            plan_conv(plan, &g, i);
    for (int i = 0; i < n_nodes; i++)
        if (op_is(nodes[i], ggml.op.GATED_DELTA_NET))
            plan_delta(plan, &g, i);
    return true;
}
