/* ggml_backend.c - an out-of-tree ggml backend: GATED_DELTA_NET, SSM_CONV and what stands around them, on host memory.
 *
 * Loaded by ggml_backend_load(path) or the environment variable GGML_BACKEND_PATH.  Nodes of such a layer that are not
 * computed here go to a CPU backend of the same ggml, in the order they stand in. */
#include "ggml_fuse.h"

#include <gdn.h>
#include <stdlib.h>
#include <string.h>

extern const gdn_api *gdn_get_api(uint32_t abi);

static const gdn_api *gdn;

typedef struct state {                  /* of one backend */
    backend   *cpu;
    int        n_threads, cpu_threads;
    graph_plan plan;
    char      *scratch;
    size_t     scratch_size;
    int64_t   *rows;                    /* rows read, then rows written */
    int64_t    n_rows;
} state;

/* How often what was run, in this process: for tests, through get_proc_address("gdn_ggml_counts"). */
typedef struct counts { int64_t delta, delta_norms, delta_gathers, delta_copies, conv, conv_windows, host_graphs; } counts;
static counts counted;
static void get_counts(counts *out) { *out = counted; }

/* ---- memory that stays from call to call -------------------------------------------------------------------------- */

static void *scratch_of(state *s, size_t n_bytes)
{
    if (n_bytes > s->scratch_size || !s->scratch) {
        free(s->scratch);
        s->scratch = malloc(n_bytes + n_bytes / 4 + 64);
        s->scratch_size = s->scratch ? n_bytes + n_bytes / 4 + 64 : 0;
    }
    return s->scratch;
}

static int64_t *rows_of(state *s, int64_t n)
{
    if (n > s->n_rows) {
        free(s->rows);
        s->rows = malloc((size_t)n * sizeof(int64_t));
        s->n_rows = s->rows ? n : 0;
    }
    return s->rows;
}

static int refused(const char *what, gdn_status status, const char *message)
{
    ggml.log_internal(LOG_ERROR, "gdn: %s: %s: %s\n", what, gdn->status_string(status), message);
    return STATUS_FAILED;
}

/* ---- the convolution ---------------------------------------------------------------------------------------------- */

/* The window that a sequence has after `token` tokens, out of the one before them and x, as a CPY of the CONCAT gives it. */
static void copy_window(const tensor *window, const tensor *x, int64_t token, tensor *copy)
{
    int64_t width = window->ne[0], channels = window->ne[1];
    size_t seq_nb = copy->ne[0] == width && copy->ne[1] == channels ? copy->nb[2]
        : copy->ne[0] == width * channels ? copy->nb[1] : 4 * (size_t)(width * channels);
    for (int64_t n = 0; n < window->ne[2]; n++)
        for (int64_t w = 0; w < width; w++) {
            float *out = (float *)(copy->data + (size_t)n * seq_nb) + w;
            int64_t t = token + w - width;
            const char *in = t < 0 ? window->data + (size_t)n * window->nb[2] + 4 * (size_t)(token + w)
                : x->data + (size_t)n * x->nb[2] + (size_t)t * x->nb[0];
            size_t nb = t < 0 ? window->nb[1] : x->nb[1];
            for (int64_t c = 0; c < channels; c++)
                out[c * width] = *(const float *)(in + (size_t)c * nb);
        }
}

static gdn_tensor view_of(char *data, int64_t ne0, int64_t ne1, int64_t ne2, size_t nb0, size_t nb1, size_t nb2)
{
    gdn_tensor t = { data, GDN_TYPE_F32, { ne0, ne1, ne2, 1 }, { (int64_t)nb0, (int64_t)nb1, (int64_t)nb2, 0 } };
    t.nb[3] = t.nb[2] * t.ne[2];
    return t;
}

static int run_conv(state *s, const conv_plan *c)
{
    const tensor *weight = c->conv->src[1], *out = c->out, *input = c->conv->src[0];
    int64_t width = weight->ne[0], channels = weight->ne[1], n_tokens = c->conv->ne[1], n_seqs = c->conv->ne[2];
    size_t line = 4 * (size_t)channels, need, window_bytes;
    char message[256] = "";
    gdn_conv_args a = { .size = sizeof(a), .activation = c->silu ? GDN_ACT_SILU : GDN_ACT_NONE, .n_threads = s->n_threads,
                        .call = { .n_seqs = n_seqs, .n_snapshots = 1, .message = message, .message_size = sizeof(message) } };
    gdn_status status;
    if (n_tokens == 0 || n_seqs == 0)
        return STATUS_SUCCESS;
    a.weight = view_of(weight->data, width, channels, 1, 4, weight->nb[1], 0);
    a.out = view_of(out->data, channels, n_tokens, n_seqs, 4, line, line * (size_t)n_tokens);
    if (c->concat) {
        const tensor *window = c->concat->src[0], *x = c->concat->src[1];
        a.x = view_of(x->data, channels, n_tokens, n_seqs, 4, x->nb[0], x->nb[2]);
        a.call.state = view_of(window->data, width - 1, channels, n_seqs, 4, window->nb[1], window->nb[2]);
        for (int i = 0; i < c->n_copies; i++)
            copy_window(window, x, (c->copies[i]->src[0]->data - c->concat->data) / 4, c->copies[i]);
    } else {
        a.x = view_of(input->data + 4 * (width - 1), channels, n_tokens, n_seqs, input->nb[1], 4, input->nb[2]);
        a.call.state = view_of(input->data, width - 1, channels, n_seqs, 4, input->nb[1], input->nb[2]);
    }
    window_bytes = c->concat ? 4 * (size_t)((width - 1) * channels * n_seqs) : 0;
    status = gdn->causal_conv1d_scratch_size(&a, &need);
    if (status != GDN_OK)
        return refused("SSM_CONV", status, message);
    a.call.scratch = scratch_of(s, window_bytes + need);
    if (!a.call.scratch)
        return STATUS_FAILED;
    a.call.scratch_size = need;
    if (c->concat) {                    /* the output's memory may be the window's, which nobody reads after the CONCAT */
        tensor copy = { .ne = { width - 1, channels, n_seqs, 1 },
                        .nb = { 4, 4 * (size_t)(width - 1), 4 * (size_t)((width - 1) * channels) }, .data = a.call.scratch };
        copy_window(c->concat->src[0], c->concat->src[1], 0, &copy);
        a.call.state = view_of(copy.data, width - 1, channels, n_seqs, 4, copy.nb[1], copy.nb[2]);
        a.call.scratch = (char *)a.call.scratch + window_bytes;
    }
    status = gdn->causal_conv1d(&a);
    counted.conv++;
    counted.conv_windows += c->concat != NULL;
    return status == GDN_OK ? STATUS_SUCCESS : refused("SSM_CONV", status, message);
}

/* ---- the delta rule ------------------------------------------------------------------------------------------------ */

static gdn_tensor as_gdn(const tensor *t)
{
    gdn_tensor x = GDN_TENSOR_FROM_GGML(t);
    return x;
}

static gdn_tensor states_at(char *data, const tensor *v, int64_t n_rows, size_t row_nb)
{
    int64_t S = v->ne[0], H = v->ne[1];
    gdn_tensor t = { data, GDN_TYPE_F32, { S, S, H, n_rows }, { 4, 4 * S, 4 * S * S, (int64_t)row_nb } };
    return t;
}

/* Which rows of the cache states come from and go to. */
static bool set_rows(state *s, const delta_plan *d, gdn_delta_net_args *a)
{
    const tensor *v = d->delta->src[2], *copy = d->copy;
    int64_t n_seqs = v->ne[3], row = 4 * v->ne[0] * v->ne[0] * v->ne[1], K = a->call.n_snapshots, cache_nb = row, first = 0;
    int64_t *rows = rows_of(s, n_seqs * (1 + K)), *rows_out = rows + n_seqs;
    bool shared = d->cache && copy && copy->data >= d->cache->data
        && copy->data < d->cache->data + (size_t)d->cache->ne[1] * d->cache->nb[1];
    if (!rows)
        return false;
    if (d->cache) {
        cache_nb = (int64_t)d->cache->nb[1];
        a->call.state = states_at(d->cache->data, v, d->cache->ne[1], d->cache->nb[1]);
        for (int64_t i = 0; i < n_seqs; i++)
            rows[i] = ((const int32_t *)d->rows->data)[i];
        a->call.rows_in = rows;
    }
    if (copy) {
        bool plain = copy->ne[0] * 4 != row || copy->ne[1] != n_seqs;
        int64_t seq_nb = plain ? row : (int64_t)copy->nb[1], snapshot_nb = plain ? 0 : (int64_t)copy->nb[2];
        int64_t n_written = plain ? 1 : copy->ne[2], n_rows = (seq_nb * (n_seqs - 1) + snapshot_nb * (n_written - 1)) / row + 1;
        if (shared) {
            a->call.state_out = a->call.state;
            first = (copy->data - d->cache->data) / cache_nb;
        } else {
            cache_nb = row;
            a->call.state_out = states_at(copy->data, v, n_rows, (size_t)row);
        }
        for (int64_t i = 0; i < n_seqs; i++)
            for (int64_t k = 0; k < K; k++)
                rows_out[i * K + k] = k < n_written ? first + (i * seq_nb + k * snapshot_nb) / cache_nb : -1;
    } else {
        a->call.state_out = states_at(d->delta->data + 4 * (size_t)(v->ne[0] * v->ne[1] * v->ne[2] * n_seqs), v, n_seqs * K, (size_t)row);
        for (int64_t i = 0; i < n_seqs; i++)
            for (int64_t k = 0; k < K; k++)
                rows_out[i * K + k] = k * n_seqs + i;
    }
    a->call.rows_out = rows_out;
    return true;
}

static int run_delta(state *s, const delta_plan *d)
{
    const tensor *v = d->delta->src[2];
    char message[256] = "";
    gdn_delta_net_args a = { .size = sizeof(a), .head_map = GDN_HEAD_TILED, .n_threads = s->n_threads,
                             .l2_eps = d->l2_eps, .flags = (d->normalise ? GDN_QK_L2NORM : 0) | (d->maximum ? GDN_L2_MAX : 0),
                             .call = { .n_seqs = v->ne[3], .n_snapshots = d->delta->op_params[0], .message = message,
                                       .message_size = sizeof(message) } };
    size_t need;
    gdn_status status;
    a.q = as_gdn(d->q);
    a.k = as_gdn(d->k);
    a.v = as_gdn(v);
    a.g = as_gdn(d->delta->src[3]);
    a.beta = as_gdn(d->delta->src[4]);
    a.call.state = states_at(d->delta->src[5]->data, v, v->ne[3], d->delta->src[5]->nb[3]);
    for (gdn_tensor *t = &a.q; t <= &a.k; t++)
        if (t->ne[3] != v->ne[3]) {     /* one sequence's q and k for all */
            t->ne[3] = v->ne[3];
            t->nb[3] = 0;
        }
    a.out = a.v;
    a.out.data = d->delta->data;
    a.out.nb[0] = 4;
    for (int i = 1; i < 4; i++)
        a.out.nb[i] = a.out.nb[i - 1] * a.out.ne[i - 1];
    if (!set_rows(s, d, &a))
        return STATUS_FAILED;
    status = gdn->gated_delta_net_scratch_size(&a, &need);
    if (status != GDN_OK)
        return refused("GATED_DELTA_NET", status, message);
    a.call.scratch = scratch_of(s, need);
    a.call.scratch_size = need;
    status = a.call.scratch ? gdn->gated_delta_net(&a) : GDN_ERR_SCRATCH;
    counted.delta++;
    counted.delta_norms += d->normalise;
    counted.delta_gathers += d->cache != NULL;
    counted.delta_copies += d->copy != NULL;
    return status == GDN_OK ? STATUS_SUCCESS : refused("GATED_DELTA_NET", status, message);
}

/* ---- a graph -------------------------------------------------------------------------------------------------------- */

enum { SMALL = 1 << 20 };               /* multiplications below which the host's nodes run on the calling thread */

/* Nodes first .. last-1, none of them ours, on ggml's own CPU backend. */
static int run_host(state *s, cgraph *graph, tensor **nodes, int first, int last)
{
    cgraph_value part;
    double work = 0;
    int n_threads;
    for (int i = first; i < last; i++)
        if (!op_is_empty(nodes[i])) {
            double n = (double)nodes[i]->ne[0] * (double)(nodes[i]->ne[1] * nodes[i]->ne[2] * nodes[i]->ne[3]);
            work += 1 + n * (op_is(nodes[i], ggml.op.MUL_MAT) ? (double)nodes[i]->src[0]->ne[0] : 8);
        }
    if (work == 0)
        return STATUS_SUCCESS;
    n_threads = work < SMALL ? 1 : s->n_threads;
    if (ggml.set_n_threads && n_threads != s->cpu_threads)
        ggml.set_n_threads(s->cpu, s->cpu_threads = n_threads);
    part = ggml.graph_view(graph, first, last);
    counted.host_graphs++;
    return ggml.backend_graph_compute(s->cpu, (cgraph *)&part);
}

static int graph_compute(backend *b, cgraph *graph)
{
    state *s = b->words[ggml.n_slots + 1];
    tensor **nodes = ggml.graph_nodes(graph);
    int first = 0, status = STATUS_SUCCESS;
    if (!plan_graph(graph, &s->plan))
        return STATUS_FAILED;
    for (int i = 0; i <= s->plan.n_nodes && status == STATUS_SUCCESS; i++) {
        const step *at = &s->plan.steps[i];
        if (i < s->plan.n_nodes && at->action == ACTION_HOST)
            continue;
        status = run_host(s, graph, nodes, first, i);
        first = i + 1;
        if (i == s->plan.n_nodes || status != STATUS_SUCCESS)
            break;
        if (at->action == ACTION_DELTA)
            status = run_delta(s, &s->plan.deltas[at->plan]);
        else if (at->action == ACTION_CONV)
            status = run_conv(s, &s->plan.convs[at->plan]);
    }
    return status;
}

/* ---- what ggml asks for --------------------------------------------------------------------------------------------- */

static const char *get_name(backend *b) { (void)b; return "GDN"; }

static void free_backend(backend *b)
{
    state *s = b->words[ggml.n_slots + 1];
    ggml.backend_free(s->cpu);
    free(s->plan.deltas);
    free(s->scratch);
    free(s->rows);
    free(s);
    free(b);
}

static void set_n_threads(backend *b, int n_threads)
{
    ((state *)b->words[ggml.n_slots + 1])->n_threads = n_threads > 0 ? n_threads : 1;
}

static const char *device_name(device *d) { (void)d; return "GDN"; }
static const char *device_description(device *d) { (void)d; return "gdn: Gated DeltaNet and Kimi Delta Attention on the CPU"; }
static void device_memory(device *d, size_t *free_bytes, size_t *total) { (void)d; *free_bytes = *total = 0; }
static int device_type(device *d) { (void)d; return DEVICE_ACCEL; }
static void *device_buffer_type(device *d) { (void)d; return ggml.backend_cpu_buffer_type(); }

static void *device_buffer_from_ptr(device *d, void *data, size_t size, size_t most)
{
    (void)d, (void)most;
    return ggml.backend_cpu_buffer_from_ptr(data, size);
}

static void device_get_props(device *d, device_props *props)
{
    props->name = device_name(d);
    props->description = device_description(d);
    props->type = DEVICE_ACCEL;
    props->memory_free = props->memory_total = 0;
    props->device_id = NULL;
    props->async = props->host_buffer = props->events = false;
    props->buffer_from_host_ptr = true;
    if (ggml.api_version >= 3)
        props->mmap_support = true;
}

static backend *device_init(device *d, const char *params)
{
    static const uint8_t guid[16] = { 0x67, 0x64, 0x6e, 0x2d, 0x67, 0x67, 0x6d, 0x6c, 0x2d, 0x63, 0x70, 0x75, 0x2d, 0x76, 0x30, 0x31 };
    backend *b = calloc(1, sizeof(*b));
    state *s = calloc(1, sizeof(*s));
    (void)params;
    if (!b || !s || !(s->cpu = ggml.backend_dev_init(ggml.cpu, NULL))) {
        free(b);
        free(s);
        return NULL;
    }
    s->n_threads = 1;
    b->guid = guid;
    b->words[0] = (void *)get_name;
    b->words[1] = (void *)free_backend;
    b->words[ggml.n_slots - 4] = (void *)graph_compute;
    b->words[ggml.n_slots] = d;
    b->words[ggml.n_slots + 1] = s;
    return b;
}

static bool is_host(const tensor *t)
{
    const tensor *owner = t->view_src ? t->view_src : t;
    return owner->buffer == NULL || ggml.backend_buft_is_host(ggml.backend_buffer_get_type(owner->buffer));
}

static bool kernels_take(const tensor *op)
{
    const tensor *q = op->src[0], *k = op->src[1], *v = op->src[2], *g = op->src[3];
    for (int i = 0; i < MAX_SRC && op->src[i]; i++)
        if (op->src[i]->type != F32 || op->src[i]->nb[0] != 4 || !is_host(op->src[i]))
            return false;
    if (op->type != F32 || !is_host(op))
        return false;
    if (op_is(op, ggml.op.SSM_CONV))
        return true;
    return op->op_params[0] >= 1 && q->ne[1] == k->ne[1] && v->ne[1] % q->ne[1] == 0 && q->ne[0] == v->ne[0]
        && (q->ne[3] == v->ne[3] || q->ne[3] == 1) && (k->ne[3] == v->ne[3] || k->ne[3] == 1)
        && (g->ne[0] == 1 || g->ne[0] == q->ne[0]) && g->ne[3] == v->ne[3];
}

static bool device_supports_op(device *d, const tensor *op)
{
    (void)d;
    if (op_is(op, ggml.op.GATED_DELTA_NET) || op_is(op, ggml.op.SSM_CONV))
        return kernels_take(op);
    return op_is_view(op) || (op_is_wanted(op) && ggml.backend_dev_supports_op(ggml.cpu, op));
}

static bool device_supports_buft(device *d, void *buft)
{
    (void)d;
    return ggml.backend_dev_supports_buft(ggml.cpu, buft);
}

static const char *registry_name(registry *r) { (void)r; return "GDN"; }
static size_t registry_count(registry *r) { (void)r; return 1; }

static void *registry_function(registry *r, const char *name)
{
    (void)r;
    if (strcmp(name, "ggml_backend_set_n_threads") == 0)
        return (void *)set_n_threads;
    return strcmp(name, "gdn_ggml_counts") == 0 ? (void *)get_counts : NULL;
}

static device *registry_device(registry *r, size_t index)
{
    static device d = {
        device_name, device_description, device_memory, device_type, device_get_props, device_init, device_buffer_type, NULL,
        device_buffer_from_ptr, device_supports_op, device_supports_buft, NULL, NULL, NULL, NULL, NULL, NULL,
    };
    d.reg = r;
    return index == 0 ? &d : NULL;
}

/* What ggml_backend_load calls: NULL, after a line in ggml's log, where the plug-in does not fit. */
__attribute__((visibility("default"))) registry *ggml_backend_init(void);
registry *ggml_backend_init(void)
{
    static registry reg = { 0, registry_name, registry_count, registry_device, registry_function, NULL };
    if (!host_find(__builtin_return_address(0)))
        return NULL;
    for (size_t i = 0; i < ggml.backend_reg_count(); i++)
        if (ggml.backend_reg_get(i) == &reg) {
            ggml.log_internal(LOG_ERROR, "gdn: the plug-in is loaded already\n");
            return NULL;
        }
    gdn = gdn_get_api(GDN_ABI);
    if (!gdn_api_ok(gdn)) {
        ggml.log_internal(LOG_ERROR, "gdn: the library does not start: is GDN_LEVEL a level of this CPU?\n");
        return NULL;
    }
    reg.api_version = ggml.api_version;
    return &reg;
}
