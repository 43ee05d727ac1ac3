/* Which number format every matrix product uses: a table over phases of the run x blocks x projections, filled here
 * from the configuration and read by gpt.c, which never names a precision.
 *
 *     product                 first operand                            second operand
 *     fprop  Y = X W^T        X   1x16 along in, nearest               W    16x16 blocks, nearest
 *     dgrad  dX = dY W        dY  1x16 along out, stochastic           W^T  the same codes
 *     wgrad  dW = dY^T X      dY^T RHT, 1x16 along tokens, stochastic  X^T  RHT, 1x16 along tokens, nearest
 *
 * is the recipe nvfp4 (arXiv 2509.25149), with the last 15% of the blocks (rounded up), embedding and head in BF16. Each
 * field of RecipeSpec changes one thing about it. 16x16 blocks exist so that fprop and dgrad see the same weight; where
 * fprop is BF16, dgrad quantizes its weight 1x16 along out (the paper's appendix D).
 *
 * Floor 3.
 */
#ifndef LLMC_RECIPE_H
#define LLMC_RECIPE_H

#include "config.h"
#include "json.h"

C_BEGIN

/* The order of every enum here is that of the option's choices (options.c). */
typedef enum { PRECISION_FP32, PRECISION_BF16, PRECISION_NVFP4, PRECISION_AUTO } Precision;
typedef enum { MASTER_DEFAULT, MASTER_BF16, MASTER_FP32 } Master; /* default: fp32 under precision fp32, else bf16 */
typedef enum { PRODUCT_IN_NVFP4, PRODUCT_IN_BF16 } ProductFormat;
typedef enum { WEIGHTS_16X16, WEIGHTS_1X16 } WeightBlocks;
typedef enum { RHT_WGRAD, RHT_OFF } RhtScope;
typedef enum { STOCHASTIC_GRADIENTS, STOCHASTIC_OFF, STOCHASTIC_ALL } StochasticScope;
typedef enum { FOUR_SIX_OFF, FOUR_SIX_ACTIVATIONS, FOUR_SIX_WEIGHTS, FOUR_SIX_BOTH } FourSixScope;
typedef enum { FOUR_SIX_MAE, FOUR_SIX_MSE } FourSixMetric;
typedef enum { HEADROOM_1, HEADROOM_17_16 } Headroom;
typedef enum { SWITCH_FORWARD, SWITCH_ALL } SwitchScope;

enum { PROJ_QKV, PROJ_O, PROJ_UP, PROJ_DOWN, PROJ_COUNT };

typedef struct { /* the options of the recipe; all but precision and master are for nvfp4 */
    Precision precision;
    Master master;
    int64_t bf16_first_layers, bf16_last_layers; /* last -1: 15% of the blocks, rounded up */
    unsigned quantize_projections;               /* set of 1 << PROJ_* */
    ProductFormat fprop, dgrad, wgrad;
    WeightBlocks weight_blocks;
    RhtScope rht;
    StochasticScope stochastic_rounding;
    TensorScaleMode tensor_scale;
    FourSixScope four_over_six;
    FourSixMetric four_over_six_metric;
    Headroom gradient_headroom;
    double switch_to_bf16_at; /* fraction of `steps`; 1: never */
    SwitchScope switch_scope;
    int64_t steps; /* of the run */
    bool shadow;   /* also a phase in BF16 throughout (precision fp32: FP32), for shadow steps */
} RecipeSpec;

typedef struct {
    int64_t L;              /* blocks */
    int phases;             /* all, the shadow's too */
    int shadow_phase;       /* 0: none; otherwise the last one, which no step enters by itself */
    uint32_t *first_step;   /* [phases] owned; first_step[0] = 0, the shadow's UINT32_MAX */
    LinearFormats *formats; /* [phases][L][PROJ_COUNT] owned */
    LinearFormats head;     /* plain */
    DType act;              /* dtype of activations between operands, and of the embedding tables as read */
    DType master;           /* dtype of the master copy of every matrix; vectors are FP32 */
} Recipe;

/* The default recipe of a precision: what the options say when they are left alone. */
RecipeSpec recipe_defaults(Precision precision, Master master);

/* The same recipe with nothing left open, so that equal ones are equal in every field: numbers for what was derived,
 * defaults for what means nothing here. */
RecipeSpec recipe_resolved(const RecipeSpec *spec, int64_t L);

/* What precision auto means: nvfp4 where the hardware multiplies FP4 and hidden is at least 2048, else bf16. `reason`
 * says which and why, one line. */
Precision recipe_auto(const GPTConfig *config, bool native_fp4, char reason[160]);

/* Combinations that mean nothing are refused: -1 with the reason. precision auto must be resolved before. Freed with
 * recipe_free. */
int recipe_make(Recipe *recipe, const GPTConfig *config, const RecipeSpec *spec, Error *error);
void recipe_free(Recipe *recipe);

/* Formats of one linear layer in one phase. */
const LinearFormats *recipe_formats(const Recipe *recipe, int phase, int64_t layer, int projection);
int64_t recipe_switch_step(const RecipeSpec *spec);    /* the first step after the switch */
int recipe_phase(const Recipe *recipe, uint32_t step); /* the phase of a step; never the shadow's */
bool recipe_quantizes(const Recipe *recipe);           /* is any operand NVFP4 */
bool recipe_quantizes_tokens(const Recipe *recipe);    /* is one in blocks along tokens: weight gradients */

/* The precision census in short, one line: what the products of blocks and head read, and the masters. */
enum { CENSUS_BYTES = 320 };
void recipe_census(const Recipe *recipe, const GPTConfig *config, char *text, size_t bytes);
/* The census in full, appended to an array, a row for each product of blocks and projections that are alike:
 *     {"from_step":1, "blocks":"0-4", "projections":"qkv o up down", "product":"fprop",
 *      "first":"X nvfp4 1x16 nearest, tensor scale amax", "second":"W nvfp4 16x16 nearest, tensor scale amax"} */
void recipe_census_table(const Recipe *recipe, Json *table);
/* Share of the FLOPs of the blocks' linear layers whose product is in NVFP4, in one phase. */
double recipe_fp4_share(const Recipe *recipe, const GPTConfig *config, int phase);
/* The products that `micro_steps` micro-steps of training run, by kind and format; `chunks` of the classifier. */
ProductCounts recipe_products(const Recipe *recipe, const GPTConfig *config, int phase, Recompute recompute,
                              int64_t micro_steps, int64_t chunks);

const char *precision_name(Precision precision);
const char *format_name(Format format);
const char *projection_name(int projection); /* "qkv" */
const char *product_name(int product);       /* "fprop" */

C_END
#endif
