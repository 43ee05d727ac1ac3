/* What low precision does to a run, measured while it trains, without changing it: state, losses and data order are
 * those of a run without telemetry.
 *
 *   every telemetry_every steps   what quantization did to every operand of every block in this step, and how much of
 *                                 each weight gradient is exactly zero
 *   every shadow_every steps      the step's first micro-batch once under the recipe and once in BF16 throughout: how far
 *                                 do loss and weight gradients part?
 *   first step of each phase      the products that the backend ran, against those that the recipe asks for
 *
 * Both go into the step's line of log.jsonl, and with telemetry_table onto the console:
 *
 *     "telemetry":{"operands":{"qkv.x_row":{"layer":[0,1], "error":[..], "zeroed":[..], "clipped":[..],
 *                                           "zero_blocks":[..]}, ...},          roles and layers that are quantized
 *                  "zero_gradients":{"qkv":[..], "o":[..], "up":[..], "down":[..]}}        share, one entry a layer
 *     "shadow":{"loss_gap":0.01, "cosine":{"qkv":[..], ...}, "norm_ratio":{"qkv":[..], ...}}
 *
 * error = |after - before| / |before| in the 2-norm; zeroed and clipped are shares of the elements, zero_blocks of the
 * blocks. loss_gap = loss under the recipe - loss in BF16, mean over the micro-batch; norm_ratio has the recipe's
 * gradient on top; both are "nan" for a gradient of zeros. Floor 4.
 */
#ifndef LLMC_TELEMETRY_H
#define LLMC_TELEMETRY_H

#include "model.h"
#include "options.h"

C_BEGIN

typedef struct {
    double cosine, norm_ratio;
} GradientGap;

typedef struct {
    Model *model;
    int64_t every, shadow_every;
    bool table;
    int checked_phase;            /* whose products were counted last, or -1 */
    int64_t number;               /* of the last step, counted from 1 */
    bool measured, compared;      /* in it: what follows is of that step */
    QuantStats *stats;            /* [L + 1][OPERAND_ROLES] owned */
    double *zero_share, loss_gap; /* [L][PROJ_COUNT] owned */
    GradientGap *gap;             /* [L][PROJ_COUNT] owned */
} Telemetry;

void telemetry_open(Telemetry *telemetry, Model *model, const Options *options);
void telemetry_close(Telemetry *telemetry);

/* gpt_gradients over all micro-batches of the step, and around it what is due. The model has entered the step. */
void telemetry_gradients(Telemetry *telemetry, const Step *step, const Batch *micro_batch);
void telemetry_log(const Telemetry *telemetry, Json *line);
void telemetry_print(const Telemetry *telemetry, int64_t step); /* with telemetry_table */

C_END
#endif
