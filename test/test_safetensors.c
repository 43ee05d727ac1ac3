/* safetensors.c: files as the reference implementation writes them, the writer's bytes, and headers that lie. */
#include "safetensors.h"
#include "test.h"
#include "test_files.h"

static char *folder;
static char path[4096];

/* A file of this header (padded to a multiple of 8) and `body_bytes` bytes 0, 1, 2, ... */
static void write_file(const char *header, size_t body_bytes)
{
    uint64_t length = (uint64_t)round_up((int64_t)strlen(header), 8);
    char *data = xmalloc(8 + length + body_bytes);
    memcpy(data, &length, 8);
    memset(data + 8, ' ', length);
    memcpy(data + 8, header, strlen(header));
    for (size_t i = 0; i < body_bytes; i++) data[8 + length + i] = (char)i;
    test_write_file(path, data, 8 + length + body_bytes);
    free(data);
}

static void test_reading(void)
{
    Error error = {""};
    StFile file;
    test_case("reading: names, shapes, places, metadata, in file order");
    write_file("{\"__metadata__\":{\"format\":\"pt\",\"k\":\"v\"},"
               "\"z\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[20,23]},"
               "\"a\":{\"dtype\":\"F32\",\"shape\":[2,2],\"data_offsets\":[4,20]},"
               "\"empty\":{\"dtype\":\"I64\",\"shape\":[4,0],\"data_offsets\":[20,20]},"
               "\"scalar\":{\"data_offsets\":[0,4],\"dtype\":\"F32\",\"shape\":[]}}",
               23);
    if (!CHECK(st_open(&file, path, &error) == 0, "%s", error.text)) return;
    const char *order[] = {"scalar", "a", "empty", "z"};
    CHECK(file.count == 4, "%lld tensors", (long long)file.count);
    for (int i = 0; i < 4; i++) {
        CHECK(strcmp(file.tensor[i].name, order[i]) == 0, "%d: %s", i, file.tensor[i].name);
        CHECK(st_find(&file, order[i]) == &file.tensor[i], "find %s", order[i]);
    }
    const StTensor *a = st_find(&file, "a"), *scalar = st_find(&file, "scalar"), *empty = st_find(&file, "empty");
    CHECK(a->dtype == ST_F32 && a->rank == 2 && a->shape[0] == 2 && a->shape[1] == 2 && a->bytes == 16, "a");
    CHECK(*(const char *)a->data == 4 && *(const char *)st_find(&file, "z")->data == 20, "places");
    CHECK(scalar->rank == 0 && scalar->bytes == 4, "a scalar has shape []");
    CHECK(empty->bytes == 0 && empty->shape[1] == 0, "an empty tensor");
    CHECK(!st_find(&file, "") && !st_find(&file, "b") && !st_find(&file, "zz"), "absent names");
    CHECK(strcmp(st_metadata(&file, "k"), "v") == 0 && !st_metadata(&file, "x"), "metadata");
    st_close(&file);

    test_case("reading: no tensors, no metadata");
    write_file("{}", 0);
    CHECK(st_open(&file, path, &error) == 0 && file.count == 0, "%s", error.text);
    CHECK(!st_find(&file, "a") && !st_metadata(&file, "format") && !file.metadata[0], "nothing there");
    st_close(&file);

    test_case("dtypes: names and sizes");
    const char *names[] = {"F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "U8", "I32", "I64"};
    const size_t bytes[] = {4, 2, 2, 1, 1, 1, 4, 8};
    for (int i = 0; i < ST_DTYPE_COUNT; i++) {
        char *header = xformat("{\"t\":{\"dtype\":\"%s\",\"shape\":[3],\"data_offsets\":[0,%zu]}}", names[i],
                               3 * bytes[i]);
        write_file(header, 3 * bytes[i]);
        CHECK(st_open(&file, path, &error) == 0 && file.tensor[0].dtype == (StDType)i, "%s: %s", names[i], error.text);
        st_close(&file);
        CHECK(st_dtype_bytes((StDType)i) == bytes[i] && strcmp(st_dtype_name((StDType)i), names[i]) == 0, "%s",
              names[i]);
        free(header);
    }
}

static void refuse(const char *part)
{
    Error error = {""};
    StFile file;
    bool refused = st_open(&file, path, &error) == -1;
    CHECK(refused && strstr(error.text, path) && strstr(error.text, part), "expected \"%s\": %s", part, error.text);
    if (!refused) st_close(&file);
}

#define T(dtype, shape, offsets) "{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"

static void test_lies(void)
{
    static const struct {
        const char *header, *part;
        size_t body_bytes;
    } cases[] = {
        {"{\"a\":" T("U8", "[4]", "[0,4]") ",\"b\":" T("U8", "[4]", "[3,7]") "}", "a hole or an overlap", 7},
        {"{\"a\":" T("U8", "[4]", "[0,4]") ",\"b\":" T("U8", "[4]", "[0,4]") "}", "a hole or an overlap", 4},
        {"{\"a\":" T("U8", "[4]", "[0,4]") ",\"b\":" T("U8", "[4]", "[5,9]") "}", "a hole or an overlap", 9},
        {"{\"a\":" T("U8", "[4]", "[1,5]") "}", "a hole or an overlap", 5},
        {"{\"a\":" T("U8", "[4]", "[0,4]") "}", "2 bytes after the last tensor", 6},
        {"{}", "1 bytes after the last tensor", 1},
        {"{\"a\":" T("U8", "[4]", "[0,4]") ",\"a\":" T("U8", "[4]", "[4,8]") "}", "duplicate key a", 8},
        {"{\"a\":" T("U8", "[4]", "[0,4]") "}", "outside the file", 3},
        {"{\"a\":" T("U8", "[4]", "[4,0]") "}", "outside the file", 4},
        {"{\"a\":" T("U8", "[4]", "[0,9223372036854775807]") "}", "outside the file", 4},
        {"{\"a\":" T("U8", "[4]", "[-4,0]") "}", "not [begin, end]", 4},
        {"{\"a\":" T("U8", "[4]", "[0,18446744073709551616]") "}", "not [begin, end]", 4},
        {"{\"a\":" T("U8", "[4]", "[0,4.5]") "}", "not [begin, end]", 4},
        {"{\"a\":" T("U8", "[4]", "[0]") "}", "not [begin, end]", 4},
        {"{\"a\":" T("U8", "[4]", "[0,4,4]") "}", "not [begin, end]", 4},
        {"{\"a\":" T("U8", "[5]", "[0,4]") "}", "do not fit its shape", 4},
        {"{\"a\":" T("F32", "[4]", "[0,4]") "}", "do not fit its shape", 4},
        {"{\"a\":" T("U8", "[0]", "[0,4]") "}", "do not fit its shape", 4},
        {"{\"a\":" T("U8", "[4294967296,4294967296]", "[0,0]") "}", "does not fit 63 bits", 0},
        {"{\"a\":" T("U8", "[3037000500,3037000500]", "[0,0]") "}", "does not fit 63 bits", 0},
        {"{\"a\":" T("F32", "[4611686018427387904]", "[0,0]") "}", "does not fit 63 bits", 0},
        {"{\"a\":" T("U8", "[0,4294967296,4294967296]", "[0,0]") "}", "does not fit 63 bits", 0},
        {"{\"a\":" T("U8", "[-4]", "[0,4]") "}", "not an array of at most 8 sizes", 4},
        {"{\"a\":" T("U8", "[1,1,1,1,1,1,1,1,1]", "[0,1]") "}", "not an array of at most 8 sizes", 1},
        {"{\"a\":" T("U8", "4", "[0,4]") "}", "not an array of at most 8 sizes", 4},
        {"{\"a\":" T("U8", "[\"4\"]", "[0,4]") "}", "not an array of at most 8 sizes", 4},
        {"{\"a\":" T("F4", "[8]", "[0,4]") "}", "its dtype", 4},
        {"{\"a\":{\"dtype\":7,\"shape\":[4],\"data_offsets\":[0,4]}}", "its dtype", 4},
        {"{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,4]}}", "its shape", 4},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4]}}", "its data_offsets", 4},
        {"{\"a\":[0,4]}", "not an object", 4},
        {"{\"__metadata__\":[]}", "__metadata__ is not an object", 0},
        {"{\"__metadata__\":{\"a\":\"b\",\"step\":7}}", "\"step\" is not a string", 0},
        {"{\"__metadata__\":{},\"__metadata__\":{}}", "duplicate key", 0},
        {"[]", "not a safetensors file", 0},
        {" {}", "not a safetensors file", 0},
        {"{\"a\":}", "line 1, column", 0},
        {"{} {}", "something follows", 0},
    };
    test_case("refusals: holes, overlaps, offsets, shapes, dtypes, duplicates, metadata");
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        write_file(cases[i].header, cases[i].body_bytes);
        refuse(cases[i].part);
    }

    test_case("refusals: header lengths");
    const uint64_t lengths[] = {0, 3, 9, UINT64_C(1) << 60, UINT64_MAX, UINT64_MAX - 7, INT64_MAX, 100000001};
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        char data[18] = {0};
        memcpy(data, &lengths[i], 8);
        memcpy(data + 8, "{}      ", 8);
        test_write_file(path, data, lengths[i] == 9 ? 16 : 17);
        refuse(lengths[i] == 3 ? "bytes after the last tensor" : "not a safetensors file");
    }
    test_write_file(path, "\3\0\0\0\0\0\0\0", 8);
    refuse("not a safetensors file");
    test_write_file(path, "\2\0\0", 3);
    refuse("not a safetensors file");
    uint64_t long_header = 100000001;
    char head[9] = {0};
    memcpy(head, &long_header, 8);
    head[8] = '{';
    if (test_sparse_file(path, head, 9, 100000100)) refuse("not a safetensors file");
    test_write_file(path, "", 0);
    refuse("empty");
    remove(path);
    refuse("No such file");
}

/* Writes two tensors and metadata; 0 or -1. */
static int write_two(Error *error)
{
    const int64_t shape[] = {2, 3}, none[] = {0, 5};
    const uint16_t a[6] = {1, 2, 3, 4, 5, 6};
    const float scalar = 1.5f;
    StWriter *w = st_writer_new();
    st_writer_add(w, "h.0.\"a\"", ST_BF16, 2, shape);
    st_writer_add(w, "none", ST_I64, 2, none);
    st_writer_add(w, "scalar", ST_F32, 0, NULL);
    st_writer_add_metadata(w, "step", "12");
    int result = st_writer_begin(w, path, error);
    if (result == 0) result = st_writer_data(w, a, 5, error); /* pieces need not end with a value or a tensor */
    if (result == 0) result = st_writer_data(w, (const char *)a + 5, 7, error);
    if (result == 0) result = st_writer_data(w, NULL, 0, error);
    if (result == 0) result = st_writer_data(w, &scalar, 4, error);
    if (result == 0) result = st_writer_end(w, error);
    st_writer_free(w);
    return result;
}

static void test_writing(void)
{
    Error error = {""};
    StFile file;
    size_t bytes;
    test_case("writing: the bytes, and read back");
    CHECK(write_two(&error) == 0, "%s", error.text);
    char *data = test_read_file(path, &bytes);
    static const char header[] = "{\"__metadata__\":{\"format\":\"pt\",\"step\":\"12\"},"
                                 "\"h.0.\\\"a\\\"\":{\"dtype\":\"BF16\",\"shape\":[2,3],\"data_offsets\":[0,12]},"
                                 "\"none\":{\"dtype\":\"I64\",\"shape\":[0,5],\"data_offsets\":[12,12]},"
                                 "\"scalar\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[12,16]}}";
    uint64_t length;
    memcpy(&length, data, 8);
    CHECK(length % 8 == 0 && bytes == 8 + length + 16, "%zu bytes, header %llu", bytes, (unsigned long long)length);
    CHECK(memcmp(data + 8, header, sizeof header - 1) == 0, "%.*s", (int)length, data + 8);
    for (size_t i = 8 + sizeof header - 1; i < 8 + length; i++) CHECK(data[i] == ' ', "padding");
    free(data);
    CHECK(st_open(&file, path, &error) == 0 && file.count == 3, "%s", error.text);
    const StTensor *a = st_find(&file, "h.0.\"a\""), *scalar = st_find(&file, "scalar");
    const uint16_t expected[6] = {1, 2, 3, 4, 5, 6};
    CHECK(a && a->bytes == 12 && memcmp(a->data, expected, 12) == 0, "a");
    float value = 0;
    if (CHECK(scalar, "scalar")) memcpy(&value, scalar->data, 4);
    CHECK(value == 1.5f && st_find(&file, "none")->bytes == 0, "scalar %g", value);
    CHECK(strcmp(st_metadata(&file, "format"), "pt") == 0 && strcmp(st_metadata(&file, "step"), "12") == 0, "metadata");
    st_close(&file);

    test_case("every truncation is refused");
    data = test_read_file(path, &bytes);
    for (size_t cut = 0; cut < bytes; cut++) {
        test_write_file(path, data, cut);
        refuse("");
    }
    free(data);
}

static void test_writer_failures(void)
{
    Error error = {""};
    const int64_t shape[] = {1000};
    const char *zeros = xcalloc(1, 4001);
    test_case("writing: too little, too much, no such folder");
    StWriter *w = st_writer_new();
    st_writer_add(w, "a", ST_F32, 1, shape);
    CHECK(st_writer_begin(w, path, &error) == 0, "%s", error.text);
    CHECK(st_writer_data(w, zeros, 3999, &error) == 0, "%s", error.text);
    CHECK(st_writer_end(w, &error) == -1 && strstr(error.text, "3999 bytes of tensor data written, 4000"), "%s",
          error.text);
    st_writer_free(w);
    w = st_writer_new();
    st_writer_add(w, "a", ST_F32, 1, shape);
    CHECK(st_writer_begin(w, path, &error) == 0 && st_writer_data(w, zeros, 4001, &error) == -1, "one byte too many");
    CHECK(strstr(error.text, "more tensor data than the 4000"), "%s", error.text);
    st_writer_free(w);
    w = st_writer_new();
    CHECK(st_writer_begin(w, "/nowhere/x", &error) == -1 && strstr(error.text, "/nowhere/x"), "%s", error.text);
    st_writer_free(w);
    st_writer_free(NULL);

    test_case("writing to a full disk: no room from 0 to one byte too little is enough");
    size_t whole;
    CHECK(write_two(&error) == 0, "%s", error.text);
    free(test_read_file(path, &whole));
    for (int64_t room = (int64_t)whole - 1; room >= 0; room -= 23) {
        error.text[0] = 0;
        test_disk_full(room);
        int result = write_two(&error);
        test_disk_normal();
        CHECK(result == -1 && strstr(error.text, "File too large"), "%lld bytes of room: %s", (long long)room,
              error.text);
    }
    free((void *)zeros);
}

static uint64_t read_all(const StFile *file)
{
    uint64_t hash = 0;
    for (int64_t i = 0; i < file->count; i++) {
        const StTensor *tensor = &file->tensor[i];
        hash = hash64(tensor->data, tensor->bytes, hash);
        CHECK(st_find(file, tensor->name) == tensor, "find %s", tensor->name);
    }
    return hash;
}

static void test_mutations(void)
{
    Error error = {""};
    StFile file;
    size_t bytes;
    test_case("mutated files are read within their bounds or refused");
    CHECK(write_two(&error) == 0, "%s", error.text);
    char *data = test_read_file(path, &bytes);
    int opened = 0;
    for (uint32_t i = 0; i < (test_long() ? 50000 : 1500); i++) {
        size_t length = bytes;
        char *copy = memcpy(xmalloc(bytes), data, bytes);
        test_mutate(copy, &length, 12, i);
        test_write_file(path, copy, length);
        free(copy);
        if (st_open(&file, path, &error)) continue;
        opened++;
        read_all(&file);
        st_close(&file);
    }
    CHECK(opened > 0, "some mutations are harmless");
    free(data);
}

static void test_many(void)
{
    enum { TENSORS = 5000 };
    Error error = {""};
    StFile file;
    const int64_t shape[] = {1};
    test_case("thousands of tensors, each found by name");
    StWriter *w = st_writer_new();
    for (int i = 0; i < TENSORS; i++) {
        char *name = xformat("model.layers.%d.weight", i * 7919 % TENSORS);
        st_writer_add(w, name, ST_I32, 1, shape);
        free(name);
    }
    CHECK(st_writer_begin(w, path, &error) == 0, "%s", error.text);
    for (int32_t i = 0; i < TENSORS; i++) CHECK(st_writer_data(w, &i, 4, &error) == 0, "%s", error.text);
    CHECK(st_writer_end(w, &error) == 0, "%s", error.text);
    st_writer_free(w);
    CHECK(st_open(&file, path, &error) == 0 && file.count == TENSORS, "%s", error.text);
    for (int i = 0; i < TENSORS; i++) {
        char *name = xformat("model.layers.%d.weight", i * 7919 % TENSORS);
        const StTensor *tensor = st_find(&file, name);
        int32_t value = -1;
        if (tensor) memcpy(&value, tensor->data, 4);
        CHECK(value == i, "%s: %d", name, value);
        free(name);
    }
    st_close(&file);
}

static void test_large_file(void)
{
    Error error = {""};
    StFile file;
    test_case("places beyond 4 GiB");
    char header[8 + 160];
    uint64_t length = 160;
    memset(header, ' ', sizeof header);
    memcpy(header, &length, 8);
    static const char json[] = "{\"big\":" T("U8", "[5000000000]", "[0,5000000000]") ",\"end\":" T(
        "U8", "[2]", "[5000000000,5000000002]") "}";
    memcpy(header + 8, json, sizeof json - 1);
    if (!test_sparse_file(path, header, sizeof header, (int64_t)sizeof header + INT64_C(5000000002))) {
        test_skip("no sparse files here");
        return;
    }
    FILE *stream = fopen(path, "r+b");
    fseeko(stream, -2, SEEK_END);
    fwrite("ok", 1, 2, stream);
    fclose(stream);
    CHECK(st_open(&file, path, &error) == 0, "%s", error.text);
    const StTensor *end = st_find(&file, "end");
    CHECK(end && memcmp(end->data, "ok", 2) == 0 && st_find(&file, "big")->bytes == 5000000000u, "places");
    st_close(&file);
}

int main(void)
{
    folder = test_folder();
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    test_reading();
    test_lies();
    test_writing();
    test_writer_failures();
    test_mutations();
    test_many();
    test_large_file();
    test_folder_remove(folder);
    return test_done();
}
