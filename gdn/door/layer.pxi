# The kernels of a whole layer, for gdn/layer.py.

cdef class LayerKernels:
    """What a layer runs between its matmuls, in place on the arrays of a pass of n tokens.

    The arguments are read here once, `bind` points them at the rows of a step, and the kernels take none: after a
    matmul has emptied the caches, reading the arguments of four public functions takes as long as the small kernels.

    t     arrays of the pass: qkv (1, n, C) and q, k, v, views of it by head; b (1, n, H_v), a (1, n, H_v[, S_k]),
          z (1, n, H_v, S_v)
    """
    cdef ConvArrays conv_arrays
    cdef DeltaArrays delta_arrays
    cdef gdn_conv_args conv
    cdef gdn_delta_net_args delta
    cdef gate_tensors decay, factor
    cdef gdn_tensor v, z, weight
    cdef float norm_eps, lower_bound, beta_factor
    cdef bint bounded
    cdef int32_t activation, n_threads
    cdef dict extents             # the layer's, for a refusal
    cdef list kept                # arrays whose addresses C holds

    def __init__(self, layer, t):
        cdef ndarray minus_one = np.full(layer.H_v, -1, np.float32), zero = np.zeros(layer.H_v, np.float32)
        self.beta_factor = layer.beta_factor
        self.conv_arrays, self.delta_arrays = ConvArrays(), DeltaArrays()
        fill_conv(&self.conv, self.conv_arrays, t.qkv, layer.conv, layer.conv_bias, "silu", None, t.qkv, None)
        fill_options(&self.delta, None, layer.head_map, "auto", True, layer.l2_eps, layer.l2_form,
                     self.beta_factor == 1, None)
        fill_inputs(&self.delta, self.delta_arrays, t.q, t.k, t.v, t.a, t.b, t.v, None)
        self.bounded = layer.lower_bound is not None
        self.lower_bound = layer.lower_bound if self.bounded else 0
        # The bounded gate at A = -1 and no bias is factor * sigmoid(b), in one pass.
        self.kept = [fill_gate(&self.decay, t.a, layer.A, layer.dt_bias, t.a), layer.A,
                     fill_gate(&self.factor, t.b, minus_one, zero, t.b), minus_one, t.z, layer.norm]
        to_c(t.v, &self.v)
        to_c(t.z, &self.z)
        to_c(layer.norm, &self.weight)
        self.norm_eps, self.activation = layer.norm_eps, choice(ACTIVATIONS, layer.activation, "activation")
        self.extents = layer.extents

    def bind(self, step, cu_seqlens, il, mode, n_threads):
        """Point the arguments at layer il of the step's ring.  ValueError: mode, n_threads, or a ring of other extents;
        IndexError: no such layer.  Nothing is written yet."""
        cdef gdn_ring_header *ring = <gdn_ring_header *><uintptr_t>step.ring.address
        cdef ndarray rows_in = step.rows_in, rows_out = step.rows_out, ends = cu_seqlens
        self.delta.mode = choice(MODES, mode, "mode")
        self.n_threads = self.conv.n_threads = self.delta.n_threads = threads_argument(n_threads)
        if (ring.H_v != self.delta.v.ne[1] or ring.S_v != self.delta.v.ne[0] or ring.S_k != self.delta.q.ne[0]
                or ring.conv_channels != self.conv.x.ne[0] or ring.conv_width != self.conv.weight.ne[0]):
            raise ValueError(f"the ring has {step.ring.extents}, the layer {self.extents}")
        if type(il) is not int or not 0 <= il < ring.n_layers:
            step.ring.ssm(il)                 # says what is wrong with it
        api.ring_conv(ring, il, &self.conv.state)
        api.ring_ssm(ring, il, &self.delta.state)
        self.conv.state_out, self.delta.state_out = self.conv.state, self.delta.state
        self.conv_arrays.rows_in = self.delta_arrays.rows_in = rows_in
        self.conv_arrays.rows_out = self.delta_arrays.rows_out = rows_out
        self.conv_arrays.cu_seqlens = self.delta_arrays.cu_seqlens = ends
        self.conv.rows_in = self.delta.rows_in = <const int64_t *>PyArray_DATA(rows_in)
        self.conv.rows_out = self.delta.rows_out = <const int64_t *>PyArray_DATA(rows_out)
        self.conv.cu_seqlens = self.delta.cu_seqlens = <const int64_t *>PyArray_DATA(ends)
        self.conv.n_seqs = self.delta.n_seqs = rows_in.shape[0]
        self.conv.n_slots = self.delta.n_slots = rows_out.shape[1]

    def convolve(self):
        """qkv = silu(conv(qkv)), the ring's window with it."""
        call_conv(&self.conv, self.conv_arrays, "cache", "cache")

    def gate(self):
        """a = the log decay; b = beta, unless that is sigmoid(b), which the delta rule applies itself."""
        cdef gdn_status status
        cdef char message[256]
        message[0] = 0
        with nogil:
            status = do_decay_gate(&self.decay.a, &self.decay.A, &self.decay.dt_bias,
                                   &self.lower_bound if self.bounded else NULL, &self.decay.out, self.n_threads, False,
                                   message, sizeof(message))
            if status == GDN_OK and self.beta_factor != 1:
                status = do_decay_gate(&self.factor.a, &self.factor.A, &self.factor.dt_bias, &self.beta_factor,
                                       &self.factor.out, self.n_threads, False, message, sizeof(message))
        if status != GDN_OK:
            raise_status(status, message)

    def update(self):
        """v = the delta rule's output, the ring's state with it."""
        call_delta(&self.delta, self.delta_arrays, "cache", "cache")

    def norm(self):
        """v = the gated norm of v."""
        cdef gdn_status status
        cdef char message[256]
        message[0] = 0
        with nogil:
            status = do_rms_norm_gated(&self.v, &self.z, &self.weight, self.norm_eps, self.activation, &self.v,
                                       self.n_threads, False, message, sizeof(message))
        if status != GDN_OK:
            raise_status(status, message)
