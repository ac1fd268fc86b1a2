/* Preloaded into a measuring process: counts calls of the allocator between two readings of `gdn_malloc_calls`. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>

unsigned long gdn_malloc_calls, gdn_malloc_largest;

static void count(size_t size)
{
    __atomic_fetch_add(&gdn_malloc_calls, 1, __ATOMIC_RELAXED);
    if (size > gdn_malloc_largest)
        gdn_malloc_largest = size;
}

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);

void *malloc(size_t n)                        { count(n);      return __libc_malloc(n); }
void *calloc(size_t n, size_t size)           { count(n * size); return __libc_calloc(n, size); }
void *realloc(void *p, size_t n)              { count(n);      return __libc_realloc(p, n); }
void *aligned_alloc(size_t a, size_t n)       { count(n);      return __libc_memalign(a, n); }
void *memalign(size_t a, size_t n)            { count(n);      return __libc_memalign(a, n); }
int posix_memalign(void **p, size_t a, size_t n)
{
    count(n);
    *p = __libc_memalign(a, n);
    return *p == NULL ? 12 : 0;
}

void *mmap(void *at, size_t n, int prot, int flags, int fd, long offset)
{
    static void *(*next)(void *, size_t, int, int, int, long);
    if (next == NULL)
        next = (void *(*)(void *, size_t, int, int, int, long))dlsym(RTLD_NEXT, "mmap");
    count(n);
    return next(at, n, prot, flags, fd, offset);
}
