/* Weights in the form that the products read: plain views are copies of the master; NVFP4 copies in 1 x 16 blocks are made
 * as any operand's (quantize_source.cuh); those in 16 x 16 blocks here, in two steps, for ranks gather between them:
 *
 *     quantize_squares      from rows of the master: codes by rows and one scale a square
 *     cuda_weight_unpack    from those of the whole weight: the scales in tiles, the codes transposed and their scales
 */
#include "backend.h"
#include "quantize.cuh"

static bool is_square(const Linear *w)
{
    const ViewFormat *f = &w->weight.row.format;
    return f->format == FORMAT_NVFP4 && nvfp4_is_square(f);
}

/* ---- 16 x 16 blocks ---- */

/* A warp takes 16 rows x 64 columns, four squares: lane 4 g + b has 16 columns of square b in rows g and g + 8, so that
 * four lanes read 128 bytes of a row and write 32. Reads 2 bytes an element (BF16), writes a half. */
typedef struct {
    QuantizeCopy copy;
    gmem<DeviceScale> scale;
    gmem<uint8_t> square_scales; /* of row0 on: [ceil(rows / 16)][blocks] */
    int64_t blocks;
    RandomPlace random;
} SquareJob;

template <class T, int W> __device__ inline void load_16(float (&x)[16], const Matrix<const T> &m, int64_t r, int64_t c)
{
#pragma unroll
    for (int i = 0; i < 16; i += W) {
        float part[W] = {};
        if (r < m.rows && c + i < m.cols) load_row<W>(part, m.row(r), c + i, m.cols);
#pragma unroll
        for (int j = 0; j < W; j++) x[i + j] = to_f32(to_bf16(part[j]));
    }
}

__device__ inline float square_sum(float a, float b) /* of 16 rows, as a tree; all 8 lanes get it */
{
    float sum = f32_add(a, b);
#pragma unroll
    for (int distance = 16; distance >= 4; distance /= 2)
        sum = f32_add(sum, __shfl_xor_sync(0xffffffffu, sum, distance));
    return sum;
}

__device__ inline uint32_t square_4_6(uint32_t (&code)[2][2], const float (&x)[2][16], float amax,
                                      const Nvfp4Scale &tensor, FourOverSix kind)
{
    uint8_t six, four;
    uint32_t other[2][2];
    nvfp4_scales_4_6(amax, &tensor, &six, &four);
    float error6 = square_sum(try_4_6(code[0], x[0], six, tensor, kind), try_4_6(code[1], x[1], six, tensor, kind));
    float error4 = square_sum(try_4_6(other[0], x[0], four, tensor, kind), try_4_6(other[1], x[1], four, tensor, kind));
    if (!(error4 < error6)) return six;
#pragma unroll
    for (int i = 0; i < 4; i++) code[i / 2][i % 2] = other[i / 2][i % 2];
    return four;
}

template <class T, int W>
__global__ void __launch_bounds__(BLOCK) quantize_squares(Matrix<const T> m, SquareJob job, uint32_t chunks)
{
    Place place = warp_place(chunks, 64);
    int lane = lane_number(), g = lane / 4;
    int64_t r0 = place.row * 16, c = place.col + lane % 4 * 16;
    const QuantizeCopy &q = job.copy;
    __shared__ DeviceScale shared;
    if (threadIdx.x == 0) shared = load_struct(gmem<const DeviceScale>(job.scale.p));
    __syncthreads();
    const Nvfp4Scale tensor = shared.tensor;
    float x[2][16], amax = 0, factor;
    uint32_t code[2][2], scale;
    bool stochastic = q.form.rounding == ROUND_STOCHASTIC;
#pragma unroll
    for (int k = 0; k < 2; k++) {
        load_16<T, W>(x[k], m, r0 + g + 8 * k, c);
#pragma unroll
        for (int i = 0; i < 16; i++) amax = f32_max(f32_abs(x[k][i]), amax);
    }
#pragma unroll
    for (int distance = 16; distance >= 4; distance /= 2)
        amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, distance));
    if (q.form.four_over_six) {
        scale = square_4_6(code, x, amax, tensor, q.form.four_over_six);
    } else {
        scale = nvfp4_block_scale(amax, &tensor, &q.form, &factor);
#pragma unroll
        for (int k = 0; k < 2; k++) {
#pragma unroll
            for (int i = 0; i < 16; i++) x[k][i] = f32_mul(f32_mul(x[k][i], factor), stochastic ? 0x1p-14f : 1.0f);
            encode(code[k], x[k], stochastic ? QUANTIZE_STOCHASTIC : QUANTIZE_NEAREST, job.random.key, job.random.step,
                   (uint32_t)(job.random.row0 + r0 + g + 8 * k), (uint32_t)(c / 16), q.place);
        }
    }
    if (r0 >= m.rows) return;
    if (g == 0 && c < m.cols) job.square_scales.st(r0 / 16 * job.blocks + c / 16, (uint8_t)scale);
#pragma unroll
    for (int k = 0; k < 2; k++) {
        int64_t r = r0 + g + 8 * k;
        if (r >= m.rows || c / 8 >= q.ld_words) continue;
        Pack<uint32_t, 2> words;
        words.v[0] = code[k][0], words.v[1] = code[k][1];
        q.codes.template st_pack<2>(r * q.ld_words + c / 8, words);
    }
}

/* ---- the other parts of a weight in 16 x 16 blocks ---- */

/* A block takes 128 x 128 codes by rows: 64 bytes a row through shared memory, and writes 64 bytes of each column. Reads a
 * half byte an element, writes as much, and an eighth for scales. */
__global__ void __launch_bounds__(BLOCK)
    unpack_squares(QuantizeCopy row, QuantizeCopy col, gmem<const uint8_t> square_scales)
{
    __shared__ uint32_t codes[TILE][17]; /* 16 words a row, and one so that columns are in other banks */
    __shared__ uint8_t scale[8][8];
    int64_t r0 = (int64_t)blockIdx.y * TILE, c0 = (int64_t)blockIdx.x * TILE, blocks = blocks_of(row.K);
    int t = (int)threadIdx.x;
#pragma unroll
    for (int i = t; i < TILE * 4; i += BLOCK) {
        int64_t r = r0 + i / 4, word = c0 / 8 + i % 4 * 4;
        Pack<uint32_t, 4> words = {};
        if (r < row.outer && word < row.ld_words) words = row.codes.template ld_pack<4>(r * row.ld_words + word);
        for (int j = 0; j < 4; j++) codes[i / 4][i % 4 * 4 + j] = words.v[j];
    }
    if (t < 64) {
        int64_t r = r0 / 16 + t / 8, b = c0 / 16 + t % 8;
        scale[t / 8][t % 8] = r < blocks_of(row.outer) && b < blocks ? square_scales.ld(r * blocks + b) : 0;
    }
    __syncthreads();
#pragma unroll
    for (int i = t; i < TILE * 4; i += BLOCK) { /* a column's 32 rows */
        int column = i / 4, first = i % 4 * 32;
        int64_t word = r0 / 8 + i % 4 * 4;
        Pack<uint32_t, 4> words = {};
        for (int j = 0; j < 32; j++)
            words.v[j / 8] |= (codes[first + j][column / 8] >> 4 * (column % 8) & 15) << 4 * (j % 8);
        if (c0 + column < col.outer && word < col.ld_words)
            col.codes.template st_pack<4>((c0 + column) * col.ld_words + word, words);
    }
    if (t >= TILE) return;
    int half = t / 32 % 2, lane = t % 32, by_columns = t / 64;
    const QuantizeCopy &q = by_columns ? col : row;
    int64_t outer0 = by_columns ? c0 : r0, k0 = (by_columns ? r0 : c0) + 64 * half;
    Pack<uint32_t, 4> words = {};
    for (int j = 0; j < 16; j++) { /* byte j: outer index lane + 32 (j / 4), block j % 4 */
        int outer = lane + j / 4 * 32, k = half * 4 + j % 4;
        bool inside = outer0 + outer < q.outer;
        uint32_t byte = by_columns ? scale[k][outer / 16] : scale[outer / 16][k];
        if (inside) words.v[j / 4] |= byte << 8 * (j % 4);
    }
    if (k0 < q.K) q.scales.template st_pack<4>((outer0 / TILE * q.scale_tiles + k0 / 64) * 128 + lane * 4, words);
}

/* ---- operations ---- */

static QuantizePlace weight_place(uint64_t seed, uint32_t step, int64_t row0)
{
    return QuantizePlace{false, seed, step, row0};
}

/* The row view as a copy: in 16 x 16 blocks everything else is made of it. */
static QuantizeJob square_job(const Linear *w, uint64_t seed, uint32_t step, Tensor rows, int64_t row0)
{
    return quantize_job(&w->weight, VIEW_ROW, weight_place(seed, step, row0), rows.rows, rows.cols);
}

/* Rows row0 .. of a weight whose scale is known. */
static void quantize_square_rows(const Linear *w, const QuantizeJob &job, Tensor rows, int64_t row0)
{
    const Operand *o = &w->weight;
    SquareJob square = {job.copy[0], job.scale, gmem<uint8_t>(nvfp4_square_scales(&o->row, o->rows, o->cols)),
                        ceil_div(o->cols, 16), job.random};
    if (!rows.rows) return;
    square.copy.codes = job.copy[0].codes + row0 * job.copy[0].ld_words;
    square.square_scales = square.square_scales + row0 / 16 * square.blocks;
    int64_t chunks = ceil_div(o->cols, 64), warps = ceil_div(rows.rows, 16) * chunks;
    bool aligned = is_aligned(rows) && rows.cols % 16 == 0;
    BY_DTYPE(rows.dtype, T,
             BY_WIDTH(aligned, T, W,
                      quantize_squares<T, W><<<blocks_for_warps(warps), BLOCK, 0, cuda.stream>>>(
                          matrix<const T>(rows), square, (uint32_t)chunks)));
    cuda_check(cudaGetLastError(), "weight in 16 x 16 blocks");
    if (!cuda.measure) return;
    QuantizeJob part = job;
    part.copy[0].codes = square.copy.codes;
    measure_square_tensor(part, rows, square.square_scales.p);
}

void cuda_weight_unpack(Linear *w)
{
    const Operand *o = &w->weight;
    if (!is_square(w)) return;
    QuantizeJob row = quantize_job(o, VIEW_ROW, weight_place(0, 0, 0), o->rows, o->cols);
    Operand both = *o;
    both.col = o->row;
    QuantizeJob col = quantize_job(&both, VIEW_COL, weight_place(0, 0, 0), o->rows, o->cols);
    dim3 grid((unsigned)ceil_div(o->cols, TILE), (unsigned)ceil_div(o->rows, TILE));
    unpack_squares<<<grid, BLOCK, 0, cuda.stream>>>(
        row.copy[0], col.copy[1], gmem<const uint8_t>((const uint8_t *)nvfp4_square_scales(&o->row, o->rows, o->cols)));
    cuda_check(cudaGetLastError(), "weight_unpack");
}

/* Rows row0 .. of the plain views, from those of the master. */
static void copy_rows(const Operand *o, Tensor rows, int64_t row0)
{
    const View *view[2] = {&o->row, &o->col};
    for (int i = 0; i < 2; i++) {
        if (!format_is_plain(view[i]->format.format) || !rows.rows) continue;
        Tensor whole = {view[i]->data, view_dtype(view[i]), o->rows, o->cols, o->cols};
        Tensor part = tensor_rows(whole, row0, rows.rows);
        bool done = i == 1 && view[1]->data == view[0]->data;
        if (part.data != rows.data && !done) cuda_copy(part, rows);
    }
}

/* The plain view beside a quantized one, which one pass makes too. */
static Targets plain_target(const Operand *o, const void *source)
{
    Targets to = {};
    to.aligned = true;
    const View *view[2] = {&o->row, &o->col};
    for (int i = 0; i < 2; i++)
        if (format_is_plain(view[i]->format.format) && view[i]->data != source)
            add_target(&to, Tensor{view[i]->data, view_dtype(view[i]), o->rows, o->cols, o->cols});
    return to;
}

void cuda_weight_prepare(Linear *w, Tensor master, uint64_t seed, uint32_t step)
{
    Operand *o = &w->weight;
    if (!wants_quantized(o, VIEW_ROW | VIEW_COL)) {
        copy_rows(o, master, 0);
    } else if (is_square(w)) {
        QuantizeJob job = square_job(w, seed, step, master, 0);
        find_amax_of_tensor("weight_prepare", job, master);
        quantize_square_rows(w, job, master, 0);
        cuda_weight_unpack(w);
    } else {
        quantize_tensor("weight_prepare", o, master, VIEW_ROW | VIEW_COL, plain_target(o, master.data),
                        weight_place(seed, step, 0), Tensor{});
    }
}

void cuda_weight_pack(Linear *w, Tensor rows, int64_t row0, const float *amax, uint64_t seed, uint32_t step)
{
    if (!wants_quantized(&w->weight, VIEW_ROW | VIEW_COL)) {
        copy_rows(&w->weight, rows, row0);
        return;
    }
    if (!is_square(w)) die("weight_pack: weights in 1 x 16 blocks are not packed by parts on a GPU; this is a bug");
    QuantizeJob job = square_job(w, seed, step, rows, row0);
    quantize_scales_from(job, amax);
    quantize_square_rows(w, job, rows, row0);
}

void cuda_weight_amax(float *amax, Tensor rows)
{
    Operand o = {};
    o.rows = rows.rows, o.cols = rows.cols;
    QuantizeJob job = quantize_job(&o, 0, weight_place(0, 0, 0), rows.rows, rows.cols);
    job.copy[0].made = true;
    job.amax = gmem<float>(amax);
    if (rows.rows)
        find_amax_of_tensor("weight_amax", job, rows);
    else
        cuda_check(cudaMemsetAsync(amax, 0, sizeof *amax, cuda.stream), "weight_amax");
}

int cuda_weight_pieces(const Linear *w, WeightPiece out[WEIGHT_PIECES])
{
    const Operand *o = &w->weight;
    const View *view[2] = {&o->row, &o->col};
    int count = 0;
    if (is_square(w)) {
        size_t row_bytes = (size_t)round_up(o->cols, 32) / 2, blocks = (size_t)ceil_div(o->cols, 16);
        out[0] = WeightPiece{(char *)o->row.data, 16 * row_bytes, (size_t)o->rows * row_bytes};
        out[1] = WeightPiece{(char *)nvfp4_square_scales(&o->row, o->rows, o->cols), blocks,
                             (size_t)ceil_div(o->rows, 16) * blocks};
        return 2;
    }
    for (int i = 0; i < 2; i++) {
        if (view[i]->format.format == FORMAT_NONE || (i == 1 && views_are_one(&o->row.format, &o->col.format)))
            continue;
        if (view[i]->format.format == FORMAT_NVFP4)
            die_usage(
                "weights in 1 x 16 blocks cannot be sharded on a GPU: use --weight_blocks 16x16, or --zero_stage 0");
        size_t row_bytes = (size_t)o->cols * dtype_bytes(view_dtype(view[i]));
        out[count++] = WeightPiece{(char *)view[i]->data, 16 * row_bytes, (size_t)o->rows * row_bytes};
    }
    return count;
}
