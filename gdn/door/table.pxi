# The C face: the function table, reached as the capsule gdn._core.api and as the address gdn.capi.

cdef gdn_api api
memset(&api, 0, sizeof(api))
api.abi = GDN_ABI
api.size = sizeof(gdn_api)
api.gated_delta_net = c_gated_delta_net
api.gated_delta_net_scratch_size = c_gated_delta_net_scratch_size
api.status_string = c_status_string

capi = <uintptr_t>&api
globals()["api"] = PyCapsule_New(&api, "gdn._core.api", NULL)
