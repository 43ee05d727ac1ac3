/* The kernel that quantizes a source (views.cuh) in blocks of 1 x 16 along rows and along columns.
 *
 * quantize_tile: a block of 256 threads takes 128 rows x 128 columns, in 47 KB of shared memory:
 *
 *     rows      a thread takes 16 columns of 4 rows (of a source in two parts: of 2 rows, in both): loads, rounds to BF16,
 *               leaves them in the shared tile, and quantizes them: 8 bytes of codes each
 *     columns   a thread takes two columns x 32 rows of the tile, as two blocks of 16: transform, quantize; codes pass
 *               through shared memory, so that 16-byte stores of neighbours fill sectors
 *     scales    both copies' block scales stand in the tile as the tensor cores want them: 2 x 512 bytes, 16 bytes a store
 *
 * Bytes an element (BF16 source, both copies): 2 read, 1.125 written; waiting scales add nothing here. A tile is fast when
 * `wide` elements are read at once (W > 1): columns in multiples of 16, of 64 in two parts; else W = 1, the same code.
 *
 * Floor 2.
 */
#ifndef LLMC_CUDA_QUANTIZE_TILE_CUH
#define LLMC_CUDA_QUANTIZE_TILE_CUH

#include "quantize_load.cuh"

/* Blocks a multiprocessor: three leave 80 registers a thread, a few too little where FP32 has no pairs. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 1000
enum { TILE_BLOCKS = 2 };
#else
enum { TILE_BLOCKS = 3 };
#endif

/* ---- a tile in shared memory ---- */

typedef struct {
    uint4 tile[TILE * 16]; /* 16-byte chunks of rows; chunk j of a row at j ^ (j / 8) */
    uint4 codes[TILE * 4]; /* by columns: 64 bytes each, chunks stirred too */
    alignas(
        16) uint16_t kept[2][TILE_SCALES]; /* block scales, or what waits for them, in the order of two scale tiles */
    float sums[TILE / 32][TILE];           /* of 32 rows */
    float factor[2][128];                  /* of each E4M3 scale: encode_factor takes ten instructions, a look three */
    DeviceScale scale[2];
    int64_t row0; /* Philox */
    uint32_t step, seen[4], largest[2];
} TileShared;

/* Place of a scale within the two scale tiles of one copy. */
__device__ inline int kept_place(int outer, int block)
{
    return block / 4 * 512 + outer % 32 * 16 + outer / 32 * 4 + block % 4;
}

template <int parts> __device__ inline int column_of(const QuantizeJob &job, int c0, int column_in_tile)
{
    constexpr int WIDTH = TILE / parts;
    return column_in_tile / WIDTH * job.part_cols + c0 + column_in_tile % WIDTH;
}

template <QuantizeMode mode, bool SUMS> __device__ inline bool has_sums(const QuantizeJob &job)
{
    return SUMS || (mode == QUANTIZE_ANY && !job.partial.absent());
}

/* The factors of one copy's scales, a thread each, and what scales are made with. */
__device__ inline void set_up_factors(TileShared *s, const QuantizeJob &job)
{
    int copy = (int)threadIdx.x / 128, scale = (int)threadIdx.x % 128;
    gmem<const float> tensor((void *)(job.scale.p + copy));
    float decode = ld_warp(tensor, offsetof(Nvfp4Scale, decode) / sizeof(float));
    s->factor[copy][scale] = encode_factor((uint32_t)scale, decode);
    if (!scale) s->scale[copy].tensor.multiplier = tensor.ld(offsetof(Nvfp4Scale, multiplier) / sizeof(float));
}

/* Before anything is quantized, by all threads: the scales, and where random bits come from. */
template <QuantizeMode mode> __device__ inline void set_up_tile(TileShared *s, const QuantizeJob &job)
{
    if (mode != QUANTIZE_ANY) set_up_factors(s, job);
    if (threadIdx.x) return;
    if (mode == QUANTIZE_ANY) {
        for (int i = 0; i < 4; i++) s->seen[i] = 0;
        s->largest[0] = s->largest[1] = 0;
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (job.copy[i].made && !job.pow2) s->scale[i] = load_struct(gmem<const DeviceScale>(job.scale.p + i));
    }
    s->row0 = job.random.row0;
    s->step = job.random.step;
    if (job.step.absent()) return;
    const char *step = (const char *)job.step.p;
    s->step = gmem<const uint32_t>((void *)(step + offsetof(DeviceStep, step.step))).ld(0);
    s->row0 += gmem<const int64_t>((void *)(step + offsetof(DeviceStep, row0))).ld(0);
}

/* Codes and the scale, or what waits for it, of one block: y are its 16 values. */
template <QuantizeMode mode>
__device__ inline uint32_t quantize_block(const TileShared *s, uint32_t (&code)[2], const F32x2 (&pair)[8], float amax,
                                          const QuantizeJob &job, int copy, const Nvfp4Scale &tensor, uint32_t step,
                                          uint32_t row, uint32_t block)
{
    const QuantizeCopy &q = job.copy[copy];
    uint32_t kept;
    float y[16], factor;
    if (mode == QUANTIZE_ANY) {
        factor = block_encode(&kept, f32_mul(amax, q.form.headroom), tensor, job.pow2);
    } else {
        kept = e4m3_nearest(f32_mul(amax, tensor.multiplier)); /* Inf saturates as FLT_MAX does */
        factor = s->factor[copy][kept];
    }
    bool stochastic = mode == QUANTIZE_STOCHASTIC || (mode == QUANTIZE_ANY && q.form.rounding == ROUND_STOCHASTIC);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        F32x2 scaled = f32x2_mul(pair[i], F32x2{factor, factor});
        if (stochastic) scaled = f32x2_mul(scaled, F32x2{0x1p-14f, 0x1p-14f});
        y[2 * i] = scaled.a, y[2 * i + 1] = scaled.b;
    }
    if (mode != QUANTIZE_ANY) {
        encode(code, y, mode, job.random.key, step, row, block, q.place);
        return kept;
    }
    if (!q.form.four_over_six) {
        encode(code, y, stochastic ? QUANTIZE_STOCHASTIC : QUANTIZE_NEAREST, job.random.key, step, row, block, q.place);
        return kept;
    }
    uint8_t six, four;
    uint32_t other[2];
#pragma unroll
    for (int i = 0; i < 8; i++) y[2 * i] = pair[i].a, y[2 * i + 1] = pair[i].b;
    nvfp4_scales_4_6(amax, &tensor, &six, &four);
    float error = try_4_6(code, y, six, tensor, q.form.four_over_six);
    if (!(try_4_6(other, y, four, tensor, q.form.four_over_six) < error)) return six;
    code[0] = other[0], code[1] = other[1];
    return four;
}

/* One block of the row copy, from its words: its codes; the scale goes to its place in the tile. */
template <QuantizeMode mode>
__device__ inline Pack<uint32_t, 2> quantize_row_block(TileShared *s, Seen *seen, const uint32_t (&word)[8],
                                                       const QuantizeJob &job, const Nvfp4Scale &tensor, uint32_t step,
                                                       int kept_at, uint32_t row, uint32_t block)
{
    uint32_t larger = word[0], nan = 0, code[2];
    F32x2 pair[8];
    Pack<uint32_t, 2> words;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        if (i) larger = bf16x2_larger(larger, word[i]);
        if (mode == QUANTIZE_ANY) nan = bf16x2_larger<true>(nan, word[i]);
        pair[i] = both_halves(word[i]);
    }
    float amax = larger_half(larger);
    if (mode == QUANTIZE_ANY) see(seen, amax, nan);
    s->kept[0][kept_at] = (uint16_t)quantize_block<mode>(s, code, pair, amax, job, 0, tensor, step, row, block);
    words.v[0] = code[0], words.v[1] = code[1];
    return words;
}

/* ---- rows ---- */

template <int W>
__device__ inline void store_plain(const QuantizeJob &job, const uint32_t (&word)[8], int64_t r, int64_t c)
{
    bf16 x[16];
    memcpy(x, word, sizeof x);
    gmem<bf16> to = job.plain + (r * job.plain_ld + c);
    if constexpr (W > 1) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            Pack<bf16, 8> pack;
            memcpy(&pack, word + 4 * i, sizeof pack);
            to.template st_pack<8>(8 * i, pack);
        }
    } else {
        for (int i = 0; i < 16 && c + i < job.part_cols; i++) to.st(i, x[i]);
    }
}

/* What a thread does with rows: blocks of 16 columns, ROUNDS of them ROWS apart, in every part of the source. */
template <int parts_> struct RowPass {
    static constexpr int parts = parts_, BLOCKS = 8 / parts, ROWS = BLOCK / BLOCKS, ROUNDS = TILE / ROWS;
    int r0, c; /* first row of the tile; first column of the block, in its part */
    int first, block;
    int row_end, col_end; /* of the matrix in the tile */
    int inside_end;       /* row_end where the block has columns of the matrix, else 0 */

    __device__ RowPass(const QuantizeJob &job, int r0_, int c0)
    {
        block = (int)threadIdx.x % BLOCKS, first = (int)threadIdx.x / BLOCKS;
        r0 = r0_, c = c0 + 16 * block;
        row_end = tile_end(job.rows - r0), col_end = tile_end(job.part_cols - c0);
        inside_end = 16 * block < col_end ? row_end : 0;
    }
    __device__ int row(int round) const { return first + round * ROWS; }
};

/* Where the 16 bytes of half a block are in the tile. */
template <int parts> __device__ inline int chunk_of(const RowPass<parts> &p, int round, int part, int half)
{
    int tile_block = part * p.BLOCKS + p.block;
    return (p.first + round * p.ROWS) * 16 + ((2 * tile_block + half) ^ tile_block / 4);
}

template <int parts>
__device__ inline void keep_tile(TileShared *s, const RowPass<parts> &p, const uint32_t (&word)[4 / parts][parts][8])
{
#pragma unroll
    for (int i = 0; i < p.ROUNDS; i++)
#pragma unroll
        for (int part = 0; part < parts; part++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint32_t *w = word[i][part] + 4 * half;
                if (p.row(i) >= p.inside_end) s->tile[chunk_of<parts>(p, i, part, half)] = make_uint4(0, 0, 0, 0);
                if (p.row(i) < p.inside_end)
                    s->tile[chunk_of<parts>(p, i, part, half)] = make_uint4(w[0], w[1], w[2], w[3]);
            }
}

template <int parts>
__device__ inline void load_kept(uint32_t (&word)[8], const TileShared *s, const RowPass<parts> &p, int round, int part)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint4 v = s->tile[chunk_of<parts>(p, round, part, half)];
        word[4 * half] = v.x, word[4 * half + 1] = v.y, word[4 * half + 2] = v.z, word[4 * half + 3] = v.w;
    }
}

template <QuantizeMode mode, int parts>
__device__ inline void make_row_copy(TileShared *s, Seen *seen, const QuantizeJob &job, const RowPass<parts> &p)
{
    const QuantizeCopy &q = job.copy[0];
    uint32_t row0 = (uint32_t)(s->row0 + p.r0) + (uint32_t)p.first;
    const Nvfp4Scale tensor = s->scale[0].tensor; /* in registers: stores to shared memory leave them alone */
    uint32_t step = s->step;
#pragma unroll
    for (int part = 0; part < parts; part++) {
        int column = part * job.part_cols + p.c;
        bool stores = column / 8 < q.ld_words;
        int end = stores ? (parts == 1 ? p.row_end : p.inside_end) : 0;
        int kept0 = kept_place(p.first, part * p.BLOCKS + p.block);
        gmem<uint32_t> to = q.codes + ((int64_t)(p.r0 + p.first) * q.ld_words + column / 8);
#pragma unroll
        for (int i = 0; i < p.ROUNDS; i++) {
            uint32_t word[8];
            load_kept<parts>(word, s, p, i, part);
            Pack<uint32_t, 2> words = quantize_row_block<mode>(s, seen, word, job, tensor, step,
                                                               kept0 + i * kept_place(p.ROWS, 0), row0 + i * p.ROWS,
                                                               (uint32_t)(column / 16));
            if (p.row(i) < end) rows_on(to, i * p.ROWS, q.ld_words).template st_pack<2>(0, words);
        }
    }
}

template <class Source, int W, QuantizeMode mode, bool SUMS>
__device__ inline void quantize_rows(TileShared *s, Seen *seen, const Source &from, const QuantizeJob &job, int r0,
                                     int c0)
{
    using Late = SourceTile<Source, W>;
    constexpr int parts = Source::parts;
    static_assert(sizeof(Late) <= sizeof s->codes, "codes come later");
    RowPass<parts> p(job, r0, c0);
    Late *late = (Late *)s->codes;
    BlockLoader<typename Late::Early, W> loader(Late::early(from), p.c, job.part_cols, r0 + p.first);
    uint32_t word[4 / parts][parts][8];
#pragma unroll
    for (int i = 0; i < p.ROUNDS; i++)
        if (p.row(i) < p.inside_end) loader.load(word[i], i * p.ROWS);
    late->fill(from, r0, c0, p.row_end, p.col_end);
    set_up_tile<mode>(s, job);
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int i = 0; i < p.ROUNDS; i++)
            late->template finish<4>(word[i][0] + 4 * half, p.row(i), 16 * p.block + 8 * half);
        __syncwarp(); /* for the compiler: gains of half a block are kept, not of all */
    }
    keep_tile<parts>(s, p, word);
    if (mode == QUANTIZE_ANY && !job.plain.absent()) {
#pragma unroll
        for (int i = 0; i < p.ROUNDS; i++)
#pragma unroll
            for (int part = 0; part < parts; part++)
                if (p.row(i) < p.inside_end)
                    store_plain<W>(job, word[i][part], r0 + p.row(i), part * job.part_cols + p.c);
    }
    __syncwarp(); /* for the compiler: words are read back one block at a time, not kept in registers */
    if (job.copy[0].made) make_row_copy<mode, parts>(s, seen, job, p);
}

/* ---- columns ---- */

/* Words of two columns of the tile, 16 rows from row on. */
__device__ inline void tile_columns(uint32_t (&word)[16], const TileShared *s, int pair, int row)
{
    int chunk = pair / 4, place = (chunk ^ chunk / 8) * 4 + pair % 4;
    const uint32_t *at = (const uint32_t *)s->tile + row * 64 + place;
#pragma unroll
    for (int i = 0; i < 16; i++) word[i] = at[i * 64];
}

/* One block each of two columns, from their words. */
template <QuantizeMode mode>
__device__ inline void quantize_column_blocks(TileShared *s, Seen *seen, uint32_t (&code)[2][2],
                                              const uint32_t (&word)[16], const QuantizeJob &job,
                                              const Nvfp4Scale &tensor, uint32_t step, int kept_at, uint32_t column,
                                              uint32_t block)
{
    uint32_t larger = word[0], nan = 0;
    F32x2 x[2][8];
#pragma unroll
    for (int i = 0; i < 16; i++) {
        if (i) larger = bf16x2_larger(larger, word[i]);
        if (mode == QUANTIZE_ANY) nan = bf16x2_larger<true>(nan, word[i]);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        F32x2 even = both_halves(word[2 * i]), odd = both_halves(word[2 * i + 1]);
        x[0][i] = F32x2{even.a, odd.a};
        x[1][i] = F32x2{even.b, odd.b};
    }
    F32x2 amax = both_halves(larger);
#pragma unroll
    for (int k = 0; k < 2; k++) {
        float most = fmaxf(fabsf(k ? amax.b : amax.a), 0.0f); /* all NaN: 0 */
        if (mode == QUANTIZE_ANY) see(seen, most, nan);
        s->kept[1][kept_at + 16 * k] = (uint16_t)quantize_block<mode>(s, code[k], x[k], most, job, 1, tensor, step,
                                                                      column + k, block);
    }
}

template <QuantizeMode mode, bool SUMS, int parts>
__device__ inline void quantize_columns(TileShared *s, Seen *seen, const QuantizeJob &job, int r0, int c0)
{
    int pair = (int)threadIdx.x % 64, quarter = (int)threadIdx.x / 64;
    int row_end = tile_end(job.rows - r0);
    uint32_t column = (uint32_t)column_of<parts>(job, c0, 2 * pair), block0 = (uint32_t)((s->row0 + r0) / 16);
    const Nvfp4Scale tensor = s->scale[1].tensor;
    uint32_t step = s->step;
    bool sums = has_sums<mode, SUMS>(job), made = job.copy[1].made, rht = job.copy[1].rht;
    uint32_t code[2][2][2]; /* [block][column] */
    F32x2 sum = {0, 0};
#pragma unroll
    for (int b = 0; b < 2; b++) {
        int tile_block = 2 * quarter + b;
        uint32_t word[16];
        tile_columns(word, s, pair, 16 * tile_block);
        if (sums) {
#pragma unroll
            for (int i = 0; i < 16; i++) sum = f32x2_add(sum, both_halves(word[i]));
        }
        if (rht) rht16_rounded(word);
        if (!made) continue;
        quantize_column_blocks<mode>(s, seen, code[b], word, job, tensor, step, kept_place(2 * pair, 2 * quarter) + b,
                                     column, block0 + (uint32_t)tile_block);
        if (b && 16 * tile_block >= row_end) /* a transform leaves minus zeros in half a word's padding */
            code[b][0][0] = code[b][0][1] = code[b][1][0] = code[b][1][1] = 0;
    }
    if (sums) *(F32x2 *)&s->sums[quarter][2 * pair] = sum;
    if (!made) return;
#pragma unroll
    for (int k = 0; k < 2; k++)
        s->codes[pair * 8 + ((k * 4 + quarter) ^ pair % 8)] = make_uint4(code[0][k][0], code[0][k][1], code[1][k][0],
                                                                         code[1][k][1]);
}

/* ---- what passed through shared memory ---- */

template <int parts>
__device__ inline void store_column_codes(const TileShared *s, const QuantizeJob &job, int r0, int c0)
{
    const QuantizeCopy &q = job.copy[1];
    int tile_column = (int)threadIdx.x / 4, chunk = (int)threadIdx.x % 4, pair = tile_column / 2;
    int column = c0 + tile_column, word = r0 / 8 + 4 * chunk;
    if (column >= job.part_cols || word >= q.ld_words) return;
    const uint4 *codes = &s->codes[pair * 8 + ((tile_column % 2 * 4 + chunk) ^ pair % 8)];
    gmem<uint32_t> to = q.codes + ((int64_t)column * q.ld_words + word);
#pragma unroll
    for (int round = 0; round < 2; round++) { /* 64 columns on: in the other half, or part */
        if (round && parts == 1 && column + 64 >= job.part_cols) continue;
        uint4 v = codes[round * TILE * 2];
        Pack<uint32_t, 4> words;
        words.v[0] = v.x, words.v[1] = v.y, words.v[2] = v.z, words.v[3] = v.w;
        if (parts == 1)
            rows_on(to, 64 * round, q.ld_words).template st_pack<4>(0, words);
        else
            to.template st_pack<4>((int64_t)round * job.part_cols * q.ld_words, words);
    }
}

/* Four scales that are next to each other, as bytes: E4M3, or 11 bits less a base, where what is below it is 0. */
__device__ inline uint32_t scale_word(uint32_t low, uint32_t high, uint32_t base)
{
    if (base) {
        uint32_t kept[4] = {low & 0xffff, low >> 16, high & 0xffff, high >> 16}, word = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) word |= (kept[i] > base ? kept[i] - base : 0u) << 8 * i;
        return word;
    }
    return choose_bytes(low, high, 0x6420);
}

/* The largest of what waits becomes 255: 32 powers of two lie below, E4M3 knows 18. */
__device__ inline uint32_t base_of(uint32_t largest) { return largest > 255 ? largest - 255 : 0; }

/* 64 threads a copy, 16 bytes each. Both copies by the same instructions. */
template <int parts>
__device__ inline void store_scales(const TileShared *s, const QuantizeJob &job, const uint32_t (&base)[2], int r0,
                                    int c0)
{
    int copy = (int)threadIdx.x / 64, half = (int)threadIdx.x / 32 % 2, row = (int)threadIdx.x % 32;
    if (copy > 1 || !(copy ? job.copy[1].made : job.copy[0].made)) return;
    gmem<uint32_t> to = (copy ? job.copy[1].scales : job.copy[0].scales) + row * 4;
    int tiles = copy ? job.copy[1].scale_tiles : job.copy[0].scale_tiles;
    int outer = copy ? c0 : r0, k = copy ? r0 + 64 * half : column_of<parts>(job, c0, 64 * half);
    if (k >= (copy ? job.rows : parts * job.part_cols)) return;
    const uint4 *kept = (const uint4 *)(s->kept[0] + threadIdx.x * 16);
    uint4 low = kept[0], high = kept[1];
    uint32_t less = copy ? base[1] : base[0];
    Pack<uint32_t, 4> words;
    words.v[0] = scale_word(low.x, low.y, less), words.v[1] = scale_word(low.z, low.w, less);
    words.v[2] = scale_word(high.x, high.y, less), words.v[3] = scale_word(high.z, high.w, less);
    if (copy == 0 || parts == 1) {
        to.template st_pack<4>(((int64_t)(outer / TILE) * tiles + k / 64) * 128, words);
        return;
    }
#pragma unroll
    for (int part = 0; part < parts; part++) { /* 64 columns each, in tiles of 128 */
        int column = part * job.part_cols + c0;
        Pack<uint32_t, 2> two;
        two.v[0] = words.v[2 * part], two.v[1] = words.v[(2 * part + 1) % 4];
        to.template st_pack<2>(((int64_t)(column / TILE) * tiles + k / 64) * 128 + column % TILE / 32, two);
    }
}

/* Sums of 64 rows, a thread a column: the first 32 rows' and the next's. */
template <int parts> __device__ inline void store_sums(const TileShared *s, const QuantizeJob &job, int r0, int c0)
{
    int tile_column = (int)threadIdx.x % TILE, half = (int)threadIdx.x / TILE;
    int piece = r0 / SUM_ROWS + half, column = column_of<parts>(job, c0, tile_column);
    if (piece * SUM_ROWS >= job.rows || c0 + tile_column % (TILE / parts) >= job.part_cols) return;
    job.partial.st((int64_t)(2 * piece * parts) * job.part_cols + column,
                   f32_add(s->sums[2 * half][tile_column], s->sums[2 * half + 1][tile_column]));
}

/* What waits in a copy's tile: its largest, by all threads. */
__device__ inline void find_largest(TileShared *s, int copy)
{
    uint32_t largest = 0;
    for (int i = (int)threadIdx.x; i < TILE_SCALES; i += BLOCK)
        largest = s->kept[copy][i] > largest ? s->kept[copy][i] : largest;
    atomicMax(&s->largest[copy], largest);
}

template <class Source, int W, QuantizeMode mode, bool SUMS>
__device__ inline void make_tile(TileShared *s, const Source &from, const QuantizeJob &job)
{
    constexpr int parts = Source::parts;
    int r0 = (int)blockIdx.y * TILE, c0 = (int)blockIdx.x * (TILE / parts);
    Seen seen[2] = {};
    quantize_rows<Source, W, mode, SUMS>(s, &seen[0], from, job, r0, c0);
    __syncthreads();
    if (job.copy[1].made || has_sums<mode, SUMS>(job)) quantize_columns<mode, SUMS, parts>(s, &seen[1], job, r0, c0);
    __syncthreads();
    uint32_t base[2] = {0, 0};
    if (mode == QUANTIZE_ANY && job.pow2) {
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (job.copy[i].made) find_largest(s, i);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 2; i++) {
            base[i] = base_of(s->largest[i]);
            if (threadIdx.x == 0) job.tile_base.st(2 * ((int64_t)blockIdx.y * gridDim.x + blockIdx.x) + i, base[i]);
        }
    }
    store_scales<parts>(s, job, base, r0, c0);
    if (job.copy[1].made) store_column_codes<parts>(s, job, r0, c0);
    if (has_sums<mode, SUMS>(job)) store_sums<parts>(s, job, r0, c0);
    if (mode == QUANTIZE_ANY && job.pow2) publish_block(job, seen, s->seen);
}

/* Blocks of a processor in the mode that asks at run time; a source that would spill has fewer. */
template <class Source> constexpr int any_mode_blocks = TILE_BLOCKS;

template <class Source, int W, QuantizeMode mode, bool SUMS>
__global__ void __launch_bounds__(BLOCK, mode == QUANTIZE_ANY ? any_mode_blocks<Source> : TILE_BLOCKS)
    quantize_tile(Source from, QuantizeJob job)
{
    __shared__ TileShared shared;
    make_tile<Source, W, mode, SUMS>(&shared, from, job);
}

#endif
