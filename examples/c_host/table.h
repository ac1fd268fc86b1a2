/* table.h - the only contact with Python: start an interpreter, fetch gdn's function table, let the GIL go. */
#ifndef TABLE_H
#define TABLE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "gdn.h"

static gdn_api *fetch_table(void)
{
    gdn_api *api;
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
