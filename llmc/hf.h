/* Names and layouts of Hugging Face: how a parameter of ours stands in model.safetensors.
 *
 *     ours                gpt2 on disk                        llama, qwen3 on disk
 *     block.i.qkv         h.i.attn.c_attn.weight [C, QKV] T   model.layers.i.self_attn.{q,k,v}_proj.weight
 *     block.i.o           h.i.attn.c_proj.weight [C, C] T     model.layers.i.self_attn.o_proj.weight
 *     block.i.up          h.i.mlp.c_fc.weight [C, F] T        model.layers.i.mlp.{gate,up}_proj.weight
 *     block.i.down        h.i.mlp.c_proj.weight [F, C] T      model.layers.i.mlp.down_proj.weight
 *     wte, wpe, lm_head   wte.weight, wpe.weight              model.embed_tokens.weight, lm_head.weight
 *
 * T: GPT-2's Conv1D stores [in, out]. A fused matrix of ours is split into its rows on writing, joined on reading.
 * Vocabulary padding never reaches the disk. Floor 3.
 */
#ifndef LLMC_HF_H
#define LLMC_HF_H

#include "params.h"
#include "safetensors.h"

C_BEGIN

typedef struct { /* one tensor on disk: rows row0 .. row0 + rows - 1 of a parameter */
    char name[96];
    int64_t row0, rows, cols;
    bool transposed;
    int rank; /* 1: [cols], 2 */
    int64_t shape[2];
} HfTensor;

enum { HF_PARTS = 3 }; /* most tensors a parameter has on disk */

/* Fills the tensors that `p` has on disk, returns their count. */
int hf_tensors(const GPTConfig *config, const Param *p, HfTensor out[HF_PARTS]);

/* Streams one tensor, taken from the parameter's memory `whole` [rows_padded, cols] in the backend (ops NULL: in host
 * memory), in disk order, and hashes it (hash64_pieces). 0 or -1. */
int hf_write(StWriter *w, const HfTensor *t, Tensor whole, const Ops *ops, uint64_t *hash, Error *error);

/* The reverse: checks dtype and shape, then fills the rows of `whole`. F32 and BF16 on disk both fit FP32 memory; FP32
 * on disk does not fit BF16 memory. 0 or -1. */
int hf_read(const StTensor *from, const HfTensor *t, Tensor whole, const Ops *ops, Error *error);

/* Elements first .. first + count - 1 of a tensor on disk, BF16 widened to FP32 if asked. */
void hf_elements(void *out, const StTensor *from, int64_t first, int64_t count, bool widen);

StDType hf_dtype(DType dtype);

C_END
#endif
