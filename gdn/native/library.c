/* library.c - the start of the library without Python: what `gdn_get_api` gives.
 *
 * The kernels and the calls are the object files of the Python modules, linked a second time; what of them needs Python is
 * left out by the linker, since nothing here reaches it. */
#include <gdn.h>

#include <pthread.h>
#include <stdlib.h>

#include "cpu.h"

#pragma GCC visibility push(hidden)
extern void gdn_core_start(const void *level_table, gdn_api *table);
extern void gdn_ring_start(gdn_api *table);
extern const void *gdn_level_base(void);
#if defined(__x86_64__) || defined(__i386__)
extern const void *gdn_level_v3(void);
extern const void *gdn_level_v4(void);
#endif
#pragma GCC visibility pop

static gdn_api api;
static int started;

/* The best level that this CPU runs, or the one GDN_LEVEL names; -1 where that is none or more than the CPU runs. */
static int choose_level(void)
{
    const char *name = getenv("GDN_LEVEL");
    int best = gdn_cpu_level(), level = name && *name ? gdn_level_named(name) : best;
    return level <= best ? level : -1;
}

static void start(void)
{
    const void *table = NULL;
    switch (choose_level()) {
    case 0: table = gdn_level_base(); break;
#if defined(__x86_64__) || defined(__i386__)
    case 1: table = gdn_level_v3(); break;
    case 2: table = gdn_level_v4(); break;
#endif
    }
    if (!table)
        return;
    gdn_core_start(table, &api);
    gdn_ring_start(&api);
    started = 1;
}

__attribute__((visibility("default"))) const gdn_api *gdn_get_api(uint32_t abi)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    if (abi != GDN_ABI)
        return NULL;
    pthread_once(&once, start);
    return started ? &api : NULL;
}
