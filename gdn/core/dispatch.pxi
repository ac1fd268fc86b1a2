# The level: which instruction set's kernels run, and how this build was made.
#
# Needs: parallel.pxi (GDN_OPENMP), level.pxd (gdn_level).

cdef extern from "cpu.h" nogil:
    int gdn_cpu_level()
    int gdn_level_named(const char *name)
    const char *GDN_LEVELS "gdn_levels"[3]

cdef extern from *:
    """
    #if defined(__clang__)
    #define GDN_COMPILER "clang " __clang_version__
    #else
    #define GDN_COMPILER "gcc " __VERSION__
    #endif
    #ifdef NDEBUG
    #define GDN_DEBUG_BUILD 0
    #else
    #define GDN_DEBUG_BUILD 1
    #endif
    """
    const char *GDN_COMPILER
    const char *GDN_CFLAGS
    int GDN_DEBUG_BUILD

cdef const gdn_level *level       # set at the start


cdef const gdn_level *load_level() except NULL:
    """The table of the best level module this machine runs, or of the one GDN_LEVEL names."""
    cdef bytes name = os.environ.get("GDN_LEVEL", "").encode()
    cdef int best = gdn_cpu_level(), chosen = gdn_level_named(name) if name else best
    if best < 0:
        raise ImportError("gdn needs a processor with the instructions of x86-64-v2 (SSE4.2, POPCNT), this one lacks them")
    if chosen < 0:
        raise ImportError(f"GDN_LEVEL={name.decode()!r} is not one of base, v3, v4")
    if chosen > best:
        raise ImportError(f"GDN_LEVEL={name.decode()} asks for more than this machine runs: its best level is "
                          f"{GDN_LEVELS[best].decode()}")
    text = GDN_LEVELS[chosen].decode()
    try:
        module = importlib.import_module(f"gdn._level_{text}")
    except ModuleNotFoundError as error:
        raise ImportError(f"level {text} is not part of this build of gdn: {error}") from None
    return <const gdn_level *>PyCapsule_GetPointer(module.table, "gdn._level")


def build_record():
    """The loaded level and how the extension modules were compiled, as a dict."""
    return {
        "level": level.name.decode(),
        "best_level": GDN_LEVELS[gdn_cpu_level()].decode(),
        "vector_lanes": level.vl,
        "compiler": GDN_COMPILER.decode().strip(),
        "flags": GDN_CFLAGS.decode(),
        "openmp": bool(GDN_OPENMP),
        "debug": bool(GDN_DEBUG_BUILD),
    }
