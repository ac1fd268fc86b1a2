# CRC-32.

cdef uint32_t crc_table[8][256]


cdef void fill_crc_table() noexcept:
    """CRC-32 as zlib's: table k advances a byte by k more zero bytes, so that eight bytes are done at a time."""
    cdef uint32_t i, k, c
    for i in range(256):
        c = i
        for k in range(8):
            c = (c >> 1) ^ (0xEDB88320 if c & 1 else 0)
        crc_table[0][i] = c
    for k in range(1, 8):
        for i in range(256):
            c = crc_table[k - 1][i]
            crc_table[k][i] = (c >> 8) ^ crc_table[0][c & 0xff]

fill_crc_table()


cdef uint32_t crc32(const uint8_t *p, size_t n) noexcept nogil:
    cdef uint32_t c = 0xffffffff
    while n >= 8:
        c ^= p[0] | <uint32_t>p[1] << 8 | <uint32_t>p[2] << 16 | <uint32_t>p[3] << 24
        c = (crc_table[7][c & 0xff] ^ crc_table[6][(c >> 8) & 0xff] ^ crc_table[5][(c >> 16) & 0xff]
             ^ crc_table[4][c >> 24] ^ crc_table[3][p[4]] ^ crc_table[2][p[5]] ^ crc_table[1][p[6]]
             ^ crc_table[0][p[7]])
        p += 8
        n -= 8
    while n > 0:
        c = (c >> 8) ^ crc_table[0][(c ^ p[0]) & 0xff]
        p += 1
        n -= 1
    return ~c
