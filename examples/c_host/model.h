/* model.h - what both examples decode: a small stack of Gated DeltaNet layers on made-up inputs, the calls that run
 * it on a ring's rows, and a plain double-precision recurrence that says what the states must be. */
#ifndef MODEL_H
#define MODEL_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gdn.h"

enum { LAYERS = 3, HEADS = 2, S = 16, WIDTH = 4, CHANNELS = 3 * HEADS * S, MAX_TOKENS = 8, LOG = 16 };

#ifndef MODEL_THREADS
#define MODEL_THREADS 1         /* of a call */
#endif

#define CHECK(status) check((status), #status, __FILE__, __LINE__)

static const gdn_api *gdn;

static void check(gdn_status status, const char *call, const char *file, int line)
{
    if (status != GDN_OK) {
        fprintf(stderr, "%s:%d: %s: %s\n", file, line, call, gdn->status_string(status));
        exit(1);
    }
}

static inline gdn_ring_params model_params(int32_t n_slots, int32_t n_rollback, int32_t form)
{
    gdn_ring_params p = { .size = sizeof p, .n_slots = n_slots, .n_rollback = n_rollback, .n_layers = LAYERS,
                          .H_v = HEADS, .S_k = S, .S_v = S, .conv_channels = CHANNELS, .conv_width = WIDTH, .spare = -1, .form = form,
                          .H_k = HEADS, .log_capacity = form == GDN_FORM_LOG ? LOG : 0 };
    return p;
}

/* Made-up numbers in (-1, 1), the same in every process: of a token (value i of a layer's input) or of a weight. */
static float number(uint64_t token, uint64_t layer, uint64_t i)
{
    uint64_t x = token * 0x9E3779B97F4A7C15ull + layer * 0xBF58476D1CE4E5B9ull + i * 0x94D049BB133111EBull + 1;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ x >> 27) * 0x94D049BB133111EBull;
    return (float)((double)(x >> 40) / (1 << 23) - 1.0);
}

enum { WEIGHT = 1 << 20, GATE = 1 << 21, BETA = 1 << 22 };      /* where `i` starts for other things than inputs */

static float weight(int layer, int channel, int w)  { return number(0, layer, WEIGHT + channel * WIDTH + w); }
static float gate(uint64_t token, int layer, int h) { return -0.05f - 0.5f * fabsf(number(token, layer, GATE + h)); }
static float beta(uint64_t token, int layer, int h) { return 0.5f + 0.45f * number(token, layer, BETA + h); }

/* ---------------------------------------------------------------- on the ring */

static gdn_tensor tensor(float *data, int64_t ne0, int64_t ne1, int64_t ne2)
{
    gdn_tensor t = { data, GDN_TYPE_F32, { ne0, ne1, ne2, 1 }, { 4, 4 * ne0, 4 * ne0 * ne1, 4 * ne0 * ne1 * ne2 } };
    return t;
}

/* Memory of one worker: it is allocated once, no call of gdn allocates. */
typedef struct worker {
    float x[MAX_TOKENS * CHANNELS], weights[LAYERS][CHANNELS * WIDTH];
    float g[MAX_TOKENS * HEADS], beta[MAX_TOKENS * HEADS], out[MAX_TOKENS * HEADS * S];
    char message[256];
    void *scratch;
    size_t scratch_size;
} worker;

static worker *worker_new(void)
{
    worker *w = calloc(1, sizeof *w);
    for (int layer = 0; layer < LAYERS; layer++)
        for (int i = 0; i < CHANNELS * WIDTH; i++)
            w->weights[layer][i] = weight(layer, i / WIDTH, i % WIDTH);
    return w;
}

static void worker_scratch(worker *w, size_t needed)
{
    if (needed > w->scratch_size) {
        free(w->scratch);
        w->scratch = malloc(needed);
        w->scratch_size = needed;
    }
}

/* One layer over n tokens of one sequence: convolution, then the delta rule, both in place on the ring's rows. */
static void run_layer(gdn_ring_header *ring, worker *w, int layer, const uint64_t *tokens, int64_t n,
                      const gdn_ring_step *step)
{
    gdn_call call = { .n_seqs = 1, .n_snapshots = step->n_snapshots, .rows_in = step->rows_in, .rows_out = step->rows_out,
                      .log_in = step->log_in, .n_log_in = step->n_log_in, .log_out = step->log_out,
                      .n_log_out = step->n_log_out, .checkpoints = step->checkpoints,
                      .n_checkpoints = step->n_checkpoints,        /* all of these are NULL and 0 in plane form */
                      .message = w->message, .message_size = sizeof w->message };
    gdn_conv_args conv = { .size = sizeof conv, .activation = GDN_ACT_SILU, .n_threads = MODEL_THREADS, .call = call };
    gdn_delta_net_args delta = { .size = sizeof delta, .flags = GDN_QK_L2NORM, .l2_eps = 1e-6f, .n_threads = MODEL_THREADS,
                                 .call = call };
    size_t needed;
    if (ring->form == GDN_FORM_LOG)
        CHECK(gdn->ring_log(ring, layer, &delta.log_k, &delta.log_d, &delta.log_g, &conv.log_x));
    for (int64_t t = 0; t < n; t++) {
        for (int c = 0; c < CHANNELS; c++)
            w->x[t * CHANNELS + c] = number(tokens[t], layer, c);
        for (int h = 0; h < HEADS; h++) {
            w->g[t * HEADS + h] = gate(tokens[t], layer, h);
            w->beta[t * HEADS + h] = beta(tokens[t], layer, h);
        }
    }
    conv.x = conv.out = tensor(w->x, CHANNELS, n, 1);
    conv.weight = tensor(w->weights[layer], WIDTH, CHANNELS, 1);
    CHECK(gdn->ring_conv(ring, layer, &conv.call.state));
    conv.call.state_out = conv.call.state;
    CHECK(gdn->causal_conv1d_scratch_size(&conv, &needed));
    worker_scratch(w, needed);
    conv.call.scratch = w->scratch;
    conv.call.scratch_size = w->scratch_size;
    CHECK(gdn->causal_conv1d(&conv));

    /* q, k and v are slices of the convolved rows, seen through strides. */
    gdn_tensor *parts[3] = { &delta.q, &delta.k, &delta.v };
    for (int i = 0; i < 3; i++) {
        *parts[i] = tensor(w->x + i * HEADS * S, S, HEADS, n);
        parts[i]->nb[2] = 4 * CHANNELS;
        parts[i]->nb[3] = 4 * CHANNELS * n;
    }
    delta.g = tensor(w->g, 1, HEADS, n);
    delta.beta = tensor(w->beta, 1, HEADS, n);
    delta.out = tensor(w->out, S, HEADS, n);
    CHECK(gdn->ring_ssm(ring, layer, &delta.call.state));
    delta.call.state_out = delta.call.state;
    CHECK(gdn->gated_delta_net_scratch_size(&delta, &needed));
    worker_scratch(w, needed);
    delta.call.scratch = w->scratch;
    delta.call.scratch_size = w->scratch_size;
    CHECK(gdn->gated_delta_net(&delta));
}

/* n tokens of one sequence through all layers, committed. */
static inline void run_step(gdn_ring_header *ring, worker *w, int64_t seq_id, const uint64_t *tokens, int64_t n)
{
    int64_t rows_in, rows_out[MAX_TOKENS], log_in[LOG], log_out[MAX_TOKENS], checkpoint[3];
    gdn_ring_step step = { .size = sizeof step, .n_seqs = 1, .n_snapshots = MAX_TOKENS, .seq_ids = &seq_id,
                           .n_tokens = &n, .rows_in = &rows_in, .rows_out = rows_out };
    if (ring->form == GDN_FORM_LOG) {
        step.log_in = log_in;
        step.n_log_in = LOG;
        step.log_out = log_out;
        step.n_log_out = MAX_TOKENS;
        step.checkpoints = checkpoint;          /* a step of one sequence folds at most one log */
        step.max_checkpoints = 1;
    }
    CHECK(gdn->ring_begin(ring, &step));
    for (int layer = 0; layer < LAYERS; layer++)
        run_layer(ring, w, layer, tokens, n, &step);
    CHECK(gdn->ring_commit(ring, &step));
}

/* ---------------------------------------------------------------- what must come out */

typedef struct truth {
    double window[LAYERS][CHANNELS][WIDTH - 1];
    double state[LAYERS][HEADS][S][S];          /* [value][key], as the ring's rows */
    int64_t n_tokens;
} truth;

static inline void truth_step(truth *m, uint64_t token)
{
    double y[CHANNELS], u[S];
    for (int layer = 0; layer < LAYERS; layer++) {
        for (int c = 0; c < CHANNELS; c++) {
            double *window = m->window[layer][c], x = number(token, layer, c), sum = weight(layer, c, WIDTH - 1) * x;
            for (int i = 0; i < WIDTH - 1; i++)
                sum += weight(layer, c, i) * window[i];
            memmove(window, window + 1, (WIDTH - 2) * sizeof *window);
            window[WIDTH - 2] = x;
            y[c] = sum / (1 + exp(-sum));
        }
        for (int h = 0; h < HEADS; h++) {
            const double *k = y + (HEADS + h) * S, *v = y + (2 * HEADS + h) * S;
            double decay = exp(gate(token, layer, h)), b = beta(token, layer, h), norm = 1e-6;
            for (int i = 0; i < S; i++)
                norm += k[i] * k[i];
            for (int i = 0; i < S; i++)
                u[i] = k[i] / sqrt(norm);
            for (int j = 0; j < S; j++) {
                double *row = m->state[layer][h][j], d = v[j];
                for (int i = 0; i < S; i++) {
                    row[i] *= decay;
                    d -= row[i] * u[i];
                }
                for (int i = 0; i < S; i++)
                    row[i] += b * d * u[i];
            }
        }
    }
    m->n_tokens++;
}

/* What a row of a layer and the log entries on it come to, in double precision. */
typedef struct layer_state {
    double state[HEADS][S][S], window[CHANNELS][WIDTH - 1];
} layer_state;

static inline void read_layer(const gdn_ring_header *ring, int64_t slot, const gdn_ring_slot *r, int layer, layer_state *out)
{
    const char *base = (const char *)ring;
    int log = ring->form == GDN_FORM_LOG;
    int64_t row = log ? r->row : (int64_t)r->head * ring->n_slots + slot;
    const float *ssm = (const float *)(base + ring->ssm_offset + layer * ring->layer_nb + row * ring->ssm_row_nb);
    const float *conv = (const float *)(base + ring->conv_offset + layer * ring->layer_nb + row * ring->conv_row_nb);
    const int32_t *list = (const int32_t *)(base + ring->lists_offset + slot * ring->list_nb) + r->order * ring->n_entries;
    int zero = log && r->zero;
    for (int i = 0; i < HEADS * S * S; i++)
        (&out->state[0][0][0])[i] = zero ? 0 : ssm[i];
    for (int i = 0; i < CHANNELS * (WIDTH - 1); i++)
        (&out->window[0][0])[i] = zero ? 0 : conv[i];
    for (int32_t e = 0; log && e < r->n_log; e++) {
        int64_t entry = slot * ring->n_entries + list[(r->first + e) % ring->n_entries];
        const char *at = base + ring->log_offset + layer * ring->layer_nb + entry * ring->entry_nb;
        const float *k = (const float *)at, *d = (const float *)(at + ring->entry_d);
        const float *g = (const float *)(at + ring->entry_g), *x = (const float *)(at + ring->entry_x);
        for (int h = 0; h < HEADS; h++)
            for (int j = 0; j < S; j++)
                for (int i = 0; i < S; i++)
                    out->state[h][j][i] = exp(g[h]) * out->state[h][j][i] + (double)k[h * S + i] * d[h * S + j];
        for (int c = 0; c < CHANNELS; c++) {
            memmove(out->window[c], out->window[c] + 1, (WIDTH - 2) * sizeof(double));
            out->window[c][WIDTH - 2] = x[c];
        }
    }
}

/* The committed state of a sequence, found through the header alone, against the truth: the largest error over the
 * largest value. */
static inline double committed_error(const gdn_ring_header *ring, int64_t seq_id, const truth *m)
{
    const gdn_ring_slot *slots = (const gdn_ring_slot *)((const char *)ring + ring->slots_offset);
    int64_t slot = 0;
    double worst = 0, largest = 1e-30;
    while (slots[slot].seq_id != seq_id)
        if (++slot == ring->n_slots)
            return INFINITY;
    if (slots[slot].state != GDN_SLOT_LIVE || slots[slot].position != m->n_tokens)
        return INFINITY;
    for (int layer = 0; layer < LAYERS; layer++) {
        layer_state now;
        const double *state = &m->state[layer][0][0][0], *window = &m->window[layer][0][0];
        read_layer(ring, slot, &slots[slot], layer, &now);
        for (int i = 0; i < HEADS * S * S; i++) {
            worst = fmax(worst, fabs((&now.state[0][0][0])[i] - state[i]));
            largest = fmax(largest, fabs(state[i]));
        }
        for (int i = 0; i < CHANNELS * (WIDTH - 1); i++)
            if ((&now.window[0][0])[i] != (float)window[i])
                return INFINITY;
    }
    return worst / largest;
}

#endif
