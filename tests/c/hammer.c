/* hammer.c - threads that do everything a ring can do, on the same few sequences at once: for the sanitizers.
 *
 *     hammer [ROUNDS]: for each form; also with the library's loops on threads of the host.
 *
 * A token is a sequence's position, so that a state follows from the position alone, however the sequence came there: by
 * steps, rollbacks, copies, forks or saves.  In the end each one is compared with the recurrence in double precision. */
#define _GNU_SOURCE
#define MODEL_THREADS 2
#include "table.h"
#include "model.h"

#include <pthread.h>

enum { THREADS = 4, SLOTS = 6, SEQUENCES = 9, ROLLBACK = 3, LONGEST = 200 };

static gdn_ring_header *ring;
static int rounds = 400;
static long done[16];                   /* calls that were not refused, by kind */

/* ---------------------------------------------------------------- the host's loop */

typedef struct share {
    gdn_share_fn body;
    void *job;
    int32_t i;
} share;

static void *run_share(void *argument)
{
    share *s = argument;
    s->body(s->job, s->i);
    return NULL;
}

static void threads_for(void *context, gdn_share_fn body, void *job, int32_t n)
{
    share shares[MODEL_THREADS];
    pthread_t threads[MODEL_THREADS];
    (void)context;
    for (int32_t i = 0; i < n; i++) {
        shares[i] = (share){ body, job, i };
        if (i > 0 && pthread_create(&threads[i], NULL, run_share, &shares[i]) != 0)
            abort();
    }
    run_share(&shares[0]);
    for (int32_t i = 1; i < n; i++)
        pthread_join(threads[i], NULL);
}

/* ---------------------------------------------------------------- what a thread does */

static uint32_t next_number(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 33);
}

/* Anything but these is a fault of the ring. */
static void count(gdn_status status, int kind)
{
    switch (status) {
    case GDN_OK:
        __atomic_add_fetch(&done[kind], 1, __ATOMIC_RELAXED);
    case GDN_ERR_FULL: case GDN_ERR_UNKNOWN: case GDN_ERR_LOST: case GDN_ERR_BUSY: case GDN_ERR_ROLLBACK:
    case GDN_ERR_PENDING: case GDN_ERR_VALUE: case GDN_ERR_SCRATCH: case GDN_ERR_SHAPE:
        return;
    default:
        fprintf(stderr, "call of kind %d: %s\n", kind, gdn->status_string(status));
        exit(1);
    }
}

/* A step of n tokens from where the sequence stands, or of a fork of it; committed or not. */
static void step(worker *w, int64_t seq_id, int64_t n, int64_t fork_id, int commit)
{
    uint64_t tokens[MAX_TOKENS];
    int64_t position, rows_in = -1, rows_out[MAX_TOKENS], log_in[LOG], log_out[MAX_TOKENS], checkpoints[6];
    int64_t fork[3] = { 0, n / 2, fork_id };
    gdn_ring_step s = { .size = sizeof s, .n_seqs = 1, .n_snapshots = MAX_TOKENS, .seq_ids = &seq_id, .n_tokens = &n,
                        .positions = &position, .rows_in = &rows_in, .rows_out = rows_out, .n_log_in = LOG,
                        .n_log_out = MAX_TOKENS, .log_in = log_in, .log_out = log_out, .forks = fork,
                        .n_forks = fork_id >= 0, .max_checkpoints = 2, .checkpoints = checkpoints };
    if (ring->form == GDN_FORM_PLANES) {
        s.log_in = s.log_out = NULL;
        s.n_log_in = s.n_log_out = 0;
    }
    if (gdn->ring_position(ring, seq_id, &position) != GDN_OK)
        return;
    if (position + n > LONGEST)
        position = 0;
    if (gdn->ring_begin(ring, &s) != GDN_OK)
        return;
    for (int64_t i = 0; i < n; i++)
        tokens[i] = (uint64_t)(position + i);
    for (int layer = 0; layer < LAYERS; layer++)
        run_layer(ring, w, layer, tokens, n, &s);
    count(commit ? gdn->ring_commit(ring, &s) : gdn->ring_abort(ring, &s), commit);
}

static void save_and_load(int64_t seq_id, int64_t new_id, int deep)
{
    size_t size = 0;
    void *data;
    gdn_status status = deep ? gdn->ring_save_size(ring, seq_id, &size) : gdn->ring_save_state_size(ring, seq_id, &size);
    if (status != GDN_OK)
        return;
    if ((data = malloc(size)) == NULL)
        abort();
    status = deep ? gdn->ring_save(ring, seq_id, data, size, &size) : gdn->ring_save_state(ring, seq_id, data, size, &size);
    count(status, 2);
    if (status == GDN_OK)
        count(gdn->ring_load(ring, new_id, data, size), 3);
    free(data);
}

static void *hammer(void *argument)
{
    uint64_t random = (uint64_t)(uintptr_t)argument * 7919 + 1;
    worker *w = worker_new();
    for (int i = 0; i < rounds; i++) {
        int64_t seq_id = next_number(&random) % SEQUENCES, other = next_number(&random) % SEQUENCES, depth;
        uint32_t what = next_number(&random) % 16;
        if (what < 6)
            step(w, seq_id, next_number(&random) % (MAX_TOKENS + 1), -1, what != 5);
        else if (what < 8)
            step(w, seq_id, next_number(&random) % (MAX_TOKENS + 1), other, what != 7);
        else if (what < 10)
            count(gdn->ring_acquire(ring, seq_id, NULL), 4);
        else if (what == 10)
            count(gdn->ring_release(ring, seq_id), 5);
        else if (what == 11)
            count(gdn->ring_rollback(ring, seq_id, next_number(&random) % (ROLLBACK + 1)), 6);
        else if (what == 12)
            count(i & 1 ? gdn->ring_copy(ring, seq_id, other) : gdn->ring_copy_state(ring, seq_id, other), 7);
        else if (what == 13)
            save_and_load(seq_id, other, i & 1);
        else if (what == 14)
            count(gdn->ring_max_rollback(ring, seq_id, &depth), 8);
        else
            count(i % 5 ? gdn->set_parallel_for(threads_for, NULL) : gdn->ring_reset(ring, seq_id), 9);
    }
    free(w->scratch);
    free(w);
    return NULL;
}

/* ---------------------------------------------------------------- what must be left */

static int check_ring(void)
{
    const gdn_ring_slot *slots = (const gdn_ring_slot *)((const char *)ring + ring->slots_offset);
    truth *m = calloc(LONGEST + 1, sizeof *m);
    int failed = 0;
    for (int i = 0; i < LONGEST; i++) {
        m[i + 1] = m[i];
        truth_step(&m[i + 1], (uint64_t)i);
    }
    for (int slot = 0; slot < SLOTS; slot++)
        if (slots[slot].state == GDN_SLOT_LIVE)
            failed |= !(committed_error(ring, slots[slot].seq_id, &m[slots[slot].position]) <= 1e-5);
    free(m);
    return failed;
}

static int run_form(int32_t form)
{
    gdn_ring_params params = model_params(SLOTS, ROLLBACK, form);
    pthread_t threads[THREADS];
    size_t n;
    int failed;
    CHECK(gdn->ring_size(&params, &n));
    if ((ring = malloc(n)) == NULL)
        return 1;
    CHECK(gdn->ring_init(&params, ring, n));
    for (int i = 0; i < THREADS; i++)
        if (pthread_create(&threads[i], NULL, hammer, (void *)(uintptr_t)(i + 1)) != 0)
            return 1;
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    CHECK(gdn->ring_attach(ring, n));           /* every record is sound */
    failed = check_ring();
    free(ring);
    return failed;
}

int main(int argc, char **argv)
{
    int failed;
    if (argc > 1)
        rounds = atoi(argv[1]);
    if ((gdn = fetch_table()) == NULL)
        return 1;
    CHECK(gdn->set_parallel_for(threads_for, NULL));
    failed = run_form(GDN_FORM_PLANES);
    failed |= run_form(GDN_FORM_LOG);
    CHECK(gdn->set_parallel_for(NULL, NULL));
    printf("commits %ld, aborts %ld, saves %ld, loads %ld, acquires %ld, releases %ld, rollbacks %ld, copies %ld\n", done[1],
           done[0], done[2], done[3], done[4], done[5], done[6], done[7]);
    for (int i = 0; i < 8; i++)
        failed |= rounds >= 400 && done[i] == 0;
    puts(failed ? "FAILED" : "ok");
    return failed;
}
