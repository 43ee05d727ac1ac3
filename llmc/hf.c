/* See hf.h. */
#include "hf.h"

#include "numerics.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

StDType hf_dtype(DType dtype) { return dtype == DTYPE_BF16 ? ST_BF16 : ST_F32; }

/* ---- names ---- */

static const char *gpt2_name(ParamKind kind)
{
    switch (kind) {
    case PARAM_QKV:
        return "attn.c_attn.weight";
    case PARAM_O:
        return "attn.c_proj.weight";
    case PARAM_UP:
        return "mlp.c_fc.weight";
    case PARAM_DOWN:
        return "mlp.c_proj.weight";
    case PARAM_QKV_BIAS:
        return "attn.c_attn.bias";
    case PARAM_O_BIAS:
        return "attn.c_proj.bias";
    case PARAM_UP_BIAS:
        return "mlp.c_fc.bias";
    case PARAM_DOWN_BIAS:
        return "mlp.c_proj.bias";
    case PARAM_NORM1_GAIN:
        return "ln_1.weight";
    case PARAM_NORM1_BIAS:
        return "ln_1.bias";
    case PARAM_NORM2_GAIN:
        return "ln_2.weight";
    case PARAM_NORM2_BIAS:
        return "ln_2.bias";
    case PARAM_WTE:
        return "wte.weight";
    case PARAM_WPE:
        return "wpe.weight";
    case PARAM_LM_HEAD:
        return "lm_head.weight";
    case PARAM_FINAL_GAIN:
        return "ln_f.weight";
    case PARAM_FINAL_BIAS:
        return "ln_f.bias";
    default:
        die("hf: gpt2 has no parameter kind %d; this is a bug", (int)kind);
    }
}

static const char *llama_name(ParamKind kind, int part)
{
    static const char *const QKV[] = {"self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"};
    switch (kind) {
    case PARAM_QKV:
        return QKV[part];
    case PARAM_O:
        return "self_attn.o_proj.weight";
    case PARAM_UP:
        return part ? "mlp.up_proj.weight" : "mlp.gate_proj.weight";
    case PARAM_DOWN:
        return "mlp.down_proj.weight";
    case PARAM_NORM1_GAIN:
        return "input_layernorm.weight";
    case PARAM_NORM2_GAIN:
        return "post_attention_layernorm.weight";
    case PARAM_Q_GAIN:
        return "self_attn.q_norm.weight";
    case PARAM_K_GAIN:
        return "self_attn.k_norm.weight";
    case PARAM_WTE:
        return "model.embed_tokens.weight";
    case PARAM_LM_HEAD:
        return "lm_head.weight";
    case PARAM_FINAL_GAIN:
        return "model.norm.weight";
    default:
        die("hf: llama has no parameter kind %d; this is a bug", (int)kind);
    }
}

static int parts_of(const GPTConfig *c, ParamKind kind, int64_t rows[HF_PARTS])
{
    if (c->arch != ARCH_GPT2 && kind == PARAM_QKV) {
        rows[0] = c->NH * c->HD;
        rows[1] = rows[2] = c->NKV * c->HD;
        return 3;
    }
    if (c->arch != ARCH_GPT2 && kind == PARAM_UP) {
        rows[0] = rows[1] = c->F;
        return 2;
    }
    return 1;
}

int hf_tensors(const GPTConfig *c, const Param *p, HfTensor out[HF_PARTS])
{
    int64_t rows[HF_PARTS] = {p->rows}, row0 = 0;
    bool gpt2 = c->arch == ARCH_GPT2, block = p->layer < c->L, conv1d = gpt2 && block && p->decay;
    int parts = parts_of(c, p->kind, rows);

    for (int i = 0; i < parts; i++) {
        HfTensor *t = &out[i];
        const char *name = gpt2 ? gpt2_name(p->kind) : llama_name(p->kind, i);
        *t = (HfTensor){.row0 = row0, .rows = rows[i], .cols = p->cols, .transposed = conv1d};
        if (block)
            snprintf(t->name, sizeof t->name, "%s.%d.%s", gpt2 ? "h" : "model.layers", p->layer, name);
        else
            snprintf(t->name, sizeof t->name, "%s", name);
        t->rank = p->decay ? 2 : 1;
        t->shape[0] = conv1d || t->rank == 1 ? t->cols : t->rows;
        t->shape[1] = conv1d ? t->rows : t->cols;
        row0 += rows[i];
    }
    return parts;
}

/* ---- moving ---- */

static void transpose(char *out, const char *in, int64_t rows, int64_t cols, size_t element)
{
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c++)
            memcpy(out + (size_t)(c * rows + r) * element, in + (size_t)(r * cols + c) * element, element);
}

/* Host memory streams as it is; the backend's through one piece. */
static int write_pieces(StWriter *w, const char *data, size_t bytes, const Ops *ops, uint64_t *hash, Error *error)
{
    char *piece = ops ? xmalloc(HASH_PIECE) : NULL;
    int status = 0;
    *hash = 0;
    for (size_t done = 0; done < bytes && !status; done += HASH_PIECE) {
        size_t count = bytes - done < HASH_PIECE ? bytes - done : HASH_PIECE;
        if (ops) ops->copy_out(piece, data + done, count);
        *hash = hash64(ops ? piece : data + done, count, *hash);
        status = st_writer_data(w, ops ? piece : data + done, count, error);
    }
    free(piece);
    return status;
}

int hf_write(StWriter *w, const HfTensor *t, Tensor whole, const Ops *ops, uint64_t *hash, Error *error)
{
    Tensor part = tensor_rows(whole, t->row0, t->rows);
    size_t bytes = tensor_bytes(part);
    if (!t->transposed) return write_pieces(w, part.data, bytes, ops, hash, error);

    char *host = ops ? xmalloc(bytes) : NULL, *turned = xmalloc(bytes);
    if (ops) ops->copy_out(host, part.data, bytes);
    transpose(turned, ops ? host : part.data, t->rows, t->cols, dtype_bytes(whole.dtype));
    int status = write_pieces(w, turned, bytes, NULL, hash, error);
    free(host);
    free(turned);
    return status;
}

static bool same_shape(const StTensor *from, const HfTensor *t)
{
    if (from->rank != t->rank) return false;
    for (int i = 0; i < t->rank; i++)
        if (from->shape[i] != t->shape[i]) return false;
    return true;
}

void hf_elements(void *out, const StTensor *from, int64_t first, int64_t count, bool widen)
{
    const char *data = (const char *)from->data + (size_t)first * st_dtype_bytes(from->dtype);
    if (!widen) {
        memcpy(out, data, (size_t)count * st_dtype_bytes(from->dtype));
        return;
    }
    for (int64_t i = 0; i < count; i++) {
        uint16_t half;
        memcpy(&half, data + 2 * i, sizeof half);
        float wide = bf16_to_f32(half);
        memcpy((char *)out + 4 * i, &wide, sizeof wide);
    }
}

int hf_read(const StTensor *from, const HfTensor *t, Tensor whole, const Ops *ops, Error *error)
{
    bool widen = from->dtype == ST_BF16 && whole.dtype == DTYPE_FP32;
    if (!same_shape(from, t))
        return error_set(error, "tensor %s: its shape is not that of this model (%lld x %lld expected)", t->name,
                         (long long)t->shape[0], t->rank == 2 ? (long long)t->shape[1] : 1);
    if (from->dtype != hf_dtype(whole.dtype) && !widen)
        return error_set(error, "tensor %s: dtype %s does not fit %s weights (see --master and --precision)", t->name,
                         st_dtype_name(from->dtype), whole.dtype == DTYPE_BF16 ? "bf16" : "fp32");

    /* As they stand, a tensor's rows stream through one buffer; a transposed one needs all of them. */
    int64_t step = t->transposed ? t->shape[0] : max_i64(1, HASH_PIECE / (4 * t->cols));
    int64_t from_rows = t->rank == 2 ? t->shape[0] : 1, from_cols = t->rank == 2 ? t->shape[1] : t->cols;
    size_t element = dtype_bytes(whole.dtype), row_bytes = (size_t)from_cols * element;
    char *host = xmalloc((size_t)step * row_bytes), *turned = t->transposed ? xmalloc((size_t)step * row_bytes) : NULL;
    for (int64_t row = 0; row < from_rows; row += step) {
        int64_t rows = min_i64(step, from_rows - row);
        hf_elements(host, from, row * from_cols, rows * from_cols, widen);
        if (turned) transpose(turned, host, rows, from_cols, element);
        Tensor part = tensor_rows(whole, t->row0 + row, rows);
        ops->copy_in(part.data, turned ? turned : host, (size_t)rows * row_bytes);
    }
    free(host);
    free(turned);
    return 0;
}
