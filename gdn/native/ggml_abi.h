/* ggml_abi.h - what of ggml's binary interface the plug-in relies on: the tensor, and the structs of a backend.
 *
 * Functions are looked up by name in the ggml that loads the plug-in, so that one file fits every release whose layouts are
 * these; ggml_host.c checks that they are before anything else is done.  Backend API versions 2 and 3. */
#ifndef GDN_GGML_ABI_H
#define GDN_GGML_ABI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { F32 = 0, I32 = 26 };                                             /* ggml_type */
enum { STATUS_FAILED = -1, STATUS_SUCCESS = 0 };                        /* ggml_status */
enum { DEVICE_CPU = 0, DEVICE_ACCEL = 3 };                              /* ggml_backend_dev_type */
enum { LOG_INFO = 2, LOG_ERROR = 4 };                                   /* ggml_log_level */
enum { MAX_SRC = 10 };

typedef struct tensor {                                                 /* ggml_tensor */
    int32_t  type;
    void    *buffer;
    int64_t  ne[4];
    size_t   nb[4];
    int32_t  op;
    int32_t  op_params[16];
    int32_t  flags;
    struct tensor *src[MAX_SRC];
    struct tensor *view_src;
    size_t   view_offs;
    char    *data;
    char     name[64];
    void    *extra;
    char     padding[8];
} tensor;

typedef struct cgraph cgraph;                                           /* never looked into */
typedef struct { char bytes[512]; } cgraph_value;                       /* room for one returned by value */

enum { BACKEND_SLOTS = 16 };                                            /* functions of ggml_backend_i with 2-d copies; 14 without */
typedef struct backend {                                                /* ggml_backend */
    const uint8_t *guid;
    void *words[BACKEND_SLOTS + 2];                                     /* functions, then device and context */
} backend;

typedef struct device device;
typedef struct registry registry;
typedef struct device_props {
    const char *name, *description;
    size_t memory_free, memory_total;
    int    type;
    const char *device_id;
    bool   async, host_buffer, buffer_from_host_ptr, events, mmap_support;
} device_props;

struct device {                                                         /* ggml_backend_device */
    const char *(*get_name)(device *);
    const char *(*get_description)(device *);
    void   (*get_memory)(device *, size_t *free, size_t *total);
    int    (*get_type)(device *);
    void   (*get_props)(device *, device_props *);
    backend *(*init_backend)(device *, const char *);
    void  *(*get_buffer_type)(device *);
    void  *(*get_host_buffer_type)(device *);
    void  *(*buffer_from_host_ptr)(device *, void *, size_t, size_t);
    bool   (*supports_op)(device *, const tensor *);
    bool   (*supports_buft)(device *, void *);
    bool   (*offload_op)(device *, const tensor *);
    void  *(*event_new)(device *);
    void   (*event_free)(device *, void *);
    void   (*event_synchronize)(device *, void *);
    registry *reg;
    void  *context;
};

struct registry {                                                       /* ggml_backend_reg */
    int api_version;
    const char *(*get_name)(registry *);
    size_t   (*get_device_count)(registry *);
    device  *(*get_device)(registry *, size_t);
    void    *(*get_proc_address)(registry *, const char *);
    void    *context;
};
#endif
