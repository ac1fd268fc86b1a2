/* crc.h - CRC-32 as zlib's, eight bytes at a time.  The tables are constants: nothing has to fill them. */
#ifndef GDN_CRC_H
#define GDN_CRC_H

#include <stddef.h>
#include <stdint.h>

/* A checksum of a byte is the exclusive or of its bits' checksums, so eight numbers make a table. */
#define GDN_CRC_1(i, a, b, c, d, e, f, g, h)                                                                          \
    (((i) & 1 ? a : 0) ^ ((i) & 2 ? b : 0) ^ ((i) & 4 ? c : 0) ^ ((i) & 8 ? d : 0) ^ ((i) & 16 ? e : 0)               \
     ^ ((i) & 32 ? f : 0) ^ ((i) & 64 ? g : 0) ^ ((i) & 128 ? h : 0))
#define GDN_CRC_4(i, ...)   GDN_CRC_1(i, __VA_ARGS__), GDN_CRC_1(i + 1, __VA_ARGS__), GDN_CRC_1(i + 2, __VA_ARGS__), \
                            GDN_CRC_1(i + 3, __VA_ARGS__)
#define GDN_CRC_16(i, ...)  GDN_CRC_4(i, __VA_ARGS__), GDN_CRC_4(i + 4, __VA_ARGS__), GDN_CRC_4(i + 8, __VA_ARGS__), \
                            GDN_CRC_4(i + 12, __VA_ARGS__)
#define GDN_CRC_64(i, ...)  GDN_CRC_16(i, __VA_ARGS__), GDN_CRC_16(i + 16, __VA_ARGS__), GDN_CRC_16(i + 32, __VA_ARGS__), \
                            GDN_CRC_16(i + 48, __VA_ARGS__)
#define GDN_CRC_TABLE(...)  { GDN_CRC_64(0, __VA_ARGS__), GDN_CRC_64(64, __VA_ARGS__), GDN_CRC_64(128, __VA_ARGS__), \
                              GDN_CRC_64(192, __VA_ARGS__) }

/* Table k is of a byte with k zero bytes behind it. */
static const uint32_t gdn_crc_table[8][256] = {
    GDN_CRC_TABLE(0x77073096u, 0xee0e612cu, 0x076dc419u, 0x0edb8832u, 0x1db71064u, 0x3b6e20c8u, 0x76dc4190u, 0xedb88320u),
    GDN_CRC_TABLE(0x191b3141u, 0x32366282u, 0x646cc504u, 0xc8d98a08u, 0x4ac21251u, 0x958424a2u, 0xf0794f05u, 0x3b83984bu),
    GDN_CRC_TABLE(0x01c26a37u, 0x0384d46eu, 0x0709a8dcu, 0x0e1351b8u, 0x1c26a370u, 0x384d46e0u, 0x709a8dc0u, 0xe1351b80u),
    GDN_CRC_TABLE(0xb8bc6765u, 0xaa09c88bu, 0x8f629757u, 0xc5b428efu, 0x5019579fu, 0xa032af3eu, 0x9b14583du, 0xed59b63bu),
    GDN_CRC_TABLE(0x3d6029b0u, 0x7ac05360u, 0xf580a6c0u, 0x30704bc1u, 0x60e09782u, 0xc1c12f04u, 0x58f35849u, 0xb1e6b092u),
    GDN_CRC_TABLE(0xcb5cd3a5u, 0x4dc8a10bu, 0x9b914216u, 0xec53826du, 0x03d6029bu, 0x07ac0536u, 0x0f580a6cu, 0x1eb014d8u),
    GDN_CRC_TABLE(0xa6770bb4u, 0x979f1129u, 0xf44f2413u, 0x33ef4e67u, 0x67de9cceu, 0xcfbd399cu, 0x440b7579u, 0x8816eaf2u),
    GDN_CRC_TABLE(0xccaa009eu, 0x4225077du, 0x844a0efau, 0xd3e51bb5u, 0x7cbb312bu, 0xf9766256u, 0x299dc2edu, 0x533b85dau)
};

static uint32_t gdn_crc32(const void *data, size_t n)
{
    const uint32_t (*t)[256] = gdn_crc_table;
    const uint8_t *p = data;
    uint32_t c = 0xffffffffu;
    for (; n >= 8; n -= 8, p += 8) {
        c ^= p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
        c = t[7][c & 0xff] ^ t[6][c >> 8 & 0xff] ^ t[5][c >> 16 & 0xff] ^ t[4][c >> 24]
            ^ t[3][p[4]] ^ t[2][p[5]] ^ t[1][p[6]] ^ t[0][p[7]];
    }
    for (; n > 0; n--, p++)
        c = c >> 8 ^ t[0][(c ^ *p) & 0xff];
    return ~c;
}

#endif
