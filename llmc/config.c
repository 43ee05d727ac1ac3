/* From a few sizes to a whole configuration: what an architecture implies, what it refuses, how much it weighs. All
 * checks of shapes live here, so a preset, a command line and a checkpoint's config.json are judged by one rule. */
#include "config.h"

#include <inttypes.h>
#include <math.h>

/* Sixteen bytes each (weights, gradient, moments) stay far below 2^63. */
static const int64_t MAX_PARAMETERS = (int64_t)1 << 44;

const char *arch_name(Arch arch)
{
    static const char *const names[] = {[ARCH_GPT2] = "gpt2", [ARCH_LLAMA] = "llama", [ARCH_QWEN3] = "qwen3"};
    return names[arch];
}

static int check_size(const char *option, int64_t value, int64_t max, Error *error)
{
    if (value >= 1 && value <= max) return 0;
    return error_set(error, "%s %" PRId64 " is out of range: allowed 1 to %" PRId64, option, value, max);
}

/* GPT-2 has no other shape than these. */
static int check_gpt2(const GPTConfig *c, Error *error)
{
    if (c->NKV != c->NH)
        return error_set(error,
                         "kv_heads %" PRId64 " with heads %" PRId64 ": gpt2 has no grouped queries; leave kv_heads 0",
                         c->NKV, c->NH);
    if (c->NH * c->HD != c->C)
        return error_set(error,
                         "head_dim %" PRId64 " x heads %" PRId64 " is not hidden %" PRId64
                         ": gpt2 has head_dim = hidden / heads; leave head_dim 0",
                         c->HD, c->NH, c->C);
    if (!c->tied) return error_set(error, "tie_embeddings false: the head of gpt2 is its embedding; leave it true");
    if (c->rope_factor != 0)
        return error_set(error, "rope_scaling_factor %g: gpt2 has learned positions, no RoPE; leave it 0",
                         c->rope_factor);
    return 0;
}

static int check_rope(const GPTConfig *c, Error *error)
{
    if (c->HD % 2) return error_set(error, "head_dim %" PRId64 " is odd: RoPE turns pairs; choose an even one", c->HD);
    if (!(c->rope_theta >= 1) || !isfinite(c->rope_theta))
        return error_set(error, "rope_theta %g: must be a finite number of at least 1", c->rope_theta);
    if (c->rope_factor == 0) return 0;
    if (!(c->rope_factor >= 1) || !isfinite(c->rope_factor))
        return error_set(error, "rope_scaling_factor %g: must be 0 (none) or at least 1", c->rope_factor);
    if (!(c->rope_low_freq_factor > 0) || !(c->rope_high_freq_factor > c->rope_low_freq_factor) ||
        !isfinite(c->rope_high_freq_factor))
        return error_set(error,
                         "rope_scaling_low_freq_factor %g must be above 0 and below rope_scaling_high_freq_factor %g",
                         c->rope_low_freq_factor, c->rope_high_freq_factor);
    return check_size("rope_scaling_original_context", c->rope_original_context, CONFIG_MAX_SEQ_LEN, error);
}

static int check_numbers(const GPTConfig *c, Error *error)
{
    if (!(c->norm_eps > 0) || !(c->norm_eps <= 1))
        return error_set(error, "norm_eps %g: must be above 0 and at most 1", (double)c->norm_eps);
    if (!(c->init_std >= 0) || !isfinite(c->init_std))
        return error_set(error, "init_std %g: must be a finite number of at least 0", (double)c->init_std);
    if (!(c->embedding_init_std >= 0) || !isfinite(c->embedding_init_std))
        return error_set(error, "embedding_init_std %g: must be a finite number of at least 0",
                         (double)c->embedding_init_std);
    return 0;
}

static int derive_heads(GPTConfig *c, Error *error)
{
    if (c->NKV == 0) c->NKV = c->NH;
    if (check_size("kv_heads", c->NKV, CONFIG_MAX_HEADS, error)) return -1;
    if (c->NH % c->NKV)
        return error_set(error,
                         "kv_heads %" PRId64 " does not divide heads %" PRId64
                         ": every key head serves the same number of query heads",
                         c->NKV, c->NH);
    if (c->HD == 0) {
        if (c->C % c->NH)
            return error_set(error,
                             "heads %" PRId64 " does not divide hidden %" PRId64 ": choose others or give head_dim",
                             c->NH, c->C);
        c->HD = c->C / c->NH;
    }
    return check_size("head_dim", c->HD, CONFIG_MAX_HEAD_DIM, error);
}

int config_finish(GPTConfig *c, Error *error)
{
    if (check_size("layers", c->L, CONFIG_MAX_LAYERS, error) || check_size("hidden", c->C, CONFIG_MAX_HIDDEN, error) ||
        check_size("heads", c->NH, CONFIG_MAX_HEADS, error) || check_size("vocab", c->V, CONFIG_MAX_VOCAB, error) ||
        check_size("seq_len", c->T, CONFIG_MAX_SEQ_LEN, error) || derive_heads(c, error))
        return -1;

    bool gpt2 = c->arch == ARCH_GPT2;
    c->norm = gpt2 ? NORM_LAYERNORM : NORM_RMSNORM;
    c->activation = gpt2 ? ACTIVATION_GELU : ACTIVATION_SWIGLU;
    c->rope = !gpt2;
    c->bias = gpt2;
    c->qk_norm = c->arch == ARCH_QWEN3;
    c->Vp = round_up(c->V, VOCAB_MULTIPLE);
    if (c->norm_eps == 0) c->norm_eps = c->arch == ARCH_QWEN3 ? 1e-6f : 1e-5f;
    if (c->F == 0) c->F = gpt2 ? 4 * c->C : round_up(ceil_div(8 * c->C, 3), 64);

    if (check_size("ffn", c->F, CONFIG_MAX_FFN, error) || check_numbers(c, error) ||
        (gpt2 ? check_gpt2(c, error) : check_rope(c, error)))
        return -1;
    if (config_parameters(c) > MAX_PARAMETERS)
        return error_set(error, "layers, hidden, heads, ffn and vocab make %" PRId64 " parameters: at most %" PRId64,
                         config_parameters(c), MAX_PARAMETERS);
    return 0;
}

/* Elements of the four matrices of a block: [QKV, C], [C, NH HD], [F1, C], [C, F]. */
static int64_t block_matrices(const GPTConfig *c)
{
    return c->C * (config_qkv_cols(c) + c->NH * c->HD + config_up_cols(c) + c->F);
}

int64_t config_parameters(const GPTConfig *c)
{
    int64_t norm = c->norm == NORM_LAYERNORM ? 2 * c->C : c->C; /* gain, and the bias of LayerNorm */
    int64_t biases = c->bias ? config_qkv_cols(c) + c->C + config_up_cols(c) + c->C : 0;
    int64_t block = block_matrices(c) + biases + 2 * norm + (c->qk_norm ? 2 * c->HD : 0);
    int64_t embedding = (c->V + (c->rope ? 0 : c->T)) * c->C;
    return c->L * block + embedding + norm + (c->tied ? 0 : c->V * c->C);
}

double config_flops_per_token(const GPTConfig *c)
{
    double products = (double)c->L * (double)block_matrices(c) + (double)c->V * (double)c->C;
    double attention = (double)c->L * (double)(c->NH * c->HD) * (double)c->T;
    return 6 * products + 6 * attention;
}
