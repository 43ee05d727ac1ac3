/* What the tests of comm.h share: a bucket with pieces of every shape, and values that find a wrong order of additions.
 */
#ifndef LLMC_TEST_COMM_CASES_H
#define LLMC_TEST_COMM_CASES_H

#include "comm.h"
#include "test.h"

typedef struct { /* what Piece is made of */
    size_t unit, bytes;
} Shape;

/* Pieces one after the other, each at a multiple of 64 bytes, in whole and in own buffers; the bytes of both. */
static inline void lay_pieces(Piece *piece, const Shape *shape, int pieces, int rank, int ranks, size_t *whole,
                              size_t *own)
{
    *whole = *own = 64; /* also a gap in front */
    for (int i = 0; i < pieces; i++) {
        piece[i] = (Piece){*whole, *own, shape[i].unit, shape[i].bytes};
        Bucket one = {.pieces = 1, .piece = &piece[i]};
        *whole += (size_t)round_up((int64_t)shape[i].bytes, 64) + 64;
        *own += (size_t)round_up((int64_t)share_bytes(&one, rank, ranks), 64) + 64;
    }
}

static inline uint64_t draw(uint64_t a, uint64_t b, uint64_t c)
{
    uint64_t key[3] = {a, b, c};
    return hash64(key, sizeof key, 0);
}

/* FP32 of all magnitudes, both zeros and denormals; no sum of a hundred overflows. */
static inline float value(uint64_t seed, int rank, size_t i)
{
    uint64_t bits = draw(seed, (uint64_t)rank, i);
    uint32_t sign = (uint32_t)(bits >> 63) << 31, mantissa = (uint32_t)bits & 0x7fffff, word;
    uint32_t near = 120 + (uint32_t)(bits >> 32) % 16, any = (uint32_t)(bits >> 32) % 247;
    switch ((bits >> 40) % 8) {
    case 0:
        word = 0;
        break;
    case 1:
        word = mantissa;
        break; /* denormal */
    case 2:
        word = 246u << 23 | mantissa;
        break; /* about 2^119 */
    case 3:
        word = any << 23 | mantissa;
        break;
    default:
        word = near << 23 | mantissa;
        break;
    }
    word |= sign;
    float result;
    memcpy(&result, &word, sizeof result);
    return result;
}

#endif
