/* pool.c - a host with threads of its own: the library's loops run on a pool of pthreads instead of OpenMP's.  Results
 * have the same bits as on one thread. */
#define _GNU_SOURCE
#include "table.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WORKERS = 3, T = 100, H = 4, S = 32 };

static const gdn_api *gdn;

typedef struct pool {
    pthread_mutex_t mutex;
    pthread_cond_t  wake, done;
    pthread_t       threads[WORKERS];
    void          (*body)(void *job, int32_t share);
    void           *job;
    int32_t         n_shares, next, left;
    int             stop;
} pool;

/* Shares are handed out one by one, the last first: any order and any thread will do. */
static void take_shares(pool *p)
{
    while (p->next > 0) {
        int32_t share = --p->next;
        pthread_mutex_unlock(&p->mutex);
        p->body(p->job, share);
        pthread_mutex_lock(&p->mutex);
        if (--p->left == 0)
            pthread_cond_signal(&p->done);
    }
}

static void *work(void *context)
{
    pool *p = context;
    pthread_mutex_lock(&p->mutex);
    while (!p->stop) {
        take_shares(p);
        if (!p->stop && p->next == 0)
            pthread_cond_wait(&p->wake, &p->mutex);
    }
    pthread_mutex_unlock(&p->mutex);
    return NULL;
}

/* What the library calls: run body(job, 0) .. body(job, n_shares - 1), once each, and return when all are done. */
static void parallel_for(void *context, void (*body)(void *, int32_t), void *job, int32_t n_shares)
{
    pool *p = context;
    pthread_mutex_lock(&p->mutex);
    p->body = body;
    p->job = job;
    p->n_shares = p->next = p->left = n_shares;
    pthread_cond_broadcast(&p->wake);
    take_shares(p);
    while (p->left > 0)
        pthread_cond_wait(&p->done, &p->mutex);
    pthread_mutex_unlock(&p->mutex);
}

static void decode(int32_t n_threads, const float *in, float *out, float *state)
{
    gdn_delta_net_args a = { .size = sizeof(a), .n_threads = n_threads, .call = { .n_seqs = 1, .n_snapshots = 1 } };
    gdn_tensor rows = { (void *)in, GDN_TYPE_F32, { S, H, T, 1 }, { 4, 4 * S, 4 * S * H, 4 * S * H * T } };
    gdn_tensor gates = { (void *)(in + T * H * S), GDN_TYPE_F32, { 1, H, T, 1 }, { 4, 4, 4 * H, 4 * H * T } };
    gdn_tensor states = { state, GDN_TYPE_F32, { S, S, H, 1 }, { 4, 4 * S, 4 * S * S, 4 * S * S * H } };
    a.q = a.k = a.v = a.out = rows;
    a.out.data = out;
    a.g = a.beta = gates;
    a.flags = GDN_QK_L2NORM | GDN_BETA_LOGIT;
    a.call.state_out = states;
    if (gdn->gated_delta_net_scratch_size(&a, &a.call.scratch_size) != GDN_OK)
        abort();
    a.call.scratch = malloc(a.call.scratch_size);
    if (!a.call.scratch || gdn->gated_delta_net(&a) != GDN_OK)
        abort();
    free(a.call.scratch);
}

int main(void)
{
    enum { N_IN = T * H * S + T * H, N_OUT = T * H * S, N_STATE = H * S * S };
    static float in[N_IN], out[2][N_OUT], state[2][N_STATE];
    static pool p = { .mutex = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER, .done = PTHREAD_COND_INITIALIZER };
    int same;
    if ((gdn = fetch_table()) == NULL)
        return 1;
    for (int i = 0; i < N_IN; i++)
        in[i] = i < T * H * S ? (float)(i * 37 % 101) / 50 - 1 : -(float)(i % 7) / 10;
    for (int i = 0; i < WORKERS; i++)
        if (pthread_create(&p.threads[i], NULL, work, &p) != 0)
            return 1;
    decode(1, in, out[0], state[0]);
    if (gdn->set_parallel_for(parallel_for, &p) != GDN_OK)
        return 1;
    decode(WORKERS + 1, in, out[1], state[1]);
    printf("%d shares on %d threads of the host and the caller's\n", p.n_shares, WORKERS);
    if (gdn->set_parallel_for(NULL, NULL) != GDN_OK)
        return 1;
    pthread_mutex_lock(&p.mutex);
    p.stop = 1;
    pthread_cond_broadcast(&p.wake);
    pthread_mutex_unlock(&p.mutex);
    for (int i = 0; i < WORKERS; i++)
        pthread_join(p.threads[i], NULL);
    same = memcmp(out[0], out[1], sizeof(out[0])) == 0 && memcmp(state[0], state[1], sizeof(state[0])) == 0;
    puts(same && p.n_shares == WORKERS + 1 ? "ok" : "FAILED");
    return !same;
}
