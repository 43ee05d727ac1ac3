/* The folders of a run's checkpoints: which are there, and how one appears and goes as a whole.
 *
 *     RUN/checkpoints/step_00001000         complete
 *     RUN/checkpoints/step_00001000.tmp     being written
 *     RUN/checkpoints/step_00001000.old     being deleted
 *
 * A folder is written as .tmp and renamed once, after everything in it is on the disk; an old one is renamed to .old
 * before it is deleted. So kill -9 at any instant leaves every name step_XXXXXXXX complete, and what it leaves over is
 * swept by the next write.
 *
 * Test hook: LLMC_TEST_STOP=POINT in the environment kills the process (SIGKILL) where checkpoint_test_stop is called
 * with that name: rename|renamed|delete here, open|middle|sync in checkpoint.c. ":N" after it lets the point be passed N
 * times first.
 *
 * Floor 4.
 */
#ifndef LLMC_CHECKPOINT_FOLDER_H
#define LLMC_CHECKPOINT_FOLDER_H

#include "common.h"

C_BEGIN

/* RUN/checkpoints/step_XXXXXXXX and a suffix; owned by the caller. */
char *checkpoint_folder(const char *run_dir, int64_t step, const char *suffix);

/* An empty .tmp, leftovers swept; and .tmp, whose files are on the disk, takes its name. 0 or -1 with the reason. */
int checkpoint_begin_folder(const char *run_dir, int64_t step, Error *error);
int checkpoint_end_folder(const char *run_dir, int64_t step, Error *error);

/* Step of the newest folder before `step` (INT64_MAX: of all), or -1; how many a run has. */
int64_t checkpoint_before(const char *run_dir, int64_t step);
int64_t checkpoint_count(const char *run_dir);

/* Deletes those of steps beyond `step` (-1: all). 0 or -1. */
int checkpoint_delete_after(const char *run_dir, int64_t step, Error *error);
/* Deletes those before `newest` that are beyond `keep`; 0 keeps all. What cannot be deleted is said on stderr and stays. */
void checkpoint_prune(const char *run_dir, int64_t newest, int64_t keep);

void checkpoint_test_stop(const char *point);

C_END
#endif
