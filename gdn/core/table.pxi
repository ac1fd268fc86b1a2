# The start of either face, and the function table: the capsule gdn._core.api and the address gdn.capi.
#
# Needs: parallel.pxi (gdn_affinity, gdn_set_parallel_for, gdn_watch_forks, gdn_within_quota), dispatch.pxi (load_level),
# delta.pxi (c_gated_delta_net, c_gated_delta_net_scratch_size), conv.pxi (c_causal_conv1d, c_causal_conv1d_scratch_size),
# rowwise.pxi (c_decay_gate, c_l2_norm, c_rms_norm_gated, c_solve_tri).

cdef public void gdn_core_start(const void *level_table, gdn_api *table) noexcept nogil:
    """Take a level's kernels and fill this module's members of the table.  Whoever loads the library calls it once, before
    any other call; nothing here needs Python."""
    global level, cpus_usable
    level = <const gdn_level *>level_table
    cpus_usable = gdn_within_quota(gdn_affinity(), "/sys/fs/cgroup", "/proc/self/cgroup")
    gdn_watch_forks()
    table.abi, table.size = GDN_ABI, sizeof(gdn_api)
    table.gated_delta_net, table.gated_delta_net_scratch_size = c_gated_delta_net, c_gated_delta_net_scratch_size
    table.causal_conv1d, table.causal_conv1d_scratch_size = c_causal_conv1d, c_causal_conv1d_scratch_size
    table.l2_norm, table.rms_norm_gated, table.decay_gate = c_l2_norm, c_rms_norm_gated, c_decay_gate
    table.solve_tri, table.status_string = c_solve_tri, c_status_string
    table.set_parallel_for = gdn_set_parallel_for


cdef gdn_api api                  # _ring fills its members when it is imported
gdn_core_start(load_level(), &api)
capi = <uintptr_t>&api
globals()["api"] = PyCapsule_New(&api, "gdn._core.api", NULL)
