/* Random numbers that are a pure function of where they are used: Philox4x32-7, a counter-based generator.
 *
 * Key and counter name a place; nothing is remembered between calls, so the same place gives the same bits for any
 * thread count, rank count, order of work, recompute setting, and after a resume.
 *
 *     key     = (seed low, seed high)
 *     counter = (row, block column, step, layer << 16 | role << 8 | word)
 *
 * row: for tokens the index in the step's global batch; for parameters the row in the whole tensor. Block column:
 * column / 16. role says for what the bits are (the enum below). One call gives four 32-bit words.
 *
 * J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011; 7 rounds is the
 * smallest count that passed all of TestU01 there. Known answers: test/test_philox.c. Floor 0; host and device.
 */
#ifndef LLMC_PHILOX_H
#define LLMC_PHILOX_H

#include <stdint.h>

#ifdef __CUDACC__
#define LLMC_HD __host__ __device__
#else
#define LLMC_HD
#endif

typedef enum {
    ROLE_DATA_ORDER = 1,            /* the dataloader: row = half, block = round */
    ROLE_SAMPLE,                    /* token sampling in generate: row = position */
    ROLE_INIT,                      /* parameter initialisation: + ParamKind in the low bits, see philox_param_role */
    ROLE_MASTER = ROLE_INIT + 32,   /* stochastic rounding of BF16 master weights: + ParamKind */
    ROLE_OPERAND = ROLE_MASTER + 32 /* stochastic rounding of NVFP4 operands: + projection * OPERAND_COPIES + copy */
} PhiloxRole;

/* The copies in which the operands of a linear layer's three products exist; each is rounded with bits of its own. */
typedef enum { COPY_X_ROW, COPY_X_COL, COPY_DY_ROW, COPY_DY_COL, COPY_W_ROW, COPY_W_COL, OPERAND_COPIES } OperandCopy;

typedef struct {
    uint32_t word[4];
} Philox;

LLMC_HD static inline Philox philox4x32(int rounds, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0,
                                        uint32_t k1)
{
    for (int round = 0; round < rounds; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)p1;
        c3 = (uint32_t)p0;
        c0 = n0;
        c2 = n2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    Philox out = {{c0, c1, c2, c3}};
    return out;
}

/* The project's draw. layer < 65536, role < 256, word < 256. */
LLMC_HD static inline Philox philox_draw(uint64_t seed, uint32_t row, uint32_t block, uint32_t step, uint32_t layer,
                                         uint32_t role, uint32_t word)
{
    return philox4x32(7, row, block, step, layer << 16 | role << 8 | word, (uint32_t)seed, (uint32_t)(seed >> 32));
}

#endif
