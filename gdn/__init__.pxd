# `cimport gdn` for Cython users: the C face.

from gdn._c cimport *
