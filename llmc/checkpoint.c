/* See checkpoint.h. */
#include "checkpoint.h"

#include "file.h"
#include "hf.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char *const FILES[] = {"model.safetensors", "optimizer.safetensors", "config.json", "state.json"};
static const char HEADER[] = "header"; /* among the hashes of a file's tensors: that of its header */
enum { FORMAT_VERSION = 1, NAME_BYTES = 16 + sizeof(((HfTensor *)0)->name) };

/* ---- test hook ---- */

static void test_stop(const char *point)
{
    static int passed;
    const char *asked = getenv("LLMC_TEST_STOP");
    size_t length = strlen(point);
    if (!asked || strncmp(asked, point, length) || (asked[length] && asked[length] != ':')) return;
    if (asked[length] == ':' && passed++ < atoi(asked + length + 1)) return;
    raise(SIGKILL);
}

/* ---- folders ---- */

typedef struct {
    int64_t *step; /* [count] owned, ascending */
    int64_t count;
} StepList;

static int compare_steps(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

/* Steps of the folders step_XXXXXXXX in a run; also sweeps *.tmp and *.old if asked. */
static StepList list_steps(const char *run_dir, bool sweep)
{
    StepList list = {0};
    char *folder = xformat("%s/checkpoints", run_dir);
    DIR *dir = opendir(folder);
    for (struct dirent *entry; dir && (entry = readdir(dir));) {
        char name[32], *end = entry->d_name + 5;
        if (strncmp(entry->d_name, "step_", 5) || !isdigit((unsigned char)*end)) continue;
        int64_t step = strtoll(entry->d_name + 5, &end, 10);
        snprintf(name, sizeof name, "step_%08" PRId64, step);
        if (strncmp(name, entry->d_name, (size_t)(end - entry->d_name)) || name[end - entry->d_name]) continue;
        if (*end == 0) {
            list.step = xrealloc(list.step, (size_t)(list.count + 1) * sizeof *list.step);
            list.step[list.count++] = step;
        } else if (sweep && (!strcmp(end, ".tmp") || !strcmp(end, ".old"))) {
            char *path = xformat("%s/%s", folder, entry->d_name);
            file_delete_folder(path, NULL);
            free(path);
        }
    }
    if (dir) closedir(dir);
    if (list.count) qsort(list.step, (size_t)list.count, sizeof *list.step, compare_steps);
    free(folder);
    return list;
}

static char *step_folder(const char *run_dir, int64_t step, const char *suffix)
{
    return xformat("%s/checkpoints/step_%08" PRId64 "%s", run_dir, step, suffix);
}

/* step_X to step_X.old, which no longer looks like a checkpoint. */
static int set_aside(const char *run_dir, int64_t step, Error *error)
{
    char *path = step_folder(run_dir, step, ""), *old = step_folder(run_dir, step, ".old");
    int status = file_delete_folder(old, error);
    if (!status && rename(path, old)) status = error_set(error, "%s: cannot rename: %s", path, strerror(errno));
    free(path);
    free(old);
    return status;
}

static int delete_checkpoint(const char *run_dir, int64_t step, Error *error)
{
    char *old = step_folder(run_dir, step, ".old");
    int status = set_aside(run_dir, step, error);
    if (!status) test_stop("delete");
    if (!status) status = file_delete_folder(old, error);
    free(old);
    return status;
}

int64_t checkpoint_count(const char *run_dir)
{
    StepList list = list_steps(run_dir, false);
    free(list.step);
    return list.count;
}

int checkpoint_delete_after(const char *run_dir, int64_t step, Error *error)
{
    StepList list = list_steps(run_dir, true);
    int status = 0;
    for (int64_t i = list.count - 1; i >= 0 && list.step[i] > step && !status; i--)
        status = delete_checkpoint(run_dir, list.step[i], error);
    free(list.step);
    return status;
}

/* ---- writing ---- */

static void add_hash(Json *object, const char *key, uint64_t hash)
{
    char text[17];
    snprintf(text, sizeof text, "%016" PRIx64, hash);
    json_add_string(object, key, text);
}

static void tensor_name(char name[NAME_BYTES], const char *prefix, const HfTensor *t)
{
    snprintf(name, NAME_BYTES, "%.8s%.95s", prefix, t->name);
}

/* Of a .safetensors file's length and header: names, dtypes and shapes stand there and nowhere else. */
static int header_hash(const char *path, uint64_t *hash, Error *error)
{
    uint64_t length = 0;
    size_t bytes;
    char *map = file_map(path, &bytes, error);
    if (!map) return -1;
    if (bytes >= sizeof length) memcpy(&length, map, sizeof length);
    bool whole = bytes >= sizeof length && length <= bytes - sizeof length;
    if (whole) *hash = hash64(map, sizeof length + length, 0);
    file_unmap(map, bytes);
    return whole ? 0 : error_set(error, "%s: not a safetensors file, or truncated", path);
}

/* One .safetensors file: a pass over the parameter table for each of `count` kinds of state (master; or m, v). */
static int write_tensors(const char *path, const Model *model, const char *const prefix[], const ShardMember member[],
                         int count, Json *hashes, Error *error)
{
    StWriter *w = st_writer_new();
    int status = 0;
    for (int pass = 0; pass < 2 && !status; pass++) { /* declare all, then stream all */
        if (pass == 1) status = st_writer_begin(w, path, error);
        for (int k = 0; k < count; k++)
            for (int i = 0; i < model->table.count && !status; i++) {
                HfTensor part[HF_PARTS];
                int parts = hf_tensors(&model->spec.config, &model->table.param[i], part);
                Tensor whole = zero_whole(&model->zero, i, member[k]);
                if (pass == 1) whole = zero_gather(&model->zero, i, member[k]);
                for (int p = 0; p < parts && !status; p++) {
                    uint64_t hash;
                    char name[NAME_BYTES];
                    tensor_name(name, prefix[k], &part[p]);
                    if (pass == 0) {
                        st_writer_add(w, name, hf_dtype(whole.dtype), part[p].rank, part[p].shape);
                        continue;
                    }
                    if (i == model->table.count / 2) test_stop("middle");
                    status = hf_write(w, &part[p], whole, model->ops, &hash, error);
                    if (!status) add_hash(hashes, name, hash);
                }
            }
    }
    uint64_t hash = 0;
    if (!status) test_stop("sync");
    if (!status) status = st_writer_end(w, error);
    if (!status) status = header_hash(path, &hash, error);
    if (!status) add_hash(hashes, HEADER, hash);
    st_writer_free(w);
    return status;
}

/* state.json ends with the hash of everything before it, as its last member. Owned by the caller. */
static const char TAIL[] = ",\n\t\"hash\":\t\"", END[] = "\"\n}\n";
enum { TAIL_BYTES = sizeof TAIL - 1 + 16 + sizeof END - 1 };

static char *text_tail(const char *text, size_t bytes)
{
    return xformat("%s%016" PRIx64 "%s", TAIL, hash64(text, bytes, 0), END);
}

static char *state_text(const RunState *state, Json *object, const char *config)
{
    json_add_int(object, "format_version", FORMAT_VERSION);
    json_add_int(object, "step", state->step);
    json_add_int(object, "seed", (int64_t)state->seed);
    add_hash(object, "data_hash", state->data_hash);
    add_hash(object, "last_batch_hash", state->last_batch_hash);
    add_hash(object, "file_list_hash", state->file_list_hash);
    add_hash(object, "state_hash", state->state_hash);
    add_hash(object, "config_hash", hash64(config, strlen(config), 0));
    char *body = json_print(object, true);
    size_t bytes = strlen(body) - 2; /* without newline and brace */
    char *tail = text_tail(body, bytes), *text = xformat("%.*s%s", (int)bytes, body, tail);
    free(body);
    free(tail);
    return text;
}

static int write_files(const char *folder, const Model *model, const RunState *state, const char *config, Error *error)
{
    static const char *const MODEL_PREFIX[] = {""}, *const OPTIMIZER_PREFIX[] = {"m.", "v."};
    static const ShardMember MASTER[] = {SHARD_MASTER}, MOMENTS[] = {SHARD_M, SHARD_V};
    char *path[4], *text = NULL;
    Json *object = json_new_object();
    for (int i = 0; i < 4; i++) path[i] = xformat("%s/%s", folder, FILES[i]);

    test_stop("open");
    int status = write_tensors(path[0], model, MODEL_PREFIX, MASTER, 1, json_add_object(object, FILES[0]), error);
    if (!status)
        status = write_tensors(path[1], model, OPTIMIZER_PREFIX, MOMENTS, 2, json_add_object(object, FILES[1]), error);
    if (!status) status = file_write_text(path[2], config, error);
    if (!status) text = state_text(state, object, config);
    if (!status) status = file_write_text(path[3], text, error);
    if (!status) status = file_sync_folder(folder, error);
    for (int i = 0; i < 4; i++) free(path[i]);
    free(text);
    json_free(object);
    return status;
}

void checkpoint_prune(const char *run_dir, int64_t newest, int64_t keep)
{
    StepList list = list_steps(run_dir, false);
    int64_t older = 0;
    Error error;
    for (int64_t i = 0; i < list.count; i++) older += list.step[i] < newest;
    for (int64_t i = 0; keep > 0 && i < older - (keep - 1); i++)
        if (delete_checkpoint(run_dir, list.step[i], &error)) note("note: old checkpoint kept: %s", error.text);
    free(list.step);
}

/* `folder` becomes `final`. A complete folder of the same step, from before a resume, is exchanged for it at once where
 * the system can, else set aside first. */
static int put_in_place(const char *run_dir, int64_t step, const char *folder, const char *final, Error *error)
{
#ifdef RENAME_EXCHANGE
    if (renameat2(AT_FDCWD, folder, AT_FDCWD, final, RENAME_EXCHANGE) == 0) return file_delete_folder(folder, error);
#endif
    if (access(final, F_OK) == 0 && set_aside(run_dir, step, error)) return -1;
    return rename(folder, final) ? error_set(error, "%s: cannot rename: %s", folder, strerror(errno)) : 0;
}

/* What rank 0 gathers while it writes, in the same order. */
static void help_writing(const Model *model)
{
    for (int i = 0; i < model->table.count; i++) zero_gather(&model->zero, i, SHARD_MASTER);
    for (int i = 0; i < model->table.count; i++) zero_gather(&model->zero, i, SHARD_M);
    for (int i = 0; i < model->table.count; i++) zero_gather(&model->zero, i, SHARD_V);
}

int checkpoint_write(const char *run_dir, const Model *model, const RunState *state, const char *config, int64_t keep,
                     Error *error)
{
    Comm *comm = model->spec.sharding.comm;
    if (comm->rank > 0) {
        help_writing(model);
        comm->barrier(comm);
        return 0;
    }
    char *parent = xformat("%s/checkpoints", run_dir), *final = step_folder(run_dir, state->step, "");
    char *folder = step_folder(run_dir, state->step, ".tmp");
    bool first = access(parent, F_OK) != 0;
    int status = file_make_folder(parent, error);
    if (!status && first) status = file_sync_folder(run_dir, error);
    free(list_steps(run_dir, true).step);

    if (!status) status = file_make_folder(folder, error);
    if (!status) status = write_files(folder, model, state, config, error);
    if (!status) test_stop("rename");
    if (!status) status = put_in_place(run_dir, state->step, folder, final, error);
    if (!status) status = file_sync_folder(parent, error);
    if (!status) test_stop("renamed");
    if (status)
        file_delete_folder(folder, NULL);
    else
        checkpoint_prune(run_dir, state->step, keep);
    if (!status) comm->barrier(comm);
    free(parent);
    free(final);
    free(folder);
    return status;
}

/* ---- reading ---- */

static int read_hash(const Json *object, const char *key, const char *path, uint64_t *hash, Error *error)
{
    const char *text = json_string(json_get(object, key));
    char *end;
    if (!text || strlen(text) != 16) return error_set(error, "%s: no 64-bit hash under \"%s\"", path, key);
    *hash = strtoull(text, &end, 16);
    return *end ? error_set(error, "%s: \"%s\" is not a hash: %s", path, key, text) : 0;
}

/* Does a text end with the hash of what stands before it? Byte by byte, so that no change goes unseen. */
static bool has_own_hash(const char *text, size_t bytes)
{
    size_t hashed = bytes > TAIL_BYTES ? bytes - TAIL_BYTES : 0;
    char *tail = text_tail(text, hashed);
    bool same = strcmp(text + hashed, tail) == 0;
    free(tail);
    return same;
}

static int read_state_fields(const Json *object, const char *path, RunState *state, uint64_t *config_hash, Error *error)
{
    int64_t version, seed;
    if (!json_int(json_get(object, "format_version"), &version) || version != FORMAT_VERSION ||
        !json_int(json_get(object, "step"), &state->step) || !json_int(json_get(object, "seed"), &seed))
        return error_set(error, "%s: not a checkpoint of this version (format_version %d)", path, FORMAT_VERSION);
    if (state->step < 0 || state->step > INT32_MAX) return error_set(error, "%s: impossible step", path);
    state->seed = (uint64_t)seed;
    if (read_hash(object, "data_hash", path, &state->data_hash, error)) return -1;
    if (read_hash(object, "last_batch_hash", path, &state->last_batch_hash, error)) return -1;
    if (read_hash(object, "file_list_hash", path, &state->file_list_hash, error)) return -1;
    if (read_hash(object, "state_hash", path, &state->state_hash, error)) return -1;
    return read_hash(object, "config_hash", path, config_hash, error);
}

static Json *read_state(const char *path, RunState *state, uint64_t *config_hash, Error *error)
{
    size_t bytes;
    char *map = file_map(path, &bytes, error);
    Json *object = NULL;
    if (!map) return NULL;

    char *text = xmalloc(bytes + 1); /* ends with a zero, as strcmp wants */
    memcpy(text, map, bytes);
    text[bytes] = 0;
    if (!has_own_hash(text, bytes))
        error_set(error, "%s: damaged or cut short (its hash does not match)", path);
    else
        object = json_parse(text, bytes, path, error);
    free(text);
    file_unmap(map, bytes);
    if (object && read_state_fields(object, path, state, config_hash, error)) {
        json_free(object);
        return NULL;
    }
    return object;
}

static int verify_tensors(const char *path, const Json *hashes, Error *error)
{
    StFile file;
    int status = 0;
    if (st_open(&file, path, error)) return -1;
    uint64_t expected = 0, found = 0;
    if (read_hash(hashes, HEADER, path, &expected, error) || header_hash(path, &found, error))
        status = -1;
    else if (found != expected)
        status = error_set(error, "%s: its header is damaged (its hash does not match)", path);
    else if (file.count + 1 != json_count(hashes))
        status = error_set(error, "%s: not the tensors that state.json names", path);
    for (int64_t i = 0; i < file.count && !status; i++) {
        const StTensor *t = &file.tensor[i];
        status = read_hash(hashes, t->name, path, &expected, error);
        if (!status && hash64_pieces(t->data, t->bytes) != expected)
            status = error_set(error, "%s: tensor %s is damaged (its hash does not match)", path, t->name);
    }
    st_close(&file);
    return status;
}

static Json *read_config(const char *path, uint64_t expected, Error *error)
{
    size_t bytes;
    char *map = file_map(path, &bytes, error);
    Json *config = NULL;
    if (!map) return NULL;
    if (hash64(map, bytes, 0) != expected)
        error_set(error, "%s: damaged (its hash does not match)", path);
    else
        config = json_parse(map, bytes, path, error);
    file_unmap(map, bytes);
    return config;
}

int checkpoint_verify(const char *dir, bool optimizer, RunState *state, Json **config, Error *error)
{
    char *path[4];
    uint64_t config_hash = 0;
    for (int i = 0; i < 4; i++) path[i] = xformat("%s/%s", dir, FILES[i]);
    Json *object = read_state(path[3], state, &config_hash, error);
    *config = object ? read_config(path[2], config_hash, error) : NULL;
    int status = *config ? 0 : -1;
    for (int i = 0; i < (optimizer ? 2 : 1) && !status; i++)
        status = verify_tensors(path[i], json_get(object, FILES[i]), error);
    if (status) json_free(*config);
    if (status) *config = NULL;
    for (int i = 0; i < 4; i++) free(path[i]);
    json_free(object);
    return status;
}

/* The tensors of one kind of state; the file holds `kinds` of them and nothing else. */
static int load_tensors(const char *path, Model *model, const char *prefix, ShardMember member, int kinds, Error *error)
{
    StFile file;
    int status = 0;
    int64_t tensors = 0;
    if (st_open(&file, path, error)) return -1;
    for (int i = 0; i < model->table.count && !status; i++) {
        HfTensor part[HF_PARTS];
        int parts = hf_tensors(&model->spec.config, &model->table.param[i], part);
        tensors += parts;
        Tensor whole = zero_whole(&model->zero, i, member);
        for (int p = 0; p < parts && !status; p++) {
            char name[NAME_BYTES];
            tensor_name(name, prefix, &part[p]);
            const StTensor *t = st_find(&file, name);
            if (!t)
                status = error_set(error, "%s: has no tensor %s; is it a checkpoint of this model?", path, name);
            else if (hf_read(t, &part[p], whole, model->ops, error))
                status = -1;
        }
        if (!status) zero_take(&model->zero, i, member);
    }
    if (!status && file.count != tensors * kinds)
        status = error_set(error,
                           "%s: has %" PRId64 " tensors, this model %" PRId64 "; is it a checkpoint of this model?",
                           path, file.count, tensors * kinds);
    st_close(&file);
    return status;
}

int checkpoint_load(const char *dir, Model *model, bool optimizer, Error *error)
{
    char *weights = xformat("%s/%s", dir, FILES[0]), *moments = xformat("%s/%s", dir, FILES[1]);
    int status = load_tensors(weights, model, "", SHARD_MASTER, 1, error);
    if (!status && optimizer) status = load_tensors(moments, model, "m.", SHARD_M, 2, error);
    if (!status && optimizer) status = load_tensors(moments, model, "v.", SHARD_V, 2, error);
    free(weights);
    free(moments);
    return status;
}

int checkpoint_newest(const char *run_dir, char **dir, RunState *state, Json **config)
{
    StepList list = list_steps(run_dir, false);
    int found = 0;
    for (int64_t i = list.count - 1; i >= 0 && !found; i--) {
        Error error;
        *dir = step_folder(run_dir, list.step[i], "");
        found = checkpoint_verify(*dir, true, state, config, &error) == 0;
        if (found) break;
        note("skipped %s: %s", *dir, error.text);
        free(*dir);
    }
    free(list.step);
    return found;
}
