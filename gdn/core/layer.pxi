# The kernels of a whole layer, for gdn/layer.py.
#
# Needs: status.pxi (choice), parallel.pxi (threads_argument), states.pxi (CallArrays, call_on_states, fill_rows), delta.pxi
# (MODES, fill_inputs, fill_options, plan_delta), conv.pxi (fill_conv, plan_conv), rowwise.pxi (ACTIVATIONS, GATES,
# plan_gate_arrays, plan_norm_arrays, rowwise_call, run_rowwise), table.pxi (api).

cdef int bind_call(gdn_call *c, CallArrays arrays, step, ndarray cu_seqlens) except -1:
    """Point a call at the cache in c.state, and at the rows and lists that a ring gave a step."""
    cdef ndarray rows_in = step.rows_in
    c.state_out, c.n_seqs = c.state, rows_in.shape[0]
    c.cu_seqlens, arrays.cu_seqlens = <const int64_t *>PyArray_DATA(cu_seqlens), cu_seqlens
    fill_rows(c, arrays, rows_in, step.rows_out)
    arrays.log_in, arrays.log_out, arrays.parents, arrays.checkpoints = step.log_in, step.log_out, step.parents, step.checkpoints
    c.log_in, c.n_log_in = numbers_of(arrays.log_in), 0 if arrays.log_in is None else arrays.log_in.shape[1]
    c.log_out, c.n_log_out = numbers_of(arrays.log_out), 0 if arrays.log_out is None else arrays.log_out.shape[1]
    c.checkpoints, c.n_checkpoints = numbers_of(arrays.checkpoints), 0 if arrays.checkpoints is None else len(arrays.checkpoints)
    c.parents = numbers_of(arrays.parents)
    return 0


cdef inline const int64_t *numbers_of(ndarray x) noexcept:
    return NULL if x is None else <const int64_t *>PyArray_DATA(x)


cdef class LayerKernels:
    """What a layer runs between its matmuls, in place on the arrays of a pass of n tokens.

    The arguments are read here once, `bind` points them at the rows of a step, and the kernels take none: after a
    matmul has emptied the caches, reading the arguments of four public functions takes as long as the small kernels.

    t     arrays of the pass: qkv (1, n, C) and q, k, v, views of it by head; b (1, n, H_v), a (1, n, H_v[, S_k]),
          z (1, n, H_v, S_v)
    """
    cdef CallArrays conv_arrays, delta_arrays
    cdef gdn_conv_args conv
    cdef gdn_delta_net_args delta
    cdef rowwise_call decay, factor, gated_norm
    cdef bint factored            # beta = beta_factor * sigmoid(b); else the delta rule applies the sigmoid itself
    cdef int32_t n_threads
    cdef dict extents             # the layer's, for a refusal
    cdef list kept                # arrays whose addresses C holds

    def __init__(self, layer, t):
        cdef ndarray minus_one = np.full(layer.H_v, -1, np.float32), zero = np.zeros(layer.H_v, np.float32)
        self.factored = layer.beta_factor != 1
        self.conv_arrays, self.delta_arrays = CallArrays(), CallArrays()
        fill_conv(&self.conv, self.conv_arrays, t.qkv, layer.conv, layer.conv_bias, "silu", None, t.qkv, None)
        fill_options(&self.delta, None, layer.head_map, "auto", True, layer.l2_eps, layer.l2_form, not self.factored,
                     None)
        fill_inputs(&self.delta, self.delta_arrays, t.q, t.k, t.v, t.a, t.b, t.v, None)
        plan_gate_arrays(&self.decay, t.a, layer.A, layer.dt_bias, choice(GATES, layer.gate, "gate"), layer.lower_bound,
                         t.a)
        if self.factored:         # a bounded gate with A = -1, no bias and a "bound" above 0 is factor * sigmoid(b)
            plan_gate_arrays(&self.factor, t.b, minus_one, zero, GDN_GATE_BOUNDED, -1.0, t.b)
            self.factor.job.lower_bound = layer.beta_factor
        plan_norm_arrays(&self.gated_norm, t.v, t.z, layer.norm, layer.norm_eps,
                         choice(ACTIVATIONS, layer.activation, "activation"), t.v)
        self.kept = [t.a, layer.A, layer.dt_bias, t.b, minus_one, zero, t.v, t.z, layer.norm]
        self.extents = layer.extents

    def bind(self, step, cu_seqlens, il, mode, n_threads):
        """Point the arguments at layer il of the step's ring.  ValueError: mode, n_threads, or a ring of other extents;
        IndexError: no such layer.  Nothing is written yet."""
        cdef gdn_ring_header *ring = <gdn_ring_header *><uintptr_t>step.ring.address
        cdef gdn_tensor no_log
        self.delta.mode = choice(MODES, mode, "mode")
        self.n_threads = self.conv.n_threads = self.delta.n_threads = threads_argument(n_threads)
        if (ring.H_v != self.delta.v.ne[1] or ring.S_v != self.delta.v.ne[0] or ring.S_k != self.delta.q.ne[0]
                or ring.conv_channels != self.conv.x.ne[0] or ring.conv_width != self.conv.weight.ne[0]
                or (ring.H_k != 0 and (ring.H_k != self.delta.q.ne[1] or bool(ring.per_channel) != self.extents["per_channel"]))
                or (ring.head_map != GDN_HEAD_NONE and ring.head_map != self.delta.head_map)):
            raise ValueError(f"the ring has {step.ring.extents}, the layer {self.extents}")
        step.mark(il)
        api.ring_conv(ring, il, &self.conv.call.state)
        api.ring_ssm(ring, il, &self.delta.call.state)
        memset(&no_log, 0, sizeof(no_log))
        self.delta.log_k = self.delta.log_d = self.delta.log_g = self.conv.log_x = no_log
        if ring.form == GDN_FORM_LOG:
            api.ring_log(ring, il, &self.delta.log_k, &self.delta.log_d, &self.delta.log_g, &self.conv.log_x)
        bind_call(&self.conv.call, self.conv_arrays, step, cu_seqlens)
        bind_call(&self.delta.call, self.delta_arrays, step, cu_seqlens)

    def convolve(self):
        """qkv = silu(conv(qkv)), the ring's window with it."""
        call_on_states(plan_conv, &self.conv, self.conv_arrays, True)

    def gate(self):
        """a = the log decay; b = beta, unless that is sigmoid(b), which the delta rule applies itself."""
        with nogil:
            run_rowwise(&self.decay, self.n_threads)
            if self.factored:
                run_rowwise(&self.factor, self.n_threads)

    def update(self):
        """v = the delta rule's output, the ring's state with it."""
        call_on_states(plan_delta, &self.delta, self.delta_arrays, True)

    def norm(self):
        """v = the gated norm of v."""
        with nogil:
            run_rowwise(&self.gated_norm, self.n_threads)
