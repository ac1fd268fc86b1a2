/* table.h - where the function table comes from.  With Python: start an interpreter, fetch the table, let the GIL go.
 * With GDN_LIBRARY defined: from libgdn.so, which the program is linked with. */
#ifndef TABLE_H
#define TABLE_H

#ifdef GDN_LIBRARY
#include "gdn.h"

static const gdn_api *fetch_table(void) { return gdn_get_api(GDN_ABI); }

#else
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "gdn.h"

static const gdn_api *fetch_table(void)
{
    const gdn_api *api;
    Py_Initialize();
    api = PyCapsule_Import("gdn._core.api", 0);
    if (api == NULL) {
        PyErr_Print();
        return NULL;
    }
    PyEval_SaveThread();        /* nothing below needs the interpreter; it stays, for the table lives in its module */
    return gdn_api_ok(api) ? api : NULL;
}
#endif

#endif
