/* Weights in the form that the products read: plain views are copies of the master; NVFP4 copies in 1 x 16 blocks of a
 * whole master are made as any operand's (quantize_source.cuh); those in 16 x 16 blocks here, and what ranks gather, in two
 * steps, for they gather between them what 16 rows of the master fill without gaps:
 *
 *     quantize_squares      from rows of the master: codes by rows and one scale a square
 *     quantize_part         the same in 1 x 16 blocks, of one copy
 *     cuda_weight_unpack    from those of the whole weight: the scales in tiles, the codes by columns
 */
#include "backend.h"
#include "quantize_tile.cuh"

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
    Nvfp4Scale tensor = load_struct(gmem<const DeviceScale>(job.scale.p)).tensor;
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

/* ---- 1 x 16 blocks by parts ----
 *
 * Codes by rows stand in the row view. The rest is gathered beside the views, and put into them by unpack_part:
 *
 *     | scales by row [rows][blocks of cols] | codes by column [rows / 16][cols] 8 bytes | scales [rows / 16][cols] |
 */

static bool is_split(const View *v) { return v->format.format == FORMAT_NVFP4 && !nvfp4_is_square(&v->format); }

typedef struct {
    uint8_t *scales[2]; /* by row, by column */
    uint8_t *codes;     /* by column */
    size_t bytes;       /* of all; 0: nothing is gathered there */
} GatherMemory;

static GatherMemory gather_memory(const Operand *o)
{
    size_t groups = is_split(&o->col) ? (size_t)(ceil_div(o->rows, 16) * o->cols) : 0;
    size_t by_row = is_split(&o->row) ? (size_t)(o->rows * ceil_div(o->cols, 16)) : 0;
    uint8_t *base = (uint8_t *)o->gathered, *codes = base + nvfp4_aligned(by_row);
    uint8_t *by_col = codes + nvfp4_aligned(8 * groups);
    return GatherMemory{{base, by_col}, codes, (size_t)(by_col - base) + groups};
}

size_t cuda_gather_bytes(const Operand *weight) { return gather_memory(weight).bytes; }

/* A thread has one block of 16 along a row (copy 0) or down a column (copy 1). It reads 2 bytes an element (BF16), writes
 * a half. Block i's codes are at word i / width x ld + 2 (i % width). */
template <class T, int copy>
__global__ void __launch_bounds__(BLOCK)
    quantize_part(Matrix<const T> m, QuantizeJob job, gmem<uint32_t> codes, int64_t ld, gmem<uint8_t> scales)
{
    int64_t i = (int64_t)blockIdx.x * BLOCK + threadIdx.x, width = copy ? m.cols : blocks_of(m.cols);
    int64_t r = i / width * (copy ? 16 : 1), c = i % width * (copy ? 1 : 16), row = job.random.row0 + r;
    Nvfp4Scale tensor = load_struct(gmem<const DeviceScale>(job.scale.p + copy)).tensor;
    F32x2 pair[8];
    float x[16], amax = 0;
    uint32_t code[2];
    if (r >= m.rows) return;
#pragma unroll
    for (int j = 0; j < 16; j++) {
        int64_t at_r = r + (copy ? j : 0), at_c = c + (copy ? 0 : j);
        x[j] = at_r < m.rows && at_c < m.cols ? to_f32(to_bf16(to_f32(m.row(at_r).ld(at_c)))) : 0.0f;
        amax = f32_max(f32_abs(x[j]), amax);
    }
#pragma unroll
    for (int j = 0; j < 8; j++) pair[j] = F32x2{x[2 * j], x[2 * j + 1]};
    uint32_t scale = quantize_block<QUANTIZE_ANY>(code, pair, amax, job, copy, tensor, job.random.step,
                                                  (uint32_t)(copy ? c : row), (uint32_t)((copy ? row : c) / 16));
    if (job.pow2) scale = e4m3_nearest(f32_mul(f32_from_bits(scale << 20), tensor.encode));
    Pack<uint32_t, 2> words;
    words.v[0] = code[0], words.v[1] = code[1];
    int64_t at = i / width * ld + i % width * 2;
    scales.st(i, (uint8_t)scale);
    codes.template st_pack<2>(at, words);
    if (copy || i % width + 1 < width || 2 * width == ld) return;
    words.v[0] = words.v[1] = 0; /* where a row of codes is padded */
    codes.template st_pack<2>(at + 2, words);
}

template <int copy>
static void quantize_part_of(Tensor rows, const QuantizeJob &job, void *codes, int64_t ld, uint8_t *scales)
{
    int64_t blocks = copy ? ceil_div(rows.rows, 16) * rows.cols : rows.rows * ceil_div(rows.cols, 16);
    if (!job.copy[copy].made) return;
    BY_DTYPE(rows.dtype, T,
             quantize_part<T, copy><<<(unsigned)ceil_div(blocks, BLOCK), BLOCK, 0, cuda.stream>>>(
                 matrix<const T>(rows), job, gmem<uint32_t>(codes), ld, gmem<uint8_t>(scales)));
    cuda_check(cudaGetLastError(), "weight_pack");
}

/* A block takes a tile of scales, 128 outer indices x 4 blocks, and by columns their codes too: 32 bytes of each. */
template <int copy>
__global__ void __launch_bounds__(BLOCK)
    unpack_part(QuantizeCopy q, gmem<const uint32_t> codes, gmem<const uint8_t> scales)
{
    int64_t blocks = blocks_of(q.K), block = (int64_t)blockIdx.x * 4 + threadIdx.x % 4;
    gmem<uint8_t> tiles((void *)q.scales.p);
#pragma unroll
    for (int round = 0; round < 2; round++) {
        int64_t outer = (int64_t)blockIdx.y * TILE + round * BLOCK / 4 + threadIdx.x / 4;
        bool inside = outer < q.outer && block < blocks;
        int64_t from = copy ? block * q.outer + outer : outer * blocks + block;
        Pack<uint32_t, 2> words = {};
        if (inside && copy) words = codes.template ld_pack<2>(2 * from);
        tiles.st((int64_t)nvfp4_tile_offset(outer, block, blocks), inside ? scales.ld(from) : (uint8_t)0);
        if (copy && outer < q.outer && 2 * block < q.ld_words)
            q.codes.template st_pack<2>(outer * q.ld_words + 2 * block, words);
    }
}

template <int copy> static void unpack_part_of(const QuantizeJob &job, const GatherMemory &from)
{
    const QuantizeCopy &q = job.copy[copy];
    dim3 grid((unsigned)q.scale_tiles, (unsigned)ceil_div(q.outer, TILE));
    if (!q.made) return;
    unpack_part<copy><<<grid, BLOCK, 0, cuda.stream>>>(q, gmem<const uint32_t>((const uint32_t *)from.codes),
                                                       gmem<const uint8_t>(from.scales[copy]));
    cuda_check(cudaGetLastError(), "weight_unpack");
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
    if (!is_square(w)) {
        QuantizeJob job = quantize_job(o, VIEW_ROW | VIEW_COL, weight_place(0, 0, 0), o->rows, o->cols);
        unpack_part_of<0>(job, gather_memory(o));
        unpack_part_of<1>(job, gather_memory(o));
        return;
    }
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
        copy_rows(o, master, 0);
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
    const Operand *o = &w->weight;
    copy_rows(o, rows, row0);
    if (!wants_quantized(o, VIEW_ROW | VIEW_COL)) return;
    QuantizeJob job = is_square(w)
                          ? square_job(w, seed, step, rows, row0)
                          : quantize_job(o, VIEW_ROW | VIEW_COL, weight_place(seed, step, row0), rows.rows, rows.cols);
    quantize_scales_from(job, amax);
    if (is_square(w)) {
        quantize_square_rows(w, job, rows, row0);
    } else if (rows.rows) {
        GatherMemory to = gather_memory(o);
        int64_t blocks = ceil_div(o->cols, 16), ld = job.copy[0].ld_words, groups = row0 / 16 * o->cols;
        quantize_part_of<0>(rows, job, (char *)o->row.data + row0 * ld * 4, ld, to.scales[0] + row0 * blocks);
        quantize_part_of<1>(rows, job, to.codes + 8 * groups, 2 * o->cols, to.scales[1] + groups);
    }
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

static WeightPiece piece_of(void *data, size_t unit, int64_t rows) /* `unit` bytes of every 16 rows */
{
    return WeightPiece{(char *)data, unit, (size_t)rows * unit / 16};
}

int cuda_weight_pieces(const Linear *w, WeightPiece out[WEIGHT_PIECES])
{
    const Operand *o = &w->weight;
    const View *view[2] = {&o->row, &o->col};
    int64_t whole_rows = round_up(o->rows, 16);
    size_t cols = (size_t)o->cols, row_bytes = (size_t)round_up(o->cols, 32) / 2,
           blocks = (size_t)ceil_div(o->cols, 16);
    GatherMemory gathered = gather_memory(o);
    int count = 0;
    for (int i = 0; i < 2; i++) {
        if (view[i]->format.format == FORMAT_NONE || (i == 1 && views_are_one(&o->row.format, &o->col.format)))
            continue;
        if (format_is_plain(view[i]->format.format)) {
            out[count++] = piece_of(view[i]->data, 16 * cols * dtype_bytes(view_dtype(view[i])), o->rows);
        } else if (i == 0) {
            out[count++] = piece_of(o->row.data, 16 * row_bytes, o->rows);
            out[count++] = is_square(w) ? piece_of(nvfp4_square_scales(&o->row, o->rows, o->cols), blocks, whole_rows)
                                        : piece_of(gathered.scales[0], 16 * blocks, o->rows);
        } else {
            out[count++] = piece_of(gathered.codes, 8 * cols, whole_rows);
            out[count++] = piece_of(gathered.scales[1], cols, whole_rows);
        }
    }
    return count;
}
