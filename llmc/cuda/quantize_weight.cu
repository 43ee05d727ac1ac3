/* Weights in the form that the products read: plain views are copies of the master; NVFP4 copies in 1 x 16 blocks of a
 * whole master are made as any operand's (quantize_source.cuh); those in 16 x 16 blocks here, and what ranks gather, in
 * two steps, for they gather between them what 16 rows of the master fill without gaps:
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

/* ---- 1 x 16 blocks by parts ----
 *
 * Gathered beside the views, and put into them by unpack_part: of either copy its blocks, 8 bytes of codes each, in the
 * order of the master's rows, and their scales:
 *
 *     | codes by row [rows][blocks of cols] | scales | codes by column [blocks of rows][cols] | scales |
 */

typedef struct {
    uint8_t *codes[2], *scales[2]; /* by row, by column */
    size_t bytes;
} GatherMemory;

/* Blocks of one copy of the first `rows` rows; 0: not by parts. */
static int64_t blocks_by_parts(const Operand *o, int col, int64_t rows)
{
    const View *v = col ? &o->col : &o->row;
    if (v->format.format != FORMAT_NVFP4 || nvfp4_is_square(&v->format)) return 0;
    return col ? ceil_div(rows, 16) * o->cols : rows * ceil_div(o->cols, 16);
}

static GatherMemory gather_memory(const Operand *o)
{
    GatherMemory memory = {};
    char *base = (char *)o->gathered;
    for (int col = 0; col < 2; col++) {
        size_t blocks = (size_t)blocks_by_parts(o, col, o->rows);
        memory.codes[col] = (uint8_t *)base + memory.bytes;
        memory.scales[col] = memory.codes[col] + nvfp4_aligned(8 * blocks);
        memory.bytes += nvfp4_aligned(8 * blocks) + nvfp4_aligned(blocks);
    }
    return memory;
}

size_t cuda_gather_bytes(const Operand *weight) { return gather_memory(weight).bytes; }

/* A thread has one block of 16 of the job's first copy, along a row or down a column. It reads 2 bytes an element
 * (BF16), writes a half. */
template <class T>
__global__ void __launch_bounds__(BLOCK)
    quantize_part(Matrix<const T> m, QuantizeJob job, bool col, gmem<uint32_t> codes, gmem<uint8_t> scales)
{
    int64_t i = (int64_t)blockIdx.x * BLOCK + threadIdx.x, width = col ? m.cols : blocks_of(m.cols);
    int64_t r = i / width * (col ? 16 : 1), c = i % width * (col ? 1 : 16), row = job.random.row0 + r;
    Nvfp4Scale tensor = load_struct(gmem<const DeviceScale>(job.scale.p)).tensor;
    F32x2 pair[8];
    float x[16], amax = 0;
    Pack<uint32_t, 2> code;
    if (r >= m.rows) return;
#pragma unroll
    for (int j = 0; j < 16; j++) {
        int64_t at_r = r + (col ? j : 0), at_c = c + (col ? 0 : j);
        x[j] = at_r < m.rows && at_c < m.cols ? to_f32(to_bf16(to_f32(m.row(at_r).ld(at_c)))) : 0.0f;
        amax = f32_max(f32_abs(x[j]), amax);
        if (j % 2) pair[j / 2] = F32x2{x[j - 1], x[j]};
    }
    /* no tile: the mode that asks at run time needs nothing of one */
    uint32_t scale = quantize_block<QUANTIZE_ANY>(NULL, code.v, pair, amax, job, 0, tensor, job.random.step,
                                                  (uint32_t)(col ? c : row), (uint32_t)((col ? row : c) / 16));
    if (job.pow2) scale = e4m3_nearest(f32_mul(f32_from_bits(scale << 20), tensor.encode));
    scales.st(i, (uint8_t)scale);
    codes.template st_pack<2>(2 * i, code);
}

static void quantize_part_rows(const Operand *o, const QuantizeJob &job, Tensor rows, int64_t row0)
{
    GatherMemory to = gather_memory(o);
    for (int col = 0; col < 2; col++) {
        int64_t first = blocks_by_parts(o, col, row0), count = blocks_by_parts(o, col, rows.rows);
        QuantizeJob one = job;
        if (!count) continue;
        if (col) one.copy[0] = job.copy[1], one.scale = job.scale + 1;
        BY_DTYPE(rows.dtype, T,
                 quantize_part<T><<<(unsigned)ceil_div(count, BLOCK), BLOCK, 0, cuda.stream>>>(
                     matrix<const T>(rows), one, col, gmem<uint32_t>((void *)(to.codes[col] + 8 * first)),
                     gmem<uint8_t>(to.scales[col] + first)));
        cuda_check(cudaGetLastError(), "weight_pack");
    }
}

/* A block takes a tile of scales, 128 outer indices x 4 blocks, and their codes: 32 bytes of each index. */
__global__ void __launch_bounds__(BLOCK)
    unpack_part(QuantizeCopy q, bool col, gmem<const uint32_t> codes, gmem<const uint8_t> scales)
{
    int64_t blocks = blocks_of(q.K), block = (int64_t)blockIdx.x * 4 + threadIdx.x % 4;
    gmem<uint8_t> tiles((void *)q.scales.p);
#pragma unroll
    for (int round = 0; round < 2; round++) {
        int64_t outer = (int64_t)blockIdx.y * TILE + round * BLOCK / 4 + threadIdx.x / 4;
        int64_t from = col ? block * q.outer + outer : outer * blocks + block;
        bool inside = outer < q.outer && block < blocks;
        Pack<uint32_t, 2> words = {};
        if (inside) words = codes.template ld_pack<2>(2 * from);
        tiles.st((int64_t)nvfp4_tile_offset(outer, block, blocks), inside ? scales.ld(from) : (uint8_t)0);
        if (outer < q.outer && 2 * block < q.ld_words)
            q.codes.template st_pack<2>(outer * q.ld_words + 2 * block, words);
    }
}

static void unpack_parts(const Operand *o, const QuantizeJob &job)
{
    GatherMemory from = gather_memory(o);
    for (int col = 0; col < 2; col++) {
        const QuantizeCopy &q = job.copy[col];
        dim3 grid((unsigned)q.scale_tiles, (unsigned)ceil_div(q.outer, TILE));
        if (q.made)
            unpack_part<<<grid, BLOCK, 0, cuda.stream>>>(q, col, gmem<const uint32_t>((void *)from.codes[col]),
                                                         gmem<const uint8_t>(from.scales[col]));
        cuda_check(cudaGetLastError(), "weight_unpack");
    }
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
        unpack_parts(o, quantize_job(o, VIEW_ROW | VIEW_COL, weight_place(0, 0, 0), o->rows, o->cols));
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
    Targets t = targets_of(o, VIEW_ROW | VIEW_COL, NULL);
    for (int i = 0; i < t.count && rows.rows; i++) {
        Tensor whole = {t.to[i].data, t.to[i].half ? DTYPE_BF16 : DTYPE_FP32, o->rows, o->cols, t.to[i].ld};
        Tensor part = tensor_rows(whole, row0, rows.rows);
        if (part.data != rows.data) cuda_copy(part, rows);
    }
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
        quantize_tensor("weight_prepare", o, master, VIEW_ROW | VIEW_COL,
                        targets_of(o, VIEW_ROW | VIEW_COL, master.data), weight_place(seed, step, 0), Tensor{});
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
    if (is_square(w))
        quantize_square_rows(w, job, rows, row0);
    else
        quantize_part_rows(o, job, rows, row0);
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
    GatherMemory gathered = gather_memory(o);
    int64_t whole = round_up(o->rows, 16), blocks = ceil_div(o->cols, 16);
    int count = 0;
    if (is_square(w)) {
        out[count++] = piece_of(o->row.data, (size_t)round_up(o->cols, 32) * 8, o->rows);
        out[count++] = piece_of(nvfp4_square_scales(&o->row, o->rows, o->cols), (size_t)blocks, whole);
    }
    for (int col = 0; col < 2; col++) {
        const View *v = col ? &o->col : &o->row;
        size_t unit = (size_t)(col ? o->cols : 16 * blocks);
        if (format_is_plain(v->format.format) && (!col || !views_are_one(&o->row.format, &o->col.format)))
            out[count++] = piece_of(v->data, 16 * (size_t)o->cols * dtype_bytes(view_dtype(v)), o->rows);
        if (!blocks_by_parts(o, col, o->rows)) continue;
        out[count++] = piece_of(gathered.codes[col], 8 * unit, col ? whole : o->rows);
        out[count++] = piece_of(gathered.scales[col], unit, col ? whole : o->rows);
    }
    return count;
}
