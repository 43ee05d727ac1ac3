/* Where a run starts: the model that the options ask for, and the checkpoint to go on from.
 *
 * A resume is exact or refused: what would silently make another run of it (shape, precision, seed, files, tokens of a
 * step) must be the same; what may change (learning rate, steps ..., and with allow_recipe_change the recipe) is said on
 * stderr. Nothing here changes the run folder. Floor 4.
 */
#ifndef LLMC_START_H
#define LLMC_START_H

#include "checkpoint.h"
#include "dataloader.h"
#include "options.h"

C_BEGIN

/* The model in memory that the options of `train` or `plan` ask for, with precision auto resolved before. 0, or -1 with
 * the reason. */
int start_spec(const Options *options, ModelSpec *spec, Error *error);
/* Options and model of a checkpoint's config.json; options_free is due in every case. `dir` for messages. */
int start_saved(Options *saved, ModelSpec *spec, const Json *config, const char *dir, Error *error);

typedef struct {
    char *dir;      /* the checkpoint's folder, or NULL: from step 0 */
    RunState state; /* of that checkpoint, or of step 0 */
    Json *config;   /* of that checkpoint, or NULL */
} Start;

/* Follows --resume and --overwrite. Dies when run_dir holds a run and neither was given, when nothing complete is
 * there. */
void start_choose(Start *start, const Options *options);
/* Replaces precision auto by that of the checkpoint, else by what suits model and machine. `reason`: which and why, one
 * line; "as asked" where a precision was given. 0, or -1 (no such model, or the checkpoint's config.json is broken). */
int start_resolve(const Start *start, Options *options, bool native_fp4, char reason[160], Error *error);
/* Is the run to be continued this one? `data` was opened at the last consumed step (start_first_step), which is read
 * again and compared with the receipt. Dies with the reason. */
void start_check(const Start *start, const Options *options, const ModelSpec *spec, DataLoader *data, Comm *comm);
void start_free(Start *start);

/* The step at which the data is opened for start_check: the last one consumed. */
static inline int64_t start_first_step(const Start *start) { return start->state.step > 0 ? start->state.step - 1 : 0; }

C_END
#endif
