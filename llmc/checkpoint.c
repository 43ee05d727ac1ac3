/* See checkpoint.h. */
#include "checkpoint.h"

#include "file.h"
#include "hf.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char HEADER[] = "header"; /* among the hashes of a file's tensors: that of its header */
enum { FORMAT_VERSION = 2 };

/* ---- files and what is in them ---- */

static char *file_path(const char *dir, const char *name) { return xformat("%s/%s", dir, name); }
static char *model_file(const char *dir) { return file_path(dir, "model.safetensors"); }

static char *optimizer_file(const char *dir, int64_t file, int64_t files)
{
    if (files == 1) return file_path(dir, "optimizer.safetensors");
    return xformat("%s/optimizer-%05" PRId64 "-of-%05" PRId64 ".safetensors", dir, file + 1, files);
}

static const char *base_name(const char *path) { return strrchr(path, '/') + 1; }

/* What file `file` of `files` holds of parameter i of the moments: one tensor of its rows, or nothing. */
static int moment_tensor(const ParamTable *table, int i, ShardMember member, int64_t file, int64_t files, HfTensor *out)
{
    const Param *p = &table->param[i];
    int64_t row0, rows = zero_share(p, (int)file, (int)files, &row0);
    if (!rows) return 0;
    *out = (HfTensor){.row0 = row0, .rows = rows, .cols = p->cols, .rank = 2, .shape = {rows, p->cols}};
    snprintf(out->name, sizeof out->name, "%s.%s", member == SHARD_M ? "m" : "v", p->name);
    return 1;
}

static void add_hash(Json *object, const char *key, uint64_t hash)
{
    char text[17];
    snprintf(text, sizeof text, "%016" PRIx64, hash);
    json_add_string(object, key, text);
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

/* ---- writing ---- */

/* The kinds of state in the model's file, and in a file of the optimizer. */
static const ShardMember MASTER[] = {SHARD_MASTER}, MOMENTS[] = {SHARD_M, SHARD_V};

/* Tensors of parameter i in a file that this rank writes, their rows counted from the first of *from. */
static int written_tensors(const CheckpointWriter *w, int i, ShardMember member, HfTensor part[HF_PARTS], Tensor *from)
{
    const Model *model = w->model;
    const Comm *c = model->spec.sharding.comm;
    *from = w->tensor[(int)member * model->table.count + i];
    if (member == SHARD_MASTER) return hf_tensors(&model->spec.config, &model->table.param[i], part);
    int parts = moment_tensor(&model->table, i, member, c->rank, c->ranks, part);
    part[0].row0 = 0;
    return parts;
}

/* One .safetensors file: a pass over the parameter table for each kind of state; hashes into `hashes`. */
static int write_tensors(const CheckpointWriter *w, const char *path, const ShardMember *member, int count,
                         Json *hashes, Error *error)
{
    StWriter *file = st_writer_new();
    int status = 0;
    for (int pass = 0; pass < 2 && !status; pass++) { /* declare all, then stream all */
        if (pass == 1) status = st_writer_begin(file, path, error);
        for (int k = 0; k < count; k++)
            for (int i = 0; i < w->model->table.count && !status; i++) {
                HfTensor part[HF_PARTS];
                Tensor from;
                int parts = written_tensors(w, i, member[k], part, &from);
                for (int p = 0; p < parts && !status; p++) {
                    uint64_t hash;
                    if (pass == 0) {
                        st_writer_add(file, part[p].name, hf_dtype(from.dtype), part[p].rank, part[p].shape);
                        continue;
                    }
                    if (i == w->model->table.count / 2) checkpoint_test_stop("middle");
                    status = hf_write(file, &part[p], from, w->ops[member[k]], &hash, error);
                    if (!status) add_hash(hashes, part[p].name, hash);
                }
            }
    }
    uint64_t hash = 0;
    if (!status) checkpoint_test_stop("sync");
    if (!status) status = st_writer_end(file, error);
    if (!status) status = header_hash(path, &hash, error);
    if (!status) add_hash(hashes, HEADER, hash);
    st_writer_free(file);
    return status;
}

/* This rank's files; in the background, a thread's body. */
static void *write_files(void *writer)
{
    CheckpointWriter *w = writer;
    const Comm *c = w->model->spec.sharding.comm;
    char *folder = checkpoint_folder(w->run_dir, w->state.step, ".tmp");
    char *model = model_file(folder), *optimizer = optimizer_file(folder, c->rank, c->ranks);
    checkpoint_test_stop("open");
    if (c->rank == 0)
        w->status = write_tensors(w, model, MASTER, 1, json_add_object(w->hashes, base_name(model)), &w->error);
    if (!w->status)
        w->status = write_tensors(w, optimizer, MOMENTS, 2, json_add_object(w->hashes, base_name(optimizer)),
                                  &w->error);
    free(folder);
    free(model);
    free(optimizer);
    __atomic_store_n(&w->written, true, __ATOMIC_RELEASE);
    return NULL;
}

/* ---- what is written: the run's own memory, or a copy in w->memory ---- */

/* Next piece of the copy, or with no memory yet only its size; `from` NULL: another rank's. */
static Tensor take_copy(CheckpointWriter *w, size_t *used, Tensor shape, const Tensor *from)
{
    Tensor copy = shape;
    copy.data = w->memory ? w->memory + *used : NULL;
    *used += (tensor_bytes(shape) + 63) / 64 * 64;
    if (copy.data && from) w->model->ops->copy_out(copy.data, from->data, tensor_bytes(shape));
    return copy;
}

/* Fills w->tensor; without memory for the copy only counts it. All ranks call it alike. Returns its bytes. */
static size_t collect(CheckpointWriter *w, bool count_only)
{
    const Model *model = w->model;
    const Zero *zero = &model->zero;
    const Comm *c = model->spec.sharding.comm;
    bool copy_masters = w->background || zero_sharded(zero);
    size_t used = 0;
    for (int i = 0; i < model->table.count; i++) {
        Tensor whole = count_only ? zero_whole(zero, i) : zero_gather(zero, i), *t = &w->tensor[i];
        *t = whole;
        if (c->rank == 0 && copy_masters)
            *t = take_copy(w, &used, tensor_rows(whole, 0, model->table.param[i].rows), count_only ? NULL : &whole);
    }
    for (int member = SHARD_M; member <= SHARD_V; member++)
        for (int i = 0; i < model->table.count; i++) {
            int64_t row0, rows = zero_share(&model->table.param[i], c->rank, c->ranks, &row0);
            Tensor own = tensor_rows(zero_own(zero, i, (ShardMember)member), row0 - zero_slice(zero, i).row0, rows);
            Tensor *t = &w->tensor[member * model->table.count + i];
            *t = w->background ? take_copy(w, &used, own, count_only ? NULL : &own) : own;
        }
    w->ops[SHARD_MASTER] = copy_masters ? NULL : model->ops;
    w->ops[SHARD_M] = w->ops[SHARD_V] = w->background ? NULL : model->ops;
    return used;
}

size_t checkpoint_copy_bytes(const Model *model, bool background)
{
    CheckpointWriter w = {.model = model, .background = background};
    w.tensor = xcalloc(3 * (size_t)model->table.count, sizeof *w.tensor);
    size_t bytes = collect(&w, true);
    free(w.tensor);
    return bytes;
}

/* ---- from start to end: all ranks together ---- */

static int failed_elsewhere(Error *error)
{
    error_set(error, "another rank cannot write its part");
    return 1;
}

int checkpoint_start(CheckpointWriter *w, const char *run_dir, const Model *model, const RunState *state,
                     const char *config, int64_t keep, bool background, Error *error)
{
    Comm *c = model->spec.sharding.comm;
    int status = checkpoint_finish(w, error);
    if (status) return status;
    if (c->rank == 0) status = checkpoint_begin_folder(run_dir, state->step, error);
    if (comm_any(c, status != 0)) return status ? status : failed_elsewhere(error);

    CheckpointWriter before = *w;
    *w = (CheckpointWriter){.model = model, .state = *state, .keep = keep, .background = background};
    w->run_dir = xstrdup(run_dir);
    w->config = xstrdup(config);
    w->state.optimizer_files = c->ranks;
    w->hashes = json_new_object();
    w->tensor = xcalloc(3 * (size_t)model->table.count, sizeof *w->tensor);
    w->bytes = collect(w, true);
    if (w->bytes < before.bytes) w->bytes = before.bytes;
    w->memory = w->bytes > before.bytes ? xrealloc(before.memory, w->bytes) : before.memory;
    collect(w, false);
    w->in_thread = background && pthread_create(&w->thread, NULL, write_files, w) == 0;
    if (background && !w->in_thread) note("note: no thread for the checkpoint: training waits for it");
    if (!w->in_thread) write_files(w);
    return background ? 0 : checkpoint_finish(w, error);
}

bool checkpoint_ready(const CheckpointWriter *w)
{
    return !w->run_dir || __atomic_load_n(&w->written, __ATOMIC_ACQUIRE);
}

/* Every rank's hashes in `all`, on every rank. */
static int share_hashes(const CheckpointWriter *w, Json *all, Error *error)
{
    Comm *c = w->model->spec.sharding.comm;
    int status = 0;
    for (int rank = 0; rank < c->ranks; rank++) {
        char *own = json_print(w->hashes, false), *text = own;
        uint64_t bytes = strlen(own);
        c->broadcast(c, &bytes, sizeof bytes, rank);
        if (rank != c->rank) text = xmalloc(bytes);
        c->broadcast(c, text, bytes, rank);
        Json *object = json_parse(text, bytes, "hashes", error);
        if (!object) status = -1;
        for (const Json *file = json_first(object); file; file = json_next(file)) {
            Json *copy = json_add_object(all, json_key(file));
            for (const Json *hash = json_first(file); hash; hash = json_next(hash))
                json_add_string(copy, json_key(hash), json_string(hash));
        }
        json_free(object);
        if (text != own) free(text);
        free(own);
    }
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
    json_add_int(object, "optimizer_files", state->optimizer_files);
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

/* Rank 0, when all files of tensors are on the disk. */
static int complete(const CheckpointWriter *w, Json *hashes, Error *error)
{
    char *folder = checkpoint_folder(w->run_dir, w->state.step, ".tmp"), *text = NULL;
    char *config = file_path(folder, "config.json"), *state = file_path(folder, "state.json");
    int status = file_write_text(config, w->config, error);
    if (!status) text = state_text(&w->state, hashes, w->config);
    if (!status) status = file_write_text(state, text, error);
    if (!status) status = checkpoint_end_folder(w->run_dir, w->state.step, error);
    free(folder);
    free(config);
    free(state);
    free(text);
    return status;
}

static void forget(CheckpointWriter *w)
{
    free(w->run_dir);
    free(w->config);
    free(w->tensor);
    json_free(w->hashes);
    *w = (CheckpointWriter){.memory = w->memory, .bytes = w->bytes};
}

int checkpoint_finish(CheckpointWriter *w, Error *error)
{
    if (!w->run_dir) return 0;
    Comm *c = w->model->spec.sharding.comm;
    if (w->in_thread) pthread_join(w->thread, NULL);
    int status = w->status;
    if (status) error_set(error, "%s", w->error.text);
    bool failed = comm_any(c, status != 0);
    if (!failed) {
        Json *hashes = json_new_object();
        status = share_hashes(w, hashes, error);
        if (c->rank == 0 && !status) status = complete(w, hashes, error);
        json_free(hashes);
        failed = comm_any(c, status != 0);
    }
    if (c->rank == 0 && failed) {
        char *folder = checkpoint_folder(w->run_dir, w->state.step, ".tmp");
        file_delete_folder(folder, NULL);
        free(folder);
    }
    if (c->rank == 0 && !failed) checkpoint_prune(w->run_dir, w->state.step, w->keep);
    c->barrier(c);
    if (failed && !status) status = failed_elsewhere(error);
    forget(w);
    return status;
}

void checkpoint_close(CheckpointWriter *w)
{
    free(w->memory);
    *w = (CheckpointWriter){0};
}

int checkpoint_write(const char *run_dir, const Model *model, const RunState *state, const char *config, int64_t keep,
                     Error *error)
{
    CheckpointWriter w = {0};
    int status = checkpoint_start(&w, run_dir, model, state, config, keep, false, error);
    checkpoint_close(&w);
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
    if (!json_int(json_get(object, "optimizer_files"), &state->optimizer_files) || state->optimizer_files < 1 ||
        state->optimizer_files > 1 << 20)
        return error_set(error, "%s: impossible optimizer_files", path);
    state->seed = (uint64_t)seed;
    if (read_hash(object, "data_hash", path, &state->data_hash, error)) return -1;
    if (read_hash(object, "last_batch_hash", path, &state->last_batch_hash, error)) return -1;
    if (read_hash(object, "file_list_hash", path, &state->file_list_hash, error)) return -1;
    if (read_hash(object, "state_hash", path, &state->state_hash, error)) return -1;
    return read_hash(object, "config_hash", path, config_hash, error);
}

static Json *read_state(const char *path, RunState *state, uint64_t *config_hash, Error *error)
{
    char *text = file_read_text(path, error);
    Json *object = NULL;
    if (!text) return NULL;
    size_t bytes = strlen(text);
    if (!has_own_hash(text, bytes))
        error_set(error, "%s: damaged or cut short (its hash does not match)", path);
    else
        object = json_parse(text, bytes, path, error);
    free(text);
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
    char *config_path = file_path(dir, "config.json"), *state_path = file_path(dir, "state.json");
    uint64_t config_hash = 0;
    Json *object = read_state(state_path, state, &config_hash, error);
    *config = object ? read_config(config_path, config_hash, error) : NULL;
    int status = *config ? 0 : -1;
    for (int64_t i = -1; !status && i < (optimizer ? state->optimizer_files : 0); i++) {
        char *path = i < 0 ? model_file(dir) : optimizer_file(dir, i, state->optimizer_files);
        status = verify_tensors(path, json_get(object, base_name(path)), error);
        free(path);
    }
    if (status) json_free(*config);
    if (status) *config = NULL;
    free(config_path);
    free(state_path);
    json_free(object);
    return status;
}

static int no_tensor(const char *path, const char *name, Error *error)
{
    return error_set(error, "%s: has no tensor %s; is it a checkpoint of this model?", path, name);
}

static int check_count(const char *path, const StFile *file, int64_t expected, Error *error)
{
    if (file->count == expected) return 0;
    return error_set(error, "%s: has %" PRId64 " tensors, this model %" PRId64 "; is it a checkpoint of this model?",
                     path, file->count, expected);
}

static int load_masters(const char *path, Model *model, Error *error)
{
    StFile file;
    int status = 0;
    int64_t tensors = 0;
    if (st_open(&file, path, error)) return -1;
    for (int i = 0; i < model->table.count && !status; i++) {
        HfTensor part[HF_PARTS];
        int parts = hf_tensors(&model->spec.config, &model->table.param[i], part);
        tensors += parts;
        for (int p = 0; p < parts && !status; p++) {
            const StTensor *t = st_find(&file, part[p].name);
            status = t ? hf_read(t, &part[p], zero_whole(&model->zero, i), model->ops, error)
                       : no_tensor(path, part[p].name, error);
        }
        if (!status) zero_take(&model->zero, i);
    }
    if (!status) status = check_count(path, &file, tensors, error);
    st_close(&file);
    return status;
}

/* Of the rows `at` that stand in t, those that are among own's, which begin with row0. */
static int load_rows(const StTensor *t, HfTensor at, Tensor own, int64_t row0, const Ops *ops, Error *error)
{
    int64_t first = max_i64(at.row0, row0), end = min_i64(at.row0 + at.rows, row0 + own.rows);
    bool fits = t->rank == 2 && t->shape[0] == at.rows && t->shape[1] == at.cols;
    if (fits && first >= end) return 0;
    StTensor part = *t;
    if (fits) {
        part.data = (const char *)t->data + (size_t)((first - at.row0) * at.cols) * st_dtype_bytes(t->dtype);
        part.shape[0] = at.shape[0] = end - first;
        at.row0 = first - row0;
    }
    return hf_read(&part, &at, own, ops, error); /* which says what does not fit */
}

/* File `file` of `files`: this rank's rows of m and v that are in it. */
static int load_moments(const char *path, Model *model, int64_t file, int64_t files, Error *error)
{
    StFile st;
    int status = 0;
    int64_t tensors = 0;
    if (st_open(&st, path, error)) return -1;
    for (int k = 0; k < 2; k++)
        for (int i = 0; i < model->table.count && !status; i++) {
            HfTensor at;
            if (!moment_tensor(&model->table, i, MOMENTS[k], file, files, &at)) continue;
            ParamSlice slice = zero_slice(&model->zero, i);
            const StTensor *t = st_find(&st, at.name);
            tensors++;
            status = t ? load_rows(t, at, MOMENTS[k] == SHARD_M ? slice.m : slice.v, slice.row0, model->ops, error)
                       : no_tensor(path, at.name, error);
        }
    if (!status) status = check_count(path, &st, tensors, error);
    st_close(&st);
    return status;
}

int checkpoint_load(const char *dir, Model *model, int64_t optimizer_files, Error *error)
{
    char *path = model_file(dir);
    int status = load_masters(path, model, error);
    free(path);
    for (int64_t i = 0; i < optimizer_files && !status; i++) {
        path = optimizer_file(dir, i, optimizer_files);
        status = load_moments(path, model, i, optimizer_files, error);
        free(path);
    }
    return status;
}

int checkpoint_newest(const char *run_dir, char **dir, RunState *state, Json **config)
{
    for (int64_t step = checkpoint_before(run_dir, INT64_MAX); step >= 0; step = checkpoint_before(run_dir, step)) {
        Error error;
        *dir = checkpoint_folder(run_dir, step, "");
        if (checkpoint_verify(*dir, true, state, config, &error) == 0) return 1;
        note("skipped %s: %s", *dir, error.text);
        free(*dir);
    }
    return 0;
}
