/* fuzz_bytes.c - libFuzzer on what may come from outside: a ring's buffer (attached, used, scribbled over, used again), or,
 * with FUZZ_SAVED, a saved sequence (loaded into a ring that must keep every bit if it refuses).
 *
 * The mutator sets count fields to values at the edges of their types and makes the checksums right again, so that what lies
 * behind them is reached.  With REPLAY it is a program without libFuzzer: it takes the files that it is given, each as it is and
 * with every word of its start at every edge. */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "crc.h"
#include "gdn.h"

enum { MAX_SIZE = 1 << 14, MOST = 64, N_LAYOUT = 380, N_HEADER = sizeof(gdn_ring_header), SAVED_CRC = 12, SAVED_START = 16 };

static const gdn_api *gdn;

static void *copy_of(const void *data, size_t size, size_t offset)
{
    char *memory = NULL;
    if (posix_memalign((void **)&memory, 64, size + offset))
        abort();
    memcpy(memory + offset, data, size);
    return memory;
}

/* ---------------------------------------------------------------- the mutator */

static const int64_t edges[] = { 0, 1, -1, 2, 7, INT32_MAX, (int64_t)INT32_MAX + 1, INT32_MIN, INT64_MAX, INT64_MIN, UINT32_MAX,
                                 1 << 28, INT64_C(1) << 40 };
enum { N_EDGES = sizeof edges / sizeof *edges };

static void make_whole(uint8_t *data, size_t size)
{
#ifdef FUZZ_SAVED
    int64_t n = (int64_t)size;
    uint32_t crc;
    if (size < 40)
        return;
    if (data[size - 1] & 1)                     /* sometimes the size that it says is right */
        memcpy(data + 16, &n, 8);
    crc = gdn_crc32(data + SAVED_START, size - SAVED_START);
    memcpy(data + SAVED_CRC, &crc, 4);
#else
    uint32_t crc;
    if (size < N_HEADER)
        return;
    crc = gdn_crc32(data, N_LAYOUT);
    memcpy(data + offsetof(gdn_ring_header, checksum), &crc, 4);
#endif
}

#ifndef REPLAY

size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size);

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed)
{
    if (seed % 3 == 0 && size >= 16) {
        size_t width = seed & 8 ? 8 : 4, reach = seed & 16 ? size : size < 1024 ? size : 1024;
        memcpy(data + (seed >> 8) % (reach - width + 1) / 4 * 4, &edges[(seed >> 4) % N_EDGES], width);
    } else
        size = LLVMFuzzerMutate(data, size, max_size);
    make_whole(data, size);
    return size;
}

#endif

/* ---------------------------------------------------------------- every call on a ring */

/* Rows and entries that a step hands out are addresses: those of the ring, or none. */
static void check_rows(const int64_t *rows, int64_t n, int64_t limit)
{
    for (int64_t i = 0; i < n; i++)
        if (rows[i] < -1 || rows[i] >= limit)
            abort();
}

static void one_step(gdn_ring_header *ring, int64_t seq_id, int64_t n, int commit)
{
    enum { TOKENS = 8 };
    int64_t rows_in = -1, rows_out[TOKENS], log_in[MOST], log_out[TOKENS], checkpoints[6];
    gdn_ring_step s = { .size = sizeof s, .n_seqs = 1, .n_snapshots = TOKENS, .seq_ids = &seq_id, .n_tokens = &n,
                        .rows_in = &rows_in, .rows_out = rows_out, .max_checkpoints = 2, .checkpoints = checkpoints };
    if (ring->form == GDN_FORM_LOG) {
        s.log_in = log_in;
        s.log_out = log_out;
        s.n_log_in = MOST;
        s.n_log_out = TOKENS;
    }
    if (gdn->ring_begin(ring, &s) != GDN_OK)
        return;
    check_rows(&rows_in, 1, ring->n_rows);
    check_rows(rows_out, TOKENS, ring->n_rows);
    if (s.n_checkpoints < 0 || s.n_checkpoints > 2)
        abort();
    if (s.log_in) {
        check_rows(log_in, MOST, (int64_t)ring->n_slots * ring->n_entries);
        check_rows(log_out, TOKENS, (int64_t)ring->n_slots * ring->n_entries);
    }
    if (commit)
        gdn->ring_commit(ring, &s);
    else
        gdn->ring_abort(ring, &s);
}

static void use_sequence(gdn_ring_header *ring, int64_t seq_id)
{
    int64_t n, tokens[2] = { 0, 1 };
    size_t size;
    void *saved;
    gdn->ring_position(ring, seq_id, &n);
    gdn->ring_max_rollback(ring, seq_id, &n);
    for (int deep = 0; deep < 2; deep++) {
        if ((deep ? gdn->ring_save_size : gdn->ring_save_state_size)(ring, seq_id, &size) != GDN_OK || size > 1 << 20)
            continue;
        if ((saved = malloc(size)) == NULL)
            abort();
        if ((deep ? gdn->ring_save : gdn->ring_save_state)(ring, seq_id, saved, size, &size) == GDN_OK)
            gdn->ring_load(ring, seq_id ^ INT64_C(0x5a5a), saved, size);
        free(saved);
        gdn->ring_release(ring, seq_id ^ INT64_C(0x5a5a));
    }
    gdn->ring_accept(ring, seq_id, tokens, 2);
    one_step(ring, seq_id, 3, 1);
    one_step(ring, seq_id, 1, 0);
    gdn->ring_rollback(ring, seq_id, 1);
    gdn->ring_copy(ring, seq_id, 77);
    gdn->ring_copy_state(ring, seq_id, 78);
    gdn->ring_release(ring, 77);
    gdn->ring_release(ring, 78);
    gdn->ring_acquire(ring, 79, NULL);
    one_step(ring, 79, 8, 1);
    gdn->ring_reset(ring, seq_id);
}

#ifndef FUZZ_SAVED

static void use_ring(gdn_ring_header *ring)
{
    for (int64_t slot = 0; slot < ring->n_slots && slot < 4; slot++)
        use_sequence(ring, ((gdn_ring_slot *)((char *)ring + ring->slots_offset) + slot)->seq_id);
    use_sequence(ring, 5);
}

#endif

/* ---------------------------------------------------------------- one input */

#ifdef FUZZ_SAVED

static gdn_ring_header *ring_of(int32_t form, size_t *size)
{
    gdn_ring_params p = { .size = sizeof p, .n_slots = 3, .n_rollback = 2, .n_layers = 2, .H_v = 2, .S_k = 4, .S_v = 4,
                          .conv_channels = 5, .conv_width = 3, .spare = -1, .form = form, .H_k = 1 };
    void *memory = NULL;
    if (gdn->ring_size(&p, size) != GDN_OK || posix_memalign(&memory, 64, *size))
        abort();
    memset(memory, 0, *size);
    if (gdn->ring_init(&p, memory, *size) != GDN_OK)
        abort();
    return memory;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    gdn = gdn_get_api(GDN_ABI);
    for (int32_t form = GDN_FORM_PLANES; form <= GDN_FORM_LOG; form++) {
        size_t n;
        gdn_ring_header *ring = ring_of(form, &n), *before = copy_of(ring, n, 0);
        char *bytes = copy_of(data, size, 1);
        if (gdn->ring_load(ring, 5, bytes + 1, size) == GDN_OK)
            use_sequence(ring, 5);
        else if (memcmp(ring, before, n) != 0)
            abort();
        free(bytes);
        free(before);
        free(ring);
    }
    return 0;
}

#else

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    size_t n = size < N_HEADER ? size : (size_t)((const gdn_ring_header *)(const void *)data)->nbytes;
    gdn_ring_header *ring;
    gdn = gdn_get_api(GDN_ABI);
    if (n > size)
        n = size;
    ring = copy_of(data, n, 4);
    ring = (gdn_ring_header *)(void *)((char *)ring + 4);
    if (n >= N_HEADER)
        ring->lock = 0;                         /* a living holder is waited for, ten seconds */
    if (gdn->ring_attach(ring, n) == GDN_OK) {
        use_ring(ring);
        /* What follows the ring in the input is written over its records and tables, as by somebody else. */
        for (size_t i = n; i + 8 <= size && i < n + 8 * 24; i += 8) {
            uint32_t at, value;
            memcpy(&at, data + i, 4);
            memcpy(&value, data + i + 4, 4);
            at = N_LAYOUT + 4 + at % (uint32_t)(n - N_LAYOUT - 8);
            if (at / 4 * 4 != offsetof(gdn_ring_header, lock))
                memcpy((char *)ring + at / 4 * 4, &value, 4);
            if ((i - n) / 8 % 4 == 3)
                use_ring(ring);
        }
    } else if (n >= N_HEADER) {                 /* tables may have been made anew; the layout and the rows are as they were */
        int64_t rows = ((const gdn_ring_header *)(const void *)data)->ssm_offset;
        int has_rows = rows >= N_HEADER && (size_t)rows < n;
        if (memcmp(ring, data, N_LAYOUT) || (has_rows && memcmp((char *)ring + rows, data + rows, n - rows)))
            abort();
    }
    free((char *)ring - 4);
    return 0;
}

#endif

#ifdef REPLAY

static void replay(const char *path)
{
    enum { REACH = 1024 };
    uint8_t *data = malloc(1 << 20), *changed = malloc(1 << 20);
    FILE *file = fopen(path, "rb");
    size_t size;
    if (file == NULL || data == NULL || changed == NULL)
        abort();
    size = fread(data, 1, 1 << 20, file);
    fclose(file);
    LLVMFuzzerTestOneInput(data, size);
    for (size_t width = 4; width <= 8; width += 4)
        for (size_t at = 0; at + width <= size && at < REACH; at += 4)
            for (size_t edge = 0; edge < N_EDGES; edge++) {
                memcpy(changed, data, size);
                memcpy(changed + at, &edges[edge], width);
                make_whole(changed, size);
                alarm(1);                       /* the longest that any input may take */
                LLVMFuzzerTestOneInput(changed, size);
                alarm(0);
            }
    free(data);
    free(changed);
}

int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++)
        replay(argv[i]);
    printf("%d files\n", argc - 1);
    return argc < 2;
}

#endif
