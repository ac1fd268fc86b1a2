/* shared.c - the C half of shared.py: attach to a ring in POSIX shared memory that a Python process made, take a
 * sequence of its over, and add one of its own.
 *
 *     shared NAME SEQ_ID NEW_ID: on SEQ_ID decode 6 tokens, take the last 2 back; on NEW_ID decode 5 tokens.
 * Tokens are numbered (seq_id << 32) + position + 1 of the sequence that they were first given to. */
#define _GNU_SOURCE
#include "table.h"
#include "model.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    uint64_t tokens[MAX_TOKENS];
    int64_t seq_id, new_id, position, slot = -1;
    struct stat file;
    gdn_ring_header *ring;
    worker *w;
    int fd;
    if (argc != 4 || (gdn = fetch_table()) == NULL) {
        fprintf(stderr, "usage: shared NAME SEQ_ID NEW_ID, where gdn can be imported\n");
        return 1;
    }
    seq_id = atoll(argv[2]);
    new_id = atoll(argv[3]);
    if ((fd = shm_open(argv[1], O_RDWR, 0)) < 0 || fstat(fd, &file) < 0) {
        perror(argv[1]);
        return 1;
    }
    ring = mmap(NULL, (size_t)file.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (ring == MAP_FAILED) {
        perror("mmap");
        return 1;
    }
    CHECK(gdn->ring_attach(ring, (size_t)file.st_size));
    w = worker_new();

    CHECK(gdn->ring_position(ring, seq_id, &position));
    for (int64_t i = 0; i < 6; i++)
        tokens[i] = ((uint64_t)seq_id << 32) + (uint64_t)(position + i + 1);
    run_step(ring, w, seq_id, tokens, 6);
    CHECK(gdn->ring_rollback(ring, seq_id, 2));

    CHECK(gdn->ring_acquire(ring, new_id, &slot));
    for (int64_t i = 0; i < 5; i++)
        tokens[i] = ((uint64_t)new_id << 32) + (uint64_t)(i + 1);
    run_step(ring, w, new_id, tokens, 5);

    free(w->scratch);
    free(w);
    munmap(ring, (size_t)file.st_size);
    return 0;
}
