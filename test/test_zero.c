/* zero.h on paper: over all ranks every row of every parameter has one owner, memory is shared as the stages say, and an
 * NVFP4 matrix travels in a quarter of BF16's bytes. What ranks really compute and send: test_ranks.sh.
 */
#include "cpu/backend.h"
#include "model.h"
#include "test.h"

static const Ops *ops;

static ModelSpec spec_of(Precision precision, int stage)
{
    Error error;
    ModelSpec s = {.recipe = recipe_defaults(precision, MASTER_DEFAULT),
                   .sharding.stage = stage,
                   .train = true,
                   .B = 1,
                   .micro_steps = 2};
    s.config = (GPTConfig){
        .arch = ARCH_LLAMA, .L = 8, .C = 256, .NH = 4, .F = 512, .V = 300, .T = 32, .rope_theta = 1e4};
    if (config_finish(&s.config, &error)) die("%s", error.text);
    return s;
}

static void plan(Model *model, Precision precision, int stage, Comm *comm)
{
    Error error;
    ModelSpec spec = spec_of(precision, stage);
    spec.sharding.comm = comm;
    if (model_plan(model, &spec, ops, &error)) die("%s", error.text);
}

static void test_owners(void)
{
    test_case("every row has one owner, in order, whatever the ranks");
    for (int ranks = 1; ranks <= 9; ranks++)
        for (int stage = 0; stage <= 3; stage++) {
            int64_t next[64] = {0};
            for (int rank = 0; rank < ranks; rank++) {
                Model model;
                Comm comm = {.rank = rank, .ranks = ranks};
                plan(&model, PRECISION_BF16, stage, &comm);
                bool sharded = ranks > 1 && stage > 0;
                CHECK(zero_sharded(&model.zero) == sharded, "%d ranks, stage %d", ranks, stage);
                for (int i = 0; i < model.table.count; i++) {
                    ParamSlice p = zero_slice(&model.zero, i);
                    CHECK(p.row0 % 16 == 0 || p.grad.rows == 0, "%s: begins within 16 rows", model.table.param[i].name);
                    CHECK(p.master.rows == p.grad.rows && p.m.rows == p.grad.rows && p.v.rows == p.grad.rows, "rows");
                    if (sharded && p.grad.rows) {
                        CHECK(p.row0 == next[i], "%d ranks: %s has a gap", ranks, model.table.param[i].name);
                        next[i] = p.row0 + p.grad.rows;
                    }
                    if (!sharded) next[i] = p.grad.rows;
                }
                if (rank == ranks - 1)
                    for (int i = 0; i < model.table.count; i++)
                        CHECK(next[i] == model.table.param[i].rows, "%d ranks: %s is not whole", ranks,
                              model.table.param[i].name);
                model_close(&model);
            }
        }
}

/* Bytes of one rank beside those of one process; slack: units of 16 rows and 256-byte steps. */
static void test_memory(void)
{
    enum { RANKS = 4 };
    size_t alone[PURPOSE_COUNT], of[PURPOSE_COUNT];
    Model model;
    test_case("memory: masters, m, v from stage 1, sums from stage 2, prepared weights from stage 3 on");
    plan(&model, PRECISION_NVFP4, 0, NULL);
    memcpy(alone, model.arena.bytes, sizeof alone);
    size_t floats = 0, table = 0, largest_block = 0;
    for (int b = 0; b < model.table.buckets; b++) {
        size_t bytes = model.table.bucket_elements[b] * sizeof(float);
        floats += bytes;
        if (b >= model.table.layers && bytes > table) table = bytes;
        if (b < model.table.layers && bytes > largest_block) largest_block = bytes;
    }
    model_close(&model);
    for (int stage = 0; stage <= 3; stage++) {
        Comm comm = {.rank = RANKS - 1, .ranks = RANKS};
        plan(&model, PRECISION_NVFP4, stage, &comm);
        memcpy(of, model.arena.bytes, sizeof of);
        double masters = (double)of[PURPOSE_MASTER] / (double)alone[PURPOSE_MASTER];
        double moments = (double)of[PURPOSE_OPTIMIZER] / (double)alone[PURPOSE_OPTIMIZER];
        /* gradients: sums, contributions of two blocks and a table, and the work of their reductions: 3/4 of each */
        double flight = 1.75 * (double)(2 * largest_block + table);
        double sums = ((double)of[PURPOSE_GRADIENT] - flight) / (double)floats;
        printf("measured stage %d of 4 ranks: masters %.3f, m and v %.3f, sums %.3f of one process\n", stage, masters,
               moments, sums);
        CHECK(stage ? masters > 0.24 && masters < 0.29 : masters == 1, "stage %d: masters %.3f", stage, masters);
        CHECK(stage ? moments > 0.24 && moments < 0.29 : moments == 1, "stage %d: moments %.3f", stage, moments);
        CHECK(stage >= 2 ? sums > 0.2 && sums < 0.3 : sums > 0.95 && sums < 1.05, "stage %d: sums %.3f", stage, sums);
        size_t block = 0;
        for (int b = 0; b < model.table.layers; b++) {
            size_t bytes = 0;
            for (int k = 0; k < model.zero.bucket[b].count; k++)
                bytes += (model.zero.shard[model.zero.bucket[b].first + k].prepared_bytes + 255) / 256 * 256;
            if (bytes > block) block = bytes;
        }
        if (stage == 3) {
            size_t tables = of[PURPOSE_PREPARED] - 2 * block;
            model_close(&model);
            plan(&model, PRECISION_NVFP4, 2, &comm);
            CHECK(of[PURPOSE_PREPARED] < model.arena.bytes[PURPOSE_PREPARED], "stage 3 takes as much as stage 2");
            CHECK(tables < 2 * (size_t)(300 + 384) * 256 * 2, "two blocks and the tables: %zu more", tables);
        }
        model_close(&model);
    }
}

static void test_wire(void)
{
    test_case("an NVFP4 matrix is gathered in at most 0.26 of BF16's bytes");
    LinearFormats f;
    Recipe recipe;
    Error error;
    ModelSpec spec = spec_of(PRECISION_NVFP4, 1);
    if (recipe_make(&recipe, &spec.config, &spec.recipe, &error)) die("%s", error.text);
    f = *recipe_formats(&recipe, 0, 0, PROJ_UP);
    Linear w = {.weight = {.rows = 1024, .cols = 256, .row.format = f.w_row, .col.format = f.w_col}};
    WeightPiece piece[WEIGHT_PIECES];
    size_t bytes = 0;
    for (int k = ops->weight_pieces(&w, piece) - 1; k >= 0; k--) bytes += piece[k].bytes;
    double share = (double)bytes / (1024 * 256 * 2);
    printf("measured %.4f of BF16\n", share);
    CHECK(share <= 0.26, "%.4f", share);
    recipe_free(&recipe);
}

int main(void)
{
    Error error;
    if (cpu_open(&ops, "auto", 1, &error)) die("%s", error.text);
    test_owners();
    test_memory();
    test_wire();
    return test_done();
}
