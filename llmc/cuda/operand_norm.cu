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

/* In a tile (quantize_load.cuh): x early; gains and statistics late, pairs at once. The same operations. */
template <NormKind kind> struct NormTile {
    static constexpr bool layernorm = kind == NORM_LAYERNORM;
    using Early = TensorSource<bf16>;
    static constexpr int each = layernorm ? 2 : 1;
    alignas(16) float rows[TILE][each], columns[each][TILE]; /* rstd and mean; gain, then bias */

    static __device__ Early early(const NormSource<bf16, kind> &from) { return Early{from.x}; }
    __device__ void fill(const NormSource<bf16, kind> &from, int64_t r0, int64_t c0, int row_end, int col_end)
    {
        int i = (int)threadIdx.x % TILE;
        if (threadIdx.x >= TILE) {
            if (i >= col_end) return;
            columns[0][i] = (from.gain + c0).ld(i);
            if constexpr (layernorm) columns[1][i] = (from.bias + c0).ld(i);
        } else if (i < row_end) {
            gmem<const float> row = rows_on(from.stats.row(r0), i, from.stats.ld);
            rows[i][0] = row.ld(each - 1);
            if constexpr (layernorm) rows[i][1] = row.ld(0);
        }
    }
    template <int WORDS> __device__ void finish(uint32_t *word, int row, int column) const
    {
        const F32x2 *gain = (const F32x2 *)&columns[0][column], *bias = (const F32x2 *)&columns[each - 1][column];
        float rstd = rows[row][0], mean = rows[row][each - 1];
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
            F32x2 x = layernorm ? bf16x2_fma(word[i], 1.0f, F32x2{-mean, -mean}) : both_halves(word[i]);
            x = f32x2_mul(x, F32x2{rstd, rstd});
            x = layernorm ? f32x2_fma(x, gain[i], bias[i]) : f32x2_mul(x, gain[i]);
            word[i] = bf16x2(x.a, x.b);
        }
    }
};
template <NormKind kind> struct SourceTile<NormSource<bf16, kind>, 8> : NormTile<kind> {
};
template <NormKind kind> struct SourceTile<NormSource<bf16, kind>, 4> : NormTile<kind> {
};

template <> constexpr int any_mode_blocks<NormSource<bf16, NORM_LAYERNORM>> = 2;

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
