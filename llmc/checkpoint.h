/* Checkpoints: complete or absent, whatever happens while one is written.
 *
 *     RUN/checkpoints/step_00001000/
 *         model.safetensors                     masters under Hugging Face names (hf.h): BF16 or F32; vectors F32
 *         optimizer-00001-of-00004.safetensors  m and v of the first of 4 ranks: its rows (zero.h) of every parameter, as
 *                                               "m.block.0.qkv" ..., F32; one rank: optimizer.safetensors
 *         config.json                           the run's options and what was resolved from them
 *         state.json                            step, seed, data receipt, a hash of every tensor, header and of config.json
 *
 * Writing, by all ranks at once: rank 0 makes step_00001000.tmp, each rank writes its rows of m and v and rank 0 the
 * gathered masters, every file is flushed to the disk; when all are done rank 0 adds config.json and, last, state.json,
 * which carries a hash of its own text, and renames the folder (checkpoint_folder.h). Hashes are hash64_pieces of a
 * tensor's bytes on disk. Reading checks all of them before anything is used. Any number of ranks at any stage reads what
 * any other wrote: every rank takes its rows out of the files that have them. The folder must be seen by all ranks.
 *
 * In the background: the state is copied first (rank 0: masters and its rows of m and v; the others: their rows), a thread
 * writes the copy while training goes on, and the last act, which needs all ranks, waits for checkpoint_finish.
 *
 * Test hook (checkpoint_folder.h), on every rank: "open"; "middle", once for each tensor of the middle parameter; "sync",
 * twice a checkpoint on rank 0 (model, optimizer), once on the others.
 *
 * Floor 4.
 */
#ifndef LLMC_CHECKPOINT_H
#define LLMC_CHECKPOINT_H

#include "checkpoint_folder.h"
#include "json.h"
#include "model.h"

#include <pthread.h>

C_BEGIN

typedef struct {
    int64_t step; /* optimizer steps done */
    int64_t optimizer_files;
    uint64_t seed;
    uint64_t data_hash;       /* receipt of all batches consumed, chained */
    uint64_t last_batch_hash; /* of the last step's batches alone: can be read again on resume */
    uint64_t file_list_hash;  /* of the training files */
    uint64_t state_hash;      /* masters, m, v */
} RunState;

typedef struct {   /* one checkpoint on its way to the disk; all zero: none has been yet */
    char *run_dir; /* owned, as config; NULL: none is on its way */
    char *config;
    const Model *model;
    RunState state;
    int64_t keep;
    bool background, in_thread;
    pthread_t thread;
    Tensor *tensor;    /* [3][parameters] owned: masters (rank 0), this rank's rows of m, of v */
    const Ops *ops[3]; /* of the memory that the masters, m, v are in; NULL: a copy in the host's */
    char *memory;      /* [bytes] owned: the copy, kept for the next checkpoint */
    size_t bytes;
    Json *hashes; /* of this rank's files, owned */
    int written, status;
    Error error;
} CheckpointWriter;

/* All ranks call these alike. Starts to write RUN/checkpoints/step_<state.step>, after the end of one that is still on
 * its way; config: the text of config.json. Not in the background it is complete on return. finish waits for the end of
 * what was started (nothing: fine) and deletes older checkpoints beyond `keep` (0: keep all). 0; or -1 with the reason
 * (disk full, not writable), or 1 where only other ranks have one, and what was there before is as it was. ready: this
 * rank's files are written, so that finish waits for other ranks at most. */
int checkpoint_start(CheckpointWriter *w, const char *run_dir, const Model *model, const RunState *state,
                     const char *config, int64_t keep, bool background, Error *error);
bool checkpoint_ready(const CheckpointWriter *w);
int checkpoint_finish(CheckpointWriter *w, Error *error);
void checkpoint_close(CheckpointWriter *w); /* after finish */

/* Both at once, without a thread. */
int checkpoint_write(const char *run_dir, const Model *model, const RunState *state, const char *config, int64_t keep,
                     Error *error);

/* Host memory that this rank needs beside the arena while a checkpoint is written. */
size_t checkpoint_copy_bytes(const Model *model, bool background);

/* Reads state and config (owned by the caller) and verifies every hash of the folder; without `optimizer` those of m
 * and v are left out, and their files may be missing. 0 or -1. */
int checkpoint_verify(const char *dir, bool optimizer, RunState *state, Json **config, Error *error);

/* Fills masters (and m, v from so many files; 0: not) from a folder that checkpoint_verify accepted, and checks shapes.
 * 0 or -1. */
int checkpoint_load(const char *dir, Model *model, int64_t optimizer_files, Error *error);

/* The newest folder of a run that verifies, in `dir` (owned by the caller), with its state and config; says on stderr
 * which ones it skipped and why. 1 found, 0 there is none. */
int checkpoint_newest(const char *run_dir, char **dir, RunState *state, Json **config);

C_END
#endif
