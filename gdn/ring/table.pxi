# The table's ring members.
#
# Needs: layout.pxi (ring_conv, ring_ssm), slots.pxi (ring_acquire, ring_init, ring_position, ring_rollback, ring_size),
# steps.pxi (ring_abort, ring_begin, ring_commit), save.pxi (ring_copy, ring_save, ring_save_size, ring_save_state_size).

cdef public void gdn_ring_start(gdn_api *t) noexcept nogil:
    t.ring_size, t.ring_init, t.ring_attach = ring_size, ring_init, ring_attach
    t.ring_acquire, t.ring_release = ring_acquire, ring_release
    t.ring_begin, t.ring_commit, t.ring_abort, t.ring_accept = ring_begin, ring_commit, ring_abort, ring_accept
    t.ring_rollback, t.ring_reset = ring_rollback, ring_reset
    t.ring_position, t.ring_max_rollback = ring_position, ring_max_rollback
    t.ring_copy, t.ring_copy_state = ring_copy, ring_copy_state
    t.ring_save_size, t.ring_save, t.ring_load = ring_save_size, ring_save, ring_load
    t.ring_save_state_size, t.ring_save_state = ring_save_state_size, ring_save_state
    t.ring_conv, t.ring_ssm, t.ring_log = ring_conv, ring_ssm, ring_log
