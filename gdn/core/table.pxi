# The C face: the function table, reached as the capsule gdn._core.api and as the address gdn.capi.

cdef gdn_api api
memset(&api, 0, sizeof(api))
api.abi = GDN_ABI
api.size = sizeof(gdn_api)
api.gated_delta_net = c_gated_delta_net
api.gated_delta_net_scratch_size = c_gated_delta_net_scratch_size
api.causal_conv1d = c_causal_conv1d
api.causal_conv1d_scratch_size = c_causal_conv1d_scratch_size
api.l2_norm = c_l2_norm
api.rms_norm_gated = c_rms_norm_gated
api.decay_gate = c_decay_gate
api.solve_tri = c_solve_tri
api.status_string = c_status_string

capi = <uintptr_t>&api
globals()["api"] = PyCapsule_New(&api, "gdn._core.api", NULL)
