/* begin + commit from C: seconds a pair over n sequences of one token, the best of `rounds` of 1000 pairs each. */
#define _POSIX_C_SOURCE 199309L
#include <time.h>

#include "gdn.h"

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

double begin_commit(const gdn_api *gdn, gdn_ring_header *ring, const int64_t *seq_ids, const int64_t *n_tokens,
                    int64_t n, int64_t *rows_in, int64_t *rows_out, int64_t n_snapshots, int64_t *lists, int rounds)
{
    double best = 1e9;
    for (int round = 0; round < rounds; round++) {
        double start = now();
        for (int i = 0; i < 1000; i++) {
            gdn_ring_step step = { .size = sizeof step, .n_seqs = n, .n_snapshots = n_snapshots, .seq_ids = seq_ids,
                                   .n_tokens = n_tokens, .rows_in = rows_in, .rows_out = rows_out };
            if (ring->form == GDN_FORM_LOG) {       /* lists: 16 entries, a token's and a checkpoint a sequence */
                step.log_in = lists;
                step.n_log_in = 16;
                step.log_out = lists + 16 * n;
                step.n_log_out = 1;
                step.checkpoints = lists + 17 * n;
                step.max_checkpoints = n;
            }
            if (gdn->ring_begin(ring, &step) != GDN_OK || gdn->ring_commit(ring, &step) != GDN_OK)
                return -1;
        }
        start = (now() - start) / 1000;
        best = start < best ? start : best;
    }
    return best;
}
