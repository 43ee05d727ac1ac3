/* The shape of one model: three architectures as fields of one struct.
 *
 *                       gpt2                     llama                    qwen3
 *   position            learned, wpe             RoPE                     RoPE
 *   norm                LayerNorm                RMSNorm                  RMSNorm, also of q and k per head
 *   ffn                 GELU (tanh form)         SwiGLU                   SwiGLU
 *   attention           kv_heads = heads         grouped queries          grouped queries, own head_dim
 *   biases              yes                      no                       no
 *   head                tied to wte              tied or not              tied or not
 *
 * GPT-2: Radford et al. 2019; Llama: Touvron et al. 2023 (arXiv 2302.13971), Llama 3 (2407.21783); Qwen3: 2505.09388.
 * Floor 3.
 */
#ifndef LLMC_CONFIG_H
#define LLMC_CONFIG_H

#include "ops.h"

C_BEGIN

typedef enum { ARCH_GPT2, ARCH_LLAMA, ARCH_QWEN3 } Arch;
typedef enum { RECOMPUTE_NONE, RECOMPUTE_OPERANDS, RECOMPUTE_BLOCK } Recompute;

typedef struct GPTConfig {
    Arch arch;
    int64_t L, C, NH, NKV, HD, F, V, Vp, T; /* layers, hidden, heads, kv heads, head dim, ffn, vocab, padded, context */
    NormKind norm;
    Activation activation;
    bool rope, qk_norm, bias, tied;
    float norm_eps;
    double rope_theta;
    double rope_factor; /* Llama-3 scaling of the frequencies; 0: none */
    double rope_low_freq_factor, rope_high_freq_factor;
    int64_t rope_original_context;
    float init_std, embedding_init_std; /* o and down: init_std / sqrt(2 L) */
} GPTConfig;

enum { VOCAB_MULTIPLE = 128 }; /* vocabulary rows in memory are padded to this, with zeros */

/* Bounds of one shape: far above any model of today, low enough that no product of them leaves int64. Positions stay
 * below 2^20 because the angles of RoPE are exact only there (f64_sin_cos). */
enum {
    CONFIG_MAX_LAYERS = 1 << 14,
    CONFIG_MAX_HIDDEN = 1 << 20,
    CONFIG_MAX_HEADS = 1 << 14,
    CONFIG_MAX_HEAD_DIM = OPS_MAX_HEAD_DIM,
    CONFIG_MAX_FFN = 1 << 22,
    CONFIG_MAX_VOCAB = 1 << 24,
    CONFIG_MAX_SEQ_LEN = 1 << 20
};

/* Fills what follows from arch and the sizes (norm, activation, switches, Vp) and refuses impossible shapes: -1 with
 * the reason in terms of the options (hidden, heads, ...). 0 means "derive":
 *     NKV = NH    HD = C / NH    norm_eps = 1e-5, qwen3 1e-6
 *     F   = 4 C for GELU; for SwiGLU, whose three matrices should weigh what the two of GELU do, 8/3 C rounded up to a
 *           multiple of 64 (the rule of Llama 1, there with 256)
 * A finished config may be finished again. */
int config_finish(GPTConfig *config, Error *error);

int64_t config_parameters(const GPTConfig *config); /* true count, without padding; a tied head counts once */
/* Forward and backward of one token: 6 x (parameters of the matrix products, the head's too; embeddings and norms do no
 * products) + 6 L (NH HD) T for attention: two products of 2 T NH HD forward, twice that backward, halved as causal. */
double config_flops_per_token(const GPTConfig *config);
const char *arch_name(Arch arch);

static inline int64_t config_qkv_cols(const GPTConfig *c) { return (c->NH + 2 * c->NKV) * c->HD; }
static inline int64_t config_up_cols(const GPTConfig *c)
{
    return c->activation == ACTIVATION_SWIGLU ? 2 * c->F : c->F;
}

C_END
#endif
