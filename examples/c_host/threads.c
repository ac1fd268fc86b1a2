/* threads.c - a C server in small: it owns the ring's memory and decodes four sequences from four threads, without
 * the GIL.  Every thread drafts tokens, keeps some of them and takes the rest back, and in the end the states read
 * through the header are compared with a recurrence in double precision. */
#define _GNU_SOURCE
#include "table.h"
#include "model.h"

#include <pthread.h>
#include <sys/mman.h>

enum { THREADS = 4, ROLLBACK = 3, STEPS = 400 };

static gdn_ring_header *ring;

typedef struct task {
    int64_t seq_id;
    double error;
    int64_t n_drafted;
} task;

static void *decode(void *argument)
{
    task *t = argument;
    worker *w = worker_new();
    truth *m = calloc(1, sizeof *m);
    uint64_t tokens[MAX_TOKENS];
    int64_t slot = -1, position, depth;
    CHECK(gdn->ring_acquire(ring, t->seq_id, &slot));
    for (int i = 0; i < STEPS; i++) {
        /* A prompt of 8 tokens, then plain steps and drafts of 4 of which `right` turn out right. */
        int64_t n = i == 0 ? MAX_TOKENS : i % 3 == 0 ? 1 : ROLLBACK + 1, right = n == ROLLBACK + 1 ? 1 + i % ROLLBACK : n;
        for (int64_t j = 0; j < n; j++)
            tokens[j] = (uint64_t)t->seq_id << 32 | (uint64_t)(i * MAX_TOKENS + j + 1);
        run_step(ring, w, t->seq_id, tokens, n);
        CHECK(gdn->ring_rollback(ring, t->seq_id, n - right));
        for (int64_t j = 0; j < right; j++)
            truth_step(m, tokens[j]);
        t->n_drafted += n - right;
        CHECK(gdn->ring_position(ring, t->seq_id, &position));
        CHECK(gdn->ring_max_rollback(ring, t->seq_id, &depth));
        if (position != m->n_tokens || depth < ROLLBACK - (n - right)) {
            fprintf(stderr, "sequence %lld: position %lld, depth %lld\n", (long long)t->seq_id, (long long)position,
                    (long long)depth);
            exit(1);
        }
    }
    t->error = committed_error(ring, t->seq_id, m);
    free(m);
    free(w->scratch);
    free(w);
    return NULL;
}

/* Four threads on a ring of that form; whether a state was wrong. */
static int run_form(int32_t form)
{
    gdn_ring_params params = model_params(THREADS + 2, ROLLBACK, form);
    pthread_t threads[THREADS];
    task tasks[THREADS];
    size_t n;
    int failed = 0;
    CHECK(gdn->ring_size(&params, &n));
    ring = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (ring == MAP_FAILED) {
        perror("mmap");
        return 1;
    }
    CHECK(gdn->ring_init(&params, ring, n));
    CHECK(gdn->ring_attach(ring, n));
    for (int i = 0; i < THREADS; i++) {
        tasks[i] = (task){ .seq_id = 100 + i };
        if (pthread_create(&threads[i], NULL, decode, &tasks[i]) != 0)
            return 1;
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
        failed |= !(tasks[i].error <= 1e-5);
        printf("%s, sequence %lld: %d steps, %lld tokens taken back, error %.1e\n", form == GDN_FORM_LOG ? "log" : "planes",
               (long long)tasks[i].seq_id, STEPS,
               (long long)tasks[i].n_drafted, tasks[i].error);
    }
    munmap(ring, n);
    return failed;
}

int main(void)
{
    int failed;
    if ((gdn = fetch_table()) == NULL) {
        fprintf(stderr, "gdn's function table cannot be had, or is of another abi\n");
        return 1;
    }
    failed = run_form(GDN_FORM_PLANES);
    failed |= run_form(GDN_FORM_LOG);
    puts(failed ? "FAILED" : "ok");
    return failed;
}
