/* Which number format every matrix product uses: a table over phases of the run x blocks x projections, filled here
 * from the configuration and read by gpt.c, which never names a precision.
 *
 * Floor 3.
 */
#ifndef LLMC_RECIPE_H
#define LLMC_RECIPE_H

#include "config.h"

C_BEGIN

typedef enum { PRECISION_FP32, PRECISION_BF16 } Precision;
typedef enum { MASTER_DEFAULT, MASTER_BF16, MASTER_FP32 } Master; /* default: fp32 under precision fp32, else bf16 */

enum { PROJ_QKV, PROJ_O, PROJ_UP, PROJ_DOWN, PROJ_COUNT };

typedef struct {
    int phases;
    uint32_t *first_step;   /* [phases] owned; first_step[0] = 0 */
    LinearFormats *formats; /* [phases][L][PROJ_COUNT] owned */
    LinearFormats head;     /* plain */
    DType act;              /* dtype of activations between operands, and of the embedding tables as read */
    DType master;           /* dtype of the master copy of every matrix; vectors are FP32 */
} Recipe;

/* fp32 with a BF16 master is refused: -1 with the reason. Freed with recipe_free. */
int recipe_make(Recipe *recipe, const GPTConfig *config, Precision precision, Master master, Error *error);
void recipe_free(Recipe *recipe);

/* The precision census in short, one line: what the products of blocks and head read, and the masters. */
void recipe_census(const Recipe *recipe, const GPTConfig *config, char *text, size_t bytes);

const char *precision_name(Precision precision);

C_END
#endif
