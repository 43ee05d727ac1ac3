/* Operands that are a norm of a tensor, applied on the fly (operand.cuh). */
#include "operand.cuh"

template <class T, NormKind kind> struct NormSource {
    static constexpr int wide = 16 / sizeof(T), parts = 1;
    static constexpr bool layernorm = kind == NORM_LAYERNORM;
    Matrix<const T> x;
    Matrix<const float> stats;
    gmem<const float> gain, bias;

    __device__ int64_t part_cols() const { return x.cols; }
    template <int W> struct Columns {
        float gain[W], bias[layernorm ? W : 1];
    };
    template <int W> __device__ Columns<W> columns(int64_t c) const
    {
        Columns<W> of = {};
        load_row<W>(of.gain, gain, c, x.cols);
        if constexpr (layernorm) load_row<W>(of.bias, bias, c, x.cols);
        return of;
    }
    template <int W> __device__ void load(float (&out)[1][W], int64_t r, int64_t c, const Columns<W> &of) const
    {
        float mean = layernorm ? stats.row(r).ld(0) : 0.0f, rstd = stats.row(r).ld(layernorm ? 1 : 0);
        load_row<W>(out[0], x.row(r), c, x.cols);
#pragma unroll
        for (int j = 0; j < W; j++) {
            float v = out[0][j];
            out[0][j] = layernorm ? fmaf((v - mean) * rstd, of.gain[j], of.bias[layernorm ? j : 0])
                                  : v * rstd * of.gain[j];
        }
    }
};

/* For a tile: pairs at once. The same operations. */
template <NormKind kind> struct BlockLoader<NormSource<bf16, kind>, 8> {
    static constexpr bool layernorm = kind == NORM_LAYERNORM;
    F32x2 gain[8], bias[layernorm ? 8 : 1];

    __device__ BlockLoader(const NormSource<bf16, kind> &from, int64_t c, int64_t part_cols)
    {
        if (c >= part_cols) return;
        load_pairs(gain, from.gain + c);
        if constexpr (layernorm) load_pairs(bias, from.bias + c);
    }
    __device__ void load(uint32_t (&word)[1][8], const NormSource<bf16, kind> &from, int64_t r, int64_t c,
                         int64_t) const
    {
        float mean = layernorm ? from.stats.row(r).ld(0) : 0.0f, rstd = from.stats.row(r).ld(layernorm ? 1 : 0);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            Pack<bf16, 8> pack = from.x.row(r).template ld_pack<8>(c + 8 * i);
            memcpy(word[0] + 4 * i, &pack, sizeof pack);
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            F32x2 x = both_halves(word[0][i]);
            if (layernorm) x = f32x2_add(x, F32x2{-mean, -mean});
            x = f32x2_mul(x, F32x2{rstd, rstd});
            x = layernorm ? f32x2_fma(x, gain[i], bias[layernorm ? i : 0]) : f32x2_mul(x, gain[i]);
            word[0][i] = bf16x2(x.a, x.b);
        }
    }

  private:
    static __device__ void load_pairs(F32x2 (&to)[8], gmem<const float> from)
    {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            Pack<float, 4> pack = from.template ld_pack<4>(4 * i);
            to[2 * i] = F32x2{pack.v[0], pack.v[1]}, to[2 * i + 1] = F32x2{pack.v[2], pack.v[3]};
        }
    }
};

/* ---- operations ---- */

template <NormKind kind> static void from_norm(Operand *o, Tensor x, Tensor stats, const Norm *norm, unsigned views)
{
    const char *op = "operand_from_norm";
    Targets to = targets_of(o, views, NULL);
    bool aligned = is_aligned(x) && is_aligned(norm->gain) && (kind == NORM_RMSNORM || is_aligned(norm->bias));
    gmem<const float> gain(norm->gain.data), bias(norm->bias.data);
    Matrix<const float> s = matrix<const float>(stats);
    if (x.dtype == DTYPE_BF16) {
        NormSource<bf16, kind> from{matrix<const bf16>(x), s, gain, bias};
        make_operand<false>(op, from, from, o, views, to, aligned, o->cols, step_place(o), Tensor{});
    } else {
        NormSource<float, kind> from{matrix<const float>(x), s, gain, bias};
        make_plain(op, from, o, views, to, aligned, o->cols, Tensor{});
    }
}

void cuda_operand_from_norm(Operand *o, Tensor x, Tensor stats, const Norm *norm, unsigned views)
{
    if (norm->kind == NORM_LAYERNORM)
        from_norm<NORM_LAYERNORM>(o, x, stats, norm, views);
    else
        from_norm<NORM_RMSNORM>(o, x, stats, norm, views);
}
