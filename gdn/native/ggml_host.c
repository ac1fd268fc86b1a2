/* ggml_host.c - find the ggml that loaded the plug-in, and see that its structs are the ones declared in ggml_abi.h. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "ggml_host.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

host ggml;

static bool refuse(const char *what, const char *detail)
{
    const char *format = "gdn: the plug-in does not fit this ggml: %s%s\n";
    if (ggml.log_internal)
        ggml.log_internal(LOG_ERROR, format, what, detail);
    else
        fprintf(stderr, format, what, detail);
    return false;
}

static void *library;                   /* what called the plug-in */

/* A function of that library or of what it is linked with, else of the whole process. */
static void *symbol(const char *name)
{
    void *found = library ? dlsym(library, name) : NULL;
    return found ? found : dlsym(RTLD_DEFAULT, name);
}

static bool find_functions(void *caller)
{
    Dl_info info;
    const char *missing = NULL;
    library = dladdr(caller, &info) ? dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD) : NULL;
    *(void **)&ggml.log_internal = symbol("ggml_log_internal");
#define _(name, result, arguments)                                          \
    if (!(*(void **)&ggml.name = symbol("ggml_" #name)))           \
        missing = "ggml_" #name;
    GDN_GGML_FUNCTIONS(_)
#undef _
    return missing ? refuse("it has no ", missing) : true;
}

/* Numbers of ops differ between releases, their names do not; GLU is the last. */
static bool find_ops(void)
{
    const char *name = "";
    memset(&ggml.op, 0xff, sizeof(ggml.op));
    for (int op = 0; op < 256 && strcmp(name, "GLU") != 0; op++) {
        name = ggml.op_name(op);
#define _(wanted)                        \
    if (strcmp(name, #wanted) == 0)      \
        ggml.op.wanted = op;
        GDN_GGML_OPS(_)
#undef _
    }
    return ggml.op.GATED_DELTA_NET >= 0 && ggml.op.SSM_CONV >= 0 ? true : refuse("it has no op ", "GATED_DELTA_NET");
}

static device *find_cpu(void)
{
    for (size_t i = 0; i < ggml.backend_reg_count(); i++) {
        registry *reg = ggml.backend_reg_get(i);
        for (size_t j = 0; j < ggml.backend_reg_dev_count(reg); j++)
            if (ggml.backend_dev_type(ggml.backend_reg_dev_get(reg, j)) == DEVICE_CPU)
                return ggml.backend_reg_dev_get(reg, j);
    }
    return NULL;
}

/* Where the CPU backend keeps its device tells how many functions ggml_backend_i has. */
static bool check_structs(void)
{
    registry *reg = ggml.cpu->reg;
    backend *cpu;
    bool known = false;
    for (size_t i = 0; i < ggml.backend_reg_count(); i++)
        known = known || ggml.backend_reg_get(i) == reg;
    if (!known)
        return refuse("its ggml_backend_device is another", "");
    ggml.api_version = reg->api_version;
    if (ggml.api_version != 2 && ggml.api_version != 3)
        return refuse("its backend API version is neither 2 nor 3", "");
    cpu = ggml.backend_dev_init(ggml.cpu, NULL);
    if (!cpu)
        return refuse("its CPU backend does not start", "");
    for (ggml.n_slots = BACKEND_SLOTS; ggml.n_slots >= BACKEND_SLOTS - 2 && cpu->words[ggml.n_slots] != (void *)ggml.cpu;)
        ggml.n_slots -= 2;
    ggml.backend_free(cpu);
    if (ggml.n_slots < BACKEND_SLOTS - 2)
        return refuse("its ggml_backend is another", "");
    *(void **)&ggml.set_n_threads = reg->get_proc_address ? reg->get_proc_address(reg, "ggml_backend_set_n_threads") : NULL;
    return true;
}

/* A tensor made by this ggml has its fields where they are looked for. */
static bool check_tensor(void)
{
    typedef struct { size_t size; void *buffer; bool no_alloc; } params;
    char memory[4096];
    void *(*init)(params) = NULL;
    tensor *(*new_tensor)(void *, int, int64_t, int64_t) = NULL, *(*view)(void *, tensor *, int64_t, size_t) = NULL;
    tensor *(*set_name)(tensor *, const char *) = NULL, *(*add)(void *, tensor *, tensor *) = NULL, *t, *v, *sum;
    void (*release)(void *) = NULL, *context;
    bool same;
    *(void **)&init = symbol("ggml_init");
    *(void **)&release = symbol("ggml_free");
    *(void **)&new_tensor = symbol("ggml_new_tensor_2d");
    *(void **)&view = symbol("ggml_view_1d");
    *(void **)&set_name = symbol("ggml_set_name");
    *(void **)&add = symbol("ggml_add");
    if (!init || !release || !new_tensor || !view || !set_name || !add)
        return refuse("it has no ", "ggml_init");
    context = init((params){ sizeof(memory), memory, true });
    t = new_tensor(context, F32, 5, 7);
    v = view(context, t, 3, 8);
    sum = add(context, set_name(t, "name"), t);
    same = t->type == F32 && t->ne[0] == 5 && t->ne[1] == 7 && t->ne[3] == 1 && t->nb[1] == 20 && t->data == NULL
        && strcmp(t->name, "name") == 0 && v->op == ggml.op.VIEW && v->view_src == t && v->view_offs == 8 && v->src[0] == t
        && sum->op == ggml.op.ADD && sum->src[1] == t && sum->src[2] == NULL
        && ggml.tensor_overhead() - sizeof(tensor) <= 64;
    release(context);
    return same ? true : refuse("its ggml_tensor is another", "");
}

bool host_find(void *caller)
{
    if (!find_functions(caller) || !find_ops())
        return false;
    ggml.cpu = find_cpu();
    if (!ggml.cpu)
        return refuse("it has no CPU backend yet: load that first", "");
    return check_structs() && check_tensor();
}
