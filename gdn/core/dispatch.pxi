# How this build was made, compiled in: what show_config() tells.

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


def build_record():
    """The loaded level and how the extension modules were compiled, as a dict."""
    return {
        "level": level.name.decode(),
        "best_level": LEVELS[gdn_cpu_level()],
        "vector_lanes": level.vl,
        "compiler": GDN_COMPILER.decode().strip(),
        "flags": GDN_CFLAGS.decode(),
        "openmp": bool(GDN_OPENMP),
        "debug": bool(GDN_DEBUG_BUILD),
    }
