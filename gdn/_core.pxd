# What _core shares with _ring: the table whose ring members _ring fills.

from gdn._c cimport gdn_api

cdef gdn_api api        # behind gdn.capi and the capsule
