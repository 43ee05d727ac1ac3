/* The parameter table: every parameter once, in one fixed order. Initialisation, optimizer, buckets, checkpoint,
 * `plan`, gradient norm and state_hash all walk it, so none of them knows the model.
 *
 * Order: block 0 .. block L-1, then embedding (wte, wpe), then head (lm_head, final norm; when tied the final norm is
 * the embedding's). Within a block: the four matrices, then the vectors. Rows are output features; a fused matrix (qkv,
 * gate+up) is one entry, whose parts on disk are named by hf.c. Vocabulary rows are padded to a multiple of 128: `rows`
 * is the true count, `rows_padded` the memory.
 *
 * A bucket is one contiguous piece of memory: one per block, one for the embedding, one for the head. Floor 3.
 */
#ifndef LLMC_PARAMS_H
#define LLMC_PARAMS_H

#include "config.h"

C_BEGIN

typedef enum { INIT_ZERO, INIT_ONE, INIT_NORMAL } Init;

typedef enum { /* the field of struct Block or GPT that this parameter fills; at most 32 (philox.h) */
               PARAM_QKV,
               PARAM_O,
               PARAM_UP,
               PARAM_DOWN,
               PARAM_QKV_BIAS,
               PARAM_O_BIAS,
               PARAM_UP_BIAS,
               PARAM_DOWN_BIAS,
               PARAM_NORM1_GAIN,
               PARAM_NORM1_BIAS,
               PARAM_NORM2_GAIN,
               PARAM_NORM2_BIAS,
               PARAM_Q_GAIN,
               PARAM_K_GAIN,
               PARAM_WTE,
               PARAM_WPE,
               PARAM_LM_HEAD,
               PARAM_FINAL_GAIN,
               PARAM_FINAL_BIAS,
               PARAM_KIND_COUNT
} ParamKind;

typedef struct {
    char name[32]; /* "block.7.qkv": logs and messages */
    ParamKind kind;
    int bucket; /* 0..L-1 a block, L embedding, L+1 head */
    int layer;  /* 0..L-1, or L: Philox field */
    int64_t rows, rows_padded, cols;
    DType master; /* BF16 or FP32; vectors always FP32 */
    Init init;
    float init_std; /* init_std, o and down over sqrt(2 L); wte and wpe their own */
    bool decay;     /* matrices yes, vectors no */
    size_t offset;  /* elements from the start of its bucket, a multiple of 64 */
} Param;

typedef struct {
    Param *param; /* [count] owned */
    int count, buckets, layers;
    size_t *bucket_elements; /* [buckets] owned */
} ParamTable;

ParamTable params_table(const GPTConfig *config, DType master);
void params_free(ParamTable *table);

/* Initial values of rows row0 .. row0 + rows - 1 of one parameter: FP32 [rows, cols], a pure function of (seed, kind,
 * layer, row, column). Normal values come from Philox through the inverse normal distribution. Host memory. */
void params_initial(const Param *p, uint64_t seed, int64_t row0, int64_t rows, float *out);

static inline int64_t param_pieces(const Param *p) { return ceil_div(p->rows, 16); } /* 16-row pieces */

C_END
#endif
