/* Checkpoints: complete or absent, whatever happens while one is written.
 *
 *     RUN/checkpoints/step_00001000/
 *         model.safetensors       masters under Hugging Face names (hf.h): BF16 or F32; vectors F32
 *         optimizer.safetensors   "m." and "v." + the same names, F32
 *         config.json             the run's options and what was resolved from them
 *         state.json              step, seed, data receipt, and a hash of every tensor, header and of config.json
 *
 * Writing: everything into step_00001000.tmp, each file flushed to the disk, then one rename, then older checkpoints
 * are renamed to *.old and deleted. So a name step_XXXXXXXX is complete, kill -9 at any instant leaves the one before,
 * and leftovers (*.tmp, *.old) are swept by the next write. state.json is written last and carries a hash of its own
 * text; hashes are hash64_pieces of a tensor's bytes on disk. Reading checks all of them before anything is used.
 *
 * Test hook: LLMC_TEST_STOP=open|middle|sync|rename|renamed|delete in the environment kills the process (SIGKILL)
 * there; ":N" after it lets the point be passed N times first ("sync" is passed twice a checkpoint, once for each file
 * of tensors; "middle" once for each tensor of the middle parameter).
 *
 * Floor 4.
 */
#ifndef LLMC_CHECKPOINT_H
#define LLMC_CHECKPOINT_H

#include "json.h"
#include "model.h"

C_BEGIN

typedef struct {
    int64_t step; /* optimizer steps done */
    uint64_t seed;
    uint64_t data_hash;       /* receipt of all batches consumed, chained */
    uint64_t last_batch_hash; /* of the last step's batches alone: can be read again on resume */
    uint64_t file_list_hash;  /* of the training files */
    uint64_t state_hash;      /* masters, m, v */
} RunState;

/* Called by all ranks: rank 0 writes, and the files do not tell how many there were.
 * Writes RUN/checkpoints/step_<state.step> and deletes older ones beyond `keep` (0: keep all). config: the text of
 * config.json. 0, or -1 with the reason (disk full, not writable), and what was there before is as it was. */
int checkpoint_write(const char *run_dir, const Model *model, const RunState *state, const char *config, int64_t keep,
                     Error *error);

/* Reads state and config (owned by the caller) and verifies every hash of the folder; without `optimizer` those of m
 * and v are left out, and their file may be missing. 0 or -1. */
int checkpoint_verify(const char *dir, bool optimizer, RunState *state, Json **config, Error *error);

/* Fills masters (and m, v when `optimizer`) from a folder that checkpoint_verify accepted, and checks shapes. 0 or -1.
 */
int checkpoint_load(const char *dir, Model *model, bool optimizer, Error *error);

/* The newest folder of a run that verifies, in `dir` (owned by the caller), with its state and config; says on stderr
 * which ones it skipped and why. 1 found, 0 there is none. */
int checkpoint_newest(const char *run_dir, char **dir, RunState *state, Json **config);

/* Deletes those before `newest` that are beyond `keep`; 0 keeps all. What cannot be deleted is said on stderr and stays. */
void checkpoint_prune(const char *run_dir, int64_t newest, int64_t keep);

/* How many step_* folders a run has; and deletes those of steps beyond `step` (-1: all). */
int64_t checkpoint_count(const char *run_dir);
int checkpoint_delete_after(const char *run_dir, int64_t step, Error *error);

C_END
#endif
