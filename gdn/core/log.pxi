# The token log of a call on states, its trees and checkpoints: checks of the lists, and their Python face.
#
# Needs: status.pxi (check_tensor), cache_rows.pxi, states.pxi (CallArrays, integers).

cdef bint has_lists(const gdn_call *a) noexcept nogil:
    return a.log_in != NULL or a.log_out != NULL or a.parents != NULL or a.checkpoints != NULL


cdef int64_t most_entries(const gdn_call *a) noexcept nogil:
    """The most that a sequence stands on."""
    cdef int64_t i, most = 0
    for i in range(a.n_seqs):
        most = max(most, entries_of(a, i))
    return most


cdef gdn_status check_log_tensor(const state_call *c, const char *name, const gdn_tensor *t, int64_t ne0, int64_t ne1,
                                 int64_t ne2) noexcept nogil:
    """A tensor of entries, if given; written where the call has a log_out."""
    if t.data == NULL:
        return GDN_OK
    return check_tensor(&c.error, name, t, ne0, ne1, ne2, 1, c.args.log_out != NULL)


cdef gdn_status check_lists(const state_call *c, const char *tensor, bint given, int64_t n_entries) noexcept nogil:
    """Every index of a call's lists; `tensor` names the entries, of which there are n_entries if they are given."""
    cdef const gdn_call *a = c.args
    cdef const error_buffer *error = &c.error
    if (a.log_in == NULL and a.n_log_in != 0) or a.n_log_in < 0:
        return fail(error, GDN_ERR_SHAPE, "log_in has no %lld entries a sequence", a.n_log_in)
    if (a.log_out == NULL and a.n_log_out != 0) or a.n_log_out < 0:
        return fail(error, GDN_ERR_SHAPE, "log_out has no %lld entries a sequence", a.n_log_out)
    if (a.checkpoints == NULL and a.n_checkpoints != 0) or a.n_checkpoints < 0:
        return fail(error, GDN_ERR_SHAPE, "there are no %lld checkpoints", a.n_checkpoints)
    if not given and (a.log_in != NULL or a.log_out != NULL):
        return fail(error, GDN_ERR_NULL, "%s needs a log: %s is not given", "log_in" if a.log_in != NULL else "log_out", tensor)
    return (check_log_in(c, n_entries) or check_log_out(c, n_entries) or check_entries_once(c) or check_parents(c)
            or check_checkpoints(c))


cdef gdn_status check_log_in(const state_call *c, int64_t n_entries) noexcept nogil:
    cdef const gdn_call *a = c.args
    cdef int64_t i, j, entry
    if a.log_in == NULL:
        return GDN_OK
    for i in range(a.n_seqs):
        for j in range(a.n_log_in):
            entry = a.log_in[i * a.n_log_in + j]
            if not -1 <= entry < n_entries:
                return fail(&c.error, GDN_ERR_ROW, "log_in[%lld, %lld] is %lld, the log has %lld entries", i, j, entry, n_entries)
            if entry >= 0 and j > 0 and a.log_in[i * a.n_log_in + j - 1] < 0:
                return fail(&c.error, GDN_ERR_VALUE, "log_in[%lld, %lld] is %lld behind a -1, which ends a sequence's entries",
                            i, j, entry)
    return GDN_OK


cdef gdn_status check_log_out(const state_call *c, int64_t n_entries) noexcept nogil:
    cdef const gdn_call *a = c.args
    cdef int64_t i, j, entry
    if a.log_out == NULL:
        return GDN_OK
    for i in range(a.n_seqs):
        if a.n_log_out < sequence_length(c, i):
            return fail(&c.error, GDN_ERR_SHAPE, "log_out has room for %lld tokens, sequence %lld has %lld", a.n_log_out, i,
                        sequence_length(c, i))
        for j in range(a.n_log_out):
            entry = a.log_out[i * a.n_log_out + j]
            if not -1 <= entry < n_entries:
                return fail(&c.error, GDN_ERR_ROW, "log_out[%lld, %lld] is %lld, the log has %lld entries", i, j, entry,
                            n_entries)
    return GDN_OK


cdef inline int64_t entry_used(const state_call *c, int64_t i, int64_t j) noexcept nogil:
    """The j-th entry that sequence i reads, then those that its tokens write; -1 where there is none."""
    cdef const gdn_call *a = c.args
    if j < a.n_log_in:
        return a.log_in[i * a.n_log_in + j]
    j -= a.n_log_in
    return a.log_out[i * a.n_log_out + j] if a.log_out != NULL and j < sequence_length(c, i) else -1


cdef gdn_status check_entries_once(const state_call *c) noexcept nogil:
    """No entry is read or written twice, or both."""
    cdef const gdn_call *a = c.args
    cdef row_window w
    cdef int64_t i, j, lowest, highest, n = a.n_log_in + a.n_log_out
    w.stop = 0
    while n > 0:
        lowest, highest = INT64_MAX, -1
        for i in range(a.n_seqs):
            for j in range(n):
                if entry_used(c, i, j) >= w.stop:
                    lowest = min(lowest, entry_used(c, i, j))
                    highest = max(highest, entry_used(c, i, j))
        if highest < 0:
            break
        open_window(&w, lowest, highest)
        for i in range(a.n_seqs):
            for j in range(n):
                mark_row(&w, entry_used(c, i, j))
        if w.twice >= 0:
            return fail(&c.error, GDN_ERR_TWICE, "log_in, log_out: entry %lld is named twice", w.twice)
    return GDN_OK


cdef gdn_status check_parents(const state_call *c) noexcept nogil:
    cdef const gdn_call *a = c.args
    cdef int64_t i, t, parent, first
    if a.parents == NULL:
        return GDN_OK
    for i in range(a.n_seqs):
        first = i * c.n_tokens if a.cu_seqlens == NULL else a.cu_seqlens[i]
        for t in range(sequence_length(c, i)):
            parent = a.parents[first + t]
            if not -1 <= parent < t:
                return fail(&c.error, GDN_ERR_VALUE, "parents: token %lld of sequence %lld continues %lld, no earlier one", t, i,
                            parent)
        for t in range(a.n_snapshots):
            if row_out(c, i, t) >= 0:
                return fail(&c.error, GDN_ERR_VALUE, "parents: a tree has no last state, rows_out[%lld, %lld] is %lld", i, t,
                            row_out(c, i, t))
    return GDN_OK


cdef gdn_status check_checkpoints(const state_call *c) noexcept nogil:
    cdef const gdn_call *a = c.args
    cdef const int64_t *checkpoint
    cdef int64_t i, most
    if a.n_checkpoints > 0 and c.state_out.data == NULL:
        return fail(&c.error, GDN_ERR_NULL, "checkpoints need a state_out")
    for i in range(a.n_checkpoints):
        checkpoint = a.checkpoints + 3 * i
        if not 0 <= checkpoint[0] < a.n_seqs:
            return fail(&c.error, GDN_ERR_ROW, "checkpoints[%lld] is of sequence %lld, the call has %lld", i, checkpoint[0],
                        a.n_seqs)
        most = 0 if a.parents != NULL else sequence_length(c, checkpoint[0])
        if not -entries_of(a, checkpoint[0]) <= checkpoint[1] <= most:
            return fail(&c.error, GDN_ERR_VALUE,
                        "checkpoints[%lld] is after %lld tokens of sequence %lld, it must be %lld to %lld", i, checkpoint[1],
                        checkpoint[0], -entries_of(a, checkpoint[0]), most)
        if not 0 <= checkpoint[2] < c.state_out.ne[3]:
            return fail(&c.error, GDN_ERR_ROW, "checkpoints[%lld] goes to row %lld, the cache has %lld rows", i, checkpoint[2],
                        c.state_out.ne[3])
    return check_written_once(c) if a.n_checkpoints > 0 else GDN_OK


# ---- the Python face -------------------------------------------------------------------------------------------

cdef object MOST_EXTENT = 2**48 - 1


cdef class TokenLog:
    """One layer's token log: entries from which the states since a kept one follow, S <- exp(g) S + k d^T.

    k           (n_entries, H_k, S_k): the key as the rule used it, normalised if the call normalises
    d           (n_entries, H_v, S_v): beta * (v - S^T k), S decayed
    g           (n_entries, H_v) scalar gate, or (n_entries, H_v, S_k) per key channel: natural log of the decay
    x           (n_entries, channels) the convolution's input, or None

    float32, any strides, any memory: nothing is copied, and calls with ``log_out`` write entries in place.  Which entries
    a sequence stands on is told by index lists (``log_in``), so entries never move.  Raises ValueError (shape),
    TypeError (type).
    """
    cdef readonly ndarray k, d, g, x

    def __init__(self, k, d, g, x=None):
        self.k, self.d = fit(k, "k", 3, False), fit(d, "d", 3, False)
        self.g = as_array(g, "g", False)
        if isinstance(g, Tensor) and self.g.shape[0] == 1 and self.g.ndim == 4:
            self.g = self.g[0, 0] if self.g.shape[1] == 1 and self.g.shape[2] == self.k.shape[0] else self.g[0]
        if self.g.ndim not in (2, 3):
            raise ValueError(f"g must have shape (n_entries, H_v) or (n_entries, H_v, S_k), got {(<object>self.g).shape}")
        self.x = None if x is None else fit(x, "x", 2, False)
        for name, y in (("d", self.d), ("g", self.g), ("x", self.x)):
            if y is not None and y.shape[0] != self.k.shape[0]:
                raise ValueError(f"{name} has {y.shape[0]} entries, k has {self.k.shape[0]}")
        if self.g.shape[1] != self.d.shape[1]:
            raise ValueError(f"g has {self.g.shape[1]} heads, d has {self.d.shape[1]}")
        if self.g.ndim == 3 and self.g.shape[2] not in (1, self.k.shape[2]):
            raise ValueError(f"g has {self.g.shape[2]} channels, k has {self.k.shape[2]}")

    @staticmethod
    def allocate(n_entries, *, H_k, H_v, S_k, S_v, per_channel=False, channels=0):
        """A log of n_entries of zeros; per_channel as g is in the calls, channels of the convolution, 0 = no x."""
        n = integer(n_entries, "n_entries", 0, MOST_EXTENT)
        H_k, H_v, S_k, S_v = (integer(y, name, 1, MOST_EXTENT)
                              for y, name in ((H_k, "H_k"), (H_v, "H_v"), (S_k, "S_k"), (S_v, "S_v")))
        channels = integer(channels, "channels", 0, MOST_EXTENT)
        g = (n, H_v, S_k) if flag(per_channel, "per_channel") else (n, H_v)
        return TokenLog(np.zeros((n, H_k, S_k), np.float32), np.zeros((n, H_v, S_v), np.float32), np.zeros(g, np.float32),
                        np.zeros((n, channels), np.float32) if channels else None)

    @property
    def n_entries(self):
        """Number of entries."""
        return self.k.shape[0]

    def __repr__(self):
        return (f"TokenLog({self.k.shape[0]} entries, k {(<object>self.k).shape[1:]}, d {(<object>self.d).shape[1:]}, "
                f"g {(<object>self.g).shape[1:]}, x {None if self.x is None else (<object>self.x).shape[1:]})")


cdef int fill_log(gdn_call *c, CallArrays arrays, log, log_in, log_out, parents, checkpoints, int64_t n_tokens) except -1:
    """The lists; parents (n_seqs, n_tokens), packed (n_tokens,)."""
    cdef tuple shape
    if log is None and log_in is None and log_out is None and parents is None and checkpoints is None:
        return 0
    shape = (c.n_seqs, n_tokens)
    if c.cu_seqlens != NULL:
        shape = (n_tokens,)
    if log is not None and not isinstance(log, TokenLog):
        raise TypeError(f"log must be a TokenLog, got {type(log).__name__}")
    for name, given in (("log_in", log_in), ("log_out", log_out)):
        if given is not None and log is None:
            raise ValueError(f"{name} is given without a log")
    if log_in is not None:
        arrays.log_in = list_argument(log_in, "log_in", c.n_seqs)
        c.log_in, c.n_log_in = <const int64_t *>PyArray_DATA(arrays.log_in), arrays.log_in.shape[1]
    if log_out is not None:
        arrays.log_out = list_argument(log_out, "log_out", c.n_seqs)
        c.log_out, c.n_log_out = <const int64_t *>PyArray_DATA(arrays.log_out), arrays.log_out.shape[1]
    if parents is not None:
        arrays.parents = integers(parents, "parents", ValueError)
        if (<object>arrays.parents).shape != shape:
            raise ValueError(f"parents must have shape {shape}, got {(<object>arrays.parents).shape}")
        c.parents = <const int64_t *>PyArray_DATA(arrays.parents)
    if checkpoints is not None:
        arrays.checkpoints = integers(checkpoints, "checkpoints", IndexError)
        if arrays.checkpoints.size == 0:
            arrays.checkpoints = np.empty((0, 3), np.int64)
        if arrays.checkpoints.ndim != 2 or arrays.checkpoints.shape[1] != 3:
            raise ValueError(f"checkpoints must be (sequence, n, row) each, got shape {(<object>arrays.checkpoints).shape}")
        c.checkpoints, c.n_checkpoints = <const int64_t *>PyArray_DATA(arrays.checkpoints), arrays.checkpoints.shape[0]
    arrays.inputs += (("log_in", arrays.log_in, False), ("log_out", arrays.log_out, False),
                      ("parents", arrays.parents, False), ("checkpoints", arrays.checkpoints, False))
    return 0


cdef ndarray list_argument(obj, str name, int64_t n_seqs):
    """Entries (n_seqs, any number); one sequence's may lack the first axis."""
    cdef ndarray x = integers(obj, name, IndexError)
    if x.ndim == 1 and n_seqs == 1:
        x = x.reshape(1, -1)
    if x.ndim != 2 or x.shape[0] != n_seqs:
        raise ValueError(f"{name} must have shape ({n_seqs}, any number), got {(<object>x).shape}")
    return x


cdef int fill_log_tensor(ndarray x, str name, CallArrays arrays, gdn_tensor *t) except -1:
    """One of a log's tensors: an input, and an output too if the call writes entries."""
    if arrays.log_out is not None and not PyArray_ISWRITEABLE(x):
        raise ValueError(f"log.{name} is read-only, log_out writes to it")
    to_c(x, t)
    if arrays.log_out is None:
        arrays.inputs += ((f"log.{name}", x, False),)
    else:
        arrays.log_tensors += ((f"log.{name}", x, False),)
    return 0
