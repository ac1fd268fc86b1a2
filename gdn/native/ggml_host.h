/* ggml_host.h - the ggml that loaded the plug-in: its functions, its op numbers, its CPU device. */
#ifndef GDN_GGML_HOST_H
#define GDN_GGML_HOST_H

#include "ggml_abi.h"

/* name, result, arguments of every function used */
#define GDN_GGML_FUNCTIONS(_)                                                             \
    _(op_name, const char *, (int op))                                                    \
    _(op_desc, const char *, (const tensor *))                                            \
    _(graph_n_nodes, int, (cgraph *))                                                     \
    _(graph_nodes, tensor **, (cgraph *))                                                 \
    _(graph_view, cgraph_value, (cgraph *, int, int))                                     \
    _(can_fuse_subgraph_ext, bool, (const cgraph *, const int *, int, const int *, const int *, int)) \
    _(log_internal, void, (int level, const char *format, ...))                           \
    _(tensor_overhead, size_t, (void))                                                    \
    _(backend_reg_count, size_t, (void))                                                  \
    _(backend_reg_get, registry *, (size_t))                                              \
    _(backend_reg_dev_count, size_t, (registry *))                                        \
    _(backend_reg_dev_get, device *, (registry *, size_t))                                \
    _(backend_dev_type, int, (device *))                                                  \
    _(backend_dev_init, backend *, (device *, const char *))                              \
    _(backend_dev_supports_op, bool, (device *, const tensor *))                          \
    _(backend_dev_supports_buft, bool, (device *, void *))                                \
    _(backend_graph_compute, int, (backend *, cgraph *))                                  \
    _(backend_free, void, (backend *))                                                    \
    _(backend_buffer_get_type, void *, (void *))                                          \
    _(backend_buft_is_host, bool, (void *))                                               \
    _(backend_cpu_buffer_type, void *, (void))                                            \
    _(backend_cpu_buffer_from_ptr, void *, (void *, size_t))

/* name and ggml's own name of every op that is told apart */
#define GDN_GGML_OPS(_)                                                                   \
    _(NONE) _(RESHAPE) _(VIEW) _(PERMUTE) _(TRANSPOSE) _(GATED_DELTA_NET) _(SSM_CONV) _(CONCAT) _(CPY) _(CONT)       \
    _(GET_ROWS) _(SCALE) _(UNARY) _(RMS_NORM) _(L2_NORM) _(REPEAT) _(MUL_MAT) _(ADD) _(MUL) _(EXP) _(CLAMP)

typedef struct host {
#define _(name, result, arguments) result (*name) arguments;
    GDN_GGML_FUNCTIONS(_)
#undef _
    struct {
#define _(name) int name;
        GDN_GGML_OPS(_)
#undef _
    } op;
    int       api_version;
    int       n_slots;                  /* functions of its ggml_backend_i */
    device   *cpu;
    void    (*set_n_threads)(backend *, int);
} host;

extern host ggml;
bool host_find(void *caller);      /* fill it from the ggml that calls; false after a line in its log */
#endif
